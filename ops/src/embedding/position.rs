//! burn's positional encoding.

use burn::nn::PositionalEncoding;
use halocline_core::{Error, Result, ShardTensor};

use crate::field::{Field, run};
use crate::layer::Layer;
use crate::precision::cast;
use crate::rearrange::distribute_operand;

/// Adds the sinusoids of each step, by its global index. All dims may be sharded, and nothing is
/// sent.
impl<X: Field<3>> Layer<X> for PositionalEncoding {
    type Output = X;

    /// # Panics
    /// Panics for more steps than `max_sequence_size`, for another number of features, and for
    /// partial values.
    #[track_caller]
    fn forward(&self, x: X) -> X {
        run(x, |x| encoded(self, x))
    }
}

fn encoded(module: &PositionalEncoding, x: ShardTensor<3>) -> Result<ShardTensor<3>> {
    let ([_, steps, features], [_, most, d_model]) = (x.dims(), module.sinusoids.dims());
    if steps > most || features != d_model {
        let message = format!(
            "positions of {most} steps and {d_model} features for {:?}; expected [batch, steps, features]",
            x.dims()
        );
        return Err(Error::operator("positional_encoding", message));
    }
    let sinusoids = module.sinusoids.clone();
    // Constant, as in burn.
    let sinusoids = if sinusoids.is_autodiff() {
        sinusoids.inner()
    } else {
        sinusoids
    };
    let sinusoids = sinusoids.slice([0..1, 0..steps, 0..d_model]);
    let sinusoids = distribute_operand(&x, cast(sinusoids, x.local().dtype()))?;
    Error::catch(|| x + sinusoids)
}

#[cfg(test)]
mod tests {
    use burn::nn::PositionalEncodingConfig;
    use burn::tensor::{DType, FloatDType, Tensor};

    use super::*;
    use crate::layer::Apply;
    use crate::testing::{Operator, check_op, difference, random};

    struct Encoded(PositionalEncoding);

    impl Operator<3, 3> for Encoded {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).apply(&self.0)
        }
    }

    fn encoding() -> PositionalEncoding {
        let config = PositionalEncodingConfig::new(6).with_max_sequence_size(9);
        config.init(&Default::default())
    }

    #[test]
    fn steps_have_their_global_index_on_any_mesh() {
        let encoding = encoding();
        let x = random::<3>([2, 7, 6], "x", 0).inner();
        let ours = x.clone().apply(&encoding).into_data();
        assert!(difference(&ours, &encoding.forward(x).into_data()) < 1e-6);
        check_op(&Encoded(encoding), &[[2, 7, 6]], &[], &[0, 1, 2], 1e-6);
    }

    #[test]
    fn half_precision_stays() {
        let x = random::<3>([2, 7, 6], "x", 0).inner();
        let y = x.cast(FloatDType::BF16).apply(&encoding());
        assert_eq!(y.dtype(), DType::BF16);
    }

    #[test]
    fn longer_and_wider_sequences_are_refused() {
        for shape in [[1, 10, 6], [1, 9, 4]] {
            let x = Tensor::<3>::ones(shape, &Default::default());
            let error = Error::catch(|| x.apply(&encoding())).unwrap_err();
            let expected = format!("positions of 9 steps and 6 features for {shape:?}");
            assert!(error.to_string().contains(&expected), "{error}");
        }
    }
}
