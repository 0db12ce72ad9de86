//! Random choices, all determined by one number.

use std::ops::RangeInclusive;

use halocline::core::support::philox4x32_10;
use halocline::ops::golden::{Arguments, Golden};
use halocline::ops::testing::{Sharding, extents_between};
use halocline::prelude::*;

/// Largest number of ranks of a case.
const RANKS: usize = 6;

/// Generator of choices.
pub(crate) struct Draw {
    key: [u32; 2],
    count: u32,
}

impl Draw {
    pub(crate) fn new(case: u64) -> Self {
        Self {
            key: [case as u32, (case >> 32) as u32],
            count: 0,
        }
    }

    pub(crate) fn within(&mut self, range: RangeInclusive<usize>) -> usize {
        self.count += 1;
        let [word, ..] = philox4x32_10([self.count, 0, 0, 0], self.key);
        range.start() + word as usize % (range.end() - range.start() + 1)
    }

    pub(crate) fn coin(&mut self) -> bool {
        self.within(0..=1) == 1
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.within(0..=choices.len() - 1)]
    }

    pub(crate) fn list(&mut self, count: usize, range: RangeInclusive<usize>) -> Vec<usize> {
        (0..count).map(|_| self.within(range.clone())).collect()
    }

    /// Draws at least one of the numbers below `count`, in ascending order.
    pub(crate) fn some(&mut self, count: usize) -> Vec<usize> {
        let certain = self.within(0..=count - 1);
        (0..count)
            .filter(|&number| number == certain || self.coin())
            .collect()
    }

    /// Draws a permutation of the numbers below `count`.
    pub(crate) fn order(&mut self, count: usize) -> Vec<usize> {
        let mut left: Vec<usize> = (0..count).collect();
        let taken = (0..count).map(|_| left.remove(self.within(0..=left.len() - 1)));
        taken.collect()
    }

    /// Draws a mesh of one to three axes, placements that the operator permits, and extents: even
    /// ones, or any, including empty ones.
    pub(crate) fn sharding(&mut self, golden: &Golden, arguments: &Arguments) -> Sharding {
        let (shape, dims) = golden.sharded.of(arguments);
        let mut axes = Vec::new();
        let mut left = RANKS;
        for name in &["a", "b", "c"][..self.within(1..=3)] {
            let size = self.within(1..=left);
            left /= size;
            axes.push((*name, size));
        }
        let placement = |draw: &mut Self| match draw.within(0..=9) {
            0 => Replicate,
            1 => halocline::core::Fan,
            _ if dims.is_empty() => Replicate,
            _ => Shard(draw.pick(&dims)),
        };
        let placements: Vec<Placement> = axes.iter().map(|_| placement(self)).collect();
        let mut extents = Vec::new();
        for &dim in &dims {
            let over = axes.iter().zip(&placements);
            let parts = over.filter(|(_, placement)| **placement == Shard(dim));
            let parts: usize = parts.map(|((_, size), _)| size).product();
            if parts > 1 && self.within(0..=3) > 0 {
                extents.push((dim, self.extents(shape[dim], parts)));
            }
        }
        Sharding {
            axes,
            placements,
            extents,
        }
    }

    fn extents(&mut self, size: usize, parts: usize) -> Vec<usize> {
        extents_between(self.list(parts - 1, 0..=size), size)
    }
}
