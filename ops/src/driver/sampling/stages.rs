//! The two stages of a map on the shards of a dim. Pure planning.

use std::ops::Range;

use super::{DimMap, Map, Taps};
use crate::driver::place::part_ranges;

/// Stages of a map on the shards of a dim.
pub(super) struct Stages {
    /// For each part of the dim, the map from its own cells to its cells of the middle stage; empty
    /// if these are the same.
    pub local: Vec<Map>,
    /// Extents of the middle stage.
    pub middle: Vec<usize>,
    /// Map from the cells of the middle stage, counted from `before` cells before its first, to
    /// outputs.
    rest: Map,
    before: usize,
    /// Extents of the outputs.
    pub outputs: Vec<usize>,
}

impl Stages {
    /// Splits a map on a dim of these extents into stages. A map to at least as many cells is left
    /// to the second stage, if there is one (`moves`).
    pub(super) fn new(map: &DimMap, extents: &[usize], moves: bool) -> Self {
        let size: usize = extents.iter().sum();
        let (map, before) = match extents {
            [_] => (map.wrapped(size), 0),
            _ => (map.map.clone(), map.before),
        };
        let parts: Vec<Range<usize>> = part_ranges(extents).collect();
        // Number of outputs of each part: an output belongs to the part of its middle cell or, if
        // that lies beyond an end, of the cell at this end.
        let middle = |taps: &Taps| taps[(taps.len() - 1) / 2].0;
        let owned = |part: &Range<usize>| {
            let middles = map.iter().map(middle);
            let middles = middles.map(|cell| cell.saturating_sub(before).min(size - 1));
            middles.filter(|cell| part.contains(cell)).count()
        };
        let outputs: Vec<usize> = parts.iter().map(owned).collect();
        if moves && map.len() >= size {
            return Self {
                local: Vec::new(),
                middle: extents.to_vec(),
                rest: map,
                before,
                outputs,
            };
        }
        // Around a periodic dim, an output may meet a part in several turns. Cells of the middle
        // stage are ordered by part, within a part by turn, the last turn first, and then by
        // output: so the cells of an output are as near to each other across an end as elsewhere.
        let moved = before.next_multiple_of(size) - before;
        let last = map.iter().flatten().map(|(cell, _)| (cell + moved) / size);
        let last = last.max().unwrap_or(0);
        let mut met: Vec<Vec<(usize, usize)>> = vec![Vec::new(); map.len()];
        let mut next = 0;
        let local = parts.iter().map(|part| {
            let mut own = Map::new();
            for turn in (0..=last).rev() {
                let part = turn * size + part.start..turn * size + part.end;
                for (taps, met) in map.iter().zip(&mut met) {
                    let held = taps.iter().map(|(cell, weight)| (cell + moved, *weight));
                    let held = held.filter(|(cell, _)| part.contains(cell));
                    let held: Taps = held
                        .map(|(cell, weight)| (cell - part.start, weight))
                        .collect();
                    if !held.is_empty() {
                        met.push((turn, next));
                        next += 1;
                        own.push(held);
                    }
                }
            }
            own
        });
        let local: Vec<Map> = local.collect();
        let place = |(turn, cell): &(usize, usize)| (turn * next + cell, 1.0);
        let rest = met.iter().map(|met| met.iter().map(place).collect());
        Self {
            middle: local.iter().map(Vec::len).collect(),
            rest: rest.collect(),
            before: before.div_ceil(size) * next,
            local,
            outputs,
        }
    }

    /// Range from the first to the last cell of the middle stage that a range of outputs needs;
    /// cells beyond its ends are those at its other end.
    pub(super) fn reach(&self, outputs: &Range<usize>) -> Range<isize> {
        let Range { start, end } = self.span(outputs);
        let place = |cell: usize| cell as isize - self.before as isize;
        place(start)..place(end)
    }

    /// The [`reach`](Self::reach), counted as in the map of the second stage.
    fn span(&self, outputs: &Range<usize>) -> Range<usize> {
        let cells = self.rest[outputs.clone()]
            .iter()
            .flatten()
            .map(|(cell, _)| *cell);
        match (cells.clone().min(), cells.max()) {
            (Some(first), Some(last)) => first..last + 1,
            _ => 0..0,
        }
    }

    /// Map to a range of outputs from the cells of their [`reach`](Self::reach).
    pub(super) fn rest_of(&self, outputs: &Range<usize>) -> Map {
        let start = self.span(outputs).start;
        let taps = self.rest[outputs.clone()].iter();
        let moved = |(cell, weight): &(usize, f64)| (cell - start, *weight);
        taps.map(|taps| taps.iter().map(moved).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Windows of random cells that never move back.
    fn map(size: usize) -> impl Strategy<Value = Map> {
        let window = (0..size, 1..5_usize);
        prop::collection::vec(window, 1..9).prop_map(move |mut windows| {
            windows.sort_unstable();
            let taps = windows.into_iter().map(|(first, count)| {
                let cells = first..(first + count).min(size);
                cells.map(|cell| (cell, 1.0 + cell as f64)).collect()
            });
            taps.collect()
        })
    }

    fn apply(map: &Map, x: &[f64]) -> Vec<f64> {
        let sum = |taps: &Taps| taps.iter().map(|(cell, weight)| x[*cell] * weight).sum();
        map.iter().map(sum).collect()
    }

    /// Extents of a dim, and a map of cells that may lie beyond its ends.
    fn case() -> impl Strategy<Value = (Vec<usize>, DimMap)> {
        let extents = prop::collection::vec(0..5_usize, 1..5)
            .prop_filter("cells", |extents| extents.iter().sum::<usize>() > 0);
        let beyond = || prop_oneof![Just(0_usize), 1..9_usize];
        let cells = (extents, beyond(), beyond());
        cells.prop_flat_map(|(extents, before, after)| {
            let size: usize = extents.iter().sum();
            let map = map(before + size + after);
            let map = map.prop_map(move |map| DimMap {
                dim: 0,
                map,
                before,
            });
            (Just(extents), map)
        })
    }

    proptest! {
        #[test]
        fn two_stages_give_what_one_gives((extents, map) in case()) {
            let size: usize = extents.iter().sum();
            let x: Vec<f64> = (0..size).map(|cell| (cell * cell) as f64).collect();
            let stages = Stages::new(&map, &extents, extents.len() > 1);
            let map = map.wrapped(size);
            prop_assert_eq!(stages.outputs.iter().sum::<usize>(), map.len());
            let mut middle = Vec::new();
            for (part, cells) in part_ranges(&extents).enumerate() {
                let own = &x[cells];
                let own = stages.local.get(part).map_or(own.to_vec(), |map| apply(map, own));
                prop_assert_eq!(own.len(), stages.middle[part]);
                middle.extend(own);
            }
            let mut found = Vec::new();
            for outputs in part_ranges(&stages.outputs) {
                let cell = |cell: isize| cell.rem_euclid(middle.len() as isize) as usize;
                let cells = stages.reach(&outputs).map(|place| middle[cell(place)]);
                let cells: Vec<f64> = cells.collect();
                found.extend(apply(&stages.rest_of(&outputs), &cells));
            }
            prop_assert_eq!(found, apply(&map, &x));
        }
    }
}
