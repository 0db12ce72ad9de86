//! Kernels of attention on the sphere, for one row of outputs at a time.

use std::ops::Range;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::WIDEST;
use crate::kernel::math::exp;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::simd::Element;

/// Cell within reach of an output row: its row, and its longitude as a number of input longitudes
/// past that of the output cell.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbor {
    pub(super) row: usize,
    pub(super) shift: usize,
    /// Area of the cell.
    pub(super) weight: f64,
}

/// Lines of longitudes continued periodically past their end, so that the cells of one neighbor are
/// contiguous for all outputs.
///
/// Where inputs have `phases` times the longitudes of outputs, a row is split into `phases` lines,
/// each with one of every `phases` longitudes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Around {
    /// Number of longitudes of outputs.
    pub(super) size: usize,
    pub(super) phases: usize,
    /// Number of rows per channel.
    pub(super) rows: usize,
}

impl Around {
    /// Number of longitudes of outputs, rounded up to full vectors.
    fn padded(self) -> usize {
        self.size.next_multiple_of(WIDEST)
    }

    /// Number of elements per line.
    fn line(self) -> usize {
        self.size + self.padded()
    }

    /// Number of elements per channel.
    pub(super) fn channel(self) -> usize {
        self.rows * self.phases * self.line()
    }

    /// Offset in a channel of an input row from a given input longitude on: the cells for all
    /// outputs follow.
    pub(super) fn start(self, row: usize, shift: usize) -> usize {
        let (phase, shift) = (shift % self.phases, shift / self.phases);
        (row * self.phases + phase) * self.line() + shift
    }

    /// Builds the lines from cells `[channels, rows, longitudes]`.
    pub(super) fn lines<E: Element>(self, x: &[E]) -> Buffer<E> {
        let (size, phases, len) = (self.size, self.phases, self.line());
        let count = x.len() / (size * phases).max(1) * phases;
        // SAFETY: every line is written, each by its own task.
        unsafe {
            Buffer::filled(count * len, |lines| {
                tasks::for_each(count, 16, |line| {
                    let x = &x[line / phases * size * phases..][..size * phases];
                    let y = lines.slice(line * len..(line + 1) * len);
                    let (first, again) = y.split_at_mut(size);
                    let cells = x[line % phases..].iter().step_by(phases);
                    first.iter_mut().zip(cells).for_each(|(y, x)| *y = *x);
                    let cells = first.iter().cycle();
                    again.iter_mut().zip(cells).for_each(|(y, x)| *y = *x);
                });
            })
        }
    }

    /// Adjoint of [`lines`](Self::lines).
    pub(super) fn cells<E: Element>(self, lines: &[E]) -> Buffer<E> {
        let (size, phases, len) = (self.size, self.phases, self.line());
        let count = lines.len() / len;
        // SAFETY: every cell is written, each row by its own task.
        unsafe {
            Buffer::filled(count * size, |x| {
                tasks::for_each(count / phases, 16, |row| {
                    let x = x.slice(row * size * phases..(row + 1) * size * phases);
                    for phase in 0..phases {
                        let line = &lines[(row * phases + phase) * len..][..len];
                        for (longitude, cell) in line.iter().enumerate() {
                            let place = longitude % size * phases + phase;
                            if longitude < size {
                                x[place] = *cell
                            } else {
                                x[place] += *cell
                            }
                        }
                    }
                });
            })
        }
    }
}

/// Row of outputs of one head.
#[derive(Clone, Copy)]
pub(super) struct Row<'a, E> {
    pub(super) around: Around,
    pub(super) neighbors: &'a [Neighbor],
    /// First of the input rows.
    pub(super) first: usize,
    pub(super) scale: f64,
    /// Queries, `[channels, rows, longitudes]`, and the index of this row in them.
    pub(super) queries: &'a [E],
    pub(super) row: usize,
    /// Number of output rows.
    pub(super) rows: usize,
    /// [`Around::lines`] of the keys and values of the head, and their numbers of channels.
    pub(super) keys: &'a [E],
    pub(super) values: &'a [E],
    pub(super) widths: [usize; 2],
}

