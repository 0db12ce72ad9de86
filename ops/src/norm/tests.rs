use super::*;
use crate::prelude::*;
use crate::testing::{Operator, check_op, difference};
use burn::nn::{GroupNormConfig, InstanceNormConfig, LayerNormConfig, RmsNormConfig};
use burn::tensor::{DType, Tensor};
use halocline_core::{Launcher, Shard};

struct Group(usize);

/// [`Group`] with burn's operators.
struct Composed(usize);

impl<const D: usize> Operator<D, D> for Composed {
    fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<D>>) -> X {
        let parameters = [0, 1].map(|i| Some(parameters[i].clone().flatten::<1>(0, D - 1).into()));
        let x = inputs.remove(0).into_shard();
        X::from_shard(grouped(x, self.0, parameters, 1e-5, false).unwrap())
    }
}

impl<const D: usize> Operator<D, D> for Group {
    fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<D>>) -> X {
        let [weight, bias] =
            [0, 1].map(|i| Some(parameters[i].clone().flatten::<1>(0, D - 1).into()));
        inputs.remove(0).group_norm(self.0, weight, bias, 1e-5)
    }
}

struct LastTwo;

impl Operator<3, 3> for LastTwo {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<3>>) -> X {
        let [weight, bias] = [0, 1].map(|i| Some(parameters[i].clone().into()));
        inputs.remove(0).layer_norm_dims(2, weight, bias, 1e-5)
    }
}

#[test]
fn several_dims_may_be_sharded() {
    let (x, parameters) = ([[2, 5, 7]], [[1, 5, 7]; 2]);
    check_op(&LastTwo, &x, &parameters, &[0, 1, 2], 2e-5);
}

/// Rows with burn's operators.
struct ComposedRows;

impl Operator<3, 3> for ComposedRows {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<3>>) -> X {
        let parameters = [0, 1].map(|i| Some(parameters[i].clone().flatten::<1>(0, 2).into()));
        let norm = RowNorm::Layer { epsilon: 1e-5 };
        let x = inputs.remove(0).into_shard();
        X::from_shard(rows(x, "layer_norm", norm, parameters, false).unwrap())
    }
}

struct Rms;

impl Operator<3, 3> for Rms {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<3>>) -> X {
        let weight = parameters[0].clone().flatten::<1>(0, 2);
        inputs.remove(0).rms_norm(Some(weight.into()), 1e-5)
    }
}

#[test]
fn rows_have_their_own_mean_square() {
    check_op(&Rms, &[[5, 7, 6]], &[[1, 1, 6]], &[0, 1, 2], 2e-5);
}

struct RmsDims(usize);

impl Operator<3, 3> for RmsDims {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<3>>) -> X {
        inputs
            .remove(0)
            .rms_norm_dims(self.0, Some(parameters[0].clone().into()), 1e-5)
    }
}

struct Weight(usize);

impl Operator<3, 3> for Weight {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<3>>) -> X {
        inputs.remove(0).weight_norm(parameters[0].clone(), self.0)
    }
}

/// Includes sharding such a dim, so that some ranks have no cells of it.
#[test]
fn dims_of_one_cell_may_lie_anywhere() {
    for (shape, dims) in [
        ([1, 5, 4], 2),
        ([2, 1, 7], 2),
        ([3, 5, 1], 1),
        ([3, 1, 4], 3),
    ] {
        let mut weight = shape;
        weight[..3 - dims].fill(1);
        check_op(&RmsDims(dims), &[shape], &[weight], &[0, 1, 2], 2e-5);
    }
    for (shape, dim) in [
        ([1, 5, 4], 0),
        ([1, 5, 4], 1),
        ([4, 1, 5], 2),
        ([4, 5, 1], 1),
    ] {
        let mut lengths = [1; 3];
        lengths[dim] = shape[dim];
        check_op(&Weight(dim), &[shape], &[lengths], &[0, 1, 2], 2e-5);
    }
}

struct Layer;

impl<const D: usize> Operator<D, D> for Layer {
    fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<D>>) -> X {
        let [weight, bias] =
            [0, 1].map(|i| Some(parameters[i].clone().flatten::<1>(0, D - 1).into()));
        inputs.remove(0).layer_norm(weight, bias, 1e-5)
    }
}

