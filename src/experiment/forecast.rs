//! Forecasts from states of the data.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use halocline_core::{Error, RandomKey, Result, ShardTensor};
use halocline_io::{
    Batch, Calendar, Compression, Existing, FieldLoader, ForecastWriter, OutputConfig,
    OutputFormat, Period, Progress, parse_time,
};
use halocline_models::{next_input, perturbed};
use halocline_ops::prelude::*;

use super::forecast_config::ForecastConfig;
use super::member_groups::apply_to_members;
use super::network::{FieldModel, OwnNetwork};
use super::outputs::Output;
use super::setup::{Experiment, Files, States, missing};
use crate::root::on_root;

/// One step of a forecast.
pub(super) struct Step {
    /// Number of the step, from 1.
    pub(super) number: usize,
    /// Time of the step, in seconds since 1970-01-01 UTC.
    pub(super) time: f64,
    /// State of the data at that time.
    pub(super) state: Option<usize>,
    /// Targets in their units, `[members, targets, lat, lon]`; an input is NaN where the start has
    /// no value.
    pub(super) fields: ShardTensor<4>,
}

impl<N: OwnNetwork> Experiment<N> {
    /// Makes forecasts from a date, or from each state of the test period or of
    /// [other files](Self::of_files), apart from those that
    /// [`every_hours`](ForecastConfig::every_hours) or [`at_hours`](ForecastConfig::at_hours) leave
    /// out, and writes a Zarr store for each. Returns the paths that were written.
    ///
    /// From a date, the output is `path`, a NetCDF file if it ends in `.nc`. Otherwise `path` is
    /// the folder of the outputs, each named by its date. Existing outputs are complete, and are
    /// kept unless `existing` replaces them, so that an interrupted run can go on.
    ///
    /// Beyond the end of the data, the forcings available are computed channels, constants,
    /// channels without a time, and masks, which are those of the first state. Without a date,
    /// states whose forecasts need others there are left out.
    ///
    /// # Errors
    /// A date without a state; an experiment without a test period; without a date, no state at the
    /// hours of the configuration; from a date, an output that exists and is not to be replaced;
    /// forcings or a boundary that end before the forecast from the date or, without a date, before
    /// that from every state; a folder with forecasts of another configuration or, if
    /// [`trained`](Self::trained) loaded the model, of another checkpoint, unless `existing`
    /// replaces them all; a failure of files or communication.
    pub fn forecast(
        &self,
        model: &FieldModel<N>,
        from: Option<&str>,
        config: &ForecastConfig,
        path: &Path,
        existing: Existing,
    ) -> Result<Vec<PathBuf>> {
        config.check(self.config.data.noise_channels)?;
        self.check_output(path, from.is_some())?;
        let period = match from {
            Some(_) => Period::default(),
            None => self.scored()?,
        };
        let (states, rims) = (self.states(&period)?, self.rims(&period)?);
        let folder = self.output_folder(model, config, path, existing)?;
        let starts: Vec<Output> = match from {
            Some(date) => vec![(self.start(&states, date)?, path.into())],
            None => folder.begin(self.outputs(&states, config, path)?)?,
        };
        let progress = Progress::new(self.world.rank(), "forecast", starts.len() * config.steps);
        let sources = (&states, rims.as_ref());
        for (start, path) in &starts {
            self.write(model, sources, *start, config, (path, existing), &progress)?;
        }
        progress.finish();
        if from.is_none() {
            folder.finish()?;
        }
        Ok(starts.into_iter().map(|(_, path)| path).collect())
    }

    /// Returns the name, without its ending, of the output of a forecast from a date. It is the
    /// same for all spellings of the date.
    ///
    /// # Errors
    /// A text that is not a date of the calendar of the data.
    ///
    /// # Example
    /// ```no_run
    /// # use halocline::experiment::Experiment;
    /// # use halocline::prelude::*;
    /// # fn check(experiment: &Experiment) -> Result<()> {
    /// assert_eq!(experiment.output_stem("2018-01-01")?, "2018-01-01T0000");
    /// assert_eq!(experiment.output_stem("2018-01-01 00:00:00")?, "2018-01-01T0000");
    /// assert_eq!(experiment.output_stem("2018-01-01T00:00:00.10")?, "2018-01-01T000000.1");
    /// # Ok(())
    /// # }
    /// ```
    pub fn output_stem(&self, date: &str) -> Result<String> {
        let time = parse_time(date, self.data.calendar)?;
        Ok(file_stem(time, self.data.calendar))
    }

