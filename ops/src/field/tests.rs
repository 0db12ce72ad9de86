//! Tests of elementwise functions and closures on fields.

use super::*;
use crate::testing::{Operator, check_op, difference, random};
use burn::tensor::{FloatDType, TensorData};

/// Error function, integrated by Simpson's rule.
fn erf(x: f64) -> f64 {
    let parts = 2000;
    let density = |i: usize| (-(x * i as f64 / parts as f64).powi(2)).exp();
    let weight = |i: usize| [2.0, 4.0][i % 2] * density(i);
    let inner: f64 = (1..parts).map(weight).sum();
    let integral = (density(0) + inner + density(parts)) * x / parts as f64 / 3.0;
    integral * 2.0 / std::f64::consts::PI.sqrt()
}

fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

/// Checks functions on shards against one device, and the latter against their definition in f64.
macro_rules! check_functions {
    ($($name:ident($($argument:expr),*) of $domain:ident is $expected:expr;)*) => {{
        $({
            struct Function;

            impl Operator<2, 2> for Function {
                fn apply<X: Field<2>>(&self, mut x: Vec<X>, _: Vec<Tensor<2>>) -> WithDims<X, 2> {
                    let y = $domain(x.remove(0)).$name($($argument),*);
                    y.cast(FloatDType::F32)
                }
            }

            check_op(&Function, &[[5, 3]], &[], &[0, 1], 1e-6);
            let x = $domain(random([5, 3], "input", 0).inner());
            let expected: fn(f64) -> f64 = $expected;
            let values: Vec<f64> = x.clone().into_data().iter().map(expected).collect();
            let found = Field::$name(x $(, $argument)*).into_data();
            let off = difference(&found, &TensorData::new(values, [5, 3]));
            assert!(off < 1e-5, "{}: {off:e}", stringify!($name));
        })*
        [$(stringify!($name)),*]
    }};
}

fn all<X: Field<2>>(x: X) -> X {
    x * 2.0
}

fn positive<X: Field<2>>(x: X) -> X {
    x.square() + 0.5
}

fn above_one<X: Field<2>>(x: X) -> X {
    x.square() + 1.5
}

fn unit<X: Field<2>>(x: X) -> X {
    x.sin() * 0.9
}

#[test]
fn elementwise_functions_are_those_of_one_device() {
    let tested = check_functions! {
        abs() of all is f64::abs;
        sign() of all is f64::signum;
        square() of all is |x| x * x;
        sqrt() of positive is f64::sqrt;
        recip() of positive is f64::recip;
        powf_scalar(1.7) of positive is |x| x.powf(1.7);
        powi_scalar(3) of all is |x| x.powi(3);
        exp() of all is f64::exp;
        log() of positive is f64::ln;
        log1p() of positive is f64::ln_1p;
        erf() of all is erf;
        sin() of all is f64::sin;
        cos() of all is f64::cos;
        tan() of unit is f64::tan;
        asin() of unit is f64::asin;
        acos() of unit is f64::acos;
        atan() of all is f64::atan;
        sinh() of all is f64::sinh;
        cosh() of all is f64::cosh;
        tanh() of all is f64::tanh;
        asinh() of all is f64::asinh;
        acosh() of above_one is f64::acosh;
        atanh() of unit is f64::atanh;
        floor() of all is f64::floor;
        ceil() of all is f64::ceil;
        round() of all is f64::round_ties_even;
        trunc() of all is f64::trunc;
        clamp(-0.5, 1.0) of all is |x| x.clamp(-0.5, 1.0);
        clamp_min(-0.5) of all is |x| x.max(-0.5);
        clamp_max(1.0) of all is |x| x.min(1.0);
        cast(FloatDType::F64) of all is |x| x;
        sigmoid() of all is |x| 1.0 / (1.0 + (-x).exp());
        softplus(2.0) of all is |x| (2.0 * x).exp().ln_1p() / 2.0;
        leaky_relu(0.1) of all is |x| if x < 0.0 { 0.1 * x } else { x };
        gelu_approximate() of all is gelu;
    };
    macro_rules! names {
        ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) = $f:expr;)*) => {
            [$(stringify!($name)),*]
        };
    }
    let listed = halocline_core::elementwise!(names);
    assert_eq!(tested, listed, "each function of the list is tested");
}

#[test]
fn map_takes_no_parameter_on_one_device_either() {
    let device = burn::tensor::Device::default().autodiff();
    let scale = Tensor::<2>::ones([1, 1], &device).require_grad();
    let x = Tensor::<2>::ones([2, 3], &device);
    let mapped = || Field::map(x.clone(), |x| x.tanh() * scale.clone());
    let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(mapped)).unwrap_err();
    let message = payload.downcast_ref::<String>().expect("a message");
    assert!(
        message.contains("captures a tensor with gradients"),
        "{message}"
    );
    let scaled = x.clone().tanh() * x.place_operand(scale.clone());
    let gradients = scaled.sum().backward();
    assert!(scale.grad(&gradients).is_some());
}
