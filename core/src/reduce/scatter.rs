//! Reduce-scatter as an operator with an adjoint.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, Shape, Tensor};

use crate::comm::all_reduce::combination;
use crate::comm::collectives::{agree, exchange_all, expected_like, only_tensor, place_in};
use crate::comm::{Communicator, Expected, Operation, Payload};
use crate::dispatch::{blank, cut, flattened, paste, reshaped};
use crate::layout::ReduceOp;
use crate::operator::{BackwardPass, Operator, one};
use crate::{IndexBox, Result};

/// Reduce-scatter: each rank of a group receives the reduction of one box of the ranks' tensors,
/// which all have the same shape.
///
/// A rank receives all contributions to its box; from these it later computes the gradient of each,
/// which it sends back.
#[derive(Clone, Debug)]
pub(crate) struct ReduceScatter {
    /// The operation, for messages and errors.
    pub operation: Operation,
    /// The communicator.
    pub comm: Arc<dyn Communicator>,
    /// The participating ranks of the world, in the order in which they are combined.
    pub group: Arc<[usize]>,
    /// The operation that combines values.
    pub op: ReduceOp,
    /// The box of each rank, by index in the group. Together the boxes cover the tensor.
    pub boxes: Vec<IndexBox>,
}

impl ReduceScatter {
    /// This rank's box.
    pub(super) fn own_box(&self) -> &IndexBox {
        &self.boxes[place_in(&self.comm, &self.group)]
    }

    /// The shape of the tensors, which the boxes cover.
    fn shape(&self) -> Vec<usize> {
        let dims = 0..self.own_box().ranges().len();
        let end = |dim: usize| self.boxes.iter().map(move |cells| cells.ranges()[dim].end);
        dims.map(|dim| end(dim).max().unwrap_or(0)).collect()
    }

    /// Sends flat tensors to the ranks of the group and returns those that this one receives, by
    /// index in the group. `sent` and `received` return the numbers of elements by index; a tensor
    /// without elements is not made.
    fn exchange(
        &self,
        operation: &Operation,
        like: &DispatchTensor,
        sent: impl Fn(usize) -> usize,
        cells: impl Fn(usize) -> DispatchTensor,
        received: impl Fn(usize) -> usize,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let cells = |place| (sent(place) > 0).then(|| cells(place));
        let send = |place| Payload::Tensors(cells(place).into_iter().collect());
        let expected = |place| match received(place) {
            0 => Expected::Tensors {
                shapes: Vec::new(),
                dtype: like.dtype(),
                device: like.device(),
            },
            elements => expected_like(like, elements),
        };
        let all = exchange_all(&self.comm, &self.group, operation, send, expected)?;
        let from_place = |(place, payload): (usize, Option<Payload>)| match payload {
            Some(_) => only_tensor(payload),
            None => cells(place),
        };
        Ok(all.into_iter().enumerate().map(from_place).collect())
    }
}

impl Operator for ReduceScatter {
    /// The contributions to this rank's box, flat, by index in the group; empty if the box is
    /// empty.
    type Saved = Vec<DispatchTensor>;

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Self::Saved)> {
        let [tensor] = one(inputs);
        let elements = tensor.shape().num_elements();
        let operation = self.operation.of(self.op, elements, tensor.dtype());
        agree(&self.comm, &self.group, &operation)?;
        let target = self.own_box();
        let sent = |place: usize| self.boxes[place].volume();
        let cells = |place: usize| flattened(cut(&tensor, &self.boxes[place]));
        let all = self.exchange(&operation, &tensor, sent, cells, |_| target.volume())?;
        let contributions: Vec<DispatchTensor> = all.into_iter().flatten().collect();
        let result = if contributions.is_empty() {
            blank(&tensor, &target.shape(), None)
        } else {
            combination(self.op, contributions.clone())
        };
        let result = reshaped(result, Shape::from(target.shape()));
        Ok((result, contributions))
    }

    fn backward(&self, pass: BackwardPass<'_, Self::Saved>) -> Result<Vec<Option<DispatchTensor>>> {
        let cotangent = pass.cotangent;
        let volume = self.own_box().volume();
        let gradients = match volume {
            0 => Vec::new(),
            _ => gradients(self.op, pass.saved, flattened(cotangent.clone())),
        };
        // The reduce-scatter may itself be part of a backward pass.
        let operation = if self.operation.is_backward() {
            self.operation.clone()
        } else {
            self.operation.backward()
        };
        let operation = operation.of_type(cotangent.dtype());
        let cells = |place: usize| gradients[place].clone();
        let received = |place: usize| self.boxes[place].volume();
        let all = self.exchange(&operation, &cotangent, |_| volume, cells, received)?;
        let of_boxes = self.boxes.iter().zip(all);
        let whole = blank(&cotangent, &self.shape(), None);
        let gradient = of_boxes.fold(whole, |whole, (part, cells)| match cells {
            Some(cells) => paste(whole, part, reshaped(cells, Shape::from(part.shape()))),
            None => whole,
        });
        Ok(vec![Some(gradient)])
    }
}

/// Computes the gradients of flat contributions: for an extremum, the cotangent goes to the first
/// contribution that attains it; for a product, each gradient is the cotangent times the other
/// contributions.
fn gradients(
    op: ReduceOp,
    contributions: &[DispatchTensor],
    cotangent: DispatchTensor,
) -> Vec<DispatchTensor> {
    let tensors = || {
        contributions
            .iter()
            .cloned()
            .map(Tensor::<1>::from_dispatch)
    };
    let cotangent = Tensor::<1>::from_dispatch(cotangent);
    let gradients: Vec<Tensor<1>> = match op {
        ReduceOp::Sum => vec![cotangent; contributions.len()],
        ReduceOp::Max | ReduceOp::Min => {
            let extremum = Tensor::<1>::from_dispatch(combination(op, contributions.to_vec()));
            let mut held: Option<Tensor<1, Bool>> = None;
            // NaN is the extremum where it occurs. `held` marks cells that an earlier rank already
            // holds.
            let gradient = |value: Tensor<1>| {
                let holds = value
                    .clone()
                    .equal(extremum.clone())
                    .bool_or(value.is_nan());
                let earlier = held.take();
                let (first, now) = match earlier {
                    None => (holds.clone(), holds),
                    Some(earlier) => (
                        holds.clone().bool_and(earlier.clone().bool_not()),
                        earlier.bool_or(holds),
                    ),
                };
                held = Some(now);
                cotangent.clone().mask_fill(first.bool_not(), 0.0)
            };
            tensors().map(gradient).collect()
        }
        ReduceOp::Product => {
            // Products of the earlier factors times products of the later ones: no division, so
            // zeros are exact.
            let mut earlier = cotangent;
            let mut gradients: Vec<Tensor<1>> = tensors()
                .map(|value| {
                    let product = earlier.clone() * value;
                    std::mem::replace(&mut earlier, product)
                })
                .collect();
            let mut later: Option<Tensor<1>> = None;
            for (gradient, value) in gradients.iter_mut().zip(tensors()).rev() {
                later = Some(match later {
                    None => value,
                    Some(later) => {
                        gradient.inplace(|gradient| gradient * later.clone());
                        value * later
                    }
                });
            }
            gradients
        }
    };
    gradients.into_iter().map(Tensor::into_dispatch).collect()
}
