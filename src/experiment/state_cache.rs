//! Cache of the states that forecasts start from or are compared with.

use std::collections::BTreeMap;

use halocline_core::{Result, ShardTensor};
use halocline_io::{Batch, Epoch};

use super::setup::States;

/// Cache of states that forecasts start from or are compared with, for the next forecasts.
pub(super) struct StateCache<'a> {
    source: &'a States,
    /// States in order, which are read while the model runs; `None` once another one was needed.
    ahead: Option<Epoch<'a>>,
    /// The state that is read next.
    next: usize,
    /// States by index, with their bytes.
    states: BTreeMap<usize, (Batch, usize)>,
    /// Bytes of all states. Each field counts by its largest shard, so that the number is the same
    /// on all ranks, which load states together.
    bytes: usize,
}

/// Largest number of bytes of states that a rank keeps.
const MOST: usize = 512 << 20;

impl<'a> StateCache<'a> {
    pub(super) fn new(source: &'a States) -> Self {
        Self {
            source,
            ahead: Some(source.loader.epoch(0)),
            next: 0,
            states: BTreeMap::new(),
            bytes: 0,
        }
    }

    /// Returns a state.
    pub(super) fn state(&mut self, state: usize) -> Result<Batch> {
        if let Some((batch, _)) = self.states.get(&state) {
            return Ok(batch.clone());
        }
        let loader = &self.source.loader;
        self.ahead = self.ahead.take().filter(|_| self.next == state);
        self.next = state + 1;
        let read = self.ahead.as_mut().and_then(Epoch::next);
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
