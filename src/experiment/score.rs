//! Scores of forecasts, compared with persistence and climatology.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use halocline_core::{Boundary, Error, Result, ShardTensor};
use halocline_io::{Batch, Channel, Progress};
use halocline_models::{FieldPower, Power, ScoreRow, Spectra, Verification};
use halocline_ops::prelude::*;
use serde::Serialize;

use super::forecast_config::ForecastConfig;
use super::network::{FieldModel, OwnNetwork};
use super::regions::{regions, standard_regions};
use super::replicas::Scores;
use super::setup::{Experiment, States};
use super::state_cache::StateCache;
use crate::trainer::signals::is_interrupted;

/// Scores of a channel at a lead in a region.
///
/// See [`Experiment::score`].
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Scores of the model's forecasts; RMSE, bias and ACC of an ensemble are those of its mean.
    #[serde(flatten)]
    pub score: ScoreRow,
    /// Units of RMSE, bias and CRPS.
    pub units: Option<String>,
    /// RMSE of persistence: the state at the start of each forecast.
    pub rmse_persistence: f64,
    /// RMSE of the climatology of the training period.
    pub rmse_climatology: f64,
}

/// Scores by channel, lead and region. The `Display` form is a table for the globe, or else the
/// first region.
///
/// See [`Experiment::score`].
#[derive(Clone, Debug)]
pub struct Report {
    /// All scores.
    pub rows: Vec<Row>,
    /// Power of forecasts (of ensembles, that of the first member) and of their truth, by
    /// wavenumber; none on grids that do not go around the globe, on unstructured ones, and where
    /// values are missing.
    pub spectra: Vec<Power>,
}

impl<N: OwnNetwork> Experiment<N> {
    /// Scores forecasts from the states of the test period, or of [other files](Self::of_files),
    /// and persistence and climatology with them. The scores of a lead are means over the forecasts
    /// whose valid time is in the period. Starts are dealt out along the mesh axis `data`, unless
    /// the plan shards parameters; the scores are the same.
    ///
    /// # Errors
    /// An experiment without a test period, or with one in which no forecast starts or ends; a
    /// region without cells of the grid that count; data that cannot be read; an interruption by a
    /// signal; a failure of communication.
    pub fn score(&self, model: &FieldModel<N>, config: &ForecastConfig) -> Result<Report> {
        config.check(self.config.data.noise_channels)?;
        let grid = &self.data.grid;
        let weights = grid.latitude_weights();
        let spectra = match (grid.has_rows(), grid.boundary()[1]) {
            (true, Boundary::Periodic) => {
                let targets = &self.data.channels.targets;
                // Only waves around the globe are whole.
                let regions = standard_regions(grid, self.config.data.boundary);
                Some(Spectra::new(targets, &weights, grid.lat(), regions)?)
            }
            _ => None,
        };
        let (period, replica) = (self.scored()?, self.replica()?);
        let experiment = replica.as_ref().unwrap_or(self);
        let states = experiment.states(&period)?;
        let report = experiment.score_states(model, &states, config, spectra)?;
        report.ok_or_else(|| Error::other("score: interrupted by a signal"))
    }

    /// Shortens a forecast to the last step that has a truth; `None` if no step has one. Forcings
    /// that change in the files, and the boundary of a region, end at the first time without a
    /// state, and the forecast with them.
    pub(super) fn with_truth(
        &self,
        config: &ForecastConfig,
        states: &States,
        start: usize,
    ) -> Option<ForecastConfig> {
        let has_truth = |steps: &usize| states.timeline.ahead(start, *steps).1.is_some();
        let gap = (1..config.steps).find(|steps| !has_truth(steps));
        let most = gap
            .filter(|_| self.read_steps(config.steps) > 0)
            .unwrap_or(config.steps);
        let steps = (1..=most).rev().find(has_truth)?;
        Some(ForecastConfig {
            steps,
            ..config.clone()
        })
    }

    /// Returns the states from which forecasts start.
    ///
    /// # Errors
    /// No state at the hours of the configuration; no forecast that reaches another state.
    pub(super) fn starts(states: &States, config: &ForecastConfig) -> Result<Vec<usize>> {
        let timeline = &states.timeline;
        let starts = timeline.starts(config)?;
        let mut steps = 1..=config.steps;
        if steps.any(|steps| timeline.hours(&starts, steps).is_some()) {
            Ok(starts)
        } else {
            let start = match config.chosen_starts() {
                None => "another one of it".into(),
                Some((setting, hours)) => format!("one that {setting} ({hours}) chooses"),
            };
            Err(Error::other(format!(
                "no state of the period is a step after {start}"
            )))
        }
    }

