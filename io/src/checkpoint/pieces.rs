//! Pure functions that divide tensors into pieces, choose the ranks that write and read them, and
//! copy boxes between arrays.

use std::collections::BTreeMap;
use std::ops::Range;

use halocline_core::{IndexBox, Layout};

/// Target for the largest size of a piece, in bytes. Each piece has one checksum.
const LARGEST: usize = 64 << 20;
/// Bytes per rank from which on ranks that hold the same box divide it among themselves.
const WORTH_SPLITTING: usize = 1 << 20;

/// Splits a tensor into boxes, each paired with the world rank that writes it.
///
/// Each cell lies in exactly one box. Ranks that hold the same cells divide them, starting with the
/// rank that `turn` selects, so that small tensors with successive turns are distributed
/// round-robin.
pub(crate) fn pieces(layout: &Layout, element: usize, turn: usize) -> Vec<(usize, IndexBox)> {
    let mut holders: BTreeMap<Vec<(usize, usize)>, Vec<usize>> = BTreeMap::new();
    for (position, &rank) in layout.mesh().ranks().iter().enumerate() {
        let cells = layout.local_box(position);
        if cells.volume() > 0 {
            let ends = cells.ranges().iter().map(|r| (r.start, r.end)).collect();
            holders.entry(ends).or_default().push(rank);
        }
    }
    let mut found = Vec::new();
    for (ends, ranks) in holders {
        let cells = IndexBox::new(ends.into_iter().map(|(start, end)| start..end).collect());
        let bytes = cells.volume() * element;
        let parts = (bytes / WORTH_SPLITTING)
            .min(ranks.len())
            .max(bytes.div_ceil(LARGEST));
        let parts = split(&cells, parts).into_iter().enumerate();
        found.extend(parts.map(|(i, part)| (ranks[(turn + i) % ranks.len()], part)));
    }
    found
}

/// Splits a box into at most `parts` parts along its first dim with more than one cell, so that
/// each is contiguous in memory.
fn split(cells: &IndexBox, parts: usize) -> Vec<IndexBox> {
    let ranges = cells.ranges();
    let Some(dim) = ranges.iter().position(|range| range.len() > 1) else {
        return vec![cells.clone()];
    };
    let Range { start, end } = ranges[dim];
    let parts = parts.clamp(1, end - start);
    let cut = |part: usize| start + (end - start) * part / parts;
    let part = |i| {
        let mut ranges = ranges.to_vec();
        ranges[dim] = cut(i)..cut(i + 1);
        IndexBox::new(ranges)
    };
    (0..parts).map(part).collect()
}

/// Chooses the rank that reads a piece: among the ranks that need most of it, the one with the
/// fewest bytes to read so far.
///
/// `needs` holds the box that each rank needs; `reading` counts the bytes that each rank reads,
/// over all tensors.
pub(crate) fn reader(
    piece: &IndexBox,
    bytes: usize,
    needs: &[(usize, IndexBox)],
    reading: &mut BTreeMap<usize, usize>,
) -> Option<usize> {
    let needed = needs.iter().filter_map(|(rank, cells)| {
        let cells = piece.intersection(cells)?.volume();
        Some((
            std::cmp::Reverse(cells),
            reading.get(rank).copied().unwrap_or(0),
            *rank,
        ))
    });
    let (_, _, rank) = needed.min()?;
    *reading.entry(rank).or_default() += bytes;
    Some(rank)
}

