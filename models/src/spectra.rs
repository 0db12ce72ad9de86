//! Power spectra of forecasts and their truth, by channel, lead and region.

use std::collections::BTreeMap;

use burn::tensor::{DType, Element, Tensor, TensorData};
use halocline_core::{Error, Partial, ReduceOp, Result, Shard, ShardTensor, tasks};
use halocline_ops::prelude::*;
use halocline_ops::spectral::rfft;
use serde::Serialize;

use crate::Region;
use crate::precision::wide;
use crate::verification::{check_weights, hours, key};

const NAME: &str = "Spectra";

/// Power at a zonal wavenumber, in the square of the channel's unit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Power {
    /// Name of the channel, such as `z@500`.
    pub channel: String,
    /// Lead time in hours.
    pub lead: f64,
    /// Name of the region.
    pub region: String,
    /// Number of waves around a circle of latitude.
    pub wavenumber: usize,
    /// Power of the forecasts: the mean over forecasts of the weighted mean over latitudes.
    pub forecast: f64,
    /// Power of the truth.
    pub truth: f64,
}

/// Accumulator of zonal power spectra, `|x̂_k/n|²`, doubled for modes that have a conjugate, as in
/// [`power_spectrum`](halocline_ops::spectral::power_spectrum). The sum over wavenumbers is the
/// mean square. A forecast that loses power at large wavenumbers is too smooth.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::{Region, Spectra};
///
/// let regions = Region::standard(); // latitude bands
/// let mut spectra = Spectra::new(&["t2m"], &[1.0, 1.0], &[45.0, -45.0], regions)?;
/// let truth = Tensor::<4>::from([[[[1.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0]]]]);
/// spectra.add(24.0, truth.clone() * 0.5, truth)?;
/// let [forecast, truth] = spectra.of("t2m", 24.0, "northern extratropics").expect("was added");
/// assert_eq!((truth, forecast[2]), (vec![4.0, 0.0, 1.0], 0.25));
/// assert_eq!(spectra.spectra().len(), 4 * 3); // one record per channel, region and wavenumber
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Spectra {
    pub(crate) channels: Vec<String>,
    /// Names, and row weights that sum to one; all zero for a region without rows.
    pub(crate) regions: Vec<(String, Vec<f64>)>,
    /// Sums by lead, in milliseconds.
    pub(crate) leads: BTreeMap<i64, Sums>,
}

/// Power of fields, summed over a batch. See [`Spectra::power`].
#[derive(Clone, Debug, PartialEq)]
pub struct FieldPower {
    pub(crate) batch: usize,
    pub(crate) columns: usize,
    /// By region, channel and wavenumber.
    pub(crate) power: Vec<Vec<Vec<f64>>>,
}

/// Sums over forecasts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sums {
    pub(crate) fields: usize,
    pub(crate) columns: usize,
    /// Power of forecasts and truth, by region, channel and wavenumber.
    pub(crate) power: [Vec<Vec<Vec<f64>>>; 2],
}

impl Spectra {
    /// Makes spectra of channels on a grid, with one weight per latitude row, and latitudes in
    /// degrees.
    ///
    /// # Errors
    /// A region does not span all longitudes; the numbers of weights and latitudes differ.
    pub fn new(
        channels: &[impl AsRef<str>],
        weights: &[f64],
        lat: &[f64],
        regions: Vec<Region>,
    ) -> Result<Self> {
        check_weights(NAME, weights, [("latitudes", lat)])?;
        let is_part = |region: &&Region| region.lon[1] - region.lon[0] < 360.0;
        if let Some(region) = regions.iter().find(is_part) {
            let message = format!(
                "region {:?} from {} to {} degrees east; expected one around the globe, whose zonal waves are whole",
                region.name, region.lon[0], region.lon[1]
            );
            return Err(Error::operator(NAME, message));
        }
        let rows = |region: &Region| {
            let pairs = weights.iter().zip(region.rows(lat));
            let rows: Vec<f64> = pairs.map(|(weight, inside)| weight * inside).collect();
            let total: f64 = rows.iter().sum();
            let share = |weight: f64| if total > 0.0 { weight / total } else { 0.0 };
            rows.into_iter().map(share).collect()
        };
        let named = |region: &Region| (region.name.clone(), rows(region));
        Ok(Self {
            channels: channels.iter().map(|name| name.as_ref().into()).collect(),
            regions: regions.iter().map(named).collect(),
            leads: BTreeMap::new(),
        })
    }

