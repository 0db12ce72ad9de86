//! Passes of dense attention over a block of keys: results, and gradients of queries, keys and values.
//!
//! Targets, queries or keys, lie in lanes; of sources, the others, one element serves all lanes. Sources of one head lie apart:
//! some at a time are copied to scratch, where they lie in one piece, and several groups of targets use them. Results are carried from block to
//! block with the largest score so far (M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018; T.
//! Dao et al., "FlashAttention", 2022).
//!
//! One pass over the keys computes all gradients, so that scores are computed once. Those of queries are sums over all keys:
//! tasks that may run at the same time add to sums of their own. How many there are, which keys belong to which, and the order in
//! which they are added, depend on shapes and the instruction set: the bits are the same for any number of threads.
mod job;
mod pairs;
mod passes;
mod task;

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::blocks::TARGETS;
use crate::kernel::buffer::filled;
use crate::kernel::lanes::CHUNK;
use crate::kernel::memory::with_scratch;
use crate::kernel::simd::{Element, Isa};
pub(crate) use job::{Backward, Bias, Dense, Dropout, LOWEST, Results, Tokens};
use task::{GROUPS, Runs, SOURCES, Task};

/// Tasks that threads should at least find.
const TASKS: usize = 32;
/// Multiplications below which a second thread does not pay.
const SERIAL: usize = 1 << 19;
/// Tasks of the pass for gradients, if there are tiles enough: those of a head add to sums of their own.
const GRADIENT_TASKS: usize = 128;
/// Bytes of these sums, which are of so many queries at a time: of all but in tests, which go through several parts.
const SUMS: usize = if cfg!(test) { 64 << 10 } else { 32 << 20 };

impl<E: Element> Dense<E> {
    /// Adds to the results what this block of keys gives.
    ///
    /// # Safety
    /// All elements must be initialised and outlive the call, and nothing else may use the results meanwhile.
    pub(crate) unsafe fn run(&self, isa: Isa) {
        isa.run(Whole(self));
    }

    /// Targets of a tile, if so many tokens of so many heads are dealt out: few are not dealt out in large tiles.
    fn tile<S: Simd>(&self, tokens: usize, heads: usize) -> usize {
        let group = TARGETS * E::lanes::<S>();
        let groups = self.batch * heads * tokens.div_ceil(group) / TASKS;
        group * groups.clamp(1, GROUPS)
    }

    /// Runs tasks, on one thread if there is little to do.
    fn deal(&self, tasks: Range<usize>, run: impl Fn(usize) + Send + Sync) {
        let products = self.queries.tokens * self.keys.tokens * self.queries.heads * self.batch;
        if products * (self.queries.width + self.values.width) < SERIAL {
            tasks.for_each(run);
        } else {
            tasks.into_par_iter().for_each(run);
        }
    }

    fn forward<S: Simd>(&self, simd: S) {
        let Tokens { tokens, heads, .. } = self.queries;
        let length = self.tile::<S>(tokens, heads);
        let tiles = tokens.div_ceil(length);
        self.deal(0..self.batch * heads * tiles, |index| {
            // Tiles of later queries have more to do if attention is causal, and begin first.
            let tile = tiles - 1 - index / heads % tiles;
            simd.vectorize(Task {
                job: self,
                batch: index / heads / tiles,
                head: index % heads,
                targets: tile * length..((tile + 1) * length).min(tokens),
                sources: 0..self.keys.tokens,
            });
        });
    }

