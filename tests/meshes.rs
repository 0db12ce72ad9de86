//! Operators on sub-meshes, on meshes of three axes, and in half precision, compared with one
//! device; parameters on meshes whose ranks have another order.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, FloatDType};
use halocline::core::Traffic;
use halocline::io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};
use halocline::models::parallel::{Plan, Store, parallelize_module};
use halocline::ops::testing::{Operator, Sharding, compare, on_mesh, on_one_device, random};
use halocline::prelude::*;

/// A convolution with halos, an activation, a pooling with halos, a norm and a mean over the
/// spatial dims, which is a sum over ranks.
struct Block<const N: usize>;

impl<const N: usize> Block<N> {
    fn conv(&self) -> ConvOptions<N> {
        let mut padding = [Padding::new(1, Boundary::Zeros); N];
        padding[N - 1] = Padding::new(1, Boundary::Periodic);
        ConvOptions::default().with_padding(padding)
    }
}

impl<const D: usize, const N: usize> Operator<D, D> for Block<N> {
    fn apply<X: Field<D>>(
        &self,
        mut inputs: Vec<X>,
        mut parameters: Vec<Tensor<D>>,
    ) -> WithDims<X, D> {
        let x = inputs
            .remove(0)
            .conv(parameters.remove(0), None, &self.conv())
            .gelu();
        let padding = [Padding::zeros(1, 1); N];
        let pool = PoolOptions::new([3; N])
            .with_stride([2; N])
            .with_padding(padding);
        let y = x.max_pool(&pool).group_norm(2, None, None, 1e-3);
        let spatial: Vec<usize> = (2..D).collect();
        let mean = y.clone().square().mean_dims(&spatial).resolve();
        y + mean
    }
}

fn tensors<const D: usize>(x: [usize; D], weight: [usize; D]) -> [Tensor<D>; 2] {
    [random(x, "x", 0), random(weight, "weight", 0) * 0.3]
}

#[test]
fn three_axes_give_the_values_and_gradients_of_one_device() {
    let check = |found: Vec<Vec<TensorData>>, expected: &[TensorData], place: &str| {
        for (rank, found) in found.iter().enumerate() {
            compare(found, expected, 1e-5, &format!("{place}: rank {rank}"));
        }
    };
    let axes = vec![("a", 2), ("b", 2), ("c", 2)];
    let images = || tensors([3, 2, 11, 9], [4, 2, 3, 3]);
    let [x, weight] = images();
    let expected = on_one_device(&Block::<2>, &[x], &[weight]);
    for (placements, extents) in [
        (
            vec![Shard(0), Shard(2), Shard(3)],
            vec![(2, vec![4, 7]), (3, vec![6, 3])],
        ),
        (
            vec![Shard(3), Shard(2), Shard(3)],
            vec![(3, vec![1, 3, 0, 5])],
        ),
    ] {
        let sharding = Sharding {
            axes: axes.clone(),
            placements,
            extents,
        };
        let found = Launcher::local(8).collect(|world| {
            let mesh = world.mesh_of(&sharding.axes)?;
            let [x, weight] = images();
            on_mesh(&Block::<2>, &[x], &[weight], &mesh, &sharding)
        });
        check(found.unwrap(), &expected, &format!("{sharding:?}"));
    }
    let volumes = || tensors([1, 2, 5, 7, 6], [4, 2, 3, 3, 3]);
    let [x, weight] = volumes();
    let expected = on_one_device(&Block::<3>, &[x], &[weight]);
    let placements = vec![Shard(2), Shard(3), Shard(4)];
    let sharding = Sharding {
        axes,
        placements,
        extents: vec![(3, vec![2, 5])],
    };
    let found = Launcher::local(8).collect(|world| {
        let mesh = world.mesh_of(&sharding.axes)?;
        let [x, weight] = volumes();
        on_mesh(&Block::<3>, &[x], &[weight], &mesh, &sharding)
    });
    check(found.unwrap(), &expected, &format!("{sharding:?}"));
}

