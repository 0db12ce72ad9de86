//! Passes of neighborhood attention: results, gradients of queries, gradients of keys and values.
//!
//! All three go through tiles: operands of a tile's targets and sources are packed, a tile in every lane; then a few targets
//! at a time have their scores computed, turned into weights, and sources summed up with them. Scores are computed anew in
//! the backward pass, from the saved logarithm of the sum of exponentials. Each result is written by one task, so that
//! nothing is added in an order that depends on threads; the price is that scores are computed twice there.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::blocks::{InLanes, Sources, TARGETS, dots, sums};
use super::lanes::{pack, unpack};
use super::rows::Rows;
use super::tiles::{Class, Dim, Group, Place, Segment, Side, Tiles};
use crate::kernel::lanes::WIDEST;
use crate::kernel::math;
use crate::kernel::memory::with_scratch;
use crate::kernel::simd::{Element, Isa};

/// Bytes that the sources of a tile may take: they stay in the second-level cache beside targets and scores.
const TILE_BYTES: usize = 640 << 10;
/// Multiplications below which a second thread does not pay.
const SERIAL: usize = 1 << 19;

/// Attention of the queries of a rank to the keys that are there.
#[derive(Clone, Debug)]
pub(crate) struct Windows<'a, E> {
    pub dims: [Dim; 3],
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of queries that share one of keys and values.
    pub shared: usize,
    /// Elements of a head of queries and keys, and of values.
    pub widths: [usize; 2],
    pub scale: f64,
    pub queries: Rows<'a, E>,
    pub keys: Rows<'a, E>,
    pub values: Rows<'a, E>,
    pub results: Results<'a, E>,
}

/// What is computed, and what of the forward pass it needs.
#[derive(Clone, Debug)]
pub(crate) enum Results<'a, E> {
    /// Weighted means of values, and the logarithms of the sums of exponentials.
    Forward { output: Rows<'a, E>, lse: Rows<'a, E> },
    /// Gradients of queries.
    Queries { from: Backward<'a, E>, gradient: Rows<'a, E> },
    /// Gradients of keys and values.
    Keys { from: Backward<'a, E>, key: Rows<'a, E>, value: Rows<'a, E> },
}

/// What a backward pass starts from.
#[derive(Clone, Debug)]
pub(crate) struct Backward<'a, E> {
    /// The gradient of the output.
    pub cotangent: Rows<'a, E>,
    /// The logarithms of the sums of exponentials.
    pub lse: Rows<'a, E>,
    /// The products of output and cotangent.
    pub products: Rows<'a, E>,
}

impl<E: Element> Windows<'_, E> {
    /// Computes the results of the targets in a box: of queries, or of keys for their gradients.
    pub(crate) fn run(&self, isa: Isa, part: &[Range<usize>; 3]) {
        isa.run(Whole { job: self, part });
    }

    fn side(&self) -> Side {
        match self.results {
            Results::Keys { .. } => Side::Keys,
            _ => Side::Queries,
        }
    }

    /// The multiplications for one query and key.
    fn products(&self) -> usize {
        let [key, value] = self.widths;
        match self.results {
            Results::Forward { .. } => key + value,
            Results::Queries { .. } => 2 * key + value,
            Results::Keys { .. } => 2 * (key + value),
        }
    }
}

struct Whole<'a, E> {
    job: &'a Windows<'a, E>,
    part: &'a [Range<usize>; 3],
}

impl<E: Element> WithSimd for Whole<'_, E> {
    type Output = ();

    fn with_simd<S: Simd>(self, simd: S) {
        let Self { job, part } = self;
        if job.batch == 0 || job.heads == 0 || part.iter().any(Range::is_empty) {
            return;
        }
        let lanes = E::lanes::<S>();
        let elements = job.widths[0] + job.widths[1];
        let bytes = elements.max(1) * lanes * size_of::<E>();
        let side = job.side();
        let heads = match side {
            Side::Queries => job.heads,
            Side::Keys => job.heads / job.shared,
        };
        let tiles = Tiles::new(&job.dims, side, part, bytes, TILE_BYTES);
        let mut tasks = Vec::new();
        for class in &tiles.classes {
            let all = tiles.count(class) * heads * job.batch;
            let starts = (0..all).step_by(lanes);
            tasks.extend(starts.map(|start| (class, start..(start + lanes).min(all))));
        }
        let run = |(class, range): (&Class, Range<usize>)| {
            let places = range.map(|index| tiles.place(class, index, heads)).collect();
            let steps = tiles.steps();
            simd.vectorize(Task { job, class, steps, places });
        };
        let kernel: usize = job.dims.iter().map(|dim| dim.neighborhood.kernel).product();
        let cells: usize = part.iter().map(Range::len).product();
        if cells * kernel * job.heads * job.batch * job.products() < SERIAL {
            tasks.into_iter().for_each(run);
        } else {
            tasks.into_par_iter().for_each(run);
        }
    }
}

