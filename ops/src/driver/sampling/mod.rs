//! Maps from the cells of one grid to those of another, dim by dim, on shards.
//!
//! Every output is a weighted sum, or the maximum, of some cells. A map to fewer cells runs in two
//! stages: each rank combines those of its own cells that belong to an output, and the rank that
//! owns the output combines these parts. Ranks thus send one part for each output that they share,
//! however many cells it has. A map to more cells moves the cells first, because there are fewer of
//! them.

mod bands;
mod maximum;
mod stages;
mod weighted;

use std::cmp::Reverse;
use std::hash::Hash;
use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::ops::{self, Operator};
use halocline_core::{DeviceMesh, ExchangePlan, Layout, Need, Result, ShardTensor, Source};

use super::place::in_place;
pub(crate) use maximum::Maximum;
use stages::Stages;
pub(crate) use weighted::Weighted;

/// Cells of an output, in order, with their weights.
pub(crate) type Taps = Vec<(usize, f64)>;

/// Map between grids in one dim, with at least one cell for every output.
pub(crate) type Map = Vec<Taps>;

/// Map to `outputs` means over areas of the field: output `i` of `m` covers `⌊i·n/m⌋..⌈(i+1)·n/m⌉`.
pub(crate) fn areas(size: usize, outputs: usize) -> Map {
    let area = |output: usize| {
        let cells = output * size / outputs..((output + 1) * size).div_ceil(outputs);
        let weight = 1.0 / cells.len() as f64;
        cells.map(|cell| (cell, weight)).collect()
    };
    (0..outputs).map(area).collect()
}

/// Operator on one shard that combines the cells of outputs.
pub(crate) trait Combine: Operator + Clone {
    /// Creates the operator for maps of these dims, which come in the order in which they are best
    /// applied.
    fn new(maps: Vec<(usize, Map)>) -> Self;
}

/// Work of one rank.
struct Plan<S> {
    /// Maps the rank's own cells to those of the middle stage.
    local: S,
    /// Layout of the middle stage, exchange of its cells, and the map from them to outputs; `None`
    /// if the first stage computes the outputs on every rank.
    rest: Option<(Layout, Arc<ExchangePlan>, S)>,
    output: Layout,
}

/// Applies the maps of several dims, which `maps` returns, to a sharded tensor. `key` holds
/// everything that they depend on apart from the layout.
///
/// An output belongs to the rank that holds its middle cell.
///
/// # Errors
/// Partial values; a failure of communication.
pub(crate) fn sampled<const D: usize, S: Combine, Key>(
    x: ShardTensor<D>,
    operator: &'static str,
    key: Key,
    maps: impl FnOnce() -> Vec<(usize, Map)>,
) -> Result<ShardTensor<D>>
where
    Key: Hash + Eq + Send + 'static,
{
    x.require_resolved(operator)?;
    let key = (operator, x.layout().clone(), key);
    let make = |(_, layout, _): &(_, Layout, Key)| Ok(Plan::<S>::new(layout, x.mesh(), maps()));
    let plan = x.mesh().cache().get_or_make(key, make)?;
    let (local, _, mesh) = x.into_parts();
    let local = combine(&plan.local, local);
    let local = match &plan.rest {
        None => local,
        Some((middle, exchange, rest)) => {
            let parts = ShardTensor::from_parts(local, middle.clone(), mesh.clone());
            combine(rest, parts.run_plan(operator, exchange)?)
        }
    };
    Ok(ShardTensor::from_parts(local, plan.output.clone(), mesh))
}

fn combine<const D: usize, S: Combine>(stage: &S, local: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(ops::apply(stage.clone(), [local.into_dispatch()]))
}

impl<S: Combine> Plan<S> {
    fn new(layout: &Layout, mesh: &DeviceMesh, mut maps: Vec<(usize, Map)>) -> Self {
        // Maps to fewer cells first, then the map of the last dim (along which maxima are slowest),
        // then maps to more cells.
        let shape = layout.shape();
        maps.sort_by_key(|(dim, map)| {
            let turn = match *dim + 1 == shape.len() {
                true => 1,
                false if map.len() < shape[*dim] => 0,
                false => 2,
            };
            (turn, Reverse(*dim))
        });
        let position = mesh.position();
        let moves = maps.iter().any(|(dim, _)| layout.is_sharded(*dim));
        let stages: Vec<(usize, Stages)> = maps
            .into_iter()
            .map(|(dim, map)| (dim, Stages::new(map, layout.extents(dim), moves)))
            .collect();
        let extents = |stage: fn(&Stages) -> &[usize]| {
            let mut extents = layout.all_extents().to_vec();
            for (dim, stages) in &stages {
                extents[*dim] = stage(stages).to_vec();
            }
            layout.derive(layout.placements().to_vec(), extents)
        };
        let (middle, output) = (extents(|s| &s.middle), extents(|s| &s.outputs));
        let first = stages.iter().filter(|(_, stages)| !stages.local.is_empty());
        let local =
            first.map(|(dim, stages)| (*dim, stages.local[layout.part(*dim, position)].clone()));
        let local = S::new(local.collect());
        let second =
            |(dim, stages): &&(usize, Stages)| layout.is_sharded(*dim) || stages.local.is_empty();
        let second: Vec<&(usize, Stages)> = stages.iter().filter(second).collect();
        let rest = moves.then(|| {
            let need_of = |position: usize| {
                let mut ranges = middle.local_box(position).ranges().to_vec();
                for (dim, stages) in &second {
                    ranges[*dim] = stages.reach(&output.local_box(position).ranges()[*dim]);
                }
                let runs = ranges.iter().zip(middle.shape());
                let runs: Vec<_> = runs.map(|(cells, size)| in_place(cells, *size)).collect();
                Need::product(ranges.iter().map(ExactSizeIterator::len).collect(), &runs)
            };
            let exchange = mesh.exchange_plan(Source::Layout(&middle), need_of);
            let outputs = output.local_box(position);
            let rest = second
                .iter()
                .map(|(dim, stages)| (*dim, stages.rest_of(&outputs.ranges()[*dim])));
            (middle.clone(), Arc::new(exchange), S::new(rest.collect()))
        });
        Self {
            local,
            rest,
            output,
        }
    }
}
