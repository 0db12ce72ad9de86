//! k-d tree for finding the points near a query.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Maximum number of points of a leaf.
const LEAF: usize = 16;

/// Limit on the neighbours of a query.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    /// Maximum number; the nearest are kept.
    pub(super) count: usize,
    /// Maximum squared distance.
    pub(super) square: f64,
}

/// Squared distance and number of a point, ordered by distance, ties by number.
#[derive(PartialEq)]
struct Near(f64, usize);

impl Eq for Near {}

impl Ord for Near {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

impl PartialOrd for Near {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Points in a k-d tree: a range longer than a leaf is split at its middle, along the coordinate
/// with the largest spread.
pub(super) struct Tree {
    width: usize,
    /// Coordinates of each point, in tree order.
    coordinates: Vec<f64>,
    /// Number of each point.
    numbers: Vec<usize>,
    /// Coordinate along which a range is split and the value there, stored at the index of the
    /// range's middle.
    cuts: Vec<(usize, f64)>,
}

impl Tree {
    /// Builds a tree of points `[points, width]`, numbered from `first` on.
    pub(super) fn new(coordinates: &[f64], width: usize, first: usize) -> Self {
        let mut order: Vec<usize> = (0..coordinates.len() / width).collect();
        let mut cuts = vec![(0, 0.0); order.len()];
        split(coordinates, width, &mut order, &mut cuts);
        let rows = order
            .iter()
            .flat_map(|row| &coordinates[row * width..][..width]);
        Self {
            width,
            coordinates: rows.copied().collect(),
            numbers: order.iter().map(|row| first + row).collect(),
            cuts,
        }
    }

    /// Merges the points near a query into those found so far: squared distances and numbers,
    /// sorted.
    pub(super) fn add_to(&self, found: &mut Vec<(f64, usize)>, query: &[f64], limit: Limit) {
        let before = found.drain(..);
        let mut near: BinaryHeap<Near> = before
            .map(|(square, number)| Near(square, number))
            .collect();
        self.visit(0..self.numbers.len(), &mut near, query, limit);
        let sorted = near.into_sorted_vec().into_iter();
        found.extend(sorted.map(|Near(square, number)| (square, number)));
    }

    fn visit(
        &self,
        range: Range<usize>,
        found: &mut BinaryHeap<Near>,
        query: &[f64],
        limit: Limit,
    ) {
        if range.len() <= LEAF {
            for place in range {
                let squares = self.point(place).iter().zip(query);
                let square = squares.map(|(a, b)| (a - b) * (a - b)).sum();
                insert(found, Near(square, self.numbers[place]), limit);
            }
            return;
        }
        let middle = range.start.midpoint(range.end);
        let (along, cut) = self.cuts[middle];
        let gap = query[along] - cut;
        let (low, high) = (range.start..middle, middle..range.end);
        let (near, far) = if gap < 0.0 { (low, high) } else { (high, low) };
        self.visit(near, found, query, limit);
        if gap * gap <= most(found, limit) {
            self.visit(far, found, query, limit);
        }
    }

    fn point(&self, place: usize) -> &[f64] {
        &self.coordinates[place * self.width..][..self.width]
    }
}

/// Orders the points of a range and records its splits.
fn split(coordinates: &[f64], width: usize, order: &mut [usize], cuts: &mut [(usize, f64)]) {
    if order.len() <= LEAF {
        return;
    }
    let of = |row: usize, dim: usize| coordinates[row * width + dim];
    let spread = |dim: usize| {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for row in &*order {
            (low, high) = (low.min(of(*row, dim)), high.max(of(*row, dim)));
        }
        high - low
    };
    let spreads: Vec<f64> = (0..width).map(spread).collect();
    let dim = (0..width).max_by(|a, b| spreads[*a].total_cmp(&spreads[*b]));
    let (dim, middle) = (dim.unwrap_or(0), order.len() / 2);
    order.select_nth_unstable_by(middle, |a, b| of(*a, dim).total_cmp(&of(*b, dim)));
    // In a range longer than a leaf the middle is not the first point, so every cut has its own
    // index.
    cuts[middle] = (dim, of(order[middle], dim));
    let (low, high) = order.split_at_mut(middle);
    let (cuts_low, cuts_high) = cuts.split_at_mut(middle);
    split(coordinates, width, low, cuts_low);
    split(coordinates, width, high, cuts_high);
}

/// Squared distance beyond which no point counts.
fn most(found: &BinaryHeap<Near>, limit: Limit) -> f64 {
    match found.peek() {
        Some(last) if found.len() == limit.count => last.0,
        _ => limit.square,
    }
}

/// Inserts a point, and removes the farthest if there are too many.
fn insert(found: &mut BinaryHeap<Near>, point: Near, limit: Limit) {
    if point.0 > most(found, limit) {
        return;
    }
    found.push(point);
    if found.len() > limit.count {
        found.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::random;

    /// Lattice points, with many ties in distance, and random points.
    #[test]
    fn points_near_a_query_are_those_of_brute_force() {
        let anywhere = random::<2>([700, 3], "points", 0).into_data();
        let anywhere: Vec<f64> = anywhere.iter::<f64>().collect();
        let lattice = |i: usize| [(i % 9) as f64, (i / 9 % 8) as f64, (i / 72) as f64];
        let lattice: Vec<f64> = (0..700).flat_map(lattice).collect();
        for points in [anywhere, lattice] {
            let tree = Tree::new(&points, 3, 5);
            for query in points.chunks(3).step_by(7) {
                let mut all: Vec<(f64, usize)> = points
                    .chunks(3)
                    .map(|point| {
                        point
                            .iter()
                            .zip(query)
                            .map(|(a, b)| (a - b) * (a - b))
                            .sum()
                    })
                    .zip(5..)
                    .collect();
                all.sort_by(|a, b| a.partial_cmp(b).unwrap());
                let near = |count, square| {
                    let mut found = Vec::new();
                    tree.add_to(&mut found, query, Limit { count, square });
                    found
                };
                assert_eq!(near(20, f64::INFINITY), all[..20]);
                let within: Vec<_> = all.iter().filter(|(far, _)| *far <= 2.0).copied().collect();
                assert_eq!(near(usize::MAX, 2.0), within);
                assert_eq!(near(9, 2.0), within[..within.len().min(9)]);
            }
        }
    }
}
