//! Tiles in the lanes of vectors: packed operands, scores and sums.

use std::marker::PhantomData;

use pulp::Simd;

use super::job::Windows;
use crate::attention::engine::blocks::{InLanes, Sources, dots, sums};
use crate::attention::engine::lanes::pack;
use crate::attention::engine::rows::Rows;
use crate::attention::engine::tiles::{Class, Group, Place, Segment};
use crate::kernel::lanes::WIDEST;
use crate::kernel::memory::prefetch_run;
use crate::kernel::simd::Element;

/// A tile in every lane, or one tile with neighbours in the lanes.
pub(super) struct Task<'a, E> {
    pub job: &'a Windows<'a, E>,
    pub class: &'a Class,
    pub steps: [usize; 3],
    pub places: Vec<Place>,
}

/// Vectors for each target of a tile, one for each element.
#[derive(Clone, Copy)]
pub(super) struct Packed<E> {
    pub first: *mut E,
    /// Elements from one to the next.
    pitch: usize,
    pub width: usize,
}

impl<E> Packed<E> {
    pub(super) fn at(self, index: usize) -> *mut E {
        self.first.wrapping_add(index * self.pitch)
    }
}

/// The sources of a tile, row by row: the first element of a row's sources, then their second one, and so on. A row is one
/// source where lanes hold tiles.
pub(super) struct Reached<E> {
    first: *mut E,
    width: usize,
    /// From an element of a source to the next.
    step: usize,
    /// Where the sources of the class's segments begin.
    offsets: Vec<usize>,
}

impl<E> Reached<E> {
    /// The first element of a source of the class's segments, in all lanes.
    pub(super) fn at(&self, place: usize) -> *mut E {
        self.first.wrapping_add(self.offsets[place])
    }

    fn sources(&self, segment: &Segment) -> Sources<'_, E, InLanes> {
        Sources {
            first: self.first,
            offsets: &self.offsets[segment.reached.clone()],
            width: self.width,
            step: self.step,
            storage: PhantomData,
        }
    }
}

/// Where a target or source of each lane lies.
pub(super) struct InLane<E> {
    rows: [*mut E; WIDEST],
    count: usize,
}

impl<E> InLane<E> {
    pub(super) fn rows(&self) -> &[*mut E] {
        &self.rows[..self.count]
    }
}

/// Scratch that is dealt out from its beginning on.
pub(super) struct Room<'a, E>(pub &'a mut [E]);

impl<E> Room<'_, E> {
    fn take(&mut self, vectors: usize, lanes: usize) -> *mut E {
        let (taken, rest) = std::mem::take(&mut self.0).split_at_mut(vectors * lanes);
        self.0 = rest;
        taken.as_mut_ptr()
    }

    pub(super) fn packed(&mut self, count: usize, width: usize, lanes: usize) -> Packed<E> {
        Packed {
            first: self.take(count * width, lanes),
            pitch: width * lanes,
            width,
        }
    }
}

