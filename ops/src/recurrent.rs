//! Recurrent networks: burn's LSTM and GRU, along the steps of a sequence.
//!
//! A sequence is `[batch, steps, *others, features]`, or `[steps, batch, *others, features]` for a
//! module with `batch_first` unset. Its last dim becomes the hidden state. Semantics follow burn,
//! whose modules take three dims.
//!
//! # Placement
//! All dims but the steps and the features may be sharded; values must be resolved. A step needs
//! the one before it, so ranks with parts of a sequence would wait for each other: redistribute
//! such a sequence to shards of the batch or of another dim.
//!
//! # Adjoint
//! Each rank computes that of its sequences. Gradients of parameters are summed over the axes on
//! which the sequence is sharded; nothing else is sent.

use burn::nn::{BiLstm, GateController, Gru, Lstm};
use halocline_core::{Error, OrRaise, Result, ShardTensor};

use crate::field::Field;
use crate::layers::layers;
use crate::matmul::activation_of;
use crate::rearrange::{RearrangeField, ShapeField};

/// State of an LSTM between two steps: tensors like a sequence of one step, with the hidden size in
/// place of the features. See [`lstm`] for an example.
#[derive(Clone, Debug)]
pub struct LstmState<X> {
    /// The cell state.
    pub cell: X,
    /// The hidden state, which is the result of the last step.
    pub hidden: X,
}

/// Applies burn's LSTM, from a state or else from zeros. Returns the hidden state of each step, and
/// the state after the last one. See the [module](self).
///
/// # Shapes
/// `[batch, steps, *others, features]` → `[batch, steps, *others, hidden]`, and a state of
/// `[batch, 1, *others, hidden]`.
///
/// # Errors
/// Fewer than three dims; no steps; sharded steps or features; partial values; sizes or layouts of
/// parameters or state that do not fit.
///
/// # Example
/// ```
/// use burn::nn::LstmConfig;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::recurrent::lstm;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let module = world.init(|device| LstmConfig::new(3, 8, true).init(device))?;
///     let x = ShardTensor::<4>::ones([1, 5, 6, 3], &mesh, &[Shard(2)])?; // [batch, steps, lat, ..]
///     let (y, state) = lstm(&module, x.clone(), None)?;
///     assert_eq!((y.dims(), state.cell.dims()), ([1, 5, 6, 8], [1, 1, 6, 8]));
///     let (later, _) = lstm(&module, x, Some(state))?; // five more steps
///     assert_eq!(later.placements(), [Shard(2)]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn lstm<const D: usize, X: Field<D>>(
    module: &Lstm,
    x: X,
    state: Option<LstmState<X>>,
) -> Result<(X, LstmState<X>)> {
    let dim = dim_of_steps("lstm", &x, module.batch_first)?;
    lstm_along(module, x, state, dim, module.reverse)
}

/// Applies burn's LSTM in both directions, from states or else from zeros. Returns the hidden
/// states of each step, forward and then reverse along the features, and the last states of both
/// directions. See the [module](self).
///
/// # Shapes
/// `[batch, steps, *others, features]` → `[batch, steps, *others, 2 · hidden]`, and states of
/// `[batch, 1, *others, hidden]`.
///
/// # Errors
/// Errors of [`lstm`].
///
/// # Example
/// ```
/// use burn::nn::BiLstmConfig;
/// use burn::tensor::{Device, Tensor};
/// use halocline_ops::recurrent::bi_lstm;
///
/// let device = Device::default();
/// let module = BiLstmConfig::new(3, 8, true).init(&device);
/// let (y, [forward, _]) = bi_lstm(&module, Tensor::<3>::ones([2, 5, 3], &device), None)?;
/// assert_eq!((y.dims(), forward.hidden.dims()), ([2, 5, 16], [2, 1, 8]));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn bi_lstm<const D: usize, X: Field<D>>(
    module: &BiLstm,
    x: X,
    states: Option<[LstmState<X>; 2]>,
) -> Result<(X, [LstmState<X>; 2])> {
    let dim = dim_of_steps("bi_lstm", &x, module.batch_first)?;
    let [forward, reverse] = states.map_or([None, None], |states| states.map(Some));
    let is_reverse = module.forward.reverse;
    let (y, forward) = lstm_along(&module.forward, x.clone(), forward, dim, is_reverse)?;
    let (z, reverse) = lstm_along(&module.reverse, x, reverse, dim, true)?;
    let y = Error::catch(|| X::cat(vec![y, z], D - 1))?;
    Ok((y, [forward, reverse]))
}

