//! Edges of the targets of one part, with precomputed data for reductions.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::tensor::{Device, Int, Tensor};

use crate::kernel::ints::Ints;
use crate::kernel::taken::Places;

/// Targets of one part, and their edges. A part without targets has a placeholder without edges.
#[derive(Debug)]
pub(super) struct Part {
    /// Range of edges of each target.
    targets: Vec<Range<usize>>,
    of_edge: Arc<Places>,
    blocks: OnceLock<Blocks>,
    counts: Ints,
}

/// Plan that reduces the edges of each target block by block, until one cell is left.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Number of cells per block: the average number of edges per target, so that the blocks of a
    /// level hold at most twice as many cells as there are edges.
    pub(super) width: usize,
    /// Cells of the blocks of each level. A block that is too long for its target repeats the
    /// target's last cell.
    pub(super) levels: Vec<Arc<Places>>,
    /// Final cell of each target, which holds its extremum; any cell for a target without edges.
    pub(super) left: Arc<Places>,
}

impl Part {
    pub(super) fn new(mut targets: Vec<Range<usize>>) -> Self {
        targets.resize(targets.len().max(1), 0..0);
        let of_edge = targets.iter().enumerate();
        let of_edge = of_edge.flat_map(|(target, edges)| std::iter::repeat_n(target, edges.len()));
        let mut of_edge: Vec<usize> = of_edge.collect();
        of_edge.resize(of_edge.len().max(1), 0);
        Self {
            targets,
            of_edge: Places::new(of_edge),
            blocks: OnceLock::new(),
            counts: Ints::default(),
        }
    }

    /// Number of targets.
    pub(super) fn len(&self) -> usize {
        self.targets.len()
    }

    /// Range of edges of each target.
    pub(super) fn targets(&self) -> &[Range<usize>] {
        &self.targets
    }

    /// Ranges of edges by target that cover all edges, or the placeholder for an empty list.
    pub(super) fn ranges(&self) -> &[Range<usize>] {
        static PLACEHOLDER: Range<usize> = 0..1;
        if self.targets.iter().all(Range::is_empty) {
            return std::slice::from_ref(&PLACEHOLDER);
        }
        &self.targets
    }

    /// Target of each edge. The placeholder for an empty list of edges belongs to the first target.
    pub(super) fn of_edge(&self) -> &Arc<Places> {
        &self.of_edge
    }

    /// Number of edges of each target.
    pub(super) fn counts(&self, device: &Device) -> Tensor<1, Int> {
        let counts = self.targets.iter().map(ExactSizeIterator::len);
        self.counts.on(device, counts)
    }

    pub(super) fn blocks(&self) -> &Blocks {
        self.blocks.get_or_init(|| Blocks::new(&self.targets))
    }
}

impl Blocks {
    fn new(targets: &[Range<usize>]) -> Self {
        let edges = targets.iter().map(ExactSizeIterator::len).sum::<usize>();
        let with_edges = targets.iter().filter(|edges| !edges.is_empty()).count();
        let width = edges.div_ceil(with_edges.max(1)).max(2);
        let (mut left, mut levels, mut cells) = (targets.to_vec(), Vec::new(), edges.max(1));
        while left.iter().any(|cells| cells.len() > 1) {
            let starts = left.iter().flat_map(|cells| {
                let last = cells.end.saturating_sub(1);
                cells.clone().step_by(width).map(move |start| (start, last))
            });
            let places = starts
                .flat_map(|(start, last)| (start..start + width).map(move |cell| cell.min(last)));
            let places: Vec<usize> = places.collect();
            cells = places.len() / width;
            levels.push(Places::new(places));
            let mut end = 0;
            for cells in &mut left {
                let start = end;
                end += cells.len().div_ceil(width);
                *cells = start..end;
            }
        }
        let left = left
            .iter()
            .map(|found| found.start.min(cells - 1))
            .collect();
        Self {
            width,
            levels,
            left: Places::new(left),
        }
    }
}
