//! Boxes of cells, and boundaries: the values beyond the ends of a dim.

use std::fmt;
use std::ops::Range;

use crate::{Error, Result};

/// A product of half-open index ranges, one per dim: a box of cells.
///
/// # Example
/// ```
/// use halocline_core::IndexBox;
///
/// let field = IndexBox::whole(&[4, 6]);
/// let rows = IndexBox::new(vec![1..3, 0..6]);
/// assert_eq!(rows.volume(), 12);
/// let rim = field.around(&rows);
/// assert_eq!(rim, [IndexBox::new(vec![0..1, 0..6]), IndexBox::new(vec![3..4, 0..6])]);
/// assert_eq!(rim[0].intersection(&rows), None);
/// let corner = IndexBox::new(vec![2..3, 0..2]);
/// assert_eq!(corner.seen_from(&rows).to_string(), "[1..2, 0..2]");
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct IndexBox(Vec<Range<usize>>);

impl IndexBox {
    /// Makes a box of the given ranges.
    pub fn new(ranges: Vec<Range<usize>>) -> Self {
        Self(ranges)
    }

    /// Makes the box of all cells of an array.
    pub fn whole(shape: &[usize]) -> Self {
        Self(shape.iter().map(|&size| 0..size).collect())
    }

    /// The ranges, one per dim.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.0
    }

    /// The number of cells in every dim.
    pub fn shape(&self) -> Vec<usize> {
        self.0.iter().map(ExactSizeIterator::len).collect()
    }

    /// The number of cells.
    pub fn volume(&self) -> usize {
        self.0.iter().map(ExactSizeIterator::len).product()
    }

    /// The cells common to both boxes; `None` if there are none.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let ranges = self.0.iter().zip(&other.0);
        let common = ranges.map(|(a, b)| a.start.max(b.start)..a.end.min(b.end));
        let common = Self(common.collect());
        (common.volume() > 0).then_some(common)
    }

    /// Whether the boxes have a cell in common.
    pub(crate) fn meets(&self, other: &Self) -> bool {
        let mut ranges = self.0.iter().zip(&other.0);
        ranges.all(|(a, b)| a.start.max(b.start) < a.end.min(b.end))
    }

    /// Returns this box relative to the start of `outer`, which must contain it.
    #[must_use]
    pub fn seen_from(&self, outer: &Self) -> Self {
        let ranges = self.0.iter().zip(&outer.0);
        let ranges = ranges.map(|(part, outer)| part.start - outer.start..part.end - outer.start);
        Self(ranges.collect())
    }

    /// Returns this box with another range of a dim.
    ///
    /// # Panics
    /// Panics if the box does not have the dim.
    #[must_use]
    pub fn with_range(&self, dim: usize, range: Range<usize>) -> Self {
        let mut ranges = self.0.clone();
        ranges[dim] = range;
        Self(ranges)
    }

    /// Splits the cells of this box outside `inner`, which it contains, into boxes that do not
    /// overlap.
    pub fn around(&self, inner: &Self) -> Vec<Self> {
        // After its two slabs are cut off, a dim is narrowed to `inner`, so that later slabs
        // contain no cell of earlier ones.
        let mut left = self.clone();
        let mut boxes = Vec::new();
        for (dim, range) in inner.0.iter().enumerate() {
            let whole = left.0[dim].clone();
            for side in [whole.start..range.start, range.end..whole.end] {
                let mut slab = left.clone();
                slab.0[dim] = side;
                if slab.volume() > 0 {
                    boxes.push(slab);
                }
            }
            left.0[dim] = range.clone();
        }
        boxes
    }
}

impl fmt::Display for IndexBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges: Vec<String> = self
            .0
            .iter()
            .map(|r| format!("{}..{}", r.start, r.end))
            .collect();
        write!(f, "[{}]", ranges.join(", "))
    }
}

impl fmt::Debug for IndexBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Rule for the values beyond an end of a dim.
///
/// # Example
/// ```
/// use halocline_core::Boundary;
///
/// let source = |boundary: Boundary| boundary.source(-1, 4);
/// assert_eq!(source(Boundary::Zeros), None);
/// assert_eq!(source(Boundary::Periodic), Some(3));
/// assert_eq!(source(Boundary::Reflect), Some(1));
/// assert_eq!(source(Boundary::Replicate), Some(0));
/// assert_eq!(source(Boundary::PoleRow), Some(1)); // of the column half a turn away
/// assert_eq!(source(Boundary::PoleEdge), Some(0));
/// ```
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
pub enum Boundary {
    /// Zeros, or the operator's fill value (minus infinity in a maximum).
    #[default]
    Zeros,
    /// The dim continues at its other end, as longitude does.
    Periodic,
    /// The field mirrored at its last cell, which is not repeated.
    Reflect,
    /// The last cell, repeated.
    Replicate,
    /// The field across a pole, where the last row is the pole itself: rows are mirrored at it and
    /// shifted to the opposite meridian, by half the columns of the next dim. For grids with pole
    /// points.
    PoleRow,
    /// The field across a pole that lies half a row beyond the last row: like
    /// [`PoleRow`](Self::PoleRow), but the last row is repeated. For grids without pole points.
    PoleEdge,
}

