//! Exchange: boxes of cells between ranks, as an operator with an adjoint.

use std::sync::Arc;

use burn::backend::DispatchTensor;

use crate::Result;
use crate::comm::{Communicator, Operation};
use crate::operator::{BackwardPass, Operator, one};
pub use boxes::{Boxes, add_box};
pub use need::{Need, Piece, Source};
pub use plan::{ExchangePlan, Transfer};

mod boxes;
mod need;
mod plan;

/// Which way a plan is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Owners' cells go where they are needed.
    Forward,
    /// What lies where cells are needed goes back to the owners, who add: the adjoint.
    Reverse,
}

/// One run of a plan.
#[derive(Clone, Debug)]
pub struct Move {
    /// The plan of this rank.
    pub plan: Arc<ExchangePlan>,
    /// Which way it is run.
    pub direction: Direction,
}

/// An exchange as an operator: what moves forward, and what moves backward.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The operation, for messages and errors.
    pub operation: Operation,
    /// The way to the other ranks.
    pub comm: Arc<dyn Communicator>,
    /// The ranks of the world, by mesh position.
    pub ranks: Arc<[usize]>,
    /// The forward pass.
    pub forward: Move,
    /// The backward pass.
    pub backward: Move,
}

impl Exchange {
    /// An exchange whose backward pass is the adjoint of its forward pass.
    pub fn with_adjoint(
        operation: Operation,
        comm: Arc<dyn Communicator>,
        ranks: Arc<[usize]>,
        plan: Arc<ExchangePlan>,
    ) -> Self {
        let to = |direction| Move {
            plan: plan.clone(),
            direction,
        };
        Self {
            operation,
            comm,
            ranks,
            forward: to(Direction::Forward),
            backward: to(Direction::Reverse),
        }
    }

    /// The exchange that is this one's gradient.
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
