//! The order in which a copy goes through cells, so that the cache lines of both sides are used while they are near.

use std::ops::Range;

use super::transpose::{SIDE, Transpose};

/// Elements of a task.
pub(super) const TASK: usize = 1 << 14;

/// A dim of a copy: its size, and the strides of the result and of the cells.
#[derive(Clone, Copy)]
pub(super) struct Dim {
    pub(super) size: usize,
    pub(super) to: isize,
    pub(super) from: isize,
}

impl Dim {
    const ONE: Self = Self {
        size: 1,
        to: 1,
        from: 1,
    };

    /// Whether cells are next to each other in both tensors.
    pub(super) fn in_one_piece(self) -> bool {
        [self.to, self.from] == [1, 1]
    }
}

/// The order of a copy's dims.
pub(super) struct Walk {
    pub(super) outer: Vec<Dim>,
    pub(super) slow: Dim,
    pub(super) fast: Dim,
}

impl Walk {
    /// Along the dim in which cells are nearest to each other, within blocks of the innermost dim of the result, so that the
    /// cache lines of both are used while they are near; the other way round if that dim is short.
    pub(super) fn through(mut dims: Vec<Dim>) -> Self {
        const SHORT: usize = 16;
        // What is repeated is near only where it is written side by side.
        let distance = |dim: &Dim| (dim.from == 0 && dim.to != 1, dim.from.unsigned_abs());
        let nearest = (0..dims.len()).min_by_key(|dim| distance(&dims[*dim]));
        let mut fast = dims.remove(nearest.expect("a dim"));
        let mut slow = match nearest {
            Some(0) => Dim::ONE,
            _ => dims.remove(0),
        };
        if fast.size < SHORT.min(slow.size) {
            std::mem::swap(&mut fast, &mut slow);
        }
        Self {
            outer: dims,
            slow,
            fast,
        }
    }

    /// A block of so many cells along the slow and the fast dim, if they lie next to each other along one of them in the result
    /// and along the other one where they are read, and are a tile at least.
    pub(super) fn transpose(&self, [slow, fast]: [usize; 2]) -> Option<Transpose> {
        let dims = [(self.slow, slow), (self.fast, fast)];
        if slow < SIDE || fast < SIDE {
            return None;
        }
        let [reads, writes] = match dims.map(|(dim, _)| [dim.to, dim.from]) {
            [[1, _], [_, 1]] => [dims[1], dims[0]],
            [[_, 1], [1, _]] => dims,
            _ => return None,
        };
        Some(Transpose {
            sizes: [reads.1, writes.1],
            to: reads.0.to,
            from: writes.0.from,
        })
    }
}

/// Blocks of two dims.
pub(super) struct Blocks {
    sizes: [usize; 2],
    block: [usize; 2],
}

impl Blocks {
    /// Lines of a block: what is written to one cache line, or two.
    const LINES: usize = 16;
    /// Cells of each.
    const CELLS: usize = 128;

    pub(super) fn of(slow: Dim, fast: Dim) -> Self {
        let sizes = [slow.size, fast.size];
        if fast.in_one_piece() {
            let cells = fast.size.min(TASK);
            let block = [(TASK / cells).min(slow.size), cells];
            return Self { sizes, block };
        }
        let lines = slow.size.min(Self::LINES);
        let cells = match slow.size {
            1 => TASK,
            _ => Self::CELLS.max(Self::CELLS * Self::LINES / lines),
        };
        let block = [lines, cells.min(fast.size)];
        Self { sizes, block }
    }

    fn parts(&self) -> [usize; 2] {
        [0, 1].map(|dim| self.sizes[dim].div_ceil(self.block[dim]))
    }

    pub(super) fn count(&self) -> usize {
        self.parts().iter().product()
    }

    /// Blocks that are worth a thread.
    pub(super) fn together(&self) -> usize {
        (TASK / self.block.iter().product::<usize>()).max(1)
    }

    pub(super) fn ranges(&self, block: usize) -> [Range<usize>; 2] {
        let parts = self.parts();
        // Blocks that follow each other are beside each other in the result.
        let place = [block % parts[0], block / parts[0]];
        [0, 1].map(|dim| {
            let start = place[dim] * self.block[dim];
            start..self.sizes[dim].min(start + self.block[dim])
        })
    }
}

/// Dims, from the innermost, of which those that follow each other in both tensors are one.
pub(super) fn merged(dims: Vec<Dim>) -> Vec<Dim> {
    let mut found: Vec<Dim> = Vec::new();
    for dim in dims {
        match found.last_mut() {
            _ if dim.size == 1 => {}
            Some(last)
                if dim.to == last.to * last.size as isize
                    && dim.from == last.from * last.size as isize =>
            {
                last.size *= dim.size;
            }
            _ => found.push(dim),
        }
    }
    if found.is_empty() {
        found.push(Dim::ONE);
    }
    found
}
