//! Jobs of the drivers of forward passes and input gradients.

use super::geometry::{Correlation, Dims};
use super::method::Method;
use super::pieces::Pieces;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;
use crate::kernel::work::{SERIAL, deal};

/// Number of tasks of a call with enough work, for balance among threads.
const TASKS: usize = 32;
/// Minimum outputs of a task where several tasks share a tile for balance: each task copies the
/// tile.
pub(super) const OUTPUTS: usize = 32;
/// Strips of a tile's row, if the field has as many: long rows suit the TLB and prefetchers.
pub(super) const STRIPS: usize = 10;

/// Channels of the source in a block: those of `factors` factors, or all of them if sums are
/// rounded when they are stored.
pub(super) fn block<E: Element, P: Products<E>>(factors: usize, inputs: usize) -> usize {
    if size_of::<P::Number>() == size_of::<E>() {
        (factors.max(1) * P::NUMBERS).min(inputs)
    } else {
        inputs
    }
}

/// Correlations of the same source whose results are one output or parts of it. Sums have type `E`,
/// numbers in memory type `N`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job<'a, E, N> {
    /// The correlations. Their results do not overlap.
    pub parts: &'a [Correlation],
    /// Groups of channels.
    pub groups: usize,
    /// Channels of the source, per group.
    pub inputs: usize,
    /// Channels of the output, per group.
    pub outputs: usize,
    /// Batch size.
    pub batch: usize,
    /// The spatial shape of the output.
    pub shape: Dims,
    /// The source.
    pub pieces: &'a Pieces<'a, N>,
    /// Bias of every output channel of all groups.
    pub bias: Option<&'a [E]>,
    /// Method of computing sums.
    pub method: Method,
}

impl<E: Element, N: Sync> Job<'_, E, N> {
    /// Number of elements of the output.
    pub(crate) fn len(&self) -> usize {
        self.batch * self.groups * self.outputs * self.cells()
    }

    /// Number of cells of a channel of the output.
    pub(super) fn cells(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of multiplications of a part.
    pub(super) fn products(&self, part: &Correlation) -> usize {
        let results: usize = part.count.iter().product();
        results * self.batch * self.groups * self.outputs * self.inputs * part.taps.len()
    }

    /// Number of tasks worth creating for a part, for each sample and group; at least one.
    pub(super) fn tasks(&self, part: &Correlation) -> usize {
        let tasks = (self.products(part) / SERIAL).clamp(1, TASKS);
        tasks.div_ceil(self.batch * self.groups)
    }

    /// Sample, group, tile and range of outputs of a task; the index runs over them from slow to
    /// fast.
    pub(super) fn place(&self, index: usize, [tiles, ranges]: [usize; 2]) -> [usize; 4] {
        let (rest, range) = (index / ranges, index % ranges);
        let (field, tile) = (rest / tiles, rest % tiles);
        [field / self.groups, field % self.groups, tile, range]
    }

    /// Runs the tasks of a part.
    pub(super) fn run_tasks(&self, part: &Correlation, tasks: usize, run: impl Fn(usize) + Sync) {
        deal(tasks, self.products(part), run);
    }
}
