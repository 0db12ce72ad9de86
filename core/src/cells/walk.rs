//! The order in which a copy visits cells, chosen so that cache lines of both sides are reused
//! while they are still cached.

use std::ops::Range;

use super::transpose::{SIDE, Transpose};

/// Number of elements per task.
pub(super) const TASK: usize = 1 << 14;
/// Lengths of short runs of cells that are copied together, each by code of its own.
const UNITS: [usize; 3] = [2, 4, 8];
/// Distance of cells that are probably in one cache line.
const CLOSE: usize = 16;

/// Dim of a copy: its size, and its strides in the result and in the source.
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

    /// Whether cells are contiguous in both tensors.
    pub(super) fn in_one_piece(self) -> bool {
        [self.to, self.from] == [1, 1]
    }
}

/// Order of the dims of a copy.
pub(super) struct Walk {
    /// Number of cells that are contiguous in both tensors and copied together.
    pub(super) unit: usize,
    pub(super) outer: Vec<Dim>,
    pub(super) slow: Dim,
    pub(super) fast: Dim,
}

impl Walk {
    /// Chooses the dim in which source cells are closest as the fast one, within blocks of the
    /// innermost dim of the result, so that cache lines of both sides are reused while they are
    /// still cached; the other way round if that dim is short. Of close dims, takes a long one.
    pub(super) fn through(mut dims: Vec<Dim>) -> Self {
        const SHORT: usize = 16;
        let unit = match dims[..] {
            [first, _, ..] if first.in_one_piece() && UNITS.contains(&first.size) => {
                dims.remove(0).size
            }
            _ => 1,
        };
        // Repeated cells (stride zero) count as close only where they are written contiguously.
        let distance = |dim: &Dim| (dim.from == 0 && dim.to != 1, dim.from.unsigned_abs());
        let nearest = (0..dims.len()).min_by_key(|dim| distance(&dims[*dim]));
        let nearest = nearest.expect("a dim");
        let size = dims[nearest].size;
        let mut others = 1..dims.len();
        let longer = others.find(|dim| {
            let dim = &dims[*dim];
            (1..=CLOSE).contains(&dim.from.unsigned_abs()) && dim.size >= 4 * size
        });
        let chosen = match longer {
            Some(longer) if nearest > 0 && size < SIDE => longer,
            _ => nearest,
        };
        let mut fast = dims.remove(chosen);
        let mut slow = match chosen {
            0 => Dim::ONE,
            _ => dims.remove(0),
        };
        if fast.size < SHORT.min(slow.size) {
            std::mem::swap(&mut fast, &mut slow);
        }
        Self {
            unit,
            outer: dims,
            slow,
            fast,
        }
    }

    /// Returns a transpose of `[slow, fast]` cells, if they are contiguous along one of the two
    /// dims in the result and along the other in the source, and fill at least one tile.
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

/// Blocks of the slow and the fast dim of a walk.
pub(super) struct Blocks {
    sizes: [usize; 2],
    block: [usize; 2],
    /// Maximum number of runs of cells per task.
    task: usize,
}

impl Blocks {
    /// Number of lines of a block: as many cells as one or two cache lines of the result hold.
    const LINES: usize = 16;
    /// Number of cells per line.
    const CELLS: usize = 128;

    pub(super) fn of(walk: &Walk) -> Self {
        let (slow, fast, task) = (walk.slow, walk.fast, TASK / walk.unit);
        let sizes = [slow.size, fast.size];
        if fast.in_one_piece() {
            let cells = fast.size.min(task);
            let block = [(task / cells).min(slow.size), cells];
            return Self { sizes, block, task };
        }
        let lines = slow.size.min(Self::LINES);
        let cells = match slow.size {
            1 => task,
            _ => Self::CELLS.max(Self::CELLS * Self::LINES / lines),
        };
        let block = [lines, cells.min(fast.size)];
        Self { sizes, block, task }
    }

    fn parts(&self) -> [usize; 2] {
        [0, 1].map(|dim| self.sizes[dim].div_ceil(self.block[dim]))
    }

    pub(super) fn count(&self) -> usize {
        self.parts().iter().product()
    }

    /// Number of blocks that make up the work of one task.
    pub(super) fn together(&self) -> usize {
        (self.task / self.block.iter().product::<usize>()).max(1)
    }

    pub(super) fn ranges(&self, block: usize) -> [Range<usize>; 2] {
        let parts = self.parts();
        // Consecutive blocks are adjacent in the result.
        let place = [block % parts[0], block / parts[0]];
        [0, 1].map(|dim| {
            let start = place[dim] * self.block[dim];
            start..self.sizes[dim].min(start + self.block[dim])
        })
    }
}

/// Merges dims, listed from the innermost, that are adjacent in both tensors.
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
