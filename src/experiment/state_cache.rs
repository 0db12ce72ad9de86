//! Cache of the states that forecasts start from or are compared with.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;
use std::vec::IntoIter;

use halocline_core::{Result, ShardTensor};
use halocline_io::{Batch, Epoch};

use super::setup::States;

/// Cache of states that forecasts start from or are compared with, for the next forecasts.
pub(super) struct StateCache<'a> {
    source: &'a States,
    /// States in the order in which they are first needed, which are read while the model runs.
    ahead: Epoch<'a>,
    /// Their indices.
    order: Peekable<IntoIter<usize>>,
    /// States by index, with their bytes.
    states: BTreeMap<usize, (Batch, usize)>,
    /// Bytes of all states. Each field counts by its largest shard, so that the number is the same
    /// on all ranks, which load states together.
    bytes: usize,
}

/// Largest number of bytes of states that a rank keeps.
const MOST: usize = 512 << 20;

impl<'a> StateCache<'a> {
    /// Makes a cache for forecasts, each from a state and of a number of steps.
    pub(super) fn new(
        source: &'a States,
        forecasts: impl Iterator<Item = (usize, usize)>,
    ) -> Result<Self> {
        let mut known = BTreeSet::new();
        let states = forecasts.flat_map(|(start, steps)| {
            (0..=steps).filter_map(move |step| source.timeline.ahead(start, step).1)
        });
        let order: Vec<usize> = states.filter(|state| known.insert(*state)).collect();
        Ok(Self {
            source,
            ahead: source.loader.one_by_one(&order)?,
            order: order.into_iter().peekable(),
            states: BTreeMap::new(),
            bytes: 0,
        })
    }

    /// Returns a state.
    pub(super) fn state(&mut self, state: usize) -> Result<Batch> {
        if let Some((batch, _)) = self.states.get(&state) {
            return Ok(batch.clone());
        }
        let loader = &self.source.loader;
        // Another one was dropped, or did not fit.
        let is_next = self.order.next_if_eq(&state).is_some();
        let read = if is_next { self.ahead.next() } else { None };
        let batch = read.unwrap_or_else(|| loader.load(&[state]))?;
        let channels = loader.channels();
        let mut fields = vec![Some(&batch.target), batch.mask.as_ref()];
        // Inputs that are the targets share their memory.
        if channels.inputs != channels.targets || batch.input.dims() != batch.target.dims() {
            fields.extend([Some(&batch.input), batch.input_mask.as_ref()]);
        }
        let bytes: usize = fields.into_iter().flatten().map(bytes).sum();
        if self.bytes + bytes <= MOST {
            self.bytes += bytes;
            self.states.insert(state, (batch.clone(), bytes));
        }
        Ok(batch)
    }

    /// Drops the states before one.
    pub(super) fn forget_before(&mut self, state: usize) {
        let later = self.states.split_off(&state);
        let before = std::mem::replace(&mut self.states, later);
        self.bytes -= before.values().map(|(_, bytes)| bytes).sum::<usize>();
    }
}

/// Returns the bytes of the largest shard of a field.
fn bytes(field: &ShardTensor<4>) -> usize {
    let extents = field.layout().all_extents().iter();
    let cells = extents.map(|parts| parts.iter().copied().max().unwrap_or(0));
    4 * cells.product::<usize>()
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use halocline_core::Launcher;
    use halocline_io::Period;

    use crate::experiment::Experiment;
    use crate::experiment::fixture::{TIMES, config_in, write_waves};

    #[test]
    fn states_that_no_forecast_needs_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "[forecast]\nevery_hours = 24");
        let run = Launcher::local(1).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            let model = experiment.model()?.valid();
            let scored = experiment.states(&Period::default())?;
            experiment.score_states(&model, &scored, &config.forecast, None)?;
            // A start and the next state of each day.
            let states = TIMES.div_ceil(4) * 2;
            let read = scored.loader.traffic().needed;
            assert_eq!(read, (states * 2 * 5 * 8 * 4) as u64);
            Ok(())
        });
        run.unwrap();
    }
}
