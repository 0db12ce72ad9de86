//! Model of a configuration: a network whose increments are added to the newest state.

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, FloatDType, Tensor};
use halocline_core::ShardTensor;
use halocline_io::Channels;
use halocline_models::{FieldTransformer, Fno, GraphCastNet, Sfno, SurrogateCnn, UNet};
use halocline_ops::prelude::*;

use super::own::NoNetwork;
use super::signature::Signature;

/// Model built from a [`ModelConfig`](super::ModelConfig), around a network of a built-in kind or a
/// network `N`. Adds an increment to the newest state and subtracts a learned fraction of that
/// state, which damps anomalies.
///
/// # Shapes
/// `[batch, history · inputs + forcings + noise, lat, lon]` → `[batch, targets, lat, lon]`.
#[derive(Module, Debug)]
pub struct FieldModel<N: Module = NoNetwork> {
    pub(super) network: Network<N>,
    /// Fraction of each target's state that is lost in a step; initially zero.
    damping: Param<Tensor<4>>,
    /// Index of each target among the channels of an input; for a target that is not an input, one
    /// past the last channel.
    #[module(skip)]
    places: Vec<usize>,
    /// Index of each target among the channels of a network that predicts the inputs, and then the
    /// other targets.
    #[module(skip)]
    predicted: Vec<usize>,
    /// Index of the mask of the cells that count among the channels of an input, if there is one.
    #[module(skip)]
    mask: Option<usize>,
    /// Fingerprint of the checkpoint that the model was loaded from.
    #[module(skip)]
    pub(crate) checkpoint: Option<u32>,
}

#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a program holds one model, whichever it is"
)]
pub(super) enum Network<N: Module> {
    Cnn(SurrogateCnn),
    Unet(UNet),
    Transformer(FieldTransformer),
    Fno(Fno),
    Sfno(Sfno),
    Graph(GraphCastNet),
    Own(N),
}

/// Scale of increments, small so that the untrained model is close to persistence. `SurrogateCnn`
/// and `FieldTransformer` apply their own.
const INCREMENT: f64 = 0.1;

impl<N: Module> FieldModel<N> {
    /// Initializes a model around a network.
    pub(super) fn new(
        network: Network<N>,
        mask: Option<usize>,
        signature: &Signature,
        device: &Device,
    ) -> Self {
        let (channels, all) = (signature.channels, signature.channels_in());
        let inputs = all - signature.constants();
        Self {
            network,
            damping: Initializer::Zeros.init([1, signature.channels_out(), 1, 1], device),
            places: places_of_targets(channels, inputs, all),
            predicted: signature.predicted_places(),
            mask,
            checkpoint: None,
        }
    }
}

/// Returns the place of each target among the channels of an input, of which the first `inputs` are
/// those of all times of its history. The place of a target that is not an input is `absent`.
pub(crate) fn places_of_targets(channels: &Channels, inputs: usize, absent: usize) -> Vec<usize> {
    let newest = inputs - channels.inputs.len();
    let place = |target: &String| {
        let input = channels.inputs.iter().position(|input| input == target);
        input.map_or(absent, |input| newest + input)
    };
    channels.targets.iter().map(place).collect()
}

/// Selects channels of a field by their places. The place after the last channel is that of a
/// channel made by a function of another channel.
pub(crate) fn select_channels<X: Field<4>>(
    x: X,
    places: &[usize],
    other: impl FnOnce(X) -> X,
) -> X {
    let x = if places.contains(&x.dims()[1]) {
        let other = other(x.clone().narrow(1, 0, 1));
        X::cat(vec![x, other], 1)
    } else {
        x
    };
    let (first, count) = (places[0], places.len());
    if places.iter().copied().eq(first..first + count) {
        x.narrow(1, first, count) // without a copy
    } else {
        x.index_select(1, places)
    }
}

/// Zeros in the place of a field, also where it is NaN.
fn zeros<X: Field<4>>(x: X) -> X {
    let (local, layout, mesh) = x.into_shard().into_parts();
    X::from_shard(ShardTensor::from_parts(local.zeros_like(), layout, mesh))
}

impl<X: Field<4>, N: Module + Layer<X, Output = X>> Layer<X> for FieldModel<N> {
    type Output = X;

    fn forward(&self, x: X) -> X {
        // [batch, targets, lat, lon]; a target that is not an input starts from its mean, zero.
        let state = select_channels(x.clone(), &self.places, zeros);
        // Networks compute in the dtype of the parameters; increments are added in that of
        // the state.
        let types = [x.dtype(), self.damping.base().dtype()];
        let [dtype, computed] = types.map(FloatDType::from);
        let damping = state.place_operand(&self.damping).cast(dtype);
        let targets = |next: X| select_channels(next, &self.predicted, |channel| channel);
        let add = |increment: X| state.clone() + increment.cast(dtype) * INCREMENT;
        let mask = |x: &X| Some(x.clone().narrow(1, self.mask?, 1).cast(computed));
        let next = match &self.network {
            Network::Cnn(model) => targets(match mask(&x) {
                Some(mask) => model.forward_masked(x, mask),
                None => model.forward(x),
            }),
            Network::Transformer(model) => targets(model.forward(x)),
            Network::Unet(model) => add(match mask(&x) {
                Some(mask) => model.forward_masked(x.cast(computed), mask),
                None => model.forward(x.cast(computed)),
            }),
            Network::Fno(model) => add(model.forward(x.cast(computed))),
            Network::Sfno(model) => add(model.forward(x.cast(computed))),
            Network::Graph(model) => add(model.forward(x.cast(computed))),
            Network::Own(model) => add(model.forward(x.cast(computed))),
        };
        next.addcmul(state, (damping * -1.0).into_shard())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Network that returns ones.
    #[derive(Module, Debug)]
    struct Ones;

    impl Layer<Tensor<4>> for Ones {
        type Output = Tensor<4>;

        fn forward(&self, x: Tensor<4>) -> Tensor<4> {
            Tensor::ones(x.dims(), &x.device())
        }
    }

    #[test]
    fn a_target_that_is_no_input_starts_from_zero_where_an_input_is_missing() {
        let device = Device::default();
        let model = FieldModel {
            network: Network::Own(Ones),
            damping: Initializer::Zeros.init([1, 1, 1, 1], &device),
            places: vec![1],
            predicted: vec![0],
            mask: None,
            checkpoint: None,
        };
        let x = Tensor::<4>::full([1, 1, 1, 2], f32::NAN, &device);
        let next = x.apply(&model).into_data();
        next.assert_eq(&[[[[0.1_f32, 0.1]]]].into(), true);
    }
}
