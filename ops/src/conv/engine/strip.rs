//! Innermost kernel of forward passes and input gradients: a block of channels × columns in
//! registers.

use pulp::{Simd, WithSimd};

use super::ahead::{Fetcher, Stretch};
use crate::kernel::memory::prefetch_to_write;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Terms of a block's sums.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a, E> {
    /// The first column of the tile's row.
    pub tile: *const E,
    /// Offset of every (channel, tap) from there.
    pub offsets: *const u32,
    /// Number of offsets.
    pub count: usize,
    /// Weights, `[term][channel]`.
    pub weights: *const E,
    /// Cells of a later tile, to be prefetched.
    pub ahead: &'a [Stretch],
}

/// Arguments of one call of the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strip<'a, E: Element, P: Products<E>> {
    /// The terms.
    pub terms: Terms<'a, E>,
    /// Bias of every channel; null without bias.
    pub bias: *const E,
    /// Whether results are added to the output's values.
    pub add: bool,
    /// The first result.
    pub output: *mut P::Number,
    /// Elements between channels of the output.
    pub channel: usize,
    /// Elements between columns of the output.
    pub step: usize,
    /// The number of columns of the output, from the first result on.
    pub columns: usize,
}

/// A kernel that keeps a block of `M` channels × `N` vectors in registers.
pub(super) trait Kernel {
    /// Runs the kernel, whose pointers must be valid for the block.
    fn block<S: Simd, const M: usize, const N: usize>(self, simd: S);
}

/// A kernel with the size of its block.
struct Block<K, const M: usize, const N: usize>(K);

impl<K: Kernel, const M: usize, const N: usize> WithSimd for Block<K, M, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        self.0.block::<S, M, N>(simd);
    }
}

/// Panels of `outputs` channels, as first channel and height of each, for rows of `vectors`
/// vectors.
pub(super) fn panels<S: Simd>(
    outputs: usize,
    vectors: usize,
) -> impl Iterator<Item = (usize, usize)> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let left = outputs - start;
        let height = (left > 0).then(|| height::<S>(left, vectors))?;
        start += height;
        Some((start - height, height))
    })
}

/// Number of channels of the next block, if `left` channels are left and rows have `vectors`
/// vectors.
pub(crate) fn height<S: Simd>(left: usize, vectors: usize) -> usize {
    let many = S::REGISTER_COUNT >= 32;
    if many && matches!(vectors, 4 | 7) {
        // Blocks three vectors wide would leave one vector, with too few sums to keep the
        // arithmetic busy. Blocks of six channels are four wide; a remainder is divided evenly.
        return left.div_ceil(left.div_ceil(6));
    }
    match left {
        8.. if many => 8,
        4.. => 4,
        _ if S::IS_SCALAR => 1,
        _ => left,
    }
}

/// Number of vectors of the widest block with this number of channels.
pub(crate) fn width<S: Simd>(channels: usize) -> usize {
    match (channels, S::REGISTER_COUNT >= 32) {
        (8, _) | (4, false) => 3,
        (5 | 6, _) | (3, false) => 4,
        (4, true) | (2, false) => 6,
        _ => 8,
    }
}

/// Runs a kernel of `vectors` vectors on a block of `channels` channels.
///
/// # Safety
/// The pointers must be valid for the block: the tile for every offset and `vectors` vectors from
/// there, the weights for `terms · channels`, and the output, which nothing else may use, for
/// `columns` columns of every channel.
#[inline(always)]
pub(super) unsafe fn run<S: Simd, K: Kernel>(simd: S, kernel: K, channels: usize, vectors: usize) {
    macro_rules! block {
        ($m:literal, $n:literal) => {
            simd.vectorize(Block::<K, $m, $n>(kernel))
        };
    }
    // Compiled only where `height` and `width` select them; for single lanes only the largest.
    if const { S::IS_SCALAR } {
        return match channels {
            4 => block!(4, 3),
            _ => block!(1, 8),
        };
    }
    if const { S::REGISTER_COUNT >= 32 } {
        match (channels, vectors) {
            (8, 1) => return block!(8, 1),
            (8, 2) => return block!(8, 2),
            (8, _) => return block!(8, 3),
            (6, 1) => return block!(6, 1),
            (6, 2) => return block!(6, 2),
            (6, 3) => return block!(6, 3),
            (6, _) => return block!(6, 4),
            (5, 1) => return block!(5, 1),
            (5, 2) => return block!(5, 2),
            (5, 3) => return block!(5, 3),
            (5, _) => return block!(5, 4),
            (4, 4) => return block!(4, 4),
            (4, 5..) => return block!(4, 6),
            (3, 5..) => return block!(3, 8),
            (2, 7..) => return block!(2, 8),
            _ => {}
        }
    }
    match (channels, vectors) {
        (4, 1) => block!(4, 1),
        (4, 2) => block!(4, 2),
        (4, _) => block!(4, 3),
        (3, 1) => block!(3, 1),
        (3, 2) => block!(3, 2),
        (3, _) => block!(3, 4),
        (2, 1) => block!(2, 1),
        (2, 2) => block!(2, 2),
        (2, 3..=4) => block!(2, 4),
        (2, _) => block!(2, 6),
        (_, 1) => block!(1, 1),
        (_, 2) => block!(1, 2),
        (_, 3..=4) => block!(1, 4),
        (_, 5..=6) => block!(1, 6),
        _ => block!(1, 8),
    }
}

