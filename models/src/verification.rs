//! Scores of forecasts by channel, lead and region.

use std::collections::BTreeMap;

use halocline_core::{Error, Result};
use halocline_ops::prelude::*;
use serde::Serialize;

use crate::metrics::{Evaluation, Metrics, add_ensembles, add_fields};

const NAME: &str = "Verification";

/// Region of the globe, a box of latitudes and longitudes in degrees.
///
/// # Example
/// ```
/// use halocline_models::Region;
///
/// let europe = Region::new("europe", [35.0, 75.0], [-12.5, 42.5]); // across the prime meridian
/// assert_eq!(europe.rows(&[80.0, 40.0]), [0.0, 1.0]);
/// assert_eq!(europe.columns(&[0.0, 100.0, 350.0]), [1.0, 0.0, 1.0]);
/// let pacific = Region::new("pacific", [-20.0, 20.0], [160.0, -120.0]); // across the date line
/// assert_eq!(pacific.columns(&[0.0, 180.0, 200.0, 300.0]), [0.0, 1.0, 1.0, 0.0]);
/// assert_eq!(Region::standard().len(), 4);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    /// Name of the region.
    pub name: String,
    /// Southern and northern bounds, in any order, both inclusive.
    pub lat: [f64; 2],
    /// Western and eastern bounds, both inclusive.
    pub lon: [f64; 2],
}

impl Region {
    /// Makes a region between two latitudes, and eastward from a western to an eastern bound.
    /// Longitudes may start at -180° or at 0°, and the region may cross the date line or the prime
    /// meridian.
    pub fn new(name: &str, lat: [f64; 2], lon: [f64; 2]) -> Self {
        Self {
            name: name.into(),
            lat,
            lon,
        }
    }

    /// Returns the globe, the tropics, and the northern and southern extratropics; they meet at 20°
    /// (WeatherBench 2).
    pub fn standard() -> Vec<Self> {
        let around = |name: &str, lat| Self::new(name, lat, [0.0, 360.0]);
        vec![
            around("globe", [-90.0, 90.0]),
            around("northern extratropics", [20.0, 90.0]),
            around("tropics", [-20.0, 20.0]),
            around("southern extratropics", [-90.0, -20.0]),
        ]
    }

    /// Returns one for each row inside the region, and zero for the others.
    pub fn rows(&self, lat: &[f64]) -> Vec<f64> {
        let [one, other] = self.lat;
        let inside = |lat: &f64| (one.min(other)..=one.max(other)).contains(lat);
        lat.iter().map(|lat| f64::from(inside(lat))).collect()
    }

    /// Returns one for each column inside the region, and zero for the others.
    pub fn columns(&self, lon: &[f64]) -> Vec<f64> {
        let [west, east] = self.lon;
        let width = if east - west >= 360.0 {
            360.0
        } else {
            (east - west).rem_euclid(360.0)
        };
        let inside = |lon: &f64| (lon - west).rem_euclid(360.0) <= width;
        lon.iter().map(|lon| f64::from(inside(lon))).collect()
    }
}

/// Row of a table of scores: the metrics of a channel in a region, for one lead.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScoreRow {
    /// Name of the channel, such as `z@500`.
    pub channel: String,
    /// Variable: the name without a level.
    pub variable: String,
    /// Level, in the unit of the file.
    pub level: Option<f64>,
    /// Lead time in hours.
    pub lead: f64,
    /// Name of the region.
    pub region: String,
    /// Metrics.
    #[serde(flatten)]
    pub metrics: Metrics,
}

