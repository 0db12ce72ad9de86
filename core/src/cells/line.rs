//! Lines of equally spaced cells.

use super::walk::Dim;

/// Writes a line of equally spaced cells.
///
/// # Safety
/// `count` cells must lie at the strides from `cell`, and as many cells of the result from `place`.
pub(super) unsafe fn write_line<T: Copy>(
    place: *mut T,
    cell: *const T,
    strides: Dim,
    count: usize,
    combine: impl Fn(T, T) -> T,
) {
    let write = |[to, from]: [isize; 2]| {
        for index in 0..count as isize {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let place = place.offset(index * to);
                place.write(combine(place.read(), cell.offset(index * from).read()));
            }
        }
    };
    // Compiled separately, so that adjacent cells are loaded and stored as vectors.
    match [strides.to, strides.from] {
        [1, 0] => {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let cell = cell.read();
                (0..count).for_each(|index| {
                    let place = place.add(index);
                    place.write(combine(place.read(), cell));
                });
            }
        }
        [1, 1] => write([1, 1]),
        [1, -1] => write([1, -1]),
        [1, 2] => write([1, 2]),
        [to, 1] => write([to, 1]),
        [1, from] => write([1, from]),
        other => write(other),
    }
}

/// Writes a line of equally spaced runs of `N` contiguous cells.
///
/// # Safety
/// `count` runs must lie at the strides from `cell`, and as many runs of the result from `place`.
pub(super) unsafe fn write_runs<T: Copy, const N: usize>(
    place: *mut T,
    cell: *const T,
    strides: Dim,
    count: usize,
) {
    for index in 0..count as isize {
        // SAFETY: guaranteed by the caller; an array is aligned as its elements are.
        unsafe {
            let run = cell.offset(index * strides.from).cast::<[T; N]>().read();
            place.offset(index * strides.to).cast::<[T; N]>().write(run);
        }
    }
}