    /// Returns a state in its units, and the mask of its values.
    pub(super) fn truth(&self, state: &Batch) -> (ShardTensor<4>, Option<ShardTensor<4>>) {
        let field = self.in_units(state.target.clone().inner());
        (field, state.mask.clone().map(ShardTensor::inner))
    }

    /// Scores forecasts from these states, whose starts are dealt out among the replicas, and their
    /// spectra, of which `spectra` has none yet. Returns `None` if a signal interrupts it.
    pub(super) fn score_states(
        &self,
        model: &FieldModel<N>,
        states: &States,
        config: &ForecastConfig,
        spectra: Option<Spectra>,
    ) -> Result<Option<Report>> {
        let starts = Self::starts(states, config)?;
        let (targets, grid) = (&self.data.channels.targets, &self.data.grid);
        let weights = grid.latitude_weights();
        let regions = regions(grid, self.config.data.boundary, config)?;
        let empty = match grid.cells() {
            Some([lat, lon]) => {
                let areas = grid.cell_weights().unwrap_or_else(|| vec![1.0; lat.len()]);
                Verification::of_cells(targets, &areas, lat, lon, regions)?
            }
            None => Verification::new(targets, &weights, grid.lat(), grid.lon(), regions)?,
        };
        let empty = Scores::new(&empty, spectra);
        let mut scores = empty.clone();
        let hours: Vec<Option<f64>> = (0..=config.steps)
            .map(|steps| states.timeline.hours(&starts, steps))
            .collect();
        let (place, replicas) = (self.replicas.position(), self.replicas.size());
        let rounds = starts.chunks(replicas);
        let progress = Progress::new(self.world.rank(), "score", rounds.len());
        let all = self.world.mesh([("rank", self.world.size())])?;
        let known = states.baselines.get();
        let known = known.filter(|(steps, _)| *steps == config.steps);
        let dealt = starts.iter().skip(place).step_by(replicas);
        let forecasts = dealt.filter_map(|start| {
            let config = self.with_truth(config, states, *start)?;
            Some((*start, config.steps))
        });
        let cache = RefCell::new(StateCache::new(states, forecasts)?);
        let read = |state: usize| cache.borrow_mut().state(state);
        let mut powers: BTreeMap<usize, FieldPower> = BTreeMap::new();
        let mut score = |start: usize, config: &ForecastConfig, part: &mut Scores| -> Result<()> {
            let Scores {
                ensembles,
                means,
                persistence,
                climatology,
                spectra,
            } = part;
            cache.borrow_mut().forget_before(start);
            powers = powers.split_off(&start);
            let batch = read(start)?;
            let begin = known.is_none().then(|| self.truth(&batch));
            let present = batch.input_mask.clone().map(ShardTensor::inner);
            let first = present.map(|present| self.of_targets(&present));
            self.steps(model, states, batch, config, read, |step| {
                let (Some(state), Some(lead)) = (step.state, hours[step.number]) else {
                    return Ok(());
                };
                let (truth, mask) = self.truth(&read(state)?);
                let both = |mask: &Option<ShardTensor<4>>, other: &Option<ShardTensor<4>>| {
                    let masks = [mask, other].into_iter().flatten().cloned();
                    masks.reduce(|mask, other| mask * other)
                };
                // One where both the start and the truth have a value.
                let mask = self.without_rim(&truth, both(&mask, &first))?;
                let normal = self.in_units(self.normal_at(&[step.time], &truth)?);
                if let (Some(spectra), None) = (spectra.as_mut(), &mask) {
                    let power = match powers.entry(state) {
                        Entry::Occupied(found) => found.into_mut(),
                        Entry::Vacant(place) => place.insert(spectra.power(truth.clone())?),
                    };
                    let first = spectra.power(step.fields.clone().narrow(0, 0, 1))?;
                    spectra.add_power(lead, &first, power)?;
                }
                if config.members > 1 {
                    let ensemble = step.fields.clone().unflatten::<5>(0, &[config.members, 1]);
                    let of_ensemble = |field: ShardTensor<4>| field.unsqueeze_dim::<5>(0);
                    let mask = mask.clone().map(of_ensemble);
                    ensembles.add_ensemble(lead, ensemble, of_ensemble(truth.clone()), mask)?;
                }
                let fields = step.fields.mean_dims(&[0]).resolve();
                means.add(
                    lead,
                    fields,
                    truth.clone(),
                    Some(normal.clone()),
                    mask.clone(),
                )?;
                if let Some((begin, begun)) = &begin {
                    // A target that is not an input may have a forecast without a value at the
                    // start.
                    let persists = both(&mask, begun);
                    persistence.add(lead, begin.clone(), truth.clone(), None, persists)?;
                    climatology.add(lead, normal, truth, None, mask)?;
                }
                Ok(())
            })
        };
        for round in rounds {
            if is_interrupted(&all)? {
                return Ok(None);
            }
            let mut part = empty.clone();
            if let Some(&start) = round.get(place)
                && let Some(config) = self.with_truth(config, states, start)
            {
                score(start, &config, &mut part)?;
            }
            scores.add_dealt(&part, &self.replicas)?;
            progress.advance();
        }
        progress.finish();
        let Scores {
            ensembles,
            means,
            persistence,
            climatology,
            spectra,
        } = scores;
        let baselines = match known {
            Some((_, known)) => known.clone(),
            None => {
                let pairs = persistence.scores().into_iter().zip(climatology.scores());
                let pairs = pairs.map(|pair| [pair.0.metrics.rmse, pair.1.metrics.rmse]);
                let found: Vec<[f64; 2]> = pairs.collect();
                // Those of another number of steps may be there.
                let _ = states.baselines.set((config.steps, found.clone()));
                found
            }
        };
        Ok(Some(Report {
            rows: self.rows(means.scores(), &ensembles.scores(), &baselines),
            spectra: spectra.map_or(Vec::new(), |spectra| spectra.spectra()),
        }))
    }

