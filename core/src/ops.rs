//! Communication as differentiable functions of burn tensors, the building blocks of operators.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn::tensor::kind::Basic;

pub use crate::cells::{in_order, of_boxes};
use crate::comm::{Communicator, Operation, Traffic, collectives};
#[cfg(feature = "cube")]
pub use crate::cube::{is_on_gpu, with_memory};
use crate::device_mesh::DeviceMesh;
pub use crate::dispatch::{blank, cut, flipped, from_dispatch, paste, to_dispatch};
use crate::exchange::ExchangePlan;
pub use crate::exchange::{Boxes, Direction, Exchange, Move, add_box};
use crate::layout::ReduceOp;
use crate::operator::apply_beside;
pub use crate::operator::{BackwardPass, Operator, Recompute, apply};
use crate::reduce::{Leaf, Pass, Reduce, ReduceScatter};
use crate::replicas::require_replicas;
use crate::{Error, IndexBox, OrRaise, Result};

/// Moves boxes between the ranks of a mesh and assembles the cells that this rank needs.
///
/// # Adjoint
/// The gradients of all copies of a cell are added on the rank that owns the cell.
///
/// # Panics
/// [Raises](crate::Error::raise) a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::comm::Operation;
/// use halocline_core::plan::{Need, Source};
/// use halocline_core::{IndexBox, Launcher, Layout, Shard, Traffic, ops};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("x", 2)])?;
///     let layout = Layout::new(mesh.shape(), &[4], &[Shard(0)])?;
///     let shard = Tensor::<1>::full([2], world.rank() as f32, world.device());
///     // Both ranks need the two cells in the middle.
///     let middle = |_| Need::of(IndexBox::new(Vec::from([1..3])));
///     let plan = mesh.exchange_plan(Source::Layout(&layout), middle);
///     let operation = Operation::new("middle", Traffic::Exchange, Some(&layout));
///     let cells = ops::exchange(shard, &mesh, plan.into(), operation);
///     cells.into_data().assert_eq(&[0.0_f32, 1.0].into(), false);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
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

/// Runs an exchange with its own backward pass; see the example of [`Exchange`].
///
/// # Panics
/// [Raises](crate::Error::raise) a failure of communication.
pub fn run<const D: usize, K: Basic>(tensor: Tensor<D, K>, exchange: Exchange) -> Tensor<D, K> {
    Tensor::from_dispatch(apply(exchange, [tensor.into_dispatch()]))
}

/// Reduces a tensor over the ranks along some axes of a mesh; every rank receives the result.
/// Values are combined in rank order.
///
/// # Adjoint
/// The gradient of the result is equal on all ranks. A sum passes it to each term; a maximum or
/// minimum, to the first value in rank order that attains it, and zero to the others; a product, to
/// each factor, times the other factors.
///
/// # Panics
/// [Raises](crate::Error::raise) a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::comm::Operation;
/// use halocline_core::{Launcher, ReduceOp, Traffic, ops};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("x", 2)])?;
///     let x = Tensor::<1>::full([3], world.rank() as f32 + 1.0, world.device());
///     let operation = Operation::new("total", Traffic::Reduce, None);
///     let total = ops::all_reduce(x, &mesh, &[0], ReduceOp::Sum, operation);
///     total.into_data().assert_eq(&[3.0_f32; 3].into(), false);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn all_reduce<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    mesh: &DeviceMesh,
    axes: &[usize],
    op: ReduceOp,
    operation: Operation,
) -> Tensor<D, K> {
    reduce(tensor, None, mesh, axes, operation, Pass::Forward(op))
}

/// Reduces a tensor over the ranks of a group; each rank receives one box of the result, by its
/// index in the group.
///
/// # Adjoint
/// The adjoint of [`all_reduce`], applied to a gradient that is divided into the boxes of the
/// result.
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

/// Passes a replicated operand to work that differs by rank along some axes of a mesh. With checks
/// enabled ([`Settings::check`](crate::comm::Settings::check)), the ranks compare a hash of it.
///
/// # Adjoint
/// The gradients of the ranks are summed, so that the operand's gradient is complete.
///
/// # Panics
/// [Raises](crate::Error::raise) a failure of communication and, with checks enabled,
/// [`Error::Replicas`] if the ranks hold different tensors.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, ops};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("x", 2)])?;
///     let scale = Tensor::<1>::ones([1], world.device()).require_grad();
///     let scaled = ops::fan_out(scale.clone(), &mesh, &[0], "scale") * (world.rank() + 1) as f32;
///     let gradient = scale.grad(&scaled.sum().backward()).expect("a gradient");
///     gradient.into_data().assert_eq(&[3.0_f32].into(), false);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn fan_out<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    mesh: &DeviceMesh,
    axes: &[usize],
    operator: &'static str,
) -> Tensor<D, K> {
    fan_out_to(tensor, None, mesh, axes, operator)
}

