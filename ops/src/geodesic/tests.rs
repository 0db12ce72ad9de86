//! Tests of operators on geodesic neighborhoods on every sharding.

use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::{Launcher, Placement, Replicate, Shard, ShardTensor};

use super::basis::{DiscoBasis, DiscoKernel};
use super::disco::{disco, disco_conv};
use super::node::LocalSums;
use crate::prelude::*;
use crate::testing::{Operator, check_op, compare, difference, random};

struct Convolution(Disco);

impl Operator<4, 4> for Convolution {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, mut parameters: Vec<Tensor<4>>) -> X {
        let weight = parameters.remove(0).squeeze_dim::<3>(3);
        inputs.remove(0).disco_conv(weight, None, 1, &self.0)
    }
}

#[test]
fn convolutions_on_shards_of_batch_and_grid() {
    let same = Disco::new([7, 8], [7, 8], [3, 4], SphereGrid::Lobatto, Some(0.9)).unwrap();
    check_op(
        &Convolution(same),
        &[[2, 2, 7, 8]],
        &[[3, 2, 5, 1]],
        &[0, 2, 3],
        2e-6,
    );
    let coarser = Disco::new([9, 8], [4, 4], [2, 1], SphereGrid::Equiangular, None).unwrap();
    check_op(
        &Convolution(coarser),
        &[[2, 2, 9, 8]],
        &[[3, 2, 1, 1]],
        &[0, 2, 3],
        2e-6,
    );
}

#[test]
fn convolutions_between_kinds_of_grids() {
    let grids = [SphereGrid::LegendreGauss, SphereGrid::Equiangular];
    let kernels = Disco::between([[7, 8], [5, 4]], grids, [3, 1], Some(0.9)).unwrap();
    check_op(
        &Convolution(kernels),
        &[[2, 2, 7, 8]],
        &[[3, 2, 2, 1]],
        &[0, 2, 3],
        2e-6,
    );
}

/// Queries on a coarser grid, in even shards of the tested sharding; keys are the input whose
/// sharding is tested.
struct Coarser(GeodesicNeighborhood);

impl Operator<4, 4> for Coarser {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, mut queries: Vec<Tensor<4>>) -> X {
        let (values, keys) = (inputs.remove(1), inputs.remove(0));
        let held = keys.clone().into_shard();
        let queries = queries.remove(0);
        let mut layout =
            halocline_core::Layout::new(held.layout().mesh(), &queries.dims(), held.placements())
                .unwrap();
        layout = layout.with_extents(0, held.layout().extents(0)).unwrap();
        let queries = X::from_shard(held.replicate_operand(queries).redistribute(&layout));
        queries.sphere_attention(keys, values, 2, &self.0)
    }
}

#[test]
fn attention_of_queries_on_another_grid() {
    let grids = [SphereGrid::Lobatto, SphereGrid::Equiangular];
    let near = GeodesicNeighborhood::between([[7, 8], [5, 4]], grids, Some(0.9)).unwrap();
    let shapes = [[2, 4, 7, 8], [2, 2, 7, 8]];
    check_op(&Coarser(near), &shapes, &[[2, 4, 5, 4]], &[0, 2, 3], 5e-6);
}

/// Covers a weight sharded in output channels, and sums where both operands are sharded in input
/// channels.
#[test]
fn weights_may_be_sharded_in_channels() {
    let kernels = Disco::new([5, 6], [5, 6], [3, 4], SphereGrid::Lobatto, Some(0.9)).unwrap();
    let run = |ranks: usize, [of_x, of_weight]: [Placement; 2]| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("channels", ranks)])?;
            let x = random::<4>([2, 3, 5, 6], "x", 0).inner();
            let x = ShardTensor::distribute(x, &mesh, &[of_x])?.require_grad();
            let weight = random::<3>([5, 3, 5], "weight", 0).inner();
            let weight = ShardTensor::distribute(weight, &mesh, &[of_weight])?.require_grad();
            let y = disco_conv(x.clone(), weight.clone(), None, 1, &kernels)?.resolve();
            let gradients = (y.clone() * y.clone()).sum().backward();
            let of_weight = weight.grad(&gradients).expect("a gradient");
            assert_eq!(of_weight.layout(), weight.layout());
            let of_x = x.grad(&gradients).expect("a gradient");
            let whole = |x: ShardTensor<4>| x.full_tensor().into_data();
            let of_weight = of_weight.full_tensor().into_data();
            Ok(vec![whole(y), whole(of_x), of_weight])
        });
        found.unwrap()
    };
    let expected = run(1, [Replicate; 2]).remove(0);
    for placements in [[Replicate, Shard(0)], [Shard(1), Shard(1)]] {
        for found in run(2, placements) {
            compare(&found, &expected, 2e-6, &format!("{placements:?}"));
        }
    }
}

/// The other rank makes no call, so any message would fail.
#[test]
fn weights_in_other_shards_are_refused_before_anything_is_sent() {
    Launcher::local(2)
        .check(false)
        .run(|world| {
            if world.rank() == 1 {
                return Ok(());
            }
            let mesh = world.mesh([("x", 2)])?;
            let kernels = Disco::new([6, 8], [6, 8], [3, 1], SphereGrid::Lobatto, None)?;
            let x = ShardTensor::<4>::ones([1, 2, 6, 8], &mesh, &[Shard(3)])?;
            let weight = [2, 2, kernels.functions()];
            let weight = ShardTensor::<3>::ones(weight, &mesh, &[Shard(0)])?;
            let error = disco_conv(x, weight, None, 1, &kernels);
            let error = error.unwrap_err().to_string();
            let expected = "disco: no rule for Shard(3) of x with Shard(0) of weight";
            assert!(error.contains(expected), "{error}");
            Ok(())
        })
        .unwrap();
}

