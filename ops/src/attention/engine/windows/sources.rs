//! Packed sources of tiles.

use std::marker::PhantomData;

use crate::attention::engine::blocks::{InLanes, Sources};
use crate::attention::engine::class::{Class, Segment};

/// Sources of a tile, row by row: the first elements of a row's sources, then their second
/// elements, and so on; or source by source if lanes hold tiles. A row takes the slot of one that
/// no target needs any more.
pub(super) struct Reached<'a, E> {
    pub first: *mut E,
    /// Distance between the sources of consecutive heads.
    pub pitch: usize,
    pub packed: &'a PackedSources,
}

impl<E> Reached<'_, E> {
    /// First element of a source of the class's segments, in all lanes.
    pub(super) fn at(&self, turn: usize, place: usize) -> *mut E {
        self.of(turn).wrapping_add(self.packed.offsets[place])
    }

    pub(super) fn of(&self, turn: usize) -> *mut E {
        self.first.wrapping_add(turn * self.pitch)
    }

    pub(super) fn sources(&self, turn: usize, segment: &Segment) -> Sources<'_, E, InLanes> {
        Sources {
            first: self.of(turn),
            offsets: &self.packed.offsets[segment.reached.clone()],
            width: self.packed.width,
            step: self.packed.step,
            storage: PhantomData,
        }
    }
}

/// Operand of a source.
#[derive(Clone, Copy)]
pub(super) enum Operand {
    /// With the elements of a key.
    Key,
    /// With the elements of a value.
    Value,
    /// One number.
    Number,
}

/// Layout of the packed sources of a class's tiles, by [`Operand`].
pub(super) struct Operands([PackedSources; 3]);

pub(super) struct PackedSources {
    pub width: usize,
    /// Distances between the elements of a source, between vectors of sources, and between rows of
    /// sources.
    pub step: usize,
    pub vector: usize,
    pub row: usize,
    /// Offsets of the sources of the class's segments.
    offsets: Vec<usize>,
}

impl Operands {
    pub(super) fn new(class: &Class, [key, value]: [usize; 2], lanes: usize) -> Self {
        let columns = class.vectors()[2];
        Self([key, value, 1].map(|width| {
            let row = width * columns * lanes;
            let (step, vector) = match class.neighbors {
                1 => (lanes, width * lanes),
                _ => (columns * lanes, lanes),
            };
            let next = vector / class.neighbors;
            let offset = |[line, column]: &[usize; 2]| line * row + column * next;
            PackedSources {
                width,
                step,
                vector,
                row,
                offsets: class.reached.iter().map(offset).collect(),
            }
        }))
    }

    pub(super) fn packed(&self, of: Operand) -> &PackedSources {
        &self.0[of as usize]
    }
}
