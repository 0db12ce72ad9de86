//! Parameter gathers that start before their results are needed.
//!
//! Training steps gather their parameters in the same order. While a `GatherAhead` is alive, each
//! gather starts the gather that followed it in the previous step, whose messages travel while this
//! rank computes. Results are bit-identical. A gather that was started is used if it has the same
//! layouts and sent the same memory that is to be gathered; otherwise its messages are dropped on
//! arrival. The decision is the same on all ranks.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::exchange;
use crate::comm::InFlight;
use crate::dispatch::same_memory;
use crate::exchange::Exchange;
use crate::layout::Layout;
use crate::operator::Operator;
use crate::{DeviceMesh, Result, module_scope};

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

#[derive(Default)]
struct State {
    /// Shards of the guarded model, by path; empty without a guard.
    held: HashMap<String, Held>,
    /// The gathers of the previous step, in order.
    before: Vec<Recorded>,
    /// The gathers of this step.
    now: Vec<Recorded>,
    /// The gather that has been started, if any.
    flight: Option<Flight>,
}

/// A shard of a parameter, with its layout and mesh.
pub(super) struct Held {
    pub(super) shard: DispatchTensor,
    pub(super) layout: Layout,
    pub(super) mesh: DeviceMesh,
}

/// A gather of a parameter, in the forward pass or repeated in the backward pass.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Step {
    pub(super) path: Arc<str>,
    pub(super) again: bool,
    pub(super) from: Layout,
    pub(super) to: Layout,
}

/// A gather, and the module that asked for it.
type Recorded = (Step, Option<Arc<str>>);

struct Flight {
    step: Step,
    shard: DispatchTensor,
    in_flight: Option<InFlight>,
}

/// Gathers a shard, and starts the next gather.
pub(super) fn gather(
    step: &Step,
    exchange: &Exchange,
    shard: DispatchTensor,
) -> Result<DispatchTensor> {
    // Gathers of a dry run are not part of a step.
    let is_dry = exchange.comm.is_dry();
    if is_dry || !STATE.with_borrow(|state| state.held.contains_key(&*step.path)) {
        return Ok(exchange.forward(vec![shard])?.0);
    }
    let flight = STATE.with_borrow_mut(|state| state.flight.take());
    let in_flight = match flight {
        Some(flight) if flight.step == *step && same_memory(&flight.shard, &shard) => {
            flight.in_flight
        }
        _ => exchange.send_all(&shard)?.into_in_flight(),
    };
    start_next(step)?;
    let received = exchange.boxes(in_flight).finish()?;
    Ok(exchange.assemble(shard, received))
}

/// Records a gather, and starts the one that followed it in the previous step.
fn start_next(step: &Step) -> Result<()> {
    let next = STATE.with_borrow_mut(|state| {
        let index = state.now.len();
        state.now.push((step.clone(), module_scope::current()));
        let (before, _) = state.before.get(index)?;
        let (next, module) = state.before.get(index + 1).filter(|_| before == step)?;
        // Only the first stage of a gather in several stages starts from the held shard.
        let held = state.held.get(&*next.path);
        let held = held.filter(|held| held.layout == next.from)?;
        Some((
            next.clone(),
            module.clone(),
            held.shard.clone(),
            held.mesh.clone(),
        ))
    });
    let Some((step, module, shard, mesh)) = next else {
        return Ok(());
    };
    let _module = module_scope::enter(module);
    let forward = exchange::gathering(&mesh, &step.from, &step.to, true);
    let exchange = if step.again {
        exchange::again(&forward)
    } else {
        forward
    };
    let boxes = exchange.send_all(&shard)?;
    boxes.in_background();
    let in_flight = boxes.into_in_flight();
    let flight = Flight {
        step,
        shard,
        in_flight,
    };
    STATE.with_borrow_mut(|state| state.flight = Some(flight));
    Ok(())
}

/// Starts a step with these shards, by the paths of their parameters.
pub(super) fn begin(held: HashMap<String, Held>) {
    STATE.with_borrow_mut(|state| state.held = held);
}

/// Ends a step: its order of gathers is used for the next step.
pub(super) fn end() {
    let flight = STATE.with_borrow_mut(|state| {
        state.held.clear();
        let now = std::mem::take(&mut state.now);
        if !now.is_empty() {
            state.before = now;
        }
        state.flight.take()
    });
    // Dropped without waiting: after an error its messages may never arrive.
    drop(flight);
}
