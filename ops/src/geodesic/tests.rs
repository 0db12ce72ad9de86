//! Tests of operators on geodesic neighborhoods on every sharding.

use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::{
    Gather, Launcher, Layout, ParamShard, Placement, Replicate, Result, Shard, ShardTensor,
};

use super::attention::sphere_attention;
use super::basis::{DiscoBasis, DiscoKernel};
use super::disco::{disco, disco_conv};
use super::node::LocalSums;
use super::transposed::disco_conv_transpose;
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

struct Transposed(DiscoTranspose);

impl Operator<4, 4> for Transposed {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, mut parameters: Vec<Tensor<4>>) -> X {
        let weight = parameters.remove(0).squeeze_dim::<3>(3);
        let bias = weight.clone().slice([0..3, 0..1, 0..1]).reshape([3]);
        let x = inputs.remove(0);
        x.disco_conv_transpose(weight, Some(bias.into()), 1, &self.0)
    }
}

#[test]
fn convolutions_to_finer_grids() {
    let grids = [SphereGrid::Equiangular, SphereGrid::LegendreGauss];
    let kernels = DiscoTranspose::between([[5, 4], [9, 8]], grids, [3, 2], None).unwrap();
    let weight = [3, 2, kernels.functions(), 1];
    check_op(
        &Transposed(kernels),
        &[[2, 2, 5, 4]],
        &[weight],
        &[0, 2, 3],
        2e-6,
    );
}

/// A radius that reaches some of the finer rows.
#[test]
fn finer_rows_may_be_reached_by_nothing() {
    let kernels = DiscoTranspose::new([3, 6], [6, 6], [1, 1], SphereGrid::Equiangular, Some(0.1));
    let kernels = Transposed(kernels.unwrap());
    check_op(&kernels, &[[1, 2, 3, 6]], &[[3, 2, 1, 1]], &[0, 2, 3], 2e-6);
}

/// The function is normalized to mean one on every row, though not on every cell.
#[test]
fn rows_of_a_constant_keep_its_mean_on_a_finer_grid() {
    let grid = SphereGrid::LegendreGauss;
    let kernels = DiscoTranspose::new([6, 12], [11, 24], [3, 1], grid, None).unwrap();
    let x = Tensor::<4>::ones([1, 1, 6, 12], &Default::default());
    // The other function does not reach all rows from the coarser grid.
    let weight = Tensor::<3>::from([[[0.0, 1.0]]]);
    let y = x.disco_conv_transpose(weight, None, 1, &kernels);
    let means = y.mean_dim(3).into_data();
    assert!(
        means.iter::<f32>().all(|mean| (mean - 1.0).abs() < 1e-5),
        "{means}"
    );
}

/// Queries on another grid, in even shards of the tested sharding; keys are the input whose
/// sharding is tested.
struct OtherGrid(GeodesicNeighborhood);

impl Operator<4, 4> for OtherGrid {
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
fn attention_of_queries_on_a_finer_grid() {
    let grids = [SphereGrid::Equiangular, SphereGrid::LegendreGauss];
    let near = GeodesicNeighborhood::between([[5, 4], [8, 12]], grids, None).unwrap();
    let shapes = [[2, 4, 5, 4], [2, 2, 5, 4]];
    check_op(
        &OtherGrid(near),
        &shapes,
        &[[2, 4, 8, 12]],
        &[0, 2, 3],
        5e-6,
    );
}

#[test]
fn heads_may_be_sharded() {
    let near = GeodesicNeighborhood::new([5, 6], SphereGrid::Lobatto, Some(0.9)).unwrap();
    let run = |ranks: usize, [of_keys, of_values]: [&[usize]; 2]| {
        Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("heads", ranks)])?;
            let field = |name: &str, extents: &[usize]| -> Result<ShardTensor<4>> {
                let x = random::<4>([2, extents.iter().sum(), 5, 6], name, 0).inner();
                let layout = Layout::new(mesh.shape(), &x.dims(), &[Shard(1)])?;
                let layout = layout.with_extents(1, extents)?;
                Ok(ShardTensor::distribute(x, &mesh, &layout)?.require_grad())
            };
            let fields = [
                field("q", of_keys)?,
                field("k", of_keys)?,
                field("v", of_values)?,
            ];
            let [q, k, v] = fields.clone();
            let y = sphere_attention(q, k, v, 3, &near)?;
            let gradients = (y.clone() * y.clone()).sum().backward();
            let whole = |x: ShardTensor<4>| x.full_tensor().into_data();
            let of_fields = fields.map(|x| whole(x.grad(&gradients).expect("a gradient")));
            Ok([vec![whole(y)], of_fields.to_vec()].concat())
        })
    };
    let expected = run(1, [&[12], &[6]]).unwrap().remove(0);
    for found in run(2, [&[8, 4], &[4, 2]]).unwrap() {
        compare(&found, &expected, 2e-6, "two heads and one");
    }
    let error = run(2, [&[6, 6], &[3, 3]]).unwrap_err().to_string();
    assert!(error.contains("the same whole ones of 3 heads"), "{error}");
}

