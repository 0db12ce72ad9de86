//! burn's normalization modules.

use burn::module::{ModuleDisplay, Param};
use burn::nn::{
    BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, LocalResponseNormConfig,
    RmsNorm,
};
use burn::tensor::Tensor;

use super::NormField;
use super::batch::batch_norm_of;
use crate::field::Field;
use crate::layer_placements::with_layer_placements;
use crate::layers::{displayed, layers};
use crate::operand::Operand;

layers! {
    BatchNorm: |norm, x| with_layer_placements(&norm.gamma, x, |x| batch_norm_of(norm, x));
    LayerNorm: |norm, x| layer_norm_of(norm, x);
    RmsNorm: |norm, x| with_layer_placements(&norm.gamma, x, |x| {
        x.rms_norm(Some(Operand::from(&norm.gamma)), norm.epsilon)
    });
    GroupNorm: |norm, x| {
        let parameters = norm.affine.then_some([&norm.gamma, &norm.beta]);
        normalize(x, norm.num_channels, norm.num_groups, parameters, norm.epsilon)
    };
    InstanceNorm: |norm, x| {
        let parameters = norm.affine.then_some([&norm.gamma, &norm.beta]);
        normalize(x, norm.num_channels, norm.num_channels, parameters, norm.epsilon)
    };
    LocalResponseNorm: |norm, x| x.local_response_norm(&config_of(norm));
}

/// Reads the configuration of burn's layer, whose fields are private.
fn config_of(norm: &LocalResponseNorm) -> LocalResponseNormConfig {
    let number = |field| displayed::<f64>(|content| norm.custom_content(content), field);
    let size = displayed(|content| norm.custom_content(content), "size");
    LocalResponseNormConfig::new(size)
        .with_alpha(number("alpha"))
        .with_beta(number("beta"))
        .with_k(number("k"))
}

/// Applies burn's layer to either kind of tensor.
pub(crate) fn layer_norm_of<const D: usize, X: Field<D>>(norm: &LayerNorm, x: X) -> X {
    let bias = Operand::of_optional(&norm.beta);
    with_layer_placements(&norm.gamma, x, |x| {
        let epsilon = displayed(|content| norm.custom_content(content), "epsilon");
        x.layer_norm(Some(Operand::from(&norm.gamma)), bias, epsilon)
    })
}

fn normalize<const D: usize, X: Field<D>>(
    x: X,
    channels: usize,
    groups: usize,
    parameters: Option<[&Option<Param<Tensor<1>>>; 2]>,
    epsilon: f64,
) -> X {
    let dims = x.dims();
    assert_eq!(dims[1], channels, "channels of a tensor {dims:?}");
    let [gamma, beta] = parameters.map_or([None; 2], |pair| pair.map(Option::as_ref));
    let [weight, bias] = [gamma, beta].map(|parameter| parameter.map(Operand::from));
    let norm = |x: X| x.group_norm(groups, weight, bias, epsilon);
    match gamma {
        Some(gamma) => with_layer_placements(gamma, x, norm),
        None => norm(x),
    }
}
