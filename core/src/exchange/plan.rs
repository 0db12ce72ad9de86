//! Exchange plans: boxes that each rank sends, receives and copies.

use std::fmt;
use std::ops::Range;

use super::need::{Need, Source};
use crate::IndexBox;

/// Box that moves from a rank's shard into the tensor that a rank assembles. Both are local index
/// boxes. [`ExchangePlan`] lists them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The cells in the owner's shard.
    pub src: IndexBox,
    /// The cells in the receiver's assembled tensor.
    pub dst: IndexBox,
    /// Whether the order of cells is reversed, for every dim.
    pub flip: Vec<bool>,
}

/// Plan of one rank's part in an exchange: the boxes that it sends, receives and copies.
///
/// Made by [`ExchangePlan::new`] from data that every rank has, so that the plans of all ranks
/// match without a message. Its adjoint is the plan run in reverse, adding where boxes overlap.
///
/// # Example
/// ```
/// use halocline_core::{ExchangePlan, IndexBox, Layout, MeshShape, Need, Shard, Source};
///
/// let mesh = MeshShape::new(&[("lat", 2)], vec![0, 1])?.into();
/// let layout = Layout::new(&mesh, &[4, 3], &[Shard(0)])?;
/// let rows = |position| Need::of(IndexBox::new(vec![position..position + 3, 0..3]));
/// let plan = ExchangePlan::new(Source::Layout(&layout), 0, 2, rows);
/// assert_eq!(plan.to_string().lines().last(), Some("  sends 12 B, receives 12 B in f32"));
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ExchangePlan {
    /// The shape of this rank's shard.
    pub source_shape: Vec<usize>,
    /// The shape of the tensor that this rank assembles.
    pub output_shape: Vec<usize>,
    /// The value of cells that no box covers.
    pub fill: f64,
    /// Boxes that stay on this rank.
    pub copies: Vec<Transfer>,
    /// Boxes for each peer, by mesh position, in the order of the peer's needs.
    pub sends: Vec<(usize, Vec<Transfer>)>,
    /// Boxes from each peer, in the order of this rank's needs.
    pub receives: Vec<(usize, Vec<Transfer>)>,
}

impl ExchangePlan {
    /// Plans the part of the rank at `position` of `size`; `need_of` gives the need of each
    /// position.
    pub fn new(
        source: Source<'_>,
        position: usize,
        size: usize,
        need_of: impl Fn(usize) -> Need,
    ) -> Self {
        let shard = source.local_box(position);
        let need = need_of(position);
        let mut plan = Self {
            source_shape: shard.shape(),
            output_shape: need.shape.clone(),
            fill: 0.0,
            copies: Vec::new(),
            sends: Vec::new(),
            receives: Vec::new(),
        };
        for (owner, transfer) in transfers(source, &need, position) {
            if owner == position {
                plan.copies.push(transfer);
            } else {
                push(&mut plan.receives, owner, transfer);
            }
        }
        plan.receives.sort_by_key(|(peer, _)| *peer);
        // A message holds cells and no indices, so sender and receiver must list its boxes in one
        // order: the sender repeats the receiver's computation and keeps its own share, instead of
        // asking.
        for peer in (0..size).filter(|&peer| peer != position) {
            for (owner, transfer) in transfers(source, &need_of(peer), peer) {
                if owner == position {
                    push(&mut plan.sends, peer, transfer);
                }
            }
        }
        plan
    }

    /// This plan with messages of the rank to itself instead of all copies but the largest, so that
    /// the halos of one rank on a ring pass through its engine too.
    pub(crate) fn through_loopback(mut self, position: usize) -> Self {
        let copies = self.copies.iter().enumerate();
        let Some((largest, _)) = copies.max_by_key(|(_, copy)| copy.src.volume()) else {
            return self;
        };
        let largest = self.copies.swap_remove(largest);
        for copy in std::mem::replace(&mut self.copies, vec![largest]) {
            push(&mut self.sends, position, copy.clone());
            push(&mut self.receives, position, copy);
        }
        self
    }

    /// This plan with another value for cells that no box covers.
    pub fn with_fill(mut self, fill: f64) -> Self {
        self.fill = fill;
        self
    }

    /// The number of elements that this rank sends.
    pub fn elements_sent(&self) -> usize {
        elements(&self.sends)
    }

    /// The number of elements that this rank receives.
    pub fn elements_received(&self) -> usize {
        elements(&self.receives)
    }

