//! Scratch of a task, in the order in which it is taken.

use std::marker::PhantomData;

use crate::attention::engine::blocks::TARGETS;
use crate::kernel::amx::SIDE;
use crate::kernel::panels::matrices::{room, whole};
use crate::kernel::simd::Element;

/// Sources whose scores are computed at a time.
pub(super) const SOURCES: usize = 64;

/// Groups of targets of a task at most.
pub(super) const GROUPS: usize = 4;

/// Vectors of targets that matrices work on at a time.
pub(super) const COLUMNS: usize = 4;

/// The elements of a block of sources as factors: those of sources, then, if wanted, those of elements.
fn of_block(width: usize, parts: usize) -> usize {
    room(SOURCES, width, parts) + room(width, SOURCES, parts)
}

/// Vectors of targets, each with a run of vectors of its own.
#[derive(Clone, Copy)]
pub(super) struct Runs<E> {
    pub first: *mut E,
    pub pitch: usize,
    /// Vectors of a group.
    pub together: usize,
}

impl<E> Runs<E> {
    /// The runs of a group of targets.
    pub(super) fn of(self, group: usize) -> Self {
        let first = self.first.wrapping_add(group * self.together * self.pitch);
        Self { first, ..self }
    }

    pub(super) fn at(self, vector: usize) -> *mut E {
        self.first.wrapping_add(vector * self.pitch)
    }
}

/// What is left of a task's scratch, or, where nothing is there, how much has been asked for.
pub(super) struct Room<E> {
    first: *mut E,
    pub taken: usize,
    lanes: usize,
    /// Parts of numbers that matrices multiply; none by vectors.
    parts: usize,
    elements: PhantomData<E>,
}

impl<E: Element> Room<E> {
    pub(super) fn new(first: *mut E, lanes: usize, parts: usize) -> Self {
        Self {
            first,
            taken: 0,
            lanes,
            parts,
            elements: PhantomData,
        }
    }

    fn take(&mut self, elements: usize) -> *mut E {
        let taken = self.first.wrapping_add(self.taken);
        // Each begins at a cache line.
        self.taken += elements.next_multiple_of(SIDE);
        taken
    }

    /// Vectors of a group.
    pub(super) fn together(parts: usize) -> usize {
        if parts > 0 { COLUMNS } else { TARGETS }
    }

    fn runs(&mut self, vectors: usize, groups: usize) -> Runs<E> {
        let (pitch, together) = (vectors * self.lanes, Self::together(self.parts));
        let first = self.take(groups * together * pitch);
        Runs {
            first,
            pitch,
            together,
        }
    }

    /// Operands of targets of this width.
    pub(super) fn targets(&mut self, width: usize) -> Runs<E> {
        let vectors = match self.parts {
            0 => width,
            parts => whole(width, parts),
        };
        self.runs(vectors, GROUPS)
    }

    /// Results of targets of this width.
    pub(super) fn results(&mut self, width: usize) -> Runs<E> {
        let vectors = match self.parts {
            0 => width,
            _ => width.next_multiple_of(SIDE),
        };
        self.runs(vectors, GROUPS)
    }

    /// A vector for each source of a block.
    pub(super) fn scores(&mut self) -> Runs<E> {
        self.runs(SOURCES, 1)
    }

    /// The factors of such vectors.
    pub(super) fn factors(&mut self) -> Runs<E> {
        self.runs(whole(SOURCES, self.parts), 1)
    }

    /// A block of sources of this width.
    pub(super) fn block(&mut self, width: usize) -> *mut E {
        self.take(match self.parts {
            0 => SOURCES * width,
            parts => of_block(width, parts),
        })
    }

    /// The vectors of a target.
    pub(super) fn spare(&mut self, width: usize) -> *mut E {
        self.take(width * self.lanes)
    }

    pub(super) fn rows(&mut self, rows: usize, pitch: usize) -> *mut E {
        self.take(rows * pitch)
    }

    /// Factors of weights, of a block of sources for a group of targets.
    pub(super) fn turned(&mut self) -> *mut E {
        let targets = Self::together(self.parts) * self.lanes;
        self.take(room(SOURCES, targets, self.parts))
    }

    /// All targets to be combined, in rows of `pitch` elements or as factors, and how many elements those of a group are.
    pub(super) fn combined(&mut self, pitch: usize) -> (*mut E, usize) {
        let targets = Self::together(self.parts) * self.lanes;
        let of_group = pitch * targets.max(whole(targets, self.parts));
        (self.take(GROUPS * of_group), of_group)
    }
}
