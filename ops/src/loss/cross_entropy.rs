//! Cross-entropy over classes, which may be sharded.

use burn::backend::DispatchTensor;
use burn::tensor::{Int, Tensor, TensorData};
use halocline_core::comm::Operation;
use halocline_core::ops::{
    BackwardPass, Operator, agree_on, all_gather_numbers, all_reduce, apply,
};
use halocline_core::{
    DeviceMesh, Error, Fan, Placement, ReduceOp, Replicate, Result, Shard, ShardTensor, Traffic,
};

use super::Reduction;
use crate::driver::empty::{fill_all, without_fill};
use crate::kernel::flex::signed;
use crate::precision::{cast, cast_shard, highest, narrowed, wider};
use crate::reduce::sum;
use crate::reshape;

const NAME: &str = "cross_entropy";
/// Dim of the classes.
const CLASSES: usize = 1;

/// Options of [`cross_entropy`].
///
/// # Example
/// ```
/// use halocline_ops::CrossEntropyOptions;
///
/// let options = CrossEntropyOptions::default().with_label_smoothing(0.1).with_ignore_index(255);
/// assert_eq!(options.ignore_index, Some(255));
/// ```
#[derive(Clone, Debug, Default)]
pub struct CrossEntropyOptions {
    /// Share of the target that is spread evenly over all classes.
    pub label_smoothing: f64,
    /// Weight per class; 1 by default.
    pub weights: Option<Vec<f64>>,
    /// Target value of cells to ignore.
    pub ignore_index: Option<i64>,
}

impl CrossEntropyOptions {
    /// Sets the label smoothing.
    #[must_use]
    pub fn with_label_smoothing(self, share: f64) -> Self {
        Self {
            label_smoothing: share,
            ..self
        }
    }

    /// Sets the weight of each class.
    #[must_use]
    pub fn with_weights(self, weights: Vec<f64>) -> Self {
        Self {
            weights: Some(weights),
            ..self
        }
    }

    /// Ignores cells with this target value.
    #[must_use]
    pub fn with_ignore_index(self, index: i64) -> Self {
        Self {
            ignore_index: Some(index),
            ..self
        }
    }

    fn weight(&self, class: usize) -> f64 {
        self.weights.as_ref().map_or(1.0, |weights| weights[class])
    }
}

/// Computes the cross-entropy of logits `[batch, classes, *spatial]` and targets
/// `[batch, *spatial]`, reduced to one number. The mean is weighted by the class weights of the
/// targets, without ignored cells.
///
/// `l = Σ_c q[c] · (log Σ_k exp(x[k]) − x[c])`, with
/// `q[c] = w[c] · ((1 − ε) · [c = target] + ε / classes)`, for label smoothing `ε` and class
/// weights `w`. Semantics follow PyTorch.
///
/// # Placement
/// All dims of the logits may be sharded, classes included. Targets are sharded as the logits are,
/// and replicated over axes that shard classes.
///
/// # Communication
/// None for the losses of cells if classes are not sharded; otherwise a maximum and one sum over
/// the ranks that share them. A mean with class weights or ignored cells gathers two numbers per
/// rank. Nothing in the backward pass.
///
/// # Errors
/// Fails for shapes or layouts that do not match, for a target that is neither a class nor ignored,
/// and if communication fails. Such a target is an error on every rank if the mean has class
/// weights or ignored cells, or with checks enabled; otherwise on the ranks that hold it.
///
/// # Example
/// ```
/// use burn::tensor::{Int, Tensor};
/// use halocline_core::{Launcher, Replicate, Shard, ShardTensor};
/// use halocline_ops::{CrossEntropyOptions, ReduceField, Reduction, cross_entropy};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     // Five classes over two ranks.
///     let logits = ShardTensor::<2>::ones([3, 5], &mesh, &[Shard(1)])?;
///     let target = Tensor::<1, Int>::from_ints([0, 4, 2], world.device());
///     let target = ShardTensor::distribute(target, &mesh, &[Replicate])?;
///     let options = CrossEntropyOptions::default();
///     let loss = cross_entropy(logits, target, &options, Reduction::Mean)?;
///     assert!((loss.into_scalar::<f64>() - 5.0_f64.ln()).abs() < 1e-6);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cross_entropy<const D: usize, const E: usize>(
    logits: ShardTensor<D>,
    target: ShardTensor<E, Int>,
    options: &CrossEntropyOptions,
    reduction: Reduction,
) -> Result<ShardTensor<1>> {
    check(&logits, &target, options)?;
    let found = Targets::of(&target, logits.dims()[CLASSES], options);
    let is_weighted = options.weights.is_some() || options.ignore_index.is_some();
    let count = match reduction {
        Reduction::Mean if is_weighted => found.count(&target)?,
        Reduction::Mean => found
            .agree(&target)
            .map(|()| target.dims().iter().product::<usize>() as f64)?,
        Reduction::Sum => found.agree(&target).map(|()| 1.0)?,
    };
    let dtype = logits.local().dtype();
    // At least f32 until the mean is taken: the sum over many cells can overflow half precision.
    Ok(narrowed(
        sum(wide_cells(logits, target, options)?)? / count,
        dtype,
    ))
}