#[test]
fn groups_span_the_shards() {
    let parameters = [[1, 6, 1, 1]; 2];
    for groups in [1, 3, 6] {
        check_op(
            &Group(groups),
            &[[2, 6, 5, 7]],
            &parameters,
            &[0, 2, 3],
            2e-5,
        );
        check_op(
            &Composed(groups),
            &[[2, 6, 5, 7]],
            &parameters,
            &[0, 2, 3],
            2e-5,
        );
    }
    check_op(&Group(2), &[[2, 4, 11]], &[[1, 4, 1]; 2], &[0, 2], 2e-5);
}

#[test]
fn features_may_be_sharded() {
    check_op(
        &Layer,
        &[[2, 5, 7, 6]],
        &[[1, 1, 1, 6]; 2],
        &[0, 1, 2, 3],
        2e-5,
    );
    check_op(
        &ComposedRows,
        &[[5, 3, 6]],
        &[[1, 1, 6]; 2],
        &[0, 1, 2],
        2e-5,
    );
}

#[test]
fn channels_of_one_group_may_be_sharded() {
    let (x, parameters) = ([[2, 6, 5]], [[1, 6, 1]; 2]);
    check_op(&Group(1), &x, &parameters, &[0, 1, 2], 2e-5);
    check_op(&Composed(1), &x, &parameters, &[0, 1, 2], 2e-5);
    // One group per channel.
    check_op(&Group(6), &x, &parameters, &[1, 2], 2e-5);
    check_op(&Composed(6), &x, &parameters, &[1, 2], 2e-5);
}

#[test]
fn shards_of_channels_may_cut_groups() {
    let (x, parameters) = ([[2, 6, 5]], [[1, 6, 1]; 2]);
    for groups in [2, 3] {
        check_op(&Group(groups), &x, &parameters, &[0, 1, 2], 2e-5);
        check_op(&Composed(groups), &x, &parameters, &[0, 1, 2], 2e-5);
    }
    check_op(&Group(2), &[[3, 12]], &[[1, 12]; 2], &[0, 1], 2e-5);
}

#[test]
fn some_ranks_may_lack_the_one_cell_of_a_dim() {
    let parameters = [[1, 6, 1, 1]; 2];
    for x in [[2, 6, 1, 5], [1, 6, 3, 5]] {
        check_op(&Group(6), &[x], &parameters, &[0, 1, 2], 2e-5);
    }
}

#[test]
fn weights_may_be_sharded_like_features() {
    let run = |ranks: usize| {
        let results = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("tensor", world.size())])?;
            let numbers = Tensor::<1, burn::tensor::Int>::arange(0..14, world.device());
            let numbers = numbers.float().sin();
            let weight = numbers.clone().narrow(0, 3, 7);
            let x = numbers.reshape([2, 7]);
            let x = ShardTensor::distribute(x, &mesh, &[Shard(1)])?.require_grad();
            let weight = ShardTensor::<1>::distribute(weight, &mesh, &[Shard(0)])?.require_grad();
            let y = x
                .clone()
                .layer_norm(Some(weight.clone().into()), None, 1e-5);
            let y = y.rms_norm(Some(weight.clone().into()), 1e-5) * x.clone().inner();
            let gradients = y.clone().sum().backward();
            let whole = |x: ShardTensor<2>| x.full_tensor().into_data();
            let of_weight = weight.grad(&gradients).expect("a gradient");
            assert_eq!(of_weight.placements(), [Shard(0)]);
            let of_weight = of_weight.full_tensor().into_data();
            let of_x = x.grad(&gradients).expect("a gradient");
            Ok([whole(y), whole(of_x), of_weight])
        });
        results.unwrap()
    };
    let alone = run(1).remove(0);
    for ranks in [2, 3] {
        for result in run(ranks) {
            for (ours, alone) in result.iter().zip(&alone) {
                assert!(difference(ours, alone) < 1e-5);
            }
        }
    }
}

