//! Tiles in the lanes of vectors: packed operands, scores and sums.

use pulp::Simd;

use super::job::Windows;
use super::sources::{Operand, Operands, Reached};
use crate::attention::engine::blocks::{TARGETS, dots, sums};
use crate::attention::engine::class::{Class, Group, Segment};
use crate::attention::engine::rows::Rows;
use crate::attention::engine::tiles::Place;
use crate::kernel::lanes::WIDEST;
use crate::kernel::memory::prefetch_run;
use crate::kernel::simd::Element;
use crate::kernel::transpose::{pack, unpack};

/// One tile in every lane, or some heads of one tile, one after another, with neighbors in the
/// lanes.
pub(super) struct Task<'a, E> {
    pub job: &'a Windows<'a, E>,
    pub class: &'a Class,
    pub operands: &'a Operands,
    pub steps: [usize; 3],
    pub places: Vec<Place>,
}

/// Vectors for each of some targets, one per element.
#[derive(Clone, Copy)]
pub(super) struct Packed<E> {
    first: *mut E,
    /// Distance between targets, in elements.
    pitch: usize,
    pub width: usize,
}

impl<E> Packed<E> {
    pub(super) fn at(self, index: usize) -> *mut E {
        self.first.wrapping_add(index * self.pitch)
    }
}

impl<E: Element> Packed<E> {
    /// Sets the vectors to zero.
    ///
    /// # Safety
    /// These vectors must exist.
    #[inline(always)]
    pub(super) unsafe fn clear<S: Simd>(self, simd: S, index: usize) {
        let zero = E::splat(simd, E::default());
        for element in 0..self.width {
            let place = self.at(index).wrapping_add(element * E::lanes::<S>());
            // SAFETY: guaranteed by the caller.
            unsafe { E::store::<S>(place, zero) };
        }
    }
}

/// Address of a target or source for each lane.
#[derive(Clone, Copy)]
pub(super) struct InLane<E> {
    rows: [*mut E; WIDEST],
    count: usize,
}

/// Addresses of the targets or sources of tiles in a field.
pub(super) struct Located<'a, E> {
    task: &'a Task<'a, E>,
    rows: &'a Rows<'a, E>,
    part: Part,
    /// Head of the field for each of the task's positions.
    heads: Vec<usize>,
    /// Number of elements used of each row.
    width: usize,
    /// First row of each lane, if the others are contiguous at the same distances from it.
    first: InLane<E>,
}

/// Targets or sources of a tile.
#[derive(Clone, Copy)]
pub(super) enum Part {
    Targets,
    Sources,
}

impl<E> Located<'_, E> {
    /// Vector of targets or sources with this number, for the head whose turn it is.
    #[inline(always)]
    pub(super) fn at(&self, turn: usize, number: usize) -> InLane<E> {
        let task = self.task;
        let (place, count) = task.vector(self.part, number);
        let Some([head, next @ ..]) = self.rows.distances() else {
            return task.found(self.rows, self.part, turn, place, count, &self.heads);
        };
        let distances = (0..3).map(|dim| place[dim] * task.steps[dim] * next[dim]);
        let heads = self.heads[turn] - self.heads[0];
        let distance = heads * head + distances.sum::<usize>();
        let rows = self.first.rows.map(|row| row.wrapping_add(distance));
        InLane { rows, count }
    }

    /// Appends the rows of a vector to a list, for all heads of the task, with their numbers of
    /// elements.
    fn list(&self, number: usize, list: &mut Vec<(*const E, usize)>) {
        let turns = self.task.turns();
        let beside = |heads: &[usize]| heads[1] == heads[0] + 1;
        let one_run =
            self.rows.pitch() == Some(self.width) && self.heads[..turns].windows(2).all(beside);
        let (turns, width) = if one_run {
            (1, turns * self.width)
        } else {
            (turns, self.width)
        };
        for turn in 0..turns {
            let rows = self.at(turn, number);
            list.extend(rows.rows().iter().map(|row| (row.cast_const(), width)));
        }
    }
}

impl<E> InLane<E> {
    pub(super) fn rows(&self) -> &[*mut E] {
        &self.rows[..self.count]
    }
}

/// Scratch that is handed out from its beginning.
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