    /// Adds forecasts `[batch, channels, lat, lon]`, in physical units, and their truth, for a lead
    /// in hours.
    ///
    /// # Placement
    /// Any without partial values. Sharded longitudes are exchanged for another dim, and one
    /// spectrum per channel and region is summed over the ranks.
    ///
    /// # Errors
    /// The lead is not finite; the sizes of the fields do not match the channels and weights, each
    /// other, or earlier fields; [`rfft`] fails.
    pub fn add<X: Field<4>>(&mut self, lead: f64, forecast: X, truth: X) -> Result<()> {
        let [forecast, truth] = [self.power(forecast)?, self.power(truth)?];
        self.add_power(lead, &forecast, &truth)
    }

    /// Computes the power of fields `[batch, channels, lat, lon]`, in physical units, for
    /// [`add_power`](Self::add_power). A truth that several forecasts reach needs it once.
    ///
    /// # Placement
    /// As for [`add`](Self::add).
    ///
    /// # Errors
    /// Sizes that do not match the channels and weights; partial values; [`rfft`] fails.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_models::{Region, Spectra};
    ///
    /// let mut spectra = Spectra::new(&["t2m"], &[1.0], &[45.0], Region::standard())?;
    /// let truth = Tensor::<4>::from([[[[1.0, 3.0, 1.0, 3.0]]]]);
    /// let power = spectra.power(truth.clone())?;
    /// for lead in [24.0, 48.0] {
    ///     let forecast = spectra.power(truth.clone() * (12.0 / lead))?;
    ///     spectra.add_power(lead, &forecast, &power)?;
    /// }
    /// let [forecast, truth] = spectra.of("t2m", 48.0, "globe").expect("was added");
    /// assert_eq!((forecast[2], truth[2]), (0.0625, 1.0));
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn power<X: Field<4>>(&self, fields: X) -> Result<FieldPower> {
        let dims = fields.dims();
        let rows = self.regions.first().map_or(dims[2], |(_, rows)| rows.len());
        let counts = [self.channels.len(), rows];
        if dims[1..3] != counts {
            let message = format!(
                "fields {dims:?}; expected {} channels and {} rows",
                counts[0], counts[1]
            );
            return Err(Error::operator(NAME, message));
        }
        Ok(FieldPower {
            batch: dims[0],
            columns: dims[3],
            power: self.sums(wide(fields)?.into_shard())?,
        })
    }

    /// Adds forecasts and their truth by their [power](Self::power), which has an example, for a
    /// lead in hours.
    ///
    /// # Errors
    /// The lead is not finite; forecasts and truth, or earlier fields, differ in number or columns;
    /// powers of other regions or channels.
    pub fn add_power(
        &mut self,
        lead: f64,
        forecast: &FieldPower,
        truth: &FieldPower,
    ) -> Result<()> {
        let key = key(NAME, lead)?;
        let expected = [self.regions.len(), self.channels.len()];
        let known = self.leads.get(&key).map(|sums| sums.columns);
        let [columns, batch] = [known.unwrap_or(forecast.columns), forecast.batch];
        for fields in [forecast, truth] {
            let power = &fields.power;
            let counts = [power.len(), power.first().map_or(expected[1], Vec::len)];
            if (counts, fields.columns, fields.batch) != (expected, columns, batch) {
                let message = format!(
                    "{} fields of {} columns for {counts:?} regions and channels; expected {batch} of {columns}, for \
                     {expected:?}",
                    fields.batch, fields.columns
                );
                return Err(Error::operator(NAME, message));
            }
        }
        let sums = self.leads.entry(key).or_default();
        sums.fields += batch;
        sums.columns = columns;
        for (sum, fields) in sums.power.iter_mut().zip([forecast, truth]) {
            if sum.is_empty() {
                sum.clone_from(&fields.power);
                continue;
            }
            let powers = fields.power.iter().flatten().flatten();
            let pairs = sum.iter_mut().flatten().flatten().zip(powers);
            pairs.for_each(|(sum, power)| *sum += power);
        }
        Ok(())
    }

