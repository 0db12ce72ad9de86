//! Ring of the ranks that hold the parts of a dim: which rank computes with which part of the keys,
//! and in which order.
//!
//! Every rank begins with its own part and continues with those of the ranks before it. A part goes
//! from its owner to the ranks after it, and skips those whose queries reach none of its keys. In
//! causal order it ends at the last rank. A rank of later queries has more parts, and smaller ones
//! if tokens are divided by [`causal_extents`](super::causal_extents): the rank before it then
//! receives a part and passes it on before this rank is done with the parts that it has.
//!
//! Everything here is arithmetic on layouts, the same on all ranks.

use std::ops::Range;

use halocline_core::{Layout, Shard};

/// The ranks that hold the parts of the keys. Ranks of the ring are numbered by their parts.
#[derive(Clone, Debug)]
pub(super) struct Ring {
    /// Rank of every part.
    pub ranks: Vec<usize>,
    /// Keys of every part.
    pub parts: Vec<Range<usize>>,
    /// This rank's part.
    pub own: usize,
    /// Queries of the rank of every part.
    queries: Vec<Range<usize>>,
    /// Whether queries reach only keys up to their own position.
    causal: bool,
}

impl Ring {
    /// Ring of the ranks along the axes over which both keys and queries are sharded in `dim`, for
    /// this rank's part of all else. Over other axes of the keys, each rank keeps its own part.
    pub(super) fn new(
        keys: &Layout,
        queries: &Layout,
        dim: usize,
        position: usize,
        causal: bool,
    ) -> Self {
        let mesh = keys.mesh();
        let mut axes = keys.axes_of(dim);
        axes.retain(|axis| queries.placements()[*axis] == Shard(dim));
        let own = mesh.coords(position);
        let beside = |other: &usize| {
            let coords = mesh.coords(*other);
            (0..own.len()).all(|axis| axes.contains(&axis) || coords[axis] == own[axis])
        };
        let mut found: Vec<(usize, usize)> = (0..mesh.size())
            .filter(beside)
            .map(|other| (keys.part(dim, other), other))
            .collect();
        found.sort_unstable();
        let own = found.iter().position(|(_, other)| *other == position);
        let queries_of =
            |&(_, other): &(usize, usize)| queries.part_range(dim, queries.part(dim, other));
        Self {
            ranks: found
                .iter()
                .map(|(_, other)| mesh.ranks()[*other])
                .collect(),
            parts: found
                .iter()
                .map(|(part, _)| keys.part_range(dim, *part))
                .collect(),
            own: own.expect("this rank is on its ring"),
            queries: found.iter().map(queries_of).collect(),
            causal,
        }
    }

    /// Ring of one rank, which holds everything.
    pub(super) fn alone(cells: usize) -> Self {
        Self {
            ranks: vec![0],
            parts: std::iter::once(0..cells).collect(),
            own: 0,
            queries: std::iter::once(0..0).collect(),
            causal: false,
        }
    }

    /// Whether a rank's queries reach keys of a part.
    fn reaches(&self, rank: usize, part: usize) -> bool {
        let (queries, keys) = (&self.queries[rank], &self.parts[part]);
        !queries.is_empty() && !keys.is_empty() && (!self.causal || keys.start < queries.end)
    }

