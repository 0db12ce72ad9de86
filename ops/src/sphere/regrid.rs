//! Bilinear regridding between grids of latitudes and longitudes.
//!
//! Along each dim, a value is the linear interpolation of the two nearest cells in degrees.
//! Longitude is periodic. Beyond the first and the last row, values are interpolated to the pole,
//! whose value is the mean of that row. Semantics follow torch-harmonics' `ResampleS2` with
//! `mode="bilinear"`; of fields whose values are angles, regrid the sine and the cosine.
//!
//! # Placement
//! All dims may be sharded; values must be resolved. If the target runs in the order of the source,
//! a value belongs to the rank that holds the nearest row and column before it. Otherwise each rank
//! gets as many values, in the order of the target.
//!
//! # Communication
//! A dim that becomes finer, or keeps its size, needs a halo of the cells of a rank's values; a dim
//! that becomes coarser sends the partial sums of values that ranks share. The means of polar rows
//! are summed over the ranks that hold them.
//!
//! # Adjoint
//! Sums over the values that a cell contributes to, with their weights.

use std::fmt;
use std::iter::once;
use std::sync::Arc;

use halocline_core::{Error, Result, ShardTensor};

use super::grid::SphereGrid;
use crate::driver::sampling::{DimMap, Map, Taps, TapsAround, Weighted, sampled};
use crate::loss::counted;
use crate::precision::in_f32;
use crate::rearrange::{narrow, profile};
use crate::reduce::mean_dims;

const NAME: &str = "regrid";
/// Distance in degrees below which two coordinates are the same.
const SAME: f64 = 1e-9;
/// Ratio to the widest other gap from which a gap in longitude, or between the last row and the
/// pole, lies outside the grid.
const WIDE: f64 = 2.0;

/// Weights of a bilinear regridding, as torch-harmonics' `ResampleS2` has them: along each dim, a
/// value is the linear interpolation of the two nearest cells in degrees. Longitude is periodic;
/// beyond the first and the last row, values are interpolated to the pole, whose value is the mean
/// of that row. Clones share the data.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Regrid, SphereField, SphereGrid};
///
/// // From a Gaussian grid to a region.
/// let latitudes = SphereGrid::LegendreGauss.latitudes(8)?;
/// let longitudes: Vec<f64> = (0..16).map(|k| 22.5 * f64::from(k)).collect();
/// let region = [&[60.0, 50.0, 40.0][..], &[-10.0, 0.0, 10.0, 20.0]];
/// let weights = Regrid::new([&latitudes, &longitudes], region)?;
/// let y = Tensor::<3>::ones([2, 8, 16], &Default::default()).regrid(&weights);
/// assert_eq!(y.dims(), [2, 3, 4]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Regrid(Arc<Weights>);

struct Weights {
    /// `[latitudes, longitudes]` of source and target.
    sizes: [[usize; 2]; 2],
    rows: Map,
    columns: Vec<TapsAround>,
    /// Share of the mean of the first and of the last row in each row of the target.
    poles: [Vec<f64>; 2],
    /// The coordinates, by which plans are found.
    key: Vec<u64>,
}

impl fmt::Debug for Regrid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [source, target] = self.sizes();
        write!(f, "Regrid({source:?} to {target:?})")
    }
}

