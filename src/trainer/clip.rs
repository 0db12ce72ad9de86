//! Gradient clipping by norm.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{FloatDType, Tensor, Transaction};
use halocline_core::comm::Operation;
use halocline_core::paths::{PathVisitor, visit_paths};
use halocline_core::{
    DeviceMesh, Error, Replicate, Result, ShardTensor, Traffic, ops, param_shards,
};
use halocline_ops::StatisticsField;

/// Scales the gradients of a model so that their norm, over all parameters, is at most `max_norm`.
/// Returns them with the norm before scaling. Each element of a sharded parameter counts once; only
/// sums are communicated.
///
/// Replicated parameters are scaled by the same factor on all ranks: on CPUs, sums of squares have
/// the same bits for any number of threads, and if the model also has sharded parameters, all ranks
/// use the sum of the mesh's first rank.
///
/// # Errors
/// `max_norm` is negative or NaN; parameters are sharded over meshes with different ranks, whose
/// norms would differ; communication fails.
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
    let shards = param_shards(model);
    // All ranks sum over the meshes of their shards, even if none has a gradient.
    let mut meshes: Vec<(DeviceMesh, f64)> = Vec::new();
    for shard in shards.values() {
        if meshes
            .iter()
            .all(|(mesh, _)| mesh.shape() != shard.mesh().shape())
        {
            meshes.push((shard.mesh().clone(), 0.0));
        }
    }
    let ranks = |mesh: &DeviceMesh| {
        let mut ranks = mesh.shape().ranks().to_vec();
        ranks.sort_unstable();
        ranks
    };
    let same_ranks = |(mesh, _): &(DeviceMesh, f64)| ranks(mesh) == ranks(&meshes[0].0);
    if !meshes.iter().all(same_ranks) {
        let message = "parameters are sharded over meshes of other ranks";
        return Err(Error::operator("clip_grad_norm", message));
    }
    if max_norm.is_nan() || max_norm < 0.0 {
        let message = format!("max_norm {max_norm}; expected a number from 0 on");
        return Err(Error::operator("clip_grad_norm", message));
    }
    let mut norms = Norms {
        gradients: &gradients,
        seen: HashSet::new(),
        counted: Vec::new(),
        norms: Transaction::default(),
    };
    visit_paths(model, &mut norms);
    let Norms { counted, norms, .. } = norms;
    let mut whole = 0.0;
    for ((path, large_square), norm) in counted.into_iter().zip(norms.execute()) {
        let norm: f64 = norm.iter().next().expect("a norm is one number");
        let mut square = norm.powi(2);
        if square.is_infinite() {
            square = large_square();
        }
        match shards.get(&path) {
            None => whole += square,
            Some(shard) => {
                let (layout, sizes) = (shard.layout(), shard.mesh().shape().sizes());
                let replicas = layout.axes_where(|placement| placement == Replicate);
                let replicas: usize = replicas.into_iter().map(|axis| sizes[axis]).product();
                let mut meshes = meshes.iter_mut();
                let mesh = meshes.find(|(mesh, _)| mesh.shape() == shard.mesh().shape());
                mesh.expect("that of a shard").1 += square / replicas as f64;
            }
        }
    }
    let mut sum = whole;
    for (index, (mesh, part)) in meshes.iter().enumerate() {
        let operation = Operation::new("clip_grad_norm", Traffic::Reduce, None);
        let ranks = mesh.shape().ranks();
        let numbers = [*part, whole];
        let parts = ops::all_gather_numbers(mesh.comm(), ranks, &operation, &numbers)?;
        if index == 0 {
            // Devices of other kinds may round the sum of replicated parameters differently.
            sum = parts[0][1];
        }
        sum += parts.iter().map(|numbers| numbers[0]).sum::<f64>();
    }
    let norm = sum.sqrt();
    // As in PyTorch, so that a zero gradient is not divided by its norm.
    let factor = max_norm / (norm + 1e-6);
    if factor >= 1.0 {
        return Ok((gradients, norm));
    }
    Ok((scaled(model, gradients, factor), norm))
}

/// Function that computes the square of a norm without overflow.
type LargeSquare = Box<dyn FnOnce() -> f64>;

/// Visitor that computes the norm of each gradient.
struct Norms<'a> {
    gradients: &'a GradientsParams,
    /// Parameters already counted, as one may occur in two places.
    seen: HashSet<ParamId>,
    /// Path of each counted parameter, and the square of its norm if the squares overflow.
    counted: Vec<(String, LargeSquare)>,
    /// Their norms, which are read from the device together.
    norms: Transaction,
}

