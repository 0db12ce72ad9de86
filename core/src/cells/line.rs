//! Lines of cells at equal distances.

use super::walk::Dim;

/// Writes cells at equal distances.
///
/// # Safety
/// `count` cells must lie at the strides from the second pointer, and as many of the result from the first.
pub(super) unsafe fn write_line<T: Copy>(
    place: *mut T,
    cell: *const T,
    strides: Dim,
    count: usize,
    combine: impl Fn(T, T) -> T,
) {
    let write = |[to, from]: [isize; 2]| {
        for index in 0..count as isize {
            // SAFETY: the caller's.
            unsafe {
                let place = place.offset(index * to);
                place.write(combine(place.read(), cell.offset(index * from).read()));
            }
        }
    };
    // Compiled apart, so that cells next to each other are loaded and stored in vectors.
    match [strides.to, strides.from] {
        [1, 0] => {
            // SAFETY: the caller's.
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
