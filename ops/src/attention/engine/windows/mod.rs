//! Passes of neighborhood attention: results, gradients of queries, gradients of keys and values.
//!
//! All three run through tiles. A few targets at a time are packed, with neighbors or tiles in the
//! lanes of vectors, together with the rows of sources that they are the first to reach, of a few
//! heads that are adjacent in memory. Their scores are computed and turned into weights, with which
//! the sources are summed. In the backward pass scores are recomputed from the saved logarithm of
//! the sum of exponentials, once for queries and once for keys: each result is written by one task,
//! so that no order of additions depends on threads.

mod forward;
mod gradients;
mod job;
mod sources;
mod task;

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::blocks::TARGETS;
use super::tiles::{Budget, Side, Tiles};
use crate::kernel::memory::with_scratch;
use crate::kernel::simd::{Element, Isa};
use crate::kernel::work::{SERIAL, deal};
pub(crate) use job::{Backward, Results, Windows};
use sources::Operands;
use task::{Room, Task};

/// Bytes that the sources of a task may take at a time, if targets are queries and if they are
/// keys: chosen for a second-level cache of 1 MiB, together with a group's targets and scores.
const TILE_BYTES: [usize; 2] = [768 << 10, 640 << 10];
/// Bytes of a cell that the heads of a task should make up. A single head is a few cache lines, far
/// from those of the next cell, which processors do not prefetch.
const CELL_BYTES: usize = 512;
/// Number of tasks per thread to aim for, so that all threads end at about the same time.
const TASKS: usize = 4;

impl<E: Element> Windows<'_, E> {
    /// Computes the results for the targets in a box: of queries, or of keys for their gradients.
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
        let [key, value] = job.widths.map(|width| width.max(1) * size_of::<E>());
        let side = job.side();
        let heads = match side {
            Side::Queries => job.heads,
            Side::Keys => job.heads / job.shared,
        };
        let kernel: usize = job.dims.iter().map(|dim| dim.neighborhood.kernel).product();
        let cells: usize = part.iter().map(Range::len).product();
        let products = cells * kernel * job.heads * job.batch * job.products();
        let budget = Budget {
            lanes,
            sources: TILE_BYTES[side as usize] / (key + value),
            heads: (CELL_BYTES / key.min(value)).clamp(1, heads),
            all_heads: heads * job.batch,
            tasks: if products < SERIAL {
                1
            } else {
                TASKS * rayon::current_num_threads()
            },
            kept: side == Side::Keys && job.shared > 1,
        };
        let all = Tiles::of_box(&job.dims, side, part, budget);
        let classes = all.iter().flat_map(|tiles| {
            let classes = tiles.classes.iter();
            classes.map(move |class| (tiles, class, Operands::new(class, job.widths, lanes)))
        });
        let classes: Vec<_> = classes.collect();
        let mut tasks = Vec::new();
        for (tiles, class, operands) in &classes {
            let count = tiles.count(class) * job.batch;
            // One tile in each lane, or some heads of one tile.
            let (stretch, each) = match class.neighbors {
                1 => (count * heads, lanes),
                _ => (heads, tiles.heads),
            };
            for start in (0..count * heads).step_by(stretch) {
                let starts = (start..start + stretch).step_by(each);
                let ranges = starts.map(|first| first..(first + each).min(start + stretch));
                tasks.extend(ranges.map(|range| (*tiles, *class, operands, range)));
            }
        }
        deal(tasks.len(), products, |task| {
            let (tiles, class, operands, range) = &tasks[task];
            let places = range
                .clone()
                .map(|index| tiles.place(class, index, heads))
                .collect();
            let steps = tiles.steps();
            simd.vectorize(Task {
                job,
                class,
                operands,
                steps,
                places,
            });
        });
    }
}

impl<E: Element> WithSimd for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [key, value] = self.job.widths;
        let turns = self.turns();
        let sources = turns * self.class.held * self.class.vectors()[2];
        let counts = self.class.groups.iter().flat_map(|group| &group.counts);
        let most = counts.copied().max().unwrap_or(0);
        // Operands of a group, results, two scores for each of its pairs, and operands of sources
        // with two numbers each.
        let vectors = (TARGETS + self.kept()) * (key + value)
            + 2 * TARGETS * most
            + (key + value + 2) * sources;
        with_scratch(
            vectors * E::lanes::<S>(),
            #[inline(always)]
            |scratch| {
                let mut room = Room(scratch);
                // SAFETY: the room is large enough, and all positions of tiles are in the fields.
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
