//! Boxes whose gradients are computed together.

use burn::backend::DispatchTensor;
use halocline_core::IndexBox;
use halocline_core::ops::cut;

/// Boxes of which those that lie side by side are joined, and the gradient of each, once it was asked for: that of a few cells,
/// as at a corner, costs about as much as that of a row.
pub(super) struct Joined(Vec<(IndexBox, Option<DispatchTensor>)>);

impl Joined {
    pub(super) fn new<'a>(boxes: impl Iterator<Item = &'a IndexBox>) -> Self {
        let whole = joined(boxes.cloned().collect()).into_iter();
        Self(whole.map(|cells| (cells, None)).collect())
    }

    /// The gradient of one of the boxes, by that of the box in which it lies.
    pub(super) fn gradient(
        &mut self,
        cells: &IndexBox,
        of: impl FnOnce(&IndexBox) -> DispatchTensor,
    ) -> DispatchTensor {
        let lies_in = |whole: &IndexBox| whole.intersection(cells).as_ref() == Some(cells);
        match self.0.iter_mut().find(|(whole, _)| lies_in(whole)) {
            Some((whole, _)) if whole == cells => of(cells),
            Some((whole, gradient)) => {
                let gradient = gradient.get_or_insert_with(|| of(whole));
                cut(gradient, &cells.seen_from(whole))
            }
            // It has no cells.
            None => of(cells),
        }
    }
}

/// Boxes that do not overlap, joined along their last dim, and then along those before.
fn joined(mut boxes: Vec<IndexBox>) -> Vec<IndexBox> {
    let dims = boxes.first().map_or(0, |cells| cells.ranges().len());
    for dim in (0..dims).rev() {
        boxes.sort_by_key(|cells| cells.ranges()[dim].start);
        let mut joined: Vec<IndexBox> = Vec::new();
        for cells in boxes {
            let range = cells.ranges()[dim].clone();
            let is_before = |before: &&mut IndexBox| {
                before.ranges()[dim].end == range.start
                    && before.with_range(dim, range.clone()) == cells
            };
            match joined.iter_mut().find(is_before) {
                Some(before) => {
                    *before = before.with_range(dim, before.ranges()[dim].start..range.end);
                }
                None => joined.push(cells),
            }
        }
        boxes = joined;
    }
    boxes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_around_a_shard_are_rows_and_columns() {
        let whole = IndexBox::whole(&[2, 3, 6, 8]);
        let of = |rows, columns| whole.with_range(2, rows).with_range(3, columns);
        let ends = [0..1, 1..5, 5..6];
        let around = ends.iter().flat_map(|rows| {
            let columns = [0..2, 2..7, 7..8].into_iter();
            columns.map(|columns| of(rows.clone(), columns))
        });
        let mut around: Vec<IndexBox> = around.filter(|cells| *cells != of(1..5, 2..7)).collect();
        around.reverse();
        let mut found = joined(around.clone());
        found.sort_by_key(|cells| (cells.ranges()[2].start, cells.ranges()[3].start));
        let expected = [
            of(0..1, 0..8),
            of(1..5, 0..2),
            of(1..5, 7..8),
            of(5..6, 0..8),
        ];
        assert_eq!(found, expected);
        // With the middle they are one box, and with a gap two.
        around.push(of(1..5, 2..7));
        assert_eq!(joined(around), [whole]);
        let apart = vec![of(0..1, 0..2), of(0..1, 3..4)];
        assert_eq!(joined(apart.clone()), apart);
    }
}