/// Like [`fan_out`], for an operand that an operator combines with `other`. The gradient of a
/// parameter is then summed when the backward pass reaches that operator, rather than at its end.
///
/// # Panics
/// Like [`fan_out`]; also in the backward pass, if the loss depends on the operand but not on
/// `other`, and `other` has gradients.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, ops};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("x", 2)])?;
///     let [x, scale] = [1.0, 2.0].map(|value| Tensor::<1>::full([1], value, world.device()).require_grad());
///     let y = x.clone() * ops::fan_out_with(scale.clone(), &x, &mesh, &[0], "scale");
///     let gradient = scale.grad(&y.sum().backward()).expect("a gradient");
///     gradient.into_data().assert_eq(&[2.0_f32].into(), false);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn fan_out_with<const D: usize, const E: usize, K: Basic, L: Basic>(
    tensor: Tensor<D, K>,
    other: &Tensor<E, L>,
    mesh: &DeviceMesh,
    axes: &[usize],
    operator: &'static str,
) -> Tensor<D, K> {
    let other = other.clone().into_dispatch();
    fan_out_to(tensor, Some(other), mesh, axes, operator)
}

fn fan_out_to<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    other: Option<DispatchTensor>,
    mesh: &DeviceMesh,
    axes: &[usize],
    operator: &'static str,
) -> Tensor<D, K> {
    let group = mesh.ranks_along(axes);
    require_replicas(operator, mesh.comm(), &group, &tensor).or_raise();
    let operation = Operation::new(operator, Traffic::Reduce, None);
    reduce(tensor, other, mesh, axes, operation, Pass::Backward)
}

/// Gathers numbers from every rank of a group, in group order; meant for a few statistics.
///
/// # Errors
/// Communication fails.
///
/// # Example
/// ```
/// use halocline_core::comm::Operation;
/// use halocline_core::{Launcher, Traffic, ops};
///
/// Launcher::local(2).run(|world| {
///     let operation = Operation::new("ranks", Traffic::Control, None);
///     let number = world.rank() as f64;
///     let all = ops::all_gather_numbers(world.comm(), &[0, 1], &operation, &[number])?;
///     assert_eq!(all, [[0.0], [1.0]]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn all_gather_numbers(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    operation: &Operation,
    values: &[f64],
) -> Result<Vec<Vec<f64>>> {
    if group.len() == 1 {
        return Ok(vec![values.to_vec()]);
    }
    collectives::agree(comm, group, operation)?;
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let all = collectives::all_gather_bytes(comm, group, operation, &bytes)?;
    let numbers = |bytes: Vec<u8>| {
        let (words, _) = bytes.as_chunks();
        words.iter().map(|word| f64::from_le_bytes(*word)).collect()
    };
    Ok(all.into_iter().map(numbers).collect())
}

/// Returns the result of work on this rank's cells, such as a check of their values. With checks
/// enabled ([`Settings::check`](crate::comm::Settings::check)), the first mistake among the ranks
/// along some axes of a mesh is an error on all of them. Otherwise, ranks without a mistake go on,
/// and learn in their next communication that a rank has ended.
///
/// # Errors
/// The error of this rank and, with checks enabled, that of another one; communication fails.
///
/// # Example
/// ```
/// use halocline_core::{Error, Launcher, ops};
///
/// Launcher::local(2).check(true).run(|world| {
///     let mesh = world.mesh([("x", 2)])?;
///     let found = match world.rank() {
///         0 => Ok(()),
///         _ => Err(Error::operator("take", "index 6 of a dim of 6 cells")),
///     };
///     let error = ops::agree_on(&mesh, &[0], "take", found).unwrap_err();
///     assert_eq!(error.to_string(), "take: index 6 of a dim of 6 cells");
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn agree_on<T>(
    mesh: &DeviceMesh,
    axes: &[usize],
    operator: &'static str,
    result: Result<T>,
) -> Result<T> {
    let (comm, group) = (mesh.comm(), mesh.ranks_along(axes));
    if !comm.settings().check || group.len() == 1 {
        return result;
    }
    let mistake = match &result {
        Ok(_) => String::new(),
        Err(Error::Operator { message, .. }) => message.clone(),
        Err(error) => error.to_string(),
    };
    let operation = Operation::new(operator, Traffic::Control, None);
    collectives::agree(comm, &group, &operation)?;
    let all = collectives::all_gather_bytes(comm, &group, &operation, mistake.as_bytes())?;
    match all.iter().find(|mistake| !mistake.is_empty()) {
        None => result,
        Some(mistake) => Err(Error::operator(operator, String::from_utf8_lossy(mistake))),
    }
}

fn reduce<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    other: Option<DispatchTensor>,
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
    let other = other.filter(|_| reduce.leaf.is_some());
    Tensor::from_dispatch(apply_beside(reduce, tensor, other))
}