/// Each sub-mesh computes on its own data; nothing reaches the other.
#[test]
fn submeshes_exchange_and_reduce_among_their_own_ranks() {
    let data = |group: usize| {
        let [x, weight] = tensors([2, 2, 9, 7], [4, 2, 3, 3]);
        [x * (1.0 + group as f64), weight]
    };
    let expected: Vec<_> = (0..2)
        .map(|group| {
            let [x, weight] = data(group);
            on_one_device(&Block::<2>, &[x], &[weight])
        })
        .collect();
    for (axis, other) in [("lat", 0), ("data", 1)] {
        for dim in [2, 3] {
            let found = Launcher::local(4).collect(|world| {
                let mesh = world.mesh([("data", 2), ("lat", 2)])?;
                let submesh = mesh.submesh(&[axis])?;
                let group = mesh.coords()[other];
                let sharding = Sharding {
                    axes: vec![(axis, 2)],
                    placements: vec![Shard(dim)],
                    extents: Vec::new(),
                };
                let [x, weight] = data(group);
                let before = world.comm_stats();
                let found = on_mesh(&Block::<2>, &[x], &[weight], &submesh, &sharding)?;
                let sent = world.comm_stats().since(&before);
                for traffic in [Traffic::Exchange, Traffic::Reduce] {
                    assert!(sent.of(traffic).messages > 0, "{traffic:?} forward");
                    assert!(
                        sent.of_backward(traffic).messages > 0,
                        "{traffic:?} backward"
                    );
                }
                Ok((group, found))
            });
            for (rank, (group, found)) in found.unwrap().iter().enumerate() {
                let place = format!("sub-mesh {axis:?}, dim {dim}, rank {rank}");
                compare(found, &expected[*group], 1e-5, &place);
            }
        }
    }
}

/// Values and gradients in 16-bit types are those in f64, to the precision of the types.
#[test]
fn half_precision_on_shards_is_near_the_truth() {
    for (dtype, epsilon) in [
        (FloatDType::F16, 2.0_f64.powi(-10)),
        (FloatDType::BF16, 2.0_f64.powi(-7)),
    ] {
        let halves = || tensors([2, 2, 11, 9], [4, 2, 3, 3]).map(|tensor| tensor.cast(dtype));
        let [x, weight] = halves().map(|tensor| tensor.cast(FloatDType::F64));
        let truth = on_one_device(&Block::<2>, &[x], &[weight]);
        for (axes, placements, extents) in [
            (vec![("lat", 1)], vec![Shard(2)], vec![]),
            (vec![("lat", 3)], vec![Shard(2)], vec![(2, vec![2, 0, 9])]),
            (
                vec![("lat", 2), ("lon", 2)],
                vec![Shard(2), Shard(3)],
                vec![(3, vec![8, 1])],
            ),
            (
                vec![("data", 2), ("lon", 2)],
                vec![Shard(0), Shard(3)],
                vec![],
            ),
        ] {
            let sharding = Sharding {
                axes,
                placements,
                extents,
            };
            let found = Launcher::local(sharding.ranks()).collect(|world| {
                let mesh = world.mesh_of(&sharding.axes)?;
                let [x, weight] = halves();
                on_mesh(&Block::<2>, &[x], &[weight], &mesh, &sharding)
            });
            for found in found.unwrap() {
                assert!(found.iter().all(|data| data.dtype() == DType::from(dtype)));
                compare(
                    &found,
                    &truth,
                    3.0 * epsilon,
                    &format!("{dtype:?}, {sharding:?}"),
                );
            }
        }
    }
}

/// Two layers, on meshes whose ranks are in opposite orders.
#[derive(Module, Debug)]
struct Two {
    one: Linear,
    other: Linear,
}

#[test]
fn parameters_on_meshes_of_another_order_are_loaded_by_rank() {
    let folder = tempfile::tempdir().unwrap();
    let stored = Plan::default().with_store(Store::new("**", "tensor"));
    let result = Launcher::local(3).seed(4).run(|world| {
        let forward = world.mesh([("tensor", 3)])?;
        let backward = world
            .mesh_over([("tensor", 3)], &[2, 1, 0])?
            .expect("all ranks");
        let linear = || world.init(|device| LinearConfig::new(5, 7).init(device));
        let two = || -> Result<Two> {
            Ok(Two {
                one: parallelize_module(linear()?, &forward, &stored)?,
                other: parallelize_module(linear()?, &backward, &stored)?,
            })
        };
        let (trained, fresh) = (two()?, two()?);
        let mut checkpoints = Checkpoints::open(&world, folder.path(), &CheckpointConfig::new())?;
        let mut snapshot = Snapshot::new(&world);
        snapshot.module("model", &trained)?;
        checkpoints.save(1, snapshot, None)?;
        checkpoints.wait()?;
        let checkpoint = Checkpoint::latest(&world, folder.path())?.expect("one was saved");
        let loaded = checkpoint.module(&world, "model", fresh)?;
        for (found, expected) in [(loaded.one, trained.one), (loaded.other, trained.other)] {
            found
                .weight
                .val()
                .into_data()
                .assert_eq(&expected.weight.val().into_data(), true);
        }
        Ok(())
    });
    result.unwrap();
}
