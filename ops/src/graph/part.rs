//! The edges of the targets of one part, and what reductions need to know of them: made once.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::kernel::taken::Places;

/// The targets of one part, and their edges.
#[derive(Debug)]
pub(super) struct Part {
    /// The edges of each target.
    targets: Vec<Range<usize>>,
    of_edge: Arc<Places>,
    blocks: OnceLock<Blocks>,
}

/// How the edges of each target are reduced block by block, until one cell is left.
#[derive(Debug)]
pub(super) struct Blocks {
    /// The cells of a block. Blocks are as wide as targets have edges on average, so that all of a level are at most twice as many
    /// cells as the edges.
    pub(super) width: usize,
    /// The cells of the blocks of each level. The last one of a target once more where a block is longer than what is left.
    pub(super) levels: Vec<Arc<Places>>,
    /// The last cell of each target, which holds its extremum; any cell for a target without edges.
    pub(super) left: Arc<Places>,
    /// The targets without edges; a cell that stands for no targets is one.
    pub(super) alone: Vec<bool>,
}

impl Part {
    pub(super) fn new(targets: Vec<Range<usize>>) -> Self {
        let of_edge = targets.iter().enumerate();
        let of_edge = of_edge.flat_map(|(target, edges)| std::iter::repeat_n(target, edges.len()));
        let mut of_edge: Vec<usize> = of_edge.collect();
        of_edge.resize(of_edge.len().max(1), 0);
        Self {
            targets,
            of_edge: Places::new(of_edge),
            blocks: OnceLock::new(),
        }
    }

    /// The number of targets; a cell stands for none.
    pub(super) fn len(&self) -> usize {
        self.targets.len().max(1)
    }

    /// The target of each edge. A cell that stands for no edges belongs to the first.
    pub(super) fn of_edge(&self) -> &Arc<Places> {
        &self.of_edge
    }

    /// The number of edges of each target.
    pub(super) fn counts(&self) -> impl Iterator<Item = usize> {
        let counts = self.targets.iter().map(ExactSizeIterator::len);
        counts.chain(std::iter::repeat(0)).take(self.len())
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
        let mut alone: Vec<bool> = left.iter().map(Range::is_empty).collect();
        let mut left: Vec<usize> = left
            .iter()
            .map(|found| found.start.min(cells - 1))
            .collect();
        let count = targets.len().max(1);
        left.resize(count, 0);
        alone.resize(count, true);
        Self {
            width,
            levels,
            left: Places::new(left),
            alone,
        }
    }
}
