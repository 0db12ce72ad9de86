//! burn's normalization modules.

use burn::module::Param;
use burn::nn::{GroupNorm, InstanceNorm};
use burn::tensor::Tensor;

use super::NormField;
use crate::field::Field;
use crate::layer::layers;
use crate::operand::Operand;

layers! {
    GroupNorm: |norm, x| {
        normalize(x, norm.num_channels, norm.num_groups, [&norm.gamma, &norm.beta], norm.epsilon)
    };
    InstanceNorm: |norm, x| {
        normalize(x, norm.num_channels, norm.num_channels, [&norm.gamma, &norm.beta], norm.epsilon)
    };
}

fn normalize<const D: usize, X: Field<D>>(
    x: X,
    channels: usize,
    groups: usize,
    parameters: [&Option<Param<Tensor<1>>>; 2],
    epsilon: f64,
) -> X {
    let dims = x.global_dims();
    assert_eq!(dims[1], channels, "channels of a tensor {dims:?}");
    let [weight, bias] = parameters.map(Operand::of_optional);
    x.group_norm(groups, weight, bias, epsilon)
}
