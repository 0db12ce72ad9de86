//! Points in a model where a plan may change the layout of a tensor.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{
    Content, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
};
use burn::tensor::Tensor;
use halocline_core::{Error, PlanPlacement, Result, ShardTensor};

use crate::field::run;
use crate::layer::{Apply, Layer};
use crate::layers::layers;

thread_local! {
    /// Placements for the next [`Reshard`] that is mapped.
    static GIVEN: RefCell<Option<Placements>> = const { RefCell::new(None) };
    /// Whether that [`Reshard`] already had placements.
    static SET_BEFORE: Cell<bool> = const { Cell::new(false) };
}

type Placements = Arc<[(usize, PlanPlacement)]>;

/// A point in a model where a plan may change the layout of a tensor; without a plan, the identity.
/// It is a field of a module and holds no parameters.
///
/// # Example
/// ```
/// use burn::module::Module;
/// use halocline_core::{PlanPlacement, Launcher, Replicate, Shard, ShardTensor};
/// use halocline_ops::{Apply, Reshard, set_reshards};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     enter: Reshard,
/// }
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let to = [("enter".to_string(), vec![(0, PlanPlacement::Shard(1))])].into();
///     let model = set_reshards(Model { enter: Reshard::default() }, &to)?;
///     let x = ShardTensor::<2>::ones([3, 4], &mesh, &[Replicate])?;
///     assert_eq!(x.apply(&model.enter).placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Reshard {
    to: Option<Placements>,
}

impl Reshard {
    /// Container name by which visitors and mappers recognize a `Reshard`.
    pub const CONTAINER: &str = "Halocline:Reshard";
}

layers! {
    Reshard: |place, x| match &place.to {
        Some(to) => run(x, |x| x.redistribute_axes(to)),
        None => x,
    };
}

impl Module for Reshard {
    halocline_core::constant_module_methods!();

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module("reshard", Self::CONTAINER);
        visitor.exit_module("reshard", Self::CONTAINER);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        mapper.enter_module("reshard", Self::CONTAINER);
        mapper.exit_module("reshard", Self::CONTAINER);
        match GIVEN.take() {
            Some(to) => {
                SET_BEFORE.set(self.to.is_some());
                Self { to: Some(to) }
            }
            None => self,
        }
    }
}

impl ModuleDisplayDefault for Reshard {
    fn content(&self, content: Content) -> Option<Content> {
        Some(content.add("to", &format!("{:?}", self.to)))
    }
}

impl ModuleDisplay for Reshard {}

/// A module between two points where a plan may change layouts, for a module that implements
/// [`Layer`] and follows no plan by itself. The paths of its parameters contain `module`; a plan
/// sets `input` and `output` with `prepare_input`.
///
/// # Example
/// ```
/// use burn::module::Module;
/// use burn::nn::Relu;
/// use halocline_core::{PlanPlacement, Launcher, Replicate, Shard, ShardTensor};
/// use halocline_ops::{Apply, Resharded, set_reshards};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     relu: Resharded<Relu>,
/// }
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let model = Model { relu: Resharded::new(Relu::new()) };
///     let to = [("relu.input".to_string(), vec![(0, PlanPlacement::Shard(1))])].into();
///     let model = set_reshards(model, &to)?;
///     let x = ShardTensor::<2>::ones([3, 4], &mesh, &[Replicate])?;
///     assert_eq!(x.apply(&model.relu).placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct Resharded<M: Module> {
    /// The point before the module.
    pub input: Reshard,
    /// The module.
    pub module: M,
    /// The point after the module.
    pub output: Reshard,
}

impl<M: Module> Resharded<M> {
    /// Wraps a module.
    pub fn new(module: M) -> Self {
        Self {
            input: Reshard::default(),
            module,
            output: Reshard::default(),
        }
    }
}

impl<const D: usize, const E: usize, M> Layer<ShardTensor<D>> for Resharded<M>
where
    M: Module + Layer<ShardTensor<D>, Output = ShardTensor<E>>,
{
    type Output = ShardTensor<E>;

    #[track_caller]
    fn forward(&self, x: ShardTensor<D>) -> ShardTensor<E> {
        let y = self.module.forward(x.apply(&self.input));
        y.apply(&self.output)
    }
}

impl<const D: usize, M: Module + Layer<Tensor<D>>> Layer<Tensor<D>> for Resharded<M> {
    type Output = M::Output;

    #[track_caller]
    fn forward(&self, x: Tensor<D>) -> M::Output {
        self.module.forward(x)
    }
}

/// Sets the placements of the [`Reshard`]s of a module, by path: pairs of mesh axis and placement.
/// [`Reshard`] has an example.
///
/// # Errors
/// A [`Reshard`] that another plan has already set.
pub fn set_reshards<M: Module>(
    module: M,
    to: &BTreeMap<String, Vec<(usize, PlanPlacement)>>,
) -> Result<M> {
    let mut setter = Setter {
        to,
        path: Vec::new(),
        set_before: None,
    };
    let module = module.map(&mut setter);
    match setter.set_before {
        Some(path) => Err(Error::Plan(format!(
            "{path} is set by another plan already"
        ))),
        None => Ok(module),
    }
}

struct Setter<'a> {
    to: &'a BTreeMap<String, Vec<(usize, PlanPlacement)>>,
    path: Vec<String>,
    /// The first [`Reshard`] that was already set.
    set_before: Option<String>,
}

impl ModuleMapper for Setter<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == Reshard::CONTAINER {
            let to = self.to.get(&self.path.join("."));
            GIVEN.set(to.map(|to| to.as_slice().into()));
        }
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        // `Reshard::map` sets this after it leaves its own container, just before the mapper leaves
        // the field.
        if SET_BEFORE.take() {
            self.set_before.get_or_insert(self.path.join("."));
        }
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param
    }
}
