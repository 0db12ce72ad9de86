//! Gathers of parameters that start before they are needed.
//!
//! Training steps gather their parameters in the same order. While a `GatherAhead` lives, each gather
//! starts the next one of the step before, which travels while this rank computes. Results have the same
//! bits. A gather that another one takes the place of, and a parameter of another model under the same
//! path, cost a message that is not used: whether the shard is the one that was sent is seen by its
//! memory.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use crate::Result;
use crate::comm::InFlight;
use crate::dispatch::same_memory;
use crate::exchange::Exchange;
use crate::operator::Operator;

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

#[derive(Default)]
struct State {
    /// Shards of the model of the guard, by path; empty without one.
    shards: HashMap<String, DispatchTensor>,
    /// The gathers of the step before, in order.
    before: Vec<Step>,
    /// The gathers of this step.
    now: Vec<Step>,
    /// A gather that has been started.
    flight: Option<Flight>,
}

/// A gather of a parameter, for the forward pass or again for the backward pass.
struct Step {
    path: Arc<str>,
    again: bool,
    exchange: Exchange,
}

struct Flight {
    path: Arc<str>,
    again: bool,
    exchange: Exchange,
    shard: DispatchTensor,
    in_flight: Option<InFlight>,
}

impl Flight {
    /// Receives what is not used.
    fn discard(self) -> Result<()> {
        self.exchange.boxes(self.in_flight).finish().map(drop)
    }

    fn is(&self, path: &str, again: bool, exchange: &Exchange, shard: &DispatchTensor) -> bool {
        *self.path == *path
            && self.again == again
            && Arc::ptr_eq(&self.exchange.forward.plan, &exchange.forward.plan)
            && same_memory(&self.shard, shard)
    }
}

/// Gathers a shard, and starts the gather after it.
pub(super) fn gather(
    path: &Arc<str>,
    again: bool,
    exchange: &Exchange,
    shard: DispatchTensor,
) -> Result<DispatchTensor> {
    let is_ahead = STATE.with_borrow(|state| state.shards.contains_key(&**path));
    if !is_ahead || !exchange.travels() {
        return Ok(exchange.forward(vec![shard])?.0);
    }
    let flight = STATE.with_borrow_mut(|state| state.flight.take());
    let in_flight = match flight {
        Some(flight) if flight.is(path, again, exchange, &shard) => flight.in_flight,
        other => {
            other.map_or(Ok(()), Flight::discard)?;
            exchange.send_all(&shard)?.into_in_flight()
        }
    };
    start_next(path, again, exchange)?;
    let received = exchange.boxes(in_flight).finish()?;
    Ok(exchange.assemble(shard, received))
}

/// Notes a gather, and starts the one that followed it in the step before.
fn start_next(path: &Arc<str>, again: bool, exchange: &Exchange) -> Result<()> {
    let next = STATE.with_borrow_mut(|state| {
        let index = state.now.len();
        state.now.push(Step {
            path: path.clone(),
            again,
            exchange: exchange.clone(),
        });
        let same = |step: &Step| step.path == *path && step.again == again;
        let next = match state.before.get(index).is_some_and(same) {
            true => state.before.get(index + 1)?,
            false => return None,
        };
        let shard = state.shards.get(&*next.path)?.clone();
        Some((next.path.clone(), next.again, next.exchange.clone(), shard))
    });
    let Some((path, again, exchange, shard)) = next else {
        return Ok(());
    };
    let boxes = exchange.send_all(&shard)?;
    boxes.in_background();
    let in_flight = boxes.into_in_flight();
    let flight = Flight {
        path,
        again,
        exchange,
        shard,
        in_flight,
    };
    STATE.with_borrow_mut(|state| state.flight = Some(flight));
    Ok(())
}

/// Begins a step with these shards, by the paths of their parameters.
pub(super) fn begin(shards: HashMap<String, DispatchTensor>) {
    STATE.with_borrow_mut(|state| state.shards = shards);
}

/// Ends a step: its order of gathers is that of the next one.
pub(super) fn end() {
    let flight = STATE.with_borrow_mut(|state| {
        state.shards.clear();
        let now = std::mem::take(&mut state.now);
        if !now.is_empty() {
            state.before = now;
        }
        state.flight.take()
    });
    // An error has ended the pass, or ends the next one.
    let _ = flight.map(Flight::discard);
}