impl<E: Element> Row<'_, E> {
    /// Range of the row within a channel of outputs.
    fn part(&self, channel: usize) -> Range<usize> {
        let (row, size) = (channel * self.rows + self.row, self.around.size);
        row * size..(row + 1) * size
    }

    /// Copies the row of all channels of outputs, padded with zeros to full vectors.
    #[inline(always)]
    fn copy(&self, cells: &[E], target: &mut [E]) {
        for (channel, target) in target.chunks_exact_mut(self.around.padded()).enumerate() {
            let (row, fill) = target.split_at_mut(self.around.size);
            row.copy_from_slice(&cells[self.part(channel)]);
            fill.fill(E::default());
        }
    }

    /// Offsets at which the longitudes of each neighbor start.
    fn starts(&self) -> Vec<usize> {
        let start =
            |neighbor: &Neighbor| self.around.start(neighbor.row - self.first, neighbor.shift);
        self.neighbors.iter().map(start).collect()
    }

    /// Writes the attention weights of all neighbors, `[neighbors, padded]`, from padded queries.
    ///
    /// # Safety
    /// `starts` must be those of this row, and `shares` must have room for the weights.
    #[inline(always)]
    unsafe fn shares<S: Simd>(&self, simd: S, starts: &[usize], q: &[E], shares: *mut E) {
        let (padded, channel) = (self.around.padded(), self.around.channel());
        let [width, _] = self.widths;
        let scale = E::splat(simd, E::from_f64(self.scale));
        let zero = E::splat(simd, E::default());
        // SAFETY: guaranteed by the caller; a line has `padded` longitudes after each start.
        unsafe {
            for (number, start) in starts.iter().enumerate() {
                let keys = self.keys.as_ptr().add(*start);
                for place in (0..padded).step_by(E::lanes::<S>()) {
                    let mut sum = zero;
                    for feature in 0..width {
                        let q = E::load::<S>(q.as_ptr().add(feature * padded + place));
                        let key = E::load::<S>(keys.add(feature * channel + place));
                        sum = E::mul_add(simd, q, key, sum);
                    }
                    let score = E::times(simd, sum, scale);
                    E::store::<S>(shares.add(number * padded + place), score);
                }
            }
            for place in (0..padded).step_by(E::lanes::<S>()) {
                let score = |number: usize| shares.add(number * padded + place);
                let mut most = E::splat(simd, E::from_f64(f64::NEG_INFINITY));
                for number in 0..starts.len() {
                    let score = E::load::<S>(score(number));
                    most = E::select_less(simd, [most, score], score, most);
                }
                let mut sum = zero;
                for (number, neighbor) in self.neighbors.iter().enumerate() {
                    let away = E::minus(simd, E::load::<S>(score(number)), most);
                    let weight = E::splat(simd, E::from_f64(neighbor.weight));
                    let share = E::times(simd, weight, exp::<S, E>(simd, away));
                    E::store::<S>(score(number), share);
                    sum = E::plus(simd, sum, share);
                }
                for number in 0..starts.len() {
                    let share = E::over(simd, E::load::<S>(score(number)), sum);
                    E::store::<S>(score(number), share);
                }
            }
            self.end_with_zeros(shares);
        }
    }

    /// Writes zeros to the padding after the longitudes of each neighbor.
    ///
    /// # Safety
    /// `cells` must point to `[neighbors, padded]` elements.
    #[inline(always)]
    unsafe fn end_with_zeros(&self, cells: *mut E) {
        let (size, padded) = (self.around.size, self.around.padded());
        for number in 0..self.neighbors.len() {
            for place in size..padded {
                // SAFETY: guaranteed by the caller.
                unsafe { *cells.add(number * padded + place) = E::default() };
            }
        }
    }
}

/// Computes one row of the result of a head, `[channels, rows, longitudes]`.
pub(super) struct Forward<'a, E> {
    pub(super) row: Row<'a, E>,
    pub(super) y: Shared<E>,
}

impl<E: Element> WithSimd for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { row, y } = self;
        let (padded, channel) = (row.around.padded(), row.around.channel());
        let ([width, width_of_values], starts) = (row.widths, row.starts());
        let rooms = [width, starts.len(), 1].map(|lines| lines * padded);
        with_scratch(
            rooms.iter().sum(),
            #[inline(always)]
            |scratch: &mut [E]| {
                let (q, rest) = scratch.split_at_mut(rooms[0]);
                let (shares, line) = rest.split_at_mut(rooms[1]);
                row.copy(row.queries, q);
                // SAFETY: the scratch has the room, and a line has `padded` longitudes after each
                // start.
                unsafe {
                    row.shares(simd, &starts, q, shares.as_mut_ptr());
                    for feature in 0..width_of_values {
                        let values = row.values.as_ptr().add(feature * channel);
                        for place in (0..padded).step_by(E::lanes::<S>()) {
                            let mut sum = E::splat(simd, E::default());
                            for (number, start) in starts.iter().enumerate() {
                                let share = shares.as_ptr().add(number * padded + place);
                                let value = E::load::<S>(values.add(start + place));
                                sum = E::mul_add(simd, E::load::<S>(share), value, sum);
                            }
                            E::store::<S>(line.as_mut_ptr().add(place), sum);
                        }
                        let target = y.slice(row.part(feature));
                        target.copy_from_slice(&line[..target.len()]);
                    }
                }
            },
        );
    }
}