impl Boundary {
    /// Whether rows beyond the end come from the opposite meridian.
    pub fn is_pole(self) -> bool {
        matches!(self, Self::PoleRow | Self::PoleEdge)
    }

    /// The cell of a dim of `size` cells that supplies the value at `index`, which may lie beyond
    /// an end; `None` for a fill value. Across a pole, the cell lies at the opposite meridian.
    pub fn source(self, index: isize, size: usize) -> Option<usize> {
        let last = size as isize - 1;
        if last < 0 {
            return None;
        }
        if (0..=last).contains(&index) {
            return Some(index as usize);
        }
        match self {
            Self::Zeros => None,
            Self::Periodic => Some(index.rem_euclid(size as isize) as usize),
            Self::Replicate => Some(index.clamp(0, last) as usize),
            Self::Reflect | Self::PoleRow if last == 0 => Some(0),
            Self::Reflect | Self::PoleRow => {
                let turn = index.rem_euclid(2 * last);
                Some(turn.min(2 * last - turn) as usize)
            }
            Self::PoleEdge => {
                let turn = index.rem_euclid(2 * (last + 1));
                Some(turn.min(2 * last + 1 - turn) as usize)
            }
        }
    }
}

/// Padding of one dim: the number of cells before the first and after the last cell, and their
/// boundaries.
pub type Sides = ([usize; 2], [Boundary; 2]);

/// Checks that a field of this shape meets the requirements of [`Boundary::PoleRow`] and
/// [`Boundary::PoleEdge`] for the padding of every dim; other boundaries are not checked.
///
/// # Errors
/// A pole in the last dim; a next dim with an odd number of cells, which has no opposite meridians,
/// or one that is padded but not [periodic](Boundary::Periodic); padding that reaches beyond the
/// other pole; poles in two dims.
///
/// # Example
/// ```
/// use halocline_core::Boundary::*;
/// use halocline_core::plan::check_poles;
///
/// let (poles, ring) = (([1, 1], [PoleEdge; 2]), ([1, 1], [Periodic; 2]));
/// assert!(check_poles("conv2d", &[5, 8], &[poles, ring]).is_ok());
/// let error = check_poles("conv2d", &[5, 7], &[poles, ring]).unwrap_err();
/// assert!(error.to_string().contains("7 cells have no opposite meridians"));
/// ```
pub fn check_poles(operator: &str, shape: &[usize], sides: &[Sides]) -> Result<()> {
    let crosses = |(widths, boundaries): &Sides| {
        let mut sides = widths.iter().zip(boundaries);
        sides.any(|(width, boundary)| *width > 0 && boundary.is_pole())
    };
    let mut dims = (0..sides.len()).filter(|&dim| crosses(&sides[dim]));
    let Some(dim) = dims.next() else {
        return Ok(());
    };
    let fail = |message: String| Err(Error::operator(operator, message));
    if let Some(other) = dims.next() {
        return fail(format!(
            "poles in dims {dim} and {other}; expected one dim of latitudes"
        ));
    }
    let Some((&columns, (widths, boundaries))) = shape.get(dim + 1).zip(sides.get(dim + 1)) else {
        return fail(format!(
            "poles in dim {dim}, the last; expected longitudes in the next"
        ));
    };
    if !columns.is_multiple_of(2) {
        return fail(format!(
            "poles in dim {dim}, but {columns} cells have no opposite meridians in dim {}; expected an even number",
            dim + 1
        ));
    }
    let mut padded = widths
        .iter()
        .zip(boundaries)
        .filter(|(width, _)| **width > 0);
    if let Some((_, other)) = padded.find(|(_, boundary)| **boundary != Boundary::Periodic) {
        return fail(format!(
            "poles in dim {dim} beside {other:?} in dim {}; expected Periodic, as longitudes are around a pole",
            dim + 1
        ));
    }
    let rows = shape[dim];
    for (width, boundary) in sides[dim].0.into_iter().zip(sides[dim].1) {
        let most = match boundary {
            Boundary::PoleEdge => rows,
            Boundary::PoleRow => rows.saturating_sub(1),
            _ => continue,
        };
        if width > most {
            return fail(format!(
                "{width} cells across a pole of dim {dim}; expected at most {most} of {rows}"
            ));
        }
    }
    Ok(())
}

/// Run of cells of one dim that a rank needs, with its offset in the tensor that the rank
/// assembles; made by [`segments`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The start of the run in the assembled dim.
    pub dst: usize,
    /// The global indices of the cells.
    pub src: Range<usize>,
    /// Whether the cells are in reverse order.
    pub flip: bool,
}

