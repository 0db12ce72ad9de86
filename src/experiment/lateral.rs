//! Lateral boundary of forecasts of a region: a rim of cells that takes the values of the data.

use halocline_core::{Error, Result, ShardTensor};
use halocline_io::{Batch, FieldLoader, LoaderConfig, Period, Source};
use halocline_models::{interior, with_rim};

use super::data::Samples;
use super::network::OwnNetwork;
use super::setup::{Experiment, placements};

impl<N: OwnNetwork> Experiment<N> {
    /// Returns the number of steps of a forecast whose states in the data it reads: for forcings
    /// of the files those before its last step, for a lateral boundary all.
    pub(super) fn read_steps(&self, steps: usize) -> usize {
        match (self.config.data.boundary, self.data.forcings_change) {
            (0, false) => 0,
            (0, true) => steps - 1,
            _ => steps,
        }
    }

    /// Replaces the rim of predictions by given values, if the configuration has a rim.
    pub(super) fn with_boundary(
        &self,
        y: ShardTensor<4>,
        given: impl FnOnce() -> Result<ShardTensor<4>>,
    ) -> Result<ShardTensor<4>> {
        match self.config.data.boundary {
            0 => Ok(y),
            width => with_rim(y, given()?, width),
        }
    }

    /// Returns the normalised targets of the data at a time, as the model sees them, of the state
    /// that `read` returns.
    ///
    /// # Errors
    /// No state at that time; data that cannot be read.
    pub(super) fn given(
        &self,
        read: impl FnOnce(usize) -> Result<Batch>,
        time: f64,
        state: Option<usize>,
    ) -> Result<ShardTensor<4>> {
        let state = state.ok_or_else(|| {
            Error::other(format!(
                "data.boundary: no state of {}, whose rim the forecast takes",
                self.data.calendar.date(time)
            ))
        })?;
        self.seen(read(state)?.target.inner(), &[time])
    }

    /// Opens the states of a period in their units, if the configuration has a rim. Their samples
    /// are those of [`states`](Self::states).
    ///
    /// # Errors
    /// Data that cannot be read; a failure of communication.
    pub(super) fn rims(&self, period: &Period) -> Result<Option<FieldLoader>> {
        if self.config.data.boundary == 0 {
            return Ok(None);
        }
        let placements = placements(self.mesh.shape(), Samples::States);
        let config = LoaderConfig::new(1)
            .with_prefetch(0)
            .with_source(Source::PerRank);
        let loader = FieldLoader::new(&self.mesh, &placements, &config, || {
            self.data.states_in_units(period)
        })?;
        Ok(Some(loader.without_forcings()))
    }

    /// Replaces the rim of a forecast in units by that of the data at its time. The rim that the
    /// model sees has the same values up to rounding, because they are normalised.
    pub(super) fn with_rim_of_data(
        &self,
        rims: Option<&FieldLoader>,
        state: Option<usize>,
        fields: ShardTensor<4>,
    ) -> Result<ShardTensor<4>> {
        match (rims, state) {
            (Some(rims), Some(state)) => {
                let given = rims.load(&[state])?.target.inner();
                with_rim(fields, given, self.config.data.boundary)
            }
            _ => Ok(fields),
        }
    }