impl<E> Task<'_, E> {
    /// Number of heads that are processed one after another; if lanes hold tiles, these have any
    /// head.
    pub(super) fn turns(&self) -> usize {
        match self.class.neighbors {
            1 => 1,
            _ => self.places.len(),
        }
    }

    /// Number of vectors of targets of a head.
    pub(super) fn targets(&self) -> usize {
        self.class.targets.iter().product()
    }

    /// Number of targets whose gradients have room: all if several heads of queries add to them,
    /// else those of a group.
    pub(super) fn kept(&self) -> usize {
        match self.job.shared {
            1 => TARGETS,
            _ => (self.turns() * self.targets()).max(TARGETS),
        }
    }

    /// Position of a vector of targets or sources in a tile, counted in steps, and its number of
    /// lanes.
    #[inline(always)]
    fn vector(&self, part: Part, number: usize) -> ([usize; 3], usize) {
        let class = self.class;
        let (shape, all) = match part {
            Part::Targets => (class.targets, class.targets[2] * class.neighbors),
            Part::Sources => (class.vectors(), class.sources[2]),
        };
        debug_assert!(!shape.contains(&0));
        let column = number % shape[2] * class.neighbors;
        let place = [
            number / (shape[1] * shape[2]),
            number / shape[2] % shape[1],
            column,
        ];
        let count = match class.neighbors {
            1 => self.places.len(),
            neighbours => {
                // Fewer than the class has, in a tile whose last vector is not full.
                let missing = class.targets[2] * neighbours - self.places[0].columns;
                (all - missing).saturating_sub(column).min(neighbours)
            }
        };
        (place, count)
    }

    /// Addresses of the lanes of a vector. Not inlined: compiling it for every instruction set and
    /// pass would take minutes.
    #[inline(never)]
    fn found(
        &self,
        rows: &Rows<'_, E>,
        part: Part,
        turn: usize,
        place: [usize; 3],
        count: usize,
        heads: &[usize],
    ) -> InLane<E> {
        let row = |lane: usize| {
            let (tile, before) = match self.class.neighbors {
                1 => (lane, 0),
                _ => (turn, lane),
            };
            let (tile, head) = (&self.places[tile], heads[tile]);
            let first = match part {
                Part::Targets => tile.target,
                Part::Sources => tile.source,
            };
            let step = [place[0], place[1], place[2] + before];
            let cell = [0, 1, 2].map(|dim| first[dim] + step[dim] * self.steps[dim]);
            rows.at(tile.batch, head, cell)
        };
        let mut found = InLane {
            rows: [std::ptr::null_mut(); WIDEST],
            count,
        };
        for (lane, place) in found.rows[..count].iter_mut().enumerate() {
            *place = row(lane);
        }
        found
    }

    /// Targets or sources of all tiles in a field, of which `width` elements are used; `head` maps
    /// to the head there.
    pub(super) fn located<'a>(
        &'a self,
        (rows, width): (&'a Rows<'a, E>, usize),
        part: Part,
        head: impl Fn(usize) -> usize,
    ) -> Located<'a, E> {
        let (place, count) = self.vector(part, 0);
        let heads: Vec<_> = self.places.iter().map(|place| head(place.head)).collect();
        Located {
            first: self.found(rows, part, 0, place, count, &heads),
            task: self,
            rows,
            part,
            heads,
            width,
        }
    }
}

impl<E: Element> Task<'_, E> {
    /// Takes room for the sources of a tile.
    pub(super) fn reached(
        &self,
        room: &mut Room<'_, E>,
        of: Operand,
        lanes: usize,
    ) -> Reached<'_, E> {
        let class = self.class;
        let packed = self.operands.packed(of);
        Reached {
            first: room.take(self.turns() * class.held * packed.row / lanes, lanes),
            pitch: class.held * packed.row,
            packed,
        }
    }

    /// Packs the sources, of all tiles in a field, that a group is the first to reach.
    #[inline(always)]
    pub(super) unsafe fn pack_sources<S: Simd>(
        &self,
        simd: S,
        group: &Group,
        to: &Reached<'_, E>,
        factor: f64,
        from: &Located<'_, E>,
    ) {
        let columns = self.class.vectors()[2];
        let packed = to.packed;
        for &number in &group.fresh {
            let (line, column) = (number / columns % self.class.held, number % columns);
            let before = line * packed.row + column * packed.vector;
            for turn in 0..self.turns() {
                let InLane { rows, count } = from.at(turn, number);
                let rows = rows.map(<*mut E>::cast_const);
                let place = (to.of(turn).wrapping_add(before), packed.step);
                // SAFETY: guaranteed by the caller.
                unsafe {
                    pack(
                        simd,
                        &rows[..count],
                        packed.width,
                        E::from_f64(factor),
                        place,
                    )
                };
            }
        }
    }

    /// Gathers one number from each lane.
    #[inline(always)]
    pub(super) unsafe fn gather<S: Simd>(&self, lanes: InLane<E>) -> E::Vector<S> {
        let mut values = [E::default(); WIDEST];
        for (value, row) in values.iter_mut().zip(lanes.rows()) {
            // SAFETY: guaranteed by the caller.
            *value = unsafe { **row };
        }
        // SAFETY: no vector is wider.
        unsafe { E::load::<S>(values.as_ptr()) }
    }

    /// Dot products of the members of a segment with its sources.
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd>(
        &self,
        simd: S,
        (turn, segment): (usize, &Segment),
        targets: Packed<E>,
        sources: &Reached<'_, E>,
        scores: Packed<E>,
    ) {
        let lanes = E::lanes::<S>();
        let members = segment.members.clone();
        let all = members
            .clone()
            .map(|member| targets.at(member).cast_const());
        let to = members.map(|member| {
            scores
                .at(member)
                .wrapping_add(segment.before[member] * lanes)
        });
        // SAFETY: guaranteed by the caller.
        unsafe { dots(simd, all, sources.sources(turn, segment), to) };
    }

    /// Adds the sources of a segment, weighted, to the results of its members.
    #[inline(always)]
    pub(super) unsafe fn weighted<S: Simd>(
        &self,
        simd: S,
        (turn, segment): (usize, &Segment),
        weights: Packed<E>,
        sources: &Reached<'_, E>,
        result: impl Fn(usize) -> *mut E,
    ) {
        let lanes = E::lanes::<S>();
        let members = segment.members.clone();
        let before = |member: usize| segment.before[member] * lanes;
        let all = members
            .clone()
            .map(|member| weights.at(member).wrapping_add(before(member)).cast_const());
        // SAFETY: guaranteed by the caller.
        unsafe {
            sums(
                simd,
                all,
                sources.sources(turn, segment),
                members.map(result),
            )
        };
    }
}