/// Copies the box `cells` from an array that covers the box `held` into one that covers `wanted`,
/// both dense and in row-major order.
pub(crate) fn copy(
    (source, held): (&[u8], &IndexBox),
    (target, wanted): (&mut [u8], &IndexBox),
    cells: &IndexBox,
    element: usize,
) {
    if cells.volume() == 0 {
        return;
    }
    let shape = cells.shape();
    let Some((&last, outer)) = shape.split_last() else {
        target.copy_from_slice(source);
        return;
    };
    let offset = |array: &IndexBox, index: &[usize]| {
        let dims = array.ranges().iter().zip(cells.ranges()).zip(index);
        element
            * dims.fold(0, |offset, ((array, cells), index)| {
                offset * array.len() + cells.start + index - array.start
            })
    };
    let mut index = vec![0; shape.len()];
    for _ in 0..outer.iter().product() {
        let [read, write] = [held, wanted].map(|array| offset(array, &index));
        let bytes = last * element;
        target[write..write + bytes].copy_from_slice(&source[read..read + bytes]);
        // Advances to the next row, like an odometer.
        for dim in (0..outer.len()).rev() {
            index[dim] += 1;
            if index[dim] < outer[dim] {
                break;
            }
            index[dim] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use halocline_core::{MeshShape, Placement, Replicate, Shard};
    use proptest::prelude::*;

    fn layout(shape: &[usize], placements: &[Placement]) -> Layout {
        let mesh = MeshShape::new(&[("lat", 2), ("lon", 3)], (0..6).collect()).unwrap();
        Layout::new(&Arc::new(mesh), shape, placements).unwrap()
    }

    #[test]
    fn replicas_share_the_work_and_small_tensors_go_round() {
        let large = pieces(&layout(&[1, 600, 1000], &[Replicate, Shard(2)]), 8, 1);
        // Two ranks hold each third of the columns, which is 1.6 MB.
        let ranks: Vec<usize> = large.iter().map(|(rank, _)| *rank).collect();
        assert_eq!(ranks, [3, 4, 5]);
        let larger = pieces(&layout(&[1, 1600, 1000], &[Replicate, Shard(2)]), 8, 0);
        let ranks: Vec<usize> = larger.iter().map(|(rank, _)| *rank).collect();
        assert_eq!(ranks, [0, 3, 1, 4, 2, 5]);
        for turn in 0..12 {
            let small = pieces(&layout(&[7, 5], &[Replicate; 2]), 4, turn);
            assert_eq!(small, [(turn % 6, IndexBox::whole(&[7, 5]))]);
        }
        assert!(pieces(&layout(&[0, 5], &[Replicate; 2]), 4, 0).is_empty());
        let scalar = pieces(&layout(&[], &[Replicate; 2]), 4, 2);
        assert_eq!(scalar, [(2, IndexBox::whole(&[]))]);
        let huge = pieces(&layout(&[1000, 1 << 20], &[Shard(0), Shard(1)]), 4, 0);
        assert!(
            huge.iter()
                .all(|(_, cells)| cells.volume() * 4 <= LARGEST + (4 << 20))
        );
    }

    fn line(range: Range<usize>) -> IndexBox {
        IndexBox::new(std::iter::once(range).collect())
    }

    #[test]
    fn a_piece_is_read_by_who_needs_it_or_has_least_to_do() {
        let whole = IndexBox::whole(&[8]);
        let piece = line(0..4);
        let everyone: Vec<_> = (0..3).map(|rank| (rank, whole.clone())).collect();
        let mut reading = BTreeMap::new();
        let mut read = |needs: &[_]| reader(&piece, 10, needs, &mut reading);
        assert_eq!(
            [read(&everyone), read(&everyone), read(&everyone)],
            [Some(0), Some(1), Some(2)]
        );
        let halves = [(0, line(0..1)), (1, line(1..8))];
        assert_eq!(read(&halves), Some(1));
        assert_eq!(read(&[(0, line(4..8))]), None);
    }

    /// Generates a non-empty range within a dim of 6 cells.
    fn range() -> impl Strategy<Value = Range<usize>> {
        (0_usize..6, 0_usize..6).prop_map(|(a, b)| a.min(b)..a.max(b) + 1)
    }

    proptest! {
        #[test]
        fn each_cell_is_in_one_piece_of_a_rank_that_holds_it(
            shape in prop::collection::vec(0_usize..7, 0..4), axes in prop::collection::vec(0_usize..4, 2), turn in 0_usize..9,
        ) {
            let placements: Vec<Placement> = axes.iter()
                .map(|&axis| if axis < shape.len() { Shard(axis) } else { Replicate }).collect();
            let layout = layout(&shape, &placements);
            let mut seen = std::collections::HashSet::new();
            for (rank, cells) in pieces(&layout, 1 << 19, turn) {
                prop_assert_eq!(cells.intersection(&layout.local_box(rank)), Some(cells.clone()));
                for index in 0..cells.volume() {
                    let mut index = index;
                    let cell: Vec<usize> = cells.ranges().iter().rev().map(|range| {
                        let coordinate = range.start + index % range.len();
                        index /= range.len();
                        coordinate
                    }).collect();
                    prop_assert!(seen.insert(cell));
                }
            }
            prop_assert_eq!(seen.len(), shape.iter().product::<usize>());
        }

        #[test]
        fn copied_cells_are_those_of_the_source(
            from in prop::collection::vec(range(), 3), to in prop::collection::vec(range(), 3), element in 1_usize..5,
        ) {
            let (from, to) = (IndexBox::new(from), IndexBox::new(to));
            // A distinct value in every cell.
            let value = |cell: &[usize]| (cell[0] * 36 + cell[1] * 6 + cell[2] + 1) as u8;
            let cells = |array: &IndexBox| {
                let [a, b, c] = [0, 1, 2].map(|dim| array.ranges()[dim].clone());
                a.flat_map(move |i| { let c = c.clone(); b.clone().flat_map(move |j| c.clone().map(move |k| [i, j, k])) })
                    .collect::<Vec<_>>()
            };
            let source: Vec<u8> = cells(&from).iter().flat_map(|cell| vec![value(cell); element]).collect();
            let mut target = vec![0; to.volume() * element];
            if let Some(common) = from.intersection(&to) {
                copy((&source, &from), (&mut target, &to), &common, element);
            }
            let inside = |cell: &[usize]| cell.iter().zip(from.ranges()).all(|(i, range)| range.contains(i));
            let expected: Vec<u8> = cells(&to).iter()
                .flat_map(|cell| vec![if inside(cell) { value(cell) } else { 0 }; element]).collect();
            prop_assert_eq!(target, expected);
        }
    }
}