/// Accumulator of forecast scores by channel, lead and region.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::{Region, Verification};
///
/// let (lat, lon) = ([45.0, -45.0], [0.0, 120.0, 240.0]);
/// let regions = Region::standard();
/// let mut scores = Verification::new(&["z@500", "t2m"], &[1.0, 1.0], &lat, &lon, regions)?;
/// let field = |value: f32| Tensor::<4>::full([1, 2, 2, 3], value, &Device::default());
/// scores.add(6.0, field(1.0), field(3.0), None, None)?;
/// let all = scores.scores();
/// assert_eq!(all.len(), 8);
/// assert_eq!((all[0].variable.as_str(), all[0].level, all[0].lead), ("z", Some(500.0), 6.0));
/// let north = scores.metrics("t2m", 6.0, "northern extratropics").expect("was added");
/// assert_eq!((north.rmse, north.bias), (2.0, -2.0));
/// assert_eq!(scores.metrics("t2m", 6.0, "tropics").map(|metrics| metrics.forecasts), Some(0));
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Verification {
    pub(crate) channels: Vec<String>,
    /// Name and empty evaluation of each region.
    pub(crate) regions: Vec<(String, Evaluation)>,
    /// Evaluations by lead, in milliseconds.
    pub(crate) leads: BTreeMap<i64, Vec<Evaluation>>,
}

impl Verification {
    /// Makes scores of channels on a grid, with one weight per latitude row, and latitudes and
    /// longitudes in degrees.
    ///
    /// # Errors
    /// The numbers of weights and latitudes differ.
    pub fn new(
        channels: &[impl AsRef<str>],
        weights: &[f64],
        lat: &[f64],
        lon: &[f64],
        regions: Vec<Region>,
    ) -> Result<Self> {
        check_weights(NAME, weights, [("latitudes", lat)])?;
        let evaluation = |region: &Region| {
            let pairs = weights.iter().zip(region.rows(lat));
            let rows: Vec<f64> = pairs.map(|(weight, inside)| weight * inside).collect();
            Evaluation::new(&rows, channels.len()).with_columns(&region.columns(lon))
        };
        Ok(Self {
            channels: channels.iter().map(|name| name.as_ref().into()).collect(),
            regions: regions
                .iter()
                .map(|region| (region.name.clone(), evaluation(region)))
                .collect(),
            leads: BTreeMap::new(),
        })
    }

    /// Makes scores of channels on cells with positions of their own, with one weight per cell, such
    /// as its area, and the latitude and the longitude of each cell in degrees. Fields have the
    /// cells as columns of a single row or, on a curvilinear grid, as rows and columns; weights and
    /// positions are then in the order of the rows.
    ///
    /// # Errors
    /// The numbers of weights, latitudes and longitudes differ.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_models::{Region, Verification};
    ///
    /// let (lat, lon) = ([60.0, 0.0, 30.0], [10.0, 20.0, 300.0]);
    /// let weights = [1.0, 4.0, 3.0];
    /// let mut scores = Verification::of_cells(&["t2m"], &weights, &lat, &lon, Region::standard())?;
    /// let forecast = Tensor::<4>::from([[[[2.0, 9.0, 4.0]]]]); // [batch, channels, 1, cells]
    /// let truth = forecast.zeros_like();
    /// scores.add(6.0, forecast, truth, None, None)?;
    /// let bias = |region| scores.metrics("t2m", 6.0, region).expect("was added").bias;
    /// // (2 + 4 · 9 + 3 · 4) / 8, and (2 + 3 · 4) / 4
    /// assert_eq!((bias("globe"), bias("northern extratropics"), bias("tropics")), (6.25, 3.5, 9.0));
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn of_cells(
        channels: &[impl AsRef<str>],
        weights: &[f64],
        lat: &[f64],
        lon: &[f64],
        regions: Vec<Region>,
    ) -> Result<Self> {
        check_weights(NAME, weights, [("latitudes", lat), ("longitudes", lon)])?;
        let evaluation = |region: &Region| {
            let inside = region.rows(lat).into_iter().zip(region.columns(lon));
            let cells = weights.iter().zip(inside);
            let cells: Vec<f64> = cells
                .map(|(weight, (row, column))| weight * row * column)
                .collect();
            Evaluation::new(&[1.0], channels.len()).with_columns(&cells)
        };
        let evaluations = regions.iter().map(evaluation);
        let names = regions.iter().map(|region| region.name.clone());
        Ok(Self {
            channels: channels.iter().map(|name| name.as_ref().into()).collect(),
            regions: names.zip(evaluations).collect(),
            leads: BTreeMap::new(),
        })
    }

