//! The driver of all stencil operators: plan, exchange, kernel.
//!
//! An operator defines a [`Window`] per spatial dim. The windows determine the global output size,
//! the extents of the output, the cells that each rank needs, and whether anything must be sent at
//! all.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use halocline_core::ops::{BackwardPass, Exchange, Operator, apply, blank};
use halocline_core::{DeviceMesh, Error, IndexBox, Layout, Placement, Result, ShardTensor, trace};

use super::empty::without_fill;
use super::plan::{Reaches, StencilPlan};
use super::reach::Reach;
use super::window::Window;
use crate::operand::Operand;

/// Treatment of channels by an operator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Channels {
    /// Treats channels alike.
    Alike,
    /// Mixes channels and returns this many.
    Mixed(usize),
    /// Returns a result with these placements and extents of channels.
    Laid(Vec<Placement>, Vec<usize>),
}

/// A stencil operator on `[batch, channels, *spatial]`: a window per spatial dim, and the values
/// beyond the field.
///
/// # Placement
/// All dims may be sharded, with any extents; channels must be whole if the operator mixes them.
///
/// # Adjoint
/// The adjoints of the local kernel and of the exchange, in turn: gradients of halo cells are sent
/// back and added up.
///
/// # Example
/// ```
/// use halocline_core::{Boundary, Launcher, Shard, ShardTensor};
/// use halocline_ops::{Padding, Stencil, Window};
///
/// // The difference to the next cell on a ring.
/// let forward = Padding { low: 0, high: 1, boundary: [Boundary::Periodic; 2] };
/// let stencil = Stencil::new("difference", vec![Window::new(2).with_padding(forward)]);
/// Launcher::local(3).run(|world| {
///     let mesh = world.mesh([("x", 3)])?;
///     let x = ShardTensor::<3>::ones([1, 1, 7], &mesh, &[Shard(2)])?;
///     let y = stencil.run(x, |x, _| {
///         let cells = x.dims()[2] - 1;
///         x.clone().narrow(2, 1, cells) - x.narrow(2, 0, cells)
///     })?;
///     assert_eq!(y.full_tensor().sum().into_scalar::<f32>(), 0.0);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Stencil {
    operator: &'static str,
    windows: Vec<Window>,
    channels: Channels,
    /// Bits of the fill value, so that stencils can be compared and hashed.
    fill: u64,
}

/// Drops the gradient of a parameter on ranks without outputs: there the kernel runs on fill, for
/// which the gradient may be undefined.
#[derive(Debug)]
struct Counts(bool);

impl Operator for Counts {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        Ok((inputs.remove(0), ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let gradient = if self.0 {
            pass.cotangent
        } else {
            blank(&pass.cotangent, &pass.cotangent.shape(), Some(0.0))
        };
        Ok(vec![Some(gradient)])
    }
}

impl Stencil {
    /// Creates an operator with a window per spatial dim, whose kernel treats channels alike and
    /// does not pad.
    pub fn new(operator: &'static str, windows: Vec<Window>) -> Self {
        Self {
            operator,
            windows,
            channels: Channels::Alike,
            fill: 0.0_f64.to_bits(),
        }
    }

    /// Makes this an operator that mixes channels and returns `channels` of them.
    #[must_use]
    pub fn with_channels(self, channels: usize) -> Self {
        Self {
            channels: Channels::Mixed(channels),
            ..self
        }
    }

    /// Sets the placements of the result and the extents of its channels.
    pub(crate) fn with_channels_on(self, placements: Vec<Placement>, extents: Vec<usize>) -> Self {
        Self {
            channels: Channels::Laid(placements, extents),
            ..self
        }
    }

    /// Sets the value of cells beyond a [`Boundary::Zeros`](halocline_core::Boundary::Zeros).
    #[must_use]
    pub fn with_fill(self, fill: f64) -> Self {
        Self {
            fill: fill.to_bits(),
            ..self
        }
    }

    /// Name of the operator.
    pub fn operator(&self) -> &'static str {
        self.operator
    }

    /// Windows, one per spatial dim.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// Plans the operator for a tensor; nothing is sent.
    ///
    /// # Errors
    /// A placement without a rule, a window that fits nowhere.
    pub(crate) fn plan<const D: usize>(&self, x: &ShardTensor<D>) -> Result<Arc<StencilPlan>> {
        self.plan_on(x, x.layout())
    }

