//! Initial values of parameters by burn's initializers, for modules that are made in shards.

use std::collections::BTreeMap;

use burn::nn::Initializer;
use halocline_core::{Distribution, Error, InitialValues, RandomKey, Result};

use super::resolve::{ResolvedParam, ResolvedPlan};
use super::sites::within;

/// Returns the initial values of the parameters for which `initializer` returns an initializer, by
/// path.
///
/// # Errors
/// The initializer needs the whole parameter, or fans that are not known for its layer.
pub(super) fn initial_values(
    resolved: &ResolvedPlan,
    key: RandomKey,
    initializer: impl Fn(&str, &[usize]) -> Option<Initializer>,
) -> Result<BTreeMap<String, InitialValues>> {
    let parameters = resolved.parameters.iter();
    let chosen = parameters.filter_map(|parameter| {
        let initializer = initializer(&parameter.path, parameter.layout.shape())?;
        let fans = || fans(resolved, parameter);
        let values = values(&initializer, &parameter.path, fans, key);
        Some(values.map(|values| (parameter.path.clone(), values)))
    });
    chosen.collect()
}

/// Returns the values of an initializer, from the same distributions as burn draws them.
fn values(
    initializer: &Initializer,
    path: &str,
    fans: impl Fn() -> Option<[usize; 2]>,
    key: RandomKey,
) -> Result<InitialValues> {
    let refuse = |why: &str| {
        let message = format!("parameter {path}: {initializer:?} {why}");
        Error::operator("init_parallel_with", message)
    };
    let fans = || {
        fans().ok_or_else(|| {
            refuse(
                "needs the fans of its layer, which are known for Linear and convolutions; give Uniform or \
                 Normal, or name the type by Plan::with_kind_as",
            )
        })
    };
    let kaiming = |gain: f64, fan_out_only: bool| -> Result<f64> {
        let [fan_in, fan_out] = fans()?;
        let fan = if fan_out_only { fan_out } else { fan_in };
        Ok(gain / (fan as f64).sqrt())
    };
    let xavier = |gain: f64| -> Result<f64> {
        let [fan_in, fan_out] = fans()?;
        Ok(gain * (2.0 / (fan_in + fan_out) as f64).sqrt())
    };
    let uniform = |std: f64| {
        let limit = 3_f64.sqrt() * std;
        Distribution::Uniform(-limit, limit)
    };
    let normal = |std: f64| Distribution::Normal(0.0, std);
    let distribution = match *initializer {
        Initializer::Constant { value } => return Ok(InitialValues::Constant(value)),
        Initializer::Ones => return Ok(InitialValues::Constant(1.0)),
        Initializer::Zeros => return Ok(InitialValues::Constant(0.0)),
        Initializer::Uniform { min, max } => Distribution::Uniform(min, max),
        Initializer::Normal { mean, std } => Distribution::Normal(mean, std),
        Initializer::KaimingUniform { gain, fan_out_only } => uniform(kaiming(gain, fan_out_only)?),
        Initializer::KaimingNormal { gain, fan_out_only } => normal(kaiming(gain, fan_out_only)?),
        Initializer::XavierUniform { gain } => uniform(xavier(gain)?),
        Initializer::XavierNormal { gain } => normal(xavier(gain)?),
        Initializer::Orthogonal { .. } => {
            return Err(refuse(
                "needs the whole parameter; use another initializer, or return None to draw it whole",
            ));
        }
    };
    Ok(InitialValues::Random(distribution, key))
}

/// Returns the fan in and fan out of the layer of a parameter; `None` for layers other than linear
/// ones and convolutions. Those of convolutions are PyTorch's, whose fan out counts the output
/// channels of all groups.
pub(super) fn fans(resolved: &ResolvedPlan, parameter: &ResolvedParam) -> Option<[usize; 2]> {
    let path = within(parameter.layer(), "weight");
    let mut parameters = resolved.parameters.iter();
    let weight = parameters.find(|other| other.path == path)?;
    match (&parameter.kind[..], weight.layout.shape()) {
        ("Linear", [inputs, outputs]) => Some([*inputs, *outputs]),
        (
            "Conv1d" | "Conv2d" | "Conv3d" | "ConvTranspose1d" | "ConvTranspose2d"
            | "ConvTranspose3d" | "DeformConv2d",
            [first, second, kernel @ ..],
        ) => {
            let cells: usize = kernel.iter().product();
            Some([second * cells, first * cells])
        }
        _ => None,
    }
}
