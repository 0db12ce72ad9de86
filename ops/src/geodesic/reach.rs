//! Cells of one grid within a geodesic radius of cells of another: their rows, and their way to the
//! ranks that need them.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::plan::{Need, segments};
use halocline_core::{Boundary, Error, Layout, Placement, Result, Shard, ShardTensor};

use super::filter::rows;
use crate::driver::place::part_ranges;
use crate::spectral::whole;
use crate::sphere::SphereGrid;

/// Direction between two grids: the number of longitudes of the coarser one divides that of the
/// finer one.
#[derive(Clone, Copy, Debug)]
pub(super) enum Toward {
    /// To a grid that is coarser, or the same.
    Coarser,
    Finer,
}

/// Input rows within reach of output rows, between two grids.
#[derive(Clone)]
pub(super) struct Reach {
    /// `[latitudes, longitudes]` of input and output.
    pub(super) sizes: [[usize; 2]; 2],
    pub(super) radius: f64,
    /// Slightly more than the radius, so that points at the radius are included however they are
    /// rounded.
    pub(super) cutoff: f64,
    rows: Arc<[Range<usize>]>,
}

impl fmt::Debug for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [input, output] = self.sizes;
        write!(f, "{input:?} to {output:?} within {:.4}", self.cutoff)
    }
}

impl Reach {
    /// Reach within a radius, by default the largest distance between adjacent latitudes of the
    /// coarser grid.
    ///
    /// # Errors
    /// Fails for a grid without cells, for a number of longitudes of the coarser grid that does not
    /// divide that of the finer one, and for a radius that is not positive.
    pub(super) fn new(
        operator: &str,
        sizes @ [input, output]: [[usize; 2]; 2],
        grids: [SphereGrid; 2],
        radius: Option<f64>,
        toward: Toward,
    ) -> Result<Self> {
        let (cosines, _) = grids[0].quadrature(input[0])?;
        let (outputs, _) = grids[1].quadrature(output[0])?;
        let (input, output) = (
            ("input", input[1], &cosines),
            ("output", output[1], &outputs),
        );
        let (coarser, finer) = match toward {
            Toward::Coarser => (output, input),
            Toward::Finer => (input, output),
        };
        if coarser.1 == 0 || finer.1 == 0 || !finer.1.is_multiple_of(coarser.1) {
            let message = format!(
                "{} longitudes of the {} for {} of the {}; expected a divisor",
                coarser.1, coarser.0, finer.1, finer.0
            );
            return Err(Error::operator(operator, message));
        }
        let gaps = coarser
            .2
            .windows(2)
            .map(|pair| pair[1].acos() - pair[0].acos());
        let radius = radius.unwrap_or_else(|| gaps.fold(0.0, f64::max));
        if radius <= 0.0 || !radius.is_finite() {
            let message = format!("radius {radius}; expected a positive angle");
            return Err(Error::operator(operator, message));
        }
        let cutoff = radius * 1.001;
        let rows = outputs.iter().map(|output| rows(&cosines, *output, cutoff));
        Ok(Self {
            sizes,
            radius,
            cutoff,
            rows: rows.collect(),
        })
    }

    /// Requires a field on the input grid.
    pub(super) fn check(&self, operator: &str, shape: &[usize; 4]) -> Result<()> {
        Self::check_size(operator, shape, self.sizes[0])
    }

    /// Requires a field on the output grid.
    pub(super) fn check_output(&self, operator: &str, shape: &[usize; 4]) -> Result<()> {
        Self::check_size(operator, shape, self.sizes[1])
    }

    fn check_size(
        operator: &str,
        shape: &[usize; 4],
        [latitudes, longitudes]: [usize; 2],
    ) -> Result<()> {
        if shape[2..] == [latitudes, longitudes] {
            return Ok(());
        }
        let message = format!("{shape:?}; expected [batch, channels, {latitudes}, {longitudes}]");
        Err(Error::operator(operator, message))
    }

