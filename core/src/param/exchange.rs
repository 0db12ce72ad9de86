//! Exchanges that gather shards of parameters.

use std::sync::Arc;

use crate::DeviceMesh;
use crate::comm::{Operation, Traffic};
use crate::exchange::{Direction, Exchange, ExchangePlan, Move, Need, Source};
use crate::layout::Layout;

const NAME: &str = "parameter";

/// Returns the cached plan that supplies every rank with its cells of another layout.
fn plan(mesh: &DeviceMesh, source: &Layout, target: &Layout) -> Arc<ExchangePlan> {
    let key = (NAME, source.clone(), target.clone());
    let plan = mesh.cache().get_or_make(key, |(_, source, target)| {
        let need = |position| Need::of(target.local_box(position));
        Ok(mesh.exchange_plan(Source::Layout(source), need))
    });
    plan.expect("making this plan cannot fail")
}

/// Makes the exchange that gathers a shard to another layout. With `parts`, the backward pass adds
/// the ranks' parts of the gradient; otherwise it cuts the shard out of the whole gradient, which
/// every rank has.
pub(super) fn gathering(mesh: &DeviceMesh, from: &Layout, to: &Layout, parts: bool) -> Exchange {
    let run = |plan, direction| Move { plan, direction };
    let forward = plan(mesh, from, to);
    let backward = if parts {
        run(forward.clone(), Direction::Reverse)
    } else {
        run(plan(mesh, to, from), Direction::Forward)
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