impl Regrid {
    /// Weights from coordinates in degrees. `source` and `target` list latitudes, then longitudes.
    ///
    /// Latitudes of the source run from north to south or from south to north, and its longitudes
    /// increase by less than 360 degrees in all. The target may have any latitudes and longitudes
    /// within the source. A source is global if the gap between its last and its first longitude is
    /// at most twice as wide as the others; a global source reaches the poles, too, if its first and
    /// its last row are at most twice the widest distance of rows from them.
    ///
    /// # Errors
    /// Fails for lists that are empty, not finite or not in order, for latitudes beyond the poles,
    /// and for a target that leaves a regional source.
    pub fn new(source: [&[f64]; 2], target: [&[f64]; 2]) -> Result<Self> {
        let lists = [source, target].concat();
        if lists.iter().any(|list| list.is_empty()) {
            let message = "a list without coordinates; expected one or more";
            return Err(Error::operator(NAME, message));
        }
        if let Some(x) = lists.iter().copied().flatten().find(|x| !x.is_finite()) {
            let message = format!("coordinate {x}; expected a finite number of degrees");
            return Err(Error::operator(NAME, message));
        }
        let mut latitudes = source[0].iter().chain(target[0]);
        if let Some(latitude) = latitudes.find(|x| x.abs() > 90.0 + SAME) {
            let message = format!("latitude {latitude}; expected −90 to 90 degrees");
            return Err(Error::operator(NAME, message));
        }
        let meridians = Meridians::new(source[1])?;
        let parallels = Parallels::new(source[0], meridians.closed)?;
        let rows = target[0].iter().map(|latitude| parallels.place(*latitude));
        let rows: Vec<(Taps, [f64; 2])> = rows.collect::<Result<_>>()?;
        let half = target[1].len() / 2;
        let columns = target[1].iter().enumerate();
        let columns = columns.map(|(column, x)| meridians.place(*x, column < half));
        let key = lists
            .iter()
            .flat_map(|list| once(list.len() as u64).chain(list.iter().map(|x| x.to_bits())));
        Ok(Self(Arc::new(Weights {
            sizes: [source, target].map(|grid| grid.map(<[f64]>::len)),
            columns: columns.collect::<Result<_>>()?,
            poles: [0, 1].map(|end| rows.iter().map(|(_, shares)| shares[end]).collect()),
            rows: rows.into_iter().map(|(taps, _)| taps).collect(),
            key: key.collect(),
        })))
    }

    /// Weights between grids of a kind each, whose longitudes start at zero. `sizes` and `grids`
    /// list source first, then target; a size is `[latitudes, longitudes]`.
    ///
    /// # Errors
    /// Fails for a grid without cells.
    ///
    /// # Example
    /// ```
    /// use halocline_ops::{Regrid, SphereGrid};
    ///
    /// let grids = [SphereGrid::LegendreGauss, SphereGrid::Equiangular];
    /// let weights = Regrid::between([[8, 16], [13, 24]], grids)?;
    /// assert_eq!(weights.sizes(), [[8, 16], [13, 24]]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn between(sizes: [[usize; 2]; 2], grids: [SphereGrid; 2]) -> Result<Self> {
        let longitudes = sizes.map(|[_, size]| {
            let longitudes = (0..size).map(|k| 360.0 * k as f64 / size as f64);
            longitudes.collect::<Vec<f64>>()
        });
        let latitudes = [
            grids[0].latitudes(sizes[0][0])?,
            grids[1].latitudes(sizes[1][0])?,
        ];
        let [source, target] = [0, 1].map(|grid| [&latitudes[grid][..], &longitudes[grid]]);
        Self::new(source, target)
    }

    /// `[latitudes, longitudes]` of source and target.
    pub fn sizes(&self) -> [[usize; 2]; 2] {
        self.0.sizes
    }
}

/// Linear interpolation between two cells; the second one is left out if it has no weight.
fn taps<C>(cells: [C; 2], [start, end]: [f64; 2], place: f64) -> Vec<(C, f64)> {
    let [first, second] = cells;
    if place - start <= SAME {
        return vec![(first, 1.0)];
    }
    let weight = (place - start) / (end - start);
    vec![(first, 1.0 - weight), (second, weight)]
}

/// Widest distance of adjacent coordinates; `None` for a single one.
fn widest(coordinates: &[f64]) -> Option<f64> {
    let gaps = coordinates.windows(2).map(|pair| pair[1] - pair[0]);
    gaps.reduce(f64::max)
}

/// Returns whether a gap is part of a grid with these coordinates.
fn is_inside(gap: f64, coordinates: &[f64]) -> bool {
    widest(coordinates).is_none_or(|widest| gap <= WIDE * widest + SAME)
}

