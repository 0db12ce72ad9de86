//! Check that optimizers are elementwise, as shards require, and that parameters occur in one
//! place.

use std::collections::{BTreeMap, HashMap};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Device, Tensor, TensorData};
use halocline_core::paths::{PathVisitor, visit_paths};
use halocline_core::{Error, ParamShard, Result, param_shards};

/// Checks that an optimizer works element by element on the sharded parameters of a model, so that
/// a step on shards equals a step on the whole. The check compares steps on small tensors with
/// steps on their halves. A trained parameter must occur in one place only, as an optimizer steps
/// only its first occurrence.
///
/// # Errors
/// A parameter occurs in two places; the optimizer is not elementwise for a parameter (the error
/// names the first), such as Muon, LAMB, Adafactor, or an optimizer that clips by norm.
/// [`clip_grad_norm`](crate::clip_grad_norm) clips over all parameters instead.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::{AdamWConfig, MuonConfig};
/// use halocline::check_optimizer;
/// use halocline_core::{Launcher, Layout, ParamShard, Shard, shard_parameters};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let model = world.init(|device| LinearConfig::new(4, 6).with_bias(false).init(device))?;
///     let model = shard_parameters(model, |_, shape| {
///         Ok(Some(ParamShard::new(Layout::new(mesh.shape(), shape, &[Shard(1)])?, &mesh)))
///     })?;
///     check_optimizer(&AdamWConfig::new().init(), &model)?;
///     let error = check_optimizer(&MuonConfig::new().init(), &model).unwrap_err();
///     assert!(error.to_string().contains("weight"));
///     Ok(())
/// })?;
/// # Ok::<(), halocline::Error>(())
/// ```
pub fn check_optimizer<M: Module>(optimizer: &ModuleOptimizer, model: &M) -> Result<()> {
    let mut check = Check {
        optimizer,
        shards: param_shards(model),
        seen: HashMap::new(),
        tied: None,
        refused: None,
    };
    visit_paths(model, &mut check);
    if let Some([one, another]) = check.tied {
        return Err(Error::other(format!(
            "parameters {one} and {another} are one, of which the optimizer would step the first alone; let one layer hold it, \
             which is used twice"
        )));
    }
    match check.refused {
        None => Ok(()),
        Some(path) => Err(Error::other(format!(
            "the optimizer of the sharded parameter {path} needs the whole parameter; use one that works element by element \
             (AdamW, Adam, SGD, Lion, RMSProp, AdaGrad), and clip_grad_norm for clipping by norm"
        ))),
    }
}

struct Check<'a> {
    optimizer: &'a ModuleOptimizer,
    shards: BTreeMap<String, ParamShard>,
    seen: HashMap<ParamId, String>,
    /// First parameter in two places.
    tied: Option<[String; 2]>,
    refused: Option<String>,
}

impl PathVisitor for Check<'_> {
    fn visit_float<const D: usize>(&mut self, names: &[String], param: &Param<Tensor<D>>) {
        let path = names.join(".");
        if let Some(before) = self.seen.insert(param.id, path.clone())
            && param.is_require_grad()
        {
            self.tied.get_or_insert([before, path]);
            return;
        }
        let (Some(shard), None) = (self.shards.get(&path), &self.refused) else {
            return;
        };
        let mut dims = (0..D).filter(|dim| shard.layout().extents(*dim).len() > 1);
        if !dims.all(|dim| is_elementwise::<D>(self.optimizer, names, param.id, dim)) {
            self.refused = Some(path);
        }
    }
}

/// Whether two steps on a tensor equal those on its halves along a dim.
fn is_elementwise<const D: usize>(
    optimizer: &ModuleOptimizer,
    path: &[String],
    id: ParamId,
    dim: usize,
) -> bool {
    let device = Device::flex().autodiff();
    let shape: [usize; D] = std::array::from_fn(|other| if other == dim { 4 } else { 3 });
    let count: usize = shape.iter().product();
    let whole = |salt: usize| {
        let value = |i: usize| ((i * 7919 + salt * 104_729) % 97) as f32 - 48.0;
        let data = TensorData::new((0..count).map(value).collect(), shape);
        Tensor::<D>::from_data(data, &device)
    };
    let run = |part: Option<usize>| {
        let cut = |tensor: Tensor<D>| match part {
            Some(first) => tensor.narrow(dim, first, 2),
            None => tensor,
        };
        let mut optimizer = optimizer.clone().load_record(OptimizerRecord::default());
        let mut probe = Probe {
            path: path.to_vec(),
            param: Param::initialized(id, cut(whole(1)).detach().require_grad()),
        };
        // Large values, and halves of different magnitudes, so that a norm shows, even in the signs
        // of momenta.
        for (step, sizes) in [(2, [1e6, 1.0]), (3, [1e-3, 1e6]), (4, [1.0, 1e-3])] {
            let mut gradients = GradientsParams::new();
            let scaled = [0, 1].map(|half| whole(step).narrow(dim, 2 * half, 2) * sizes[half]);
            gradients.register(id, cut(Tensor::cat(scaled.to_vec(), dim)).inner());
            probe = optimizer.step(1e-2, probe, gradients);
        }
        probe.param.val().inner()
    };
    let halves = Tensor::cat(vec![run(Some(0)), run(Some(2))], dim);
    halves.into_data() == run(None).into_data()
}

/// Parameter with the path and the id of the real one, by which optimizers form groups.
#[derive(Clone, Debug)]
struct Probe<const D: usize> {
    path: Vec<String>,
    param: Param<Tensor<D>>,
}

impl<const D: usize> Module for Probe<D> {
    halocline_core::constant_module_methods!();

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.path
            .iter()
            .for_each(|part| visitor.enter_module(part, "Probe"));
        Module::visit(&self.param, visitor);
        self.path
            .iter()
            .for_each(|part| visitor.exit_module(part, "Probe"));
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.path
            .iter()
            .for_each(|part| mapper.enter_module(part, "Probe"));
        let param = Module::map(self.param, mapper);
        self.path
            .iter()
            .for_each(|part| mapper.exit_module(part, "Probe"));
        Self { param, ..self }
    }
}