impl PathVisitor for Norms<'_> {
    fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.get::<D>(param.id) else {
            return;
        };
        if !self.seen.insert(param.id) {
            return;
        }
        let norm = norm(halocline_ops::widened(gradient.clone()));
        self.norms = std::mem::take(&mut self.norms).register(norm);
        let large_square = move || square_of_large_norm(halocline_ops::widened(gradient));
        self.counted.push((path.join("."), Box::new(large_square)));
    }
}

/// Computes the norm; the squares are not stored. Unlike burn's sum, it has the same bits on CPUs
/// for any number of threads, as ranks compute it separately for parameters that must stay equal.
fn norm<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dims: [usize; D] = std::array::from_fn(|dim| dim);
    x.vector_norm(2.0, &dims)
}

/// Computes the square of the norm of elements whose squares overflow the dtype; infinite if an
/// element is.
fn square_of_large_norm<const D: usize>(x: Tensor<D>) -> f64 {
    let largest = x.clone().abs().max().into_scalar::<f64>();
    if !largest.is_finite() {
        return f64::INFINITY;
    }
    let part = norm(x / largest).into_scalar::<f64>();
    part.powi(2) * largest * largest
}

/// Multiplies the gradients of a model by a factor; gradients of other parameters are kept.
pub(super) fn scaled<M: Module>(
    model: &M,
    gradients: GradientsParams,
    factor: f64,
) -> GradientsParams {
    Scale::of(model, gradients, factor, false)
}

/// Casts the gradients of a model to the dtypes of its parameters, and multiplies them by a factor.
pub(super) fn widened<M: Module>(
    model: &M,
    gradients: GradientsParams,
    factor: f64,
) -> GradientsParams {
    Scale::of(model, gradients, factor, true)
}

struct Scale {
    gradients: GradientsParams,
    factor: f64,
    widens: bool,
    /// Parameters whose gradients are done, as one may occur in two places.
    seen: HashSet<ParamId>,
}

impl Scale {
    fn of<M: Module>(
        model: &M,
        gradients: GradientsParams,
        factor: f64,
        widens: bool,
    ) -> GradientsParams {
        let mut scale = Self {
            gradients,
            factor,
            widens,
            seen: HashSet::new(),
        };
        model.visit(&mut scale);
        scale.gradients
    }
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let gradient = if self.widens {
                gradient.cast(FloatDType::from(param.base().dtype()))
            } else {
                gradient
            };
            // By all threads, in the memory of the gradient.
            let scaled = ShardTensor::solo(gradient) * self.factor;
            self.gradients.register(param.id, scaled.into_local());
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use burn::tensor::{Device, Distribution};

    use super::*;

    /// Replicas scaled by different factors would drift apart.
    #[test]
    fn norms_of_large_gradients_have_the_same_bits_with_any_number_of_threads() {
        let device = Device::flex();
        let model = LinearConfig::new(2100, 2048)
            .with_bias(false)
            .init(&device.clone().autodiff());
        let normal = Distribution::Normal(0.0, 1.0);
        let gradient = Tensor::<2>::random([2100, 2048], normal, &device);
        let norm = |threads| {
            let mut gradients = GradientsParams::new();
            gradients.register(model.weight.id, gradient.clone());
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let clip = || clip_grad_norm(&model, gradients, f64::MAX).unwrap().1;
            pool.unwrap().install(clip)
        };
        let one = norm(1);
        assert!((2..9).all(|threads| norm(threads).to_bits() == one.to_bits()));
    }

    #[test]
    fn gradients_whose_squares_are_too_large_are_clipped() {
        let device = Device::default().autodiff();
        let model = LinearConfig::new(2, 1).with_bias(false).init(&device);
        let x = Tensor::<2>::from_data([[3e20_f32, 4e20]], &device);
        let gradients = model.forward(x).sum().backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        let (gradients, norm) = clip_grad_norm(&model, gradients, 1.0).unwrap();
        assert!((norm / 5e20 - 1.0).abs() < 1e-6, "{norm}");
        let clipped = gradients.get::<2>(model.weight.id).unwrap();
        let clipped: Vec<f32> = clipped.into_data().try_to_vec().unwrap();
        assert!(
            (clipped[0] - 0.6).abs() < 1e-6 && (clipped[1] - 0.8).abs() < 1e-6,
            "{clipped:?}"
        );
    }
}
