//! Tiles in the lanes of vectors: packed operands, scores and sums.

use std::marker::PhantomData;

use pulp::Simd;

use super::job::Windows;
use crate::attention::engine::blocks::{InLanes, Sources, dots, sums};
use crate::attention::engine::lanes::pack;
use crate::attention::engine::rows::Rows;
use crate::attention::engine::tiles::{Class, Group, Place, Segment};
use crate::kernel::lanes::WIDEST;
use crate::kernel::simd::Element;

/// A tile in every lane.
pub(super) struct Task<'a, E> {
    pub job: &'a Windows<'a, E>,
    pub class: &'a Class,
    pub steps: [usize; 3],
    pub places: Vec<Place>,
}

/// Vectors for each target or source of a tile, one for each element.
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

    pub(super) fn sources<'a>(self, offsets: &'a [usize]) -> Sources<'a, E, InLanes> {
        Sources {
            first: self.first,
            offsets,
            width: self.width,
            storage: PhantomData,
        }
    }
}

/// Scratch that is dealt out from its beginning on.
pub(super) struct Room<'a, E>(pub &'a mut [E]);

impl<E> Room<'_, E> {
    pub(super) fn take(&mut self, vectors: usize, lanes: usize) -> *mut E {
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
    /// Where the target with this number is in a field, for each lane. `head` gives the head there.
    #[inline(always)]
    pub(super) fn target(
        &self,
        rows: &Rows<'_, E>,
        number: usize,
        head: impl Fn(usize) -> usize,
    ) -> [*mut E; WIDEST] {
        self.places_of(rows, self.class.targets, number, head, |place| place.target)
    }

    /// Where the source with this number is in a field, for each lane.
    #[inline(always)]
    pub(super) fn source(
        &self,
        rows: &Rows<'_, E>,
        number: usize,
        head: impl Fn(usize) -> usize,
    ) -> [*mut E; WIDEST] {
        self.places_of(rows, self.class.sources, number, head, |place| place.source)
    }

    #[inline(always)]
    fn places_of(
        &self,
        rows: &Rows<'_, E>,
        shape: [usize; 3],
        number: usize,
        head: impl Fn(usize) -> usize,
        first: impl Fn(&Place) -> [usize; 3],
    ) -> [*mut E; WIDEST] {
        let [planes, along, across] = [
            number / (shape[1] * shape[2]),
            number / shape[2] % shape[1],
            number % shape[2],
        ];
        let [plane, row, column] = self.steps;
        let step = [planes * plane, along * row, across * column];
        let mut found = [std::ptr::null_mut(); WIDEST];
        for (found, place) in found.iter_mut().zip(&self.places) {
            let first = first(place);
            let cell = [first[0] + step[0], first[1] + step[1], first[2] + step[2]];
            *found = rows.at(place.batch, head(place.head), cell);
        }
        found
    }

    /// Packs as many rows as there are tiles, for every number of a target or source.
    #[inline(always)]
    pub(super) unsafe fn pack<S: Simd>(
        &self,
        simd: S,
        to: Packed<E>,
        count: usize,
        factor: f64,
        rows: impl Fn(usize) -> [*mut E; WIDEST],
    ) {
        let factor = E::from_f64(factor);
        for number in 0..count {
            let rows = rows(number).map(<*mut E>::cast_const);
            // SAFETY: the caller's.
            unsafe {
                pack(
                    simd,
                    &rows[..self.places.len()],
                    to.width,
                    factor,
                    to.at(number),
                )
            };
        }
    }

    /// One number of each lane.
    #[inline(always)]
    pub(super) unsafe fn gather<S: Simd>(&self, rows: [*mut E; WIDEST]) -> E::Vector<S> {
        let mut values = [E::default(); WIDEST];
        for (value, row) in values.iter_mut().zip(&rows[..self.places.len()]) {
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
        [targets, sources]: [Packed<E>; 2],
        offsets: &[usize],
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
        unsafe { dots(simd, all, sources.sources(offsets), to) };
    }

    /// Adds to the results of the members of a segment its sources, weighted.
    #[inline(always)]
    pub(super) unsafe fn weighted<S: Simd>(
        &self,
        simd: S,
        segment: &Segment,
        [weights, sources]: [Packed<E>; 2],
        offsets: &[usize],
        result: impl Fn(usize) -> *mut E,
    ) {
        let lanes = E::lanes::<S>();
        let members = segment.members.clone();
        let before = |member: usize| segment.before[member] * lanes;
        let all = members
            .clone()
            .map(|member| weights.at(member).wrapping_add(before(member)).cast_const());
        // SAFETY: the caller's.
        unsafe { sums(simd, all, sources.sources(offsets), members.map(result)) };
    }

    /// Where the sources of the class's segments lie in a packed operand.
    #[inline(always)]
    pub(super) fn offsets(&self, packed: Packed<E>) -> Vec<usize> {
        self.class
            .reached
            .iter()
            .map(|number| number * packed.pitch)
            .collect()
    }
}
