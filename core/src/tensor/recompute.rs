//! Blocks of a model that the backward pass recomputes, instead of keeping their intermediate
//! results.

use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use burn::backend::DispatchTensor;
use burn::module::Module;
use burn::tensor::Tensor;

use super::{ShardTensor, on_device};
use crate::comm::Replay;
use crate::lock::lock;
use crate::module_scope::{self, ScopeState};
use crate::operator::{BackwardPass, Operator, apply};
use crate::reduce::Substitutes;
use crate::scoped::with_value;
use crate::{DeviceMesh, Error, LayerKeys, Layout, Result};
use parameters::{Detached, Flatten, Originals, Paired, Tracked, flat, gradient};

mod parameters;

/// Handling of halos, and of everything else that a block receives from other ranks, until the
/// backward pass recomputes the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Halos {
    /// They are kept, and nothing is sent twice in the forward direction. For blocks whose halos
    /// are small compared with their input.
    Keep,
    /// They are sent again, and only the block's input is kept. For blocks that receive much: dense
    /// attention on a ring receives the keys and values of all ranks.
    Resend,
}

thread_local! {
    static RECOMPUTES: Cell<bool> = const { Cell::new(false) };
}

/// Whether this rank is recomputing a block, in the backward pass of
/// [`recompute`](ShardTensor::recompute), or is in a [dry run](ShardTensor::dry_run). A layer must
/// then leave its own state, such as running statistics, unchanged.
pub fn is_recomputing() -> bool {
    RECOMPUTES.get()
}

/// Runs a function in which layers leave their state unchanged.
pub(super) fn recomputing<T>(program: impl FnOnce() -> T) -> T {
    with_value(&RECOMPUTES, true, program)
}