/// Computes the cross-entropy of each cell, `[batch, *spatial]`, zero where the target is ignored.
/// See [`cross_entropy`].
///
/// # Errors
/// Errors of [`cross_entropy`].
///
/// # Example
/// ```
/// use burn::tensor::{Int, Tensor};
/// use halocline_core::ShardTensor;
/// use halocline_ops::{CrossEntropyOptions, cross_entropy_cells};
///
/// let logits = ShardTensor::solo(Tensor::<2>::from([[0.0, 0.0], [0.0, 100.0]]));
/// let target = ShardTensor::solo(Tensor::<1, Int>::from([0, 1]));
/// let losses = cross_entropy_cells(logits, target, &CrossEntropyOptions::default())?;
/// losses.into_local().into_data().assert_eq(&[2.0_f32.ln(), 0.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cross_entropy_cells<const D: usize, const E: usize>(
    logits: ShardTensor<D>,
    target: ShardTensor<E, Int>,
    options: &CrossEntropyOptions,
) -> Result<ShardTensor<E>> {
    check(&logits, &target, options)?;
    Targets::of(&target, logits.dims()[CLASSES], options).agree(&target)?;
    let dtype = logits.local().dtype();
    Ok(cast_shard(wide_cells(logits, target, options)?, dtype))
}

/// [`cross_entropy_cells`] in at least f32.
fn wide_cells<const D: usize, const E: usize>(
    logits: ShardTensor<D>,
    target: ShardTensor<E, Int>,
    options: &CrossEntropyOptions,
) -> Result<ShardTensor<E>> {
    let dtype = logits.local().dtype();
    let (local, layout, mesh) = logits.into_parts();
    let losses = target.layout().clone();
    // Fan placements stay, since their gradients are partial.
    let placements = layout.map_placements(of_cells);
    let losses = losses.derive(placements, losses.all_extents().to_vec());
    let (held, wide) = (local.dims(), wider(dtype));
    let filled = fill_all(cast(local, wide), &layout, NAME, -highest(wide))?;
    let mut shape = filled.dims();
    shape[CLASSES] = 1;
    // Filler cells have no target.
    let ignored = options.ignore_index.unwrap_or(-1);
    let target = signed(target.into_local().inner());
    let target = if held
        .iter()
        .enumerate()
        .any(|(dim, held)| dim != CLASSES && *held == 0)
    {
        let options = (&filled.device().inner(), target.dtype());
        Tensor::full(shape, ignored, options)
    } else {
        target.reshape(shape)
    };
    let first = layout.local_box(mesh.position()).ranges()[CLASSES].start;
    let run = CrossEntropy {
        target,
        first,
        held: held[CLASSES],
        classes: layout.shape()[CLASSES],
        options: options.clone(),
        axes: layout.axes_of(CLASSES),
        operation: Operation::new(NAME, Traffic::Reduce, Some(&layout)),
        mesh,
    };
    let mesh = run.mesh.clone();
    Error::catch(|| {
        let y = Tensor::<D>::from_dispatch(apply(run, [filled.into_dispatch()]));
        let mut shape = shape.to_vec();
        shape.remove(CLASSES);
        let y = reshape::<D, E>(y, shape);
        without_fill(y, losses, mesh, NAME)
    })?
}

/// Placement of the losses of cells, for one of the logits.
fn of_cells(placement: Placement) -> Placement {
    match placement {
        Shard(CLASSES) => Replicate,
        Shard(dim) => Shard(dim - usize::from(dim > CLASSES)),
        other => other,
    }
}

