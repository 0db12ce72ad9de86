//! Loops over the vectors of slices, and results filled by parallel tasks.
//!
//! The end of a slice runs through the same instructions as the rest, in a partial vector, and
//! tasks follow from shapes alone: an element's result depends neither on its place nor on the
//! number of threads.

use std::ops::Range;
use std::slice;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::buffer::Buffer;
use super::simd::{Element, Isa};

/// Most elements of a task.
pub(crate) const CHUNK: usize = 1 << 14;
/// Most lanes of a vector.
pub(crate) const WIDEST: usize = 16;
/// Independent sums of a loop, so that an addition does not wait for the one before.
const UNROLL: usize = 4;

/// Writes a function of the elements of `inputs`, each as long as the output.
#[inline(always)]
pub(crate) fn apply<S: Simd, E: Element, const N: usize>(
    simd: S,
    inputs: [&[E]; N],
    output: &mut [E],
    f: impl Fn([E::Vector<S>; N]) -> E::Vector<S>,
) {
    let (len, lanes) = (output.len(), E::lanes::<S>());
    assert!(inputs.iter().all(|input| input.len() == len));
    let whole = len - len % lanes;
    for start in (0..whole).step_by(lanes) {
        // SAFETY: the vector lies in all of the slices.
        unsafe {
            let x = inputs.map(|input| E::load::<S>(input.as_ptr().add(start)));
            E::store::<S>(output.as_mut_ptr().add(start), f(x));
        }
    }
    if whole < len {
        let zero = E::splat(simd, E::default());
        let x = inputs.map(|input| E::load_part(simd, &input[whole..], zero));
        E::store_part(simd, &mut output[whole..], f(x));
    }
}

/// Sums over `inputs`: `f` adds their vectors to sums. The last vectors are completed with lanes of
/// `rest`.
#[inline(always)]
pub(crate) fn sums<S: Simd, E: Element, const N: usize, const M: usize>(
    simd: S,
    inputs: [&[E]; N],
    rest: [E::Vector<S>; N],
    f: impl Fn([E::Vector<S>; M], [E::Vector<S>; N]) -> [E::Vector<S>; M],
) -> [E; M] {
    let (len, lanes) = (inputs[0].len(), E::lanes::<S>());
    assert!(inputs.iter().all(|input| input.len() == len));
    // SAFETY: only called where the vector lies in all of the slices.
    let load = |start| inputs.map(|input| unsafe { E::load::<S>(input.as_ptr().add(start)) });
    let mut sums = [[E::splat(simd, E::default()); M]; UNROLL];
    let mut start = 0;
    while start + UNROLL * lanes <= len {
        for (turn, sums) in sums.iter_mut().enumerate() {
            *sums = f(*sums, load(start + turn * lanes));
        }
        start += UNROLL * lanes;
    }
    for sums in &mut sums {
        if start + lanes <= len {
            *sums = f(*sums, load(start));
            start += lanes;
        }
    }
    if start < len {
        let part = |n: usize| E::load_part(simd, &inputs[n][start..], rest[n]);
        sums[UNROLL - 1] = f(sums[UNROLL - 1], std::array::from_fn(part));
    }
    let [a, b, c, d] = sums;
    std::array::from_fn(|m| {
        let low = E::plus(simd, a[m], b[m]);
        let high = E::plus(simd, c[m], d[m]);
        E::sum(simd, E::plus(simd, low, high))
    })
}

/// Loads the even and the odd elements of a slice of at most two vectors.
#[inline(always)]
pub(crate) fn load_pairs<S: Simd, E: Element>(simd: S, from: &[E]) -> [E::Vector<S>; 2] {
    let lanes = E::lanes::<S>();
    let pair = if from.len() == 2 * lanes {
        // SAFETY: the slice has two vectors.
        unsafe { [0, lanes].map(|start| E::load::<S>(from.as_ptr().add(start))) }
    } else {
        let zero = E::splat(simd, E::default());
        let (low, high) = from.split_at(from.len().min(lanes));
        [low, high].map(|part| E::load_part(simd, part, zero))
    };
    E::deinterleave::<S>(pair)
}

/// Writes even and odd elements to a slice of at most two vectors.
#[inline(always)]
pub(crate) fn store_pairs<S: Simd, E: Element>(simd: S, row: &mut [E], pair: [E::Vector<S>; 2]) {
    let lanes = E::lanes::<S>();
    let [first, second] = E::interleave::<S>(pair);
    if row.len() == 2 * lanes {
        // SAFETY: the slice has two vectors.
        unsafe {
            E::store::<S>(row.as_mut_ptr(), first);
            E::store::<S>(row.as_mut_ptr().add(lanes), second);
        }
    } else {
        let (low, high) = row.split_at_mut(row.len().min(lanes));
        E::store_part(simd, low, first);
        E::store_part(simd, high, second);
    }
}

/// Loads the elements of a slice of at most a vector, and zeros after them.
#[inline(always)]
pub(crate) fn load<S: Simd, E: Element>(simd: S, from: &[E]) -> E::Vector<S> {
    if from.len() == E::lanes::<S>() {
        // SAFETY: the slice has a vector.
        unsafe { E::load::<S>(from.as_ptr()) }
    } else {
        E::load_part(simd, from, E::splat(simd, E::default()))
    }
}

/// Writes the first lanes to a slice of at most a vector.
#[inline(always)]
pub(crate) fn store<S: Simd, E: Element>(simd: S, row: &mut [E], vector: E::Vector<S>) {
    if row.len() == E::lanes::<S>() {
        // SAFETY: the slice has room for a vector.
        unsafe { E::store::<S>(row.as_mut_ptr(), vector) }
    } else {
        E::store_part(simd, row, vector);
    }
}

