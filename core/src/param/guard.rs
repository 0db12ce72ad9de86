//! Guard that lets parameter gathers start ahead.

use std::collections::{BTreeMap, HashMap};
use std::marker::PhantomData;
use std::rc::Rc;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::ahead::{self, Held};
use super::layout::ParamShard;
use super::module::param_shards;
use crate::dispatch::here;
use crate::exchange::travels;
use crate::paths::{PathVisitor, visit_paths};

/// Guard that lets gathers of a model's stored parameters start ahead of their use, until it is
/// dropped.
#[must_use = "gathers start ahead while it lives"]
#[derive(Debug)]
pub struct GatherAhead<'a> {
    /// Keeps the model unchanged, and the guard on its thread.
    model: PhantomData<(&'a (), Rc<()>)>,
}

/// Starts parameter gathers ahead of their use, in the order of the previous step, while the
/// returned guard lives: during a forward and a backward pass. It applies to parameters of the
/// model that are stored on meshes of all ranks. [`Launcher::overlap`](crate::Launcher::overlap)
/// decides whether messages travel while ranks compute; on GPUs they do not. `Trainer` calls this
/// function.
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
///         Ok(Some(ParamShard::new(layout, &mesh).with_stored(&["data"], Gather::EachPass)?))
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
    let mut stored = param_shards(model);
    stored.retain(|_, shard| {
        let (comm, ranks) = (shard.mesh().comm(), shard.mesh().size());
        // Gathers that involve only some ranks would not have the same order on all ranks.
        !shard.stored().is_empty() && travels(comm) && ranks == comm.size()
    });
    let mut finder = Finder {
        stored,
        held: HashMap::new(),
    };
    if !finder.stored.is_empty() {
        visit_paths(model, &mut finder);
    }
    ahead::begin(finder.held);
    GatherAhead { model: PhantomData }
}

/// Finds the shards of stored parameters that are in CPU memory.
struct Finder {
    stored: BTreeMap<String, ParamShard>,
    held: HashMap<String, Held>,
}

impl PathVisitor for Finder {
    fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        let path = path.join(".");
        let Some(stored) = self.stored.remove(&path) else {
            return;
        };
        let shard = param.val().inner().into_dispatch();
        if here(&shard).is_some() {
            let (layout, mesh) = (stored.layout().clone(), stored.mesh().clone());
            self.held.insert(
                path,
                Held {
                    shard,
                    layout,
                    mesh,
                },
            );
        }
    }
}

impl Drop for GatherAhead<'_> {
    fn drop(&mut self) {
        ahead::end();
    }
}