/// Requires that the `places` of coordinates increase.
fn require_increasing(
    name: &str,
    coordinates: &[f64],
    places: &[f64],
    expected: &str,
) -> Result<()> {
    let mut pairs = coordinates.iter().zip(places.windows(2));
    match pairs.find(|(_, pair)| pair[1] - pair[0] <= SAME) {
        None => Ok(()),
        Some((coordinate, _)) => {
            let message = format!("{name} of the source after {coordinate}; expected {expected}");
            Err(Error::operator(NAME, message))
        }
    }
}

/// Latitudes of a source.
struct Parallels {
    /// Latitudes, or their negatives, so that they increase.
    places: Vec<f64>,
    sign: f64,
    /// Whether values may be interpolated to the pole before the first and after the last row.
    reaches: [bool; 2],
}

impl Parallels {
    fn new(latitudes: &[f64], closed: bool) -> Result<Self> {
        let sign = if latitudes[0] > latitudes[latitudes.len() - 1] {
            -1.0
        } else {
            1.0
        };
        let places: Vec<f64> = latitudes.iter().map(|latitude| sign * latitude).collect();
        let expected = "all from north to south or from south to north";
        require_increasing("latitudes", latitudes, &places, expected)?;
        let gaps = [90.0 + places[0], 90.0 - places[places.len() - 1]];
        Ok(Self {
            reaches: gaps.map(|gap| closed && is_inside(gap, &places)),
            places,
            sign,
        })
    }

    /// Rows with their weights, and the shares of the means of the first and the last row.
    fn place(&self, latitude: f64) -> Result<(Taps, [f64; 2])> {
        let (place, last) = (self.sign * latitude, self.places.len() - 1);
        let [low, high] = [self.places[0], self.places[last]];
        let ends = [
            (0, low - place, 90.0 + low),
            (last, place - high, 90.0 - high),
        ];
        for (end, (row, beyond, gap)) in ends.into_iter().enumerate() {
            if beyond <= SAME {
                continue;
            }
            if !self.reaches[end] {
                let [first, last] = [self.sign * low, self.sign * high];
                let message = format!(
                    "latitude {latitude} of the target for {first} to {last} of a regional source; expected one inside"
                );
                return Err(Error::operator(NAME, message));
            }
            let share = (beyond / gap).min(1.0);
            let mut shares = [0.0; 2];
            shares[end] = share;
            return Ok((vec![(row, 1.0 - share)], shares));
        }
        let row = self.places.partition_point(|other| *other <= place + SAME);
        let row = row.saturating_sub(1);
        let next = last.min(row + 1);
        let around = [self.places[row], self.places[next]];
        Ok((taps([row, next], around, place), [0.0; 2]))
    }
}

/// Longitudes of a source.
struct Meridians {
    first: f64,
    /// Distances from the first longitude, and 360 degrees.
    places: Vec<f64>,
    /// Whether the last longitude and the first one are neighbours.
    closed: bool,
}

impl Meridians {
    fn new(longitudes: &[f64]) -> Result<Self> {
        let first = longitudes[0];
        let mut places: Vec<f64> = longitudes
            .iter()
            .map(|longitude| longitude - first)
            .collect();
        let gap = 360.0 - places[places.len() - 1];
        let closed = is_inside(gap, &places);
        places.push(360.0);
        let expected = "an increase, by less than 360 degrees in all";
        require_increasing("longitudes", longitudes, &places, expected)?;
        Ok(Self {
            first,
            places,
            closed,
        })
    }

    /// Columns with their weights. Between the last column and the first one, columns are counted
    /// from before the first column if the value lies `early` in its row, so that they increase.
    fn place(&self, longitude: f64, early: bool) -> Result<TapsAround> {
        let count = self.places.len() - 1;
        let place = (longitude - self.first).rem_euclid(360.0);
        let place = if 360.0 - place <= SAME { 0.0 } else { place };
        let column = self.places.partition_point(|other| *other <= place + SAME);
        let column = column.saturating_sub(1);
        let around = [self.places[column], self.places[column + 1]];
        let in_gap = column + 1 == count && place - around[0] > SAME;
        if in_gap && !self.closed {
            let [start, end] = [self.first, self.first + self.places[count - 1]];
            let message = format!(
                "longitude {longitude} of the target for {start} to {end} of a regional source; expected one inside"
            );
            return Err(Error::operator(NAME, message));
        }
        let turn = if in_gap && early { count } else { 0 };
        let column = column as isize - turn as isize;
        Ok(taps([column, column + 1], around, place))
    }
}

