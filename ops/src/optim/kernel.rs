//! AdamW step, element by element, in the order of burn's operators.

use burn::tensor::{DType, Tensor};
use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::FusedAdamWConfig;
use crate::kernel::buffer::Buffer;
use crate::kernel::flex;
use crate::kernel::lanes::CHUNK;
use crate::kernel::simd::Isa;

/// Constants of a step.
#[derive(Clone, Copy)]
pub(super) struct Step {
    /// Weights of the old mean and of the gradient.
    mean: [f32; 2],
    /// Weights of the old mean square and of the squared gradient.
    square: [f32; 2],
    /// Divisors that correct both for their start at zero.
    corrections: [f32; 2],
    epsilon: f32,
    rate: f32,
    /// Factor of the parameter, from weight decay.
    kept: f32,
}

impl Step {
    /// Constants of step number `time`, counted from one.
    pub(super) fn new(config: &FusedAdamWConfig, rate: f64, time: i32) -> Self {
        let FusedAdamWConfig {
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
            ..
        } = *config;
        Self {
            mean: [beta_1, 1.0 - beta_1],
            square: [beta_2, 1.0 - beta_2],
            corrections: [1.0 - beta_1.powi(time), 1.0 - beta_2.powi(time)],
            epsilon,
            rate: rate as f32,
            kept: (1.0 - rate * f64::from(weight_decay)) as f32,
        }
    }
}

/// Computes the parameter, the mean of gradients and the mean of their squares after a step.
/// `moments` are `None` before the first step.
pub(super) fn run<const D: usize>(
    step: &Step,
    parameter: Tensor<D>,
    gradient: Tensor<D>,
    moments: Option<[Tensor<D>; 2]>,
) -> [Tensor<D>; 3] {
    let shape = parameter.dims();
    let (first, [mean, square]) = match moments {
        Some(moments) => (false, moments),
        None => (true, [parameter.clone(), parameter.clone()]),
    };
    let inputs = [parameter, gradient, mean, square].map(|tensor| {
        flex::operand::<f32>(tensor.into_dispatch()).expect("a tensor of the CPU, which was asked")
    });
    let inputs = inputs.each_ref().map(flex::elements::<f32>);
    let isa = Isa::chosen().unwrap_or_else(|error| panic!("{error}"));
    let len = inputs[0].len();
    // SAFETY: the tasks below write all elements before any is read.
    let mut results = [(); 3].map(|()| unsafe { Buffer::filled(len, |_| ()) });
    let places = results.each_mut().map(Buffer::shared);
    tasks::for_each(len.div_ceil(CHUNK), 1, |task| {
        let start = task * CHUNK;
        let count = CHUNK.min(len - start);
        // SAFETY: the range lies in the results, and no other task accesses it.
        let outputs = places.map(|place| unsafe { place.slice(start..start + count) });
        isa.run(Task {
            step,
            inputs: inputs.map(|input| &input[start..][..count]),
            first,
            outputs,
        });
    });
    results.map(|result| Tensor::from_dispatch(flex::result(result, &shape, DType::F32)))
}

/// Range of elements.
struct Task<'a> {
    step: &'a Step,
    /// Parameter, gradient, mean and mean square.
    inputs: [&'a [f32]; 4],
    /// Whether this is the first step, when the means are zero.
    first: bool,
    outputs: [&'a mut [f32]; 3],
}

impl WithSimd for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Step {
            mean,
            square,
            corrections,
            epsilon,
            rate,
            kept,
        } = *self.step;
        let [parameters, gradients, means, squares] = self.inputs;
        let [new_parameters, new_means, new_squares] = self.outputs;
        let len = new_parameters.len();
        let (parameters, gradients) = (&parameters[..len], &gradients[..len]);
        let (means, squares) = (&means[..len], &squares[..len]);
        let (new_means, new_squares) = (&mut new_means[..len], &mut new_squares[..len]);
        for i in 0..len {
            let gradient = gradients[i];
            let of_gradient = [gradient * mean[1], gradient * gradient * square[1]];
            let [new_mean, new_square] = if self.first {
                of_gradient
            } else {
                [
                    means[i] * mean[0] + of_gradient[0],
                    squares[i] * square[0] + of_gradient[1],
                ]
            };
            let root = (new_square / corrections[1]).sqrt() + epsilon;
            let moved = new_mean / corrections[0] / root * rate;
            new_parameters[i] = parameters[i] * kept - moved;
            (new_means[i], new_squares[i]) = (new_mean, new_square);
        }
    }
}
