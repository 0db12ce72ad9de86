//! Tests of `Fan`: every redistribution to and from it has its exact adjoint.

use burn::tensor::{Tensor, TensorData};
use halocline_core::{
    CommStats, DeviceMesh, Fan, Launcher, Layout, Partial, Placement, ReduceOp, Replicate, Result,
    Shard, ShardTensor, Traffic,
};

const ROWS: usize = 7;
const COLUMNS: usize = 5;

fn numbers(seed: usize) -> TensorData {
    let number = |i: usize| ((i * 37 + seed * 101) % 23) as f32 - 11.0;
    let numbers: Vec<f32> = (0..ROWS * COLUMNS).map(number).collect();
    TensorData::new(numbers, [ROWS, COLUMNS])
}

fn field(mesh: &DeviceMesh, data: TensorData, to: &[Placement]) -> Result<ShardTensor<2>> {
    ShardTensor::distribute(
        Tensor::from_data(data, &mesh.device().clone().inner()),
        mesh,
        to,
    )
}

/// Returns the product with weights, summed over all cells. Each rank adds its own cells.
fn loss(y: ShardTensor<2>, shards: &[Placement]) -> Result<ShardTensor<1>> {
    let mesh = y.mesh().clone();
    let y = y.try_redistribute(shards)?;
    let weights = field(&mesh, numbers(9), shards)?;
    let part = (y * weights).into_local().sum();
    let partial = vec![Partial(ReduceOp::Sum); shards.len()];
    let layout = Layout::new(mesh.shape(), &[1], &partial)?;
    Ok(ShardTensor::from_parts(part, layout, mesh))
}

/// Returns all combinations of placements on this many axes.
fn placements(axes: usize) -> Vec<Vec<Placement>> {
    let more = |all: Vec<Vec<Placement>>| {
        let one = [Shard(0), Shard(1), Replicate, Fan];
        let longer = |first: Vec<Placement>| one.map(|last| [&first[..], &[last]].concat());
        all.into_iter().flat_map(longer).collect()
    };
    (0..axes).fold(vec![Vec::new()], |all, _| more(all))
}

/// Redistributes from every placement through every other to shards, and checks that values and
/// gradients are preserved.
fn check_chains(axes: &[(&str, usize)], shards: &[Placement]) {
    let ranks = axes.iter().map(|(_, size)| size).product();
    let run = Launcher::local(ranks).run(|world| {
        let mesh = world.mesh_of(axes)?;
        let all = placements(axes.len());
        for (from, through) in all
            .iter()
            .flat_map(|from| all.iter().map(move |to| (from, to)))
        {
            let x = field(&mesh, numbers(1), from)?.require_grad();
            let replicates =
                |(from, to): (&Placement, &Placement)| (*from, *to) == (Fan, Replicate);
            let refused = from.iter().zip(through).any(replicates);
            let y = match x.clone().try_redistribute(through) {
                Ok(y) if !refused => y,
                Err(error) if refused => {
                    assert!(error.to_string().contains("Fan → Replicate"), "{error}");
                    // Without gradients, the two are equal.
                    let y = x.inner().try_redistribute(through)?;
                    let whole = y.full_tensor();
                    whole.into_data().assert_eq(&numbers(1), true);
                    continue;
                }
                other => panic!("{from:?} to {through:?}: {other:?}"),
            };
            let whole = y.clone().full_tensor();
            whole.into_data().assert_eq(&numbers(1), true);
            let gradients = loss(y, shards)?.backward();
            let gradient = x.grad(&gradients).expect("a gradient");
            let sums = |axis: &Placement| *axis == Partial(ReduceOp::Sum);
            assert_eq!(gradient.placements().iter().any(sums), from.contains(&Fan));
            let gradient = gradient.full_tensor().into_data();
            assert_eq!(gradient, numbers(9), "{from:?} through {through:?}");
        }
        Ok(())
    });
    run.unwrap();
}

