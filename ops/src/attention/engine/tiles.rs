//! Tiles of a field whose targets reach sources in the same way: the work in the lanes of a vector.
//!
//! Targets are queries and sources are keys, or the other way round in the pass that computes
//! gradients of keys and values. In every dim, targets and sources fall into residue classes of the
//! dilation. A tile is a run of targets of a class; its pattern lists the sources that each
//! reaches, counted from the first that the tile reaches. Tiles with the same patterns in all dims
//! make up a [`Class`]: each lane of a vector computes one tile of it, so that no lane is masked
//! and no product is wasted for any kernel, dilation, stride and edges, except in the lanes of the
//! last tiles.
//!
//! If the windows of neighbors along the last dim are each other's, shifted by one source, as they
//! are except for edges and strides, lanes hold neighbors of one tile instead: their sources are
//! one row, of which each target's vector is read from another position on. That takes a fraction
//! of the memory, and of the time to pack it; lanes past the end of a row are wasted. A task has
//! several heads of such tiles, and holds rows of sources only while targets need them.

use std::ops::Range;

use super::blocks::TARGETS;
use super::class::Class;
use crate::driver::Neighborhood;

/// Maximum targets of a tile along the dim whose rows of sources are packed on demand, or the
/// kernel if that is longer: a longer tile would save hardly any packing.
const LONGEST: usize = 64;
/// Maximum sources listed for the groups of a class.
const LISTED: usize = 1 << 16;
/// Groups of a tile along that dim, if other dims have several, too.
const GROUPS: usize = 16;

/// Queries and keys of a rank in one dim.
#[derive(Clone, Debug)]
pub(crate) struct Dim {
    pub neighborhood: Neighborhood,
    /// Number of cells of the field.
    pub size: usize,
    /// Queries of this rank.
    pub queries: Range<usize>,
    /// Cell of the first key that is present.
    pub first_key: isize,
    /// Number of keys that are present.
    pub keys: usize,
}

/// Targets of a residue class: each with its cell and the sources that it reaches, counted in their
/// class.
struct Run {
    targets: Vec<(usize, Range<isize>)>,
    /// Cell of source zero, which may lie before the first cell.
    origin: isize,
}

impl Dim {
    /// A dim of one cell, to complete three dims.
    pub(crate) fn single() -> Self {
        Self {
            neighborhood: Neighborhood::new(1),
            size: 1,
            queries: 0..1,
            first_key: 0,
            keys: 1,
        }
    }

    /// Queries in a range of this rank's, and the keys that they reach.
    fn queries(&self, part: &Range<usize>) -> Vec<Run> {
        let (dilation, start) = (self.neighborhood.dilation, self.queries.start);
        let part = start + part.start..start + part.end;
        let run = |first: usize| {
            let cells = self.neighborhood.class_size(first, self.size);
            let queries = (first..part.end).step_by(dilation);
            let target = |query| {
                (
                    query - start,
                    self.neighborhood.keys(query / dilation, cells),
                )
            };
            Run {
                targets: queries.map(target).collect(),
                origin: (first % dilation) as isize - self.first_key,
            }
        };
        part.clone().take(dilation).map(run).collect()
    }

    /// Keys in a range of those that are present, and the queries that reach them.
    fn keys(&self, part: &Range<usize>) -> Vec<Run> {
        let dilation = self.neighborhood.dilation as isize;
        let all = self.queries(&(0..self.queries.len()));
        let reversed = all.into_iter().map(|Run { targets, origin }| {
            let reached = targets[0].1.start..targets[targets.len() - 1].1.end;
            let keys = reached.map(|key| {
                // Windows never move back, so the queries of a key are adjacent in their class.
                let first = targets.partition_point(|(_, keys)| keys.end <= key);
                let end = targets.partition_point(|(_, keys)| keys.start <= key);
                let cell = (origin + key * dilation) as usize;
                (cell, first as isize..end.max(first) as isize)
            });
            Run {
                targets: keys.filter(|(cell, _)| part.contains(cell)).collect(),
                origin: targets[0].0 as isize,
            }
        });
        reversed.filter(|run| !run.targets.is_empty()).collect()
    }
}

