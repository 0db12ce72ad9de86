//! Convolutions whose channels are sharded.

use halocline_core::ops::fan_out;
use halocline_core::{
    Error, Layout, Linearity, Pairing, Placement, Result, Role, ShardTensor, Term,
};

use super::{ConvOptions, run_conv};
use crate::operand::Operand;

/// What a convolution does with channels.
#[derive(Debug)]
struct Channels {
    /// Of the result.
    placements: Vec<Placement>,
    /// Of the result's channels.
    extents: Vec<usize>,
    pairing: Pairing,
}

/// Convolves with weights that are sharded in channels: output channels give a result that is sharded
/// in them, input channels one that is partial, and groups stay where they are.
///
/// # Errors
/// A combination of placements without a rule; a rank without channels.
pub(super) fn conv<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    weight: Operand<D>,
    bias: Option<Operand<1>>,
    options: &ConvOptions<N>,
) -> Result<ShardTensor<D>> {
    let stencil = options.stencil(&weight.dims(), x.dims()[1])?;
    let operator = stencil.operator();
    let weight = weight.beside(&x)?;
    let bias = bias.map(|bias| bias.beside(&x)).transpose()?;
    let channels = rule(
        operator,
        x.layout(),
        weight.layout(),
        bias.as_ref().map(ShardTensor::layout),
        options.groups,
    )?;
    let held = [(x.layout(), 1), (weight.layout(), 0), (weight.layout(), 1)];
    if held
        .iter()
        .any(|(layout, dim)| layout.extents(*dim).contains(&0))
    {
        let message = format!(
            "fewer channels than ranks: {} and {}",
            x.layout(),
            weight.layout()
        );
        return Err(Error::operator(operator, message));
    }
    let plan = stencil
        .with_channels_on(channels.placements, channels.extents)
        .plan(&x)?;
    let (local, layout, mesh) = x.into_parts();
    let fanned = |operand: usize| channels.pairing.fan_out(operand);
    let local = fan_out(local, &mesh, fanned(0), operator);
    let x = ShardTensor::from_parts(local, layout, mesh.clone());
    let weight = fan_out(weight.into_parts().0, &mesh, fanned(1), operator);
    let bias = bias.map(|bias| fan_out(bias.into_parts().0, &mesh, fanned(2), operator));
    let groups = match options.groups {
        1 => 1,
        groups => x.local_dims()[1] * groups / x.dims()[1],
    };
    run_conv(x, weight, bias, options, groups, operator, &plan)
}

/// The rule, as an einsum over channels. Groups, if there are several, are its letter instead of
/// channels.
fn rule(
    operator: &str,
    x: &Layout,
    weight: &Layout,
    bias: Option<&Layout>,
    groups: usize,
) -> Result<Channels> {
    let dims = x.shape().len();
    let (inputs, outputs) = (Role::Common(1), Role::Common(dims));
    let grouped = groups > 1;
    let per_group = weight.shape()[0] / groups;
    let (x, weight, bias) = match grouped {
        false => (x.clone(), weight.clone(), bias.cloned()),
        true => (
            in_units(operator, x, 1, weight.shape()[1])?,
            in_units(operator, weight, 0, per_group)?,
            bias.map(|bias| in_units(operator, bias, 0, per_group))
                .transpose()?,
        ),
    };
    let result = if grouped { inputs } else { outputs };
    let of_x: Vec<Role> = (0..dims).map(Role::Common).collect();
    let mut of_weight = vec![Role::Whole; dims];
    of_weight[0] = result;
    if !grouped {
        of_weight[1] = inputs;
    }
    let mut of_result = of_x.clone();
    of_result[1] = result;
    let term = |name, layout, roles| Term {
        name,
        layout,
        roles,
    };
    let mut terms = vec![
        term("x", &x, &of_x[..]),
        term("weight", &weight, &of_weight),
    ];
    let of_bias = [result];
    terms.extend(bias.iter().map(|bias| term("bias", bias, &of_bias)));
    let linearity = match bias {
        Some(_) => Linearity::None,
        None => Linearity::Multiplicative,
    };
    let pairing = Pairing::new(operator, &terms, &of_result, linearity)?;
    let layout = pairing.layout(&x);
    let size = if grouped { per_group } else { 1 };
    Ok(Channels {
        placements: layout.placements().to_vec(),
        extents: layout
            .extents(1)
            .iter()
            .map(|extent| extent * size)
            .collect(),
        pairing,
    })
}

/// A layout in which a dim counts units of so many cells.
fn in_units(operator: &str, layout: &Layout, dim: usize, unit: usize) -> Result<Layout> {
    let mut extents = layout.all_extents().to_vec();
    if extents[dim].iter().any(|extent| extent % unit != 0) {
        let message = format!("{layout} in groups of {unit} channels");
        return Err(Error::operator(operator, message));
    }
    extents[dim].iter_mut().for_each(|extent| *extent /= unit);
    Ok(layout.derive(layout.placements().to_vec(), extents))
}
