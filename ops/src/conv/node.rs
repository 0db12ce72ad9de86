//! Convolution as one node of the graph, with exchange and kernels together.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Tensor};
use halocline_core::Result;
use halocline_core::ops::{self, BackwardPass, Operator};

use super::assembled;
use super::run::ConvRun;
use crate::kernel::flex::{self, with_products};
use crate::kernel::simd::Isa;

/// Convolves this rank's shard: one tensor, or two that are concatenated along channels. A missing
/// bias is passed as a bias without elements.
pub(crate) fn conv<const D: usize>(
    fields: Vec<Tensor<D>>,
    weight: Tensor<D>,
    bias: Option<Tensor<1>>,
    run: ConvRun,
) -> Tensor<D> {
    let bias = bias.unwrap_or_else(|| Tensor::empty([0], (&weight.device(), weight.dtype())));
    let [weight, bias] = [weight.into_dispatch(), bias.into_dispatch()];
    let fields: Vec<_> = fields.into_iter().map(Tensor::into_dispatch).collect();
    let y = match <[DispatchTensor; 2]>::try_from(fields) {
        Ok([first, second]) => ops::apply(run, [first, second, weight, bias]),
        Err(mut fields) => ops::apply(run, [fields.remove(0), weight, bias]),
    };
    Tensor::from_dispatch(y)
}

impl Operator for ConvRun {
    /// Boxes received from other ranks, in the plan's order.
    type Saved = Vec<DispatchTensor>;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["conv", "conv (backward)"])
    }

    /// All inputs but the bias.
    fn keeps(&self, input: usize) -> bool {
        input <= self.fields
    }

    fn forward(
        &self,
        inputs: Vec<DispatchTensor>,
    ) -> Result<(DispatchTensor, Vec<DispatchTensor>)> {
        let dtype = inputs[0].dtype();
        if !runs_on_kernels(&inputs[0]) {
            return assembled::forward(self, inputs);
        }
        with_products!(Isa::chosen()?, dtype, E, P => self.forward_as::<E, P>(inputs, dtype))
    }

    fn backward(
        &self,
        pass: BackwardPass<'_, Vec<DispatchTensor>>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let dtype = pass.cotangent.dtype();
        if !runs_on_kernels(&pass.cotangent) {
            return assembled::backward(self, pass);
        }
        with_products!(Isa::chosen()?, dtype, E, P => self.backward_as::<E, P>(pass, dtype))
    }
}

fn runs_on_kernels(tensor: &DispatchTensor) -> bool {
    flex::runs_on(&Device::new(tensor.device()))
}
