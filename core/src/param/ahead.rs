//! Gathers of parameters that start before they are needed.
//!
//! Training steps gather their parameters in the same order. While a [`GatherAhead`] lives, each gather
//! starts the next one of the step before, which travels while this rank computes. Results have the same
//! bits. A gather that another one takes the place of, and a parameter of another model under the same
//! path, cost a message that is not used: whether the shard is the one that was sent is seen by its
//! memory.

use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::module::param_shards;
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

/// Lets gathers of a model's stored parameters start ahead of their use, until it is dropped.
#[must_use = "gathers start ahead while it lives"]
#[derive(Debug)]
pub struct GatherAhead<'a> {
    /// The model does not change, and the thread stays the same.
    model: PhantomData<(&'a (), Rc<()>)>,
}

/// Starts gathers of a model's stored parameters ahead of their use, in the order of the step before, while
/// the guard lives: for a forward and a backward pass. [`Launcher::overlap`](crate::Launcher::overlap) decides whether
/// messages travel while ranks compute; on GPUs they do not. `Trainer` calls it.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use halocline_core::{
///     Gather, Launcher, Layout, ParamShard, Shard, gather_ahead, shard_parameters,
/// };
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("data", 2)])?;
///     let linear = world.init(|device| LinearConfig::new(4, 6).with_bias(false).init(device))?;
///     let linear = shard_parameters(linear, |_, shape| {
///         let layout = Layout::new(mesh.shape(), shape, &[Shard(0)])?;
///         Ok(Some(ParamShard::new(layout, &mesh).with_stored(&["data"], Gather::Again)?))
///     })?;
///     let ahead = gather_ahead(&linear);
///     let gradients = linear.weight.val().sum().backward();
///     drop(ahead); // before an optimizer changes the parameters
///     assert!(linear.weight.grad(&gradients).is_some());
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn gather_ahead<M: Module>(model: &M) -> GatherAhead<'_> {
    struct Shards {
        path: Vec<String>,
        found: HashMap<String, DispatchTensor>,
    }

    impl ModuleVisitor for Shards {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let shard = param.val().inner().into_dispatch();
            self.found.insert(self.path.join("."), shard);
        }
    }

    let stored = param_shards(model);
    let mut shards = Shards {
        path: Vec::new(),
        found: HashMap::new(),
    };
    if stored.values().any(|shard| !shard.stored().is_empty()) {
        model.visit(&mut shards);
    }
    STATE.with_borrow_mut(|state| state.shards = shards.found);
    GatherAhead { model: PhantomData }
}

impl Drop for GatherAhead<'_> {
    fn drop(&mut self) {
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