/// A tile in every lane.
struct Task<'a, E> {
    job: &'a Windows<'a, E>,
    class: &'a Class,
    steps: [usize; 3],
    places: Vec<Place>,
}

/// Vectors for each target or source of a tile, one for each element.
#[derive(Clone, Copy)]
struct Packed<E> {
    first: *mut E,
    /// Elements from one to the next.
    pitch: usize,
    width: usize,
}

impl<E> Packed<E> {
    fn at(self, index: usize) -> *mut E {
        self.first.wrapping_add(index * self.pitch)
    }

    fn sources<'a>(self, offsets: &'a [usize]) -> Sources<'a, E, InLanes> {
        Sources {
            first: self.first,
            offsets,
            width: self.width,
            storage: PhantomData,
        }
    }
}

/// Scratch that is dealt out from its beginning on.
struct Room<'a, E>(&'a mut [E]);

impl<E> Room<'_, E> {
    fn take(&mut self, vectors: usize, lanes: usize) -> *mut E {
        let (taken, rest) = std::mem::take(&mut self.0).split_at_mut(vectors * lanes);
        self.0 = rest;
        taken.as_mut_ptr()
    }

    fn packed(&mut self, count: usize, width: usize, lanes: usize) -> Packed<E> {
        Packed {
            first: self.take(count * width, lanes),
            pitch: width * lanes,
            width,
        }
    }
}

impl<E: Element> WithSimd for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [key, value] = self.job.widths;
        let targets: usize = self.class.targets.iter().product();
        let sources: usize = self.class.sources.iter().product();
        let counts = self.class.groups.iter().flat_map(|group| &group.counts);
        let most = counts.copied().max().unwrap_or(0);
        // Operands and results of targets, operands of sources, two scores and two numbers for each pair or cell.
        let vectors = (2 * (key + value) + 2) * targets
            + (key + value + 2) * sources
            + TARGETS * (2 * most + key + value);
        with_scratch(vectors * E::lanes::<S>(), |scratch| {
            let mut room = Room(scratch);
            // SAFETY: the room is enough, and all places of tiles are in the fields.
            unsafe {
                match &self.job.results {
                    Results::Forward { output, lse } => {
                        self.forward(simd, &mut room, most, output, lse);
                    }
                    Results::Queries { from, gradient } => {
                        self.query_gradients(simd, &mut room, most, from, gradient);
                    }
                    Results::Keys { from, key, value } => {
                        self.key_gradients(simd, &mut room, most, from, [key, value]);
                    }
                }
            }
        });
    }
}