impl<E: Element, P: Products<E>> Kernel for Strip<'_, E, P> {
    #[inline(always)]
    fn block<S: Simd, const M: usize, const N: usize>(self, simd: S) {
        // SAFETY: the caller of `run` promises that the pointers are valid.
        unsafe {
            let Self {
                output,
                channel,
                step,
                ..
            } = self;
            if step == 1 {
                prefetch_to_write(output, [M, N * E::lanes::<S>()], channel);
            }
            let mut sums = self.terms.sums::<S, P, M, N>(simd);
            self.finish::<S, M, N>(simd, &mut sums);
        }
    }
}

impl<E: Element> Terms<'_, E> {
    /// Sums over all terms.
    ///
    /// # Safety
    /// The tile must be readable at every offset for `N` vectors, and the weights for `count · M`.
    #[inline(always)]
    pub(super) unsafe fn sums<S: Simd, P: Products<E>, const M: usize, const N: usize>(
        &self,
        simd: S,
    ) -> [[E::Vector<S>; N]; M] {
        let Self {
            tile,
            offsets,
            count,
            mut weights,
            ahead,
        } = *self;
        let zero = E::splat(simd, E::default());
        let mut sums = [[zero; N]; M];
        let mut fetcher = Fetcher::new(ahead, count);
        for term in 0..count {
            fetcher.step();
            // SAFETY: guaranteed by the caller.
            unsafe {
                let from = tile.add(*offsets.add(term) as usize);
                // The fewer of cells and weights are held in registers along with the sums; the
                // others are used as they are read.
                if M >= N {
                    let mut cells = [zero; N];
                    for (n, cell) in cells.iter_mut().enumerate() {
                        *cell = E::load::<S>(from.add(n * E::lanes::<S>()));
                    }
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let weight = E::splat(simd, *weights.add(m));
                        for (sum, cell) in sums.iter_mut().zip(&cells) {
                            *sum = P::mul_add(simd, weight, *cell, *sum);
                        }
                    }
                } else {
                    let mut factors = [zero; M];
                    for (m, factor) in factors.iter_mut().enumerate() {
                        *factor = E::splat(simd, *weights.add(m));
                    }
                    for n in 0..N {
                        let cell = E::load::<S>(from.add(n * E::lanes::<S>()));
                        for (sums, factor) in sums.iter_mut().zip(&factors) {
                            sums[n] = P::mul_add(simd, *factor, cell, sums[n]);
                        }
                    }
                }
                weights = weights.add(M);
            }
        }
        sums
    }
}

impl<E: Element, P: Products<E>> Strip<'_, E, P> {
    /// Adds the output's values, if requested, and the bias, and writes the columns of the output.
    #[inline(always)]
    unsafe fn finish<S: Simd, const M: usize, const N: usize>(
        &self,
        simd: S,
        sums: &mut [[E::Vector<S>; N]; M],
    ) {
        let Self {
            bias,
            add,
            output,
            channel,
            step,
            columns,
            ..
        } = *self;
        let lanes = E::lanes::<S>();
        let direct = step == 1 && columns >= N * lanes;
        // SAFETY: the caller of `run` promises that the pointers are valid.
        unsafe {
            for (m, sums) in sums.iter_mut().enumerate() {
                let row = output.add(m * channel);
                if add {
                    let mut old = [E::splat(simd, E::default()); N];
                    if direct {
                        for (n, old) in old.iter_mut().enumerate() {
                            *old = P::load::<S>(row.add(n * lanes));
                        }
                    } else {
                        let old = old.as_mut_ptr().cast::<E>();
                        for column in 0..columns.min(N * lanes) {
                            *old.add(column) = P::widened(*row.add(column * step));
                        }
                    }
                    for (sum, old) in sums.iter_mut().zip(&old) {
                        *sum = E::plus(simd, *sum, *old);
                    }
                }
                if !bias.is_null() {
                    let bias = E::splat(simd, *bias.add(m));
                    for sum in sums.iter_mut() {
                        *sum = E::plus(simd, *sum, bias);
                    }
                }
                if direct {
                    for (n, sum) in sums.iter().enumerate() {
                        P::store::<S>(row.add(n * lanes), *sum);
                    }
                } else {
                    let sums = sums.as_ptr().cast::<E>();
                    for column in 0..columns.min(N * lanes) {
                        *row.add(column * step) = P::number(*sums.add(column));
                    }
                }
            }
        }
    }
}