    /// Returns the rows of a report from the scores of forecasts or ensemble means, of ensembles if
    /// there are any, and of persistence and climatology, all in the same order.
    fn rows(
        &self,
        means: Vec<ScoreRow>,
        ensembles: &[ScoreRow],
        baselines: &[[f64; 2]],
    ) -> Vec<Row> {
        let rows = means.into_iter().zip(baselines).enumerate();
        let rows = rows.map(|(index, (mut score, baselines))| {
            if let Some(ensemble) = ensembles.get(index) {
                score.metrics.crps = ensemble.metrics.crps;
                score.metrics.spread = ensemble.metrics.spread;
                score.metrics.spread_skill = ensemble.metrics.spread_skill;
            }
            let mut described = self.data.described.iter();
            let described = described.find(|channel| channel.name == score.channel);
            let [rmse_persistence, rmse_climatology] = *baselines;
            Row {
                score,
                units: described.and_then(|channel| channel.units.clone()),
                rmse_persistence,
                rmse_climatology,
            }
        });
        rows.collect()
    }
}

impl Report {
    /// Returns the RMSE in the first region in standard deviations, averaged over channels and
    /// leads. Channels without any value are left out.
    pub(super) fn mean_error(&self, stds: &[f64]) -> f64 {
        // Rows list all channels in order, for each lead.
        let rows = self.first_region().zip(stds.iter().cycle());
        let errors: Vec<f64> = rows
            .filter(|(row, _)| row.score.metrics.forecasts > 0)
            .map(|(row, std)| row.score.metrics.rmse / std)
            .collect();
        errors.iter().sum::<f64>() / errors.len() as f64
    }

    /// Formats the RMSE of up to three channels at the first lead.
    pub(super) fn line(&self, channels: &[Channel]) -> String {
        let rows = self.first_region().take(channels.len().min(3));
        let texts = rows.map(|row| {
            let units = row
                .units
                .as_ref()
                .map_or(String::new(), |units| format!(" {units}"));
            let (rmse, name) = (row.score.metrics.rmse, &row.score.channel);
            format!(
                "{name} {}{units} ({} persistence)",
                number(rmse),
                number(row.rmse_persistence)
            )
        });
        texts.collect::<Vec<_>>().join(", ")
    }

