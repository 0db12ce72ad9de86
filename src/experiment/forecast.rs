//! Forecasts from states of the data.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use halocline_core::{Error, RandomKey, Result, ShardTensor};
use halocline_io::{
    Batch, Existing, FieldLoader, ForecastWriter, OutputConfig, OutputFormat, Period, Progress,
    parse_time,
};
use halocline_models::{next_input, perturbed};
use halocline_ops::prelude::*;

use super::config::ForecastConfig;
use super::errors::failed;
use super::network::FieldModel;
use super::record::write;
use super::setup::{Experiment, Files, States, missing};
use crate::root::on_root;

/// File in a folder of forecasts that records their configuration and checkpoint.
const NOTE: &str = "forecasts.json";

/// Index of a state, and the path of the forecast from it.
type Output = (usize, PathBuf);

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

impl Experiment {
    /// Makes forecasts from a date, or from each state of the test period or of
    /// [other files](Self::of_files), and writes a Zarr store for each. Returns the paths that were
    /// written.
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
    /// A date without a state; an experiment without a test period; from a date, an output that
    /// exists and is not to be replaced; forcings or a boundary that end before the forecast from
    /// the date or, without a date, before that from every state; a folder with forecasts of
    /// another configuration or, if [`trained`](Self::trained) loaded the model, of another
    /// checkpoint, unless `existing` replaces them all; a failure of files or communication.
    pub fn forecast(
        &self,
        model: &FieldModel,
        from: Option<&str>,
        config: &ForecastConfig,
        path: &Path,
        existing: Existing,
    ) -> Result<Vec<PathBuf>> {
        config.check()?;
        self.check_output(path, from.is_some())?;
        let period = match from {
            Some(_) => Period::default(),
            None => self.scored()?,
        };
        let (states, rims) = (self.states(&period)?, self.rims(&period)?);
        let note = self.note(model, config)?;
        let starts: Vec<Output> = match from {
            Some(date) => vec![(self.start(&states, date)?, path.into())],
            None => {
                let all = self.outputs(&states, config, path)?;
                self.begin(path, &note, existing, &all)?;
                self.left(all, existing)?
            }
        };
        let progress = Progress::new(self.world.rank(), "forecast", starts.len() * config.steps);
        let sources = (&states, rims.as_ref());
        for (start, path) in &starts {
            self.write(model, sources, *start, config, (path, existing), &progress)?;
        }
        progress.finish();
        if from.is_none() && existing == Existing::Replace {
            self.save_note(path, &note)?;
        }
        Ok(starts.into_iter().map(|(_, path)| path).collect())
    }

    /// Returns the outputs in a folder of the forecasts from each state, without those from states
    /// whose forcings or boundaries, which are read from the files, end before the forecast.
    ///
    /// # Errors
    /// No state whose forcings and boundaries reach as far.
    fn outputs(
        &self,
        states: &States,
        config: &ForecastConfig,
        folder: &Path,
    ) -> Result<Vec<Output>> {
        let timeline = &states.timeline;
        let stem = |(_, time): &(usize, f64)| file_stem(&self.data.calendar.date(*time));
        let stems: Vec<String> = timeline.states.iter().map(stem).collect();
        let steps = self.read_steps(config.steps);
        let reaches =
            |start: &usize| (1..=steps).all(|step| timeline.ahead(*start, step).1.is_some());
        let (starts, short): (Vec<usize>, Vec<usize>) = (0..stems.len()).partition(reaches);
        if self.world.is_root() && !short.is_empty() {
            eprintln!(
                "forecast: {} of {} states are left out, whose forcings or boundaries end before the forecast",
                short.len(),
                stems.len()
            );
        }
        if starts.is_empty() {
            return Err(Error::other(format!(
                "forecast.steps: {}, and no state whose forcings or boundaries reach as far; expected fewer steps, or \
                 later data",
                config.steps
            )));
        }
        // Runs that overlap have several states of one date.
        let mut counts: HashMap<&str, usize> = HashMap::new();
        for stem in &stems {
            *counts.entry(stem).or_default() += 1;
        }
        let output = |start: usize| {
            let (stem, (series, _)) = (&stems[start][..], timeline.states[start]);
            let name = match counts[stem] {
                1 => format!("{stem}.zarr"),
                _ => format!("{stem}-{series}.zarr"),
            };
            (start, folder.join(name))
        };
        Ok(starts.into_iter().map(output).collect())
    }

    /// Returns the outputs that are left to write: those that do not exist, or all that are to be
    /// replaced.
    fn left(&self, all: Vec<Output>, existing: Existing) -> Result<Vec<Output>> {
        let is_left =
            |(_, path): &Output| u8::from(existing == Existing::Replace || !path.exists());
        // Rank 0 decides, because a file system may show other ranks another state.
        let root = self.world.is_root();
        let flags = root.then(|| all.iter().map(is_left).collect());
        let left = self.world.broadcast_bytes(0, flags)?;
        let left = all.into_iter().zip(left).filter(|(_, left)| *left == 1);
        Ok(left.map(|(output, _)| output).collect())
    }

