//! Training of sharded models, compared with that of one device.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Gradients, Tensor, TensorData};
use halocline_core::paths::{PathVisitor, visit_paths};
use halocline_core::{ParamShard, ShardTensor, param_shards};
use halocline_ops::{Apply, Layer, Reduction, mse_loss};

/// Tensors by path.
pub(crate) type Named = Vec<(String, TensorData)>;

/// Losses of training steps, and the gradients of the first.
pub(crate) type Trained = (Vec<f32>, Named);

/// Trains a model to return `target` for `x`.
pub(crate) fn train<const D: usize, M>(
    mut model: M,
    x: &ShardTensor<D>,
    target: &ShardTensor<D>,
    rate: f64,
    steps: usize,
) -> Trained
where
    M: Module + Layer<ShardTensor<D>, Output = ShardTensor<D>>,
{
    let mut optimizer = AdamWConfig::new().init();
    let (mut losses, mut first) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let y = x.clone().apply(&model);
        let loss = mse_loss(y, target.clone(), Reduction::Mean).unwrap();
        losses.push(loss.clone().resolve().local().clone().into_scalar::<f32>());
        let gradients = loss.backward();
        if step == 0 {
            first = whole_gradients(&model, &gradients);
        }
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(rate, model, gradients);
    }
    (losses, first)
}

/// Checks that training has the losses and gradients of one device, or of its first steps.
pub(crate) fn compare((losses, found): &Trained, (expected, gradients): &Trained, place: &str) {
    for (step, (loss, expected)) in losses.iter().zip(expected).enumerate() {
        let off = (loss - expected).abs() / expected;
        assert!(off < 1e-4, "{place}, step {step}: {loss} and {expected}");
    }
    let (off, path) = worst(found, gradients);
    assert!(off <= 2e-5, "{place} {path}: {off:e}");
}

/// The gradients of all parameters, gathered.
pub(crate) fn whole_gradients<M: Module>(model: &M, gradients: &Gradients) -> Named {
    struct Whole<'a> {
        gradients: &'a Gradients,
        shards: BTreeMap<String, ParamShard>,
        found: Named,
    }

    impl PathVisitor for Whole<'_> {
        fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
            let path = path.join(".");
            let gradient = param.base().grad(self.gradients).expect("a gradient");
            let whole = match self.shards.get(&path) {
                None => gradient,
                Some(shard) => {
                    let (layout, mesh) = (shard.layout().clone(), shard.mesh().clone());
                    let gradient = ShardTensor::from_parts(gradient, layout, mesh);
                    gradient.full_tensor()
                }
            };
            self.found.push((path, whole.into_data()));
        }
    }

    let mut whole = Whole {
        gradients,
        shards: param_shards(model),
        found: Vec::new(),
    };
    visit_paths(model, &mut whole);
    whole.found
}

/// The largest difference of gradients, over the largest gradient, and its path.
fn worst(found: &Named, expected: &Named) -> (f32, String) {
    assert_eq!(found.len(), expected.len());
    let values = |data: &TensorData| data.iter::<f32>().collect::<Vec<_>>();
    let largest = |data: &TensorData| {
        values(data)
            .iter()
            .fold(0.0, |max: f32, x| max.max(x.abs()))
    };
    let scale = (expected.iter().map(|(_, data)| largest(data))).fold(0.0, f32::max);
    let mut worst = (0.0, String::new());
    for ((path, found), (_, expected)) in found.iter().zip(expected) {
        assert_eq!(found.shape(), expected.shape(), "{path}");
        for (a, b) in values(found).iter().zip(values(expected)) {
            let off = (a - b).abs() / scale;
            if off > worst.0 || off.is_nan() {
                worst = (off, path.clone());
            }
        }
    }
    worst
}