    /// Returns the mask of the cells that losses and scores of `field` count: without the rim, if
    /// the configuration has one.
    pub(super) fn without_rim(
        &self,
        field: &ShardTensor<4>,
        mask: Option<ShardTensor<4>>,
    ) -> Result<Option<ShardTensor<4>>> {
        let width = self.config.data.boundary;
        if width == 0 {
            return Ok(mask);
        }
        let inside = interior(&field.clone().inner(), width)?;
        let mask = mask.unwrap_or_else(|| field.clone().inner() * 0.0 + 1.0);
        Ok(Some(mask * inside))
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use halocline_core::Launcher;
    use halocline_io::{Existing, Missing, OpenConfig};
    use halocline_ops::ReduceField;

    use super::*;
    use crate::experiment::ForecastConfig;
    use crate::experiment::fixture::{
        COLUMNS, Cell, ROWS, TIMES, config_in, region, wave, write_fields_on,
    };

    fn is_inside(row: usize, column: usize) -> bool {
        (1..ROWS - 1).contains(&row) && (1..COLUMNS - 1).contains(&column)
    }

    #[test]
    fn the_written_rim_has_the_bits_of_the_data() {
        let folder = tempfile::tempdir().unwrap();
        // Values that normalising and its inverse do not keep, and one that is missing.
        let value = |time: usize, cell: Cell| match (time, cell) {
            (3, (0, 0, 2)) => f32::NAN,
            _ => wave(time, cell) / 3.0,
        };
        write_fields_on(folder.path(), &region(), value);
        let config = config_in(folder.path(), "boundary = 1\nmissing = \"fill\"", "");
        let output = folder.path().join("forecast.zarr");
        let run = Launcher::local(2).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            let model = experiment.model()?.valid();
            let forecast = ForecastConfig {
                steps: 3,
                ..ForecastConfig::default()
            };
            let existing = Existing::Reject;
            experiment.forecast(&model, Some("1970-01-01"), &forecast, &output, existing)?;
            Ok(())
        });
        run.unwrap();
        let written = OpenConfig::new().with_missing(Missing::Allow).open(&output);
        let written = written.unwrap();
        let values = written.read(written.shape().map(|size| 0..size)).unwrap();
        let names = ["sst", "t2m"];
        let mut compared = 0;
        for ((step, channel, row, column), found) in values.indexed_iter() {
            let channel = &written.channels()[channel];
            if is_inside(row, column) {
                continue;
            }
            let place = names.iter().position(|name| name == channel).unwrap();
            let expected = value(step + 1, (place, row, column));
            assert!(
                found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
                "step {step}, {channel}, row {row}, column {column}: {found} for {expected}"
            );
            compared += 1;
        }
        assert!(compared > 0);
    }

    #[test]
    fn the_rim_is_that_of_the_data_and_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        write_fields_on(folder.path(), &region(), wave);
        let config = config_in(folder.path(), "boundary = 1", "");
        let run = Launcher::local(2).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            let model = experiment.model()?;
            let batch = experiment.batches(1)?.load(&[0])?;
            let mut other = batch.clone();
            let rim = interior(&batch.target, 1)? * -1.0 + 1.0;
            other.target = batch.target.clone() + rim * 100.0;
            let [loss, same] = [batch, other].map(|batch| {
                experiment
                    .loss(&model, batch, 1, 0)
                    .unwrap()
                    .into_scalar::<f64>()
            });
            assert!(loss == same && loss > 0.0, "{loss}, {same}");

            let (model, states) = (model.valid(), experiment.states(&Period::default())?);
            let forecast = |start: usize, steps: usize| {
                let read = |state: usize| states.loader.load(&[state]);
                let batch = read(start)?;
                let config = ForecastConfig {
                    steps,
                    ..ForecastConfig::default()
                };
                experiment.steps(&model, &states, batch, &config, read, |step| {
                    let state = step.state.expect("a state of the data");
                    let truth = experiment.in_units(read(state)?.target.inner());
                    let errors = (step.fields - truth).abs().full_tensor().into_data();
                    let mut inside = 0.0_f32;
                    for (cell, error) in errors.iter::<f32>().enumerate() {
                        let (row, column) = (cell / COLUMNS % ROWS, cell % COLUMNS);
                        if is_inside(row, column) {
                            inside = inside.max(error);
                        } else {
                            assert_eq!(error, 0.0, "row {row}, column {column}");
                        }
                    }
                    assert!(inside > 1e-3, "{inside}");
                    Ok(())
                })
            };
            forecast(0, 2)?;
            let error = forecast(TIMES - 1, 1).unwrap_err().to_string();
            assert!(error.contains("data.boundary: no state of"), "{error}");

            // Scores read each state once, although two forecasts take its rim.
            let all = Period::default();
            let [scored, read] = [experiment.states(&all)?, experiment.states(&all)?];
            let config = ForecastConfig {
                steps: 2,
                ..ForecastConfig::default()
            };
            experiment.score_states(&model, &scored, &config, None)?;
            for state in 0..TIMES {
                read.loader.load(&[state])?;
            }
            let [scored, read] = [scored, read].map(|states| states.loader.traffic().needed);
            assert_eq!(scored, read);
            Ok(())
        });
        run.unwrap();
    }
}