    /// Plans the operator for a tensor with the mesh of `x` and another layout, which may differ
    /// from that of `x` in whole dims.
    pub(crate) fn plan_on<const D: usize>(
        &self,
        x: &ShardTensor<D>,
        layout: &Layout,
    ) -> Result<Arc<StencilPlan>> {
        x.require_resolved(self.operator)?;
        if self.windows.len() + 2 != D {
            return Err(Error::operator(
                self.operator,
                format!("{} windows for a tensor of {D} dims", self.windows.len()),
            ));
        }
        if matches!(self.channels, Channels::Mixed(_)) {
            x.require_whole(self.operator, 1)?;
        }
        let mesh = x.mesh();
        let key = (self.clone(), layout.clone());
        mesh.cache()
            .get_or_make(key, |(stencil, layout)| stencil.make(layout, mesh))
    }

    /// Plan for this rank's position.
    fn make(&self, layout: &Layout, mesh: &DeviceMesh) -> Result<StencilPlan> {
        let like = match &self.channels {
            Channels::Alike => layout.clone(),
            Channels::Mixed(channels) => layout.resized(1, vec![*channels]),
            Channels::Laid(placements, channels) => {
                let mut extents = layout.all_extents().to_vec();
                extents[1].clone_from(channels);
                layout.derive(placements.clone(), extents)
            }
        };
        let windows: Vec<Reach> = self.windows.iter().copied().map(Reach::from).collect();
        let reaches = Reaches {
            operator: self.operator,
            first: 2,
            dims: &windows,
        };
        reaches.plan(layout, mesh, &like, f64::from_bits(self.fill))
    }

    /// Runs the operator. The kernel computes a box of outputs, given by global indices, from the
    /// cells that its windows reach. On a rank without outputs it receives one window of fill and
    /// the box of one output, and its result is dropped.
    ///
    /// # Errors
    /// A placement without a rule; a window that fits nowhere; a kernel that returns a wrong number
    /// of outputs, or that captures a tensor with gradients, which must be passed to
    /// [`run_with`](Self::run_with) instead; a failure of communication.
    pub fn run<const D: usize>(
        &self,
        x: ShardTensor<D>,
        kernel: impl Fn(Tensor<D>, &IndexBox) -> Tensor<D>,
    ) -> Result<ShardTensor<D>> {
        self.run_with(x, [], move |x, _: [Tensor<1>; 0], outputs| {
            kernel(x, outputs)
        })
    }