/// Applies burn's GRU, from a hidden state or else from zeros. Returns the hidden state of each
/// step, and the last one. See the [module](self).
///
/// # Shapes
/// `[batch, steps, *others, features]` → `[batch, steps, *others, hidden]`, and a state of
/// `[batch, 1, *others, hidden]`.
///
/// # Errors
/// Errors of [`lstm`].
///
/// # Example
/// ```
/// use burn::nn::GruConfig;
/// use burn::tensor::{Device, Tensor};
/// use halocline_ops::recurrent::gru;
///
/// let device = Device::default();
/// let module = GruConfig::new(3, 8, true).init(&device);
/// let (y, hidden) = gru(&module, Tensor::<3>::ones([2, 5, 3], &device), None)?;
/// assert_eq!((y.dims(), hidden.dims()), ([2, 5, 8], [2, 1, 8]));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn gru<const D: usize, X: Field<D>>(module: &Gru, x: X, state: Option<X>) -> Result<(X, X)> {
    let dim = dim_of_steps("gru", &x, true)?;
    let steps = x.dims()[dim];
    Error::catch(|| {
        let gate = |controller| Gate::new(controller, &x, dim);
        let (update, reset) = (gate(&module.update_gate), gate(&module.reset_gate));
        let new = gate(&module.new_gate);
        let open = |sum: X| activation_of(&module.gate_activation, sum);
        let mut hidden = state.unwrap_or_else(|| zeros_like(&update.inputs[0]));
        let mut results = Vec::with_capacity(steps);
        for step in 0..steps {
            let updated = open(update.sum(step, &hidden));
            let reset = open(reset.sum(step, &hidden));
            let sum = if module.reset_after {
                new.inputs[step].clone() + reset * new.of_hidden(&hidden)
            } else {
                new.sum(step, &(hidden.clone() * reset))
            };
            let candidate = activation_of(&module.hidden_activation, sum);
            hidden = candidate * (-updated.clone() + 1.0) + updated * hidden;
            if let Some(clip) = module.clip {
                hidden = hidden.clamp(-clip, clip);
            }
            results.push(hidden.clone());
        }
        (X::cat(results, dim), hidden)
    })
}

layers! {
    Lstm: |module, x| lstm(module, x, None).or_raise().0;
    BiLstm: |module, x| bi_lstm(module, x, None).or_raise().0;
    Gru: |module, x| gru(module, x, None).or_raise().0;
}

/// Returns the dim of the steps of a sequence that can be run.
fn dim_of_steps<const D: usize, X: Field<D>>(
    operator: &'static str,
    x: &X,
    batch_first: bool,
) -> Result<usize> {
    let (x, dim) = (x.clone().into_shard(), usize::from(batch_first));
    if D < 3 || x.dims()[dim] == 0 {
        let message = format!(
            "a sequence {:?}; expected steps, and [batch, steps, *others, features]",
            x.dims()
        );
        return Err(Error::operator(operator, message));
    }
    x.require_resolved(operator)?;
    x.require_whole(operator, dim)?;
    x.require_whole(operator, D - 1)?;
    Ok(dim)
}

fn lstm_along<const D: usize, X: Field<D>>(
    module: &Lstm,
    x: X,
    state: Option<LstmState<X>>,
    dim: usize,
    is_reverse: bool,
) -> Result<(X, LstmState<X>)> {
    let steps = x.dims()[dim];
    Error::catch(|| {
        let gate = |controller| Gate::new(controller, &x, dim);
        let (input, output) = (gate(&module.input_gate), gate(&module.output_gate));
        let candidate = gate(&module.cell_gate);
        let forget = (!module.input_forget).then(|| {
            let controller = module.forget_gate.as_ref();
            gate(controller.expect("a forget gate unless input_forget is set"))
        });
        let open = |sum: X| activation_of(&module.gate_activation, sum);
        let LstmState {
            mut cell,
            mut hidden,
        } = state.unwrap_or_else(|| {
            let zeros = zeros_like(&input.inputs[0]);
            LstmState {
                cell: zeros.clone(),
                hidden: zeros,
            }
        });
        let mut results = Vec::with_capacity(steps);
        for step in 0..steps {
            let step = if is_reverse { steps - 1 - step } else { step };
            let kept = open(input.sum(step, &hidden));
            let held = match &forget {
                Some(forget) => open(forget.sum(step, &hidden)),
                None => -kept.clone() + 1.0,
            };
            let shown = open(output.sum(step, &hidden));
            let new = activation_of(&module.cell_activation, candidate.sum(step, &hidden));
            cell = held * cell + kept * new;
            if let Some(clip) = module.clip {
                cell = cell.clamp(-clip, clip);
            }
            hidden = shown * activation_of(&module.hidden_activation, cell.clone());
            results.push(hidden.clone());
        }
        if is_reverse {
            results.reverse();
        }
        (X::cat(results, dim), LstmState { cell, hidden })
    })
}