impl<const D: usize> ShardTensor<D> {
    /// Applies a block of a model and keeps only its input: the backward pass recomputes the block,
    /// and then computes its gradients. Memory falls to that of one block, and time grows by that
    /// of a forward pass.
    ///
    /// Results and gradients are bit-identical to those of the block itself. Data that the block
    /// receives from other ranks is kept or sent again, depending on `halos`; parameters stored in
    /// shards are always gathered again. Layers draw the same [`LayerKeys`] again, and batch norms
    /// count a batch once. All parameters of `module` receive gradients, zero where the block does
    /// not use them. A custom module that changes its state in the forward pass does so twice,
    /// unless it checks [`is_recomputing`]. Tensors captured by the closure must not have
    /// gradients; pass such a tensor, as a state that is carried from step to step, by
    /// [`recompute_with`](Self::recompute_with).
    ///
    /// # Panics
    /// Panics if the block captures a tensor with gradients, if the operands are on different
    /// meshes, if the block's messages depend on anything but its operands, or if parameters with
    /// gradients have different element types; [raises](Error::raise) the errors of the block.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Tensor;
    /// use halocline_core::{Halos, Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("rows", 2)])?;
    ///     let linear = world.init(|device| LinearConfig::new(3, 3).init(device))?;
    ///     let x = ShardTensor::<2>::ones([4, 3], &mesh, &[Shard(0)])?.require_grad();
    ///     let y = x.clone().recompute(&linear, Halos::Keep, |linear, x| {
    ///         let (local, layout, mesh) = x.into_parts();
    ///         ShardTensor::from_parts(linear.forward(local).tanh(), layout, mesh)
    ///     });
    ///     let gradients = y.into_local().sum().backward();
    ///     assert!(x.grad(&gradients).is_some() && linear.weight.grad(&gradients).is_some());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[must_use]
    pub fn recompute<M: Module + 'static>(
        self,
        module: &M,
        halos: Halos,
        block: impl Fn(&M, Self) -> Self + Send + Sync + 'static,
    ) -> Self {
        let nothing = Tensor::<1>::zeros([1], (&self.device(), self.local.dtype()));
        let layout = Layout::replicated(self.layout.mesh(), &[1]);
        let nothing = ShardTensor::from_parts(nothing, layout, self.mesh.clone());
        self.recompute_with(nothing, module, halos, move |module, x, _| block(module, x))
    }

    /// Like [`recompute`](Self::recompute), for a block with a second operand, which also receives
    /// its gradient, such as a state that is carried from step to step.
    ///
    /// # Panics
    /// Panics where [`recompute`](Self::recompute) does.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use halocline_core::{Halos, ShardTensor};
    ///
    /// let device = Device::default().autodiff();
    /// let linear = LinearConfig::new(3, 3).init(&device);
    /// let ones = || ShardTensor::solo(Tensor::<2>::ones([2, 3], &device).require_grad());
    /// let (x, state) = (ones(), ones());
    /// let next = x.recompute_with(state.clone(), &linear, Halos::Keep, |linear, x, state| {
    ///     let (local, layout, mesh) = (x + state).into_parts();
    ///     ShardTensor::from_parts(linear.forward(local).tanh(), layout, mesh)
    /// });
    /// assert!(state.grad(&next.into_local().sum().backward()).is_some());
    /// ```
    #[must_use]
    pub fn recompute_with<const E: usize, M: Module + 'static>(
        self,
        other: ShardTensor<E>,
        module: &M,
        halos: Halos,
        block: impl Fn(&M, Self, ShardTensor<E>) -> Self + Send + Sync + 'static,
    ) -> Self {
        let mut tracked = Tracked(self.local.is_tracked() || other.local.is_tracked());
        module.visit(&mut tracked);
        if !tracked.0 {
            return block(module, self, other);
        }
        if **self.mesh.shape() != **other.mesh.shape() {
            let message = "operands on two meshes; expected one";
            Error::operator("recompute", message).raise()
        }
        let mut originals = Originals(Vec::new());
        module.visit(&mut originals);
        let parameters = flat(module, &self);
        let replay = match halos {
            Halos::Keep => Some(Arc::new(Replay::of(self.mesh.comm().clone()))),
            Halos::Resend => None,
        };
        let mesh = match &replay {
            None => self.mesh.clone(),
            Some(replay) => self.mesh.with_comm(replay.clone()),
        };
        let output = Arc::new(OnceLock::new());
        let operator = Block {
            module: Mutex::new(module.clone()),
            originals: originals.0,
            block,
            layouts: (self.layout.clone(), other.layout.clone()),
            mesh,
            replay,
            keys: LayerKeys::current(),
            current: DeviceMesh::current().ok(),
            scopes: module_scope::state(),
            output: output.clone(),
        };
        let inputs = [
            self.local.into_dispatch(),
            other.local.into_dispatch(),
            parameters.into_dispatch(),
        ];
        let y = Tensor::from_dispatch(apply(operator, inputs));
        let layout = output.get().expect("a forward pass").clone();
        Self::from_parts(y, layout, self.mesh)
    }
}

/// Operator that applies a block to two operands and the block's parameters, which are concatenated
/// into one tensor.
struct Block<M, F, const D: usize, const E: usize> {
    module: Mutex<M>,
    /// The parameters of the surrounding graph that have gradients, in the order of a visit of the
    /// module; `None` for other tensors.
    originals: Vec<Option<DispatchTensor>>,
    block: F,
    layouts: (Layout, Layout),
    /// The mesh of the block, with the engine `replay` if there is one.
    mesh: DeviceMesh,
    /// Record of the received messages; `None` if they are sent again.
    replay: Option<Arc<Replay>>,
    /// The keys of the random numbers drawn by its layers.
    keys: LayerKeys,
    /// The [current](DeviceMesh::current) mesh of the forward pass.
    current: Option<DeviceMesh>,
    /// The module of the model that applied the block.
    scopes: ScopeState,
    /// The layout of the result.
    output: Arc<OnceLock<Layout>>,
}

impl<M, F, const D: usize, const E: usize> fmt::Debug for Block<M, F, D, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Block")
    }
}

