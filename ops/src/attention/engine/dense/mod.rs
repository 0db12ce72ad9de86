//! Passes of dense attention over a block of keys: results, and gradients of queries, keys and
//! values.
//!
//! Targets (queries or keys) are in lanes; an element of a source (the other side) serves all
//! lanes. The sources of a head are not contiguous: some at a time are copied to contiguous
//! scratch, which several groups of targets use. Results are carried from block to block together
//! with the largest score so far (M. Milakov and N. Gimelshein, "Online normalizer calculation for
//! softmax", 2018; T. Dao et al., "FlashAttention", 2022).
//!
//! One pass over the keys computes all gradients, so that scores are computed once. Gradients of
//! queries are sums over all keys: tasks that may run at the same time add to sums of their own.
//! The number of these sums, the keys of each, and the order in which they are added depend only on
//! shapes and the instruction set: the bits are the same for any number of threads.

mod job;
mod matrices;
mod pairs;
mod passes;
mod room;
mod task;

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::kernel::amx::{self, SIDE};
use crate::kernel::buffer::filled;
use crate::kernel::lanes::CHUNK;
use crate::kernel::memory::with_scratch;
use crate::kernel::products::{Numbers, Products, Rounded, matrices_multiply};
use crate::kernel::simd::{Element, Isa};
use crate::kernel::work::deal;
pub(crate) use job::{Backward, Bias, Dense, Dropout, LOWEST, Results, Tokens};
use room::{GROUPS, Room, SOURCES, together};
use task::Task;

/// Minimum number of tasks for the threads.
const TASKS: usize = 32;
/// Number of tasks of the gradient pass, if there are enough tiles: those of a head add to sums of
/// their own.
const GRADIENT_TASKS: usize = 128;
/// Bytes of these sums, which bound the queries computed at a time: all of them except in tests,
/// which run several parts.
const SUMS: usize = if cfg!(test) { 64 << 10 } else { 32 << 20 };

impl<E: Element> Dense<E> {
    /// Adds the contribution of this block of keys to the results.
    ///
    /// # Safety
    /// All elements must be initialised and outlive the call, and nothing else may use the results
    /// meanwhile.
    pub(crate) unsafe fn run(&self, isa: Isa) {
        isa.run(Whole {
            job: self,
            parts: self.parts(isa),
        });
    }

    /// Number of bf16 numbers that matrices multiply in place of one; zero if vectors are as fast.
    fn parts(&self, isa: Isa) -> usize {
        const WIDTH: usize = 32;
        let parts = match self.halves {
            true => <Rounded as Products<E>>::PARTS,
            false if self.queries.width.min(self.values.width) < WIDTH => 0,
            false => <Numbers as Products<E>>::PARTS,
        };
        if isa.has_matrices() { parts } else { 0 }
    }

    /// Number of targets of a tile, given tokens and heads; few tokens are not divided into large
    /// tiles.
    fn tile<S: Simd>(&self, tokens: usize, heads: usize, parts: usize) -> usize {
        let group = together(parts) * E::lanes::<S>();
        let groups = self.batch * heads * tokens.div_ceil(group) / TASKS;
        group * groups.clamp(1, GROUPS)
    }

    /// Runs tasks, on one thread if there is little to do.
    fn deal(&self, tasks: usize, run: impl Fn(usize) + Sync) {
        let widths = self.queries.width + self.values.width;
        let products = self.queries.tokens * self.keys.tokens * self.queries.heads * self.batch;
        deal(tasks, products * widths, run);
    }

    fn forward<S: Simd>(&self, simd: S, parts: usize) {
        let Tokens { tokens, heads, .. } = self.queries;
        let length = self.tile::<S>(tokens, heads, parts);
        let tiles = tokens.div_ceil(length);
        self.deal(self.batch * heads * tiles, |index| {
            // In causal attention, tiles of later queries have more work, and start first.
            let tile = tiles - 1 - index / heads % tiles;
            simd.vectorize(Task {
                job: self,
                batch: index / heads / tiles,
                head: index % heads,
                targets: tile * length..((tile + 1) * length).min(tokens),
                sources: 0..self.keys.tokens,
                parts,
            });
        });
    }

    fn gradients<S: Simd>(
        &self,
        simd: S,
        parts: usize,
        from: Backward<E>,
        wanted: [Option<Tokens<E>>; 3],
    ) {
        let (keys, queries) = (&self.keys, self.queries.tokens);
        let length = self.tile::<S>(keys.tokens, keys.heads, parts);
        let tiles = keys.tokens.div_ceil(length);
        let [query, key, value] = wanted;
        let heads = self.batch * keys.heads;
        let row = self.batch * self.queries.pitch() * size_of::<E>();
        // Tasks for a head. Its tiles are dealt out in turn, because in causal order those of
        // earlier keys have more work.
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
            self.deal(heads * shares, |index| {
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
                        parts,
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

    /// Adds sums to the gradients of some queries, and resets the sums to zero.
    fn add(&self, queries: Range<usize>, to: &Tokens<E>, sums: &[Tokens<E>]) {
        let (rows, pitch) = (self.batch * queries.len(), to.pitch());
        let together = (CHUNK / pitch.max(1)).max(1);
        self.deal(rows.div_ceil(together), |task| {
            for row in task * together..((task + 1) * together).min(rows) {
                let (batch, query) = (row / queries.len(), row % queries.len());
                let at = |tokens: &Tokens<E>| tokens.at(batch, queries.start + query, 0);
                let to = at(to);
                for from in sums.iter().map(at) {
                    for element in 0..pitch {
                        // SAFETY: elements of a row that no other task uses.
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

struct Whole<'a, E> {
    job: &'a Dense<E>,
    parts: usize,
}

impl<E: Element> WithSimd for Whole<'_, E> {
    type Output = ();

    fn with_simd<S: Simd>(self, simd: S) {
        let Self { job, parts } = self;
        match job.results {
            Results::Forward { .. } => job.forward(simd, parts),
            Results::Gradients { from, wanted } => job.gradients(simd, parts, from, wanted),
        }
    }
}

impl<E: Element> WithSimd for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if const { matrices_multiply::<S, E, Rounded>() } && self.parts == 1 {
            simd.vectorize(Pass::<E, Rounded>(&self, PhantomData));
        } else {
            simd.vectorize(Pass::<E, Numbers>(&self, PhantomData));
        }
    }
}

/// A task with its type of products.
struct Pass<'t, 'a, E, P>(&'t Task<'a, E>, PhantomData<P>);

impl<E: Element, P: Products<E, Number = E>> WithSimd for Pass<'_, '_, E, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (task, lanes) = (self.0, E::lanes::<S>());
        // SAFETY: factors are in parts only where the instruction set has matrices.
        let registers = (task.parts > 0).then(|| unsafe { amx::Matrices::of(SIDE, SIDE) });
        let widths = [task.job.queries.width, task.job.values.width];
        let room = |first| Room::new(first, lanes, task.parts, widths);
        let (_, taken) = room(std::ptr::null_mut());
        with_scratch(
            taken,
            #[inline(always)]
            |scratch: &mut [E]| {
                let (room, _) = room(scratch.as_mut_ptr());
                // SAFETY: the scratch is long enough; the rest is guaranteed by the caller of
                // `run`.
                unsafe {
                    match task.job.results {
                        Results::Forward { output, most, sum } => {
                            let sums = [most, sum];
                            task.forward::<S, P>(simd, &registers, &room, output, sums);
                        }
                        Results::Gradients { from, wanted } => {
                            task.gradients::<S, P>(simd, &registers, &room, from, wanted);
                        }
                    }
                }
            },
        );
    }
}
