//! Passes of dense attention over a block of keys: results, gradients of queries, gradients of keys and values.
//!
//! Targets, queries or keys, lie in lanes; sources, the others, are read where they lie, one element for all lanes. Scores of
//! a few vectors of targets with some sources at a time stay in the first-level cache; results are carried from block to
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
use task::{Runs, SOURCES, Task};

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
        let length = TARGETS * E::lanes::<S>();
        let tiles = tokens.div_ceil(length);
        let products = job.queries.tokens * job.keys.tokens * job.queries.heads * job.batch;
        let tasks = 0..job.batch * heads * tiles;
        let run = |index: usize| {
            // Later tiles of causal attention have more to do, and begin first.
            let tile = tiles - 1 - index / heads % tiles;
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
        let widths = 2 * (self.job.queries.width + self.job.values.width);
        let length = TARGETS * (widths + 2 * SOURCES) * E::lanes::<S>();
        with_scratch(
            length,
            #[inline(always)]
            |scratch| {
                let mut first: *mut E = scratch.as_mut_ptr();
                let mut runs = |vectors: usize| {
                    let pitch = vectors * E::lanes::<S>();
                    let runs = Runs { first, pitch };
                    first = first.wrapping_add(TARGETS * pitch);
                    runs
                };
                // SAFETY: the scratch is long enough; the rest is the caller's of `run`.
                unsafe {
                    match self.job.results {
                        Results::Forward { output, most, sum } => {
                            self.forward(simd, &mut runs, output, [most, sum]);
                        }
                        Results::Queries { from, gradient } => {
                            self.query_gradients(simd, &mut runs, from, gradient);
                        }
                        Results::Keys { from, key, value } => {
                            self.key_gradients(simd, &mut runs, from, [key, value]);
                        }
                    }
                }
            },
        );
    }
}