    /// Returns the outputs in a folder of the forecasts from each start, without those from states
    /// whose forcings or boundaries, which are read from the files, end before the forecast.
    ///
    /// # Errors
    /// No start; none whose forcings and boundaries reach as far.
    fn outputs(
        &self,
        states: &States,
        config: &ForecastConfig,
        folder: &Path,
    ) -> Result<Vec<Output>> {
        let timeline = &states.timeline;
        let stems = file_stems(&timeline.states, self.data.calendar);
        let steps = self.read_steps(config.steps);
        let reaches =
            |start: &usize| (1..=steps).all(|step| timeline.ahead(*start, step).1.is_some());
        let starts = timeline.starts(config)?;
        let (starts, short): (Vec<usize>, Vec<usize>) = starts.into_iter().partition(reaches);
        if self.world.is_root() && !short.is_empty() {
            eprintln!(
                "forecast: {} of {} states are left out, whose forcings or boundaries end before the forecast",
                short.len(),
                short.len() + starts.len()
            );
        }
        if starts.is_empty() {
            return Err(Error::other(format!(
                "forecast.steps: {}, and no state whose forcings or boundaries reach as far; expected fewer steps, or \
                 later data",
                config.steps
            )));
        }
        let output = |start: usize| (start, folder.join(format!("{}.zarr", stems[start])));
        Ok(starts.into_iter().map(output).collect())
    }

    fn write(
        &self,
        model: &FieldModel<N>,
        (states, rims): (&States, Option<&FieldLoader>),
        start: usize,
        config: &ForecastConfig,
        (path, existing): (&Path, Existing),
        progress: &Progress,
    ) -> Result<()> {
        on_root(&self.world, || {
            path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            Ok(())
        })?;
        let format = if path.extension().is_some_and(|extension| extension == "nc") {
            OutputFormat::NetCdf3
        } else {
            OutputFormat::Zarr3
        };
        let compression = match config.compression {
            0 => Compression::None,
            level => Compression::Zstd { level: level as u8 },
        };
        let output = OutputConfig::new()
            .with_format(format)
            .with_compression(compression)
            .with_existing(existing);
        let begin = states.timeline.states[start].1;
        let (grid, channels) = (&self.data.grid, &self.data.described);
        let mut writer = ForecastWriter::create(&self.mesh, path, grid, channels, begin, &output)?
            .with_calendar(self.data.calendar);
        let read = |state: usize| states.loader.load(&[state]);
        self.steps(model, states, read(start)?, config, read, |step| {
            let fields = self.with_rim_of_data(rims, step.state, step.fields)?;
            writer.append((step.time - begin) / 3600.0, &fields)?;
            progress.advance();
            Ok(())
        })?;
        writer.finish()
    }

    /// Returns the period of forecasts and scores: the test period, or all times of other files.
    pub(super) fn scored(&self) -> Result<Period> {
        if self.files == Files::Others {
            return Ok(Period::default());
        }
        self.config.data.test.clone().ok_or_else(|| {
            Error::other("data.test: none; expected the period of forecasts and scores")
        })
    }

    /// Returns the state at a date.
    fn start(&self, states: &States, date: &str) -> Result<usize> {
        let time = parse_time(date, self.data.calendar)?;
        let found = states.timeline.find(time);
        found.ok_or_else(|| {
            let near = states.timeline.near(time, self.config.data.history);
            Error::other(format!("no state of {date}; {near}"))
        })
    }

    /// Calls a function with each step of a forecast from a state, which is a batch of one. `read`
    /// returns a state of the data, for the boundary of a region. Holds one step in memory, and the
    /// hidden fields of the members that are computed at once.
    pub(super) fn steps(
        &self,
        model: &FieldModel<N>,
        states: &States,
        batch: Batch,
        config: &ForecastConfig,
        read: impl Fn(usize) -> Result<Batch>,
        mut each: impl FnMut(Step) -> Result<()>,
    ) -> Result<()> {
        let (loader, start) = (&states.loader, batch.samples[0]);
        let begin = states.timeline.states[start].1;
        let mut x = batch.input.inner();
        let present = batch.input_mask.map(ShardTensor::inner);
        let mask = present.as_ref().map(|present| self.of_targets(present));
        // Where the start has no value, such as on land, the forecast has none either.
        let gaps = mask.clone().map(missing);
        let samples = x.clone().narrow(1, 0, 1);
        if config.members > 1 {
            let key = RandomKey::new(self.config.seed, ("forecast", begin.to_bits()));
            x = perturbed(x, config.members, config.noise, key, self.member_axis())?;
            if let Some(present) = present {
                x = x * present;
            }
        }
        x = self.seen_inputs(x, &[begin])?;
        let feedback = self.data.feedback(config.steps)?;
        let mut time = begin;
        for number in 1..=config.steps {
            let given = match loader.forcing(start, time)? {
                // The forcing is the same for all members.
                Some(forcing) => {
                    let zero = x.clone().narrow(1, 0, 1) * 0.0;
                    ShardTensor::cat(vec![x.clone(), zero + forcing.inner()], 1)
                }
                None => x.clone(),
            };
            let stream = ("noise channels", begin.to_bits(), number);
            let key = RandomKey::new(self.config.seed, stream);
            let given = self.with_noise_channels(given, &samples, config.members, key)?;
            let y = apply_to_members(model, given, config.members_at_once);
            let state;
            (time, state) = states.timeline.ahead(start, number);
            let y = self.bounded(y, &[time])?;
            let y = self.with_boundary(y, || self.given(&read, time, state))?;
            let mut fields = self.bounded_in_units(self.predicted(y.clone(), time)?);
            if let Some(gaps) = &gaps {
                fields = fields + gaps.clone();
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
                x = next_input(x, y, &feedback)?;
            }
        }
        Ok(())
    }
}

