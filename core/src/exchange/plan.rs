//! Exchange plans: boxes that each rank sends, receives and copies.

use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::ops::Range;

use foldhash::fast::FixedState;

use super::need::{Need, Source};
use crate::IndexBox;

/// Box that moves from a rank's shard into the tensor that a rank assembles, as local index boxes
/// on both sides. Listed in [`ExchangePlan`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The cells in the owner's shard.
    pub src: IndexBox,
    /// The cells in the receiver's assembled tensor.
    pub dst: IndexBox,
    /// Whether the order of cells is reversed, per dim.
    pub flip: Vec<bool>,
}

/// Plan of one rank's part in an exchange: the boxes that it sends, receives and copies.
///
/// [`ExchangePlan::new`] makes it from data that every rank has, so the plans of all ranks match
/// without any message. Its adjoint is the plan run in reverse, adding where boxes overlap.
///
/// # Example
/// ```
/// use halocline_core::plan::{ExchangePlan, Need, Source};
/// use halocline_core::{IndexBox, Layout, MeshShape, Shard};
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
    /// Hash of the [arguments](Self::with_arguments) from which the plan was made; zero if there
    /// are none.
    pub arguments: u64,
    /// Boxes that stay on this rank.
    pub copies: Vec<Transfer>,
    /// Boxes for each peer, by mesh position, in the order of the peer's needs.
    pub sends: Vec<(usize, Vec<Transfer>)>,
    /// Boxes from each peer, in the order of this rank's needs.
    pub receives: Vec<(usize, Vec<Transfer>)>,
}

impl ExchangePlan {
    /// Plans the part of the rank at `position` among `size` ranks; `need_of` returns the need of
    /// each position.
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
            arguments: 0,
            copies: Vec::new(),
            sends: Vec::new(),
            receives: Vec::new(),
        };
        for (owner, transfer) in transfers(source, &need, position, None) {
            if owner == position {
                plan.copies.push(transfer);
            } else {
                push(&mut plan.receives, owner, transfer);
            }
        }
        plan.receives.sort_by_key(|(peer, _)| *peer);
        // A message holds cells without indices, so sender and receiver must list its boxes in the
        // same order: instead of asking, the sender repeats the receiver's computation and keeps
        // its own share.
        for peer in (0..size).filter(|&peer| peer != position) {
            for (owner, transfer) in transfers(source, &need_of(peer), peer, Some(&shard)) {
                if owner == position {
                    push(&mut plan.sends, peer, transfer);
                }
            }
        }
        plan
    }

    /// Returns this plan with all copies but the largest replaced by messages from the rank to
    /// itself, so that the halos of a single rank on a ring pass through its engine, too.
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

    /// Returns the plan of the boxes that travel when this plan runs in reverse.
    pub(super) fn reversed(&self) -> Self {
        let back = |transfer: &Transfer| Transfer {
            src: transfer.dst.clone(),
            dst: transfer.src.clone(),
            flip: transfer.flip.clone(),
        };
        let all_back = |list: &[(usize, Vec<Transfer>)]| {
            let boxes =
                |(peer, all): &(usize, Vec<Transfer>)| (*peer, all.iter().map(back).collect());
            list.iter().map(boxes).collect()
        };
        Self {
            source_shape: self.output_shape.clone(),
            output_shape: self.source_shape.clone(),
            fill: 0.0,
            arguments: self.arguments,
            copies: self.copies.iter().map(back).collect(),
            sends: all_back(&self.receives),
            receives: all_back(&self.sends),
        }
    }

    /// Returns this plan with another value for cells that no box covers.
    pub fn with_fill(mut self, fill: f64) -> Self {
        self.fill = fill;
        self
    }

    /// Returns this plan with a hash of the arguments from which it was made, which must be equal
    /// on all ranks. Ranks with different arguments get an error, as ranks in different operations
    /// do.
    pub fn with_arguments(mut self, arguments: &impl Hash) -> Self {
        self.arguments = FixedState::default().hash_one(arguments);
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

    /// Whether the assembled tensor equals the rank's shard, so that nothing is copied.
    pub fn is_identity(&self) -> bool {
        self.source_shape == self.output_shape
            && match self.copies.as_slice() {
                [] => self.receives.is_empty() && self.output_shape.contains(&0),
                [copy] => {
                    copy.src == copy.dst
                        && copy.src.shape() == self.source_shape
                        && !copy.flip.contains(&true)
                }
                _ => false,
            }
    }

    /// Returns a box of the assembled tensor that holds only cells of this rank's shard, and is
    /// therefore complete before messages arrive; `None` if the rank copies no cells, or if a
    /// received box is not beyond a side of the copy.
    pub fn interior(&self) -> Option<IndexBox> {
        let largest = self.copies.iter().max_by_key(|copy| copy.src.volume())?;
        let apart = |one: &Range<usize>, other: &Range<usize>| {
            one.end <= other.start || other.end <= one.start
        };
        let mut inside: Vec<_> = IndexBox::whole(&self.output_shape).ranges().to_vec();
        let received = self.receives.iter().flat_map(|(_, transfers)| transfers);
        // Each received box that still overlaps the interior cuts off one side of it. A box at a
        // corner is beyond the copy in several dims; one cut is enough to exclude it, so later
        // boxes at the same corner change nothing.
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

/// Splits the need of the rank at `receiver` by owner, restricted to the cells `among` if given, in
/// an order that depends only on the arguments.
fn transfers(
    source: Source<'_>,
    need: &Need,
    receiver: usize,
    among: Option<&IndexBox>,
) -> Vec<(usize, Transfer)> {
    let mut found = Vec::new();
    for piece in &need.pieces {
        let part = match among {
            None => Some(piece.src.clone()),
            Some(among) => piece.src.intersection(among),
        };
        let owned = part.map_or(Vec::new(), |part| source.owners(&part, receiver));
        for (owner, cells) in owned {
            // A reversed piece starts with its last cell.
            let dst = cells.ranges().iter().enumerate().map(|(dim, cell)| {
                let from = &piece.src.ranges()[dim];
                let start = piece.dst[dim]
                    + if piece.flip[dim] {
                        from.end - cell.end
                    } else {
                        cell.start - from.start
                    };
                start..start + cell.len()
            });
            let transfer = Transfer {
                src: cells.seen_from(&source.local_box(owner)),
                dst: IndexBox::new(dst.collect()),
                flip: piece.flip.clone(),
            };
            found.push((owner, transfer));
        }
    }
    found
}

impl fmt::Display for ExchangePlan {
    /// Prints one line per box, with its size at four bytes per element, and the totals.
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
mod tests;
