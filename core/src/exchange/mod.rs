//! Exchange: boxes of cells between ranks, as an operator with an adjoint.

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use crate::Result;
use crate::comm::{Communicator, Operation};
use crate::operator::{BackwardPass, Operator, one};
pub(crate) use boxes::travels;
pub use boxes::{Boxes, add_box};
pub use need::{Need, Piece, Source};
pub use plan::{ExchangePlan, Transfer};

mod boxes;
mod need;
mod plan;

/// Direction in which a plan runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Cells are copied from their owners to the ranks that need them.
    Forward,
    /// Values of the needed cells return to the owners, which add them: the adjoint.
    Reverse,
}

/// Plan together with the direction in which it runs.
#[derive(Clone, Debug)]
pub struct Move {
    /// The plan of this rank.
    pub plan: Arc<ExchangePlan>,
    /// The direction.
    pub direction: Direction,
}

impl fmt::Display for Move {
    /// Prints the boxes that this rank sends and receives: the [plan](ExchangePlan) in this
    /// direction.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.direction {
            Direction::Forward => self.plan.fmt(f),
            Direction::Reverse => self.plan.reversed().fmt(f),
        }
    }
}

/// Exchange of boxes as an operator: a plan and a direction for each pass.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::comm::Operation;
/// use halocline_core::ops::{self, Exchange};
/// use halocline_core::plan::{Need, Source};
/// use halocline_core::{IndexBox, Launcher, Layout, Shard, Traffic};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("x", 2)])?;
///     let layout = Layout::new(mesh.shape(), &[2], &[Shard(0)])?;
///     let plan = mesh.exchange_plan(Source::Layout(&layout), |_| Need::of(IndexBox::whole(&[2])));
///     let operation = Operation::new("gather", Traffic::Exchange, Some(&layout));
///     let ranks = mesh.shape().ranks().into();
///     let exchange = Exchange::with_adjoint(operation, mesh.comm().clone(), ranks, plan.into());
///     let shard = Tensor::<1>::full([1], world.rank() as f32, &world.device().clone().inner());
///     // In one call, and in steps between which the rank may compute.
///     let whole = ops::run(shard.clone(), exchange.clone());
///     let boxes = exchange.send_all(&shard.clone().into_dispatch())?;
///     let steps = exchange.assemble(shard.into_dispatch(), boxes.finish()?);
///     assert_eq!(whole.into_data(), Tensor::<1>::from_dispatch(steps).into_data());
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The operation, for messages and errors.
    pub operation: Operation,
    /// The communicator.
    pub comm: Arc<dyn Communicator>,
    /// The ranks of the world, by mesh position.
    pub ranks: Arc<[usize]>,
    /// The forward pass.
    pub forward: Move,
    /// The backward pass.
    pub backward: Move,
}

impl Exchange {
    /// Makes an exchange whose backward pass is the adjoint of its forward pass.
    pub fn with_adjoint(
        operation: Operation,
        comm: Arc<dyn Communicator>,
        ranks: Arc<[usize]>,
        plan: Arc<ExchangePlan>,
    ) -> Self {
        let run = |direction| Move {
            plan: plan.clone(),
            direction,
        };
        Self {
            operation,
            comm,
            ranks,
            forward: run(Direction::Forward),
            backward: run(Direction::Reverse),
        }
    }

    /// Returns the exchange of the backward pass.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self {
            operation: self.operation.backward(),
            forward: self.backward,
            backward: self.forward,
            ..self
        }
    }
}

impl Operator for Exchange {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [tensor] = one(inputs);
        let received = self.send_all(&tensor)?.finish()?;
        Ok((self.assemble(tensor, received), ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let (gradient, ()) = self.clone().reversed().forward(vec![pass.cotangent])?;
        Ok(vec![Some(gradient)])
    }
}