#[test]
fn attention_of_queries_on_another_grid() {
    let grids = [SphereGrid::Lobatto, SphereGrid::Equiangular];
    let near = GeodesicNeighborhood::between([[7, 8], [5, 4]], grids, Some(0.9)).unwrap();
    let shapes = [[2, 4, 7, 8], [2, 2, 7, 8]];
    check_op(&OtherGrid(near), &shapes, &[[2, 4, 5, 4]], &[0, 2, 3], 5e-6);
}

/// Covers a weight sharded in output channels, and sums where both operands are sharded in input
/// channels.
#[test]
fn weights_may_be_sharded_in_channels() {
    let kernels = Disco::new([5, 6], [5, 6], [3, 4], SphereGrid::Lobatto, Some(0.9)).unwrap();
    let finer = DiscoTranspose::new([5, 6], [7, 12], [3, 4], SphereGrid::Lobatto, Some(0.9));
    let finer = finer.unwrap();
    type Convolve<'a> =
        &'a (dyn Fn(ShardTensor<4>, ShardTensor<3>) -> Result<ShardTensor<4>> + Sync);
    let within: Convolve<'_> = &|x, weight| disco_conv(x, weight, None, 1, &kernels);
    let to_finer: Convolve<'_> = &|x, weight| {
        if weight.placements() == [Shard(1)] {
            return Ok(disco_conv_transpose(x, weight, None, 1, &finer)? + 1.0);
        }
        let bias = ShardTensor::<1>::ones([5], weight.mesh(), weight.placements())?;
        disco_conv_transpose(x, weight, Some(bias.into()), 1, &finer)
    };
    let run = |convolve: Convolve<'_>, ranks: usize, [of_x, of_weight]: [Placement; 2]| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("channels", ranks)])?;
            let x = random::<4>([2, 3, 5, 6], "x", 0).inner();
            let x = ShardTensor::distribute(x, &mesh, &[of_x])?.require_grad();
            let weight = random::<3>([5, 3, 5], "weight", 0).inner();
            let weight = ShardTensor::distribute(weight, &mesh, &[of_weight])?.require_grad();
            let y = convolve(x.clone(), weight.clone())?.resolve();
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
    for convolve in [within, to_finer] {
        let expected = run(convolve, 1, [Replicate; 2]).remove(0);
        for placements in [[Replicate, Shard(0)], [Shard(1), Shard(1)]] {
            for found in run(convolve, 2, placements) {
                compare(&found, &expected, 2e-6, &format!("{placements:?}"));
            }
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
            // A stored weight, which would be gathered.
            let layout = Layout::new(mesh.shape(), &[2, 2, kernels.functions()], &[Shard(0)])?;
            let shard = ParamShard::new(layout, &mesh).with_stored(&["x"], Gather::Once)?;
            let rows = Tensor::<3>::ones([1, 2, kernels.functions()], world.device());
            let x = ShardTensor::<4>::ones([1, 2, 6, 8], &mesh, &[Shard(1)])?;
            let error = disco_conv(x, Operand::Parameter(rows, shard), None, 1, &kernels);
            let error = error.unwrap_err().to_string();
            let expected = "disco: no rule for Shard(1) of x with Replicate of weight";
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
    check_op(&OtherGrid(near), &shapes, &[[1, 4, 6, 6]], &[0, 2, 3], 5e-6);
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
            entries: Arc::clone(&kernels.0.entries),
            inputs: kernels.0.reach.inputs(&outputs),
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

/// Sums for a part of the finer rows, as on one of several ranks.
#[test]
fn transposed_sums_are_those_of_burns_operators() {
    for input in [[5, 6], [5, 3]] {
        let kernels =
            DiscoTranspose::new(input, [7, 6], [3, 2], SphereGrid::Equiangular, Some(0.8));
        let sums = kernels.unwrap().sums(2..4);
        let functions = sums.0.entries.functions;
        let run = |composed: bool| {
            let y = random::<4>([2, functions, sums.0.outputs.len(), input[1]], "y", 0);
            let y = y.detach().require_grad();
            let x = if composed {
                sums.0.composed_transposed(y.clone())
            } else {
                sums.clone().run(y.clone())
            };
            let weight = random::<3>(x.dims(), "x", 0).detach();
            let gradients = (x.clone() * weight).sum().backward();
            [
                x.inner().into_data(),
                y.grad(&gradients).unwrap().into_data(),
            ]
        };
        for (ours, burns) in run(false).iter().zip(&run(true)) {
            assert!(difference(ours, burns) < 1e-6);
        }
    }
}

#[test]
fn misuse_is_told() {
    let error = DiscoTranspose::new([5, 8], [9, 12], [3, 1], SphereGrid::Lobatto, None);
    let expected = "disco_conv_transpose: 8 longitudes of the input for 12 of the output";
    let error = error.unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
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
