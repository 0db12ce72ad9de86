//! Kind `own`: a network that a program defines itself.

use burn::module::{Module, ModuleDisplay};
use burn::tensor::Device;
use halocline_core::{Error, Result, ShardTensor};
use halocline_ops::prelude::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::errors::invalid;
use super::signature::Signature;

/// Name and settings of a network that a program defines itself: a table `[model]` with
/// `kind = "own"`. [`Experiment::with_network`](crate::experiment::Experiment::with_network) runs
/// it.
///
/// # Example
/// ```
/// use halocline::experiment::{ExperimentConfig, ModelConfig};
/// use serde::Deserialize;
///
/// #[derive(Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct Settings {
///     width: usize,
/// }
///
/// let config = ExperimentConfig::from_toml(r#"
///     folder = "runs/a"
///     data = { files = ["era5.zarr"] }
///     model = { kind = "own", name = "my_net", width = 32 }
/// "#)?;
/// let ModelConfig::Own(model) = &config.model else { panic!("another kind") };
/// assert_eq!(model.name, "my_net");
/// assert_eq!(model.parse::<Settings>()?.width, 32);
/// # Ok::<(), halocline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OwnModel {
    /// Name, by which a program with several networks chooses one.
    pub name: String,
    /// The other keys of the table.
    #[serde(flatten)]
    pub settings: toml::Table,
}

impl OwnModel {
    /// Deserializes the settings.
    ///
    /// # Errors
    /// A key that is missing or, for a type that denies unknown fields, unknown; a value of the
    /// wrong type.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        let parsed = self.settings.clone().try_into::<T>();
        parsed.map_err(|error| {
            let message = error.to_string().trim().replace('\n', " ");
            Error::other(format!("model {}: {message}", self.name))
        })
    }
}

/// Function that makes a network with the settings of a configuration, for a signature, on a
/// device. It is a function without captured values, so that a network depends on nothing but the
/// configuration, which is compared between starts.
pub type Maker<N> = fn(&OwnModel, &Signature<'_>, &Device) -> Result<N>;

/// Networks that experiments train: modules that are layers of sharded fields. Implemented for all
/// of them.
///
/// # Shapes
/// `[batch, history · inputs + forcings + noise, lat, lon]` → `[batch, targets, lat, lon]`,
/// normalised. The output is the increment of a step, in tenths of a standard deviation.
pub trait OwnNetwork:
    Module + ModuleDisplay + Layer<ShardTensor<4>, Output = ShardTensor<4>> + 'static
{
}

impl<N> OwnNetwork for N where
    N: Module + ModuleDisplay + Layer<ShardTensor<4>, Output = ShardTensor<4>> + 'static
{
}

/// Placeholder for the network of an experiment that runs the built-in kinds only.
#[derive(Module, Debug)]
pub struct NoNetwork;

impl<X> Layer<X> for NoNetwork {
    type Output = X;

    fn forward(&self, x: X) -> X {
        x
    }
}

/// Refuses a network of one's own, where a program has none.
pub(crate) fn no_network(model: &OwnModel, _: &Signature<'_>, _: &Device) -> Result<NoNetwork> {
    Err(invalid(
        "model.kind",
        format!("own, {:?}", model.name),
        "a built-in kind; a network of your own runs in a program that calls Experiment::with_network",
    ))
}