impl<E: Element> Task<'_, E> {
    /// Room for the sources of a tile.
    pub(super) fn reached(&self, room: &mut Room<'_, E>, width: usize, lanes: usize) -> Reached<E> {
        let class = self.class;
        let [planes, rows, columns] = class.vectors();
        // Elements of the vectors that hold one element of a row of sources, and how many sources that row has.
        let (step, row) = match class.neighbours {
            1 => (lanes, 1),
            _ => (columns * lanes, class.sources[2]),
        };
        let offset = |number: &usize| number / row * width * step + number % row;
        Reached {
            first: room.take(planes * rows * columns * width, lanes),
            width,
            step,
            offsets: class.reached.iter().map(offset).collect(),
        }
    }

    /// Where the target with this number is in a field, for each lane. `head` gives the head there.
    #[inline(always)]
    pub(super) fn target(
        &self,
        rows: &Rows<'_, E>,
        number: usize,
        head: impl Fn(usize) -> usize,
    ) -> InLane<E> {
        self.in_lanes(rows, self.class.targets, number, head, |place| {
            (place.target, place.columns)
        })
    }

    /// Where a vector of sources is in a field, for each lane.
    #[inline(always)]
    fn source(
        &self,
        rows: &Rows<'_, E>,
        number: usize,
        head: impl Fn(usize) -> usize,
    ) -> InLane<E> {
        let class = self.class;
        self.in_lanes(rows, class.vectors(), number, head, |place| {
            // Fewer than the class's in a tile whose last vector is not full.
            let missing = class.targets[2] * class.neighbours - place.columns;
            (place.source, class.sources[2] - missing)
        })
    }

    #[inline(always)]
    fn in_lanes(
        &self,
        rows: &Rows<'_, E>,
        shape: [usize; 3],
        number: usize,
        head: impl Fn(usize) -> usize,
        first: impl Fn(&Place) -> ([usize; 3], usize),
    ) -> InLane<E> {
        let neighbours = self.class.neighbours;
        let plane = number / (shape[1] * shape[2]);
        let row = number / shape[2] % shape[1];
        let column = number % shape[2] * neighbours;
        let mut found = InLane {
            rows: [std::ptr::null_mut(); WIDEST],
            count: 0,
        };
        let mut add = |place: &Place, column: usize| {
            let step = [plane, row, column];
            let (first, _) = first(place);
            let cell = [0, 1, 2].map(|dim| first[dim] + step[dim] * self.steps[dim]);
            found.rows[found.count] = rows.at(place.batch, head(place.head), cell);
            found.count += 1;
        };
        if neighbours == 1 {
            self.places.iter().for_each(|place| add(place, column));
        } else {
            let place = &self.places[0];
            let (_, columns) = first(place);
            (column..columns.min(column + neighbours)).for_each(|column| add(place, column));
        }
        found
    }

    /// Packs the targets of all tiles.
    #[inline(always)]
    pub(super) unsafe fn pack<S: Simd>(
        &self,
        simd: S,
        to: Packed<E>,
        factor: f64,
        rows: &Rows<'_, E>,
        head: impl Fn(usize) -> usize + Copy,
    ) {
        let count = self.class.targets.iter().product();
        let lanes = |number| self.target(rows, number, head);
        let place = |number| (to.at(number), E::lanes::<S>());
        // SAFETY: the caller's.
        unsafe { pack_all(simd, count, to.width, factor, lanes, place) };
    }

    /// Packs the sources of all tiles.
    #[inline(always)]
    pub(super) unsafe fn pack_sources<S: Simd>(
        &self,
        simd: S,
        to: &Reached<E>,
        factor: f64,
        rows: &Rows<'_, E>,
        head: impl Fn(usize) -> usize + Copy,
    ) {
        let each = to.step / E::lanes::<S>();
        let count = self.class.vectors().iter().product();
        let lanes = |number| self.source(rows, number, head);
        let place = |number| {
            let row = number / each * to.width * to.step;
            let offset = row + number % each * E::lanes::<S>();
            (to.first.wrapping_add(offset), to.step)
        };
        // SAFETY: the caller's.
        unsafe { pack_all(simd, count, to.width, factor, lanes, place) };
    }

    /// One number of each lane.
    #[inline(always)]
    pub(super) unsafe fn gather<S: Simd>(&self, lanes: InLane<E>) -> E::Vector<S> {
        let mut values = [E::default(); WIDEST];
        for (value, row) in values.iter_mut().zip(lanes.rows()) {
            // SAFETY: the caller's.
            *value = unsafe { **row };
        }
        // SAFETY: no vector is wider.
        unsafe { E::load::<S>(values.as_ptr()) }
    }

    /// The dot products of the members of a segment with its sources.
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd>(
        &self,
        simd: S,
        group: &Group,
        segment: &Segment,
        targets: Packed<E>,
        sources: &Reached<E>,
        scores: Packed<E>,
    ) {
        let lanes = E::lanes::<S>();
        let members = segment.members.clone();
        let all = members
            .clone()
            .map(|member| targets.at(group.targets[member]).cast_const());
        let to = members.map(|member| {
            scores
                .at(member)
                .wrapping_add(segment.before[member] * lanes)
        });
        // SAFETY: the caller's.
        unsafe { dots(simd, all, sources.sources(segment), to) };
    }

    /// Adds to the results of the members of a segment its sources, weighted.
    #[inline(always)]
    pub(super) unsafe fn weighted<S: Simd>(
        &self,
        simd: S,
        segment: &Segment,
        weights: Packed<E>,
        sources: &Reached<E>,
        result: impl Fn(usize) -> *mut E,
    ) {
        let lanes = E::lanes::<S>();
        let members = segment.members.clone();
        let before = |member: usize| segment.before[member] * lanes;
        let all = members
            .clone()
            .map(|member| weights.at(member).wrapping_add(before(member)).cast_const());
        // SAFETY: the caller's.
        unsafe { sums(simd, all, sources.sources(segment), members.map(result)) };
    }
}

/// Vectors whose rows are fetched while others are packed: the rows of a head lie apart, so that no processor foresees them.
const AHEAD: usize = 4;

/// Packs vectors, given the rows in the lanes of each and the place that it goes to.
///
/// # Safety
/// As for [`pack`].
#[inline(always)]
unsafe fn pack_all<S: Simd, E: Element>(
    simd: S,
    count: usize,
    width: usize,
    factor: f64,
    lanes: impl Fn(usize) -> InLane<E>,
    place: impl Fn(usize) -> (*mut E, usize),
) {
    let factor = E::from_f64(factor);
    let fetched = |number: usize| {
        let lanes = lanes(number);
        lanes
            .rows()
            .iter()
            .for_each(|row| prefetch_run(*row, width));
        lanes
    };
    let first = |number: usize| (number < count).then(|| fetched(number));
    let mut ahead: [Option<InLane<E>>; AHEAD] = std::array::from_fn(first);
    for number in 0..count {
        let next = first(number + AHEAD);
        let lanes = std::mem::replace(&mut ahead[number % AHEAD], next).expect("fetched before");
        let rows = lanes.rows.map(<*mut E>::cast_const);
        // SAFETY: the caller's.
        unsafe { pack(simd, &rows[..lanes.count], width, factor, place(number)) };
    }
}