    /// Computes the power of a batch, summed over it, by region, channel and wavenumber.
    fn sums(&self, field: ShardTensor<4>) -> Result<Vec<Vec<Vec<f64>>>> {
        field.require_resolved(NAME)?;
        let columns = field.dims()[3];
        // [batch, channels, lat, modes, 2]
        let modes: ShardTensor<5> = rfft(field.inner(), &[3], FftNorm::Forward)?;
        let (local, layout, mesh) = modes.into_parts();
        let (dims, device, dtype) = (local.dims(), local.device(), local.dtype());
        let cells = layout.local_box(mesh.position());
        let rows = &cells.ranges()[2];
        let weights: Vec<&[f64]> = self
            .regions
            .iter()
            .map(|(_, weights)| &weights[rows.clone()])
            .collect();
        let modes = local.into_data();
        // In double precision, without a copy of the squares.
        let sums = if dtype == DType::F64 {
            weighted(values::<f64>(&modes), dims, &weights)
        } else {
            weighted(values::<f32>(&modes), dims, &weights)
        };
        let shape = [1, dims[1], weights.len(), dims[3], 1];
        let sums = Tensor::<5>::from_data(TensorData::new(sums, shape), (&device, dtype));
        let placements = layout.map_placements(|placement| match placement {
            Shard(0 | 2) => Partial(ReduceOp::Sum),
            other => other,
        });
        let mut extents = layout.all_extents().to_vec();
        for (dim, size) in [(0, 1), (2, weights.len()), (4, 1)] {
            extents[dim] = vec![size];
        }
        let layout = layout.derive(placements, extents);
        let sums = ShardTensor::<5>::from_parts(sums, layout, mesh);
        // [1, channels, regions, modes, 1]
        let sums = Error::catch(|| sums.resolve().full_tensor().into_data())?;
        let sums: Vec<f64> = sums.iter().collect();
        let (regions, waves) = (weights.len(), columns / 2 + 1);
        let pair = |(wave, sum): (usize, &f64)| {
            let is_alone = wave == 0 || 2 * wave == columns;
            if is_alone { *sum } else { 2.0 * sum }
        };
        let of_channel = |region: usize, channel: usize| -> Vec<f64> {
            let start = (channel * regions + region) * waves;
            let sums = sums[start..start + waves].iter();
            sums.enumerate().map(pair).collect()
        };
        let channels = self.channels.len();
        let of_region = |region: usize| -> Vec<Vec<f64>> {
            let channels = (0..channels).map(|channel| of_channel(region, channel));
            channels.collect()
        };
        Ok((0..regions).map(of_region).collect())
    }

    /// Returns the power at all wavenumbers from 0, of the forecasts and of their truth, for a lead
    /// in hours.
    pub fn of(&self, channel: &str, lead: f64, region: &str) -> Option<[Vec<f64>; 2]> {
        let sums = self.leads.get(&key(NAME, lead).ok()?)?;
        let region = self.regions.iter().position(|(name, _)| name == region)?;
        let channel = self.channels.iter().position(|name| name == channel)?;
        let mean = |power: &Vec<Vec<Vec<f64>>>| {
            let sums_of = power[region][channel].iter();
            sums_of.map(|sum| sum / sums.fields as f64).collect()
        };
        Some(sums.power.each_ref().map(mean))
    }

    /// Returns the power for every channel, lead, region and wavenumber, as a list that serializes
    /// to JSON.
    pub fn spectra(&self) -> Vec<Power> {
        let mut all = Vec::new();
        for lead in self.leads.keys().map(|key| hours(*key)) {
            for (region, _) in &self.regions {
                for channel in &self.channels {
                    let [forecast, truth] = self.of(channel, lead, region).expect("it is there");
                    let waves = forecast.into_iter().zip(truth).enumerate();
                    all.extend(waves.map(|(wavenumber, (forecast, truth))| Power {
                        channel: channel.clone(),
                        lead,
                        region: region.clone(),
                        wavenumber,
                        forecast,
                        truth,
                    }));
                }
            }
        }
        all
    }
}

/// Returns the elements of a tensor, which are of this type.
fn values<E: Element>(data: &TensorData) -> &[E] {
    data.as_slice().expect("the type of the elements")
}

