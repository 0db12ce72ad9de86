//! Convolutions whose channels are sharded.

use burn::module::Param;
use burn::tensor::Tensor;
use halocline_core::ops::{fan_out, fan_out_with};
use halocline_core::plan::{Linearity, Pairing, Role, Term};
use halocline_core::{Error, Fan, Layout, ParamShard, Result, Shard, ShardTensor};

use super::groups::beside_groups;
use super::{ConvOptions, run_conv};
use crate::layer_placements::{enter, leave, leave_with_bias, with_extents_of};
use crate::operand::Operand;
use crate::rearrange::cat;

/// Placements and channels of a convolution's result.
#[derive(Debug)]
pub(super) struct Channels {
    /// Layout of the input, with the placements and the channels of the result.
    pub layout: Layout,
    pub pairing: Pairing,
}

/// Order of the channels in the first two dims of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    /// Outputs, then the inputs of a group.
    Direct,
    /// Inputs, then the outputs of a group.
    Transposed,
}

/// Convolves with weights that are sharded in channels: sharded output channels yield a result that
/// is sharded in them, sharded input channels a partial result, and groups stay on their ranks.
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
    let (weight, bias, channels) =
        parameters(operator, &x, weight, bias, options.groups, Weight::Direct)?;
    let (placements, extents) = (channels.layout.placements(), channels.layout.extents(1));
    let stencil = stencil.with_channels_on(placements.to_vec(), extents.to_vec());
    let plan = stencil.plan(&x)?;
    let (local, layout, mesh) = x.into_parts();
    let axes = channels.pairing.fan_out(0);
    let local = Error::catch(|| fan_out(local, &mesh, axes, operator))?;
    let x = ShardTensor::from_parts(local, layout, mesh);
    let (weight, bias) = channels.fanned_out(weight, bias, &x, operator)?;
    let groups = held_groups(&x, options.groups);
    let layout = x.layout().clone();
    run_conv(
        (vec![x], layout),
        weight,
        bias,
        options,
        groups,
        operator,
        &plan,
    )
}

/// Prepares the parameters of a convolution of `x`, and the layout of the result's channels.
///
/// # Errors
/// Parameters of another dtype; a combination of placements without a rule; a rank without
/// channels.
pub(super) fn parameters<const D: usize>(
    operator: &'static str,
    x: &ShardTensor<D>,
    weight: Operand<D>,
    bias: Option<Operand<1>>,
    groups: usize,
    kind: Weight,
) -> Result<(ShardTensor<D>, Option<ShardTensor<1>>, Channels)> {
    let dtype = x.local().dtype();
    weight.require_dtype(operator, dtype)?;
    bias.iter()
        .try_for_each(|bias| bias.require_dtype(operator, dtype))?;
    let weight = beside_groups(weight.place_on(x)?, x, groups)?;
    let bias = bias.map(|bias| beside_groups(bias.place_on(x)?, x, groups));
    let bias = bias.transpose()?;
    let of_bias = bias.as_ref().map(ShardTensor::layout);
    let channels = checked_rule(operator, x.layout(), weight.layout(), of_bias, groups, kind)?;
    Ok((weight, bias, channels))
}

/// The [`rule`], for ranks that all hold channels.
pub(super) fn checked_rule(
    operator: &str,
    x: &Layout,
    weight: &Layout,
    bias: Option<&Layout>,
    groups: usize,
    kind: Weight,
) -> Result<Channels> {
    let channels = rule(operator, x, weight, bias, groups, kind)?;
    let held = [(x, 1), (weight, 0), (weight, 1)];
    if held
        .iter()
        .any(|(layout, dim)| layout.extents(*dim).contains(&0))
    {
        let message = format!("fewer channels than ranks: {x} and {weight}");
        return Err(Error::operator(operator, message));
    }
    Ok(channels)
}

/// Number of groups whose channels this rank holds.
pub(super) fn held_groups<const D: usize>(x: &ShardTensor<D>, groups: usize) -> usize {
    match groups {
        1 => 1,
        groups => x.local_dims()[1] * groups / x.dims()[1],
    }
}

