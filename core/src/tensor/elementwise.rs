//! Elementwise functions.

use burn::tensor::activation;

use super::{ShardTensor, unary};

/// Calls a macro with the list of elementwise functions of sharded tensors: documentation, name,
/// arguments, and value on one shard. The methods of `Field` come from the same list.
#[doc(hidden)]
#[macro_export]
macro_rules! elementwise {
    ($define:ident) => {
        $define! {
            /// The absolute value of every element.
            abs() = |x| unary::absolute(x);
            /// The sign of every element: −1, 0 or 1. The gradient is zero.
            sign() = |x| x.sign();
            /// The square of every element.
            square() = |x| unary::square(x);
            /// The square root of every element.
            sqrt() = |x| x.sqrt();
            /// The reciprocal of every element.
            recip() = |x| x.recip();
            /// Raises every element to a power.
            powf_scalar(exponent: f64) = |x| x.powf_scalar(exponent);
            /// Raises every element to an integer power.
            powi_scalar(exponent: i32) = |x| x.powi_scalar(exponent);
            /// The exponential of every element.
            exp() = |x| x.exp();
            /// The natural logarithm of every element.
            log() = |x| x.log();
            /// The natural logarithm of one plus every element, accurate also for small elements.
            log1p() = |x| x.log1p();
            /// The error function of every element.
            erf() = |x| x.erf();
            /// The sine of every element, in radians.
            sin() = |x| x.sin();
            /// The cosine of every element, in radians.
            cos() = |x| x.cos();
            /// The tangent of every element, in radians.
            tan() = |x| x.tan();
            /// The inverse sine of every element, in radians.
            asin() = |x| x.asin();
            /// The inverse cosine of every element, in radians.
            acos() = |x| x.acos();
            /// The inverse tangent of every element, in radians.
            atan() = |x| x.atan();
            /// The hyperbolic sine of every element.
            sinh() = |x| x.sinh();
            /// The hyperbolic cosine of every element.
            cosh() = |x| x.cosh();
            /// The hyperbolic tangent of every element.
            tanh() = |x| x.tanh();
            /// The inverse hyperbolic sine of every element.
            asinh() = |x| x.asinh();
            /// The inverse hyperbolic cosine of every element.
            acosh() = |x| x.acosh();
            /// The inverse hyperbolic tangent of every element.
            atanh() = |x| x.atanh();
            /// Rounds every element down to an integer. The gradient is zero.
            floor() = |x| x.floor();
            /// Rounds every element up to an integer. The gradient is zero.
            ceil() = |x| x.ceil();
            /// Rounds every element to the nearest integer, ties to even. The gradient is zero.
            round() = |x| x.round();
            /// Rounds every element towards zero to an integer. The gradient is zero.
            trunc() = |x| x.trunc();
            /// Limits every element to a range.
            clamp(low: f64, high: f64) = |x| x.clamp(low, high);
            /// Raises every element to at least `low`.
            clamp_min(low: f64) = |x| x.clamp_min(low);
            /// Lowers every element to at most `high`.
            clamp_max(high: f64) = |x| x.clamp_max(high);
            /// Casts every element to another float type. The gradient has the type of this tensor.
            cast(dtype: burn::tensor::FloatDType) = |x| x.cast(dtype);
            /// The logistic function.
            sigmoid() = |x| activation::sigmoid(x);
            /// `ln(1 + exp(β · x)) / β`, a smooth rectified linear unit.
            softplus(beta: f64) = |x| activation::softplus(x, beta);
            /// The leaky rectified linear unit, which scales negative elements by `negative_slope`.
            leaky_relu(negative_slope: f64) = |x| activation::leaky_relu(x, negative_slope);
            /// The Gaussian error linear unit, approximated by the hyperbolic tangent.
            gelu_approximate() = |x| activation::gelu_approximate(x);
        }
    };
}

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) = $f:expr;)*) => {
        /// Elementwise functions, as for burn's tensors.
        ///
        /// # Example
        /// ```
        /// use halocline_core::{Launcher, Shard, ShardTensor};
        ///
        /// Launcher::local(2).run(|world| {
        ///     let mesh = world.mesh([("lat", 2)])?;
        ///     let x = ShardTensor::<1>::full([5], -4.0, &mesh, &[Shard(0)])?;
        ///     let y = x.abs().sqrt().powi_scalar(3).clamp_max(7.5).floor();
        ///     let whole = y.full_tensor().into_data();
        ///     whole.assert_eq(&[7.0_f32; 5].into(), false);
        ///     Ok(())
        /// })?;
        /// # Ok::<(), halocline_core::Error>(())
        /// ```
        impl<const D: usize> ShardTensor<D> {
            $($(#[$doc])*
            ///
            /// # Panics
            /// Panics if the tensor holds partial values.
            #[must_use]
            #[track_caller]
            pub fn $name(self $(, $argument: $type)*) -> Self {
                self.map_elements(stringify!($name), $f)
            })*
        }
    };
}

elementwise!(methods);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Launcher, Shard};
    use burn::tensor::{DType, FloatDType, TensorData};

    /// A cast to a chosen float type and back, with a gradient of the tensor's type.
    #[test]
    fn casts_have_gradients() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("rows", 2)])?;
                let x = ShardTensor::<2>::ones([3, 2], &mesh, &[Shard(0)])?.require_grad();
                let y = x.clone().cast(FloatDType::F64);
                assert_eq!(y.local().dtype(), DType::F64);
                let loss = y.into_local().square().sum();
                let gradient = x.grad(&loss.backward()).expect("a gradient");
                assert_eq!(gradient.local().dtype(), DType::F32);
                let whole = gradient.full_tensor().into_data();
                whole.assert_eq(&TensorData::new(vec![2.0_f32; 6], [3, 2]), true);
                Ok(())
            })
            .unwrap();
    }
}