    /// [`run`](Self::run) with parameters that are the same on all ranks and that the kernel
    /// receives along with the cells. Their gradients are summed over the ranks between which `x`
    /// is sharded.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run); a parameter of another dtype.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::ShardTensor;
    /// use halocline_ops::{Stencil, Window};
    ///
    /// let x = ShardTensor::solo(Tensor::<3>::from([[[1.0, 2.0, 4.0]]]));
    /// let scale = Tensor::<1>::from([10.0]);
    /// let y = Stencil::new("scale", vec![Window::new(1)])
    ///     .run_with(x, [scale], |x, [scale], _| x * scale.unsqueeze())?;
    /// y.into_local().into_data().assert_eq(&[[[10.0_f32, 20.0, 40.0]]].into(), true);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn run_with<const D: usize, const E: usize, const N: usize>(
        &self,
        x: ShardTensor<D>,
        parameters: [Tensor<E>; N],
        kernel: impl Fn(Tensor<D>, [Tensor<E>; N], &IndexBox) -> Tensor<D>,
    ) -> Result<ShardTensor<D>> {
        let plan = self.plan(&x)?;
        if size_of_val(&kernel) > 0 && x.device().is_autodiff() {
            self.refuse_captured_leaves(&x, &plan, &parameters, &kernel)?;
        }
        // A kernel may read only the parameters, in which case the loss does not depend on `x`.
        let detached = x.clone().inner();
        let mut beside = Vec::with_capacity(N);
        for parameter in parameters {
            beside.push(Operand::from(parameter).replicated_for(&detached, self.operator)?);
        }
        if plan.output.has_empty_shard() {
            let counts = plan.output.local_box(x.mesh().position()).volume() > 0;
            let count = |parameter: Tensor<E>| {
                Tensor::from_dispatch(apply(Counts(counts), [parameter.into_dispatch()]))
            };
            beside = beside.into_iter().map(count).collect();
        }
        let parameters: [_; N] = beside.try_into().expect("as many as there were");
        self.run_planned(x, &plan, |x, outputs| {
            kernel(x, parameters.clone(), outputs)
        })
    }

    /// Runs one of our kernels, which capture no tensor.
    ///
    /// # Errors
    /// A kernel that returns a wrong number of outputs; a failure of communication.
    pub(crate) fn run_planned<const D: usize>(
        &self,
        x: ShardTensor<D>,
        plan: &StencilPlan,
        kernel: impl FnOnce(Tensor<D>, &IndexBox) -> Tensor<D>,
    ) -> Result<ShardTensor<D>> {
        let cells = match &plan.exchange {
            None => x.local().clone(),
            Some(exchange) => x.run_plan(self.operator, exchange)?,
        };
        self.results(x, plan, |outputs| Ok(kernel(cells, outputs)))
    }

    /// [`run_planned`](Self::run_planned) for a kernel that runs the exchange itself; it receives
    /// this rank's shard.
    ///
    /// # Errors
    /// The errors of [`run_planned`](Self::run_planned).
    pub(crate) fn run_unassembled<const D: usize>(
        &self,
        x: ShardTensor<D>,
        plan: &StencilPlan,
        kernel: impl FnOnce(Tensor<D>, Option<Exchange>, &IndexBox) -> Tensor<D>,
    ) -> Result<ShardTensor<D>> {
        let exchange = plan.exchange(self.operator, x.layout(), x.mesh());
        let shard = x.local().clone();
        self.results(x, plan, |outputs| {
            Error::catch(|| kernel(shard, exchange, outputs))
        })
    }

    /// Results for this rank's box of outputs.
    fn results<const D: usize>(
        &self,
        x: ShardTensor<D>,
        plan: &StencilPlan,
        kernel: impl FnOnce(&IndexBox) -> Result<Tensor<D>>,
    ) -> Result<ShardTensor<D>> {
        let outputs = plan.output.local_box(x.mesh().position());
        // One output if the rank has none.
        let asked = outputs.ranges().iter().zip(plan.output.shape());
        let asked = asked.map(|(own, size)| {
            if own.is_empty() {
                let first = own.start.min(size.saturating_sub(1));
                first..first + 1
            } else {
                own.clone()
            }
        });
        let asked = IndexBox::new(asked.collect());
        let span = trace::span(self.operator);
        let local = kernel(&asked)?;
        drop(span);
        let mut dims = outputs.ranges().iter().zip(local.dims());
        if !dims.all(|(outputs, size)| outputs.is_empty() || outputs.len() == size) {
            let message = format!(
                "the kernel gave {:?} for outputs of shape {:?}",
                local.dims(),
                outputs.shape()
            );
            return Err(Error::operator(self.operator, message));
        }
        let (_, _, mesh) = x.into_parts();
        without_fill(local, plan.output.clone(), mesh, self.operator)
    }

    /// Runs the kernel on one window without gradients: a result that has gradients then captures a
    /// tensor.
    fn refuse_captured_leaves<const D: usize, const E: usize, const N: usize>(
        &self,
        x: &ShardTensor<D>,
        plan: &StencilPlan,
        parameters: &[Tensor<E>; N],
        kernel: impl Fn(Tensor<D>, [Tensor<E>; N], &IndexBox) -> Tensor<D>,
    ) -> Result<()> {
        let mut window = [1; D];
        let mut output = [const { 0..1 }; D];
        window[1] = x.dims()[1];
        output[1] = 0..plan.output.shape()[1];
        for (size, own) in window[2..].iter_mut().zip(&self.windows) {
            *size = own.span();
        }
        let cells = Tensor::full(
            window,
            f64::from_bits(self.fill),
            (&x.device(), x.local().dtype()),
        );
        let parameters = parameters
            .each_ref()
            .map(|parameter| parameter.clone().detach().set_require_grad(false));
        let result = kernel(cells, parameters, &IndexBox::new(output.to_vec()));
        if !result.is_tracked() {
            return Ok(());
        }
        let message = "the kernel captures a tensor with gradients, which would be this rank's part of them only; give it \
                       as a parameter: run_with(x, [parameter], |x, [parameter], outputs| ..)";
        Err(Error::operator(self.operator, message))
    }
}

#[cfg(test)]
mod tests {
    use super::super::window::Padding;
    use super::*;
    use halocline_core::{Boundary, Launcher, Shard};