impl Channels {
    /// Fans out the shards of weight and bias.
    pub(super) fn fanned_out<const D: usize>(
        &self,
        weight: ShardTensor<D>,
        bias: Option<ShardTensor<1>>,
        x: &ShardTensor<D>,
        operator: &'static str,
    ) -> Result<(Tensor<D>, Option<Tensor<1>>)> {
        let axes = |operand| self.pairing.fan_out(operand);
        let (mesh, other) = (x.mesh(), x.local());
        Error::catch(|| {
            let weight = fan_out_with(weight.into_local(), other, mesh, axes(1), operator);
            let bias =
                bias.map(|bias| fan_out_with(bias.into_local(), other, mesh, axes(2), operator));
            (weight, bias)
        })
    }
}

/// Convolves with the parameters of a module, between the layer placements of its plan.
pub(super) fn apply<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    weight: &Param<Tensor<D>>,
    bias: &Option<Param<Tensor<1>>>,
    options: &ConvOptions<N>,
) -> Result<ShardTensor<D>> {
    let x = enter(weight, x)?;
    let bias = Operand::of_optional(bias);
    let laid = Operand::from(weight).place_on(&x)?;
    if options.groups > 1 {
        let x = into_groups(x, laid.layout(), options.groups)?;
        return leave(weight, super::conv(x, laid, bias, options)?);
    }
    if !laid.layout().is_sharded(1) {
        return leave(weight, super::conv(x, laid, bias, options)?);
    }
    let x = with_extents_of(x, 1, laid.layout(), 1)?;
    leave_with_bias(weight, super::conv(x, laid, None, options)?, bias, 1)
}

/// Convolves the concatenation of fields along channels with the parameters of a module.
pub(super) fn apply_cat<const D: usize, const N: usize>(
    fields: Vec<ShardTensor<D>>,
    weight: &Param<Tensor<D>>,
    bias: &Option<Param<Tensor<1>>>,
    options: &ConvOptions<N>,
) -> Result<ShardTensor<D>> {
    match ParamShard::of(weight) {
        // The plan applies to the channels of the concatenation.
        Some(_) => apply(cat(fields, 1)?, weight, bias, options),
        None => super::conv_cat(fields, weight, Operand::of_optional(bias), options),
    }
}

/// Input of a convolution whose groups a plan shards: an input that fans out is cut to the channels
/// of each rank's groups, and nothing is sent.
fn into_groups<const D: usize>(
    x: ShardTensor<D>,
    weight: &Layout,
    groups: usize,
) -> Result<ShardTensor<D>> {
    let sharded = |axis: &usize| weight.placements()[*axis] == Shard(0);
    let axes: Vec<usize> = x.layout().axes_where(|placement| placement == Fan);
    if axes.is_empty() || !axes.iter().all(sharded) || x.layout().is_sharded(1) {
        return Ok(x);
    }
    let (per_group, channels) = (weight.shape()[0] / groups, weight.shape()[1]);
    let extents = weight.extents(0).iter().map(|extent| {
        let is_whole = extent.is_multiple_of(per_group);
        is_whole.then(|| extent / per_group * channels)
    });
    let extents: Option<Vec<usize>> = extents.collect();
    let extents = extents.ok_or_else(|| {
        let message = format!(
            "{weight} cuts groups of {per_group} output channels; give the plan's style unit = {per_group}"
        );
        Error::operator("conv", message)
    })?;
    let placements = x.layout().map_placements(|placement| match placement {
        Fan => Shard(1),
        other => other,
    });
    let mut all = x.layout().all_extents().to_vec();
    all[1] = extents;
    let layout = x.layout().derive(placements, all);
    x.try_redistribute(&layout)
}

