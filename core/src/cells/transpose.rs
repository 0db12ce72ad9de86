//! Transposes: cells that are contiguous along one dim in the storage, and along another one in the
//! result.

/// Block of such cells, with the dims `[reads, writes]` along which they are contiguous in the
/// storage and in the result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transpose {
    pub(super) sizes: [usize; 2],
    /// Stride in the result between cells along `reads`.
    pub(super) to: isize,
    /// Stride in the storage between cells along `writes`.
    pub(super) from: isize,
}

/// Whether there are instructions for elements of this type.
pub(super) fn is_supported<T>() -> bool {
    cfg!(target_arch = "x86_64") && size_of::<T>() == LANE
}

/// The bytes of an element.
const LANE: usize = 4;
/// Number of rows of a tile, and the minimum number of its columns.
pub(super) const SIDE: usize = 4;

impl Transpose {
    /// Writes the block in tiles that are transposed in registers and, where possible, cover whole
    /// cache lines of the result.
    ///
    /// # Safety
    /// [`is_supported`] must hold. The cells must lie in the storage starting at `cell`, and in the
    /// result starting at `place`, which nothing else uses.
    pub(super) unsafe fn write<T: Copy>(self, place: *mut T, cell: *const T) {
        const QUADS: usize = 4;
        const WIDE: usize = SIDE * QUADS;
        debug_assert_eq!(size_of::<T>(), LANE);
        let [reads, writes] = self.sizes;
        let mut column = 0;
        while column < writes {
            let width = match writes - column {
                WIDE.. => WIDE,
                SIDE.. => SIDE,
                _ => 1,
            };
            for row in (0..reads).step_by(SIDE) {
                // SAFETY: guaranteed by the caller; a tile is used only if four rows of its width
                // are left.
                unsafe {
                    let place = place.offset(row as isize * self.to).add(column);
                    let cell = cell.offset(column as isize * self.from).add(row);
                    match (reads - row, width) {
                        (SIDE.., WIDE) => self.tile::<T, QUADS>(place, cell),
                        (SIDE.., SIDE) => self.tile::<T, 1>(place, cell),
                        (rows, _) => self.cells(place, cell, [rows.min(SIDE), width]),
                    }
                }
            }
            column += width;
        }
    }

    /// Writes cells one by one.
    ///
    /// # Safety
    /// As for [`write`](Self::write).
    unsafe fn cells<T: Copy>(self, place: *mut T, cell: *const T, [rows, columns]: [usize; 2]) {
        for row in 0..rows {
            for column in 0..columns {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let cell = cell.offset(column as isize * self.from).add(row);
                    place
                        .offset(row as isize * self.to)
                        .add(column)
                        .write(cell.read());
                }
            }
        }
    }

    /// Writes four rows of `4 · QUADS` cells.
    ///
    /// # Safety
    /// As for [`write`](Self::write).
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn tile<T: Copy, const QUADS: usize>(self, place: *mut T, cell: *const T) {
        use std::arch::x86_64::{
            _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_setzero_si128, _mm_storeu_si128,
            _mm_unpackhi_epi32, _mm_unpackhi_epi64, _mm_unpacklo_epi32, _mm_unpacklo_epi64,
        };
        // SAFETY: guaranteed by the caller. Every x86-64 processor has these instructions, for
        // addresses of any alignment.
        unsafe {
            let row = |row: usize| place.offset(row as isize * self.to);
            for number in 0..4 {
                _mm_prefetch::<_MM_HINT_T0>(row(number).cast());
            }
            let mut quads = [[_mm_setzero_si128(); 4]; QUADS];
            for (number, quad) in quads.iter_mut().enumerate() {
                let cell = cell.offset(4 * number as isize * self.from);
                let [a, b, c, d] =
                    [0, 1, 2, 3].map(|line| _mm_loadu_si128(cell.offset(line * self.from).cast()));
                let (low, high) = (_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
                let (next_low, next_high) = (_mm_unpacklo_epi32(c, d), _mm_unpackhi_epi32(c, d));
                *quad = [
                    _mm_unpacklo_epi64(low, next_low),
                    _mm_unpackhi_epi64(low, next_low),
                    _mm_unpacklo_epi64(high, next_high),
                    _mm_unpackhi_epi64(high, next_high),
                ];
            }
            for number in 0..4 {
                for (column, quad) in quads.iter().enumerate() {
                    _mm_storeu_si128(row(number).add(4 * column).cast(), quad[number]);
                }
            }
        }
    }

    /// Same as on x86-64, the only architecture where it is [supported](is_supported).
    ///
    /// # Safety
    /// As for [`write`](Self::write).
    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn tile<T: Copy, const QUADS: usize>(self, place: *mut T, cell: *const T) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.cells(place, cell, [4, 4 * QUADS]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_written_to_its_place() {
        for reads in [1, 3, 4, 9] {
            for writes in [1, 4, 15, 16, 39] {
                let block = Transpose {
                    sizes: [reads, writes],
                    to: writes as isize + 3,
                    from: reads as isize + 2,
                };
                let storage: Vec<u32> = (0..writes as u32 * (reads as u32 + 2)).collect();
                let mut found = vec![u32::MAX; reads * (writes + 3)];
                // SAFETY: all cells lie in both.
                unsafe { block.write(found.as_mut_ptr(), storage.as_ptr()) };
                for (index, found) in found.into_iter().enumerate() {
                    let (row, column) = (index / (writes + 3), index % (writes + 3));
                    let expected = if column < writes {
                        (column * (reads + 2) + row) as u32
                    } else {
                        u32::MAX
                    };
                    assert_eq!(found, expected, "{reads} × {writes}");
                }
            }
        }
    }
}
