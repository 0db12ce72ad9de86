//! The gathering of stored parameters, as a node of the graph.

use burn::backend::DispatchTensor;

use crate::Result;
use crate::comm::{Operation, Traffic};
use crate::exchange::Exchange;
use crate::operator::{BackwardPass, Operator, Recompute};

/// An all-gather of a parameter's shards.
#[derive(Debug)]
pub(super) struct Gathering {
    pub(super) exchange: Exchange,
    /// Whether the backward pass gathers again.
    pub(super) again: bool,
}

impl Operator for Gathering {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        match self.again {
            true => Recompute::Always,
            false => Recompute::Never,
        }
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        self.exchange.forward(inputs)
    }

    fn again(&self, inputs: Vec<DispatchTensor>) -> Result<DispatchTensor> {
        // Another operation than the scatter of gradients, which has the same layout.
        let layout = self.exchange.operation.layout();
        let operation = Operation::new("gather again", Traffic::Gather, layout).backward();
        let exchange = Exchange {
            operation,
            ..self.exchange.clone()
        };
        Ok(exchange.forward(inputs)?.0)
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        self.exchange.backward(pass)
    }
}
