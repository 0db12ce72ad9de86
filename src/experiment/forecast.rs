//! Forecasts from states of the data.

use std::path::{Path, PathBuf};

use halocline_core::{Error, RandomKey, Result, ShardTensor};
use halocline_io::{
    Existing, ForecastWriter, OutputConfig, OutputFormat, Period, Progress, parse_time,
};
use halocline_models::perturbed;
use halocline_ops::prelude::*;

use super::config::ForecastConfig;
use super::network::FieldModel;
use super::setup::{Experiment, States};

/// One step of a forecast.
pub(super) struct Step {
    /// Its number, from 1.
    pub(super) number: usize,
    /// Its time, in seconds since 1970-01-01 UTC.
    pub(super) time: f64,
    /// The state of the data at that time.
    pub(super) state: Option<usize>,
    /// The targets in their units, `[members, targets, lat, lon]`; NaN where the start has no value.
    pub(super) fields: ShardTensor<4>,
}

impl Experiment {
    /// Forecasts from a date, or from each state of the test period, and writes a Zarr store for each, or
    /// with `.nc` in its name a NetCDF file. Returns the paths.
    ///
    /// From a date the output is `path`; else `path` is the folder of outputs, each named by its date.
    /// Beyond the end of the data, forcings are computed channels, constants, and channels without a time.
    ///
    /// # Errors
    /// A date without a state; an experiment without a test period; an output that is there already;
    /// forcings that end before the forecast; a failure of files or communication.
    pub fn forecast(
        &self,
        model: &FieldModel,
        from: Option<&str>,
        config: &ForecastConfig,
        path: &Path,
    ) -> Result<Vec<PathBuf>> {
        let period = match from {
            Some(_) => Period::default(),
            None => self.test_period()?.clone(),
        };
        config.check()?;
        let states = self.states(&period)?;
        let starts = match from {
            Some(date) => vec![self.start(&states, date)?],
            None => (0..states.loader.samples()).collect(),
        };
        let progress = Progress::new(self.world.rank(), "forecast", starts.len() * config.steps);
        let mut written = Vec::new();
        for &start in &starts {
            let time = states.timeline.states[start].1;
            let path = match from {
                Some(_) => path.to_path_buf(),
                None => path.join(file_name(&self.data.calendar.date(time))),
            };
            self.write(model, &states, start, config, &path, &progress)?;
            written.push(path);
        }
        progress.finish();
        Ok(written)
    }

    fn write(
        &self,
        model: &FieldModel,
        states: &States,
        start: usize,
        config: &ForecastConfig,
        path: &Path,
        progress: &Progress,
    ) -> Result<()> {
        let folder = path.parent().filter(|_| self.world.is_root());
        folder.map_or(Ok(()), std::fs::create_dir_all)?;
        self.world.barrier()?;
        let format = match path.extension().is_some_and(|extension| extension == "nc") {
            true => OutputFormat::NetCdf3,
            false => OutputFormat::Zarr3,
        };
        let output = OutputConfig::new()
            .with_format(format)
            .with_existing(Existing::Reject);
        let begin = states.timeline.states[start].1;
        let (grid, channels) = (&self.data.grid, &self.data.described);
        let mut writer = ForecastWriter::create(&self.mesh, path, grid, channels, begin, &output)?
            .with_calendar(self.data.calendar);
        self.steps(model, states, start, config, |step| {
            writer.append((step.time - begin) / 3600.0, &step.fields)?;
            progress.advance();
            Ok(())
        })?;
        writer.finish()
    }

    /// The period of scores.
    pub(super) fn test_period(&self) -> Result<&Period> {
        let period = self.config.data.test.as_ref();
        period.ok_or_else(|| {
            Error::other("data.test: none; expected the period of forecasts and scores")
        })
    }

    /// The state of a date.
    fn start(&self, states: &States, date: &str) -> Result<usize> {
        let time = parse_time(date, self.data.calendar)?;
        let found = states.timeline.find(time);
        found.ok_or_else(|| {
            let name = |state: Option<&(usize, f64)>| {
                state.map_or(String::new(), |(_, time)| self.data.calendar.date(*time))
            };
            let all = &states.timeline.states;
            let (first, last) = (name(all.first()), name(all.last()));
            Error::other(format!(
                "no state of {date}; the data are from {first} to {last}"
            ))
        })
    }

    /// Calls a function with each step of a forecast, which holds one step in memory.
    pub(super) fn steps(
        &self,
        model: &FieldModel,
        states: &States,
        start: usize,
        config: &ForecastConfig,
        mut each: impl FnMut(Step) -> Result<()>,
    ) -> Result<()> {
        let (loader, channels) = (&states.loader, &self.data.channels);
        let begin = states.timeline.states[start].1;
        let batch = loader.load(&[start])?;
        let mut x = self.seen_inputs(batch.input.inner(), &[begin])?;
        let mask = batch.mask.map(ShardTensor::inner);
        // Where the start has no value, such as on land, neither has the forecast.
        let missing = mask.clone().map(|mask| {
            let zero = mask.clone() * 0.0;
            zero.clone()
                .mask_where(mask.lower_elem(0.5), zero + f64::NAN)
        });
        if config.members > 1 {
            let key = RandomKey::new(self.config.seed, ("forecast", begin.to_bits()));
            let names = self.mesh.shape().names();
            let axis = names
                .iter()
                .find(|name| *name == "member")
                .map(|name| &name[..]);
            x = perturbed(x, config.members, config.noise, key, axis)?;
        }
        let feedback = match config.steps {
            1 => Vec::new(),
            _ => channels.feedback()?,
        };
        let mut time = begin;
        for number in 1..=config.steps {
            let given = match loader.forcing(start, time)? {
                // The same for all members.
                Some(forcing) => {
                    let zero = x.clone().narrow(1, 0, 1) * 0.0;
                    ShardTensor::cat(vec![x.clone(), zero + forcing.inner()], 1)
                }
                None => x.clone(),
            };
            let y = given.apply(model);
            let state;
            (time, state) = states.timeline.ahead(start, number);
            let mut fields = self.predicted(y.clone(), time)?;
            if let Some(missing) = &missing {
                fields = fields + missing.clone();
            }
            each(Step {
                number,
                time,
                state,
                fields,
            })?;
            if number < config.steps {
                let y = match &mask {
                    Some(mask) => self.filled(y, mask.clone(), &[time])?,
                    None => y,
                };
                let (inputs, next) = (channels.inputs.len(), y.index_select(1, &feedback));
                x = match x.dims()[1] - inputs {
                    0 => next,
                    kept => ShardTensor::cat(vec![x.narrow(1, inputs, kept), next], 1),
                };
            }
        }
        Ok(())
    }
}

/// The name of the output of a date such as `2018-01-01 06:00:00`.
fn file_name(date: &str) -> String {
    format!(
        "{}.zarr",
        date[..date.len().min(16)]
            .replace(' ', "T")
            .replace(':', "")
    )
}
