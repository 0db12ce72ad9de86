//! Loops over slices by vectors, and results filled by parallel tasks.
//!
//! The tail of a slice runs through the same instructions as the rest, in a partial vector, and the
//! division into tasks follows from shapes alone: the result for an element depends neither on its
//! position nor on the number of threads.

use std::slice;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::buffer::Buffer;
use super::interleave::{deinterleave, interleave};
use super::memory::Shared;
use super::simd::{Element, Isa};

/// Maximum number of elements of a task.
pub(crate) const CHUNK: usize = 1 << 14;
/// Maximum number of lanes of a vector.
pub(crate) const WIDEST: usize = 16;
/// Number of independent sums of a loop, so that an addition does not wait for the previous one.
const UNROLL: usize = 4;

/// Writes a function of the elements of `inputs`, each as long as the output.
#[inline(always)]
pub(crate) fn apply<S: Simd, E: Element, const N: usize>(
    simd: S,
    inputs: [&[E]; N],
    output: &mut [E],
    f: impl Fn([E::Vector<S>; N]) -> E::Vector<S>,
) {
    let len = output.len();
    assert!(inputs.iter().all(|input| input.len() == len));
    let inputs = inputs.map(<[E]>::as_ptr);
    // SAFETY: the slices have `len` elements, and the output is borrowed mutably.
    unsafe { write_lanes(simd, inputs, output.as_mut_ptr(), len, f) };
}

/// Writes a function of `len` elements of each input.
///
/// # Safety
/// Inputs and output must have `len` elements; each input must be the output or not overlap it.
#[inline(always)]
unsafe fn write_lanes<S: Simd, E: Element, const N: usize>(
    simd: S,
    inputs: [*const E; N],
    output: *mut E,
    len: usize,
    f: impl Fn([E::Vector<S>; N]) -> E::Vector<S>,
) {
    let lanes = E::lanes::<S>();
    let whole = len - len % lanes;
    for start in (0..whole).step_by(lanes) {
        // SAFETY: the vector lies in inputs and output, and is read before it is written.
        unsafe {
            let x = inputs.map(|input| E::load::<S>(input.add(start)));
            E::store::<S>(output.add(start), f(x));
        }
    }
    if whole < len {
        let (rest, zero) = (len - whole, E::splat(simd, E::default()));
        // SAFETY: as above.
        unsafe {
            let part = |input: *const E| slice::from_raw_parts(input.add(whole), rest);
            let y = f(inputs.map(|input| E::load_part(simd, part(input), zero)));
            let output = slice::from_raw_parts_mut(output.add(whole), rest);
            E::store_part(simd, output, y);
        }
    }
}

/// Sums over `inputs`: `f` adds their vectors to the sums. The last vectors are filled up with
/// lanes of `rest`.
#[inline(always)]
pub(crate) fn sums<S: Simd, E: Element, const N: usize, const M: usize>(
    simd: S,
    inputs: [&[E]; N],
    rest: [E::Vector<S>; N],
    f: impl Fn([E::Vector<S>; M], [E::Vector<S>; N]) -> [E::Vector<S>; M],
) -> [E; M] {
    let (len, lanes) = (inputs[0].len(), E::lanes::<S>());
    assert!(inputs.iter().all(|input| input.len() == len));
    // SAFETY: only called where the vector lies within all of the slices.
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
    deinterleave::<S, E>(pair)
}