#[cfg(feature = "cube")]
impl Dim {
    /// For every query (or key), the first key (or query) that it reaches, and their number; they
    /// are one dilation apart.
    pub(crate) fn windows(&self, side: Side) -> Vec<[usize; 2]> {
        let (count, runs) = match side {
            Side::Queries => (self.queries.len(), self.queries(&(0..self.queries.len()))),
            Side::Keys => (self.keys, self.keys(&(0..self.keys))),
        };
        let dilation = self.neighborhood.dilation as isize;
        let mut windows = vec![[0, 0]; count];
        for run in &runs {
            for (cell, sources) in &run.targets {
                let first = run.origin + sources.start * dilation;
                windows[*cell] = [first.max(0) as usize, sources.len()];
            }
        }
        windows
    }
}

impl Run {
    /// Splits off the targets whose windows are those of their neighbors shifted by one source, if
    /// there are at least `least` of them.
    fn split(mut self, least: usize) -> (Option<Self>, Vec<Self>) {
        let shifted = |pair: &[(usize, Range<isize>)]| {
            let (one, next) = (&pair[0].1, &pair[1].1);
            next.start == one.start + 1 && next.end == one.end + 1
        };
        let mut longest = 0..0;
        let mut start = 0;
        for end in 1..=self.targets.len() {
            if end < self.targets.len() && shifted(&self.targets[end - 1..=end]) {
                continue;
            }
            if end - start > longest.len() {
                longest = start..end;
            }
            start = end;
        }
        if longest.len() < least {
            return (None, vec![self]);
        }
        let origin = self.origin;
        let after = self.targets.split_off(longest.end);
        let row = self.targets.split_off(longest.start);
        let others = [self.targets, after].map(|targets| Self { targets, origin });
        let others = others.into_iter().filter(|run| !run.targets.is_empty());
        let row = Self {
            targets: row,
            origin,
        };
        (Some(row), others.collect())
    }
}

/// The side whose cells are targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Queries, which reach keys.
    Queries,
    /// Keys, which reach queries.
    Keys,
}

/// Tiles of one dim.
#[derive(Debug)]
struct Axis {
    /// Distance between targets, and between sources.
    step: usize,
    /// Sources that the first target of each vector of a tile reaches, counted from the first that
    /// the tile reaches.
    patterns: Vec<Vec<Range<usize>>>,
    /// By pattern: for each tile the cells of its first target and first source, and its number of
    /// targets.
    tiles: Vec<Vec<[usize; 3]>>,
}

impl Axis {
    /// Creates tiles of at most `length` vectors.
    fn new(runs: &[Run], step: usize, length: usize, unit: usize) -> Self {
        let mut axis = Self {
            step,
            patterns: Vec::new(),
            tiles: Vec::new(),
        };
        for Run { targets, origin } in runs {
            let vectors = targets.len().div_ceil(unit);
            let each = vectors.div_ceil(vectors.div_ceil(length));
            for tile in targets.chunks(each * unit) {
                let (cell, first) = (tile[0].0, tile[0].1.start);
                let seen = |range: &Range<isize>| {
                    (range.start - first) as usize..(range.end - first) as usize
                };
                let vectors = tile.iter().step_by(unit);
                let pattern: Vec<_> = vectors.map(|(_, sources)| seen(sources)).collect();
                let known = axis.patterns.iter().position(|known| *known == pattern);
                let known = known.unwrap_or_else(|| {
                    axis.patterns.push(pattern);
                    axis.tiles.push(Vec::new());
                    axis.patterns.len() - 1
                });
                let source = origin + first * step as isize;
                axis.tiles[known].push([cell, source as usize, tile.len()]);
            }
        }
        axis
    }
}

/// Memory and tasks that tiles should fit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// Number of lanes of a vector.
    pub lanes: usize,
    /// Number of sources for which there is room at a time, over all heads or lanes of a task.
    pub sources: usize,
    /// Maximum heads of a task whose lanes hold neighbors.
    pub heads: usize,
    /// Number of heads of all samples.
    pub all_heads: usize,
    /// Number of tasks to aim for, where tiles can be shortened.
    pub tasks: usize,
    /// Whether the results of all targets of a tile are kept until the last is computed.
    pub kept: bool,
}

/// Tiles of a box of targets.
#[derive(Debug)]
pub(crate) struct Tiles {
    axes: [Axis; 3],
    pub(super) classes: Vec<Class>,
    /// Number of heads of a task whose lanes hold neighbors.
    pub(super) heads: usize,
}

/// Position of a tile: sample, head, cells of the first target and of the first source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub batch: usize,
    pub head: usize,
    pub target: [usize; 3],
    pub source: [usize; 3],
    /// Number of targets in the last dim.
    pub columns: usize,
}

