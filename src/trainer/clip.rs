//! Clipping of gradients by their norm.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use halocline_core::{Operation, ParamShard, Replicate, Result, Traffic, ops, param_shards};
use std::collections::BTreeMap;

/// Scales the gradients of a model so that their norm, over all parameters, is at most `max_norm`, and
/// returns them with the norm before. Each cell of a sharded parameter counts once; its ranks' sums
/// travel, those of parameters that every rank holds do not.
///
/// # Errors
/// A failure of communication.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::GradientsParams;
/// use burn::tensor::Tensor;
/// use halocline::clip_grad_norm;
///
/// let device = burn::tensor::Device::default().autodiff();
/// let model = LinearConfig::new(4, 1).with_bias(false).init(&device);
/// let gradients = model.forward(Tensor::<2>::ones([1, 4], &device)).sum().backward();
/// let gradients = GradientsParams::from_grads(gradients, &model);
/// let (gradients, norm) = clip_grad_norm(&model, gradients, 1.0)?; // four gradients of 1
/// assert!((norm - 2.0).abs() < 1e-6);
/// let clipped = gradients.get::<2>(model.weight.id).expect("a gradient");
/// assert!((clipped.sum().into_scalar::<f32>() - 2.0).abs() < 1e-5);
/// # Ok::<(), halocline::Error>(())
/// ```
pub fn clip_grad_norm<M: Module>(
    model: &M,
    gradients: GradientsParams,
    max_norm: f64,
) -> Result<(GradientsParams, f64)> {
    let mut squares = Squares {
        gradients: &gradients,
        shards: param_shards(model),
        path: Vec::new(),
        whole: 0.0,
        sharded: 0.0,
    };
    model.visit(&mut squares);
    let mut sum = squares.whole;
    if let Some(shard) = squares.shards.values().next() {
        let (mesh, part) = (shard.mesh(), squares.sharded);
        let operation = Operation::new("clip_grad_norm", Traffic::Reduce, None);
        let ranks = mesh.shape().ranks();
        let parts = ops::all_gather_numbers(mesh.comm(), ranks, &operation, &[part])?;
        sum += parts.iter().flatten().sum::<f64>();
    }
    let norm = sum.sqrt();
    // As PyTorch has it: a gradient of zero is not divided by its norm.
    let factor = max_norm / (norm + 1e-6);
    if factor >= 1.0 {
        return Ok((gradients, norm));
    }
    Ok((scaled(model, gradients, factor), norm))
}

/// Sums of squares.
struct Squares<'a> {
    gradients: &'a GradientsParams,
    shards: BTreeMap<String, ParamShard>,
    path: Vec<String>,
    /// Of parameters that every rank holds.
    whole: f64,
    /// This rank's part of the sum of sharded parameters.
    sharded: f64,
}

impl ModuleVisitor for Squares<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.get::<D>(param.id) else {
            return;
        };
        let sum = gradient.square().sum().into_scalar::<f64>();
        match self.shards.get(&self.path.join(".")) {
            None => self.whole += sum,
            Some(shard) => {
                let (layout, sizes) = (shard.layout(), shard.mesh().shape().sizes());
                let replicas = layout.axes_where(|placement| placement == Replicate);
                let replicas: usize = replicas.into_iter().map(|axis| sizes[axis]).product();
                self.sharded += sum / replicas as f64;
            }
        }
    }
}

/// Multiplies the gradients of a model; those of other parameters stay.
pub(super) fn scaled<M: Module>(
    model: &M,
    gradients: GradientsParams,
    factor: f64,
) -> GradientsParams {
    struct Scale {
        gradients: GradientsParams,
        factor: f64,
    }

    impl ModuleVisitor for Scale {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.gradients.remove::<D>(param.id) {
                self.gradients.register(param.id, gradient * self.factor);
            }
        }
    }

    let mut scale = Scale { gradients, factor };
    model.visit(&mut scale);
    scale.gradients
}