    /// Adds forecasts `[batch, channels, lat, lon]`, in physical units, for a lead in hours, to every
    /// region as [`Evaluation::add_masked`] does. Regions with the same longitudes share one pass
    /// over the fields, and all share one message.
    ///
    /// # Errors
    /// The lead is not finite; [`Evaluation::add_masked`] fails.
    pub fn add<X: Field<4>>(
        &mut self,
        lead: f64,
        forecast: X,
        truth: X,
        climatology: Option<X>,
        mask: Option<X>,
    ) -> Result<()> {
        self.update(lead, |evaluations| {
            add_fields(evaluations, [forecast, truth], climatology, mask)
        })
    }

    /// Adds ensembles for a lead in hours to every region, as [`Evaluation::add_ensemble`] does,
    /// with one message.
    ///
    /// # Errors
    /// The lead is not finite; [`Evaluation::add_ensemble`] fails.
    pub fn add_ensemble<X: Field<5>>(
        &mut self,
        lead: f64,
        ensemble: X,
        truth: X,
        mask: Option<X>,
    ) -> Result<()> {
        self.update(lead, |evaluations| {
            add_ensembles(evaluations, ensemble, truth, mask)
        })
    }

    /// Adds to the evaluations of all regions for a lead; an error leaves them as they were.
    fn update(
        &mut self,
        lead: f64,
        add: impl FnOnce(&mut [Evaluation]) -> Result<()>,
    ) -> Result<()> {
        let key = key(NAME, lead)?;
        let empty = self.regions.iter().map(|(_, empty)| empty.clone());
        let found = self.leads.get(&key).cloned();
        let mut evaluations = found.unwrap_or_else(|| empty.collect());
        add(&mut evaluations)?;
        self.leads.insert(key, evaluations);
        Ok(())
    }

    /// Returns the scores of every channel, lead and region, as a list that serializes to JSON.
    pub fn scores(&self) -> Vec<ScoreRow> {
        let mut all = Vec::new();
        for (lead, evaluations) in &self.leads {
            for ((region, _), evaluation) in self.regions.iter().zip(evaluations) {
                for (channel, metrics) in self.channels.iter().zip(evaluation.metrics()) {
                    let (variable, level) = match channel.rsplit_once('@') {
                        Some((variable, level)) => (variable, level.parse().ok()),
                        None => (channel.as_str(), None),
                    };
                    all.push(ScoreRow {
                        channel: channel.clone(),
                        variable: variable.into(),
                        level,
                        lead: hours(*lead),
                        region: region.clone(),
                        metrics,
                    });
                }
            }
        }
        all
    }

    /// Returns the metrics of a channel for a lead in hours in a region, if there are any.
    pub fn metrics(&self, channel: &str, lead: f64, region: &str) -> Option<Metrics> {
        let evaluations = self.leads.get(&key(NAME, lead).ok()?)?;
        let region = self.regions.iter().position(|(name, _)| name == region)?;
        let channel = self.channels.iter().position(|name| name == channel)?;
        evaluations[region].metrics().get(channel).copied()
    }
}

/// Milliseconds per hour.
const MILLISECONDS: f64 = 3.6e6;

/// Converts a finite lead in hours to a key.
pub(crate) fn key(operator: &str, lead: f64) -> Result<i64> {
    if lead.is_finite() {
        return Ok((lead * MILLISECONDS).round() as i64);
    }
    let message = format!("a lead of {lead} hours; expected a number");
    Err(Error::operator(operator, message))
}

/// Requires as many weights as coordinates of each name.
pub(crate) fn check_weights<const N: usize>(
    operator: &str,
    weights: &[f64],
    coordinates: [(&str, &[f64]); N],
) -> Result<()> {
    let count = weights.len();
    let differs = |(_, values): &(&str, &[f64])| values.len() != count;
    let Some((name, values)) = coordinates.into_iter().find(differs) else {
        return Ok(());
    };
    let message = format!(
        "{count} weights for {} {name}; expected one for each",
        values.len()
    );
    Err(Error::operator(operator, message))
}