impl Tiles {
    /// Tiles of the targets in a box: those whose lanes hold neighbors, and those with another tile
    /// in every lane.
    pub(crate) fn of_box(
        dims: &[Dim; 3],
        side: Side,
        part: &[Range<usize>; 3],
        budget: Budget,
    ) -> [Self; 2] {
        let [planes, rows, columns] = [0, 1, 2].map(|dim| match side {
            Side::Queries => dims[dim].queries(&part[dim]),
            Side::Keys => dims[dim].keys(&part[dim]),
        });
        let (mut shifted, mut others) = (Vec::new(), Vec::new());
        // In one dim, groups of targets would share fewer sources than with one tile per lane.
        let one_dim = dims[0].size == 1 && dims[1].size == 1;
        let least = if one_dim || budget.lanes == 1 {
            usize::MAX
        } else {
            budget.lanes
        };
        for run in columns {
            let (row, rest) = run.split(least);
            shifted.extend(row);
            others.extend(rest);
        }
        let tiles = |columns: &[Run], unit: usize| {
            let runs = [&planes[..], &rows[..], columns];
            Self::new(dims, runs, unit, budget)
        };
        [tiles(&shifted, budget.lanes), tiles(&others, 1)]
    }

    fn new(dims: &[Dim; 3], runs: [&[Run]; 3], unit: usize, budget: Budget) -> Self {
        let units = [1, 1, unit];
        let kernels = [0, 1, 2].map(|dim| dims[dim].neighborhood.kernel);
        let longest = |dim: usize| {
            let lengths = runs[dim].iter().map(|run| run.targets.len());
            let all = lengths.max().unwrap_or(0).div_ceil(units[dim]);
            // The elements of a long row of sources are spread over as many pages.
            match units[dim] {
                1 => all,
                unit => all.min((2 * kernels[dim]).div_ceil(unit).max(4)),
            }
        };
        // Neighbors along this dim share most of their sources, and sums run through sources in
        // order.
        let along = (0..3).find(|&dim| dims[dim].size > 1).unwrap_or(2);
        let mut sizes = Sizes {
            longest: [0, 1, 2].map(longest),
            units,
            kernels,
            most: [usize::MAX; 3],
        };
        // At least the windows of several targets, even if those exceed the cache: they share most
        // of their sources.
        let least = 3 * kernels.iter().product::<usize>();
        let others = || (0..3).filter(|&dim| dim != along);
        let together = TARGETS + kernels[along] - 1;
        let window = together * others().map(|dim| kernels[dim]).product::<usize>();
        let groups = (LISTED / window).max(1);
        for dim in others() {
            sizes.longest[dim] = sizes.longest[dim].min((groups / GROUPS).max(1));
        }
        let rolling = unit > 1 && !budget.kept;
        if rolling {
            // Rows of sources are held only while targets reach them, so tiles may be long.
            sizes.most[along] = together;
            sizes.longest[along] = sizes.longest[along].min(LONGEST.max(kernels[along]));
        }
        let (heads, mut lengths) = match unit {
            1 => (1, sizes.extents(least.max(budget.sources / budget.lanes))),
            _ => {
                let heads = std::iter::successors(Some(budget.heads), |heads| Some(heads / 2));
                let heads = heads.take_while(|heads| *heads > 0);
                let heads = heads.filter(|heads| *heads == 1 || heads * least <= budget.sources);
                let all =
                    heads.map(|heads| (heads, sizes.extents(least.max(budget.sources / heads))));
                // Sources packed per target; the more heads are adjacent, the faster they are read.
                let cost =
                    |(heads, lengths): &(usize, [usize; 3])| sizes.packed(*lengths) / *heads as f64;
                all.min_by(|one, other| cost(one).total_cmp(&cost(other)))
                    .expect("one head")
            }
        };
        let vectors: usize = others().map(|dim| lengths[dim]).product();
        lengths[along] = lengths[along].min(TARGETS * (groups / vectors).max(1));
        if rolling {
            let tiles = |dim: usize| -> usize {
                let targets = runs[dim].iter().map(|run| run.targets.len());
                targets
                    .map(|targets| targets.div_ceil(units[dim] * lengths[dim]))
                    .sum()
            };
            let tiles = others().map(tiles).product::<usize>() * runs[along].len();
            let tasks = (tiles * budget.all_heads / heads).max(1);
            let part = longest(along).div_ceil(budget.tasks.div_ceil(tasks));
            lengths[along] = lengths[along].min(part.max(kernels[along]));
        }
        let axis = |dim: usize| {
            let step = dims[dim].neighborhood.dilation;
            Axis::new(runs[dim], step, lengths[dim], units[dim])
        };
        let axes = [axis(0), axis(1), axis(2)];
        let mut classes = Vec::new();
        for first in 0..axes[0].patterns.len() {
            for second in 0..axes[1].patterns.len() {
                for third in 0..axes[2].patterns.len() {
                    let pattern = [first, second, third];
                    let ranges = [0, 1, 2].map(|dim| &axes[dim].patterns[pattern[dim]][..]);
                    classes.push(Class::new(pattern, ranges, unit, along));
                }
            }
        }
        Self {
            axes,
            classes,
            heads,
        }
    }