#[test]
fn values_and_gradients_stay_through_all_placements() {
    check_chains(&[("x", 3)], &[Shard(0)]);
    check_chains(&[("y", 2), ("x", 2)], &[Shard(1), Shard(0)]);
    check_chains(&[("y", 2), ("x", 3)], &[Shard(0), Shard(0)]);
}

#[test]
fn sums_fan_out_with_two_reductions() {
    let run = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("x", 2)])?;
        let layout = Layout::new(mesh.shape(), &[ROWS, COLUMNS], &[Partial(ReduceOp::Sum)])?;
        let own = Tensor::<2>::from_data(numbers(world.rank()), world.device()).require_grad();
        let x = ShardTensor::from_parts(own, layout, mesh);
        let y = x.clone().redistribute(&[Fan]);
        let gradient = x.grad(&loss(y, &[Shard(0)])?.backward());
        let gradient = gradient.expect("a gradient").into_local();
        gradient.into_data().assert_eq(&numbers(9), true);
        Ok(())
    });
    run.unwrap();
}

/// Returns the numbers of messages that a rank sends, forward and backward, from one placement
/// through another to shards.
fn messages(from: Placement, through: Placement) -> [u64; 2] {
    let all = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("x", 2)])?;
        let x = field(&mesh, numbers(1), &[from])?.require_grad();
        let start = world.comm_stats();
        let y = x.redistribute(&[through]);
        let forward = world.comm_stats();
        let loss = loss(y, &[Shard(0)])?;
        let after = world.comm_stats();
        loss.backward();
        let sum = |stats: CommStats| {
            let kinds = [Traffic::Redistribute, Traffic::Reduce];
            kinds.map(|kind| stats.of(kind).messages).iter().sum()
        };
        Ok([forward.since(&start), world.comm_stats().since(&after)].map(sum))
    });
    all.unwrap()[0]
}

#[test]
fn what_travels_is_what_the_table_says() {
    // A slice of a tensor with `Fan` needs no messages, so the backward messages are those of the
    // first step.
    assert_eq!(messages(Shard(0), Fan), [1, 1]); // all-gather; reduce-scatter
    assert_eq!(messages(Fan, Fan), [0, 0]);
    let [forward, backward] = messages(Replicate, Fan);
    assert_eq!(forward, 0);
    assert!(backward > 0, "an all-reduce");
}

#[test]
fn a_loss_that_fans_out_is_refused() {
    let error = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("x", 2)])?;
        let loss = ShardTensor::<1>::ones([1], &mesh, &[Fan])?.require_grad();
        loss.backward();
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("Fan on axis \"x\""), "{error}");
}

/// On the local tensors, every rank has the whole gradient, for `Fan` as for `Replicate`.
#[test]
fn local_tensors_have_whole_gradients() {
    let run = Launcher::local(3).run(|world| {
        let mesh = world.mesh([("x", 3)])?;
        let own = Tensor::<2>::from_data(numbers(1), world.device()).require_grad();
        let layout = Layout::new(mesh.shape(), &[ROWS, COLUMNS], &[Fan])?;
        let x = ShardTensor::from_local(own.clone(), &mesh, &layout)?;
        let gradient = own.grad(&loss(x, &[Shard(0)])?.backward());
        gradient
            .expect("a gradient")
            .into_data()
            .assert_eq(&numbers(9), true);
        for from in [Replicate, Shard(1)] {
            let x = field(&mesh, numbers(1), &[from])?.require_grad();
            let local = x.clone().redistribute(&[Fan]).to_local();
            let weights = Tensor::<2>::from_data(numbers(9), world.device());
            let gradient = x
                .grad(&(local * weights).sum().backward())
                .expect("a gradient");
            let gradient = gradient.full_tensor().into_data();
            assert_eq!(gradient, numbers(9), "{from:?}");
        }
        Ok(())
    });
    run.unwrap();
}
