//! Parameters of a convolution in groups whose channels are sharded.

use halocline_core::{Fan, Replicate, Result, Shard, ShardTensor};

/// Shards a parameter that every rank holds whole by groups, as the channels of `x` are; nothing is
/// sent forward. The groups follow one another in the parameter's first dim. Returns the parameter
/// as it is if there is one group, if it is sharded already, or if shards of `x` cut groups.
pub(super) fn beside_groups<const D: usize, const E: usize>(
    parameter: ShardTensor<E>,
    x: &ShardTensor<D>,
    groups: usize,
) -> Result<ShardTensor<E>> {
    let (field, held) = (x.layout(), parameter.layout());
    if groups == 1 || !field.is_sharded(1) || held.is_sharded(0) || field.mesh() != held.mesh() {
        return Ok(parameter);
    }
    let [channels, cells] = [x.dims()[1], parameter.dims()[0]].map(|size| size / groups);
    let pairs = || field.placements().iter().zip(held.placements());
    let is_whole =
        pairs().all(|(field, held)| *field != Shard(1) || [Replicate, Fan].contains(held));
    let is_apart = |extent: &usize| extent.is_multiple_of(channels);
    if !is_whole || !field.extents(1).iter().all(is_apart) {
        return Ok(parameter);
    }
    let placements = pairs().map(|(field, held)| match *field {
        Shard(1) => Shard(0),
        _ => *held,
    });
    let mut extents = held.all_extents().to_vec();
    let shards = field.extents(1).iter();
    extents[0] = shards.map(|extent| extent / channels * cells).collect();
    let layout = held.derive(placements.collect(), extents);
    parameter.try_redistribute(&layout)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Layout, Shard, ShardTensor};

    use crate::conv::conv;
    use crate::prelude::*;
    use crate::testing::{compare, gradient_of, random};

    #[test]
    fn whole_weights_serve_sharded_groups() {
        let run = |extents: &[usize], groups: usize| {
            let ranks = extents.len();
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("tensor", ranks)])?;
                let layout = Layout::new(mesh.shape(), &[2, 6, 5, 4], &[Shard(1)])?;
                let layout = match ranks {
                    1 => layout,
                    _ => layout.with_extents(1, extents)?,
                };
                let x = random::<4>([2, 6, 5, 4], "x", 0).inner();
                let x = ShardTensor::distribute(x, &mesh, &layout)?.require_grad();
                let weight = random::<4>([12, 6 / groups, 3, 3], "weight", 0);
                let weight = weight.detach().require_grad();
                let bias = random::<1>([12], "bias", 0).detach().require_grad();
                let options = ConvOptions::<2>::default().with_groups(groups);
                let y = conv(
                    x.clone(),
                    weight.clone(),
                    Some(bias.clone().into()),
                    &options,
                )?;
                let gradients = (y.clone() * y.clone()).sum().backward();
                Ok(vec![
                    y.full_tensor().into_data(),
                    gradient_of(&x, &gradients),
                    weight.grad(&gradients).expect("a gradient").into_data(),
                    bias.grad(&gradients)
                        .map(Tensor::into_data)
                        .expect("a gradient"),
                ])
            });
            found.unwrap()
        };
        for (groups, extents) in [(6, [1, 5]), (3, [4, 2])] {
            let expected = run(&[6], groups).remove(0);
            for found in run(&extents, groups) {
                compare(&found, &expected, 1e-5, &format!("{groups} groups"));
            }
        }
    }
}