    fn gradients<S: Simd>(&self, simd: S, from: Backward<E>, wanted: [Option<Tokens<E>>; 3]) {
        let (keys, queries) = (&self.keys, self.queries.tokens);
        let length = self.tile::<S>(keys.tokens, keys.heads);
        let tiles = keys.tokens.div_ceil(length);
        let [query, key, value] = wanted;
        let heads = self.batch * keys.heads;
        let row = self.batch * self.queries.pitch() * size_of::<E>();
        // Tasks for a head; its tiles are dealt out in turn, for in causal order those of earlier keys have more to do.
        let shares = match query {
            Some(_) => GRADIENT_TASKS
                .div_ceil(heads.max(1))
                .min(tiles.div_ceil(2))
                .min(SUMS / (SOURCES * row).max(1) + 1),
            None => tiles,
        };
        let shares = shares.max(1);
        // The first share adds to the gradients themselves.
        let others = query.map_or(0, |_| shares - 1);
        let together = (SUMS / (others * row).max(1)).next_multiple_of(SOURCES);
        let together = together.min(queries);
        let mut buffers: Vec<_> = (0..others)
            .map(|_| filled::<E>(together * row / size_of::<E>(), 0.0))
            .collect();
        for first in (0..queries).step_by(together.max(1)) {
            let sources = first..(first + together).min(queries);
            let sums: Vec<_> = match query {
                Some(gradient) => {
                    let others = buffers.iter_mut().map(|buffer| Tokens {
                        elements: buffer.shared(),
                        first,
                        tokens: together,
                        ..gradient
                    });
                    std::iter::once(gradient).chain(others).collect()
                }
                None => Vec::new(),
            };
            self.deal(0..heads * shares, |index| {
                let (share, index) = (index % shares, index / shares);
                let query = sums.get(share).copied();
                for tile in (share..tiles).step_by(shares) {
                    let wanted = [query, key, value];
                    simd.vectorize(Task {
                        job: &Self {
                            results: Results::Gradients { from, wanted },
                            ..*self
                        },
                        batch: index / keys.heads,
                        head: index % keys.heads,
                        targets: tile * length..((tile + 1) * length).min(keys.tokens),
                        sources: sources.clone(),
                    });
                }
            });
            if let [gradient, sums @ ..] = &sums[..]
                && !sums.is_empty()
            {
                self.add(sources, gradient, sums);
            }
        }
    }

    /// Adds sums to the gradients of some queries, and makes them zero.
    fn add(&self, queries: Range<usize>, to: &Tokens<E>, sums: &[Tokens<E>]) {
        let (rows, pitch) = (self.batch * queries.len(), to.pitch());
        let together = (CHUNK / pitch.max(1)).max(1);
        self.deal(0..rows.div_ceil(together), |task| {
            for row in task * together..((task + 1) * together).min(rows) {
                let (batch, query) = (row / queries.len(), row % queries.len());
                let at = |tokens: &Tokens<E>| tokens.at(batch, queries.start + query, 0);
                let to = at(to);
                for from in sums.iter().map(at) {
                    for element in 0..pitch {
                        // SAFETY: elements of a row, which no other task uses.
                        unsafe {
                            *to.add(element) += *from.add(element);
                            *from.add(element) = E::default();
                        }
                    }
                }
            }
        });
    }
}

struct Whole<'a, E>(&'a Dense<E>);

impl<E: Element> WithSimd for Whole<'_, E> {
    type Output = ();

    fn with_simd<S: Simd>(self, simd: S) {
        let Self(job) = self;
        match job.results {
            Results::Forward { .. } => job.forward(simd),
            Results::Gradients { from, wanted } => job.gradients(simd, from, wanted),
        }
    }
}

impl<E: Element> WithSimd for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let job = self.job;
        let lanes = E::lanes::<S>();
        let widths = job.queries.width + job.values.width;
        let vectors = TARGETS * (2 * widths * GROUPS + 2 * SOURCES);
        // Keys and gradients of queries, each a row of whole vectors.
        let row = job.keys.width.next_multiple_of(lanes);
        let rows = match job.results {
            Results::Forward { .. } => [0; 2],
            Results::Gradients { .. } => [GROUPS * TARGETS * lanes, SOURCES],
        };
        let length = vectors * lanes + SOURCES * widths + (rows[0] + rows[1]) * row;
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
                let rows = rows.map(|rows| take(rows * row));
                let copies = [&job.queries, &job.values].map(|tokens| take(SOURCES * tokens.width));
                let mut runs = |vectors: usize, groups: usize| {
                    let pitch = vectors * lanes;
                    let first = take(groups * TARGETS * pitch);
                    Runs { first, pitch }
                };
                // SAFETY: the scratch is long enough; the rest is the caller's of `run`.
                unsafe {
                    match job.results {
                        Results::Forward { output, most, sum } => {
                            self.forward(simd, copies, &mut runs, output, [most, sum]);
                        }
                        Results::Gradients { from, wanted } => {
                            self.gradients(simd, copies, rows, &mut runs, from, wanted);
                        }
                    }
                }
            },
        );
    }
}