/// A radius that reaches only the rows of the rank itself, or no row at all.
#[test]
fn rows_may_reach_nothing() {
    let kernels = Disco::new([3, 6], [6, 6], [1, 1], SphereGrid::Equiangular, Some(0.1)).unwrap();
    check_op(
        &Convolution(kernels),
        &[[1, 2, 3, 6]],
        &[[3, 2, 1, 1]],
        &[0, 2, 3],
        2e-6,
    );
}

#[test]
fn rows_may_attend_to_nothing() {
    let grids = [SphereGrid::Equiangular; 2];
    let near = GeodesicNeighborhood::between([[3, 6], [6, 6]], grids, Some(0.1)).unwrap();
    let shapes = [[1, 4, 3, 6], [1, 2, 3, 6]];
    check_op(&Coarser(near), &shapes, &[[1, 4, 6, 6]], &[0, 2, 3], 5e-6);
}

struct Attention(GeodesicNeighborhood);

impl Operator<4, 4> for Attention {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
        let (values, keys) = (inputs.remove(2), inputs.remove(1));
        inputs.remove(0).sphere_attention(keys, values, 2, &self.0)
    }
}

#[test]
fn attention_on_shards_of_batch_and_grid() {
    let near = GeodesicNeighborhood::new([7, 6], SphereGrid::Lobatto, Some(0.9)).unwrap();
    let shapes = [[2, 4, 7, 6], [2, 4, 7, 6], [2, 2, 7, 6]];
    check_op(&Attention(near), &shapes, &[], &[0, 2, 3], 5e-6);
}

/// Every function is normalized to mean one.
#[test]
fn a_constant_stays_a_constant() {
    let kernels = Disco::new([9, 16], [9, 16], [3, 1], SphereGrid::LegendreGauss, None).unwrap();
    let x = ShardTensor::solo(Tensor::<4>::ones([1, 1, 9, 16], &Default::default()));
    let y = disco(x, &kernels).unwrap().into_local().into_data();
    assert!(
        y.iter::<f32>().all(|value| (value - 1.0).abs() < 1e-5),
        "{y}"
    );
}

#[test]
fn sums_are_those_of_burns_operators() {
    for output in [[5, 6], [5, 3]] {
        let kernels =
            Disco::new([7, 6], output, [3, 2], SphereGrid::Equiangular, Some(0.8)).unwrap();
        let outputs = 1..4;
        let sums = LocalSums {
            entries: Arc::clone(&kernels.entries),
            inputs: kernels.reach.inputs(&outputs),
            outputs,
        };
        let run = |composed: bool| {
            let x = random::<3>([2, sums.inputs.len(), 6], "x", 0)
                .detach()
                .require_grad();
            let y = if composed {
                sums.composed(x.clone())
            } else {
                sums.clone().run(x.clone())
            };
            let weight = random::<4>(y.dims(), "y", 0).detach();
            let gradients = (y.clone() * weight).sum().backward();
            [
                y.inner().into_data(),
                x.grad(&gradients).unwrap().into_data(),
            ]
        };
        for (ours, burns) in run(false).iter().zip(&run(true)) {
            assert!(difference(ours, burns) < 1e-6);
        }
    }
}

#[test]
fn misuse_is_told() {
    let told = |input, output, kernel: DiscoKernel, radius, expected: &str| {
        let error = Disco::new(input, output, kernel, SphereGrid::Lobatto, radius).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    told(
        [5, 8],
        [5, 3],
        [3, 1].into(),
        None,
        "3 longitudes of the output for 8 of the input",
    );
    let (grid, none) = (
        [5, 8],
        "PiecewiseLinear([0, 1]); expected one or more rings",
    );
    told(grid, grid, [0, 1].into(), None, none);
    let none = "Zernike(0); expected one or more degrees";
    told(grid, grid, DiscoBasis::Zernike(0).into(), None, none);
    told(grid, grid, [3, 1].into(), Some(-0.5), "radius -0.5");
    let kernels = Disco::new(grid, grid, [3, 1], SphereGrid::Lobatto, None).unwrap();
    let x = ShardTensor::solo(Tensor::<4>::ones([1, 4, 5, 8], &Default::default()));
    let weight = Tensor::<3>::ones([2, 3, kernels.functions()], &Default::default());
    let error = disco_conv(x.clone(), weight.clone(), None, 2, &kernels).unwrap_err();
    let expected = "with 2 groups on 4 channels; expected [groups·n, channels / groups,";
    assert!(error.to_string().contains(expected), "{error}");
    let bias = Tensor::<1>::ones([3], &Default::default());
    let weight = weight.slice([0..2, 0..2]);
    let error = disco_conv(x, weight, Some(bias.into()), 2, &kernels).unwrap_err();
    assert!(
        error.to_string().contains("bias [3] for 2 channels"),
        "{error}"
    );
}
