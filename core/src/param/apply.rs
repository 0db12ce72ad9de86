//! Sharding of the parameters of modules.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId, ParamMapper, Reparameterizer};
use burn::tensor::{Tensor, TensorData};

use super::initial::InitialValues;
use super::layout::ParamShard;
use crate::dispatch::cut;
use crate::layout::{Fan, Partial, Placement};
use crate::paths::is_running_state;
use crate::tensor::on_device;
use crate::{Error, IndexBox, Result};

/// Shards the parameters of a module that is equal on all ranks: each rank keeps its shard. `shard`
/// receives the path and shape of a parameter and returns its layout, or `None` to leave it whole.
/// Running statistics stay whole. See the example of [`ParamShard`].
///
/// # Errors
/// Any error of `shard`; a layout of another shape or mesh, or one with `Fan` or `Partial`; a
/// module that is already sharded, or whose parameters have another reparameterization; a sharded
/// parameter that occurs in two places, or is saved in another form, such as a `LinearLayout::Col`
/// weight.
pub fn shard_parameters<M: Module>(
    module: M,
    shard: impl FnMut(&str, &[usize]) -> Result<Option<ParamShard>>,
) -> Result<M> {
    shard_parameters_with(module, shard, |_, _| Ok(None))
}

/// Like [`shard_parameters`], with initial values: `values` receives the path and shape of a
/// parameter and returns the values with which each rank fills its shard, or `None` to keep the
/// module's own. A parameter of burn's `Initializer` that receives values is never drawn, so no rank
/// holds more than its shard. See the example of [`InitialValues`].
///
/// # Errors
/// The errors of [`shard_parameters`], also for parameters that receive values and stay whole; any
/// error of `values`; a distribution with invalid parameters.
pub fn shard_parameters_with<M: Module>(
    module: M,
    shard: impl FnMut(&str, &[usize]) -> Result<Option<ParamShard>>,
    values: impl FnMut(&str, &[usize]) -> Result<Option<InitialValues>>,
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
        values,
        tied: other.tied,
        running: other.running,
        failed: &mut failed,
    };
    let module = module.apply_reparameterization(sharder);
    match failed {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

/// Finds a parameter with a reparameterization, parameters that occur in two places, and running
/// statistics.
#[derive(Default)]
struct Reparameterized {
    path: Vec<String>,
    /// Whether the field entered last is a running statistic.
    runs: bool,
    running: HashSet<ParamId>,
    found: Option<String>,
    /// Paths by parameter id.
    seen: HashMap<ParamId, String>,
    /// Two paths of each parameter that occurs in two places.
    tied: HashMap<ParamId, [String; 2]>,
}

impl ModuleVisitor for Reparameterized {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.runs {
            self.running.insert(param.id);
        }
        let path = self.path.join(".");
        if let Some(before) = self.seen.insert(param.id, path.clone()) {
            self.tied.entry(param.id).or_insert([before, path]);
        }
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" {
            self.found.get_or_insert_with(|| self.path.join("."));
        }
        self.runs = is_running_state(name, container);
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}

struct Sharder<'a, F, V> {
    shard: F,
    values: V,
    tied: HashMap<ParamId, [String; 2]>,
    /// Running statistics, which every rank keeps whole.
    running: HashSet<ParamId>,
    failed: &'a mut Option<Error>,
}

impl<F, V> Reparameterizer for Sharder<'_, F, V>
where
    F: FnMut(&str, &[usize]) -> Result<Option<ParamShard>>,
    V: FnMut(&str, &[usize]) -> Result<Option<InitialValues>>,
{
    type Reparam = ParamShard;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ParamShard>) {
        if self.failed.is_some() || self.running.contains(&param.id) {
            return (param, None);
        }
        let (shard, values) = match self.planned(path, &param) {
            Ok((None, None)) => return (param, None),
            Ok(planned) => planned,
            Err(error) => {
                *self.failed = Some(error);
                return (param, None);
            }
        };
        let shape = param.lazy_shape().to_vec();
        let held = match &shard {
            Some(shard) => shard.layout.local_box(shard.mesh.position()),
            None => IndexBox::whole(&shape),
        };
        let (id, before, mapper) = match values {
            Some(_) => undrawn(param),
            None => param.consume(),
        };
        if saved_otherwise(id, &before, &mapper) {
            let message = format!(
                "parameter {path} is saved in another form than it is used in, such as LinearLayout::Col; use \
                 LinearLayout::Row"
            );
            *self.failed = Some(Error::operator("shard_parameters", message));
            return (Param::from_mapped_value(id, before, mapper), None);
        }
        let (device, dtype) = (before.device(), before.dtype());
        let tracked = before.is_require_grad();
        let local: Tensor<D> = match values {
            Some(values) => values.fill(path, &shape, &held, (&device.clone().inner(), dtype)),
            None => {
                let cells = cut(&before.inner().into_dispatch(), &held);
                let cells = Tensor::<D>::from_dispatch(cells);
                // A copy, which does not keep the whole tensor alive.
                Tensor::from_data(cells.to_data(), (&cells.device(), dtype))
            }
        };
        let local = on_device(local, &device).set_require_grad(tracked);
        (Param::from_mapped_value(id, local, mapper), shard)
    }
}

