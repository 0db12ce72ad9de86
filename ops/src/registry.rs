//! Registry of operators. Each family lists its own; this file lists the families.

use burn::tensor::{Gradients, Tensor, TensorData};
use halocline_core::{Result, ShardTensor};

use crate::golden::{Golden, Output};
use crate::reduce::ReduceField;
use crate::sharding::sharded;
use crate::{
    activation, arithmetic, attention, conv, embedding, geodesic, graph, loss, matmul, norm, pool,
    rearrange, reduce, resample, softmax, spectral, sphere,
};

/// Iterates over all operators that golden cases may name, by family.
pub fn operators() -> impl Iterator<Item = &'static Golden> {
    [
        conv::OPERATORS,
        pool::OPERATORS,
        norm::OPERATORS,
        reduce::OPERATORS,
        matmul::OPERATORS,
        resample::OPERATORS,
        rearrange::OPERATORS,
        loss::OPERATORS,
        attention::OPERATORS,
        softmax::OPERATORS,
        activation::OPERATORS,
        arithmetic::OPERATORS,
        embedding::OPERATORS,
        graph::OPERATORS,
        spectral::OPERATORS,
        sphere::OPERATORS,
        geodesic::OPERATORS,
    ]
    .into_iter()
    .flatten()
}

impl<const D: usize> Output for ShardTensor<D> {
    fn shape(&self) -> Vec<usize> {
        self.dims().to_vec()
    }

    fn backward(self: Box<Self>, cotangent: TensorData) -> Result<(TensorData, Gradients)> {
        let y = sharded(self.resolve());
        let shape = y.layout().local_shape(y.mesh().position());
        assert_eq!(
            y.local_dims()[..],
            shape[..],
            "a shard differs from its layout"
        );
        let device = y.mesh().device().clone().inner();
        let cotangent = Tensor::<D>::from_data(cotangent, (&device, y.local().dtype()));
        let cotangent = ShardTensor::distribute(cotangent, y.mesh(), y.layout())?;
        let gradients = (y.clone() * cotangent).sum().backward();
        Ok((y.full_tensor().into_data(), gradients))
    }
}
