//! Transposed convolution as one node of the graph, which runs the passes of a convolution in the
//! opposite order.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Tensor};
use halocline_core::Result;
use halocline_core::ops::{self, BackwardPass, Operator, blank};

use crate::conv::assembled::sum_of_channels;
use crate::conv::run::ConvRun;

/// The adjoint of a convolution on one rank.
#[derive(Clone, Debug)]
pub(super) struct Transposed {
    /// The convolution from the shard of the result to that of the input.
    pub conv: ConvRun,
    /// The shape of this rank's result.
    pub result: Vec<usize>,
}

impl Transposed {
    pub(super) fn apply<const D: usize>(
        self,
        x: Tensor<D>,
        weight: Tensor<D>,
        bias: Option<Tensor<1>>,
    ) -> Tensor<D> {
        // A missing bias is passed as a bias without elements.
        let bias = bias.unwrap_or_else(|| Tensor::empty([0], (&x.device(), x.dtype())));
        let inputs = [
            x.into_dispatch(),
            weight.into_dispatch(),
            bias.into_dispatch(),
        ];
        Tensor::from_dispatch(ops::apply(self, inputs))
    }

    /// One gradient of the convolution, with respect to its input or its weight.
    fn gradient(
        &self,
        input: usize,
        field: DispatchTensor,
        weight: DispatchTensor,
        received: Vec<DispatchTensor>,
        cotangent: DispatchTensor,
    ) -> Result<DispatchTensor> {
        let wanted = [input == 0, input == 1, false];
        let gradients = self.conv.backward(BackwardPass {
            inputs: vec![Some(field), Some(weight), None],
            saved: &received,
            cotangent,
            wanted: &wanted,
        })?;
        let gradient = gradients.into_iter().nth(input).flatten();
        Ok(gradient.expect("the gradient that is wanted"))
    }
}

impl Operator for Transposed {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["conv_transpose", "conv_transpose (backward)"])
    }

    /// All inputs but the bias.
    fn keeps(&self, input: usize) -> bool {
        input < 2
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [x, weight, bias] = inputs.try_into().expect("field, weight and bias");
        // Only the shape of the convolution's input is used.
        let field = blank(&x, &self.result, Some(0.0));
        let y = self.gradient(0, field, weight, Vec::new(), x)?;
        if bias.shape().num_elements() == 0 || self.result.contains(&0) {
            return Ok((y, ()));
        }
        let mut along = vec![1; self.result.len()];
        along[1] = self.result[1];
        let bias = Dispatch::float_reshape(bias, Shape::from(along));
        Ok((Dispatch::float_add(y, bias), ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let (x, weight) = (pass.take_input(0), pass.take_input(1));
        let BackwardPass {
            cotangent, wanted, ..
        } = pass;
        let bias = wanted[2].then(|| sum_of_channels(cotangent.clone(), &self.result));
        if !wanted[0] && !wanted[1] {
            return Ok(vec![None, None, bias]);
        }
        let nothing = blank(&cotangent, &[0], None);
        let inputs = vec![cotangent.clone(), weight.clone(), nothing];
        let (input, received) = self.conv.forward(inputs)?;
        let weight = wanted[1].then(|| self.gradient(1, cotangent, weight, received, x));
        Ok(vec![Some(input), weight.transpose()?, bias])
    }
}