/// Adds the contribution of one row of outputs to the gradients of a head.
pub(super) struct Backward<'a, E> {
    pub(super) row: Row<'a, E>,
    pub(super) cotangent: &'a [E],
    /// Gradients of the cells of the queries, and of the lines of keys and values.
    pub(super) queries: &'a mut [E],
    pub(super) keys: &'a mut [E],
    pub(super) values: &'a mut [E],
}

impl<E: Element> WithSimd for Backward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            row,
            cotangent,
            queries,
            keys,
            values,
        } = self;
        let (padded, channel, lanes) = (row.around.padded(), row.around.channel(), E::lanes::<S>());
        let ([width, width_of_values], starts) = (row.widths, row.starts());
        let count = starts.len();
        let rooms = [width, width, width_of_values, count, count, 1].map(|lines| lines * padded);
        let zero = E::splat(simd, E::default());
        let scale = E::splat(simd, E::from_f64(row.scale));
        with_scratch(
            rooms.iter().sum(),
            #[inline(always)]
            |scratch: &mut [E]| {
                let (q, rest) = scratch.split_at_mut(rooms[0]);
                let (of_q, rest) = rest.split_at_mut(rooms[1]);
                let (y, rest) = rest.split_at_mut(rooms[2]);
                let (shares, rest) = rest.split_at_mut(rooms[3]);
                let (slopes, means) = rest.split_at_mut(rooms[4]);
                row.copy(row.queries, q);
                row.copy(cotangent, y);
                of_q.fill(E::default());
                means.fill(E::default());
                // SAFETY: the scratch has the room, and a line has `padded` longitudes after each
                // start.
                unsafe {
                    row.shares(simd, &starts, q, shares.as_mut_ptr());
                    // Gradients of values and of attention weights, and the means of the latter.
                    for (number, start) in starts.iter().enumerate() {
                        for place in (0..padded).step_by(lanes) {
                            let share = E::load::<S>(shares.as_ptr().add(number * padded + place));
                            let mut slope = zero;
                            for feature in 0..width_of_values {
                                let y = E::load::<S>(y.as_ptr().add(feature * padded + place));
                                let offset = feature * channel + start + place;
                                let value = E::load::<S>(row.values.as_ptr().add(offset));
                                slope = E::mul_add(simd, y, value, slope);
                                let sum = values.as_mut_ptr().add(offset);
                                E::store::<S>(sum, E::mul_add(simd, share, y, E::load::<S>(sum)));
                            }
                            E::store::<S>(slopes.as_mut_ptr().add(number * padded + place), slope);
                            let mean = means.as_mut_ptr().add(place);
                            E::store::<S>(mean, E::mul_add(simd, share, slope, E::load::<S>(mean)));
                        }
                    }
                    // Gradients of scores.
                    for number in 0..count {
                        for place in (0..padded).step_by(lanes) {
                            let offset = number * padded + place;
                            let share = E::load::<S>(shares.as_ptr().add(offset));
                            let mean = E::load::<S>(means.as_ptr().add(place));
                            let score = slopes.as_mut_ptr().add(offset);
                            let slope = E::minus(simd, E::load::<S>(score), mean);
                            let slope = E::times(simd, slope, E::times(simd, share, scale));
                            E::store::<S>(score, slope);
                        }
                    }
                    row.end_with_zeros(slopes.as_mut_ptr());
                    for (number, start) in starts.iter().enumerate() {
                        for place in (0..padded).step_by(lanes) {
                            let slope = E::load::<S>(slopes.as_ptr().add(number * padded + place));
                            for feature in 0..width {
                                let (column, offset) =
                                    (feature * padded + place, feature * channel + start + place);
                                let q = E::load::<S>(q.as_ptr().add(column));
                                let key = E::load::<S>(row.keys.as_ptr().add(offset));
                                let sum = keys.as_mut_ptr().add(offset);
                                E::store::<S>(sum, E::mul_add(simd, slope, q, E::load::<S>(sum)));
                                let sum = of_q.as_mut_ptr().add(column);
                                E::store::<S>(sum, E::mul_add(simd, slope, key, E::load::<S>(sum)));
                            }
                        }
                    }
                }
                for (feature, line) in of_q.chunks_exact(padded).enumerate() {
                    let target = &mut queries[row.part(feature)];
                    target.copy_from_slice(&line[..target.len()]);
                }
            },
        );
    }
}
