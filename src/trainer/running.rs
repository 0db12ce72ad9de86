//! Running statistics of a model, which forward passes change.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use halocline_core::paths::is_running_state;

/// Running statistics of a model at one time.
#[derive(Debug, Default)]
pub(super) struct RunningStatistics {
    values: HashMap<ParamId, Tensor<1>>,
    /// Whether the last entered field is a running statistic.
    is_running: bool,
}

impl RunningStatistics {
    pub(super) fn of<M: Module>(model: &M) -> Self {
        let mut statistics = Self::default();
        take_in(model);
        model.visit(&mut statistics);
        statistics
    }

    /// Restores the statistics of a model, which shares them with its clones.
    pub(super) fn put_back<M: Module>(mut self, model: &M) {
        take_in(model);
        model.clone().map(&mut self);
    }
}

/// Merges the updates that burn's own layers keep next to their statistics.
fn take_in<M: Module>(model: &M) {
    drop(model.valid());
}

impl ModuleVisitor for RunningStatistics {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.is_running = is_running_state(name, container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.is_running {
            // Any number of dims, as nothing is computed.
            let value = Tensor::from_dispatch(param.val().into_dispatch());
            self.values.insert(param.id, value);
        }
    }
}

impl ModuleMapper for RunningStatistics {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values.get(&param.id) {
            Some(value) => {
                let value = Tensor::from_dispatch(value.clone().into_dispatch());
                Param::initialized(param.id, value)
            }
            None => param,
        }
    }
}