impl<M, F, const D: usize, const E: usize> Block<M, F, D, E>
where
    M: Module,
    F: Fn(&M, ShardTensor<D>, ShardTensor<E>) -> ShardTensor<D>,
{
    /// Applies the block. With `leaves`, parameters that have gradients become leaves of the graph
    /// of this run.
    fn run(&self, x: &Tensor<D>, other: &Tensor<E>, leaves: bool) -> (ShardTensor<D>, M) {
        let module = lock(&self.module).clone();
        let module = module.map(&mut Detached { leaves });
        let mut detached = Paired {
            originals: self.originals.iter(),
            substitutes: Substitutes::new(is_recomputing()),
        };
        module.visit(&mut detached);
        let substitutes = detached.substitutes;
        let (of_x, of_other) = self.layouts.clone();
        let x = ShardTensor::from_parts(x.clone(), of_x, self.mesh.clone());
        let other = ShardTensor::from_parts(other.clone(), of_other, self.mesh.clone());
        let block = || substitutes.scope(|| (self.block)(&module, x, other));
        let y = match &self.current {
            Some(current) if current.shape() == self.mesh.shape() => self.mesh.scope(block),
            Some(current) => current.scope(block),
            None => block(),
        };
        (y, module)
    }
}

impl<M, F, const D: usize, const E: usize> Operator for Block<M, F, D, E>
where
    M: Module + 'static,
    F: Fn(&M, ShardTensor<D>, ShardTensor<E>) -> ShardTensor<D> + Send + Sync + 'static,
{
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["block", "block (again, and backward)"])
    }

    /// Keeps the operands, but not the parameters, which the module holds.
    fn keeps(&self, input: usize) -> bool {
        input < 2
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [x, other, _]: [_; 3] = inputs.try_into().expect("three inputs");
        // On a device with autodiff, so that layers detect training; nothing is tracked.
        let device = self.mesh.device().clone().autodiff();
        let x = on_device(Tensor::<D>::from_dispatch(x), &device);
        let other = on_device(Tensor::<E>::from_dispatch(other), &device);
        let (y, _) = self.run(&x, &other, false);
        if y.local.is_tracked() {
            let message = "the block captures a tensor with gradients; pass it by recompute_with";
            return Err(Error::operator("recompute", message));
        }
        self.output.get_or_init(|| y.layout.clone());
        if let Some(replay) = &self.replay {
            replay.repeat();
        }
        Ok((y.local.inner().into_dispatch(), ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let [x, other] = [0, 1].map(|input| pass.take_input(input));
        let device = self.mesh.device().clone().autodiff();
        let mut x = on_device(Tensor::<D>::from_dispatch(x), &device);
        let mut other = on_device(Tensor::<E>::from_dispatch(other), &device);
        if pass.wanted[0] {
            x = x.require_grad();
        }
        if pass.wanted[1] {
            other = other.require_grad();
        }
        let (y, module) = LayerKeys::aside(|| {
            let _module = module_scope::resume(self.scopes.clone());
            self.keys.install();
            recomputing(|| self.run(&x, &other, true))
        });
        if let Some(replay) = &self.replay {
            replay.pass_on();
        }
        let cotangent = on_device(Tensor::<D>::from_dispatch(pass.cotangent), &device);
        let product = (y.local * cotangent).sum();
        // Gradients of parameters join the buckets of the surrounding pass.
        let gradients = product.backward();
        let mut parameters = Flatten {
            gradients: Some(&gradients),
            parts: Vec::new(),
        };
        let parameters = pass.wanted[2].then(|| {
            module.visit(&mut parameters);
            Tensor::cat(parameters.parts, 0).into_dispatch()
        });
        let x = pass.wanted[0].then(|| gradient(&x, &gradients));
        let other = pass.wanted[1].then(|| gradient(&other, &gradients));
        Ok(vec![x, other, parameters])
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::TensorData;

    use super::*;
    use crate::comm::Operation;
    use crate::{Boundary, CommStats, Halo, Launcher, ReduceOp, Shard, Traffic};

    #[derive(Module, Debug)]
    struct Model {
        linear: Linear,
    }

    /// Block with halos, a parameter, and a sum over ranks in the forward pass.
    fn block(model: &Model, x: ShardTensor<2>) -> ShardTensor<2> {
        let halo = Halo::new(0, 1, Boundary::Periodic);
        let rows = x.dims()[0];
        let (layout, mesh) = (x.layout().clone(), x.mesh().clone());
        let around = x.with_halo(&[halo]).unwrap();
        let held = around.dims()[0] - 2;
        let part = |start: usize| around.clone().narrow(0, start, held);
        let weight = model.linear.weight.val();
        let weight = crate::ops::fan_out(weight, &mesh, &[0], "block");
        let y = (part(0) - part(2)).matmul(weight).tanh() / rows as f64;
        let operation = Operation::new("block", Traffic::Reduce, None);
        let total = y.clone().sum_dim(0);
        let total = crate::ops::all_reduce(total, &mesh, &[0], ReduceOp::Sum, operation);
        let total = crate::ops::fan_out(total, &mesh, &[0], "block");
        ShardTensor::from_parts(y + total, layout, mesh)
    }

    fn run(ranks: usize, again: Option<Halos>) -> Vec<(Vec<TensorData>, CommStats)> {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("x", ranks)])?;
            let model = world.init(|device| Model {
                linear: LinearConfig::new(3, 3).init(device),
            })?;
            let x = crate::RandomKey::new(1, "x");
            let uniform = crate::Distribution::Uniform(-1.0, 1.0);
            let x =
                ShardTensor::<2>::random([7, 3], uniform, x, &mesh, &[Shard(0)])?.require_grad();
            let before = world.comm_stats();
            let mut y = x.clone();
            for _ in 0..3 {
                y = match again {
                    Some(halos) => y.recompute(&model, halos, block),
                    None => block(&model, y),
                };
            }
            let forward = y.local().clone().inner();
            let loss = y.local().clone().square().sum();
            let layout = Layout::new(mesh.shape(), &[1], &[crate::Partial(ReduceOp::Sum)])?;
            let loss = ShardTensor::from_parts(loss, layout, mesh.clone());
            let gradients = loss.backward();
            let sent = world.comm_stats().since(&before);
            let gradient = x.grad(&gradients).expect("a gradient");
            let weight = model.linear.weight.val().grad(&gradients);
            let found = vec![
                forward.into_data(),
                gradient.full_tensor().into_data(),
                weight.expect("a gradient").into_data(),
            ];
            Ok((found, sent))
        });
        found.unwrap()
    }

    #[test]
    fn gradients_have_the_same_bits_and_halos_travel_once() {
        for ranks in [1, 3] {
            let again = run(ranks, Some(Halos::Keep)).into_iter();
            for (again, kept) in again.zip(run(ranks, None)) {
                for (again, kept) in again.0.iter().zip(&kept.0) {
                    again.assert_eq(kept, true);
                }
                for traffic in [Traffic::Exchange, Traffic::Reduce] {
                    let bytes = |sent: &CommStats| sent.of(traffic).bytes;
                    assert_eq!(bytes(&again.1), bytes(&kept.1), "{traffic:?}");
                }
            }
        }
    }

    /// Halos travel twice in the forward direction, once per run, and their gradients once.
    #[test]
    fn halos_that_are_sent_again_give_the_same_bits() {
        let again = run(3, Some(Halos::Resend)).into_iter();
        for (again, kept) in again.zip(run(3, None)) {
            for (again, kept) in again.0.iter().zip(&kept.0) {
                again.assert_eq(kept, true);
            }
            let (again, kept) = (again.1, kept.1);
            let forward = |sent: &CommStats| {
                let [all, backward] = [
                    sent.of(Traffic::Exchange),
                    sent.of_backward(Traffic::Exchange),
                ];
                all.bytes - backward.bytes
            };
            assert_eq!(forward(&again), 2 * forward(&kept));
            let backward = |sent: &CommStats| sent.of_backward(Traffic::Exchange).bytes;
            assert_eq!(backward(&again), backward(&kept));
        }
    }

    #[test]
    fn a_captured_tensor_with_gradients_is_refused() {
        let device = burn::tensor::Device::default().autodiff();
        let model = Model {
            linear: LinearConfig::new(3, 3).init(&device),
        };
        let captured = Tensor::<2>::ones([2, 3], &device).require_grad();
        let x = ShardTensor::solo(Tensor::<2>::ones([2, 3], &device).require_grad());
        let refused = Error::catch(|| {
            x.recompute(&model, Halos::Keep, move |_, x| {
                let (local, layout, mesh) = x.into_parts();
                ShardTensor::from_parts(local * captured.clone(), layout, mesh)
            })
        });
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains("captures a tensor with gradients"),
            "{error}"
        );
    }
}
