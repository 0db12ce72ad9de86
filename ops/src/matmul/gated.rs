//! Gated linear layers.

use burn::nn::activation::SwiGlu;

use crate::activation::ActivationField;
use crate::field::Field;
use crate::layers::layers;

layers! {
    SwiGlu: |layer, x| swiglu_of(layer, x);
}

/// Applies burn's layer to either kind of tensor.
pub(crate) fn swiglu_of<const D: usize, X: Field<D>>(layer: &SwiGlu, x: X) -> X {
    let gate = x.clone().apply(&layer.linear_inner).silu();
    gate * x.apply(&layer.linear_outer)
}

#[cfg(test)]
mod tests {
    use burn::nn::activation::SwiGluConfig;

    use crate::layer::Apply;
    use crate::testing::{difference, random};

    #[test]
    fn the_module_gives_what_it_gives_in_burn() {
        let x = random::<3>([2, 4, 6], "x", 0).inner();
        let swiglu = SwiGluConfig::new(6, 5).with_bias(true).init(&x.device());
        let (ours, burns) = (x.clone().apply(&swiglu), swiglu.forward(x));
        assert!(difference(&ours.into_data(), &burns.into_data()) < 1e-6);
    }
}