/// A gate, with its linear map of the input at each step, which is computed for all at once.
struct Gate<'a, X> {
    controller: &'a GateController,
    inputs: Vec<X>,
}

impl<'a, X> Gate<'a, X> {
    fn new<const D: usize>(controller: &'a GateController, x: &X, dim: usize) -> Self
    where
        X: Field<D>,
    {
        let inputs = x.clone().apply(&controller.input_transform);
        let sizes = vec![1; x.dims()[dim]];
        Self {
            controller,
            inputs: inputs.split_with_sizes(&sizes, dim),
        }
    }

    /// Linear map of a hidden state.
    fn of_hidden<const D: usize>(&self, hidden: &X) -> X
    where
        X: Field<D>,
    {
        hidden.clone().apply(&self.controller.hidden_transform)
    }

    /// Sum of both maps.
    fn sum<const D: usize>(&self, step: usize, hidden: &X) -> X
    where
        X: Field<D>,
    {
        self.inputs[step].clone() + self.of_hidden(hidden)
    }
}

/// Zeros in the layout of a tensor.
fn zeros_like<const D: usize, X: Field<D>>(x: &X) -> X {
    let (local, layout, mesh) = x.clone().into_shard().into_parts();
    X::from_shard(ShardTensor::from_parts(local.zeros_like(), layout, mesh))
}

#[cfg(test)]
mod tests {
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::nn::{BiLstmConfig, GruConfig, LstmConfig};
    use burn::tensor::{Device, Gradients, Tensor, TensorData};
    use halocline_core::{Launcher, Placement, Replicate, Shard, Traffic};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{compare, cotangent_of, difference, gradient_of, random};

    fn require_alike<const D: usize>(ours: Tensor<D>, burns: Tensor<D>) {
        let off = difference(&ours.into_data(), &burns.into_data());
        assert!(off < 1e-5, "{off:e}");
    }

    #[test]
    fn an_lstm_gives_what_it_gives_in_burn() {
        let x = random::<3>([3, 5, 4], "x", 0).inner();
        let config = LstmConfig::new(4, 6, true);
        for config in [
            config.clone(),
            config.clone().with_batch_first(false),
            config.clone().with_reverse(true),
            config.clone().with_clip(Some(0.1)),
            config.with_input_forget(true),
            LstmConfig::new(4, 6, false),
        ] {
            let module = config.init(&Default::default());
            let (burns, burns_state) = module.forward(x.clone(), None);
            let (ours, state) = lstm(&module, x.clone(), None).unwrap();
            require_alike(ours, burns);
            let dim = usize::from(module.batch_first);
            let cell = state.cell.clone().squeeze_dim::<2>(dim);
            require_alike(cell, burns_state.cell.clone());
            let (burns, _) = module.forward(x.clone(), Some(burns_state));
            let (ours, _) = lstm(&module, x.clone(), Some(state)).unwrap();
            require_alike(ours, burns);
        }
    }

    #[test]
    fn an_lstm_in_both_directions_gives_what_it_gives_in_burn() {
        let x = random::<3>([3, 5, 4], "x", 0).inner();
        for batch_first in [true, false] {
            let config = BiLstmConfig::new(4, 6, true).with_batch_first(batch_first);
            let module = config.init(&Default::default());
            let (burns, burns_state) = module.forward(x.clone(), None);
            let (ours, states) = bi_lstm(&module, x.clone(), None).unwrap();
            require_alike(ours, burns);
            let dim = usize::from(batch_first);
            let hidden = states
                .clone()
                .map(|state| state.hidden.squeeze_dim::<2>(dim));
            let hidden = Tensor::stack::<3>(hidden.to_vec(), 0);
            require_alike(hidden, burns_state.hidden.clone());
            let (burns, _) = module.forward(x.clone(), Some(burns_state));
            let (ours, _) = bi_lstm(&module, x.clone(), Some(states)).unwrap();
            require_alike(ours, burns);
        }
    }