fn check<const D: usize, const E: usize>(
    logits: &ShardTensor<D>,
    target: &ShardTensor<E, Int>,
    options: &CrossEntropyOptions,
) -> Result<()> {
    let fail = |message: String| Err(Error::operator(NAME, message));
    logits.require_resolved(NAME)?;
    target.require_resolved(NAME)?;
    let (shape, cells) = (logits.dims(), target.dims());
    let dim_of = |cell: usize| cell + usize::from(cell >= CLASSES);
    let fits = D == E + 1 && D > CLASSES && (0..E).all(|cell| shape[dim_of(cell)] == cells[cell]);
    if !fits || shape[CLASSES] == 0 {
        return fail(format!(
            "logits {shape:?} and targets {cells:?}; expected [batch, classes, *spatial] and [batch, *spatial]"
        ));
    }
    let classes = shape[CLASSES];
    if let Some(weights) = &options.weights
        && weights.len() != classes
    {
        return fail(format!("{} weights for {classes} classes", weights.len()));
    }
    if !(0.0..=1.0).contains(&options.label_smoothing) {
        return fail(format!(
            "label smoothing {}; expected 0 to 1",
            options.label_smoothing
        ));
    }
    // Integers have no gradients: `Fan` is the same as `Replicate`.
    let whole = |placement: Placement| match placement {
        Fan => Replicate,
        other => other,
    };
    let expected = logits.placements().iter().copied().map(of_cells);
    let held = target.placements().iter().copied().map(whole);
    let extents =
        |cell: usize| logits.layout().extents(dim_of(cell)) == target.layout().extents(cell);
    let alike = logits.layout().mesh() == target.layout().mesh()
        && held.eq(expected.map(whole))
        && (0..E).all(extents);
    if !alike {
        return Err(Error::placement(
            NAME,
            format!(
                "targets {} with logits {}",
                target.layout(),
                logits.layout()
            ),
            "redistribute the targets to the placements of the same cells of the logits, replicated over axes of classes",
        ));
    }
    Ok(())
}

/// Targets of this rank, read once.
struct Targets {
    classes: usize,
    /// Sum of the class weights of the targets that are not ignored.
    weight: f64,
    /// The first target that is neither a class nor ignored.
    unknown: Option<i64>,
}

impl Targets {
    fn of<const E: usize>(
        target: &ShardTensor<E, Int>,
        classes: usize,
        options: &CrossEntropyOptions,
    ) -> Self {
        let (mut weight, mut unknown) = (0.0, None);
        for index in target.local().to_data().iter::<i64>() {
            match usize::try_from(index) {
                _ if Some(index) == options.ignore_index => {}
                Ok(class) if class < classes => weight += options.weight(class),
                _ => unknown = unknown.or(Some(index)),
            }
        }
        Self {
            classes,
            weight,
            unknown,
        }
    }

    fn check(&self) -> Result<()> {
        match self.unknown {
            None => Ok(()),
            Some(index) => {
                let message = format!(
                    "target {index} of {} classes; expected 0 to {}, or ignore_index",
                    self.classes,
                    self.classes - 1
                );
                Err(Error::operator(NAME, message))
            }
        }
    }

    /// [`check`](Self::check) on all ranks, with checks enabled.
    fn agree<const E: usize>(&self, target: &ShardTensor<E, Int>) -> Result<()> {
        agree_on(
            target.mesh(),
            &target.layout().sharded_axes(),
            NAME,
            self.check(),
        )
    }

    /// Sum of the weights over all ranks. A target that is unknown to one rank is an error on all.
    fn count<const E: usize>(self, target: &ShardTensor<E, Int>) -> Result<f64> {
        let axes = target.layout().sharded_axes();
        let mesh = target.mesh();
        let operation = Operation::new("cross_entropy_count", Traffic::Reduce, None);
        let group = mesh.ranks_along(&axes);
        // NaN stands for no unknown target.
        let unknown = self.unknown.map_or(f64::NAN, |index| index as f64);
        let numbers = [self.weight, unknown];
        let all = all_gather_numbers(mesh.comm(), &group, &operation, &numbers)?;
        let unknown = all.iter().find(|numbers| !numbers[1].is_nan());
        let unknown = unknown.map(|numbers| numbers[1] as i64);
        Self { unknown, ..self }.check()?;
        Ok(all.iter().map(|numbers| numbers[0]).sum())
    }
}

/// Graph node for the losses of cells, with one cell in the dim of classes.
#[derive(Debug)]
struct CrossEntropy<const D: usize> {
    target: Tensor<D, Int>,
    /// First class of this rank, and the number of its classes.
    first: usize,
    held: usize,
    classes: usize,
    options: CrossEntropyOptions,
    /// Mesh axes over which classes are sharded.
    axes: Vec<usize>,
    operation: Operation,
    mesh: DeviceMesh,
}

