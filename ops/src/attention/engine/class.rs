//! Groups of targets of the tiles of one pattern, and the sources that each group reaches.

use std::ops::Range;

use super::blocks::TARGETS;

/// Tiles of one pattern in every dim, and the work in each.
#[derive(Debug)]
pub(super) struct Class {
    pub pattern: [usize; 3],
    /// Targets of a tile, in every dim; vectors of targets if lanes hold neighbors.
    pub targets: [usize; 3],
    /// Sources that a tile reaches, in every dim.
    pub sources: [usize; 3],
    /// Number of neighbors in the lanes of a vector; one if every lane holds another tile.
    pub neighbors: usize,
    pub groups: Vec<Group>,
    /// Sources of segments: the slot of their row, and their position in it.
    pub reached: Vec<[usize; 2]>,
    /// Number of rows of sources, over all planes of a tile, that must be held at a time if each
    /// vector is packed when the first group needs it. Each row takes the slot of the row that is
    /// this number before it.
    pub held: usize,
}

/// Targets that are computed together.
#[derive(Debug)]
pub(super) struct Group {
    /// Their numbers in the tile.
    pub targets: Vec<usize>,
    /// The number of sources that each reaches.
    pub counts: Vec<usize>,
    pub segments: Vec<Segment>,
    /// Numbers of the tile's vectors of sources that this group is the first to reach.
    pub fresh: Vec<usize>,
}

/// Sources that the same targets of a group reach.
#[derive(Debug)]
pub(super) struct Segment {
    /// The targets, by their positions in the group.
    pub members: Range<usize>,
    /// For each target of the group, the number of its sources in earlier segments.
    pub before: Vec<usize>,
    /// The sources, as a range of [`Class::reached`].
    pub reached: Range<usize>,
}

impl Class {
    /// Creates the class of tiles whose targets reach these ranges in the three dims, with groups
    /// of neighbors along one dim: the first that has several cells, so that a target's sources
    /// come in the order of their cells, whatever its tile.
    pub(super) fn new(
        pattern: [usize; 3],
        ranges: [&[Range<usize>]; 3],
        neighbors: usize,
        along: usize,
    ) -> Self {
        let targets = ranges.map(<[_]>::len);
        let mut sources =
            ranges.map(|ranges| ranges.iter().map(|range| range.end).max().unwrap_or(0));
        sources[2] += neighbors - 1;
        let mut class = Self {
            pattern,
            targets,
            sources,
            neighbors,
            groups: Vec::new(),
            reached: Vec::new(),
            held: 0,
        };
        let mut counts = targets;
        counts[along] = targets[along].div_ceil(TARGETS);
        for first in 0..counts[0] {
            for second in 0..counts[1] {
                for third in 0..counts[2] {
                    let mut place = [first, second, third];
                    place[along] *= TARGETS;
                    class.add_group(place, along, ranges);
                }
            }
        }
        class.take_rows_in_turn();
        class
    }

    /// Finds the sources that each group is the first to need, and the rows that are no longer
    /// needed, whose slots others may take.
    fn take_rows_in_turn(&mut self) {
        let [planes, rows, columns] = self.vectors();
        let mut packed = vec![false; planes * rows * columns];
        let mut needed = Vec::new();
        for group in &mut self.groups {
            let reached = group.segments.iter().map(|segment| segment.reached.clone());
            let reached = || reached.clone().flat_map(|range| &self.reached[range]);
            let lines = reached().map(|[line, _]| *line);
            needed.push(lines.clone().min().unwrap_or(0)..lines.max().map_or(0, |last| last + 1));
            for [line, column] in reached() {
                let last = column + self.neighbors - 1;
                for vector in column / self.neighbors..=last / self.neighbors {
                    let number = line * columns + vector;
                    if !std::mem::replace(&mut packed[number], true) {
                        group.fresh.push(number);
                    }
                }
            }
            group.fresh.sort_unstable();
        }
        self.held = held(&needed);
        for [line, _] in &mut self.reached {
            *line %= self.held;
        }
    }

    /// Number of vectors that the sources take, in every dim.
    pub(super) fn vectors(&self) -> [usize; 3] {
        let [planes, rows, columns] = self.sources;
        [planes, rows, columns.div_ceil(self.neighbors)]
    }

    /// Adds the group of targets that begins at a position along a dim.
    fn add_group(&mut self, place: [usize; 3], along: usize, ranges: [&[Range<usize>]; 3]) {
        let members = place[along]..(place[along] + TARGETS).min(self.targets[along]);
        let windows = &ranges[along][members.clone()];
        let [_, rows, columns] = self.targets;
        let mut group = Group {
            targets: members
                .map(|member| {
                    let mut target = place;
                    target[along] = member;
                    (target[0] * rows + target[1]) * columns + target[2]
                })
                .collect(),
            counts: vec![0; windows.len()],
            segments: Vec::new(),
            fresh: Vec::new(),
        };
        // Between two consecutive ends of windows, the same targets reach all sources.
        let mut ends: Vec<usize> = windows
            .iter()
            .flat_map(|range| [range.start, range.end])
            .collect();
        ends.sort_unstable();
        ends.dedup();
        for pair in ends.windows(2) {
            let reaches = |range: &&Range<usize>| range.start <= pair[0] && pair[1] <= range.end;
            let Some(first) = windows.iter().position(|range| reaches(&range)) else {
                continue;
            };
            let count = windows[first..].iter().take_while(reaches).count();
            let mut boxes = [0, 1, 2].map(|dim| ranges[dim][place[dim]].clone());
            boxes[along] = pair[0]..pair[1];
            let start = self.reached.len();
            let [planes, rows, columns] = boxes;
            for plane in planes {
                for row in rows.clone() {
                    let line = plane * self.sources[1] + row;
                    self.reached
                        .extend(columns.clone().map(|column| [line, column]));
                }
            }
            let reached = start..self.reached.len();
            if reached.is_empty() {
                continue;
            }
            let counts = group.counts.clone();
            group.counts[first..first + count]
                .iter_mut()
                .for_each(|sources| *sources += reached.len());
            group.segments.push(Segment {
                members: first..first + count,
                before: counts,
                reached,
            });
        }
        self.groups.push(group);
    }
}

/// Maximum number of rows from the first that a group or a later one needs to the last that it or
/// an earlier one needs.
fn held(groups: &[Range<usize>]) -> usize {
    let needed = groups.iter().filter(|rows| !rows.is_empty());
    let mut end = 0;
    let up_to_now = needed.map(|rows| {
        end = rows.end.max(end);
        rows.start..end
    });
    let up_to_now: Vec<_> = up_to_now.collect();
    let mut start = usize::MAX;
    let held = up_to_now.iter().rev().map(|rows| {
        start = rows.start.min(start);
        rows.end - start
    });
    held.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::held;

    #[test]
    fn rows_are_held_until_no_group_needs_them() {
        assert_eq!(held(&[]), 0);
        assert_eq!(held(&[0..3, 1..4, 2..5]), 3);
        assert_eq!(held(&[0..3, 3..7, 0..0, 5..8]), 4);
        assert_eq!(held(&[0..3, 4..6, 1..5]), 5);
    }
}
