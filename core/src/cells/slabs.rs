//! Boxes that are adjacent within rows of a result, written slab by slab.

use burn::backend::flex::Layout;
use burn::tensor::Shape;

use super::walk::TASK;
use crate::IndexBox;
use crate::tasks;

/// The elements of a result.
#[derive(Clone, Copy)]
pub(super) struct Elements<T>(pub(super) *mut T);

// SAFETY: each task writes only its own elements.
unsafe impl<T: Send> Send for Elements<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Elements<T> {}

impl<T> Elements<T> {
    /// Returns a pointer to an element.
    ///
    /// # Safety
    /// The element must lie in the result.
    pub(super) unsafe fn at(self, index: usize) -> *mut T {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.add(index) }
    }
}

/// The cells of a box: their place in the result, and the view of them in their storage.
#[derive(Clone, Copy)]
pub(super) struct Cells<'a, T> {
    pub(super) place: &'a IndexBox,
    pub(super) storage: &'a [T],
    pub(super) layout: &'a Layout,
}

/// Whether the rows of the result are long, some box covers only a part of a row, and the cells of
/// each row of every box are contiguous in their storage.
pub(super) fn share_rows<T>(shape: &[usize], boxes: &[Cells<'_, T>]) -> bool {
    const SHORT: usize = 64;
    let Some((&row, outer)) = shape.split_last() else {
        return false;
    };
    let last = outer.len();
    let in_rows = |cells: &Cells<'_, T>| {
        cells.place.ranges()[last].len() == 1 || cells.layout.strides()[last] == 1
    };
    row >= SHORT
        && boxes.iter().all(in_rows)
        && boxes
            .iter()
            .any(|cells| cells.place.ranges()[last] != (0..row))
}

/// Writes disjoint boxes: each task writes some rows of the result, so that no two threads write to
/// a cache line in which one box ends and the next begins.
///
/// # Safety
/// [`share_rows`] must hold. The boxes must lie in the result, which nothing else uses; the cells
/// of each box must have its shape and lie in its storage.
pub(super) unsafe fn in_slabs<T: Copy + Send + Sync>(
    shape: &[usize],
    boxes: &[Cells<'_, T>],
    elements: Elements<T>,
) {
    let whole = Layout::contiguous(Shape::from(shape.to_vec()));
    let strides: Vec<usize> = whole
        .strides()
        .iter()
        .map(|stride| *stride as usize)
        .collect();
    // A slab has some cells of one dim, one cell of each dim before it, and all cells of each dim
    // after it.
    let divided = (0..shape.len())
        .rev()
        .find(|dim| strides[*dim] * shape[*dim] >= TASK)
        .unwrap_or(0);
    let each = (TASK / strides[divided].max(1)).clamp(1, shape[divided].max(1));
    let parts = shape[divided].div_ceil(each);
    let count = shape[..divided].iter().product::<usize>() * parts;
    let run = |slab: usize| {
        let start = slab % parts * each;
        let mut ranges: Vec<_> = shape.iter().map(|size| 0..*size).collect();
        ranges[divided] = start..shape[divided].min(start + each);
        let mut outer = slab / parts;
        for dim in (0..divided).rev() {
            let cell = outer % shape[dim];
            outer /= shape[dim];
            ranges[dim] = cell..cell + 1;
        }
        let slab = IndexBox::new(ranges);
        for cells in boxes {
            if let Some(part) = cells.place.intersection(&slab) {
                // SAFETY: guaranteed by the caller; slabs are disjoint.
                unsafe { cells.write(&part, &strides, elements) };
            }
        }
    };
    tasks::for_each(count, 1, run);
}

impl<T: Copy> Cells<'_, T> {
    /// Writes a part of the box, row by row, to a result with these strides.
    ///
    /// # Safety
    /// As for [`in_slabs`].
    unsafe fn write(&self, part: &IndexBox, strides: &[usize], elements: Elements<T>) {
        let (layout, last) = (self.layout, strides.len() - 1);
        let mut from = layout.start_offset() as isize;
        let mut to = 0;
        for (dim, range) in part.ranges().iter().enumerate() {
            to += range.start * strides[dim];
            from += (range.start - self.place.ranges()[dim].start) as isize * layout.strides()[dim];
        }
        let sizes = part.shape();
        let rows: usize = sizes[..last].iter().product();
        let mut place = vec![0; last];
        for _ in 0..rows {
            // SAFETY: guaranteed by the caller: a row of contiguous cells.
            unsafe {
                let from = self.storage.as_ptr().offset(from);
                elements.at(to).copy_from_nonoverlapping(from, sizes[last]);
            }
            for dim in (0..last).rev() {
                place[dim] += 1;
                to += strides[dim];
                from += layout.strides()[dim];
                if place[dim] < sizes[dim] {
                    break;
                }
                place[dim] = 0;
                to -= sizes[dim] * strides[dim];
                from -= sizes[dim] as isize * layout.strides()[dim];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field between its halos, one of which is flipped, with slabs of one row, of several rows,
    /// and of a part of a row.
    #[test]
    fn every_box_is_written_to_its_place() {
        for [rows, columns] in [[3, 90], [300, 80], [2, 40_000]] {
            let storage: Vec<usize> = (0..2 * rows * columns).collect();
            let (outer, row) = ((rows * columns) as isize, columns as isize);
            let view = |shape: [usize; 3], strides: [isize; 3], start: usize| {
                Layout::new(Shape::from(shape.to_vec()), strides.to_vec(), start)
            };
            let places = [
                [1..3, 1..rows + 1, 3..columns + 3],
                [1..3, 1..rows + 1, 0..3],
                [1..3, 0..1, 3..columns + 3],
            ]
            .map(|ranges| IndexBox::new(ranges.to_vec()));
            let layouts = [
                view([2, rows, columns], [outer, row, 1], 0),
                view([2, rows, 3], [outer, -row, 1], (rows - 1) * columns + 5),
                view([2, 1, columns], [outer, row, 1], columns),
            ];
            let boxes: Vec<_> = places
                .iter()
                .zip(&layouts)
                .map(|(place, layout)| Cells {
                    place,
                    storage: &storage,
                    layout,
                })
                .collect();
            let shape = [3, rows + 1, columns + 4];
            assert!(share_rows(&shape, &boxes));
            let whole = Cells {
                place: &IndexBox::new(vec![1..3, 0..1, 0..columns]),
                ..boxes[2]
            };
            assert!(!share_rows(&[3, rows + 1, columns], &[whole]));
            let mut found = vec![usize::MAX; shape.iter().product()];
            // SAFETY: the boxes are disjoint and lie in the result, and their cells lie in the
            // storage.
            unsafe { in_slabs(&shape, &boxes, Elements(found.as_mut_ptr())) };
            for (index, found) in found.into_iter().enumerate() {
                let [a, b, c] = [
                    index / (shape[1] * shape[2]),
                    index / shape[2] % shape[1],
                    index % shape[2],
                ];
                let cell = |a: usize, b: usize, c: usize| ((a - 1) * rows + b) * columns + c;
                let expected = match [a, b, c] {
                    [0, ..] => usize::MAX,
                    [a, 0, c] if (3..columns + 3).contains(&c) => cell(a, 1, c - 3),
                    [a, b, c] if b > 0 && c < 3 => cell(a, rows - b, c + 5),
                    [a, b, c] if b > 0 && c < columns + 3 => cell(a, b - 1, c - 3),
                    _ => usize::MAX,
                };
                assert_eq!(found, expected, "{a} {b} {c}");
            }
        }
    }
}
