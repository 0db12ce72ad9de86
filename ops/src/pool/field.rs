//! Planes of a field in pieces, which are read in place.

use std::ops::Range;

use super::slide::Slide;
use crate::kernel::memory::View;

/// Planes of a field: a shard, and boxes received from other ranks around it. Cells covered by no
/// piece are padding.
pub(super) struct Planes<'a, E> {
    /// `[planes, rows, columns]`, padding included.
    pub(super) shape: [usize; 3],
    /// All cells, if they are one contiguous piece.
    pub(super) cells: Option<&'a [E]>,
    pieces: Vec<Piece<'a, E>>,
    /// Column ranges, split where a piece begins or ends.
    pub(super) bands: Vec<Range<usize>>,
}

/// A box of rows and columns, of all planes.
pub(super) struct Piece<'a, E> {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
    /// `[batch, channels, 1, rows, columns]`; columns are contiguous.
    pub(super) cells: View<'a, E>,
}

impl<'a, E> Planes<'a, E> {
    /// Creates planes from pieces that do not overlap.
    pub(super) fn new(shape: [usize; 3], pieces: Vec<Piece<'a, E>>) -> Self {
        let ends = pieces.iter().flat_map(|piece| {
            let [.., stride] = piece.cells.strides();
            assert!(stride == 1 || piece.columns.len() <= 1, "columns lie apart");
            [piece.columns.start, piece.columns.end]
        });
        let mut ends: Vec<usize> = ends.chain([0, shape[2]]).collect();
        ends.sort_unstable();
        ends.dedup();
        Self {
            shape,
            cells: None,
            bands: ends.windows(2).map(|pair| pair[0]..pair[1]).collect(),
            pieces,
        }
    }

    /// Creates planes of contiguous cells.
    pub(super) fn whole(x: &'a [E], shape: [usize; 3]) -> Self {
        let [planes, rows, columns] = shape;
        let cells = [1, planes, 1, rows, columns];
        let strides = [0, (rows * columns) as isize, 0, columns as isize, 1];
        let piece = Piece {
            rows: 0..rows,
            columns: 0..columns,
            cells: View::new(x, 0, cells, strides),
        };
        Self {
            cells: Some(x),
            ..Self::new(shape, vec![piece])
        }
    }

    /// Returns the rows of a window that have cells in one of the [bands](Self::bands), from its
    /// row `first` on: tap numbers and cells.
    #[inline(always)]
    pub(super) fn rows(
        &self,
        [plane, first]: [usize; 2],
        slide: Slide,
        band: &Range<usize>,
    ) -> impl Iterator<Item = (usize, &'a [E])> {
        let row = move |tap| self.row(plane, first + tap * slide.dilation, band);
        (0..slide.kernel).filter_map(move |tap| Some((tap, row(tap)?)))
    }

    /// Returns the cells of a row in one of the [bands](Self::bands), or `None` for padding.
    #[inline(always)]
    fn row(&self, plane: usize, row: usize, band: &Range<usize>) -> Option<&'a [E]> {
        let piece = self.pieces.iter().find(|piece| {
            let columns = piece.columns.start <= band.start && band.end <= piece.columns.end;
            columns && piece.rows.contains(&row)
        })?;
        let [_, channels, ..] = piece.cells.shape();
        let (batch, channel) = (plane / channels, plane % channels);
        let (row, column) = (row - piece.rows.start, band.start - piece.columns.start);
        let first = piece.cells.at([batch, channel, 0, row, column]);
        // SAFETY: the piece holds the row's cells of the band contiguously.
        Some(unsafe { std::slice::from_raw_parts(first, band.len()) })
    }
}

