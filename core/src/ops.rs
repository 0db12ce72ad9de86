//! Communication as functions of burn tensors, differentiable: what operators are built from.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::kind::Basic;

use crate::comm::{Communicator, Operation, Traffic, collectives};
use crate::device_mesh::DeviceMesh;
pub use crate::dispatch::{blank, cut, from_dispatch, paste, to_dispatch};
pub use crate::exchange::{Boxes, add_box};
use crate::exchange::{Exchange, ExchangePlan};
use crate::layout::ReduceOp;
pub use crate::operator::{BackwardPass, Operator, apply};
use crate::reduce::{Leaf, Pass, Reduce, ReduceScatter};
use crate::replicas::require_replicas;
use crate::{IndexBox, Result};

/// Moves boxes between the ranks of a mesh and assembles what this rank needs.
///
/// # Adjoint
/// What came from a cell is added to that cell's gradient, on the rank that owns it.
pub fn exchange<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    mesh: &DeviceMesh,
    plan: Arc<ExchangePlan>,
    operation: Operation,
) -> Tensor<D, K> {
    let ranks: Arc<[usize]> = mesh.shape().ranks().into();
    run(
        tensor,
        Exchange::with_adjoint(operation, mesh.comm().clone(), ranks, plan),
    )
}

/// Runs an exchange whose adjoint is given with it.
pub fn run<const D: usize, K: Basic>(tensor: Tensor<D, K>, exchange: Exchange) -> Tensor<D, K> {
    Tensor::from_dispatch(apply(exchange, [tensor.into_dispatch()]))
}

/// Reduces a tensor over the ranks along some axes of a mesh, each of which gets the result. Values are combined in the
/// order of ranks.
///
/// # Adjoint
/// The gradient of the result is equal on all ranks. It is that of each term of a sum, and of the first value in the order of
/// ranks that is the maximum or minimum; other values have none. That of a factor is it times the other factors.
pub fn all_reduce<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    mesh: &DeviceMesh,
    axes: &[usize],
    op: ReduceOp,
    operation: Operation,
) -> Tensor<D, K> {
    reduce(tensor, mesh, axes, operation, Pass::Forward(op))
}

/// Reduces a tensor over the ranks of a group, of which each gets a box of the result, by place in the group.
///
/// # Adjoint
/// That of [`all_reduce`]; the gradient of the result lies as the result.
pub(crate) fn reduce_scatter<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    mesh: &DeviceMesh,
    group: Arc<[usize]>,
    boxes: Vec<IndexBox>,
    op: ReduceOp,
    operation: Operation,
) -> Tensor<D, K> {
    let comm = mesh.comm().clone();
    let scatter = ReduceScatter {
        operation,
        comm,
        group,
        op,
        boxes,
    };
    Tensor::from_dispatch(apply(scatter, [tensor.into_dispatch()]))
}

/// Passes a replicated operand on to work that differs by rank along some axes of a mesh. With checks on
/// ([`Settings::check`](crate::Settings::check)) these ranks compare a hash of it.
///
/// # Adjoint
/// The sum of the ranks' gradients, so that the operand's gradient is complete.
pub fn fan_out<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    mesh: &DeviceMesh,
    axes: &[usize],
    operator: &'static str,
) -> Tensor<D, K> {
    let group = mesh.ranks_along(axes);
    require_replicas(operator, mesh.comm(), &group, &tensor).unwrap_or_else(|error| error.raise());
    let operation = Operation::new(operator, Traffic::Reduce, None);
    reduce(tensor, mesh, axes, operation, Pass::Backward)
}

/// The numbers that every rank of a group holds, in the group's order: for statistics, which are few.
///
/// # Errors
/// A failure of communication.
pub fn all_gather_numbers(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    own: &[f64],
) -> Result<Vec<Vec<f64>>> {
    if group.len() == 1 {
        return Ok(vec![own.to_vec()]);
    }
    collectives::agree(comm, group, operation)?;
    let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
    let all = collectives::all_gather_bytes(comm, group, operation, &bytes)?;
    let numbers = |bytes: Vec<u8>| {
        let (words, _) = bytes.as_chunks();
        words.iter().map(|word| f64::from_le_bytes(*word)).collect()
    };
    Ok(all.into_iter().map(numbers).collect())
}

fn reduce<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    mesh: &DeviceMesh,
    axes: &[usize],
    operation: Operation,
    pass: Pass,
) -> Tensor<D, K> {
    let group = mesh.ranks_along(axes);
    if group.len() == 1 {
        return tensor;
    }
    let tensor = tensor.into_dispatch();
    let buckets = pass == Pass::Backward && mesh.comm().settings().buckets;
    let reduce = Reduce {
        operation,
        comm: mesh.comm().clone(),
        pass,
        leaf: buckets.then(|| Leaf::of(&tensor, &group)).flatten(),
        group,
    };
    Tensor::from_dispatch(apply(reduce, [tensor]))
}