#[test]
fn modules_of_burn_give_what_they_give_there() {
    let device = Default::default();
    let normal = burn::tensor::Distribution::Normal(3.0, 2.0);
    let x = Tensor::<4>::random([2, 6, 9, 11], normal, &device);
    let group = GroupNormConfig::new(3, 6).init(&device);
    let instance = InstanceNormConfig::new(6).init(&device);
    let unscaled = burn::nn::GroupNorm {
        gamma: group
            .gamma
            .clone()
            .map(|gamma| gamma.map(|gamma| gamma * 2.0)),
        affine: false,
        ..group.clone()
    };
    let layer = LayerNormConfig::new(11).with_epsilon(0.3).init(&device);
    let rms = RmsNormConfig::new(11).with_epsilon(0.3).init(&device);
    let pairs = [
        (x.clone().apply(&layer), layer.forward(x.clone())),
        (x.clone().apply(&rms), rms.forward(x.clone())),
        (x.clone().apply(&group), group.forward(x.clone())),
        (x.clone().apply(&instance), instance.forward(x.clone())),
        (x.clone().apply(&unscaled), unscaled.forward(x.clone())),
    ];
    for (ours, burns) in pairs {
        assert!(difference(&ours.into_data(), &burns.into_data()) < 1e-5);
    }
}

#[test]
fn kernels_and_burns_operators_agree() {
    let device = Default::default();
    let normal = burn::tensor::Distribution::Normal(3.0, 2.0);
    let x = Tensor::<3>::random([2, 6, 9], normal, &device);
    let factors = |size| Tensor::<1>::random([size], normal, &device);
    let parameters = [factors(6), factors(6)];
    let grouped = |kernels| {
        let parameters = parameters.clone().map(|parameter| Some(parameter.into()));
        let x = ShardTensor::solo(x.clone());
        let y = grouped(x, 3, parameters, 1e-5, kernels).unwrap();
        y.into_local().into_data()
    };
    assert!(difference(&grouped(true), &grouped(false)) < 1e-5);
    let [weight, bias] = [factors(9), factors(9)];
    let burns = composed::rows(
        RowNorm::Layer { epsilon: 1e-5 },
        x.clone(),
        [weight.clone(), bias.clone()],
    );
    let ours = x.layer_norm(Some(weight.into()), Some(bias.into()), 1e-5);
    assert!(difference(&ours.into_data(), &burns.into_data()) < 1e-5);
}

#[test]
fn a_large_mean_costs_no_digits() {
    let wave = |offset: f64| {
        let x = Tensor::<1>::ones([4096], &Default::default()).cumsum(0);
        let x = (x * 0.37).sin() + offset;
        x.reshape([1, 2, 32, 64]).group_norm(1, None, None, 0.0)
    };
    // Cells of a thousand have a rounding error of 3e-5 themselves.
    let difference = difference(&wave(1000.0).into_data(), &wave(0.0).into_data());
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn what_cannot_be_normalized_is_told() {
    let ones = |shape: [usize; 3]| ShardTensor::solo(Tensor::<3>::ones(shape, &Default::default()));
    let told = [
        group_norm(ones([1, 0, 4]), 2, None, None, 1e-5),
        group_norm(ones([1, 2, 4]), 2, None, None, -1.0),
        layer_norm(ones([1, 2, 4]), None, None, f64::NAN),
        rms_norm(ones([1, 2, 4]), None, -1e-9),
        layer_norm_dims(ones([1, 2, 4]), 2, None, None, -1.0),
        batch_norm_train(ones([1, 3, 1]), None, None, 1e-5).map(|found| found.0),
    ];
    let told = told.map(|result| result.unwrap_err().to_string());
    assert!(told[0].contains("2 groups of [1, 0, 4]"), "{told:?}");
    assert!(
        told[1..5].iter().all(|error| error.contains("epsilon")),
        "{told:?}"
    );
    assert!(
        told[5].contains("more than one value for each channel"),
        "{told:?}"
    );
}

#[test]
fn misuse_is_told() {
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("model", 2)])?;
            let x = ShardTensor::<4>::ones([1, 6, 6, 6], &mesh, &[Shard(1)])?;
            let error = group_norm(x.clone(), 4, None, None, 1e-5).unwrap_err();
            assert!(
                error.to_string().contains("4 groups of [1, 6, 6, 6]"),
                "{error}"
            );
            let bias = Some(Tensor::<1>::ones([5], world.device()).into());
            let error = layer_norm(x.clone(), None, bias, 1e-5).unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains("a parameter [5] of F32 for 6 elements"),
                "{error}"
            );
            let options = (world.device(), DType::F64);
            let weight = Some(Tensor::<1>::ones([6], options).into());
            let error = layer_norm(x, weight, None, 1e-5).unwrap_err().to_string();
            assert!(
                error.contains("a parameter [6] of F64 for 6 elements of F32"),
                "{error}"
            );
            Ok(())
        })
        .unwrap();
}