    /// Distance between targets, or sources, in cells.
    pub(super) fn steps(&self) -> [usize; 3] {
        self.axes.each_ref().map(|axis| axis.step)
    }

    fn lists(&self, class: &Class) -> [&[[usize; 3]]; 3] {
        [0, 1, 2].map(|dim| &self.axes[dim].tiles[class.pattern[dim]][..])
    }

    /// Number of tiles of a class, for one sample and head.
    pub(super) fn count(&self, class: &Class) -> usize {
        self.lists(class).iter().map(|list| list.len()).product()
    }

    /// Position of a tile of a class. Heads vary fastest, because their elements are adjacent, then
    /// tiles, then samples.
    pub(super) fn place(&self, class: &Class, index: usize, heads: usize) -> Place {
        let lists = self.lists(class);
        let (head, mut index) = (index % heads, index / heads);
        let (mut target, mut source, mut counts) = ([0; 3], [0; 3], [0; 3]);
        for dim in [2, 1, 0] {
            [target[dim], source[dim], counts[dim]] = lists[dim][index % lists[dim].len()];
            index /= lists[dim].len();
        }
        Place {
            batch: index,
            head,
            target,
            source,
            columns: counts[2],
        }
    }
}

/// Limits of the sizes of tiles, in every dim.
struct Sizes {
    longest: [usize; 3],
    /// Number of targets of a vector.
    units: [usize; 3],
    kernels: [usize; 3],
    /// Maximum sources held at a time, apart from edges and strides.
    most: [usize; 3],
}

impl Sizes {
    fn targets(&self, tile: [usize; 3], dim: usize) -> usize {
        tile[dim] * self.units[dim]
    }

    /// Number of sources of a tile in a dim.
    fn sources(&self, tile: [usize; 3], dim: usize) -> usize {
        let all = self.targets(tile, dim) + self.kernels[dim] - 1;
        all.next_multiple_of(self.units[dim])
    }

    /// Number of sources packed per target.
    fn packed(&self, tile: [usize; 3]) -> f64 {
        let each = |dim| self.sources(tile, dim) as f64 / self.targets(tile, dim) as f64;
        (0..3).map(each).product()
    }

    /// Number of vectors of targets of a tile in every dim, such that at most `room` of their
    /// sources are held at a time: more targets help most in a dim with a long kernel, where
    /// windows overlap most.
    fn extents(&self, room: usize) -> [usize; 3] {
        let mut tile = [1; 3];
        let sources = |tile: [usize; 3]| -> usize {
            (0..3)
                .map(|dim| self.sources(tile, dim).min(self.most[dim]))
                .product()
        };
        // Grows by a half or a quarter where there is no room for doubling.
        for part in [1, 2, 4] {
            loop {
                let gain = |dim: &usize| {
                    let targets = self.targets(tile, *dim);
                    (targets + self.kernels[*dim]) as f64 / targets as f64
                };
                let larger = |dim: usize| {
                    let mut larger = tile;
                    larger[dim] = (tile[dim] + tile[dim].div_ceil(part)).min(self.longest[dim]);
                    larger
                };
                let fits =
                    |dim: &usize| tile[*dim] < self.longest[*dim] && sources(larger(*dim)) <= room;
                let best = (0..3)
                    .filter(fits)
                    .max_by(|one, other| gain(one).total_cmp(&gain(other)));
                match best {
                    Some(dim) => tile = larger(dim),
                    None => break,
                }
            }
        }
        tile
    }
}