    /// Whether the assembled tensor is the rank's shard, so that nothing is copied.
    pub fn is_identity(&self) -> bool {
        self.source_shape == self.output_shape
            && match self.copies.as_slice() {
                [] => self.covers_nothing() && self.output_shape.contains(&0),
                [copy] => {
                    copy.src == copy.dst
                        && copy.src.shape() == self.source_shape
                        && !copy.flip.contains(&true)
                }
                _ => false,
            }
    }

    /// A box of the assembled tensor that holds cells of this rank's shard and none of other ranks,
    /// so that it is complete before messages arrive; `None` if the rank copies no cells, or if a
    /// received box is not beyond a side of the copy.
    pub fn interior(&self) -> Option<IndexBox> {
        let largest = self.copies.iter().max_by_key(|copy| copy.src.volume())?;
        let apart = |one: &Range<usize>, other: &Range<usize>| {
            one.end <= other.start || other.end <= one.start
        };
        let mut inside: Vec<_> = IndexBox::whole(&self.output_shape).ranges().to_vec();
        let received = self.receives.iter().flat_map(|(_, transfers)| transfers);
        // Each received box that still reaches into the interior cuts off one side of it. A box at
        // a corner is beyond the copy in several dims; one cut is enough to exclude it, so later
        // boxes of the same corner change nothing.
        for transfer in received {
            let cells = transfer.dst.ranges();
            if inside
                .iter()
                .zip(cells)
                .any(|(inside, cells)| apart(inside, cells))
            {
                continue;
            }
            let copied = largest.dst.ranges();
            let dim = (0..cells.len()).find(|&dim| apart(&copied[dim], &cells[dim]))?;
            if cells[dim].end <= copied[dim].start {
                inside[dim].start = cells[dim].end;
            } else {
                inside[dim].end = cells[dim].start;
            }
        }
        Some(IndexBox::new(inside))
    }

    fn covers_nothing(&self) -> bool {
        self.copies.is_empty() && self.receives.is_empty()
    }
}

fn push(list: &mut Vec<(usize, Vec<Transfer>)>, peer: usize, transfer: Transfer) {
    match list.iter_mut().find(|(p, _)| *p == peer) {
        Some((_, transfers)) => transfers.push(transfer),
        None => list.push((peer, vec![transfer])),
    }
}

fn elements(list: &[(usize, Vec<Transfer>)]) -> usize {
    let transfers = list.iter().flat_map(|(_, transfers)| transfers);
    transfers.map(|transfer| transfer.src.volume()).sum()
}

/// Splits the need of the rank at `receiver` by owner, in an order that depends on the arguments
/// alone.
fn transfers(source: Source<'_>, need: &Need, receiver: usize) -> Vec<(usize, Transfer)> {
    let mut found = Vec::new();
    for piece in &need.pieces {
        for (owner, cells) in source.owners(&piece.src, receiver) {
            let origin = source.local_box(owner);
            let dims = 0..cells.ranges().len();
            let src = dims.clone().map(|dim| {
                let (cell, start) = (&cells.ranges()[dim], origin.ranges()[dim].start);
                cell.start - start..cell.end - start
            });
            // A reversed piece begins with its last cell.
            let dst = dims.map(|dim| {
                let (cell, from) = (&cells.ranges()[dim], &piece.src.ranges()[dim]);
                let start = piece.dst[dim]
                    + if piece.flip[dim] {
                        from.end - cell.end
                    } else {
                        cell.start - from.start
                    };
                start..start + cell.len()
            });
            let transfer = Transfer {
                src: IndexBox::new(src.collect()),
                dst: IndexBox::new(dst.collect()),
                flip: piece.flip.clone(),
            };
            found.push((owner, transfer));
        }
    }
    found
}