/// Converts a key to a lead in hours.
pub(crate) fn hours(key: i64) -> f64 {
    key as f64 / MILLISECONDS
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use burn::tensor::{Device, Tensor};
    use halocline_core::{Launcher, Shard, ShardTensor, Traffic};

    use super::*;

    /// The other rank adds a field instead.
    #[test]
    fn an_ensemble_that_fails_adds_nothing() {
        let forecasts = Mutex::new(None);
        let run = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let mut evaluation = Evaluation::new(&[1.0; 4], 1);
            if world.rank() == 1 {
                let field = ShardTensor::<4>::ones([1, 1, 4, 3], &mesh, &[Shard(2)])?;
                evaluation.add_masked(field.clone(), field, None, None)?;
                return Err(Error::other("the power is off"));
            }
            let ensemble = ShardTensor::<5>::ones([2, 1, 1, 4, 3], &mesh, &[Shard(3)])?;
            let truth = ensemble.clone().narrow(0, 0, 1);
            let added = evaluation.add_ensemble(ensemble, truth, None);
            *forecasts.lock().unwrap() = Some(evaluation.metrics()[0].forecasts);
            added
        });
        assert!(run.is_err());
        assert_eq!(forecasts.into_inner().unwrap(), Some(0));
    }

    #[test]
    fn all_regions_share_one_message() {
        let messages = Launcher::local(2).check(false).collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let field = ShardTensor::<4>::ones([1, 2, 4, 3], &mesh, &[Shard(2)])?;
            let lat = [60.0, 10.0, -10.0, -60.0];
            let globe = Region::standard();
            let mut scores = Verification::new(&["z", "t"], &[1.0; 4], &lat, &[0.0; 3], globe)?;
            let before = world.comm_stats();
            scores.add(6.0, field.clone(), field, None, None)?;
            let fields = world.comm_stats().since(&before);
            let ensemble = ShardTensor::<5>::ones([2, 1, 2, 4, 3], &mesh, &[Shard(3)])?;
            let truth = ensemble.clone().narrow(0, 0, 1);
            let before = world.comm_stats();
            scores.add_ensemble(6.0, ensemble, truth, None)?;
            let ensembles = world.comm_stats().since(&before);
            Ok([fields, ensembles].map(|sent| sent.of(Traffic::Reduce).messages))
        });
        assert_eq!(messages.unwrap(), [[1, 1], [1, 1]]);
    }

    #[test]
    fn regions_may_lie_across_the_date_line() {
        let columns = |lon| Region::new("a", [0.0, 1.0], lon).columns(&[165.0, 175.0, 185.0, 0.0]);
        for bounds in [[170.0, -170.0], [170.0, 190.0], [-190.0, -170.0]] {
            assert_eq!(columns(bounds), [0.0, 1.0, 1.0, 0.0], "{bounds:?}");
        }
        for bounds in [[-180.0, 180.0], [0.0, 360.0]] {
            assert_eq!(columns(bounds), [1.0; 4], "{bounds:?}");
        }
        let rows = Region::new("a", [20.0, -20.0], [0.0, 360.0]).rows(&[30.0, 20.0, 0.0, -30.0]);
        assert_eq!(rows, [0.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn regions_hold_their_cells_and_leads_are_apart() {
        let (lat, lon) = ([60.0, 0.0, -60.0], [10.0, 190.0]);
        let europe = Region::new("europe", [35.0, 75.0], [-12.5, 42.5]);
        let regions = vec![Region::standard()[0].clone(), europe];
        let weights = [0.5, 1.0, 0.5];
        let mut scores = Verification::new(&["t"], &weights, &lat, &lon, regions).unwrap();
        let field = |values: [[f32; 2]; 3]| {
            Tensor::<2>::from_floats(values, &Device::default()).reshape([1, 1, 3, 2])
        };
        let truth = field([[0.0; 2]; 3]);
        let forecast = field([[4.0, 1.0], [1.0, 1.0], [1.0, 1.0]]);
        scores
            .add(6.0, forecast.clone(), truth.clone(), None, None)
            .unwrap();
        scores
            .add(12.0, forecast * 2.0, truth.clone(), None, None)
            .unwrap();
        let bias = |lead, region| scores.metrics("t", lead, region).unwrap().bias;
        // The weights are 0.5 0.5 1 1 0.5 0.5, and the first cell is 3 larger than the others.
        assert!((bias(6.0, "globe") - (1.0 + 3.0 * 0.5 / 4.0)).abs() < 1e-6);
        assert!((bias(6.0, "europe") - 4.0).abs() < 1e-6);
        assert!((bias(12.0, "europe") - 8.0).abs() < 1e-6);
        assert!(scores.metrics("t", 18.0, "globe").is_none());
        let json = serde_json::to_value(scores.scores()).unwrap();
        assert_eq!(json[1]["region"], "europe");
        assert_eq!(json[1]["rmse"], 4.0);
        assert!(json[1]["crps"].is_null());
        let truth = || truth.clone();
        let error = scores
            .add(f64::NAN, truth(), truth(), None, None)
            .unwrap_err();
        assert!(error.to_string().contains("a lead of NaN hours"));
        assert!(scores.metrics("t", f64::NAN, "globe").is_none());
        // A failure adds no lead.
        let other = truth().narrow(2, 0, 2);
        assert!(scores.add(18.0, truth(), other, None, None).is_err());
        assert!(scores.metrics("t", 18.0, "globe").is_none());
    }

    #[test]
    fn cells_may_be_rows_and_columns() {
        let (lat, lon) = ([60.0, 50.0, 0.0, 30.0, 10.0, -10.0], [0.0; 6]);
        let weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        for sizes in [[1, 1], [2, 2]] {
            let run = Launcher::local(sizes[0] * sizes[1]).run(|world| {
                let mesh = world.mesh([("lat", sizes[0]), ("lon", sizes[1])])?;
                let globe = Region::standard();
                let mut scores = Verification::of_cells(&["t"], &weights, &lat, &lon, globe)?;
                let ones = ShardTensor::<4>::ones([1, 1, 2, 3], &mesh, &[Shard(2), Shard(3)])?;
                // Values from 1 to 6.
                let field = ones.profile(2, &[1.0, 4.0]) + ones.profile(3, &[0.0, 1.0, 2.0]);
                let truth = field.clone() * 0.0;
                scores.add(6.0, field, truth, None, None)?;
                let bias = |region| scores.metrics("t", 6.0, region).expect("was added").bias;
                assert!((bias("globe") - 91.0 / 21.0).abs() < 1e-12);
                let expected = (1.0 + 2.0 * 2.0 + 4.0 * 4.0) / 7.0;
                assert!((bias("northern extratropics") - expected).abs() < 1e-12);
                Ok(())
            });
            run.unwrap();
        }
        // Another number of cells.
        let cells = &weights[..4];
        let globe = Region::standard();
        let mut scores =
            Verification::of_cells(&["t"], cells, &lat[..4], &lon[..4], globe).unwrap();
        let field = Tensor::<4>::zeros([1, 1, 2, 3], &Device::default());
        let added = scores.add(6.0, field.clone(), field, None, None);
        assert!(added.is_err());
    }

    /// Squares of these errors overflow f16.
    #[test]
    fn scores_of_half_precision_are_those_of_f32() {
        let field = |value: f32| {
            let options = (&Default::default(), burn::tensor::DType::F16);
            Tensor::<4>::full([1, 1, 2, 3], value, options)
        };
        let globe = || vec![Region::standard()[0].clone()];
        let lat = [45.0, -45.0];
        let mut scores = Verification::new(&["z"], &[1.0; 2], &lat, &[0.0; 3], globe()).unwrap();
        scores
            .add(6.0, field(300.0), field(0.0), None, Some(field(1.0)))
            .unwrap();
        assert_eq!(scores.metrics("z", 6.0, "globe").unwrap().rmse, 300.0);
    }

    #[test]
    fn every_row_and_cell_has_a_weight() {
        let (lat, lon) = ([45.0, 0.0, -45.0], [0.0; 2]);
        let (rows, cells) = (&[1.0; 2], &[1.0; 3]);
        let rows = Verification::new(&["z"], rows, &lat, &lon, Region::standard());
        let error = rows.unwrap_err().to_string();
        assert!(error.contains("2 weights for 3 latitudes"), "{error}");
        let cells = Verification::of_cells(&["z"], cells, &lat, &lon, Region::standard());
        let error = cells.unwrap_err().to_string();
        assert!(error.contains("3 weights for 2 longitudes"), "{error}");
    }
}