/// Rows to be combined in registers.
pub(super) struct Together<'a, E> {
    rows: [(usize, &'a [E]); 4],
    count: usize,
}

impl<'a, E> Together<'a, E> {
    /// Takes up to four further rows; `None` if there are none.
    #[inline(always)]
    pub(super) fn next(rows: &mut impl Iterator<Item = (usize, &'a [E])>) -> Option<Self> {
        let mut together = Self {
            rows: [(0, &[]); 4],
            count: 0,
        };
        while together.count < together.rows.len()
            && let Some(row) = rows.next()
        {
            together.rows[together.count] = row;
            together.count += 1;
        }
        (together.count > 0).then_some(together)
    }

    /// One to four rows with their tap numbers.
    #[inline(always)]
    pub(super) fn rows(&self) -> &[(usize, &'a [E])] {
        &self.rows[..self.count]
    }
}

/// Rows and columns of planes whose gradient is computed.
#[derive(Clone, Debug)]
pub(super) struct Section {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl Section {
    /// All rows and columns.
    #[cfg(test)]
    pub(super) fn whole([_, rows, columns]: [usize; 3]) -> Self {
        Self {
            rows: 0..rows,
            columns: 0..columns,
        }
    }

    /// Returns whether the section covers all rows and columns.
    pub(super) fn is_whole(&self, [_, rows, columns]: [usize; 3]) -> bool {
        self.rows == (0..rows) && self.columns == (0..columns)
    }

    /// Shape `[planes, rows, columns]` of the section.
    pub(super) fn shape(&self, planes: usize) -> [usize; 3] {
        [planes, self.rows.len(), self.columns.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::super::combine::Norm;
    use super::super::maximum::{max_adjoint, max_and_places};
    use super::super::sliding::{average, average_adjoint, max, norm, norm_adjoint, pulled};
    use super::*;
    use crate::kernel::simd::Isa;
    use crate::kernel::testing::random;

    const SHAPE: [usize; 3] = [6, 13, 39];

    /// Cuts a box of rows and columns out of all planes.
    fn cut(x: &[f64], rows: &Range<usize>, columns: &Range<usize>) -> Vec<f64> {
        let [planes, height, width] = SHAPE;
        let rows = (0..planes).flat_map(|plane| rows.clone().map(move |row| plane * height + row));
        let row = |row: usize| &x[row * width + columns.start..row * width + columns.end];
        rows.flat_map(row).copied().collect()
    }

    /// A shard in the middle, boxes above, below and next to it, and uncovered padding around them.
    #[test]
    fn windows_of_pieces_are_those_of_the_cells_that_they_cover() {
        let boxes = [
            (2..10, 1..35),
            (0..2, 1..20),
            (0..2, 20..35),
            (10..12, 1..35),
            (2..12, 35..38),
        ];
        let boxes: Vec<(Range<usize>, Range<usize>)> = boxes.into_iter().collect();
        let cells = random(SHAPE.iter().product(), 1);
        let covered = |cell: usize| {
            let (row, column) = (cell / SHAPE[2] % SHAPE[1], cell % SHAPE[2]);
            boxes
                .iter()
                .any(|(rows, columns)| rows.contains(&row) && columns.contains(&column))
        };
        let padded = |fill: f64| -> Vec<f64> {
            let cells = cells.iter().enumerate();
            cells
                .map(|(cell, x)| if covered(cell) { *x } else { fill })
                .collect()
        };
        let (zeros, lowest) = (padded(0.0), padded(f64::NEG_INFINITY));
        let cut_out: Vec<_> = boxes
            .iter()
            .map(|(rows, columns)| cut(&cells, rows, columns))
            .collect();
        let pieces = boxes.iter().zip(&cut_out).map(|((rows, columns), cells)| {
            // Two samples of three channels.
            let plane = rows.len() * columns.len();
            let strides = [3 * plane, plane, 0, columns.len(), 1].map(|stride| stride as isize);
            let shape = [2, 3, 1, rows.len(), columns.len()];
            Piece {
                rows: rows.clone(),
                columns: columns.clone(),
                cells: View::new(cells, 0, shape, strides),
            }
        });
        let pieces = Planes::new(SHAPE, pieces.collect());
        let (zeros, lowest) = (Planes::whole(&zeros, SHAPE), Planes::whole(&lowest, SHAPE));
        let whole = Section::whole(SHAPE);
        for (isa, [kernel, stride]) in Isa::available()
            .into_iter()
            .flat_map(|isa| [[3, 1], [3, 2], [2, 3], [1, 3], [9, 2]].map(|slide| (isa, slide)))
        {
            let slides = [Slide::new(kernel, stride); 2];
            let (order, cotangent) = (Norm(3.0), max(isa, &zeros, slides));
            assert_eq!(max(isa, &pieces, slides)[..], max(isa, &lowest, slides)[..]);
            assert_eq!(
                average(isa, &pieces, slides)[..],
                average(isa, &zeros, slides)[..]
            );
            assert_eq!(
                norm(isa, &pieces, slides, order)[..],
                norm(isa, &zeros, slides, order)[..]
            );
            let [_, of_all] = max_and_places(isa, &lowest, slides);
            let [_, places] = max_and_places(isa, &pieces, slides);
            assert_eq!(places[..], of_all[..]);
            let sides = [&places[..], &cotangent];
            let of_max = max_adjoint(isa, sides, SHAPE, &whole, slides);
            let of_mean = average_adjoint(isa, &cotangent, SHAPE, &whole, slides);
            let all = &zeros.cells.expect("cells");
            let pulled = pulled(isa, &zeros, &cotangent, slides, order);
            let of_norm = norm_adjoint(isa, &pulled, SHAPE, (&whole, all), slides, order);
            for ((rows, columns), own) in boxes.iter().zip(&cut_out) {
                let section = Section {
                    rows: rows.clone(),
                    columns: columns.clone(),
                };
                let found = max_adjoint(isa, sides, SHAPE, &section, slides);
                assert_eq!(found[..], cut(&of_max, rows, columns)[..]);
                let found = average_adjoint(isa, &cotangent, SHAPE, &section, slides);
                assert_eq!(found[..], cut(&of_mean, rows, columns)[..]);
                let section = (&section, &own[..]);
                let found = norm_adjoint(isa, &pulled, SHAPE, section, slides, order);
                assert_eq!(found[..], cut(&of_norm, rows, columns)[..]);
            }
        }
    }
}
