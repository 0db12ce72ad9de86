//! Maps from the cells of one grid to those of another, dim by dim, on shards.
//!
//! Every output is a weighted sum, or the maximum, of some cells. A map to fewer cells runs in two
//! stages: each rank combines those of its own cells that belong to an output, and the rank that
//! owns the output combines these parts. Ranks thus send one part for each output that they share,
//! however many cells it has. A map to more cells moves the cells first, because there are fewer of
//! them. Cells beyond an end of a periodic dim come from its other end by the same exchange.

mod bands;
mod largest;
mod maximum;
mod stages;
mod weighted;

use std::cmp::Reverse;
use std::hash::Hash;
use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::ops::{self, Operator};
use halocline_core::plan::{ExchangePlan, Need, Source};
use halocline_core::{Boundary, DeviceMesh, Layout, Result, ShardTensor};

pub(crate) use maximum::Maximum;
use stages::Stages;
pub(crate) use weighted::Weighted;

/// Cells of an output, in order, with their weights.
pub(crate) type Taps = Vec<(usize, f64)>;

/// Map between grids in one dim, with at least one cell for every output.
pub(crate) type Map = Vec<Taps>;

/// Cells of an output, in order, with their weights; cells beyond an end of a dim are those at its
/// other end.
pub(crate) type TapsAround = Vec<(isize, f64)>;

/// Map of one dim of a field.
#[derive(Debug)]
pub(crate) struct DimMap {
    dim: usize,
    /// Map from cells that are counted from `before` cells before the first of the dim.
    map: Map,
    /// Number of cells before the first, which are those at the other end.
    before: usize,
}

impl DimMap {
    /// Creates a map of the cells of a dim.
    pub(crate) fn new(dim: usize, map: Map) -> Self {
        Self {
            dim,
            map,
            before: 0,
        }
    }

    /// Creates a map of a dim that may be periodic.
    pub(crate) fn around(dim: usize, outputs: Vec<TapsAround>) -> Self {
        let cells = outputs.iter().flatten().map(|(cell, _)| *cell);
        let first = cells.min().unwrap_or(0).min(0);
        let moved = |(cell, weight): (isize, f64)| ((cell - first) as usize, weight);
        let map = outputs.into_iter();
        Self {
            dim,
            map: map
                .map(|taps| taps.into_iter().map(moved).collect())
                .collect(),
            before: first.unsigned_abs(),
        }
    }

    /// Map of the cells of the dim, of `size` cells, without those beyond its ends.
    pub(crate) fn wrapped(&self, size: usize) -> Map {
        let moved = self.before.next_multiple_of(size) - self.before;
        let inside = |(cell, weight): &(usize, f64)| ((cell + moved) % size, *weight);
        let outputs = self.map.iter();
        outputs
            .map(|taps| taps.iter().map(inside).collect())
            .collect()
    }
}

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

    /// Runs this first stage, and then the second one.
    ///
    /// # Errors
    /// A failure of communication.
    fn then<const D: usize>(
        &self,
        x: ShardTensor<D>,
        operator: &'static str,
        rest: &Rest<Self>,
    ) -> Result<Tensor<D>> {
        in_stages(self, x, operator, rest)
    }
}

/// Second stage: layout of the cells of the middle stage, their exchange, and the map from them to
/// outputs.
pub(crate) struct Rest<S> {
    middle: Layout,
    exchange: Arc<ExchangePlan>,
    stage: S,
}

/// Work of one rank.
struct Plan<S> {
    /// Maps the rank's own cells to those of the middle stage.
    local: S,
    /// `None` if the first stage computes the outputs on every rank.
    rest: Option<Rest<S>>,
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
    maps: impl FnOnce() -> Vec<DimMap>,
) -> Result<ShardTensor<D>>
where
    Key: Hash + Eq + Send + 'static,
{
    x.require_resolved(operator)?;
    let key = (operator, x.layout().clone(), key);
    let make = |(_, layout, _): &(_, Layout, Key)| Ok(Plan::<S>::new(layout, x.mesh(), maps()));
    let plan = x.mesh().cache().get_or_make(key, make)?;
    let mesh = x.mesh().clone();
    let local = match &plan.rest {
        None => combine(&plan.local, x.into_local()),
        Some(rest) => plan.local.then(x, operator, rest)?,
    };
    Ok(ShardTensor::from_parts(local, plan.output.clone(), mesh))
}

/// Runs both stages one after the other.
fn in_stages<const D: usize, S: Combine>(
    first: &S,
    x: ShardTensor<D>,
    operator: &'static str,
    rest: &Rest<S>,
) -> Result<Tensor<D>> {
    let (local, _, mesh) = x.into_parts();
    let parts = ShardTensor::from_parts(combine(first, local), rest.middle.clone(), mesh);
    Ok(combine(
        &rest.stage,
        parts.run_plan(operator, &rest.exchange)?,
    ))
}

fn combine<const D: usize, S: Combine>(stage: &S, local: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(ops::apply(stage.clone(), [local.into_dispatch()]))
}

impl<S: Combine> Plan<S> {
    fn new(layout: &Layout, mesh: &DeviceMesh, mut maps: Vec<DimMap>) -> Self {
        // Maps to fewer cells first, then the map of the last dim (along which maxima are slowest),
        // then maps to more cells.
        let shape = layout.shape();
        maps.sort_by_key(|DimMap { dim, map, .. }| {
            let turn = match *dim + 1 == shape.len() {
                true => 1,
                false if map.len() < shape[*dim] => 0,
                false => 2,
            };
            (turn, Reverse(*dim))
        });
        let position = mesh.position();
        let moves = maps.iter().any(|map| layout.is_sharded(map.dim));
        let stages = maps.iter();
        let stages: Vec<(usize, Stages)> = stages
            .map(|map| (map.dim, Stages::new(map, layout.extents(map.dim), moves)))
            .collect();
        let after = |extents: fn(&Stages) -> &[usize]| {
            stages.iter().fold(layout.clone(), |layout, (dim, stages)| {
                layout.resized(*dim, extents(stages).to_vec())
            })
        };
        let (middle, output) = (after(|s| &s.middle), after(|s| &s.outputs));
        let first = stages.iter().filter(|(_, stages)| !stages.local.is_empty());
        let local =
            first.map(|(dim, stages)| (*dim, stages.local[layout.part(*dim, position)].clone()));
        let local = S::new(local.collect());
        let second =
            |(dim, stages): &&(usize, Stages)| layout.is_sharded(*dim) || stages.local.is_empty();
        let second: Vec<&(usize, Stages)> = stages.iter().filter(second).collect();
        let rest = moves.then(|| {
            let need_of = |position: usize| {
                let held = middle.local_box(position);
                let ranges = held.ranges().iter();
                let ranges = ranges.map(|cells| cells.start as isize..cells.end as isize);
                let mut ranges: Vec<_> = ranges.collect();
                for (dim, stages) in &second {
                    ranges[*dim] = stages.reach(&output.local_box(position).ranges()[*dim]);
                }
                let around = vec![[Boundary::Periodic; 2]; ranges.len()];
                Need::within(middle.shape(), &ranges, &around)
            };
            let exchange = mesh.exchange_plan(Source::Layout(&middle), need_of);
            let outputs = output.local_box(position);
            let rest = second
                .iter()
                .map(|(dim, stages)| (*dim, stages.rest_of(&outputs.ranges()[*dim])));
            Rest {
                middle: middle.clone(),
                exchange: Arc::new(exchange),
                stage: S::new(rest.collect()),
            }
        });
        Self {
            local,
            rest,
            output,
        }
    }
}