    /// Parts that a rank computes with, in order.
    fn rounds_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        let count = self.parts.len();
        let others = (1..count).map(move |step| (rank + count - step) % count);
        std::iter::once(rank).chain(others.filter(move |part| self.reaches(rank, *part)))
    }

    /// Parts that this rank computes with, in order, each with its successor.
    pub(super) fn rounds(&self) -> Vec<(usize, Option<usize>)> {
        let parts: Vec<usize> = self.rounds_of(self.own).collect();
        let next = parts[1..].iter().copied().map(Some);
        let next = next.chain(std::iter::once(None));
        parts.iter().copied().zip(next).collect()
    }

    /// Ranks that compute with a part, in order, starting with its owner.
    fn ranks_of(&self, part: usize) -> impl DoubleEndedIterator<Item = usize> + '_ {
        let count = self.parts.len();
        let others = (1..count).map(move |step| (part + step) % count);
        std::iter::once(part).chain(others.filter(move |rank| self.reaches(*rank, part)))
    }

    /// Rank to which a rank passes a part on.
    fn after(&self, rank: usize, part: usize) -> Option<usize> {
        self.ranks_of(part)
            .skip_while(|other| *other != rank)
            .nth(1)
    }

    /// Rank from which a rank receives a part.
    fn before(&self, rank: usize, part: usize) -> Option<usize> {
        self.ranks_of(part)
            .take_while(|other| *other != rank)
            .last()
    }

    /// Last rank that computes with a part.
    fn last(&self, part: usize) -> usize {
        self.ranks_of(part).next_back().expect("its owner")
    }

    /// Messages of gradients at the end of a round with `part`, before the round with `next`:
    /// gradients follow the part, and go from its last rank to its owner.
    pub(super) fn gradients(&self, part: usize, next: Option<usize>) -> Way {
        let own = self.own;
        let to = self.after(own, part).or((part != own).then_some(part));
        let (from, part) = match next {
            Some(next) => (self.before(own, next), next),
            None => (Some(self.last(own)).filter(|last| *last != own), own),
        };
        Way { to, from, part }
    }

    /// Messages of keys and values during a round with `part`, before the round with `next`.
    pub(super) fn keys(&self, part: usize, next: Option<usize>) -> Way {
        Way {
            to: self.after(self.own, part),
            from: next.and_then(|next| self.before(self.own, next)),
            part: next.unwrap_or(part),
        }
    }
}

