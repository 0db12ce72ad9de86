//! Exponential moving averages of parameters.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use halocline_core::{Result, ShardTensor};
use halocline_io::{Checkpoint, Snapshot};

use super::Trainer;

const NAME: &str = "ema";
/// Name of the trained model in a checkpoint.
pub(super) const MODEL: &str = "model";

/// Exponential moving average of a model's parameters over steps.
#[derive(Debug)]
pub(super) struct Ema<M> {
    decay: f64,
    model: M,
}

impl<M: Module> Trainer<M> {
    /// Keeps an exponential moving average (EMA) of the parameters: it starts from those of the
    /// model, and after each step becomes `decay · average + (1 − decay) · parameter`. It is saved
    /// with the run, and often does better than the parameters themselves in validation and
    /// forecasts.
    ///
    /// # Panics
    /// Panics if `decay` is not between 0 and 1, or after
    /// [`resume_or_start`](Self::resume_or_start), which loads the average.
    #[must_use]
    pub fn with_ema(mut self, decay: f64) -> Self {
        assert!(
            (0.0..=1.0).contains(&decay),
            "with_ema({decay}): expected 0 to 1"
        );
        self.require_no_folder("with_ema");
        let model = self.model().valid();
        self.ema = Some(Ema { decay, model });
        self
    }

    /// Returns the model with averaged parameters, for inference, if the run [has an
    /// average](Self::with_ema). Sharded parameters have the same shards.
    pub fn ema_model(&self) -> Option<&M> {
        self.ema.as_ref().map(|average| &average.model)
    }

    /// Moves the average towards the parameters.
    pub(super) fn update_ema(&mut self) {
        if let Some(Ema { decay, model }) = self.ema.take() {
            let mut values = Values::default();
            self.model().visit(&mut values);
            let mut mean = Mean {
                values,
                next: 0,
                decay,
            };
            let model = model.map(&mut mean);
            self.ema = Some(Ema { decay, model });
        }
    }

    pub(super) fn save_ema(&self, snapshot: &mut Snapshot) -> Result<()> {
        if let Some(average) = &self.ema {
            snapshot.module(NAME, &average.model)?;
        }
        Ok(())
    }

    /// Loads the average; if the checkpoint has none, it starts from the parameters of `model`.
    pub(super) fn restore_ema(&mut self, checkpoint: &Checkpoint, model: &M) -> Result<()> {
        let Some(average) = &mut self.ema else {
            return Ok(());
        };
        average.model = if has_ema(checkpoint) {
            checkpoint.module(&self.world, NAME, average.model.clone())?
        } else {
            model.valid()
        };
        Ok(())
    }
}

/// Returns the checkpoint's name for the validated model: the average, if the run has one.
pub(crate) fn validated_name(checkpoint: &Checkpoint) -> &'static str {
    if has_ema(checkpoint) { NAME } else { MODEL }
}

fn has_ema(checkpoint: &Checkpoint) -> bool {
    let prefix = format!("{NAME}.");
    checkpoint.names().any(|name| name.starts_with(&prefix))
}

/// Parameters indexed by their position in the model, where tied parameters share an id.
#[derive(Default)]
struct Values {
    values: GradientsParams,
    next: u64,
}

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let place = ParamId::from(self.next);
        self.values.register(place, param.base().inner());
        self.next += 1;
    }
}

struct Mean {
    values: Values,
    next: u64,
    decay: f64,
}

impl ModuleMapper for Mean {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, average, mapper) = param.consume();
        let value = self.values.values.remove::<D>(ParamId::from(self.next));
        let value = value.expect("the average has the parameters of the model");
        self.next += 1;
        // By all threads, in the memory of the average.
        let [average, value] = [average, value].map(ShardTensor::solo);
        // A constant value is exactly its own average, however `decay` is rounded.
        let change = (value - average.clone()) * (1.0 - self.decay);
        Param::from_mapped_value(id, (average + change).into_local(), mapper)
    }
}
