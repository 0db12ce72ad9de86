//! Passes of dense attention over a block of keys: results, gradients of queries, gradients of keys and values.
//!
//! Targets, queries or keys, lie in lanes; of sources, the others, one element serves all lanes. Sources of one head lie apart:
//! some at a time are copied to scratch, where they lie in one piece, and several groups of targets use them. Results are carried from block to
//! block with the largest score so far (M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018; T.
//! Dao et al., "FlashAttention", 2022).
mod job;
mod pairs;
mod passes;
mod task;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::blocks::TARGETS;
use crate::kernel::memory::with_scratch;
use crate::kernel::simd::{Element, Isa};
pub(crate) use job::{Backward, Bias, Dense, Dropout, LOWEST, Results, Tokens};
use task::{GROUPS, Runs, SOURCES, Task};

/// Tasks that threads should at least find.
const TASKS: usize = 32;
/// Multiplications below which a second thread does not pay.
const SERIAL: usize = 1 << 19;

impl<E: Element> Dense<E> {
    /// Adds to the results what this block of keys gives.
    ///
    /// # Safety
    /// All elements must be initialised and outlive the call, and nothing else may use the results meanwhile.
    pub(crate) unsafe fn run(&self, isa: Isa) {
        isa.run(Whole(self));
    }
}

struct Whole<'a, E>(&'a Dense<E>);

impl<E: Element> WithSimd for Whole<'_, E> {
    type Output = ();

    fn with_simd<S: Simd>(self, simd: S) {
        let Self(job) = self;
        let (tokens, heads) = match job.results {
            Results::Keys { .. } => (job.keys.tokens, job.keys.heads),
            _ => (job.queries.tokens, job.queries.heads),
        };
        let group = TARGETS * E::lanes::<S>();
        // Few targets are not dealt out in large tiles.
        let groups = job.batch * heads * tokens.div_ceil(group) / TASKS;
        let length = group * groups.clamp(1, GROUPS);
        let tiles = tokens.div_ceil(length);
        let products = job.queries.tokens * job.keys.tokens * job.queries.heads * job.batch;
        let tasks = 0..job.batch * heads * tiles;
        let run = |index: usize| {
            // Tiles of later queries, and of earlier keys, have more to do if attention is causal, and begin first.
            let turn = index / heads % tiles;
            let tile = match job.results {
                Results::Keys { .. } => turn,
                _ => tiles - 1 - turn,
            };
            simd.vectorize(Task {
                job,
                batch: index / heads / tiles,
                head: index % heads,
                targets: tile * length..((tile + 1) * length).min(tokens),
            });
        };
        if products * (job.queries.width + job.values.width) < SERIAL {
            tasks.for_each(run);
        } else {
            tasks.into_par_iter().for_each(run);
        }
    }
}

impl<E: Element> WithSimd for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let widths = self.job.queries.width + self.job.values.width;
        let vectors = TARGETS * (2 * widths * GROUPS + 2 * SOURCES);
        let length = vectors * E::lanes::<S>() + SOURCES * widths;
        with_scratch(
            length,
            #[inline(always)]
            |scratch| {
                let mut first: *mut E = scratch.as_mut_ptr();
                let mut take = |elements: usize| {
                    let taken = first;
                    first = first.wrapping_add(elements);
                    taken
                };
                let copies = [&self.job.queries, &self.job.values]
                    .map(|tokens| take(SOURCES * tokens.width));
                let mut runs = |vectors: usize, groups: usize| {
                    let pitch = vectors * E::lanes::<S>();
                    let first = take(groups * TARGETS * pitch);
                    Runs { first, pitch }
                };
                // SAFETY: the scratch is long enough; the rest is the caller's of `run`.
                unsafe {
                    match self.job.results {
                        Results::Forward { output, most, sum } => {
                            self.forward(simd, copies, &mut runs, output, [most, sum]);
                        }
                        Results::Queries { from, gradient } => {
                            self.query_gradients(simd, copies, &mut runs, from, gradient);
                        }
                        Results::Keys { from, key, value } => {
                            self.key_gradients(simd, copies, &mut runs, from, [key, value]);
                        }
                    }
                }
            },
        );
    }
}
