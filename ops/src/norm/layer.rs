//! burn's normalization modules.

use burn::module::{Content, DisplaySettings, ModuleDisplay, Param};
use burn::nn::{BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RmsNorm};
use burn::tensor::Tensor;

use super::NormField;
use super::batch::batch_norm_of;
use crate::field::Field;
use crate::layer_placements::with_layer_placements;
use crate::layers::layers;
use crate::operand::Operand;

layers! {
    BatchNorm: |norm, x| with_layer_placements(&norm.gamma, x, |x| batch_norm_of(norm, x));
    LayerNorm: |norm, x| layer_norm_of(norm, x);
    RmsNorm: |norm, x| rms_norm_of(norm, x);
    GroupNorm: |norm, x| {
        normalize(x, norm.num_channels, norm.num_groups, [&norm.gamma, &norm.beta], norm.epsilon)
    };
    InstanceNorm: |norm, x| {
        normalize(x, norm.num_channels, norm.num_channels, [&norm.gamma, &norm.beta], norm.epsilon)
    };
}

/// burn's layer on either kind of tensor.
pub(crate) fn layer_norm_of<const D: usize, X: Field<D>>(norm: &LayerNorm, x: X) -> X {
    let bias = Operand::of_optional(&norm.beta);
    with_layer_placements(&norm.gamma, x, |x| {
        x.layer_norm(Some(Operand::from(&norm.gamma)), bias, epsilon(norm))
    })
}

/// burn's layer on either kind of tensor.
pub(super) fn rms_norm_of<const D: usize, X: Field<D>>(norm: &RmsNorm, x: X) -> X {
    with_layer_placements(&norm.gamma, x, |x| {
        x.rms_norm(Some(Operand::from(&norm.gamma)), norm.epsilon)
    })
}

/// The epsilon of burn's layer, which has it as a private field and displays it.
fn epsilon(norm: &LayerNorm) -> f64 {
    let content = norm.custom_content(Content::new(DisplaySettings::new()));
    let attributes = content.into_iter().flat_map(|content| content.attributes);
    let mut found = attributes.filter(|attribute| attribute.name == "epsilon");
    let epsilon = found.next().and_then(|epsilon| epsilon.value.parse().ok());
    epsilon.expect("burn's LayerNorm displays its epsilon")
}

fn normalize<const D: usize, X: Field<D>>(
    x: X,
    channels: usize,
    groups: usize,
    parameters: [&Option<Param<Tensor<1>>>; 2],
    epsilon: f64,
) -> X {
    let dims = x.dims();
    assert_eq!(dims[1], channels, "channels of a tensor {dims:?}");
    let [weight, bias] = parameters.map(Operand::of_optional);
    let norm = |x: X| x.group_norm(groups, weight, bias, epsilon);
    match parameters[0] {
        Some(gamma) => with_layer_placements(gamma, x, norm),
        None => norm(x),
    }
}