impl fmt::Display for ExchangePlan {
    /// One line per box, with its bytes at four bytes an element, and the totals.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const BYTES: usize = size_of::<f32>();
        writeln!(
            f,
            "exchange {:?} → {:?}",
            self.source_shape, self.output_shape
        )?;
        for copy in &self.copies {
            writeln!(f, "  copy         {} → {}", copy.src, copy.dst)?;
        }
        for (peer, transfers) in &self.sends {
            for transfer in transfers {
                let bytes = transfer.src.volume() * BYTES;
                writeln!(f, "  send to   {peer:>2} {} ({bytes} B)", transfer.src)?;
            }
        }
        for (peer, transfers) in &self.receives {
            for transfer in transfers {
                let bytes = transfer.dst.volume() * BYTES;
                writeln!(f, "  receive   {peer:>2} {} ({bytes} B)", transfer.dst)?;
            }
        }
        write!(
            f,
            "  sends {} B, receives {} B in f32",
            self.elements_sent() * BYTES,
            self.elements_received() * BYTES
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;
    use crate::mesh::unravel;
    use crate::{Boundary, MeshShape, Placement, Replicate, Shard, segments};
    use proptest::prelude::*;
    use std::sync::Arc;

    /// All cells of a box, as flat indices of an array of `shape`.
    fn cells(of: &IndexBox, shape: &[usize]) -> Vec<usize> {
        (0..of.volume())
            .map(|index| {
                let offsets = unravel(index, &of.shape());
                let at: Vec<usize> = offsets
                    .iter()
                    .zip(of.ranges())
                    .map(|(offset, range)| range.start + offset)
                    .collect();
                crate::mesh::ravel(&at, shape)
            })
            .collect()
    }

    fn flipped(of: &IndexBox, flip: &[bool], shape: &[usize]) -> Vec<usize> {
        let sizes = of.shape();
        (0..of.volume())
            .map(|index| {
                let offsets = unravel(index, &sizes);
                let at: Vec<usize> = (0..sizes.len())
                    .map(|d| {
                        let range = &of.ranges()[d];
                        if flip[d] {
                            range.end - 1 - offsets[d]
                        } else {
                            range.start + offsets[d]
                        }
                    })
                    .collect();
                crate::mesh::ravel(&at, shape)
            })
            .collect()
    }

    /// Runs the plans of all ranks over the field `0, 1, 2, …` and returns what each assembles (-1
    /// = fill).
    fn simulate(layout: &Layout, need_of: &dyn Fn(usize) -> Need) -> Vec<Vec<i64>> {
        let size = layout.mesh().size();
        let plan = |p| ExchangePlan::new(Source::Layout(layout), p, size, need_of);
        let assembled = assemble((0..size).map(plan).collect(), layout);
        let looped = |p| plan(p).through_loopback(p);
        assert_eq!(assembled, assemble((0..size).map(looped).collect(), layout));
        assembled
    }

    /// The cells that each rank assembles by its plan.
    fn assemble(plans: Vec<ExchangePlan>, layout: &Layout) -> Vec<Vec<i64>> {
        let size = plans.len();
        let shards: Vec<Vec<i64>> = (0..size)
            .map(|p| {
                let held = cells(&layout.local_box(p), layout.shape());
                held.into_iter().map(|c| c as i64).collect()
            })
            .collect();
        (0..size)
            .map(|p| {
                let plan = &plans[p];
                let mut out = vec![-1; plan.output_shape.iter().product()];
                let mut put = |owner: usize, transfer: &Transfer| {
                    let from = flipped(&transfer.src, &transfer.flip, &plans[owner].source_shape);
                    let to = cells(&transfer.dst, &plan.output_shape);
                    for (from, to) in from.into_iter().zip(to) {
                        assert_eq!(out[to], -1, "a cell is written twice");
                        out[to] = shards[owner][from];
                    }
                };
                plan.copies.iter().for_each(|copy| put(p, copy));
                for (owner, transfers) in &plan.receives {
                    let sent = plans[*owner].sends.iter().find(|(peer, _)| *peer == p);
                    assert_eq!(
                        sent.map(|(_, t)| t),
                        Some(transfers),
                        "send and receive differ"
                    );
                    transfers.iter().for_each(|t| put(*owner, t));
                }
                out
            })
            .collect()
    }

    fn boundary() -> impl Strategy<Value = Boundary> {
        prop_oneof![
            Just(Boundary::Zeros),
            Just(Boundary::Periodic),
            Just(Boundary::Reflect),
            Just(Boundary::Replicate)
        ]
    }

    #[derive(Clone, Debug)]
    struct Case {
        layout: Layout,
        pads: Vec<(isize, isize, Boundary)>,
    }

    /// A layout of 1 to 3 dims over 1 to 3 axes with random extents, and a halo for every dim.
    fn case() -> impl Strategy<Value = Case> {
        (1..=3_usize, 1..=3_usize).prop_flat_map(|(dims, axes)| {
            let sizes = prop::collection::vec(1..=3_usize, axes);
            let placements = prop::collection::vec(prop::option::of(0..dims), axes);
            let extents = prop::collection::vec(prop::collection::vec(0..4_usize, 27), dims);
            let pads = prop::collection::vec((0..9_isize, 0..9_isize, boundary()), dims);
            (sizes, placements, extents, pads).prop_map(
                move |(sizes, placements, extents, pads)| {
                    let names = ["a", "b", "c"];
                    let axes: Vec<(&str, usize)> =
                        names.iter().copied().zip(sizes.clone()).collect();
                    let ranks = (0..sizes.iter().product()).collect();
                    let mesh = Arc::new(MeshShape::new(&axes, ranks).unwrap());
                    let placements: Vec<Placement> = placements
                        .iter()
                        .map(|dim| dim.map_or(Replicate, Shard))
                        .collect();
                    let blank = Layout::new(&mesh, &vec![0; dims], &placements).unwrap();
                    let extents = (0..dims)
                        .map(|dim| extents[dim][..blank.extents(dim).len()].to_vec())
                        .collect();
                    Case {
                        layout: blank.derive(placements, extents),
                        pads,
                    }
                },
            )
        })
    }

    proptest! {
        #[test]
        fn every_rank_assembles_what_brute_force_says(case in case()) {
            let Case { layout, pads } = case;
            let need_of = |position: usize| {
                let own = layout.local_box(position);
                let ranges: Vec<_> = own.ranges().iter().zip(&pads).map(|(range, (low, high, _))| {
                    range.start as isize - low..range.end as isize + high
                }).collect();
                let dims: Vec<_> = ranges.iter().zip(&pads).enumerate().map(|(dim, (range, (_, _, b)))| {
                    segments(range.clone(), layout.shape()[dim], *b, *b)
                }).collect();
                Need::product(ranges.iter().map(|r| r.len()).collect(), &dims)
            };
            for (position, out) in simulate(&layout, &need_of).into_iter().enumerate() {
                let own = layout.local_box(position);
                let shape = need_of(position).shape;
                for (index, value) in out.into_iter().enumerate() {
                    let at: Option<Vec<usize>> = unravel(index, &shape).into_iter().enumerate().map(|(dim, i)| {
                        let global = own.ranges()[dim].start as isize - pads[dim].0 + i as isize;
                        pads[dim].2.source(global, layout.shape()[dim])
                    }).collect();
                    let expected = at.map_or(-1, |at| crate::mesh::ravel(&at, layout.shape()) as i64);
                    prop_assert_eq!(value, expected);
                }
            }
        }

        #[test]
        fn any_layout_is_made_from_any_other(from in case(), keep in prop::collection::vec(any::<u32>(), 3)) {
            let from = from.layout;
            let dims = from.shape().len();
            let placements: Vec<Placement> = from.placements().iter().zip(keep).map(|(_, k)| {
                if k as usize % (dims + 1) == dims { Replicate } else { Shard(k as usize % (dims + 1)) }
            }).collect();
            let to = Layout::new(from.mesh(), from.shape(), &placements).unwrap();
            let assembled = simulate(&from, &|position| Need::of(to.local_box(position)));
            for (position, out) in assembled.into_iter().enumerate() {
                let expected: Vec<i64> =
                    cells(&to.local_box(position), to.shape()).into_iter().map(|c| c as i64).collect();
                prop_assert_eq!(out, expected);
            }
        }
    }

    #[test]
    fn a_plan_prints_its_boxes_and_bytes() {
        let mesh = Arc::new(MeshShape::new(&[("lat", 2)], vec![0, 1]).unwrap());
        let layout = Layout::new(&mesh, &[4, 3], &[Shard(0)]).unwrap();
        let plan = ExchangePlan::new(Source::Layout(&layout), 0, 2, |position| {
            let own = layout.local_box(position).ranges()[0].clone();
            let rows = segments(
                own.start as isize - 1..own.end as isize + 1,
                4,
                Boundary::Zeros,
                Boundary::Zeros,
            );
            let columns = segments(0..3, 3, Boundary::Zeros, Boundary::Zeros);
            Need::product(vec![4, 3], &[rows, columns])
        });
        assert_eq!(
            plan.to_string(),
            "exchange [2, 3] → [4, 3]\n\
             \x20 copy         [0..2, 0..3] → [1..3, 0..3]\n\
             \x20 send to    1 [1..2, 0..3] (12 B)\n\
             \x20 receive    1 [3..4, 0..3] (12 B)\n\
             \x20 sends 12 B, receives 12 B in f32"
        );
    }
}
