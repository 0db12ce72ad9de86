//! Functions around a module.

use std::fmt;

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::Device;

use crate::layer::Layer;

/// A module between a function of its input and a function of its result, which change layouts for
/// example. Paths of parameters are those of the module.
///
/// # Example
/// ```
/// use burn::nn::Relu;
/// use halocline_core::{Launcher, Replicate, Shard, ShardTensor};
/// use halocline_ops::{Apply, Around};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let relu = Around {
///         module: Relu::new(),
///         input: |x: ShardTensor<2>| x.redistribute(&[Shard(1)]),
///         output: |y: ShardTensor<2>| y.redistribute(&[Replicate]),
///     };
///     let x = ShardTensor::<2>::ones([3, 4], &mesh, &[Shard(0)])?;
///     assert_eq!(x.apply(&relu).placements(), [Replicate]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Around<M, I, O> {
    /// The module.
    pub module: M,
    /// The function of the input.
    pub input: I,
    /// The function of the result.
    pub output: O,
}

impl<M: fmt::Debug, I, O> fmt::Debug for Around<M, I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Around")
            .field("module", &self.module)
            .finish_non_exhaustive()
    }
}

impl<X, Y, Z, M, I, O> Layer<X> for Around<M, I, O>
where
    M: Layer<Y>,
    I: Fn(X) -> Y,
    O: Fn(M::Output) -> Z,
{
    type Output = Z;

    #[track_caller]
    fn forward(&self, x: X) -> Z {
        (self.output)(self.module.forward((self.input)(x)))
    }
}

impl<M, I, O> Around<M, I, O> {
    /// Changes the module.
    fn with(self, change: impl FnOnce(M) -> M) -> Self {
        Self {
            module: change(self.module),
            ..self
        }
    }
}

impl<M: Module, I: Clone + Send, O: Clone + Send> Module for Around<M, I, O> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.module.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|module| module.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|module| module.to_device(device))
    }

    fn train(self) -> Self {
        self.with(Module::train)
    }

    fn valid(&self) -> Self {
        self.clone().with(|module| module.valid())
    }

    fn materialize(self) -> Self {
        self.with(Module::materialize)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.module.visit(visitor);
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        self.with(|module| module.map(mapper))
    }
}

impl<M: ModuleDisplayDefault, I, O> ModuleDisplayDefault for Around<M, I, O> {
    fn content(&self, content: Content) -> Option<Content> {
        self.module.content(content)
    }
}

impl<M: ModuleDisplayDefault, I, O> ModuleDisplay for Around<M, I, O> {}