/// An elementwise function, which may differ between rows.
pub(crate) trait Function<E: Element, const N: usize>: Sync {
    /// The values at a vector of a row.
    fn at<S: Simd>(&self, simd: S, row: usize, x: [E::Vector<S>; N]) -> E::Vector<S>;
}

/// Applies a function to inputs of `rows` rows, in parallel.
pub(crate) fn map<E: Element, const N: usize>(
    isa: Isa,
    inputs: [&[E]; N],
    rows: usize,
    function: &impl Function<E, N>,
) -> Buffer<E> {
    struct Task<'a, E, F, const N: usize> {
        inputs: [&'a [E]; N],
        row: usize,
        output: &'a mut [E],
        function: &'a F,
    }
    impl<E: Element, F: Function<E, N>, const N: usize> WithSimd for Task<'_, E, F, N> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let Self {
                inputs,
                row,
                output,
                function,
            } = self;
            apply(
                simd,
                inputs,
                output,
                #[inline(always)]
                |x| function.at(simd, row, x),
            );
        }
    }
    let len = inputs[0].len();
    let cells = len / rows.max(1);
    assert!(inputs.iter().all(|input| input.len() == rows * cells));
    let pieces = cells.div_ceil(CHUNK);
    let range = |task: usize| {
        let (row, start) = (task / pieces, task % pieces * CHUNK);
        row * cells + start..row * cells + (start + CHUNK).min(cells)
    };
    let run = |task: usize, output: &mut [E]| {
        let inputs = inputs.map(|input| &input[range(task)]);
        isa.run(Task {
            inputs,
            row: task / pieces,
            output,
            function,
        });
    };
    // SAFETY: the ranges are the pieces of all rows.
    unsafe { filled(len, rows * pieces, range, run) }
}

/// An elementwise function of the elements that it replaces, and of those of `N` other slices.
pub(crate) trait Change<E: Element, const N: usize>: Sync {
    /// The new values of a vector.
    fn at<S: Simd>(&self, simd: S, x: E::Vector<S>, others: [E::Vector<S>; N]) -> E::Vector<S>;
}

/// Replaces the elements of a slice, in parallel.
pub(crate) fn replace<E: Element, const N: usize>(
    isa: Isa,
    elements: &mut [E],
    others: [&[E]; N],
    change: &impl Change<E, N>,
) {
    struct Task<'a, E, C, const N: usize> {
        elements: &'a mut [E],
        others: [&'a [E]; N],
        change: &'a C,
    }
    impl<E: Element, C: Change<E, N>, const N: usize> WithSimd for Task<'_, E, C, N> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let Self {
                elements,
                others,
                change,
            } = self;
            let lanes = E::lanes::<S>();
            for (index, vector) in elements.chunks_mut(lanes).enumerate() {
                let range = index * lanes..index * lanes + vector.len();
                let others = others.map(|other| load(simd, &other[range.clone()]));
                let new = change.at(simd, load(simd, vector), others);
                store(simd, vector, new);
            }
        }
    }
    assert!(others.iter().all(|other| other.len() == elements.len()));
    let chunks = elements.par_chunks_mut(CHUNK).enumerate();
    chunks.for_each(|(index, elements)| {
        let start = index * CHUNK;
        let others = others.map(|other| &other[start..start + elements.len()]);
        isa.run(Task {
            elements,
            others,
            change,
        });
    });
}

/// A buffer of which each task fills a range, by `run`.
///
/// # Safety
/// The ranges must be a partition of `0..len`, and `run` must write all elements of its range
/// without reading them.
unsafe fn filled<E: Element>(
    len: usize,
    tasks: usize,
    range: impl Fn(usize) -> Range<usize> + Sync,
    run: impl Fn(usize, &mut [E]) + Sync,
) -> Buffer<E> {
    if len == 0 {
        // SAFETY: there is nothing to initialise.
        return unsafe { Buffer::filled(0, |_| ()) };
    }
    let together = (CHUNK * tasks / len).max(1);
    // SAFETY: every element is in one range.
    unsafe {
        Buffer::filled(len, |elements| {
            (0..tasks)
                .into_par_iter()
                .with_min_len(together)
                .for_each(|task| {
                    let range = range(task);
                    run(
                        task,
                        slice::from_raw_parts_mut(elements.at(range.start), range.len()),
                    );
                });
        })
    }
}

/// A buffer of `[planes, rows, columns]` of which each task fills a band of rows, given its plane,
/// number and elements. The last band of a plane also has the remaining rows.
///
/// # Safety
/// `run` must write all elements without reading them.
pub(crate) unsafe fn filled_bands<E: Element>(
    [planes, rows, columns]: [usize; 3],
    band: usize,
    run: impl Fn([usize; 2], &mut [E]) + Sync,
) -> Buffer<E> {
    let (plane, bands) = (rows * columns, (rows / band).max(1));
    let place = |task: usize| [task / bands, task % bands];
    let range = |task| {
        let [number, index] = place(task);
        let end = if index + 1 == bands {
            plane
        } else {
            (index + 1) * band * columns
        };
        number * plane + index * band * columns..number * plane + end
    };
    // SAFETY: the ranges are the bands of all planes; the rest is the caller's.
    unsafe {
        filled(planes * plane, planes * bands, range, |task, elements| {
            run(place(task), elements)
        })
    }
}
