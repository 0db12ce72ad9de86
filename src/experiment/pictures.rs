//! Pictures of scores and of one forecast.

use std::path::{Path, PathBuf};
use std::time::Duration;

use halocline_core::{Error, Result, ShardTensor};
use halocline_io::ndarray::{Array2, Array3, Array4, Axis, s};
use halocline_models::Power;
use halocline_ops::prelude::*;

use super::errors::failed;
use super::forecast_config::ForecastConfig;
use super::network::{FieldModel, OwnNetwork};
use super::score::{Report, Row};
use super::setup::{Experiment, States, missing};
use crate::plot::{Chart, Map, Raster, animate, save_charts, save_maps};

/// Largest number of channels that have pictures.
const MOST: usize = 6;
/// Time for which an animation shows a step.
const DELAY: Duration = Duration::from_millis(500);

/// Step of the forecast that is drawn: lead in hours, and forecast and truth `[channel, lat, lon]`.
type Frame = (f64, [Array3<f32>; 2]);

impl<N: OwnNetwork> Experiment<N> {
    /// Draws pictures of the first six channels into a folder: scores over lead, compared with
    /// persistence and climatology, and the spectrum at the last lead (`t2m.png`); maps of
    /// forecast, truth and difference at the last step of the first forecast (`t2m_map.png`); and
    /// all its steps as an animation (`t2m.gif`). Grids without
    /// [positions](halocline_io::Grid::has_positions) have no maps. Returns the paths on rank 0, and
    /// none on the others.
    ///
    /// # Errors
    /// A setting of the forecast out of range; an experiment without a test period; a folder that
    /// cannot be written; a failure of communication.
    ///
    /// # Example
    /// ```no_run
    /// # use halocline::experiment::{CheckpointChoice, Experiment, ExperimentConfig};
    /// # use halocline::prelude::*;
    /// # fn draw(experiment: &Experiment, config: &ExperimentConfig) -> Result<()> {
    /// let model = experiment.trained(CheckpointChoice::Best)?;
    /// let report = experiment.score(&model, &config.forecast)?;
    /// let drawn = experiment.save_pictures(&model, &config.forecast, &report, "pictures")?;
    /// println!("{drawn:?}");
    /// # Ok(())
    /// # }
    /// ```
    pub fn save_pictures(
        &self,
        model: &FieldModel<N>,
        config: &ForecastConfig,
        report: &Report,
        folder: impl AsRef<Path>,
    ) -> Result<Vec<PathBuf>> {
        config.check(self.config.data.noise_channels)?;
        let states = self.states(&self.scored()?)?;
        let reaches = |start: usize, steps| states.timeline.ahead(start, steps).1.is_some();
        let all = states.timeline.starts(config)?;
        let starts = || all.iter().copied();
        // The first forecast that has a truth at its end, or else at its first step.
        let whole = starts().find(|start| reaches(*start, config.steps));
        let start = whole.or_else(|| starts().find(|start| reaches(*start, 1)));
        let config = start.and_then(|start| self.with_truth(config, &states, start));
        let frames = match start.zip(config) {
            Some((start, config)) if self.data.grid.has_positions() => {
                self.frames(model, &config, &states, start)?
            }
            _ => Vec::new(),
        };
        if !self.world.is_root() {
            return Ok(Vec::new());
        }
        let cells = self.data.grid.cells().filter(|_| !frames.is_empty());
        let raster = cells.map(Raster::new).transpose()?;
        let folder = folder.as_ref();
        std::fs::create_dir_all(folder).map_err(failed(folder))?;
        let mut drawn = Vec::new();
        for channel in 0..self.data.described.len().min(MOST) {
            let name = &self.data.described[channel].name;
            let mut path = |ending: &str| {
                drawn.push(folder.join(format!("{}{ending}", name.replace(['/', '\\'], "_"))));
                drawn[drawn.len() - 1].clone()
            };
            save_charts(path(".png"), &report.charts(name))?;
            let maps = frames
                .iter()
                .map(|frame| self.maps(channel, raster.as_ref(), frame));
            let maps: Vec<Vec<Map>> = maps.collect::<Result<_>>()?;
            if let Some(last) = maps.last() {
                save_maps(path("_map.png"), last)?;
                animate(path(".gif"), &maps, DELAY)?;
            }
        }
        Ok(drawn)
    }

    /// Returns the steps of a forecast that have a truth, on rank 0.
    fn frames(
        &self,
        model: &FieldModel<N>,
        config: &ForecastConfig,
        states: &States,
        start: usize,
    ) -> Result<Vec<Frame>> {
        let begin = states.timeline.states[start].1;
        let mut frames = Vec::new();
        let drawn = |field: ShardTensor<4>| field.narrow(1, 0, self.data.described.len().min(MOST));
        let read = |state: usize| states.loader.load(&[state]);
        self.steps(model, states, read(start)?, config, read, |step| {
            let Some(state) = step.state else {
                return Ok(());
            };
            let (mut truth, mask) = self.truth(&read(state)?);
            if let Some(mask) = mask {
                truth = truth + missing(mask);
            }
            let forecast = self.whole(drawn(step.fields).mean_dims(&[0]).resolve())?;
            if let Some(pair) = forecast.zip(self.whole(drawn(truth))?) {
                frames.push(((step.time - begin) / 3600.0, pair.into()));
            }
            Ok(())
        })?;
        Ok(frames)
    }

