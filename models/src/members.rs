//! Members of ensembles, stacked along the batch.
//!
//! A rank stacks the members of its samples, so that both dims may be sharded at once: nothing is
//! sent, and a model sees one batch. If samples are sharded, the stacked batch has them in the
//! order of the ranks, `[samples of one rank, members, samples]`, which [`split_members`] undoes.

use burn::tensor::Tensor;
use halocline_core::{
    Distribution, Error, Layout, Placement, RandomKey, Replicate, Result, Shard, ShardTensor,
};
use halocline_ops::prelude::*;

/// Makes an ensemble of states around `x` by adding normal noise with standard deviation `std`.
/// Each member of each sample is the same on any mesh, bit for bit.
///
/// Members are stacked along the batch, so that a model processes them as one batch;
/// [`split_members`] splits off a dim of members, as [`crps`](crate::crps()) expects it. With a
/// mesh `axis`, members are sharded over it. If samples are sharded, the batch is in the order of
/// ranks: all members of the samples of one rank, then those of the next.
///
/// # Shapes
/// `[batch, channels, lat, lon]` → `[members · batch, channels, lat, lon]`.
///
/// # Placement
/// Any that is replicated on the axis of members.
///
/// # Errors
/// There are no members; the axis does not exist, or `x` is sharded on it; `x` has partial values.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, RandomKey, Replicate, Shard, ShardTensor};
/// use halocline_models::{perturbed, split_members};
///
/// Launcher::local(4).run(|world| {
///     let mesh = world.mesh([("data", 2), ("member", 2)])?;
///     let x = ShardTensor::<4>::ones([2, 3, 5, 4], &mesh, &[Shard(0), Replicate])?;
///     let key = RandomKey::new(world.seed(), ("members", 0));
///     let states = perturbed(x, 4, 0.1, key, Some("member"))?;
///     assert_eq!((states.dims()[0], states.local_dims()[0]), (8, 2));
///     let ensemble = split_members(states, 4, Some("member"))?;
///     assert_eq!(ensemble.placements(), [Shard(1), Shard(0)]);
///     assert_eq!(ensemble.dims(), [4, 2, 3, 5, 4]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn perturbed(
    x: ShardTensor<4>,
    members: usize,
    std: f64,
    key: RandomKey,
    axis: Option<&str>,
) -> Result<ShardTensor<4>> {
    let layout = ensemble_layout("perturbed", &x, members, axis)?;
    let [batch, channels, rows, columns] = x.dims();
    let shape = [members, batch, channels, rows, columns];
    let normal = Distribution::Normal(0.0, std);
    let options = (x.mesh(), x.local().dtype());
    let noise = ShardTensor::<5>::random(shape, normal, key, options, &layout)?;
    Error::catch(|| x.unsqueeze_dim::<5>(0) + noise).and_then(stacked)
}

/// Copies each sample for every member of an ensemble, stacked as by [`perturbed`]: forcings or
/// masks, which all members share.
///
/// # Shapes
/// `[batch, channels, lat, lon]` → `[members · batch, channels, lat, lon]`.
///
/// # Placement
/// Same as for [`perturbed`]. Nothing is sent; a rank holds only the copies of its members.
///
/// # Adjoint
/// The sum of the gradients of all copies: on each rank, then over the axis of members.
///
/// # Errors
/// Same as [`perturbed`].
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Replicate, ShardTensor};
/// use halocline_models::repeat_members;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("member", 2)])?;
///     let forcing = ShardTensor::<4>::ones([1, 2, 5, 4], &mesh, &[Replicate])?;
///     let copies = repeat_members(forcing, 4, Some("member"))?;
///     assert_eq!((copies.dims()[0], copies.local_dims()[0]), (4, 2));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn repeat_members(
    x: ShardTensor<4>,
    members: usize,
    axis: Option<&str>,
) -> Result<ShardTensor<4>> {
    let layout = ensemble_layout("repeat_members", &x, members, axis)?;
    let mesh = x.mesh().clone();
    let zeros = Tensor::<5>::zeros(
        layout.local_shape(mesh.position()),
        (&x.device(), x.local().dtype()),
    );
    let zeros = ShardTensor::from_parts(zeros, layout, mesh);
    Error::catch(|| x.unsqueeze_dim::<5>(0) + zeros).and_then(stacked)
}

