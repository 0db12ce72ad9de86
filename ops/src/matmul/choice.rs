//! burn's enum of activations, some of which are layers with parameters.

use burn::nn::activation::Activation as Wrapper;

use super::gated::swiglu_of;
use crate::activation::{ActivationField, gelu_of};
use crate::field::Field;
use crate::layers::layers;

layers! {
    Wrapper: |wrapper, x| activation_of(wrapper, x);
}

/// Applies burn's layer to either kind of tensor.
pub(crate) fn activation_of<const D: usize, X: Field<D>>(layer: &Wrapper, x: X) -> X {
    match layer {
        Wrapper::Gelu(gelu) => gelu_of(gelu, x),
        Wrapper::Relu(_) => ActivationField::relu(x),
        Wrapper::LeakyRelu(leaky) => Field::leaky_relu(x, leaky.negative_slope),
        Wrapper::Sigmoid(_) => Field::sigmoid(x),
        Wrapper::Tanh(_) => Field::tanh(x),
        Wrapper::PRelu(layer) => x.prelu(&layer.alpha),
        Wrapper::SwiGlu(layer) => swiglu_of(layer, x),
        other => x.map(|x| other.forward(x)),
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::activation::{ActivationConfig, SwiGluConfig};

    use crate::layer::Apply;
    use crate::testing::{difference, random};

    #[test]
    fn a_choice_may_have_parameters() {
        let x = random::<2>([5, 4], "x", 0).inner();
        let choice = ActivationConfig::SwiGlu(SwiGluConfig::new(4, 3)).init(&x.device());
        let (ours, burns) = (x.clone().apply(&choice), choice.forward(x));
        assert!(difference(&ours.into_data(), &burns.into_data()) < 1e-6);
    }
}