/// Sums the squares of modes `[batch, channels, lat, modes, 2]` over the batch and the weighted
/// rows, to `[channels, weights, modes]`. A row of weight zero does not count.
fn weighted<E: Copy + Into<f64> + Sync>(
    modes: &[E],
    [batch, channels, rows, waves, _]: [usize; 5],
    weights: &[&[f64]],
) -> Vec<f64> {
    let channels = tasks::map(channels, 1, |channel| {
        let mut sums = vec![0.0; weights.len() * waves];
        for line in 0..batch * rows {
            let (sample, row) = (line / rows, line % rows);
            let start = ((sample * channels + channel) * rows + row) * waves;
            let modes = &modes[2 * start..2 * (start + waves)];
            for (sums, weights) in sums.chunks_mut(waves.max(1)).zip(weights) {
                let weight = weights[row];
                if weight == 0.0 {
                    continue;
                }
                for (sum, mode) in sums.iter_mut().zip(modes.chunks_exact(2)) {
                    let [real, imaginary]: [f64; 2] = [mode[0].into(), mode[1].into()];
                    *sum += weight * (real * real + imaginary * imaginary);
                }
            }
        }
        sums
    });
    channels.concat()
}

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, Placement, Replicate};

    use super::*;
    use crate::testing::distributed;

    const SHAPE: [usize; 4] = [2, 3, 5, 8];
    const WEIGHTS: [f64; 5] = [0.2, 1.0, 1.6, 1.0, 0.2];
    const LAT: [f64; 5] = [80.0, 40.0, 0.0, -40.0, -80.0];

    fn value(index: usize, step: usize) -> f64 {
        ((index * step) % 41) as f64 / 7.0
    }

    /// Definition of the spectrum of a channel, with these row weights.
    fn expected(step: usize, channel: usize, rows: &[f64], wave: usize) -> f64 {
        let [batch, channels, height, width] = SHAPE;
        let total: f64 = rows.iter().sum();
        let row = |sample: usize, row: usize| {
            let first = ((sample * channels + channel) * height + row) * width;
            let angle =
                |column: usize| std::f64::consts::TAU * (wave * column) as f64 / width as f64;
            let part = |wave: fn(f64) -> f64| {
                let terms = (0..width).map(|i| value(first + i, step) * wave(angle(i)));
                terms.sum::<f64>() / width as f64
            };
            let pair = if wave == 0 || 2 * wave == width {
                1.0
            } else {
                2.0
            };
            pair * (part(f64::cos).powi(2) + part(f64::sin).powi(2)) * rows[row] / total
        };
        let rows = (0..batch).flat_map(|sample| (0..height).map(move |y| row(sample, y)));
        rows.sum::<f64>() / batch as f64
    }

    #[test]
    fn spectra_are_those_of_the_definition_on_any_mesh() {
        let meshes: [[Placement; 2]; 4] = [
            [Shard(2), Shard(3)],
            [Shard(0), Shard(3)],
            [Shard(1), Shard(2)],
            [Replicate, Shard(3)],
        ];
        for placements in meshes {
            let found = Launcher::local(4).collect(|world| {
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                let field = |step: usize| {
                    let values = (0..SHAPE.iter().product()).map(|i| value(i, step) as f32);
                    let data = TensorData::new(values.collect::<Vec<f32>>(), SHAPE);
                    distributed::<4>(data, &mesh, &placements)
                };
                let names = ["z@500", "t", "q"];
                let mut spectra = Spectra::new(&names, &WEIGHTS, &LAT, Region::standard())?;
                // Adding twice does not change the mean.
                for _ in 0..2 {
                    spectra.add(6.0, field(29)?, field(17)?)?;
                }
                assert!(spectra.of("t", 12.0, "globe").is_none());
                Ok((
                    spectra.of("t", 6.0, "globe"),
                    spectra.of("q", 6.0, "tropics"),
                ))
            });
            for (globe, tropics) in found.unwrap() {
                let tropic = [0.0, 0.0, 1.6, 0.0, 0.0];
                for (found, channel, rows) in [(globe, 1, WEIGHTS), (tropics, 2, tropic)] {
                    for (found, step) in found.unwrap().into_iter().zip([29, 17]) {
                        assert_eq!(found.len(), 5);
                        for (wave, found) in found.into_iter().enumerate() {
                            let expected = expected(step, channel, &rows, wave);
                            let off = (found - expected).abs();
                            assert!(off < 1e-5 * (1.0 + expected), "{found} for {expected}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn mistakes_are_errors() {
        let europe = Region::new("europe", [35.0, 75.0], [-12.5, 42.5]);
        let refused = Spectra::new(&["t"], &WEIGHTS, &LAT, vec![europe]).unwrap_err();
        assert!(
            refused.to_string().contains("around the globe"),
            "{refused}"
        );
        let mut spectra = Spectra::new(&["t"], &WEIGHTS, &LAT, Region::standard()).unwrap();
        let field = |rows| Tensor::<4>::ones([1, 1, rows, 4], &Default::default());
        let refused = spectra.add(6.0, field(4), field(4)).unwrap_err();
        assert!(
            refused.to_string().contains("1 channels and 5 rows"),
            "{refused}"
        );
        assert!(spectra.add(f64::NAN, field(5), field(5)).is_err());
        let fields = [1, 2].map(|batch| Tensor::<4>::ones([batch, 1, 5, 4], &Default::default()));
        let [one, two] = fields.map(|field| spectra.power(field).unwrap());
        let refused = spectra.add_power(6.0, &one, &two).unwrap_err();
        assert!(
            refused.to_string().contains("2 fields of 4 columns"),
            "{refused}"
        );
    }

    #[test]
    fn rows_outside_a_region_do_not_count() {
        let mut spectra = Spectra::new(&["t"], &WEIGHTS, &LAT, Region::standard()).unwrap();
        let field = Tensor::<4>::ones([1, 1, 5, 4], &Default::default());
        let rows = |first, count| field.clone().narrow(2, first, count);
        let holed = Tensor::cat(vec![rows(0, 1) * f32::NAN, rows(1, 4)], 2);
        spectra.add(6.0, holed, field.clone()).unwrap();
        let power = |region| spectra.of("t", 6.0, region).unwrap()[0][0];
        assert!(power("globe").is_nan());
        assert_eq!(power("tropics"), 1.0);
    }
}