impl<F, V> Sharder<'_, F, V>
where
    F: FnMut(&str, &[usize]) -> Result<Option<ParamShard>>,
    V: FnMut(&str, &[usize]) -> Result<Option<InitialValues>>,
{
    /// Returns the checked layout of a parameter, or `None` to leave it whole, and its initial
    /// values, or `None` for its own, which are then drawn.
    fn planned<const D: usize>(
        &mut self,
        path: &str,
        param: &Param<Tensor<D>>,
    ) -> Result<(Option<ParamShard>, Option<InitialValues>)> {
        let shape = param.lazy_shape().to_vec();
        let values = (self.values)(path, &shape)?;
        let shape = match values {
            Some(values) => {
                values.check(path)?;
                shape
            }
            None => param.dims().to_vec(),
        };
        let shard = (self.shard)(path, &shape)?;
        let shard = shard
            .map(|shard| checked(shard, path, &shape))
            .transpose()?;
        if (shard.is_some() || values.is_some())
            && let Some([one, another]) = self.tied.get(&param.id)
        {
            let message = format!(
                "parameters {one} and {another} are one; shard them by one layer that both use"
            );
            return Err(Error::operator("shard_parameters", message));
        }
        Ok((shard, values))
    }
}

/// Takes a parameter apart without drawing it: one that is not drawn yet has a tensor of one
/// element in place of its value.
fn undrawn<const D: usize>(
    param: Param<Tensor<D>>,
) -> (ParamId, Tensor<D>, ParamMapper<Tensor<D>>) {
    if param.is_initialized() {
        return param.consume();
    }
    let element = Tensor::zeros([1; D], &param.lazy_device());
    let id = param.id;
    param.transform_for_load(element, id).consume()
}

/// Whether burn saves a parameter with other cells or in another order, tested with a small tensor.
fn saved_otherwise<const D: usize>(
    id: ParamId,
    value: &Tensor<D>,
    mapper: &ParamMapper<Tensor<D>>,
) -> bool {
    // The sizes differ, so that a changed order of dims shows.
    let shape: [usize; D] = std::array::from_fn(|dim| dim + 2);
    let count: usize = shape.iter().product();
    let data = TensorData::new((0..count).map(|i| i as f32).collect(), shape);
    let device = (&value.device().inner(), value.dtype());
    let probe = Tensor::<D>::from_data(data.clone().convert_dtype(value.dtype()), device);
    let saved = Param::from_mapped_value(id, probe.clone(), mapper.clone()).transform_for_save();
    saved.dims() != shape || saved.val().into_data() != probe.into_data()
}

/// Checks that a layout is valid for a parameter, and attaches the path.
fn checked(shard: ParamShard, path: &str, shape: &[usize]) -> Result<ParamShard> {
    let layout = &shard.layout;
    let unfit = |placement: &Placement| matches!(placement, Partial(_) | Fan);
    if **layout.mesh() != **shard.mesh().shape() {
        let message = format!(
            "{layout} for parameter {path} belongs to another mesh than\n{}",
            shard.mesh()
        );
        return Err(Error::Layout(message));
    }
    if layout.shape() != shape || layout.placements().iter().any(unfit) {
        let message =
            format!("{layout} for parameter {path} {shape:?}; expected Shard and Replicate");
        return Err(Error::Layout(message));
    }
    Ok(shard.with_path(path))
}