impl<E: Element> Task<'_, E> {
    /// Writes the weighted sums of the sources of a group's targets, multiplied by a factor for
    /// each target.
    ///
    /// # Safety
    /// Weights, sources and results must exist, and all rows must be in the field.
    #[inline(always)]
    pub(super) unsafe fn write_sums<S: Simd>(
        &self,
        simd: S,
        (turn, group): (usize, &Group),
        (weights, sources): (Packed<E>, &Reached<'_, E>),
        factors: [E::Vector<S>; TARGETS],
        (sums, to): (Packed<E>, &Located<'_, E>),
        ahead: &mut Ahead<E>,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            for member in 0..group.targets.len() {
                sums.clear(simd, member);
            }
            for segment in &group.segments {
                let result = |member| sums.at(member);
                self.weighted(simd, (turn, segment), weights, sources, result);
                ahead.ask();
            }
            for (member, &number) in group.targets.iter().enumerate() {
                let to = to.at(turn, number);
                unpack(
                    simd,
                    sums.at(member),
                    sums.width,
                    factors[member],
                    to.rows(),
                );
            }
        }
    }
}

/// Packs the targets of a group.
///
/// # Safety
/// All rows must be in the field, and there must be room for the targets.
#[inline(always)]
pub(super) unsafe fn pack_targets<S: Simd, E: Element>(
    simd: S,
    (turn, group): (usize, &Group),
    to: Packed<E>,
    factor: f64,
    from: &Located<'_, E>,
) {
    for (member, &number) in group.targets.iter().enumerate() {
        let InLane { rows, count } = from.at(turn, number);
        let rows = rows.map(<*mut E>::cast_const);
        let place = (to.at(member), E::lanes::<S>());
        // SAFETY: guaranteed by the caller.
        unsafe { pack(simd, &rows[..count], to.width, E::from_f64(factor), place) };
    }
}

/// Rows that a group is the first to need, prefetched little by little, between the products of the
/// group before it: a processor stalls if many are requested at once, and waits for rows of heads,
/// which are far apart, if none is.
pub(super) struct Ahead<E> {
    /// Addresses of rows, and their numbers of elements.
    rows: Vec<(*const E, usize)>,
    /// Number of rows that were prefetched.
    done: usize,
    /// Number of rows to prefetch at a time.
    each: usize,
}

impl<E> Ahead<E> {
    pub(super) fn new() -> Self {
        Self {
            rows: Vec::new(),
            done: 0,
            each: 0,
        }
    }

    /// Lists the sources and targets of a group, if there is one, divided among `calls` calls of
    /// [`ask`](Self::ask).
    pub(super) fn begin(
        &mut self,
        group: Option<&Group>,
        [sources, targets]: [&[&Located<'_, E>]; 2],
        calls: usize,
    ) {
        self.rows.clear();
        if let Some(group) = group {
            for (numbers, operands) in [(&group.fresh, sources), (&group.targets, targets)] {
                for &number in numbers {
                    for rows_of in operands {
                        rows_of.list(number, &mut self.rows);
                    }
                }
            }
        }
        (self.done, self.each) = (0, self.rows.len().div_ceil(calls.max(1)));
    }

    /// Prefetches some more rows.
    pub(super) fn ask(&mut self) {
        let end = (self.done + self.each).min(self.rows.len());
        for (row, elements) in &self.rows[self.done..end] {
            prefetch_run(*row, *elements);
        }
        self.done = end;
    }
}
