//! Modules whose parameters become shards.

use burn::module::{Module, ModuleVisitor, Param, Reparameterizer};
use burn::tensor::Tensor;

use super::layout::ParamShard;
use crate::dispatch::cut;
use crate::layout::{Fan, Partial, Placement};
use crate::tensor::on_device;
use crate::{Error, Result};

/// Shards the parameters of a module that all ranks hold alike: each keeps its shard. `shard` is
/// given path and shape, and returns the layout of a parameter, or `None` to leave it whole.
/// [`ParamShard`] has an example.
///
/// # Errors
/// Those of `shard`; a layout that is replicated on no axis and does not fit, or has partial values;
/// a module that is sharded already, or whose parameters are changed by another reparameterization.
pub fn shard_parameters<M: Module>(
    module: M,
    shard: impl FnMut(&str, &[usize]) -> Result<Option<ParamShard>>,
) -> Result<M> {
    let mut other = Reparameterized::default();
    module.visit(&mut other);
    if let Some(path) = other.found {
        let message = format!("parameter {path} is sharded or adapted already");
        return Err(Error::operator("shard_parameters", message));
    }
    let mut failed = None;
    let sharder = Sharder {
        shard,
        failed: &mut failed,
    };
    let module = module.apply_reparameterization(sharder);
    match failed {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

/// Finds a parameter with a reparameterization.
#[derive(Default)]
struct Reparameterized {
    path: Vec<String>,
    found: Option<String>,
}

impl ModuleVisitor for Reparameterized {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" {
            self.found.get_or_insert_with(|| self.path.join("."));
        }
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}

struct Sharder<'a, F> {
    shard: F,
    failed: &'a mut Option<Error>,
}

impl<F> Reparameterizer for Sharder<'_, F>
where
    F: FnMut(&str, &[usize]) -> Result<Option<ParamShard>>,
{
    type Reparam = ParamShard;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ParamShard>) {
        if self.failed.is_some() {
            return (param, None);
        }
        let shape = param.dims();
        match (self.shard)(path, &shape).and_then(|shard| match shard {
            Some(shard) => checked(shard, path, &shape).map(Some),
            None => Ok(None),
        }) {
            Ok(None) => (param, None),
            Ok(Some(shard)) => {
                let (id, whole, mapper) = param.consume();
                let (device, tracked) = (whole.device(), whole.is_require_grad());
                let held = shard.layout.local_box(shard.mesh.position());
                let local = Tensor::<D>::from_dispatch(cut(&whole.inner().into_dispatch(), &held));
                // A copy, which does not keep the whole tensor.
                let local = Tensor::from_data(local.to_data(), (&local.device(), local.dtype()));
                let local = on_device(local, &device).set_require_grad(tracked);
                (Param::from_mapped_value(id, local, mapper), Some(shard))
            }
            Err(error) => {
                *self.failed = Some(error);
                (param, None)
            }
        }
    }
}

/// Checks that a layout is one of a parameter, and gives it the path.
fn checked(shard: ParamShard, path: &str, shape: &[usize]) -> Result<ParamShard> {
    let layout = &shard.layout;
    let unfit = |placement: &Placement| matches!(placement, Partial(_) | Fan);
    if layout.shape() != shape || layout.placements().iter().any(unfit) {
        let message =
            format!("{layout} for parameter {path} {shape:?}; expected Shard and Replicate");
        return Err(Error::Layout(message));
    }
    Ok(shard.with_path(path))
}