/// Returns the names, without their endings, of the outputs of forecasts from these states. Times
/// are rounded to seconds, unless states of one time axis would then share a name.
fn file_stems(states: &[(usize, f64)], calendar: Calendar) -> Vec<String> {
    let rounded = |(_, time): &(usize, f64)| file_stem(time.round(), calendar);
    let mut stems: Vec<String> = states.iter().map(rounded).collect();
    let mut pairs = states.windows(2).zip(stems.windows(2));
    if pairs.any(|(states, stems)| states[0].0 == states[1].0 && stems[0] == stems[1]) {
        let exact = |(_, time): &(usize, f64)| file_stem(*time, calendar);
        stems = states.iter().map(exact).collect();
    }
    // Runs that overlap have several states of one date.
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for stem in &stems {
        *counts.entry(stem).or_default() += 1;
    }
    let name = |(stem, (series, _)): (&String, &(usize, f64))| match counts[&stem[..]] {
        1 => stem.clone(),
        _ => format!("{stem}-{series}"),
    };
    stems.iter().zip(states).map(name).collect()
}

/// Returns the name, without its ending, of the output for a time, such as `2018-01-01T0600`.
/// Seconds and microseconds follow if they are not zero.
fn file_stem(time: f64, calendar: Calendar) -> String {
    let micros = (time * 1e6).round() as i64;
    let (second, micros) = (micros.div_euclid(1_000_000), micros.rem_euclid(1_000_000));
    let date = calendar.date(second as f64);
    let fraction = format!("{date}.{micros:06}");
    let date = match micros {
        0 => date.strip_suffix(":00").unwrap_or(&date),
        _ => fraction.trim_end_matches('0'),
    };
    date.replace(' ', "T").replace(':', "")
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use halocline_core::Launcher;

    use super::*;
    use crate::experiment::fixture::{config_in, wave, write_fields, write_waves};

    #[test]
    fn a_target_that_is_no_input_may_have_no_value_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        write_fields(folder.path(), |time, cell| {
            let (channel, row, column) = cell;
            match (channel, time) {
                (0, 0) => f32::NAN,
                (1, _) if row == 2 && column == 3 => f32::NAN,
                _ => wave(time, cell),
            }
        });
        let data = "inputs = [\"t2m\"]\ntargets = [\"t2m\", \"sst\"]\nmissing = \"fill\"";
        let config = config_in(folder.path(), data, "");
        let run = Launcher::local(1).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            let model = experiment.model()?.valid();
            let states = experiment.states(&Period::default())?;
            let read = |state: usize| states.loader.load(&[state]);
            experiment.steps(&model, &states, read(0)?, &config.forecast, read, |step| {
                let values = step.fields.local().clone().into_data();
                let without = values.iter::<f32>().filter(|value| value.is_nan());
                assert_eq!(without.count(), 1);
                Ok(())
            })
        });
        run.unwrap();
    }

    #[test]
    fn stores_have_the_compression_of_the_configuration() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "");
        let run = Launcher::local(1).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            let model = experiment.model()?.valid();
            for (compression, told) in [(0, None), (9, Some("\"clevel\": 9"))] {
                let config = ForecastConfig {
                    compression,
                    ..ForecastConfig::default()
                };
                let path = folder.path().join(format!("{compression}.zarr"));
                let from = Some("1970-01-01");
                experiment.forecast(&model, from, &config, &path, Existing::Reject)?;
                let text = std::fs::read_to_string(path.join("t2m/zarr.json")).unwrap();
                match told {
                    Some(told) => assert!(text.contains(told), "{text}"),
                    None => assert!(!text.contains("clevel"), "{text}"),
                }
            }
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn forecasts_from_different_states_have_different_names() {
        let stems = |states: &[(usize, f64)]| file_stems(states, Calendar::Gregorian);
        let tenths = [9, 10, 11].map(|step| (0, 0.1 * f64::from(step)));
        let on_day = |clock: &str| format!("1970-01-01T{clock}");
        let expected = ["000000.9", "000001", "000001.1"].map(on_day);
        assert_eq!(stems(&tenths), expected);
        // A time that its file rounded, and runs that overlap.
        let hours = [(0, 21600.0 - 1e-3), (0, 43200.0), (1, 43200.0)];
        assert_eq!(stems(&hours), ["0600", "1200-0", "1200-1"].map(on_day));
    }
}