    #[test]
    fn a_gru_gives_what_it_gives_in_burn() {
        let x = random::<3>([3, 5, 4], "x", 0).inner();
        let config = GruConfig::new(4, 6, true);
        for config in [
            config.clone(),
            config.clone().with_reset_after(false),
            config.with_clip(Some(0.1)),
            GruConfig::new(4, 6, false),
        ] {
            let module = config.init(&Default::default());
            let (ours, state) = gru(&module, x.clone(), None).unwrap();
            require_alike(ours, module.forward(x.clone(), None));
            let burns_state = state.clone().squeeze_dim::<2>(1);
            let (ours, _) = gru(&module, x.clone(), Some(state)).unwrap();
            require_alike(ours, module.forward(x.clone(), Some(burns_state)));
        }
    }

    /// Gradients of all parameters.
    struct Parameters<'a> {
        gradients: &'a Gradients,
        found: Vec<TensorData>,
    }

    impl ModuleVisitor for Parameters<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = param.val().grad(self.gradients).expect("a gradient");
            self.found.push(gradient.into_data());
        }
    }

    /// Result, and gradients of the input and of all parameters, on each rank.
    fn run<L>(
        make: impl Fn(&Device) -> L + Send + Sync,
        axes: &[(&str, usize)],
        placements: &[Placement],
    ) -> Vec<Vec<TensorData>>
    where
        L: Module + Layer<ShardTensor<4>, Output = ShardTensor<4>>,
    {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let found = Launcher::local(ranks).seed(5).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let module = world.init(&make)?;
            let x = random::<4>([2, 4, 3, 6], "x", 0).inner();
            let x = ShardTensor::distribute(x, &mesh, placements)?.require_grad();
            let y = x.clone().apply(&module);
            assert_eq!(y.layout().all_extents()[..3], x.layout().all_extents()[..3]);
            let gradients = (y.clone() * cotangent_of(&y)?).sum().backward();
            let mut parameters = Parameters {
                gradients: &gradients,
                found: vec![y.full_tensor().into_data(), gradient_of(&x, &gradients)],
            };
            module.visit(&mut parameters);
            Ok(parameters.found)
        });
        found.unwrap()
    }

    /// The batch, also with a rank without samples, and cells beside the steps.
    fn check<L>(make: impl Fn(&Device) -> L + Send + Sync)
    where
        L: Module + Layer<ShardTensor<4>, Output = ShardTensor<4>>,
    {
        let expected = run(&make, &[("a", 1)], &[Replicate]).remove(0);
        let meshes = [
            (vec![("a", 3)], vec![Shard(0)]),
            (vec![("a", 2)], vec![Shard(2)]),
            (vec![("a", 2), ("b", 2)], vec![Shard(0), Shard(2)]),
            (vec![("a", 2), ("b", 2)], vec![Replicate, Shard(2)]),
        ];
        for (axes, placements) in meshes {
            for found in run(&make, &axes, &placements) {
                compare(&found, &expected, 2e-5, &format!("{placements:?}"));
            }
        }
    }

    #[test]
    fn sequences_on_shards_give_what_one_device_gives() {
        check(|device| LstmConfig::new(6, 5, true).init(device));
        check(|device| BiLstmConfig::new(6, 5, true).init(device));
        check(|device| GruConfig::new(6, 5, true).init(device));
    }

    #[test]
    fn sharded_steps_are_refused_with_the_redistribution_to_use() {
        let run = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("time", 2)])?;
            let module = world.init(|device| GruConfig::new(6, 5, true).init(device))?;
            let before = world.comm_stats();
            for dim in [1, 2] {
                let x = ShardTensor::<3>::ones([2, 4, 6], &mesh, &[Shard(dim)])?;
                let error = Error::catch(|| x.apply(&module)).unwrap_err();
                assert!(matches!(error, Error::Placement { .. }), "{error}");
                let help = "gru: no rule for";
                assert!(error.to_string().contains(help), "{error}");
                let help = "redistribute(&[Replicate]) first";
                assert!(error.to_string().contains(help), "{error}");
            }
            let sent = world.comm_stats().since(&before);
            for traffic in [Traffic::Exchange, Traffic::Redistribute, Traffic::Reduce] {
                assert_eq!(sent.of(traffic).messages, 0, "{traffic:?}");
            }
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn sequences_without_steps_or_features_are_refused() {
        let device = Default::default();
        let module = GruConfig::new(6, 5, true).init(&device);
        let error = gru(&module, Tensor::<2>::ones([4, 6], &device), None).unwrap_err();
        let expected = "gru: a sequence [4, 6]; expected steps";
        assert!(error.to_string().contains(expected), "{error}");
    }
}