impl<E: Element> Task<'_, E> {
    /// The cell of a target or source with this number in its tile.
    #[inline(always)]
    fn cell(&self, first: [usize; 3], shape: [usize; 3], number: usize) -> [usize; 3] {
        let place = [
            number / (shape[1] * shape[2]),
            number / shape[2] % shape[1],
            number % shape[2],
        ];
        [0, 1, 2].map(|dim| first[dim] + place[dim] * self.steps[dim])
    }

    /// Where the target of each lane is in a field. `head` gives the head there.
    #[inline(always)]
    fn target(&self, rows: &Rows<'_, E>, number: usize, head: impl Fn(usize) -> usize) -> [*mut E; WIDEST] {
        let mut found = [std::ptr::null_mut(); WIDEST];
        for (found, place) in found.iter_mut().zip(&self.places) {
            let cell = self.cell(place.target, self.class.targets, number);
            *found = rows.at(place.batch, head(place.head), cell);
        }
        found
    }

    /// Where the source of each lane is in a field.
    #[inline(always)]
    fn source(&self, rows: &Rows<'_, E>, number: usize, head: impl Fn(usize) -> usize) -> [*mut E; WIDEST] {
        let mut found = [std::ptr::null_mut(); WIDEST];
        for (found, place) in found.iter_mut().zip(&self.places) {
            let cell = self.cell(place.source, self.class.sources, number);
            *found = rows.at(place.batch, head(place.head), cell);
        }
        found
    }

    /// Packs as many rows as there are tiles, for every number of a target or source.
    #[inline(always)]
    unsafe fn pack<S: Simd>(
        &self,
        simd: S,
        to: Packed<E>,
        count: usize,
        factor: f64,
        rows: impl Fn(usize) -> [*mut E; WIDEST],
    ) {
        let factor = E::splat(simd, E::from_f64(factor));
        for number in 0..count {
            let rows = rows(number).map(<*mut E>::cast_const);
            // SAFETY: the caller's.
            unsafe { pack(simd, &rows[..self.places.len()], to.width, factor, to.at(number)) };
        }
    }

    /// One number of each lane.
    #[inline(always)]
    unsafe fn gather<S: Simd>(&self, simd: S, rows: [*mut E; WIDEST]) -> E::Vector<S> {
        let mut values = [E::default(); WIDEST];
        for (value, row) in values.iter_mut().zip(&rows[..self.places.len()]) {
            // SAFETY: the caller's.
            *value = unsafe { **row };
        }
        let _ = simd;
        // SAFETY: no vector is wider.
        unsafe { E::load::<S>(values.as_ptr()) }
    }

    /// The dot products of the members of a segment with its sources.
    #[inline(always)]
    unsafe fn scores<S: Simd>(
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
        let all = members.clone().map(|member| targets.at(group.targets[member]).cast_const());
        let to = members.map(|member| scores.at(member).wrapping_add(segment.before[member] * lanes));
        // SAFETY: the caller's.
        unsafe { dots(simd, all, sources.sources(offsets), to) };
    }

    /// Adds to the results of the members of a segment its sources, weighted.
    #[inline(always)]
    unsafe fn weighted<S: Simd>(
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
        let all = members.clone().map(|member| weights.at(member).wrapping_add(before(member)).cast_const());
        // SAFETY: the caller's.
        unsafe { sums(simd, all, sources.sources(offsets), members.map(result)) };
    }

    /// Where the sources of the class's segments lie in a packed operand.
    #[inline(always)]
    fn offsets(&self, packed: Packed<E>) -> Vec<usize> {
        self.class.reached.iter().map(|number| number * packed.pitch).collect()
    }

    #[inline(always)]
    unsafe fn forward<S: Simd>(
        &self,
        simd: S,
        room: &mut Room<'_, E>,
        most: usize,
        output: &Rows<'_, E>,
        lse: &Rows<'_, E>,
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let [key, value] = job.widths;
        let targets: usize = self.class.targets.iter().product();
        let sources: usize = self.class.sources.iter().product();
        let q = room.packed(targets, key, lanes);
        let k = room.packed(sources, key, lanes);
        let v = room.packed(sources, value, lanes);
        let scores = room.packed(TARGETS, most, lanes);
        let means = room.packed(TARGETS, value, lanes);
        let shared = |head: usize| head / job.shared;
        // SAFETY: the caller's.
        unsafe {
            self.pack(simd, q, targets, job.scale, |number| self.target(&job.queries, number, |head| head));
            self.pack(simd, k, sources, 1.0, |number| self.source(&job.keys, number, shared));
            self.pack(simd, v, sources, 1.0, |number| self.source(&job.values, number, shared));
        }
        let (key_offsets, value_offsets) = (self.offsets(k), self.offsets(v));
        let zero = E::splat(simd, E::default());
        let one = E::splat(simd, E::from_f64(1.0));
        for group in &self.class.groups {
            // SAFETY: all is within the packed operands.
            unsafe {
                for segment in &group.segments {
                    let offsets = &key_offsets[segment.reached.clone()];
                    self.scores(simd, group, segment, [q, k], offsets, scores);
                }
                let mut scales = [one; TARGETS];
                for (member, &number) in group.targets.iter().enumerate() {
                    let [most, sum] = softmax::<S, E>(simd, scores.at(member), group.counts[member]);
                    scales[member] = E::over(simd, one, sum);
                    let rows = self.target(lse, number, |head| head);
                    let numbers = [most, sum].map(|vector| {
                        let mut numbers = [E::default(); WIDEST];
                        E::store::<S>(numbers.as_mut_ptr(), vector);
                        numbers.map(E::to_f64)
                    });
                    for lane in 0..self.places.len() {
                        *rows[lane] = E::from_f64(numbers[0][lane] + numbers[1][lane].ln());
                    }
                    for element in 0..value {
                        E::store::<S>(means.at(member).add(element * lanes), zero);
                    }
                }
                for segment in &group.segments {
                    let offsets = &value_offsets[segment.reached.clone()];
                    self.weighted(simd, segment, [scores, v], offsets, |member| means.at(member));
                }
                for (member, &number) in group.targets.iter().enumerate() {
                    let rows = self.target(output, number, |head| head);
                    let rows = &rows[..self.places.len()];
                    unpack(simd, means.at(member), value, scales[member], rows);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn query_gradients<S: Simd>(
        &self,
        simd: S,
        room: &mut Room<'_, E>,
        most: usize,
        from: &Backward<'_, E>,
        gradient: &Rows<'_, E>,
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let [key, value] = job.widths;
        let targets: usize = self.class.targets.iter().product();
        let sources: usize = self.class.sources.iter().product();
        let q = room.packed(targets, key, lanes);
        let g = room.packed(targets, value, lanes);
        let k = room.packed(sources, key, lanes);
        let v = room.packed(sources, value, lanes);
        let scores = room.packed(TARGETS, most, lanes);
        let slopes = room.packed(TARGETS, most, lanes);
        let result = room.packed(TARGETS, key, lanes);
        let (own, shared) = (|head: usize| head, |head: usize| head / job.shared);
        // SAFETY: the caller's.
        unsafe {
            self.pack(simd, q, targets, job.scale, |number| self.target(&job.queries, number, own));
            self.pack(simd, g, targets, 1.0, |number| self.target(&from.cotangent, number, own));
            self.pack(simd, k, sources, 1.0, |number| self.source(&job.keys, number, shared));
            self.pack(simd, v, sources, 1.0, |number| self.source(&job.values, number, shared));
        }
        let (key_offsets, value_offsets) = (self.offsets(k), self.offsets(v));
        let zero = E::splat(simd, E::default());
        let scale = E::splat(simd, E::from_f64(job.scale));
        for group in &self.class.groups {
            // SAFETY: all is within the packed operands.
            unsafe {
                for segment in &group.segments {
                    let reached = segment.reached.clone();
                    self.scores(simd, group, segment, [q, k], &key_offsets[reached.clone()], scores);
                    self.scores(simd, group, segment, [g, v], &value_offsets[reached], slopes);
                }
                for (member, &number) in group.targets.iter().enumerate() {
                    let lse = self.gather(simd, self.target(&from.lse, number, own));
                    let product = self.gather(simd, self.target(&from.products, number, own));
                    for source in 0..group.counts[member] {
                        let score = scores.at(member).add(source * lanes);
                        let slope = slopes.at(member).add(source * lanes);
                        let [_, weight] = weights::<S, E>(simd, [score, slope], [lse, product]);
                        E::store::<S>(score, weight);
                    }
                    for element in 0..key {
                        E::store::<S>(result.at(member).add(element * lanes), zero);
                    }
                }
                for segment in &group.segments {
                    let offsets = &key_offsets[segment.reached.clone()];
                    self.weighted(simd, segment, [scores, k], offsets, |member| result.at(member));
                }
                for (member, &number) in group.targets.iter().enumerate() {
                    let rows = self.target(gradient, number, own);
                    unpack(simd, result.at(member), key, scale, &rows[..self.places.len()]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn key_gradients<S: Simd>(
        &self,
        simd: S,
        room: &mut Room<'_, E>,
        most: usize,
        from: &Backward<'_, E>,
        gradients: [&Rows<'_, E>; 2],
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let [key, value] = job.widths;
        let targets: usize = self.class.targets.iter().product();
        let sources: usize = self.class.sources.iter().product();
        let k = room.packed(targets, key, lanes);
        let v = room.packed(targets, value, lanes);
        let results = [key, value].map(|width| room.packed(targets, width, lanes));
        let q = room.packed(sources, key, lanes);
        let g = room.packed(sources, value, lanes);
        let numbers = [room.packed(sources, 1, lanes), room.packed(sources, 1, lanes)];
        let scores = room.packed(TARGETS, most, lanes);
        let slopes = room.packed(TARGETS, most, lanes);
        let (zero, one) = (E::splat(simd, E::default()), E::splat(simd, E::from_f64(1.0)));
        // SAFETY: the caller's.
        unsafe {
            self.pack(simd, k, targets, 1.0, |number| self.target(&job.keys, number, |head| head));
            self.pack(simd, v, targets, 1.0, |number| self.target(&job.values, number, |head| head));
            for result in results {
                for vector in 0..targets * result.width {
                    E::store::<S>(result.first.add(vector * lanes), zero);
                }
            }
        }
        let (query_offsets, cotangent_offsets) = (self.offsets(q), self.offsets(g));
        for turn in 0..job.shared {
            let head = |head: usize| head * job.shared + turn;
            // SAFETY: all is within the packed operands.
            unsafe {
                self.pack(simd, q, sources, job.scale, |number| self.source(&job.queries, number, head));
                self.pack(simd, g, sources, 1.0, |number| self.source(&from.cotangent, number, head));
                for (to, rows) in numbers.into_iter().zip([&from.lse, &from.products]) {
                    for number in 0..sources {
                        let vector = self.gather(simd, self.source(rows, number, head));
                        E::store::<S>(to.at(number), vector);
                    }
                }
                for group in &self.class.groups {
                    for segment in &group.segments {
                        let reached = segment.reached.clone();
                        self.scores(simd, group, segment, [k, q], &query_offsets[reached.clone()], scores);
                        self.scores(simd, group, segment, [v, g], &cotangent_offsets[reached.clone()], slopes);
                        for member in segment.members.clone() {
                            let before = segment.before[member];
                            for (place, &number) in self.class.reached[reached.clone()].iter().enumerate() {
                                let offset = (before + place) * lanes;
                                let pair = [scores.at(member).add(offset), slopes.at(member).add(offset)];
                                let known = numbers.map(|numbers| E::load::<S>(numbers.at(number)));
                                let [score, weight] = weights::<S, E>(simd, pair, known);
                                E::store::<S>(pair[0], score);
                                E::store::<S>(pair[1], weight);
                            }
                        }
                        let result = |which: usize| {
                            let results: Packed<E> = results[which];
                            move |member: usize| results.at(group.targets[member])
                        };
                        let offsets = &query_offsets[reached.clone()];
                        self.weighted(simd, segment, [slopes, q], offsets, result(0));
                        let offsets = &cotangent_offsets[reached];
                        self.weighted(simd, segment, [scores, g], offsets, result(1));
                    }
                }
            }
        }
        for (gradient, result) in gradients.into_iter().zip(results) {
            for number in 0..targets {
                let rows = self.target(gradient, number, |head| head);
                // SAFETY: as above.
                unsafe { unpack(simd, result.at(number), result.width, one, &rows[..self.places.len()]) };
            }
        }
    }
}

/// Replaces scores by their exponentials, relative to the largest: gives that and their sum.
#[inline(always)]
unsafe fn softmax<S: Simd, E: Element>(simd: S, scores: *mut E, count: usize) -> [E::Vector<S>; 2] {
    let lanes = E::lanes::<S>();
    // SAFETY: the caller's: so many vectors.
    unsafe {
        let mut most = E::load::<S>(scores);
        for source in 1..count {
            let score = E::load::<S>(scores.add(source * lanes));
            most = E::select_less(simd, [most, score], score, most);
        }
        let mut sum = E::splat(simd, E::default());
        for source in 0..count {
            let at = scores.add(source * lanes);
            let weight = math::exp::<S, E>(simd, E::minus(simd, E::load::<S>(at), most));
            sum = E::plus(simd, sum, weight);
            E::store::<S>(at, weight);
        }
        [most, sum]
    }
}

/// The weight of a pair in the forward pass, and the gradient of its score, from the score and the product of value and
/// cotangent, and of the query the logarithm of its sum and the product of output and cotangent.
#[inline(always)]
pub(super) unsafe fn weights<S: Simd, E: Element>(
    simd: S,
    pair: [*mut E; 2],
    [lse, product]: [E::Vector<S>; 2],
) -> [E::Vector<S>; 2] {
    // SAFETY: the caller's: two vectors.
    let [score, slope] = pair.map(|at| unsafe { E::load::<S>(at) });
    let weight = math::exp::<S, E>(simd, E::minus(simd, score, lse));
    [weight, E::times(simd, weight, E::minus(simd, slope, product))]
}