    fn stencil() -> Stencil {
        let ring = Padding::new(1, Boundary::Periodic);
        Stencil::new("sides", vec![Window::new(3).with_padding(ring)])
    }

    /// Sum of both neighbors.
    fn sides(x: Tensor<3>) -> Tensor<3> {
        let cells = x.dims()[2] - 2;
        x.clone().narrow(2, 0, cells) + x.narrow(2, 2, cells)
    }

    #[test]
    fn the_gradient_of_a_parameter_is_the_sum_over_ranks() {
        let gradients = |ranks: usize| {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("x", ranks)])?;
                let x = crate::testing::random([2, 1, 17], "x", 0).inner();
                let x = ShardTensor::distribute(x, &mesh, &[Shard(2)])?.require_grad();
                let scale = Tensor::<1>::from_floats([0.3], world.device()).require_grad();
                let y = stencil().run_with(x, [scale.clone()], |x, [scale], _| {
                    sides(x) * scale.reshape([1, 1, 1])
                })?;
                let gradients = crate::reduce::sum(y.clone() * y)?.backward();
                Ok(scale.grad(&gradients).expect("a gradient").into_data())
            });
            found.unwrap()
        };
        let expected = gradients(1).remove(0);
        for found in gradients(3) {
            assert!(crate::testing::difference(&found, &expected) < 1e-5);
        }
    }

    /// With windows of two cells the last of four ranks has no output: its kernel gets one
    /// position, and its parameter no gradient.
    #[test]
    fn kernels_may_read_places_and_divide_by_cells_on_ranks_without_outputs() {
        let gradients = |ranks: usize| {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("x", ranks)])?;
                let x = crate::testing::random([1, 1, 7], "x", 0).inner().abs() + 0.5;
                let x = ShardTensor::distribute(x, &mesh, &[Shard(2)])?.require_grad();
                let device = world.device();
                let factor = Tensor::<1>::from_floats([0.3], device).require_grad();
                let places = Tensor::<1>::from_floats([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device);
                let steps = Stencil::new("steps", vec![Window::new(2)]);
                let y = steps.run_with(x.clone(), [factor.clone()], |x, [factor], outputs| {
                    let outputs = outputs.ranges()[2].clone();
                    let place = places.clone().narrow(0, outputs.start, outputs.len());
                    let ratio =
                        x.clone().narrow(2, 1, outputs.len()) / x.narrow(2, 0, outputs.len());
                    ratio.log() * factor.reshape([1, 1, 1]) * place.unsqueeze()
                })?;
                let gradients = crate::reduce::sum(y.clone() * y)?.backward();
                let of_x = x.grad(&gradients).expect("a gradient");
                let of_x = of_x.full_tensor();
                let of_factor = factor.grad(&gradients).expect("a gradient");
                Ok([of_x.into_data(), of_factor.into_data()])
            });
            found.unwrap()
        };
        let expected = gradients(1).remove(0);
        for found in gradients(4) {
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    crate::testing::difference(found, expected) < 1e-5,
                    "{found}"
                );
            }
        }
    }

    #[test]
    fn a_kernel_that_captures_a_parameter_is_refused() {
        let refused = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let x = ShardTensor::<3>::ones([1, 1, 8], &mesh, &[Shard(2)])?;
            let scale = Tensor::<3>::full([1, 1, 1], 0.3, world.device()).require_grad();
            let plain = scale.clone().detach();
            let kept = stencil().run(x.clone().require_grad(), |x, _| sides(x) * plain.clone())?;
            assert_eq!(kept.dims(), [1, 1, 8]);
            stencil().run(x, |x, _| sides(x) * scale.clone()).map(drop)
        });
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains("captures a tensor with gradients"),
            "{error}"
        );
        assert!(error.contains("run_with(x, [parameter]"), "{error}");
    }

    #[test]
    fn a_kernel_that_gives_other_outputs_is_refused() {
        let x = ShardTensor::solo(Tensor::<3>::zeros([1, 1, 6], &Default::default()));
        let window = Window::new(3).with_padding(Padding::zeros(1, 1));
        let same = Stencil::new("same", vec![window]).run(x, |x, _| x * 2.0);
        let error = same.unwrap_err().to_string();
        assert!(
            error.contains("[1, 1, 8] for outputs of shape [1, 1, 6]"),
            "{error}"
        );
    }
}