/// Writes even and odd elements to a slice of at most two vectors.
#[inline(always)]
pub(crate) fn store_pairs<S: Simd, E: Element>(simd: S, row: &mut [E], pair: [E::Vector<S>; 2]) {
    let lanes = E::lanes::<S>();
    let [first, second] = interleave::<S, E>(pair);
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

/// Loads a slice of at most one vector, filled up with zeros.
#[inline(always)]
pub(crate) fn load<S: Simd, E: Element>(simd: S, from: &[E]) -> E::Vector<S> {
    if from.len() == E::lanes::<S>() {
        // SAFETY: the slice has a vector.
        unsafe { E::load::<S>(from.as_ptr()) }
    } else {
        E::load_part(simd, from, E::splat(simd, E::default()))
    }
}

/// Writes the first lanes to a slice of at most one vector.
#[inline(always)]
pub(crate) fn store<S: Simd, E: Element>(simd: S, row: &mut [E], vector: E::Vector<S>) {
    if row.len() == E::lanes::<S>() {
        // SAFETY: the slice has room for a vector.
        unsafe { E::store::<S>(row.as_mut_ptr(), vector) }
    } else {
        E::store_part(simd, row, vector);
    }
}

/// Elementwise function, which may differ between rows.
pub(crate) trait Function<E: Element, const N: usize>: Sync {
    /// Evaluates the function on one vector of a row.
    fn at<S: Simd>(&self, simd: S, row: usize, x: [E::Vector<S>; N]) -> E::Vector<S>;
}

/// Applies a function to inputs of `rows` rows in parallel.
pub(crate) fn map<E: Element, const N: usize>(
    isa: Isa,
    inputs: [&[E]; N],
    rows: usize,
    function: &impl Function<E, N>,
) -> Buffer<E> {
    let len = inputs[0].len();
    assert!(inputs.iter().all(|input| input.len() == len));
    let inputs = inputs.map(Shared::to_read);
    // SAFETY: every element is written, from inputs of the same length.
    unsafe {
        Buffer::filled(len, |output| {
            write(isa, inputs, [rows, len], output, function)
        })
    }
}

/// Applies a function to inputs of `rows` rows in parallel, in place on the first input.
pub(crate) fn replace<E: Element, const N: usize, const M: usize>(
    isa: Isa,
    elements: &mut [E],
    others: [&[E]; M],
    rows: usize,
    function: &impl Function<E, N>,
) {
    const { assert!(N == M + 1) };
    let len = elements.len();
    assert!(others.iter().all(|other| other.len() == len));
    let output = Shared::new(elements);
    let input = |n: usize| match n {
        0 => output,
        _ => Shared::to_read(others[n - 1]),
    };
    // SAFETY: the inputs have `len` elements, and the first one is the output.
    unsafe {
        write(
            isa,
            std::array::from_fn(input),
            [rows, len],
            output,
            function,
        );
    }
}

/// Writes a function of inputs of `rows` rows and `len` elements in parallel.
///
/// # Safety
/// Inputs and output must have `len` elements; each input must be the output or not overlap it.
unsafe fn write<E: Element, const N: usize>(
    isa: Isa,
    inputs: [Shared<E>; N],
    [rows, len]: [usize; 2],
    output: Shared<E>,
    function: &impl Function<E, N>,
) {
    struct Task<'a, E, F, const N: usize> {
        inputs: [*const E; N],
        output: *mut E,
        len: usize,
        row: usize,
        function: &'a F,
    }
    impl<E: Element, F: Function<E, N>, const N: usize> WithSimd for Task<'_, E, F, N> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let Self {
                inputs,
                output,
                len,
                row,
                function,
            } = self;
            // SAFETY: guaranteed by the caller of `write`.
            unsafe {
                write_lanes(
                    simd,
                    inputs,
                    output,
                    len,
                    #[inline(always)]
                    |x| function.at(simd, row, x),
                );
            }
        }
    }
    let cells = len / rows.max(1);
    assert_eq!(len, rows * cells);
    let pieces = cells.div_ceil(CHUNK);
    let together = (CHUNK * rows * pieces / len.max(1)).max(1);
    tasks::for_each(rows * pieces, together, |task| {
        let (row, start) = (task / pieces, task % pieces * CHUNK);
        let len = CHUNK.min(cells - start);
        let start = row * cells + start;
        // SAFETY: the elements belong to this task alone.
        let (inputs, output) = unsafe {
            let inputs = inputs.map(|input| input.at(start).cast_const());
            (inputs, output.at(start))
        };
        isa.run(Task {
            inputs,
            output,
            len,
            row,
            function,
        });
    });
}

/// Creates a buffer of `[planes, rows, columns]` in which each task fills a band of rows, given
/// `[plane, band]` and its elements. The last band of a plane also takes the remaining rows.
///
/// # Safety
/// `run` must write all elements without reading them.
pub(crate) unsafe fn filled_bands<E: Element>(
    [planes, rows, columns]: [usize; 3],
    band: usize,
    run: impl Fn([usize; 2], &mut [E]) + Sync,
) -> Buffer<E> {
    let (plane, bands) = (rows * columns, (rows / band).max(1));
    let len = planes * plane;
    let tasks = if len == 0 { 0 } else { planes * bands };
    let together = (CHUNK * tasks / len.max(1)).max(1);
    // SAFETY: the tasks have the bands of all planes; the rest is guaranteed by the caller.
    unsafe {
        Buffer::filled(len, |elements| {
            tasks::for_each(tasks, together, |task| {
                let (number, index) = (task / bands, task % bands);
                let start = number * plane + index * band * columns;
                let end = if index + 1 == bands {
                    (number + 1) * plane
                } else {
                    start + band * columns
                };
                run([number, index], elements.slice(start..end));
            });
        })
    }
}
