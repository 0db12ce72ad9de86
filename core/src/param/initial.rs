//! Initial values of parameters, by global index.

use burn::tensor::{Distribution, Tensor, TensorCreationOptions, TensorData};

use crate::rng::{self, RandomKey};
use crate::{Error, IndexBox, Result};

/// Initial values of a parameter. Each depends only on the key, the path of the parameter and the
/// global index of the element, so that every rank computes its shard alone, and all meshes and
/// layouts lead to the same parameter.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use halocline_core::{
///     Distribution, InitialValues, Launcher, Layout, ParamShard, Shard, shard_parameters_with,
/// };
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let key = world.module_key();
///     let linear = LinearConfig::new(4, 6).init(world.device()); // parameters are not drawn yet
///     let linear = shard_parameters_with(
///         linear,
///         |_, shape| {
///             let columns = Layout::new(mesh.shape(), shape, &[Shard(shape.len() - 1)])?;
///             Ok(Some(ParamShard::new(columns, &mesh)))
///         },
///         |path, _| Ok(Some(match path {
///             "bias" => InitialValues::Constant(0.0),
///             _ => InitialValues::Random(Distribution::Normal(0.0, 0.5), key),
///         })),
///     )?;
///     assert_eq!(linear.weight.dims(), [4, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InitialValues {
    /// The same value everywhere.
    Constant(f64),
    /// Random values, drawn in single precision. Parameters of different paths have different
    /// values.
    Random(Distribution, RandomKey),
}

impl InitialValues {
    /// Checks the parameters of the distribution.
    pub(super) fn check(self, path: &str) -> Result<()> {
        match self {
            Self::Constant(_) => Ok(()),
            Self::Random(distribution, _) => rng::check(distribution).map_err(|error| {
                Error::operator("shard_parameters", format!("parameter {path}: {error}"))
            }),
        }
    }

    /// Makes a box of cells of the parameter with a path and a global shape.
    pub(super) fn fill<const D: usize>(
        self,
        path: &str,
        shape: &[usize],
        cells: &IndexBox,
        options: impl Into<TensorCreationOptions>,
    ) -> Tensor<D> {
        match self {
            Self::Constant(value) => Tensor::full(cells.shape(), value, options),
            Self::Random(distribution, key) => {
                let values = key.within(path).fill(distribution, shape, cells);
                Tensor::from_data(TensorData::new(values, cells.shape()), options)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::module::{Module, Param};
    use burn::nn::{Linear, LinearConfig, LinearLayout};
    use burn::tensor::{DType, Device};

    use super::*;
    use crate::shard_parameters_with;

    #[derive(Module, Debug)]
    struct Twice {
        one: Linear,
        another: Linear,
    }

    /// Fills all parameters, which stay whole.
    fn filled<M: Module>(module: M, values: InitialValues) -> Result<M> {
        shard_parameters_with(module, |_, _| Ok(None), |_, _| Ok(Some(values)))
    }

    fn device() -> Device {
        Device::default().autodiff()
    }

    #[test]
    fn parameters_keep_their_training_state_and_element_type() {
        let ones = InitialValues::Constant(1.0);
        let config = LinearConfig::new(2, 3);
        let linear = filled(config.init(&device()), ones).unwrap();
        assert!(linear.weight.is_require_grad());
        let frozen = filled(config.init(&device()).no_grad(), ones).unwrap();
        assert!(!frozen.weight.is_require_grad());
        let plain = filled(config.init(&Device::default()), ones).unwrap();
        assert!(!plain.weight.is_autodiff());
        assert!(plain.train().weight.is_require_grad());
        // A tensor that the module made eagerly.
        let zeros = Tensor::<1>::zeros([3], (&device(), DType::BF16));
        let half = filled(Param::from_tensor(zeros), ones).unwrap();
        assert_eq!(half.dtype(), DType::BF16);
        let values: Vec<f32> = half.val().into_data().iter::<f32>().collect();
        assert_eq!(values, [1.0; 3]);
    }

    #[test]
    fn values_differ_by_path_and_key() {
        let normal = Distribution::Normal(0.0, 1.0);
        let values = |path, seed| {
            let random = InitialValues::Random(normal, RandomKey::new(seed, "module"));
            let cells = IndexBox::whole(&[3, 5]);
            let tensor: Tensor<2> = random.fill(path, &[3, 5], &cells, &Device::default());
            tensor.into_data()
        };
        assert_eq!(values("weight", 1), values("weight", 1));
        assert_ne!(values("weight", 1), values("other", 1));
        assert_ne!(values("weight", 1), values("weight", 2));
    }

    #[test]
    fn mistakes_name_the_parameter() {
        let error = |filled: Result<Linear>| filled.unwrap_err().to_string();
        let linear = || LinearConfig::new(2, 3).with_bias(false);
        let normal = Distribution::Normal(0.0, f64::INFINITY);
        let random = InitialValues::Random(normal, RandomKey::new(0, "x"));
        let infinite = error(filled(linear().init(&device()), random));
        assert!(
            infinite.contains("parameter weight") && infinite.contains("finite standard deviation"),
            "{infinite}"
        );
        let zeros = InitialValues::Constant(0.0);
        let columns = linear().with_layout(LinearLayout::Col);
        let transposed = error(filled(columns.init(&device()), zeros));
        assert!(transposed.contains("use LinearLayout::Row"), "{transposed}");
        let one = linear().init(&device());
        let another = one.clone();
        let tied = filled(Twice { one, another }, zeros).unwrap_err();
        let tied = tied.to_string();
        assert!(
            tied.contains("one.weight and another.weight are one"),
            "{tied}"
        );
    }
}
