//! Extents that balance work between shards: pure functions.

use std::fmt;

use crate::{Error, Result};

/// Bisection steps in the search for the smallest possible maximum share.
const HALVINGS: usize = 48;
/// Maximum number of rounds in which the cuts of every dim are recomputed.
const ROUNDS: usize = 8;

/// Extents of shards balanced by the work per cell, for fields in which land or missing cells cost
/// nothing, for example, or cells with ice cost more than others.
///
/// Cuts of a dim run through the whole field, as meshes require, so shares are only as even as such
/// cuts allow.
///
/// # Example
/// ```
/// use halocline_core::{Balance, Launcher, Layout, Shard, ShardTensor};
///
/// // The first half of the rows is land.
/// let [rows, columns] = [8, 6];
/// let work = (0..rows * columns).map(|cell| if cell < 4 * columns { 0.0 } else { 1.0 });
/// let balance = Balance::of(&work.collect::<Vec<_>>(), &[rows, columns], &[2, 1])?;
/// assert_eq!(balance.extents[0], [6, 2]);
/// println!("{balance}"); // the most work of a shard over the mean: 2.00 in even extents, 1.00 in these
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let layout = Layout::new(mesh.shape(), &[1, 8, 6], &[Shard(1)])?;
///     let layout = layout.with_extents(1, &balance.extents[0])?;
///     let x = ShardTensor::<3>::ones([1, 8, 6], &mesh, &layout)?;
///     assert_eq!(x.local_dims()[1], [6, 2][world.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Balance {
    /// The extents of every dim; a dim that is not divided has its size as the only extent.
    pub extents: Vec<Vec<usize>>,
    /// The largest work of any shard divided by the mean, with extents that differ by at most one
    /// cell.
    pub even: f64,
    /// The same ratio with these extents.
    pub balanced: f64,
}

impl Balance {
    /// Divides a field of the given shape into `parts[dim]` parts along each dim. `work` has one
    /// number per cell, in row-major order.
    ///
    /// # Errors
    /// `work` has the wrong length, a negative or non-finite number, or an infinite sum; a dim has
    /// no parts, or more parts than cells.
    pub fn of(work: &[f64], shape: &[usize], parts: &[usize]) -> Result<Self> {
        let refuse = |message: String| Err(Error::operator("Balance", message));
        let cells: usize = shape.iter().product();
        if work.len() != cells || shape.len() != parts.len() || shape.is_empty() {
            return refuse(format!(
                "{} numbers and {} parts for shape {shape:?}",
                work.len(),
                parts.len()
            ));
        }
        if let Some(bad) = work
            .iter()
            .find(|work| !(work.is_finite() && **work >= 0.0))
        {
            return refuse(format!("work of {bad}; expected numbers from 0"));
        }
        if let Some(dim) = (0..shape.len()).find(|&dim| parts[dim] == 0 || parts[dim] > shape[dim])
        {
            return refuse(format!(
                "{} parts of dim {dim} of {shape:?}; expected 1 to {}",
                parts[dim], shape[dim]
            ));
        }
        let total: f64 = work.iter().sum();
        if !total.is_finite() {
            return refuse(format!("work of {total} in all"));
        }
        let field = Field { work, shape };
        let mut extents: Vec<Vec<usize>> = shape
            .iter()
            .zip(parts)
            .map(|(&size, &parts)| even_extents(size, parts))
            .collect();
        let even = field.imbalance(&extents);
        let mut balanced = even;
        for _ in 0..ROUNDS {
            let mut next = extents.clone();
            for dim in (0..shape.len()).filter(|dim| parts[*dim] > 1) {
                next[dim] = cut(&field.loads(&next, dim), parts[dim]);
            }
            let found = field.imbalance(&next);
            if found >= balanced {
                break;
            }
            (extents, balanced) = (next, found);
        }
        Ok(Self {
            extents,
            even,
            balanced,
        })
    }
}

impl fmt::Display for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { even, balanced, .. } = self;
        write!(
            f,
            "the most work of a shard over the mean: {even:.2} in even extents, {balanced:.2} in these"
        )
    }
}

/// The extents of a dim of `size` cells that is divided as evenly as possible.
pub(crate) fn even_extents(size: usize, parts: usize) -> Vec<usize> {
    (0..parts)
        .map(|part| size / parts + usize::from(part < size % parts))
        .collect()
}

struct Field<'a> {
    work: &'a [f64],
    shape: &'a [usize],
}