/// Interpolates a field `[.., lat, lon]` to another grid, as [`Regrid`] describes.
///
/// All dims may be sharded. If the target runs in the order of the source, a value belongs to the
/// rank that holds the nearest row and column before it. Otherwise each rank gets as many values, in
/// the order of the target.
///
/// # Errors
/// Fails for a field on another grid than the source, for partial values, and if communication
/// fails.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::sphere::{Regrid, SphereGrid, regrid};
///
/// let grids = [SphereGrid::LegendreGauss, SphereGrid::Equiangular];
/// let weights = Regrid::between([[6, 12], [9, 16]], grids)?;
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<3>::ones([2, 6, 12], &mesh, &[Shard(1)])?;
///     let y = regrid(x, &weights)?;
///     assert_eq!((y.dims(), y.placements()), ([2, 9, 16], &[Shard(1)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn regrid<const D: usize>(x: ShardTensor<D>, weights: &Regrid) -> Result<ShardTensor<D>> {
    const { assert!(D >= 2, "a field of [.., lat, lon]") };
    let Weights { sizes, poles, .. } = &*weights.0;
    let [rows, columns] = sizes[0];
    if x.dims()[D - 2..] != [rows, columns] {
        let message = format!("{:?}; expected [.., {rows}, {columns}]", x.dims());
        return Err(Error::operator(NAME, message));
    }
    x.require_resolved(NAME)?;
    if poles.iter().flatten().all(|share| *share == 0.0) {
        return interpolated(x, &weights.0);
    }
    in_f32(x, |x| {
        let mut y = interpolated(x.clone(), &weights.0)?;
        let mut polar: Option<ShardTensor<D>> = None;
        for (row, shares) in [0, rows - 1].into_iter().zip(poles) {
            if shares.iter().any(|share| *share != 0.0) {
                let row = narrow(x.clone(), D - 2, row, 1)?;
                let mean = mean_dims(row, &[D - 2, D - 1])?.resolve();
                let shares = profile(&y, D - 2, shares)?;
                // A mean that is NaN reaches only the rows with a share of it.
                let term = counted(mean * shares.clone(), shares)?; // [.., target lat, 1]
                polar = Some(match polar {
                    Some(other) => other + term,
                    None => term,
                });
            }
        }
        if let Some(polar) = polar {
            y = y + polar;
        }
        Ok(y)
    })
}