/// Splits the cells `range` of a dim of `size` cells into runs; `low` and `high` are the boundaries
/// at its two ends.
///
/// Cells not covered by a run are filled by the operator.
///
/// # Example
/// ```
/// use halocline_core::Boundary;
/// use halocline_core::plan::segments;
///
/// let runs = segments(-1..5, 4, Boundary::Periodic, Boundary::Periodic);
/// let runs: Vec<_> = runs.into_iter().map(|run| (run.dst, run.src)).collect();
/// assert_eq!(runs, [(0, 3..4), (1, 0..4), (5, 0..1)]);
/// ```
pub fn segments(range: Range<isize>, size: usize, low: Boundary, high: Boundary) -> Vec<Segment> {
    let mut runs: Vec<Segment> = Vec::new();
    for (dst, index) in range.enumerate() {
        let boundary = if index < 0 { low } else { high };
        let Some(cell) = boundary.source(index, size) else {
            continue;
        };
        // The last run grows upwards, or downwards if it is mirrored; a run of one cell may still
        // go either way.
        if let Some(run) = runs.last_mut().filter(|run| run.dst + run.src.len() == dst) {
            let single = run.src.len() == 1;
            if cell == run.src.end && (single || !run.flip) {
                run.src.end += 1;
                run.flip = false;
                continue;
            }
            if cell + 1 == run.src.start && (single || run.flip) {
                run.src.start -= 1;
                run.flip = true;
                continue;
            }
        }
        runs.push(Segment {
            dst,
            src: cell..cell + 1,
            flip: false,
        });
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BOUNDARIES: [Boundary; 6] = [
        Boundary::Zeros,
        Boundary::Periodic,
        Boundary::Reflect,
        Boundary::Replicate,
        Boundary::PoleRow,
        Boundary::PoleEdge,
    ];

    #[test]
    fn a_box_and_what_is_around_it_are_the_whole() {
        let whole = IndexBox::new(vec![1..4, 0..5, 2..6]);
        for inner in [
            [1..4, 1..4, 4..6],
            [2..3, 0..5, 2..6],
            [1..4, 0..5, 2..6],
            [3..3, 1..3, 2..6],
        ] {
            let inner = IndexBox::new(inner.to_vec());
            let mut times = [[[0; 4]; 5]; 3];
            for cells in whole.around(&inner).into_iter().chain([inner]) {
                let cells = cells.seen_from(&whole);
                let [planes, rows, columns] = cells.ranges() else {
                    unreachable!("three dims");
                };
                for row in &mut times[planes.clone()] {
                    for row in &mut row[rows.clone()] {
                        row[columns.clone()].iter_mut().for_each(|n| *n += 1);
                    }
                }
            }
            assert!(times.as_flattened().as_flattened().iter().all(|&n| n == 1));
        }
    }

    #[test]
    fn reflection_does_not_repeat_the_last_cell() {
        let runs = segments(-2..3, 5, Boundary::Reflect, Boundary::Zeros);
        assert_eq!((runs[0].src.clone(), runs[0].flip), (0..3, true));
        assert_eq!((runs[1].dst, runs[1].src.clone()), (3, 1..3));
    }

    #[test]
    fn poles_need_opposite_meridians() {
        use Boundary::{Periodic, PoleEdge, PoleRow, Reflect, Zeros};
        let message = |shape: &[usize], sides: &[Sides]| {
            let error = check_poles("op", shape, sides).unwrap_err();
            error.to_string()
        };
        let none = ([0, 0], [Zeros; 2]);
        let poles = |width, boundary| ([width, width], [boundary; 2]);
        assert!(message(&[4, 6], &[none, poles(1, PoleRow)]).contains("dim 1, the last"));
        let both = [poles(1, PoleRow), poles(1, PoleEdge)];
        assert!(message(&[4, 6], &both).contains("poles in dims 0 and 1"));
        let walls = [poles(1, PoleRow), ([0, 1], [Reflect; 2])];
        assert!(message(&[4, 6], &walls).contains("beside Reflect in dim 1"));
        let ring = ([2, 2], [Periodic; 2]);
        let wide = message(&[4, 6], &[poles(4, PoleRow), ring]);
        assert!(
            wide.contains("4 cells across a pole of dim 0; expected at most 3 of 4"),
            "{wide}"
        );
        assert!(check_poles("op", &[4, 6], &[poles(4, PoleEdge), ring]).is_ok());
        assert!(check_poles("op", &[4, 7], &[poles(0, PoleEdge), ring]).is_ok());
    }

    proptest! {
        #[test]
        fn runs_give_the_cells_of_the_boundary(
            start in -30_isize..30, len in 0_usize..60, size in 0_usize..12, low in 0_usize..6, high in 0_usize..6,
        ) {
            let (low, high) = (BOUNDARIES[low], BOUNDARIES[high]);
            let range = start..start + len as isize;
            let mut cells = vec![None; len];
            for run in segments(range.clone(), size, low, high) {
                for (offset, cell) in run.src.clone().enumerate() {
                    let place = run.dst + if run.flip { run.src.len() - 1 - offset } else { offset };
                    prop_assert!(cells[place].replace(cell).is_none(), "cell {place} is covered twice");
                }
            }
            for (index, cell) in range.zip(cells) {
                prop_assert_eq!(cell, if index < 0 { low } else { high }.source(index, size));
            }
        }
    }
}