/// The placement rule, as an einsum over channels. With several groups, its letter stands for
/// groups instead of channels.
fn rule(
    operator: &str,
    x: &Layout,
    weight: &Layout,
    bias: Option<&Layout>,
    groups: usize,
    kind: Weight,
) -> Result<Channels> {
    let dims = x.shape().len();
    let (inputs, outputs) = (Role::Common(1), Role::Common(dims));
    let grouped = groups > 1;
    let (first, second) = (weight.shape()[0] / groups, weight.shape()[1]);
    let (inputs_each, per_group) = match kind {
        Weight::Direct => (second, first),
        Weight::Transposed => (first, second),
    };
    let unit = |channels: usize| if grouped { channels } else { 1 };
    let x = in_units(operator, x, 1, unit(inputs_each))?;
    let weight = in_units(operator, weight, 0, unit(first))?;
    let bias = bias.map(|bias| in_units(operator, bias, 0, unit(per_group)));
    let bias = bias.transpose()?;
    let result = if grouped { inputs } else { outputs };
    let of_x: Vec<Role> = (0..dims).map(Role::Common).collect();
    let mut of_weight = vec![Role::Whole; dims];
    let both = match kind {
        Weight::Direct => [result, inputs],
        Weight::Transposed => [inputs, outputs],
    };
    of_weight[0] = both[0];
    if !grouped {
        of_weight[1] = both[1];
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
    let extents = layout.extents(1).iter();
    let extents = extents.map(|extent| extent * unit(per_group)).collect();
    Ok(Channels {
        layout: layout.resized(1, extents),
        pairing,
    })
}

/// Layout in which a dim counts units of `unit` cells.
fn in_units(operator: &str, layout: &Layout, dim: usize, unit: usize) -> Result<Layout> {
    let extents = layout.extents(dim);
    if extents.iter().any(|extent| extent % unit != 0) {
        let message = format!("{layout} in groups of {unit} channels");
        return Err(Error::operator(operator, message));
    }
    let extents = extents.iter().map(|extent| extent / unit).collect();
    Ok(layout.resized(dim, extents))
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use halocline_core::{
        Boundary, Fan, Launcher, Layout, Placement, Replicate, Result, Shard, ShardTensor, World,
    };

    use crate::conv::{ConvOptions, conv};
    use crate::driver::Padding;
    use crate::prelude::*;
    use crate::testing::{compare, cotangent_of, gradient_of, random};

    /// Placements of input, weight and bias, and the extents of sharded channels.
    #[derive(Clone, Debug)]
    struct Case {
        axes: Vec<(&'static str, usize)>,
        x: Vec<Placement>,
        weight: Vec<Placement>,
        bias: Option<Vec<Placement>>,
        inputs: Vec<usize>,
        outputs: Vec<usize>,
    }

    fn laid<const D: usize>(
        world: &World,
        case: &Case,
        (name, shape): (&str, [usize; D]),
        placements: &[Placement],
        extents: &[(usize, &[usize])],
    ) -> Result<ShardTensor<D>> {
        let mesh = world.mesh_of(&case.axes)?;
        let mut layout = Layout::new(mesh.shape(), &shape, placements)?;
        for (dim, extents) in extents {
            if layout.is_sharded(*dim) {
                layout = layout.with_extents(*dim, extents)?;
            }
        }
        let whole = random::<D>(shape, name, 0).inner();
        Ok(ShardTensor::distribute(whole, &mesh, &layout)?.require_grad())
    }

    /// The value and the gradients of x, weight and bias.
    fn run(world: &World, case: &Case, groups: usize) -> Result<Vec<TensorData>> {
        let (inputs, outputs): (usize, usize) =
            (case.inputs.iter().sum(), case.outputs.iter().sum());
        let of_x = [(1, &case.inputs[..])];
        let x = laid(world, case, ("x", [2, inputs, 9, 7]), &case.x, &of_x)?;
        let shape = [outputs, inputs / groups, 3, 3];
        let of_weight = [(0, &case.outputs[..]), (1, &case.inputs[..])];
        let weight = laid(world, case, ("weight", shape), &case.weight, &of_weight)?;
        let of_bias = [(0, &case.outputs[..])];
        let bias = case.bias.as_ref();
        let bias = bias.map(|bias| laid(world, case, ("bias", [outputs]), bias, &of_bias));
        let bias = bias.transpose()?;
        let options = ConvOptions::default()
            .with_padding([
                Padding::new(1, Boundary::Zeros),
                Padding::new(1, Boundary::Periodic),
            ])
            .with_stride([2, 1])
            .with_groups(groups);
        let operand = bias.clone().map(Operand::from);
        let y = conv(x.clone(), weight.clone(), operand, &options)?.resolve();
        let gradients = (y.clone() * cotangent_of(&y)?).sum().backward();
        let mut found = vec![
            y.full_tensor().into_data(),
            gradient_of(&x, &gradients),
            gradient_of(&weight, &gradients),
        ];
        found.extend(bias.map(|bias| gradient_of(&bias, &gradients)));
        Ok(found)
    }

    fn check(case: &Case, groups: usize) {
        let one = Case {
            axes: vec![("one", 1)],
            x: vec![Replicate],
            weight: vec![Replicate],
            bias: case.bias.as_ref().map(|_| vec![Replicate]),
            inputs: vec![case.inputs.iter().sum()],
            outputs: vec![case.outputs.iter().sum()],
        };
        let collect = |case: &Case| {
            let ranks = case.axes.iter().map(|(_, size)| size).product();
            let found = Launcher::local(ranks).collect(|world| run(&world, case, groups));
            found.unwrap_or_else(|error| panic!("{case:?}: {error}"))
        };
        let expected = collect(&one).remove(0);
        for found in collect(case) {
            let place = format!("{case:?}, {groups} groups");
            compare(&found, &expected, 1e-5, &place);
        }
    }

    #[test]
    fn channels_may_be_sharded_by_output_and_input() {
        let bias = Some(vec![Shard(0)]);
        for outputs in [vec![3, 2], vec![1, 3, 1]] {
            let axes = vec![("tensor", outputs.len())];
            // With a sharded weight both placements agree, except for who sums the gradient.
            for x in [Replicate, Fan] {
                let case = Case {
                    axes: axes.clone(),
                    x: vec![x],
                    weight: vec![Shard(0)],
                    bias: bias.clone(),
                    inputs: vec![4],
                    outputs: outputs.clone(),
                };
                check(&case, 1);
            }
        }
        for inputs in [vec![3, 2], vec![1, 3, 1]] {
            let case = Case {
                axes: vec![("tensor", inputs.len())],
                x: vec![Shard(1)],
                weight: vec![Shard(1)],
                bias: None,
                inputs,
                outputs: vec![4],
            };
            check(&case, 1);
        }
    }

    #[test]
    fn channels_and_space_may_be_sharded_together() {
        let axes = vec![("lat", 2), ("tensor", 2)];
        let columns = Case {
            axes: axes.clone(),
            x: vec![Shard(2), Replicate],
            weight: vec![Replicate, Shard(0)],
            bias: Some(vec![Replicate, Shard(0)]),
            inputs: vec![4],
            outputs: vec![3, 2],
        };
        check(&columns, 1);
        let rows = Case {
            axes: axes.clone(),
            x: vec![Shard(3), Shard(1)],
            weight: vec![Replicate, Shard(1)],
            bias: None,
            inputs: vec![1, 4],
            outputs: vec![3],
        };
        check(&rows, 1);
        // Both kinds of sharded channels: a sum over one axis, shards over the other.
        let both = Case {
            axes: vec![("a", 2), ("b", 2)],
            x: vec![Shard(1), Replicate],
            weight: vec![Shard(1), Shard(0)],
            bias: None,
            inputs: vec![3, 1],
            outputs: vec![2, 1],
        };
        check(&both, 1);
        let grouped = Case {
            axes,
            x: vec![Shard(2), Shard(1)],
            weight: vec![Replicate, Shard(0)],
            bias: Some(vec![Replicate, Shard(0)]),
            inputs: vec![4, 2],
            outputs: vec![6, 3],
        };
        check(&grouped, 3);
    }

    #[test]
    fn channels_without_a_rule_are_refused() {
        let error = |x, weight, bias: Option<Placement>, outputs: Vec<usize>, groups| {
            let case = Case {
                axes: vec![("tensor", 2)],
                x: vec![x],
                weight: vec![weight],
                bias: bias.map(|bias| vec![bias]),
                inputs: vec![2, 2],
                outputs,
            };
            let found = Launcher::local(2).run(|world| run(&world, &case, groups).map(|_| ()));
            found.unwrap_err().to_string()
        };
        let whole = error(Shard(1), Shard(0), None, vec![1, 1], 1);
        assert!(
            whole.contains("Shard(1) of x with Shard(0) of weight"),
            "{whole}"
        );
        let bias = error(Shard(1), Shard(1), Some(Replicate), vec![2], 1);
        assert!(bias.contains("add it to the resolved result"), "{bias}");
        let none = error(Replicate, Shard(0), None, vec![2, 0], 1);
        assert!(none.contains("fewer channels than ranks"), "{none}");
        let groups = error(Shard(1), Shard(0), None, vec![3, 1], 2);
        assert!(groups.contains("in groups of 2 channels"), "{groups}");
    }
}