    pub(super) fn first_region(&self) -> impl Iterator<Item = &Row> {
        let first = self.rows.first().map_or("", |row| &row.score.region);
        self.rows
            .iter()
            .filter(move |row| row.score.region == first)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ensemble = self
            .rows
            .iter()
            .any(|row| row.score.metrics.crps.is_finite());
        write!(
            f,
            "{:>8} {:<20}{:>10}{:>13}{:>13}{:>10}{:>8}",
            "hours", "channel", "RMSE", "persistence", "climatology", "bias", "ACC"
        )?;
        if ensemble {
            write!(f, "{:>10}{:>10}", "CRPS", "spread")?;
        }
        for row in self.first_region() {
            let scores = row.score.metrics;
            let channel = match &row.units {
                Some(units) => format!("{} ({units})", row.score.channel),
                None => row.score.channel.clone(),
            };
            write!(
                f,
                "\n{:>8.1} {channel:<20}{:>10}{:>13}{:>13}{:>10}{:>8.3}",
                row.score.lead,
                number(scores.rmse),
                number(row.rmse_persistence),
                number(row.rmse_climatology),
                number(scores.bias),
                scores.acc
            )?;
            if ensemble {
                write!(
                    f,
                    "{:>10}{:>10}",
                    number(scores.crps),
                    number(scores.spread)
                )?;
            }
        }
        let below = |baseline: fn(&Row) -> f64| {
            let is_below = |row: &&Row| row.score.metrics.rmse < baseline(row);
            self.first_region().filter(is_below).count()
        };
        write!(
            f,
            "\nof {} RMSE, {} are below persistence and {} below climatology",
            self.first_region().count(),
            below(|row| row.rmse_persistence),
            below(|row| row.rmse_climatology)
        )
    }
}

/// Formats a number with four digits, or more before the point; with an exponent if it is very
/// small or large.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 3,
        far if !(0.01..1e7).contains(&far) && far.is_finite() => return format!("{value:.2e}"),
        large if large >= 1000.0 => 0,
        large if large >= 100.0 => 1,
        large if large >= 10.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use halocline_core::Launcher;
    use halocline_io::Period;
    use halocline_models::Metrics;

    use super::*;
    use crate::experiment::fixture::{TIMES, config_in, write_waves};

    #[test]
    fn each_state_is_read_once() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "[forecast]\nsteps = 3");
        let run = Launcher::local(1).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            let (model, all) = (experiment.model()?.valid(), Period::default());
            let [scored, read] = [experiment.states(&all)?, experiment.states(&all)?];
            experiment.score_states(&model, &scored, &config.forecast, None)?;
            for state in 0..TIMES {
                read.loader.load(&[state])?;
            }
            let [scored, read] = [scored, read].map(|states| states.loader.traffic().needed);
            assert_eq!(scored, read);
            // Two channels, once although they are both input and target.
            assert_eq!(read, (TIMES * 2 * 5 * 8 * 4) as u64);
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn baselines_are_scored_once_for_a_number_of_steps() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "");
        let run = Launcher::local(1).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            let states = experiment.states(&Period::default())?;
            let model = experiment.model()?.valid();
            let score = |steps: usize| {
                let config = ForecastConfig {
                    steps,
                    ..config.forecast.clone()
                };
                let report = experiment.score_states(&model, &states, &config, None)?;
                let rows = report.expect("no signal").rows;
                let pairs = rows
                    .iter()
                    .map(|row| [row.rmse_persistence, row.rmse_climatology]);
                Ok::<Vec<[f64; 2]>, Error>(pairs.collect())
            };
            let first = score(2)?;
            assert_eq!(states.baselines.get(), Some(&(2, first.clone())));
            assert_eq!(score(2)?, first);
            assert_eq!(score(1)?, first[..first.len() / 2]);
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn a_channel_without_values_has_no_error() {
        let row = |forecasts: usize, rmse: f64| Row {
            score: ScoreRow {
                channel: "sst".into(),
                variable: "sst".into(),
                level: None,
                lead: 6.0,
                region: "globe".into(),
                metrics: Metrics {
                    forecasts,
                    rmse,
                    mae: rmse,
                    bias: 0.0,
                    acc: 1.0,
                    crps: f64::NAN,
                    spread: f64::NAN,
                    spread_skill: f64::NAN,
                },
            },
            units: None,
            rmse_persistence: rmse,
            rmse_climatology: rmse,
        };
        let report = |rows| Report {
            rows,
            spectra: Vec::new(),
        };
        let rows = vec![row(2, 1.0), row(0, f64::NAN), row(2, 3.0), row(2, 8.0)];
        assert_eq!(
            report(rows).mean_error(&[1.0, 2.0]),
            (1.0 + 3.0 + 4.0) / 3.0
        );
        // The error of a forecast that has diverged is kept, as NaN.
        let rows = vec![row(2, 1.0), row(2, f64::NAN)];
        assert!(report(rows).mean_error(&[1.0, 2.0]).is_nan());
    }
}