    /// Refuses an output that is one of the files that are read, and a folder of outputs that is a
    /// file or a store.
    fn check_output(&self, path: &Path, is_single: bool) -> Result<()> {
        let data = &self.config.data;
        let mut inputs = self
            .data
            .paths()
            .iter()
            .chain(&data.files)
            .chain(&data.constants);
        let output = path.canonicalize().ok();
        if output.is_some() && inputs.any(|input| input.canonicalize().ok() == output) {
            let fault = "one of the files that are read; choose another output";
            return Err(failed(path)(fault));
        }
        let is_store = ["zarr.json", ".zgroup"]
            .iter()
            .any(|name| path.join(name).exists());
        if !is_single && (path.is_file() || is_store) {
            let fault = "a file or a store; expected a folder for the forecasts from each state";
            return Err(failed(path)(fault));
        }
        Ok(())
    }

    /// Returns the note for a folder of forecasts: all that they depend on.
    fn note(&self, model: &FieldModel, config: &ForecastConfig) -> Result<Vec<u8>> {
        let others = (self.files == Files::Others).then(|| self.data.paths());
        let note = (
            &self.config.folder,
            self.config.seed,
            config,
            model.checkpoint,
            others,
        );
        serde_json::to_vec(&note).map_err(Error::other)
    }

    /// Checks the note of a folder of forecasts, and writes the new one. While forecasts are
    /// replaced the note is empty, so that remaining ones of another configuration or checkpoint
    /// are not mistaken for new ones.
    fn begin(
        &self,
        folder: &Path,
        note: &[u8],
        existing: Existing,
        outputs: &[Output],
    ) -> Result<()> {
        let replaces = existing == Existing::Replace;
        on_root(&self.world, || {
            let path = folder.join(NOTE);
            let before = std::fs::read(&path).ok();
            let is_other = match before.as_deref() {
                Some(before) => before != note,
                None => outputs.iter().any(|(_, output)| output.exists()),
            };
            if is_other && !replaces {
                return Err(Error::other(format!(
                    "{}: forecasts of another configuration or checkpoint, or some that are not all replaced; choose another \
                     folder, or Existing::Replace",
                    path.display()
                )));
            }
            if replaces && before.is_some_and(|before| before != note) {
                let stays = stores_beside(folder, outputs)?;
                if !stays.is_empty() {
                    return Err(Error::other(format!(
                        "{}: stores that may be of another configuration or checkpoint, and that this run does not replace, {}; \
                         remove them, or choose another folder",
                        folder.display(),
                        stays.join(", ")
                    )));
                }
            }
            Ok(())
        })?;
        self.save_note(folder, if replaces { &[] } else { note })
    }

    fn save_note(&self, folder: &Path, note: &[u8]) -> Result<()> {
        on_root(&self.world, || {
            std::fs::create_dir_all(folder).map_err(failed(folder))?;
            write(&folder.join(NOTE), note)
        })
    }

    fn write(
        &self,
        model: &FieldModel,
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
        let output = OutputConfig::new()
            .with_format(format)
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
    /// returns a state of the data, for the boundary of a region. Holds one step in memory.
    pub(super) fn steps(
        &self,
        model: &FieldModel,
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
            let y = given.apply(model);
            let state;
            (time, state) = states.timeline.ahead(start, number);
            let y = self.with_boundary(y, || self.given(&read, time, state))?;
            let mut fields = self.predicted(y.clone(), time)?;
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

/// Returns the sorted names of the Zarr stores in a folder that are not among `outputs`.
fn stores_beside(folder: &Path, outputs: &[Output]) -> Result<Vec<String>> {
    let mut names = Vec::new();
    if !folder.exists() {
        return Ok(names);
    }
    let names_of_outputs = outputs.iter().filter_map(|(_, path)| path.file_name());
    let outputs: HashSet<_> = names_of_outputs.collect();
    for entry in std::fs::read_dir(folder).map_err(failed(folder))? {
        let name = entry.map_err(failed(folder))?.file_name();
        let is_store = Path::new(&name)
            .extension()
            .is_some_and(|end| end == "zarr");
        if is_store && !outputs.contains(&*name) {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Returns the name, without its ending, of the output for a date such as `2018-01-01 06:00:00`.
fn file_stem(date: &str) -> String {
    let date = date.strip_suffix(":00").unwrap_or(date);
    date.replace(' ', "T").replace(':', "")
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use halocline_core::Launcher;

    use super::*;
    use crate::experiment::fixture::{config_in, wave, write_fields};

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
}