    /// Makes longitude whole, since rows near the poles reach all of it.
    pub(super) fn pencil(
        &self,
        x: ShardTensor<4>,
        operator: &'static str,
    ) -> Result<ShardTensor<4>> {
        x.require_resolved(operator)?;
        whole(x, 3, &[1], &[2], operator)
    }

    /// Input rows within reach of a range of output rows.
    pub(super) fn inputs(&self, outputs: &Range<usize>) -> Range<usize> {
        let reached = || {
            self.rows[outputs.clone()]
                .iter()
                .filter(|rows| !rows.is_empty())
        };
        let first = reached().map(|rows| rows.start).min().unwrap_or(0);
        first..reached().map(|rows| rows.end).max().unwrap_or(first)
    }

    /// Extents of output rows: those of the input rows if there are as many, otherwise as even as
    /// possible.
    pub(super) fn output_rows(&self, layout: &Layout) -> Result<Vec<usize>> {
        let [[latitudes, _], [outputs, _]] = self.sizes;
        if outputs == latitudes {
            return Ok(layout.extents(2).to_vec());
        }
        let mut shape = layout.shape().to_vec();
        shape[2] = outputs;
        let layout = Layout::new(layout.mesh(), &shape, layout.placements())?;
        Ok(layout.extents(2).to_vec())
    }

    /// Output rows at a position of the mesh.
    pub(super) fn outputs(&self, layout: &Layout, position: usize) -> Result<Range<usize>> {
        let (rows, part) = (self.output_rows(layout)?, layout.part(2, position));
        let start = rows[..part].iter().sum();
        Ok(start..start + rows[part])
    }

    /// Whether the output rows of every rank reach any input rows.
    pub(super) fn reaches_all(&self, layout: &Layout) -> Result<bool> {
        let rows = self.output_rows(layout)?;
        Ok(part_ranges(&rows).all(|rows| !self.inputs(&rows).is_empty()))
    }

    /// Assembles the cells within reach of the output rows of this rank.
    pub(super) fn assemble(&self, x: &ShardTensor<4>, operator: &'static str) -> Result<Tensor<4>> {
        let layout = x.layout();
        let outputs = (0..x.mesh().size()).map(|position| self.outputs(layout, position));
        let outputs: Vec<Range<usize>> = outputs.collect::<Result<_>>()?;
        x.assemble(operator, (self.sizes, self.rows.clone()), |position| {
            let held = layout.local_box(position);
            let inputs = self.inputs(&outputs[position]);
            let mut shape = held.shape();
            shape[2] = inputs.len();
            let runs = held.ranges().iter().enumerate().map(|(dim, range)| {
                let range = if dim == 2 { &inputs } else { range };
                let range = range.start as isize..range.end as isize;
                segments(range, layout.shape()[dim], Boundary::Zeros, Boundary::Zeros)
            });
            Need::product(shape, &runs.collect::<Vec<_>>())
        })
    }

    /// Redistributes a result to the placements of the input, with its extents where sizes are
    /// equal. Channels stay as they are.
    pub(super) fn restore(&self, y: ShardTensor<4>, before: &Layout) -> Result<ShardTensor<4>> {
        let pairs = before.placements().iter().zip(y.placements());
        let placements = pairs.map(|(before, found)| match (before, found) {
            (Shard(1), _) | (_, Shard(1)) => *found,
            _ => *before,
        });
        let placements: Vec<Placement> = placements.collect();
        let mut target = Layout::new(before.mesh(), &y.dims(), &placements)?;
        if target.is_sharded(1) {
            target = target.with_extents(1, y.layout().extents(1))?;
        }
        for dim in [0, 2, 3] {
            if y.dims()[dim] == before.shape()[dim] {
                target = target.with_extents(dim, before.extents(dim))?;
            }
        }
        y.try_redistribute(&target)
    }
}