impl<const D: usize> CrossEntropy<D> {
    /// Target distribution `q` over this rank's classes, for each cell.
    fn shares(&self, like: &Tensor<D>) -> Tensor<D> {
        let options = &self.options;
        let (dims, device) = (like.dims(), (&like.device(), like.dtype()));
        let classes = dims[CLASSES];
        let mut shape = [1; D];
        shape[CLASSES] = classes;
        let along =
            |values: Vec<f64>| Tensor::<D>::from_data(TensorData::new(values, shape), device);
        let weight = |class: usize| {
            if class < self.held {
                options.weight(self.first + class)
            } else {
                0.0
            }
        };
        let hit = (0..classes).map(|class| (1.0 - options.label_smoothing) * weight(class));
        let all = options.label_smoothing / self.classes as f64;
        let smooth = (0..classes).map(|class| all * weight(class));
        // In the type of the targets, since burn only compares equal types.
        let classes: Vec<i64> = (0..classes)
            .map(|class| (self.first + class) as i64)
            .collect();
        let kind = (&like.device(), self.target.dtype());
        let numbers = Tensor::<D, Int>::from_data(TensorData::new(classes, shape), kind);
        let target = self.target.clone().expand(dims);
        let is_hit = numbers.expand(dims).equal(target.clone());
        let nothing = Tensor::<D>::zeros(dims, device);
        let hits = nothing
            .clone()
            .mask_where(is_hit, along(hit.collect()).expand(dims));
        let shares = hits + along(smooth.collect());
        match options.ignore_index {
            None => shares,
            Some(index) => shares.mask_fill(target.equal_elem(index), 0.0),
        }
    }

    /// Sum of `q` over all classes, for each cell.
    fn weights(&self, like: &Tensor<D>) -> Tensor<D> {
        let options = &self.options;
        let all: f64 = (0..self.classes).map(|class| options.weight(class)).sum();
        let smooth = options.label_smoothing * all / self.classes as f64;
        let weight =
            |class: usize| (1.0 - options.label_smoothing) * options.weight(class) + smooth;
        let weights: Vec<f64> = (0..self.classes).map(weight).collect();
        let weights = TensorData::new(weights, [self.classes]);
        let weights = Tensor::<1>::from_data(weights, (&like.device(), like.dtype()));
        // On the device, which would otherwise wait for a copy of the targets to the host.
        let ignored = options
            .ignore_index
            .map(|index| self.target.clone().equal_elem(index));
        let classes = match &ignored {
            Some(ignored) => self.target.clone().mask_fill(ignored.clone(), 0),
            // Cells of filler have the target −1.
            None => self.target.clone().clamp_min(0),
        };
        let dims = classes.dims();
        let classes: Tensor<1, Int> = classes.reshape([dims.iter().product::<usize>()]);
        let weights: Tensor<D> = weights.select(0, classes).reshape(dims);
        match ignored {
            Some(ignored) => weights.mask_fill(ignored, 0.0),
            None => weights,
        }
    }

    fn reduce(&self, tensor: Tensor<D>, op: ReduceOp) -> Tensor<D> {
        all_reduce(tensor, &self.mesh, &self.axes, op, self.operation.clone())
    }
}

impl<const D: usize> Operator for CrossEntropy<D> {
    /// Largest logit of each cell, and the logarithm of the sum of `exp(logit − largest)`.
    type Saved = [Tensor<D>; 2];

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Self::Saved)> {
        let x = Tensor::<D>::from_dispatch(inputs.remove(0));
        Error::catch(|| {
            let most = self.reduce(x.clone().max_dim(CLASSES), ReduceOp::Max);
            // An infinite shift would turn an infinite result into NaN.
            let limit = highest(x.dtype());
            let most = most.clamp(-limit, limit);
            // Computed from differences to the largest logit: a common offset would cost digits.
            let x = x - most.clone();
            let exponentials = x.clone().exp().sum_dim(CLASSES);
            let shares = self.shares(&x);
            // An infinite logit of a class with zero weight in the target does not count.
            let none = shares.clone().equal_elem(0.0);
            let weights = self.weights(&x);
            let scored = (shares * x).mask_fill(none, 0.0).sum_dim(CLASSES);
            // Both sums in one message.
            let sums = self.reduce(
                Tensor::cat(vec![exponentials, scored], CLASSES),
                ReduceOp::Sum,
            );
            let log_sum = sums.clone().narrow(CLASSES, 0, 1).log();
            let none = weights.clone().equal_elem(0.0);
            let weighted = (weights * log_sum.clone()).mask_fill(none, 0.0);
            let losses = weighted - sums.narrow(CLASSES, 1, 1);
            (losses.into_dispatch(), [most, log_sum])
        })
    }

    fn backward(
        &self,
        mut pass: BackwardPass<'_, Self::Saved>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let x = Tensor::<D>::from_dispatch(pass.take_input(0));
        let gradient = Tensor::<D>::from_dispatch(pass.cotangent);
        let [most, log_sum] = pass.saved.clone();
        let softmax = (x.clone() - most - log_sum).exp();
        let slope = softmax * self.weights(&x) - self.shares(&x);
        Ok(vec![Some((slope * gradient).into_dispatch())])
    }
}