/// Splits a batch of members, as [`perturbed`] stacks them, into members and samples.
///
/// # Shapes
/// `[members · batch, channels, lat, lon]` → `[members, batch, channels, lat, lon]`.
///
/// # Placement
/// The batch is sharded as [`perturbed`] or [`repeat_members`] returned it, with the same `axis`.
/// Nothing is sent.
///
/// # Errors
/// There are no members, or they do not divide the batch; the axis does not exist, or the batch is
/// not sharded over it; a rank holds a part of the samples of its members.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_models::split_members;
///
/// let states = Tensor::<4>::from([[[[1.0]]], [[[2.0]]], [[[3.0]]], [[[4.0]]]]);
/// let ensemble = split_members(ShardTensor::solo(states), 2, None)?;
/// assert_eq!(ensemble.dims(), [2, 2, 1, 1, 1]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn split_members(
    x: ShardTensor<4>,
    members: usize,
    axis: Option<&str>,
) -> Result<ShardTensor<5>> {
    const NAME: &str = "split_members";
    let axis = member_axis(NAME, &x, members, axis, Shard(0))?;
    let placements = ensemble_placements(&x, axis);
    let [count, channels, rows, columns] = x.dims();
    let shape = [members, count / members, channels, rows, columns];
    let even = Layout::new(x.layout().mesh(), &shape, &placements)?;
    let mut samples = vec![0; even.extents(1).len()];
    let held = |position: usize| x.layout().extents(0)[x.layout().part(0, position)];
    for position in 0..x.mesh().size() {
        let local_members = even.local_shape(position)[0];
        if let Some(each) = held(position).checked_div(local_members) {
            samples[even.part(1, position)] = each;
        }
    }
    let mut extents = x.layout().all_extents().to_vec();
    extents[0] = samples;
    extents.insert(0, even.extents(0).to_vec());
    let layout = x.layout().derive(placements, extents);
    let counts = |position: usize| layout.local_shape(position)[..2].iter().product::<usize>();
    let fits = (0..x.mesh().size()).all(|position| counts(position) == held(position));
    if !fits || layout.shape()[1] * members != count {
        let message = format!(
            "{members} members in a batch of {count} with extents {:?}; expected the same number of samples for each \
             member of a rank, as perturbed or repeat_members stacks them",
            x.layout().extents(0)
        );
        return Err(Error::operator(NAME, message));
    }
    let (local, _, mesh) = x.into_parts();
    let shape = layout.local_shape(mesh.position());
    let local = Error::catch(|| RearrangeField::unflatten::<5>(local, 0, &shape[..2]))?;
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Finds the mesh axis of members, on which `x` must have this placement.
fn member_axis(
    name: &str,
    x: &ShardTensor<4>,
    members: usize,
    axis: Option<&str>,
    expected: Placement,
) -> Result<Option<usize>> {
    x.require_resolved(name)?;
    if members == 0 {
        return Err(Error::operator(name, "0 members; expected at least 1"));
    }
    let Some(axis) = axis else {
        return Ok(None);
    };
    let names = x.mesh().shape().names();
    let found = names.iter().position(|name| name == axis);
    let found = found.filter(|found| x.placements()[*found] == expected);
    if found.is_some() {
        return Ok(found);
    }
    let message = format!(
        "{members} members on axis {axis:?} of {names:?} for {}; expected an axis with {expected}",
        x.layout()
    );
    Err(Error::operator(name, message))
}

/// Placements of the members and samples of a batch, with members sharded over an axis.
fn ensemble_placements(x: &ShardTensor<4>, axis: Option<usize>) -> Vec<Placement> {
    let placements = x.placements().iter().enumerate();
    let placements = placements.map(|(index, placement)| match placement {
        _ if Some(index) == axis => Shard(0),
        Shard(dim) => Shard(dim + 1),
        other => *other,
    });
    placements.collect()
}

/// Layout of the members of an ensemble of `x`: members are split evenly, all other dims as in `x`.
fn ensemble_layout(
    name: &str,
    x: &ShardTensor<4>,
    members: usize,
    axis: Option<&str>,
) -> Result<Layout> {
    let axis = member_axis(name, x, members, axis, Replicate)?;
    let placements = ensemble_placements(x, axis);
    let [batch, channels, rows, columns] = x.dims();
    let shape = [members, batch, channels, rows, columns];
    let even = Layout::new(x.layout().mesh(), &shape, &placements)?;
    let mut extents = x.layout().all_extents().to_vec();
    extents.insert(0, even.extents(0).to_vec());
    Ok(x.layout().derive(placements, extents))
}

/// Stacks the members of the samples of each rank along the batch.
fn stacked(ensemble: ShardTensor<5>) -> Result<ShardTensor<4>> {
    let (local, layout, mesh) = ensemble.into_parts();
    let placements = layout.map_placements(|placement| match placement {
        Shard(dim) => Shard(dim.saturating_sub(1)),
        other => other,
    });
    let mut shape = layout.shape()[1..].to_vec();
    shape[0] *= layout.shape()[0];
    let even = Layout::new(layout.mesh(), &shape, &placements)?;
    let mut extents = layout.all_extents()[1..].to_vec();
    extents[0] = vec![0; even.extents(0).len()];
    for position in 0..mesh.size() {
        let held = layout.local_shape(position);
        extents[0][even.part(0, position)] = held[0] * held[1];
    }
    let layout = layout.derive(placements, extents);
    let local = Error::catch(|| RearrangeField::flatten::<4>(local, 0, 1))?;
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData};
    use halocline_core::Launcher;

    use super::*;
    use crate::testing::distributed;

    const SHAPE: [usize; 4] = [3, 2, 3, 4];
    const MEMBERS: usize = 3;

    /// Returns a perturbed ensemble, repeated samples, and the gradient of the samples.
    fn ensembles(axes: &[(&str, usize)], placements: &[Placement]) -> Vec<[TensorData; 3]> {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let axis = axes.iter().any(|(name, _)| *name == "member");
            let axis = axis.then_some("member");
            let values = (0..SHAPE.iter().product()).map(|cell: usize| cell as f32 / 7.0);
            let data = TensorData::new(values.collect::<Vec<f32>>(), SHAPE);
            let x = distributed::<4>(data, &mesh, placements)?.require_grad();
            let key = RandomKey::new(7, "members");
            let states = perturbed(x.clone(), MEMBERS, 0.3, key, axis)?;
            let states = split_members(states, MEMBERS, axis)?;
            let copies = split_members(repeat_members(x.clone(), MEMBERS, axis)?, MEMBERS, axis)?;
            let loss = (states.clone() * copies.clone()).sum();
            let gradient = x.grad(&loss.backward()).expect("a gradient");
            Ok([
                states.full_tensor().into_data(),
                copies.full_tensor().into_data(),
                gradient.full_tensor().into_data(),
            ])
        });
        found.unwrap()
    }

    #[test]
    fn samples_and_members_may_be_sharded_at_once() {
        let [states, copies, gradient] = ensembles(&[("lat", 1)], &[Shard(2)]).remove(0);
        type Mesh<'a> = (&'a [(&'a str, usize)], &'a [Placement]);
        let meshes: [Mesh; 5] = [
            (&[("data", 2)], &[Shard(0)]),
            (&[("data", 2), ("member", 2)], &[Shard(0), Replicate]),
            (&[("member", 2), ("data", 2)], &[Replicate, Shard(0)]),
            // Some ranks have no member, or no sample.
            (&[("data", 2), ("member", 4)], &[Shard(0), Replicate]),
            (&[("data", 4), ("lat", 2)], &[Shard(0), Shard(2)]),
        ];
        for (axes, placements) in meshes {
            for [found, repeated, found_gradient] in ensembles(axes, placements) {
                found.assert_eq(&states, true);
                repeated.assert_eq(&copies, true);
                let tolerance = burn::tensor::Tolerance::absolute(1e-4);
                found_gradient.assert_approx_eq::<f32>(&gradient, tolerance);
            }
        }
    }

    #[test]
    fn members_have_the_dtype_of_the_state() {
        let device = Default::default();
        for dtype in [DType::F64, DType::BF16] {
            let x = ShardTensor::solo(Tensor::<4>::ones([1, 1, 2, 2], (&device, dtype)));
            let states = perturbed(x, 2, 0.5, RandomKey::new(7, "members"), None).unwrap();
            assert_eq!(states.local().dtype(), dtype);
        }
    }

    #[test]
    fn batches_that_members_do_not_fit_are_refused() {
        let refused = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("member", 2)])?;
            let x = ShardTensor::<4>::ones([3, 1, 2, 2], &mesh, &[Shard(0)])?;
            let message = |error: Error| error.to_string();
            for (members, axis, part) in [
                (0, None, "0 members"),
                (3, Some("members"), "expected an axis with Shard(0)"),
                (2, Some("member"), "a batch of 3"),
            ] {
                let error = message(split_members(x.clone(), members, axis).unwrap_err());
                assert!(error.contains(part), "{error}");
            }
            let sharded = repeat_members(x, 2, Some("member")).unwrap_err();
            assert!(message(sharded).contains("expected an axis with Replicate"));
            Ok(())
        });
        refused.unwrap();
    }
}