/// Interpolates between rows and columns, without the poles.
fn interpolated<const D: usize>(x: ShardTensor<D>, weights: &Weights) -> Result<ShardTensor<D>> {
    let [source, target] = weights.sizes;
    let row = |(row, taps): (usize, &Taps)| taps[..] == [(row, 1.0)];
    let column = |(column, taps): (usize, &TapsAround)| taps[..] == [(column as isize, 1.0)];
    let same_rows = source[0] == target[0] && weights.rows.iter().enumerate().all(row);
    let same_columns = source[1] == target[1] && weights.columns.iter().enumerate().all(column);
    if same_rows && same_columns {
        return Ok(x);
    }
    sampled::<D, Weighted, _>(x, NAME, weights.key.clone(), || {
        let rows = (!same_rows).then(|| DimMap::new(D - 2, weights.rows.clone()));
        let columns = (!same_columns).then(|| DimMap::around(D - 1, weights.columns.clone()));
        rows.into_iter().chain(columns).collect()
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Regridding(Regrid);

    impl Operator<3, 3> for Regridding {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).regrid(&self.0)
        }
    }

    #[test]
    fn grids_on_shards_of_all_dims() {
        let grids = [SphereGrid::LegendreGauss, SphereGrid::Equiangular];
        for sizes in [[[5, 6], [8, 7]], [[9, 8], [4, 3]]] {
            let weights = Regrid::between(sizes, grids).unwrap();
            let [rows, columns] = sizes[0];
            check_op(
                &Regridding(weights),
                &[[2, rows, columns]],
                &[],
                &[0, 1, 2],
                2e-6,
            );
        }
    }

    /// The target runs in the opposite order of the source, and around its ends.
    #[test]
    fn other_orders_on_shards_of_all_dims() {
        let latitudes = [60.0, 30.0, 0.0, -30.0, -60.0];
        let longitudes = [0.0, 60.0, 120.0, 180.0, 240.0, 300.0];
        let rows = [-70.0, 10.0, 35.0, 80.0];
        let columns = [-170.0, -20.0, 2.0, 40.0, 150.0];
        let weights = Regrid::new([&latitudes, &longitudes], [&rows, &columns]).unwrap();
        check_op(&Regridding(weights), &[[2, 5, 6]], &[], &[0, 1, 2], 2e-6);
    }

    /// A region on both sides of the first meridian, from latitudes that run to the north.
    #[test]
    fn a_linear_field_stays_linear_in_a_region() {
        let latitudes = [-80.0, -40.0, 0.0, 40.0, 80.0];
        let longitudes = [5.0, 65.0, 125.0, 185.0, 245.0, 305.0];
        let region = [&[-70.0, 12.0, 3.0][..], &[-20.0, 2.0, 40.0]];
        let weights = Regrid::new([&latitudes, &longitudes], region).unwrap();
        let device = Default::default();
        let check = |x: Tensor<2>, expected: [[f32; 3]; 3]| {
            let y = x.expand([5, 6]).regrid(&weights).into_data();
            y.assert_approx_eq::<f32>(&expected.into(), Default::default());
        };
        let rows = Tensor::<2>::from_floats([[-80.0], [-40.0], [0.0], [40.0], [80.0]], &device);
        check(rows, [[-70.0; 3], [12.0; 3], [3.0; 3]]);
        let columns = Tensor::<2>::from_floats([[0.0, 60.0, 120.0, 180.0, 240.0, 300.0]], &device);
        // Between the last column and the first one, values fall by 300 in 60 degrees.
        check(columns, [[125.0, 15.0, 35.0]; 3]);
    }

    #[test]
    fn a_hole_near_a_pole_stays_there() {
        let grids = [SphereGrid::LegendreGauss, SphereGrid::Equiangular];
        let weights = Regrid::between([[4, 6], [7, 6]], grids).unwrap();
        let mut cells = [1.0_f32; 24];
        cells[0] = f32::NAN;
        let x: Tensor<2> = Tensor::<1>::from_floats(cells, &Default::default()).reshape([4, 6]);
        let y: Vec<f32> = x.regrid(&weights).into_data().iter().collect();
        // Rows at 90 and 60 degrees lie beyond the first one, at 59, and the next row before it.
        assert!(y[..13].iter().all(|x| x.is_nan()), "{y:?}");
        assert!(y[13..].iter().all(|x| (x - 1.0).abs() < 1e-6), "{y:?}");
    }

    #[test]
    fn misuse_is_told() {
        let (rows, columns) = ([10.0, 20.0, 30.0], [0.0, 10.0, 20.0]);
        let told = |source: [&[f64]; 2], target: [&[f64]; 2], expected: &str| {
            let error = Regrid::new(source, target).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        let region = [&rows[..], &columns];
        told(
            region,
            [&[5.0], &[3.0]],
            "latitude 5 of the target for 10 to 30",
        );
        told(
            region,
            [&[15.0], &[25.0]],
            "longitude 25 of the target for 0 to 20",
        );
        told(region, [&[], &[3.0]], "a list without coordinates");
        told(region, [&[95.0], &[3.0]], "latitude 95; expected");
        let expected = "latitudes of the source after 1; expected all from north";
        told([&[0.0, 1.0, 1.0], &columns], region, expected);
        let expected = "longitudes of the source after 360; expected an increase";
        told([&rows, &[0.0, 180.0, 360.0]], region, expected);
        let weights = Regrid::new(region, region).unwrap();
        let x = ShardTensor::solo(Tensor::<2>::ones([3, 4], &Default::default()));
        let error = regrid(x, &weights).unwrap_err().to_string();
        assert!(error.contains("[3, 4]; expected [.., 3, 3]"), "{error}");
    }
}
