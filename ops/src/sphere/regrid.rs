//! Bilinear regridding between grids of latitudes and longitudes.
//!
//! Along each dim, a value is the linear interpolation of the two nearest cells in degrees.
//! Longitude is periodic. Beyond the first and the last row, values are interpolated to the pole,
//! whose value is the mean of that row. Of fields whose values are angles ([`RegridMode`]), a value
//! lies on the shorter arc between those of two cells, and a pole has the mean direction. Semantics
//! follow torch-harmonics' `ResampleS2`.
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

use super::angles::{mean_direction, on_arc};
use super::coordinates::{Meridians, NAME, Parallels, SAME};
use super::grid::SphereGrid;
use crate::constant;
use crate::driver::sampling::{DimMap, Map, Taps, TapsAround, Weighted, sampled};
use crate::masked::apply_mask;
use crate::precision::in_f32;
use crate::rearrange::{narrow, profile};
use crate::reduce::mean_dims;

/// Interpolation of a regridding, named as in torch-harmonics. See [`Regrid::with_mode`] for an
/// example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RegridMode {
    /// Linear interpolation of numbers.
    #[default]
    Bilinear,
    /// Interpolation of angles in radians along the shorter arc. A result is not reduced to one
    /// turn: it is at most half a turn from the value of the cell before it.
    BilinearSpherical,
}

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
pub struct Regrid {
    weights: Arc<Weights>,
    mode: RegridMode,
}

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
        write!(f, "Regrid({source:?} to {target:?}, {:?})", self.mode)
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
        let weights = Weights {
            sizes: [source, target].map(|grid| grid.map(<[f64]>::len)),
            columns: columns.collect::<Result<_>>()?,
            poles: [0, 1].map(|end| rows.iter().map(|(_, shares)| shares[end]).collect()),
            rows: rows.into_iter().map(|(taps, _)| taps).collect(),
            key: key.collect(),
        };
        Ok(Self {
            weights: Arc::new(weights),
            mode: RegridMode::default(),
        })
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

    /// Sets the interpolation, such as of wind directions.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{Regrid, RegridMode, SphereField};
    ///
    /// let source = [&[0.0][..], &[0.0, 90.0, 180.0, 270.0]];
    /// let weights = Regrid::new(source, [&[0.0], &[45.0]])?.with_mode(RegridMode::BilinearSpherical);
    /// let x = Tensor::<2>::from([[3.0, -3.0, 0.0, 0.0]]); // two directions near π
    /// let y = x.regrid(&weights).into_scalar::<f32>();
    /// assert!((y - std::f32::consts::PI).abs() < 1e-6);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_mode(self, mode: RegridMode) -> Self {
        Self { mode, ..self }
    }

    /// `[latitudes, longitudes]` of source and target.
    pub fn sizes(&self) -> [[usize; 2]; 2] {
        self.weights.sizes
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
    let Regrid { weights, mode } = weights;
    let Weights { sizes, poles, .. } = &**weights;
    let [rows, columns] = sizes[0];
    if x.dims()[D - 2..] != [rows, columns] {
        let message = format!("{:?}; expected [.., {rows}, {columns}]", x.dims());
        return Err(Error::operator(NAME, message));
    }
    x.require_resolved(NAME)?;
    if *mode == RegridMode::BilinearSpherical {
        return in_f32(x, |x| of_angles(x, weights));
    }
    if poles.iter().flatten().all(|share| *share == 0.0) {
        return interpolated(x, weights);
    }
    in_f32(x, |x| {
        let mut y = interpolated(x.clone(), weights)?;
        let mut polar: Option<ShardTensor<D>> = None;
        for (row, shares) in [0, rows - 1].into_iter().zip(poles) {
            if shares.iter().any(|share| *share != 0.0) {
                let row = narrow(x.clone(), D - 2, row, 1)?;
                let mean = mean_dims(row, &[D - 2, D - 1])?.resolve();
                let shares = profile(&y, D - 2, shares)?;
                // A mean that is NaN reaches only the rows with a share of it.
                let term = apply_mask(mean * shares.clone(), shares)?; // [.., target lat, 1]
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

impl Weights {
    /// Whether the target has the rows, and whether it has the columns, of the source.
    fn same(&self) -> [bool; 2] {
        let [source, target] = self.sizes;
        let row = |(row, taps): (usize, &Taps)| taps[..] == [(row, 1.0)];
        let column = |(column, taps): (usize, &TapsAround)| taps[..] == [(column as isize, 1.0)];
        [
            source[0] == target[0] && self.rows.iter().enumerate().all(row),
            source[1] == target[1] && self.columns.iter().enumerate().all(column),
        ]
    }
}

/// Interpolates angles between rows, with the mean directions at the poles, then between columns.
fn of_angles<const D: usize>(x: ShardTensor<D>, weights: &Weights) -> Result<ShardTensor<D>> {
    let ([same_rows, same_columns], [rows, _]) = (weights.same(), weights.sizes[0]);
    let mut y = x.clone();
    if !same_rows {
        let map = |taps: Vec<Taps>| DimMap::new(D - 2, taps);
        y = between(y, D - 2, &weights.rows, weights, map)?;
    }
    for (end, (row, shares)) in [0, rows - 1].into_iter().zip(&weights.poles).enumerate() {
        if shares.iter().all(|share| *share == 0.0) {
            continue;
        }
        let pole = mean_direction(narrow(x.clone(), D - 2, row, 1)?)?; // [.., 1, 1]
        let beyond = profile(&y, D - 2, shares)?;
        let value = match end {
            0 => on_arc(pole, y.clone(), -beyond.clone() + 1.0),
            _ => on_arc(y.clone(), pole, beyond.clone()),
        };
        let mask = (constant(&y) * 0.0 + beyond).greater_elem(0.0);
        y = y.mask_where(mask, value);
    }
    if !same_columns {
        let map = |taps: Vec<TapsAround>| DimMap::around(D - 1, taps);
        y = between(y, D - 1, &weights.columns, weights, map)?;
    }
    Ok(y)
}

/// Interpolates angles along one dim: samples both cells of each value, then goes along the arc.
/// Either sampling keeps the other cell, with a weight of zero, so that both results have one
/// layout.
fn between<const D: usize, C: Copy>(
    x: ShardTensor<D>,
    dim: usize,
    outputs: &[Vec<(C, f64)>],
    weights: &Weights,
    map: impl Fn(Vec<Vec<(C, f64)>>) -> DimMap,
) -> Result<ShardTensor<D>> {
    let cells = |end: usize| {
        let selection = |taps: &Vec<(C, f64)>| {
            let chosen = end.min(taps.len() - 1);
            let taps = taps.iter().enumerate();
            let weight = |number: usize| f64::from(number == chosen);
            taps.map(|(number, (cell, _))| (*cell, weight(number)))
                .collect::<Vec<_>>()
        };
        let key = (weights.key.clone(), dim, end);
        let maps = || vec![map(outputs.iter().map(selection).collect())];
        sampled::<D, Weighted, _>(x.clone(), NAME, key, maps)
    };
    let (start, end) = (cells(0)?, cells(1)?);
    let share = |taps: &Vec<(C, f64)>| taps.get(1).map_or(0.0, |(_, weight)| *weight);
    let shares: Vec<f64> = outputs.iter().map(share).collect();
    let shares = profile(&start, dim, &shares)?;
    Ok(on_arc(start, end, shares))
}

/// Interpolates between rows and columns, without the poles.
fn interpolated<const D: usize>(x: ShardTensor<D>, weights: &Weights) -> Result<ShardTensor<D>> {
    let [same_rows, same_columns] = weights.same();
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
            let shape = [2, sizes[0][0], sizes[0][1]];
            for (mode, tolerance) in [
                (RegridMode::Bilinear, 2e-6),
                (RegridMode::BilinearSpherical, 1e-5),
            ] {
                let operator = Regridding(weights.clone().with_mode(mode));
                check_op(&operator, &[shape], &[], &[0, 1, 2], tolerance);
            }
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
        for mode in [RegridMode::Bilinear, RegridMode::BilinearSpherical] {
            let y = x.clone().regrid(&weights.clone().with_mode(mode));
            let y: Vec<f32> = y.into_data().iter().collect();
            // Rows at 90 and 60 degrees lie beyond the first one, at 59, and the next row before
            // it.
            assert!(y[..13].iter().all(|x| x.is_nan()), "{mode:?}: {y:?}");
            assert!(
                y[13..].iter().all(|x| (x - 1.0).abs() < 1e-6),
                "{mode:?}: {y:?}"
            );
        }
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
