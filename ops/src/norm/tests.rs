use super::*;
use crate::prelude::*;
use crate::testing::{Operator, check_op, difference};
use burn::nn::{GroupNormConfig, InstanceNormConfig, LayerNormConfig, RmsNormConfig};
use burn::tensor::DType;
use halocline_core::Launcher;

struct Group(usize);

/// [`Group`] by burn's operators.
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

struct Rms;

impl Operator<3, 3> for Rms {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<3>>) -> X {
        let weight = parameters[0].clone().flatten::<1>(0, 2);
        inputs.remove(0).rms_norm(Some(weight.into()), 1e-5)
    }
}

#[test]
fn rows_have_their_own_mean_square() {
    check_op(&Rms, &[[5, 7, 6]], &[[1, 1, 6]], &[0, 1], 2e-5);
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
fn the_last_dim_is_normalized_without_a_message() {
    check_op(
        &Layer,
        &[[2, 5, 7, 6]],
        &[[1, 1, 1, 6]; 2],
        &[0, 1, 2],
        2e-5,
    );
}

#[test]
fn modules_of_burn_give_what_they_give_there() {
    let device = Default::default();
    let normal = burn::tensor::Distribution::Normal(3.0, 2.0);
    let x = Tensor::<4>::random([2, 6, 9, 11], normal, &device);
    let group = GroupNormConfig::new(3, 6).init(&device);
    let instance = InstanceNormConfig::new(6).init(&device);
    let layer = LayerNormConfig::new(11).with_epsilon(0.3).init(&device);
    let rms = RmsNormConfig::new(11).with_epsilon(0.3).init(&device);
    let pairs = [
        (x.clone().apply(&layer), layer.forward(x.clone())),
        (x.clone().apply(&rms), rms.forward(x.clone())),
        (x.clone().apply(&group), group.forward(x.clone())),
        (x.clone().apply(&instance), instance.forward(x.clone())),
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
        let parameters = parameters.clone().map(|own| Some(own.into()));
        let x = ShardTensor::solo(x.clone());
        let y = grouped(x, 3, parameters, 1e-5, kernels).unwrap();
        y.into_parts().0.into_data()
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
fn misuse_is_told() {
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("model", 2)])?;
            let x = ShardTensor::<4>::ones([1, 4, 6, 6], &mesh, &[Shard(1)])?;
            let error = group_norm(x.clone(), 2, None, None, 1e-5).unwrap_err();
            assert!(
                error.to_string().contains("no rule for Shard(1)"),
                "{error}"
            );
            let error = group_norm(x.clone(), 3, None, None, 1e-5).unwrap_err();
            assert!(
                error.to_string().contains("3 groups of [1, 4, 6, 6]"),
                "{error}"
            );
            let bias = Some(Tensor::<1>::ones([5], world.device()).into());
            let error = layer_norm(x.clone(), None, bias, 1e-5).unwrap_err();
            assert!(
                error.to_string().contains("a parameter [5] for 6 elements"),
                "{error}"
            );
            let options = (world.device(), DType::F64);
            let weight = Some(Tensor::<1>::ones([6], options).into());
            let error = layer_norm(x, weight, None, 1e-5).unwrap_err().to_string();
            assert!(
                error.contains("a parameter of F64 for a tensor of F32"),
                "{error}"
            );
            Ok(())
        })
        .unwrap();
}
