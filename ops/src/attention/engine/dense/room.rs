//! Scratch of a task.

use crate::attention::engine::blocks::TARGETS;
use crate::kernel::amx::SIDE;
use crate::kernel::panels::matrices::{factors, room};
use crate::kernel::simd::Element;

/// Number of sources whose scores are computed at a time.
pub(super) const SOURCES: usize = 64;

/// Maximum groups of targets of a task.
pub(super) const GROUPS: usize = 4;

/// Vectors of targets that matrices process at a time.
pub(super) const COLUMNS: usize = 4;

/// Number of vectors of a group of targets, given the parts of numbers that matrices multiply; zero
/// parts mean vectors.
pub(super) fn together(parts: usize) -> usize {
    if parts > 0 { COLUMNS } else { TARGETS }
}

/// Vectors of targets, each with a run of vectors of its own.
#[derive(Clone, Copy)]
pub(super) struct Runs<E> {
    first: *mut E,
    /// Elements from one run to the next.
    pub pitch: usize,
    /// Number of vectors of a group.
    together: usize,
}

impl<E> Runs<E> {
    /// Runs of a group of targets.
    pub(super) fn of(self, group: usize) -> Self {
        let first = self.first.wrapping_add(group * self.together * self.pitch);
        Self { first, ..self }
    }

    pub(super) fn at(self, vector: usize) -> *mut E {
        self.first.wrapping_add(vector * self.pitch)
    }
}

/// Layout of a task's scratch, for operands with the widths of queries and of values.
#[derive(Clone, Copy)]
pub(super) struct Room<E> {
    pub targets: [Runs<E>; 2],
    pub results: [Runs<E>; 2],
    /// One vector per source of a block: of scores, and of their gradients.
    pub scores: [Runs<E>; 2],
    /// Factors of such vectors.
    pub factors: Runs<E>,
    /// Blocks of sources: copies of them, or factors of sources and then of elements.
    pub blocks: [*mut E; 2],
    /// Elements of a vector of targets, before they are packed as factors.
    pub spare: *mut E,
    /// Gradients of a block of queries, in rows of whole vectors.
    pub queries: Table<E>,
    /// Keys of each group: in rows as long as those of queries, or as factors.
    pub keys: Table<E>,
    /// Factors of the weights of a block of queries for the keys of a group.
    pub turned: *mut E,
}

/// Rows, or groups, of `pitch` elements each.
#[derive(Clone, Copy)]
pub(super) struct Table<E> {
    pub first: *mut E,
    pub pitch: usize,
}

impl<E: Element> Room<E> {
    /// Lays out the scratch from the first element on; returns it and the number of elements it
    /// takes.
    pub(super) fn new(
        first: *mut E,
        lanes: usize,
        parts: usize,
        widths: [usize; 2],
    ) -> (Self, usize) {
        let mut taken = 0;
        let mut take = |elements: usize| {
            let place = first.wrapping_add(taken);
            // Each begins at a cache line.
            taken += elements.next_multiple_of(SIDE);
            place
        };
        let together = together(parts);
        let mut runs = |vectors: usize, groups: usize| {
            let pitch = vectors * lanes;
            let first = take(groups * together * pitch);
            Runs {
                first,
                pitch,
                together,
            }
        };
        let targets = widths.map(|width| match parts {
            0 => runs(width, GROUPS),
            parts => runs(factors(width, parts), GROUPS),
        });
        let results = widths.map(|width| match parts {
            0 => runs(width, GROUPS),
            _ => runs(width.next_multiple_of(SIDE), GROUPS),
        });
        let scores = [(); 2].map(|()| runs(SOURCES, 1));
        let of_scores = runs(factors(SOURCES, parts), 1);
        let blocks = widths.map(|width| {
            take(match parts {
                0 => SOURCES * width,
                parts => room(SOURCES, width, parts) + room(width, SOURCES, parts),
            })
        });
        let (group, pitch) = (together * lanes, widths[0].next_multiple_of(lanes));
        let of_group = match parts {
            0 => group * pitch,
            parts => factors(group, parts) * pitch,
        };
        let places = Self {
            targets,
            results,
            scores,
            factors: of_scores,
            blocks,
            spare: take(widths[0].max(widths[1]) * lanes),
            queries: Table {
                first: take(SOURCES * pitch),
                pitch,
            },
            keys: Table {
                first: take(GROUPS * of_group),
                pitch: of_group,
            },
            turned: take(room(SOURCES, group, parts)),
        };
        (places, taken)
    }
}
