//! Visitors of the parameters of a block.

use std::collections::HashSet;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor};

use crate::reduce::{self, Substitutes};
use crate::tensor::{ShardTensor, on_device};

/// Returns the gradient of an operand, zero if the block does not use it.
pub(super) fn gradient<const D: usize>(
    operand: &Tensor<D>,
    gradients: &Gradients,
) -> DispatchTensor {
    let gradient = operand.grad(gradients);
    let gradient = gradient.unwrap_or_else(|| operand.clone().inner().zeros_like());
    gradient.into_dispatch()
}

/// Concatenates all parameters with gradients; returns a single zero if there are none.
pub(super) fn flat<M: Module, const D: usize>(module: &M, x: &ShardTensor<D>) -> Tensor<1> {
    let mut flatten = Flatten {
        gradients: None,
        parts: Vec::new(),
    };
    module.visit(&mut flatten);
    let types = flatten.parts.iter().map(Tensor::dtype);
    let types: HashSet<_> = types.collect();
    assert!(
        types.len() < 2,
        "recompute: parameters of the number types {types:?}; expected one"
    );
    if flatten.parts.is_empty() {
        Tensor::zeros([1], (&x.device(), x.local.dtype()))
    } else {
        Tensor::cat(flatten.parts, 0)
    }
}

/// Collects parameters that have gradients, or their gradients, each flattened. Running statistics
/// and frozen parameters may have other element types.
pub(super) struct Flatten<'a> {
    pub(super) gradients: Option<&'a Gradients>,
    pub(super) parts: Vec<Tensor<1>>,
}

impl ModuleVisitor for Flatten<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        if !value.is_tracked() {
            return;
        }
        let count = value.shape().num_elements();
        let part = match self.gradients {
            None => value,
            Some(gradients) => Tensor::from_dispatch(gradient(&value, gradients)),
        };
        self.parts.push(part.reshape([count]));
    }
}

/// Collects the parameters whose gradients may join buckets.
pub(super) struct Originals(pub(super) Vec<Option<DispatchTensor>>);

impl ModuleVisitor for Originals {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val().into_dispatch();
        self.0.push(reduce::parameter(&value));
    }
}

/// Pairs the tensors of a detached module with the parameters for which they stand.
pub(super) struct Paired<'a> {
    pub(super) originals: std::slice::Iter<'a, Option<DispatchTensor>>,
    pub(super) substitutes: Substitutes,
}

impl ModuleVisitor for Paired<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(Some(original)) = self.originals.next() {
            let value = param.val().into_dispatch();
            self.substitutes.insert(&value, original.clone());
        }
    }
}

/// Whether a parameter has gradients.
pub(super) struct Tracked(pub(super) bool);

impl ModuleVisitor for Tracked {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0 |= param.val().is_tracked();
    }
}

/// Detaches parameters from their graph. With `leaves`, those with gradients become leaves of
/// another one.
pub(super) struct Detached {
    pub(super) leaves: bool,
}

impl ModuleMapper for Detached {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        let (device, tracked) = (value.device(), value.is_tracked());
        let value = on_device(value.inner(), &device);
        let value = if self.leaves && tracked {
            value.require_grad()
        } else {
            value
        };
        Param::from_mapped_value(id, value, mapper)
    }
}
