//! Exchanges that gather shards of parameters.

use crate::DeviceMesh;
use crate::comm::{Operation, Traffic};
use crate::exchange::{Direction, Exchange, Move};
use crate::layout::Layout;

/// Makes the exchange that gathers a shard to another layout. With `parts`, the backward pass adds
/// the ranks' parts of the gradient; otherwise it cuts the shard out of the whole gradient, which
/// every rank has.
pub(super) fn gathering(mesh: &DeviceMesh, from: &Layout, to: &Layout, parts: bool) -> Exchange {
    let run = |plan, direction| Move { plan, direction };
    let forward = mesh.plan_between(from, to);
    let backward = if parts {
        run(forward.clone(), Direction::Reverse)
    } else {
        run(mesh.plan_between(to, from), Direction::Forward)
    };
    Exchange {
        operation: Operation::new("gather", Traffic::Gather, Some(to)).leaving(from),
        comm: mesh.comm().clone(),
        ranks: mesh.shape().ranks().into(),
        forward: run(forward, Direction::Forward),
        backward,
    }
}

/// Returns the same gather for the backward pass, as another operation than the scatter of
/// gradients, which has the same layout.
pub(super) fn again(exchange: &Exchange) -> Exchange {
    Exchange {
        operation: exchange.operation.named("gather again").backward(),
        ..exchange.clone()
    }
}