/// Messages of a rank in a round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// Rank to which the part of the round is sent.
    pub to: Option<usize>,
    /// Rank from which a part is received.
    pub from: Option<usize>,
    /// The part that is received.
    pub part: usize,
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use halocline_core::MeshShape;
    use proptest::prelude::*;

    use super::*;
    use crate::attention::causal_extents;

    /// Ring with these extents of queries and keys, as seen by each of its ranks.
    fn rings(queries: &[usize], keys: &[usize], causal: bool) -> Vec<Ring> {
        let mesh = MeshShape::new(&[("tokens", keys.len())], (0..keys.len()).collect());
        let mesh = Arc::new(mesh.unwrap());
        let layout = |extents: &[usize]| {
            let layout = Layout::new(&mesh, &[1, extents.iter().sum()], &[Shard(1)]).unwrap();
            layout.with_extents(1, extents).unwrap()
        };
        let (queries, keys) = (layout(queries), layout(keys));
        let ring = |position| Ring::new(&keys, &queries, 1, position, causal);
        (0..mesh.size()).map(ring).collect()
    }

    /// Number of pairs of a rank's queries and a part's keys that count.
    fn work(ring: &Ring, rank: usize, part: usize) -> f64 {
        let (queries, keys) = (&ring.queries[rank], &ring.parts[part]);
        let reached = |query: usize| {
            if ring.causal {
                (query + 1).clamp(keys.start, keys.end) - keys.start
            } else {
                keys.len()
            }
        };
        queries.clone().map(reached).sum::<usize>() as f64
    }

    /// Time of all rounds relative to equal work on all ranks, if a pair takes one unit and a
    /// message takes `message`. A rank passes a part on when it begins to compute with it.
    fn simulated(rings: &[Ring], message: f64) -> f64 {
        let mut free = vec![0.0_f64; rings.len()];
        let mut begun = HashMap::new();
        let rounds: Vec<_> = rings.iter().map(Ring::rounds).collect();
        let mut done = vec![0; rings.len()];
        while done
            .iter()
            .zip(&rounds)
            .any(|(done, rounds)| *done < rounds.len())
        {
            let before = done.clone();
            for (rank, ring) in rings.iter().enumerate() {
                let Some(&(part, _)) = rounds[rank].get(done[rank]) else {
                    continue;
                };
                let there = match ring.before(rank, part) {
                    None => 0.0,
                    Some(other) => match begun.get(&(other, part)) {
                        None => continue,
                        Some(begun) => begun + message,
                    },
                };
                let start = free[rank].max(there);
                begun.insert((rank, part), start);
                free[rank] = start + work(ring, rank, part);
                done[rank] += 1;
            }
            assert_ne!(before, done, "ranks wait for each other");
        }
        let pairs = (0..rings.len()).flat_map(|rank| {
            let parts = 0..rings.len();
            parts.map(move |part| work(&rings[rank], rank, part))
        });
        let even = pairs.sum::<f64>() / rings.len() as f64;
        free.into_iter().fold(0.0, f64::max) / even
    }

    /// No rank waits for another; with messages that take a fifth of a round, hardly any does.
    #[test]
    fn causal_rounds_take_the_time_of_equal_work() {
        for ranks in 2..=16 {
            let tokens = 1 << 12;
            let extents = causal_extents(tokens, ranks);
            let rings = rings(&extents, &extents, true);
            let alone = simulated(&rings, 0.0);
            assert!(alone < 1.01, "{ranks} ranks: {alone}");
            let round = (tokens * tokens) as f64 / 2.0 / (ranks * ranks) as f64;
            let late = simulated(&rings, round / 5.0);
            assert!(late < 1.02, "{ranks} ranks: {late} with messages");
        }
    }

    #[test]
    fn rounds_of_all_keys_take_the_time_of_equal_work() {
        for ranks in 2..=16 {
            let extents = vec![32; ranks];
            let rings = rings(&extents, &extents, false);
            assert_eq!(simulated(&rings, 0.0), 1.0, "{ranks} ranks");
        }
    }

    /// A causal part is sent to later ranks only.
    #[test]
    fn causal_parts_do_not_go_where_nothing_reaches_them() {
        let rings = rings(&[3, 2, 0, 2], &[3, 2, 1, 1], true);
        let rounds: Vec<Vec<usize>> = rings
            .iter()
            .map(|ring| ring.rounds_of(ring.own).collect())
            .collect();
        assert_eq!(rounds, [vec![0], vec![1, 0], vec![2], vec![3, 2, 1, 0]]);
        assert_eq!([0, 1, 2, 3].map(|part| rings[0].last(part)), [3, 3, 3, 3]);
        assert_eq!(
            [0, 1, 3].map(|rank| rings[0].after(rank, 0)),
            [Some(1), Some(3), None]
        );
    }

    proptest! {
        /// Every part arrives at all ranks that reach it, and messages between two ranks are sent
        /// in the order in which they are received: parts, and the gradients that follow them, the
        /// last of which go to the owner.
        #[test]
        fn messages_come_in_the_order_in_which_they_are_expected(
            extents in proptest::collection::vec((0..4_usize, 0..4_usize), 1..8), causal in any::<bool>(),
        ) {
            let (queries, mut keys): (Vec<usize>, Vec<usize>) = extents.into_iter().unzip();
            keys[0] += 1;
            let rings = rings(&queries, &keys, causal);
            // (from, to) → messages.
            let [mut sent, mut expected] = [(); 2].map(|()| HashMap::<(usize, usize), Vec<String>>::new());
            for (rank, ring) in rings.iter().enumerate() {
                for part in 0..rings.len() {
                    let comes = ring.rounds().iter().any(|(other, _)| *other == part);
                    prop_assert!(comes || work(ring, rank, part) == 0.0);
                }
                let mut send = |to: Option<usize>, message: String| {
                    let to = to.map(|to| sent.entry((rank, to)).or_default());
                    to.into_iter().for_each(|list| list.push(message.clone()));
                };
                let mut expect = |from: Option<usize>, message: String| {
                    let from = from.map(|from| expected.entry((from, rank)).or_default());
                    from.into_iter().for_each(|list| list.push(message.clone()));
                };
                for (part, next) in ring.rounds() {
                    for (what, way) in [("keys", ring.keys(part, next)), ("gradient", ring.gradients(part, next))] {
                        send(way.to, format!("{what} {part}"));
                        expect(way.from, format!("{what} {}", way.part));
                    }
                }
            }
            prop_assert_eq!(sent, expected);
        }
    }
}