    /// Gathers the values of a field `[1, channels, lat, lon]` on rank 0.
    fn whole(&self, field: ShardTensor<4>) -> Result<Option<Array3<f32>>> {
        let Some(whole) = field.gather_tensor(0)? else {
            return Ok(None);
        };
        let dims = whole.dims();
        let values = whole.into_data().convert::<f32>().try_to_vec::<f32>();
        let values = values.map_err(|error| Error::other(format!("picture: {error:?}")))?;
        let values = Array4::from_shape_vec(dims, values).map_err(Error::other)?;
        Ok(Some(values.index_axis_move(Axis(0), 0)))
    }

    /// Returns maps of forecast, truth and difference, of unstructured cells by their raster.
    fn maps(
        &self,
        channel: usize,
        raster: Option<&Raster>,
        (lead, fields): &Frame,
    ) -> Result<Vec<Map>> {
        let grid = raster.map_or(&self.data.grid, Raster::grid);
        let described = &self.data.described[channel];
        let unit = described.units.as_deref().unwrap_or("");
        let fields = fields
            .each_ref()
            .map(|field| field.slice(s![channel, .., ..]).to_owned())
            .map(|field| match raster {
                Some(raster) => raster.values(&field),
                None => field,
            });
        let [forecast, truth]: [Array2<f32>; 2] = fields;
        let title = |what: &str| format!("{}, {what} after {lead:.1} h", described.name);
        let difference = Map::difference(&title("forecast less truth"), grid, &forecast, &truth)?;
        // Both use the colour range of the truth.
        let values = truth.iter().filter(|value| value.is_finite());
        let (low, high) = values.fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), value| {
            (low.min(*value), high.max(*value))
        });
        let maps = [("forecast", forecast), ("truth", truth)].map(|(what, field)| {
            let map = Map::new(&title(what), grid, field)?.with_unit(unit);
            Ok(if low < high {
                map.with_range(f64::from(low), f64::from(high))
            } else {
                map
            })
        });
        let maps = maps.into_iter().collect::<Result<Vec<Map>>>()?;
        let all = maps.into_iter().chain([difference.with_unit(unit)]);
        Ok(if self.config.coastlines {
            all.collect()
        } else {
            all.map(Map::without_coastlines).collect()
        })
    }
}

impl Report {
    /// Returns the charts of a channel: RMSE and ACC over lead, CRPS and spread of ensembles, and
    /// the spectrum at the last lead.
    fn charts(&self, channel: &str) -> Vec<Chart> {
        let rows: Vec<_> = self
            .first_region()
            .filter(|row| row.score.channel == channel)
            .collect();
        let unit = rows.first().and_then(|row| row.units.as_deref());
        let unit = unit.map_or(String::new(), |unit| format!(" in {unit}"));
        let chart = |what: &str| Chart::new(channel, "lead time in hours", what);
        let points = |value: fn(&Row) -> f64| {
            let points = rows.iter().map(|row| (row.score.lead, value(row)));
            points.collect::<Vec<_>>()
        };
        let mut charts = vec![
            chart(&format!("RMSE{unit}"))
                .with_curve("forecast", points(|row| row.score.metrics.rmse))
                .with_curve("persistence", points(|row| row.rmse_persistence))
                .with_curve("climatology", points(|row| row.rmse_climatology)),
            chart("ACC").with_curve("forecast", points(|row| row.score.metrics.acc)),
        ];
        if rows.iter().any(|row| row.score.metrics.crps.is_finite()) {
            let ensemble = chart(&format!("of the ensemble{unit}"))
                .with_curve("CRPS", points(|row| row.score.metrics.crps))
                .with_curve("spread", points(|row| row.score.metrics.spread));
            charts.push(ensemble);
        }
        let region = self.spectra.first().map(|power| &power.region);
        let powers = self
            .spectra
            .iter()
            .filter(|power| power.channel == channel && Some(&power.region) == region);
        let last = powers.clone().map(|power| power.lead).fold(0.0, f64::max);
        let powers: Vec<_> = powers.filter(|power| power.lead == last).collect();
        if !powers.is_empty() {
            let values = |value: fn(&Power) -> f64| {
                powers.iter().map(|power| value(power)).collect::<Vec<_>>()
            };
            let title = format!("{channel} after {last:.1} h");
            let spectra = Chart::spectra(&title, "the square of the unit")
                .with_spectrum("forecast", &values(|power| power.forecast))
                .with_spectrum("truth", &values(|power| power.truth));
            charts.push(spectra);
        }
        charts
    }
}
