//! The gather of stored parameters, as a node of the autodiff graph.

use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::ahead::{self, Step};
use super::exchange;
use crate::Result;
use crate::exchange::Exchange;
use crate::operator::{BackwardPass, Operator, Recompute, one};
use crate::reduce::{Leaf, scatter};

/// All-gather of a parameter's shards.
#[derive(Debug)]
pub(super) struct Gathering {
    pub(super) exchange: Exchange,
    /// This gather as part of the order of a step.
    pub(super) step: Step,
    /// Whether the backward pass gathers again.
    pub(super) again: bool,
    /// The parameter, if the gather is applied to it directly.
    pub(super) leaf: Option<Arc<Leaf>>,
}

impl Operator for Gathering {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        if self.again {
            Recompute::Always
        } else {
            Recompute::Never
        }
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [shard] = one(inputs);
        Ok((ahead::gather(&self.step, &self.exchange, shard)?, ()))
    }

    fn again(&self, inputs: Vec<DispatchTensor>) -> Result<DispatchTensor> {
        let [shard] = one(inputs);
        let step = Step {
            again: true,
            ..self.step.clone()
        };
        ahead::gather(&step, &exchange::again(&self.exchange), shard)
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let cotangent = match &self.leaf {
            None => Some(pass.cotangent),
            Some(leaf) => scatter(leaf, &self.exchange, pass.cotangent)?,
        };
        match cotangent {
            None => Ok(vec![None]),
            Some(cotangent) => self.exchange.backward(BackwardPass { cotangent, ..pass }),
        }
    }
}
