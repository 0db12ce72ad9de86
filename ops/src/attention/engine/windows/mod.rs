//! Passes of neighborhood attention: results, gradients of queries, gradients of keys and values.
//!
//! All three go through tiles: operands of a tile's sources are packed, neighbours or tiles in the lanes of vectors; then a few
//! targets at a time are packed and have their scores computed, turned into weights, and sources summed up with them. Scores are
//! computed anew in the backward pass, from the saved logarithm of the sum of exponentials. Each result is written by one task,
//! so that nothing is added in an order that depends on threads; the price is that scores are computed twice there.
mod forward;
mod gradients;
mod job;
mod task;

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::blocks::TARGETS;
use super::tiles::{Class, Side, Tiles};
use crate::kernel::memory::with_scratch;
use crate::kernel::simd::{Element, Isa};
pub(crate) use job::{Backward, Results, Windows};
use task::{Room, Task};

/// Bytes that the sources of a tile may take: chosen for a second-level cache of 1 MiB, beside a group's targets and scores.
const TILE_BYTES: usize = 768 << 10;
/// Multiplications below which a second thread does not pay.
const SERIAL: usize = 1 << 19;

impl<E: Element> Windows<'_, E> {
    /// Computes the results of the targets in a box: of queries, or of keys for their gradients.
    pub(crate) fn run(&self, isa: Isa, part: &[Range<usize>; 3]) {
        isa.run(Whole { job: self, part });
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
        let bytes = elements.max(1) * size_of::<E>();
        let side = job.side();
        let heads = match side {
            Side::Queries => job.heads,
            Side::Keys => job.heads / job.shared,
        };
        let all = Tiles::of_box(&job.dims, side, part, lanes, bytes, TILE_BYTES);
        let mut tasks = Vec::new();
        for tiles in &all {
            for class in &tiles.classes {
                let all = tiles.count(class) * heads * job.batch;
                // One tile for each task, or for each lane.
                let each = lanes / class.neighbours;
                let starts = (0..all).step_by(each);
                tasks.extend(starts.map(|start| (tiles, class, start..(start + each).min(all))));
            }
        }
        let run = |(tiles, class, range): (&Tiles, &Class, Range<usize>)| {
            let places = range
                .map(|index| tiles.place(class, index, heads))
                .collect();
            let steps = tiles.steps();
            simd.vectorize(Task {
                job,
                class,
                steps,
                places,
            });
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

impl<E: Element> WithSimd for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [key, value] = self.job.widths;
        let sources: usize = self.class.vectors().iter().product();
        let counts = self.class.groups.iter().flat_map(|group| &group.counts);
        let most = counts.copied().max().unwrap_or(0);
        // Operands of a group, results, two scores for each of its pairs, operands of sources with two numbers each.
        let vectors = (TARGETS + self.kept()) * (key + value)
            + 2 * TARGETS * most
            + (key + value + 2) * sources;
        with_scratch(
            vectors * E::lanes::<S>(),
            #[inline(always)]
            |scratch| {
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
            },
        );
    }
}