impl Field<'_> {
    /// The work at each index of a dim, for each block between the cuts of the other dims:
    /// `[block][index]`.
    fn loads(&self, extents: &[Vec<usize>], dim: usize) -> Vec<Vec<f64>> {
        let others = |d: &usize| *d != dim;
        let blocks: usize = (0..self.shape.len())
            .filter(others)
            .map(|d| extents[d].len())
            .product();
        // The part that contains each index of a dim.
        let part_of: Vec<Vec<usize>> = extents
            .iter()
            .map(|extents| {
                let parts = extents.iter().enumerate();
                parts
                    .flat_map(|(part, extent)| std::iter::repeat_n(part, *extent))
                    .collect()
            })
            .collect();
        let mut loads = vec![vec![0.0; self.shape[dim]]; blocks];
        let mut index = vec![0; self.shape.len()];
        for work in self.work {
            let block = (0..self.shape.len()).filter(others).fold(0, |block, d| {
                block * extents[d].len() + part_of[d][index[d]]
            });
            loads[block][index[dim]] += work;
            // The next cell, as an odometer counts.
            for d in (0..self.shape.len()).rev() {
                index[d] += 1;
                if index[d] < self.shape[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        loads
    }

    /// The largest work of any block divided by the mean.
    fn imbalance(&self, extents: &[Vec<usize>]) -> f64 {
        let loads = self.loads(extents, 0);
        let mut most: f64 = 0.0;
        for load in &loads {
            let mut start = 0;
            for extent in &extents[0] {
                most = most.max(load[start..start + extent].iter().sum());
                start += extent;
            }
        }
        let blocks: usize = extents.iter().map(Vec::len).product();
        let mean = self.work.iter().sum::<f64>() / blocks as f64;
        if mean == 0.0 { 1.0 } else { most / mean }
    }
}

/// Cuts a line into non-empty parts so that the largest share of any block is as small as possible.
fn cut(loads: &[Vec<f64>], parts: usize) -> Vec<usize> {
    let size = loads[0].len();
    let total = loads
        .iter()
        .map(|load| load.iter().sum::<f64>())
        .fold(0.0, f64::max);
    // A small minimum per cell spreads cells without work, too.
    let least = (total / size as f64).max(f64::MIN_POSITIVE) * 1e-6;
    let work_at = |load: &Vec<f64>, index: usize| load[index] + least;
    let greedy = |most: f64| -> Option<Vec<usize>> {
        let (mut extents, mut start) = (Vec::new(), 0);
        for part in 0..parts {
            let mut shares = vec![0.0; loads.len()];
            let mut end = start;
            // Leaves one cell for each of the following parts.
            while end < size - (parts - 1 - part) {
                let fits = loads
                    .iter()
                    .zip(&shares)
                    .all(|(load, share)| share + work_at(load, end) <= most);
                if !fits {
                    break;
                }
                for (load, share) in loads.iter().zip(&mut shares) {
                    *share += work_at(load, end);
                }
                end += 1;
            }
            if end == start {
                return None;
            }
            extents.push(end - start);
            start = end;
        }
        (start == size).then_some(extents)
    };
    let (mut low, mut high) = (0.0, (total + least * size as f64) * (1.0 + 1e-9));
    let mut best = greedy(high).expect("one part may have all");
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        match greedy(middle) {
            Some(found) => (best, high) = (found, middle),
            None => low = middle,
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn work_that_is_even_is_cut_evenly() {
        for work in [0.0, 2.5] {
            let balance = Balance::of(&vec![work; 7 * 9], &[7, 9], &[2, 3]).unwrap();
            assert_eq!(balance.extents, [vec![4, 3], vec![3, 3, 3]], "{work}");
            assert_eq!(balance.even, balance.balanced);
        }
    }

    /// A continent around a pole and a second one, as in a land mask.
    #[test]
    fn land_costs_nothing() {
        let [rows, columns] = [40, 60];
        let is_land = |cell: usize| {
            let (row, column) = (cell / columns, cell % columns);
            row < 16 || (row < 25 && column < 30)
        };
        let work: Vec<f64> = (0..rows * columns)
            .map(|cell| f64::from(u8::from(!is_land(cell))))
            .collect();
        let balance = Balance::of(&work, &[rows, columns], &[4, 3]).unwrap();
        assert!(balance.even > 2.0 && balance.balanced < 1.3, "{balance}");
        assert!(
            balance.to_string().contains("2.05 in even extents"),
            "{balance}"
        );
    }

    #[test]
    fn mistakes_are_errors() {
        let message = |work: &[f64], shape: &[usize], parts: &[usize]| {
            Balance::of(work, shape, parts).unwrap_err().to_string()
        };
        assert!(message(&[1.0; 5], &[2, 3], &[1, 1]).contains("5 numbers"));
        assert!(message(&[1.0, f64::NAN], &[2], &[1]).contains("NaN"));
        assert!(message(&[1.0, -1.0], &[2], &[1]).contains("-1"));
        assert!(message(&[1.0; 6], &[2, 3], &[3, 1]).contains("expected 1 to 2"));
        assert!(message(&[1.0; 6], &[2, 3], &[0, 1]).contains("0 parts"));
        assert!(message(&[1.0], &[], &[]).contains("1 numbers"));
        assert!(message(&[f64::MAX; 2], &[2], &[1]).contains("inf in all"));
    }

    proptest! {
        /// Along one dim no cut is better, and every part has a cell.
        #[test]
        fn lines_are_cut_as_evenly_as_possible(
            work in prop::collection::vec(0_u8..9, 1..9), parts in 1_usize..5,
        ) {
            let parts = parts.min(work.len());
            let work: Vec<f64> = work.into_iter().map(f64::from).collect();
            let balance = Balance::of(&work, &[work.len()], &[parts]).unwrap();
            let most = |extents: &[usize]| {
                let mut rest = &work[..];
                extents.iter().map(|extent| {
                    let (part, after) = rest.split_at(*extent);
                    rest = after;
                    part.iter().sum::<f64>()
                }).fold(0.0, f64::max)
            };
            prop_assert!(balance.extents[0].iter().all(|extent| *extent > 0));
            prop_assert_eq!(balance.extents[0].iter().sum::<usize>(), work.len());
            prop_assert!(balance.balanced <= balance.even);
            let mut best = f64::INFINITY;
            every_cut(work.len(), parts, &mut Vec::new(), &mut |extents| best = best.min(most(extents)));
            prop_assert!(most(&balance.extents[0]) <= best * (1.0 + 1e-4) + 1e-4);
        }
    }

    fn every_cut(
        size: usize,
        parts: usize,
        cut: &mut Vec<usize>,
        found: &mut impl FnMut(&[usize]),
    ) {
        if parts == 1 {
            cut.push(size);
            found(cut);
            cut.pop();
            return;
        }
        for extent in 1..=size + 1 - parts {
            cut.push(extent);
            every_cut(size - extent, parts - 1, cut, found);
            cut.pop();
        }
    }
}
