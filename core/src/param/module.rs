//! Layouts of parameters as parts of burn's modules.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use burn::module::{
    Content, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
    Reparameterization,
};
use burn::tensor::Tensor;

use super::layout::ParamShard;
use crate::scoped::with_value;
use crate::{Error, Result, ShardTensor};

/// Methods of burn's `Module` for a module that neither devices nor training change.
#[doc(hidden)]
#[macro_export]
macro_rules! constant_module_methods {
    () => {
        fn collect_devices(&self, devices: burn::module::Devices) -> burn::module::Devices {
            devices
        }

        fn fork(self, _: &burn::tensor::Device) -> Self {
            self
        }

        fn to_device(self, _: &burn::tensor::Device) -> Self {
            self
        }

        fn train(self) -> Self {
            self
        }

        fn valid(&self) -> Self {
            self.clone()
        }

        fn materialize(self) -> Self {
            self
        }
    };
}

/// The container type by which visitors recognise a layout.
const CONTAINER: &str = "Halocline:ParamShard";

thread_local! {
    /// The layout that a visitor is currently visiting.
    static PASSED: RefCell<Option<ParamShard>> = const { RefCell::new(None) };
    /// Whether parameters whose shards layers compute with are gathered, too.
    static WHOLE: Cell<bool> = const { Cell::new(false) };
}

impl Reparameterization for ParamShard {
    const NAME: &'static str = "shard";

    /// Returns the whole parameter, gathered over the axes of storage, for modules that are unaware
    /// of shards.
    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let shard = ShardTensor::from_parts(base, self.layout.clone(), self.mesh.clone());
        if WHOLE.get() {
            return shard.full_tensor();
        }
        if let Some(&axis) = self.computing_axes().first() {
            self.refuse(axis).raise();
        }
        let whole = self.gathered(shard, |_| false, None);
        whole.to_local()
    }
}

impl Module for ParamShard {
    constant_module_methods!();

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        PASSED.set(Some(self.clone()));
        visitor.enter_module("layout", CONTAINER);
        visitor.exit_module("layout", CONTAINER);
        PASSED.set(None);
    }

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }
}

impl ModuleDisplayDefault for ParamShard {
    fn content(&self, content: Content) -> Option<Content> {
        Some(content.add("layout", &self.layout.to_string()))
    }
}

impl ModuleDisplay for ParamShard {}

/// Returns the module with whole parameters on every rank, as it would be on one device: for
/// export, and for modules that are unaware of shards. Collective: all ranks call it together.
///
/// # Errors
/// Communication fails.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use halocline_core::{Launcher, Layout, ParamShard, Shard, shard_parameters, unshard};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let model = world.init(|device| LinearConfig::new(4, 6).with_bias(false).init(device))?;
///     let before = model.weight.val().into_data();
///     let model = shard_parameters(model, |_, shape| {
///         Ok(Some(ParamShard::new(Layout::new(mesh.shape(), shape, &[Shard(1)])?, &mesh)))
///     })?;
///     assert_eq!(unshard(model)?.weight.val().into_data(), before);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn unshard<M: Module>(module: M) -> Result<M> {
    with_value(&WHOLE, true, || Error::catch(|| module.materialize()))
}

/// Returns the layouts of a module's sharded parameters, by path.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use halocline_core::{Launcher, Layout, ParamShard, Shard, param_shards, shard_parameters};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let model = world.init(|device| LinearConfig::new(4, 6).init(device))?;
///     let model = shard_parameters(model, |path, shape| {
///         let columns = Layout::new(mesh.shape(), shape, &[Shard(1)]);
///         Ok(match path {
///             "weight" => Some(ParamShard::new(columns?, &mesh)),
///             _ => None,
///         })
///     })?;
///     let shards = param_shards(&model);
///     assert_eq!(shards["weight"].layout().placements(), [Shard(1)]);
///     assert_eq!(shards.len(), 1);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn param_shards<M: Module>(module: &M) -> BTreeMap<String, ParamShard> {
    let mut found = Found::default();
    module.visit(&mut found);
    found.shards
}

#[derive(Default)]
struct Found {
    path: Vec<String>,
    parameter: String,
    shards: BTreeMap<String, ParamShard>,
}

impl ModuleVisitor for Found {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.into());
        if container == CONTAINER
            && let Some(shard) = PASSED.with_borrow(Clone::clone)
        {
            self.shards.insert(self.parameter.clone(), shard);
        }
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        self.parameter = self.path.join(".");
    }
}
