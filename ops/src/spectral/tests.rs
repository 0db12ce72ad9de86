//! Tests of the transforms for every sharding, of their inverses, and of errors.

use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use halocline_core::{Launcher, Partial, ReduceOp, Replicate, Shard, ShardTensor, Traffic};

use crate::prelude::*;
use crate::reduce::sum_dims;
use crate::spectral::{irfft, mode_product, rfft, spectral_conv};
use crate::testing::{Operator, check_op, compare, difference, gradient_of, random, random_leaf};

struct Modes(&'static [usize]);

impl Operator<4, 5> for Modes {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> WithDims<X, 5> {
        SpectralField::rfft::<5>(inputs.remove(0), self.0, FftNorm::Ortho)
    }
}

struct Cells(&'static [usize], usize);

impl Operator<5, 4> for Cells {
    fn apply<X: Field<5>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<5>>) -> WithDims<X, 4> {
        SpectralField::irfft::<4>(inputs.remove(0), self.0, self.1, FftNorm::Backward)
    }
}

struct Complex;

impl Operator<3, 3> for Complex {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
        let y = SpectralField::fft(inputs.remove(0), &[1, 0], FftNorm::Forward);
        SpectralField::ifft(y, &[0], FftNorm::Forward)
    }
}

struct Cosines;

impl Operator<3, 3> for Cosines {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
        let y = inputs.remove(0).dct(&[0, 2], FftNorm::Backward);
        y.idct(&[1], FftNorm::Backward)
    }
}

#[test]
fn real_transforms_over_any_dims() {
    for dims in [&[3][..], &[2, 3], &[1, 3, 2]] {
        check_op(&Modes(dims), &[[2, 3, 7, 6]], &[], &[0, 1, 2, 3], 2e-6);
    }
}

#[test]
fn their_inverses_over_any_dims() {
    for (dims, size) in [(&[3][..], 7), (&[2, 3], 6)] {
        check_op(
            &Cells(dims, size),
            &[[2, 3, 5, 4, 2]],
            &[],
            &[0, 1, 2, 3],
            2e-6,
        );
    }
}

#[test]
fn complex_and_cosine_transforms() {
    check_op(&Complex, &[[7, 5, 2]], &[], &[0, 1], 2e-6);
    check_op(&Cosines, &[[3, 7, 5]], &[], &[0, 1, 2], 2e-6);
}

#[test]
fn sums_are_transformed_before_they_are_resolved() {
    let found = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("x", 2)])?;
        let x = random::<3>([2, 5, 6], "x", 0).inner();
        let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
        let y: ShardTensor<4> = rfft(sum_dims(x, &[0])?, &[1, 2], FftNorm::Backward)?;
        assert_eq!(y.placements(), [Partial(ReduceOp::Sum)]);
        Ok(y.full_tensor().into_data())
    });
    let whole = random::<3>([2, 5, 6], "x", 0).inner().sum_dim(0);
    let expected: Tensor<4> = SpectralField::rfft(whole, &[1, 2], FftNorm::Backward);
    for found in found.unwrap() {
        assert!(difference(&found, &expected.clone().into_data()) < 1e-6);
    }
}

#[test]
fn other_number_types() {
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::BF16, 2e-2), (DType::F16, 2e-3)] {
        let x = random::<2>([3, 9], "x", 0).inner();
        let x = x.cast(FloatDType::from(dtype));
        let y: Tensor<3> = SpectralField::rfft(x.clone(), &[0, 1], FftNorm::Ortho);
        assert_eq!(y.dtype(), dtype);
        let back: Tensor<2> = SpectralField::irfft(y, &[0, 1], 9, FftNorm::Ortho);
        let off = difference(&back.into_data(), &x.into_data());
        assert!(off < tolerance, "{dtype:?}: {off:e}");
    }
}

/// The error comes before any communication: the other rank makes no call.
#[test]
fn misuse_is_told_before_anything_is_sent() {
    Launcher::local(2)
        .check(false)
        .run(|world| {
            if world.rank() == 1 {
                return Ok(());
            }
            let mesh = world.mesh([("x", 2)])?;
            let line = ShardTensor::<1>::ones([6], &mesh, &[Shard(0)])?;
            let error = rfft::<1, 2>(line, &[0], FftNorm::Backward).unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains("rfft: no rule for Shard(0) on axis \"x\""),
                "{text}"
            );
            assert!(text.contains("redistribute(&[Replicate]) first"), "{text}");
            let plane = ShardTensor::<2>::ones([6, 2], &mesh, &[Replicate])?;
            let told = |dims: &[usize], size, expected: &str| {
                let error = irfft::<2, 1>(plane.clone(), dims, size, FftNorm::Backward);
                let text = error.unwrap_err().to_string();
                assert!(text.contains(expected), "{text}");
            };
            told(&[0], 7, "6 modes in dim 0 for 7 cells; expected 4");
            told(&[1], 7, "dims [1] of 1 that can be transformed");
            told(&[0, 0], 7, "each once");
            let error = rfft::<2, 3>(plane.clone(), &[], FftNorm::Backward).unwrap_err();
            assert!(error.to_string().contains("expected one or more"));
            let field = ShardTensor::<3>::ones([1, 2, 6], &mesh, &[Shard(2)])?;
            let weight = Tensor::<4>::ones([3, 1, 4, 2], world.device());
            let error = spectral_conv(field, weight).unwrap_err().to_string();
            assert!(
                error.contains("spectral_conv: x [1, 2, 4, 2] and weight [3, 1, 4, 2]"),
                "{error}"
            );
            let pairs = [
                (Shard(2), Shard(0), "Shard(2) of x with Shard(0) of weight"),
                (Shard(2), Shard(1), "Shard(2) of x with Shard(1) of weight"),
                (Shard(1), Shard(2), "Shard(2) on axis \"x\""),
            ];
            for (of_x, of_weight, expected) in pairs {
                let field = ShardTensor::<3>::ones([1, 2, 6], &mesh, &[of_x])?;
                let weight = ShardTensor::<4>::ones([2, 2, 4, 2], &mesh, &[of_weight])?;
                let error = spectral_conv(field, weight).unwrap_err().to_string();
                let expected = format!("spectral_conv: no rule for {expected}");
                assert!(error.contains(&expected), "{error}");
            }
            // The axis that shards latitude moves to the modes of longitude.
            let field = ShardTensor::<4>::ones([1, 2, 8, 6], &mesh, &[Shard(2)])?;
            let weight = ShardTensor::<5>::ones([2, 2, 4, 4, 2], &mesh, &[Shard(2)])?;
            let error = spectral_conv(field, weight).unwrap_err().to_string();
            let expected = "spectral_conv: no rule for Shard(3) of x with Shard(2) of weight";
            assert!(error.contains(expected), "{error}");
            Ok(())
        })
        .unwrap();
}

struct Convolution;

impl Operator<4, 4> for Convolution {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, mut parameters: Vec<Tensor<4>>) -> X {
        let weight = parameters.remove(0); // [in, out, modes, modes · 2]
        let [channels_in, channels_out, modes, pairs] = weight.dims();
        let weight = weight.reshape([channels_in, channels_out, modes, pairs / 2, 2]);
        inputs.remove(0).spectral_conv(weight).resolve()
    }
}

/// Sharded channels: partial sums over each rank's channels.
#[test]
fn convolutions_by_modes() {
    for modes in [[3, 8], [4, 4], [5, 2]] {
        let weight = [3, 2, modes[0], modes[1]];
        check_op(
            &Convolution,
            &[[2, 3, 5, 6]],
            &[weight],
            &[0, 1, 2, 3],
            5e-6,
        );
    }
}

/// Each rank transforms a channel and multiplies a mode.
#[test]
fn ranks_share_the_work_on_one_sample_in_one_dim() {
    let run = |ranks: usize| {
        let found = Launcher::local(ranks).check(false).collect(|world| {
            let mesh = world.mesh([("x", ranks)])?;
            let weight = random_leaf([4, 4, 4, 2], "weight", &mesh, &[Replicate])?;
            let x = random_leaf([1, 4, 8], "x", &mesh, &[Shard(2)])?;
            let before = world.comm_stats();
            let y = x.clone().spectral_conv::<4>(weight);
            let sent = world.comm_stats().since(&before);
            let sent = Traffic::ALL.map(|traffic| sent.of(traffic).bytes);
            assert_eq!(y.placements(), [Shard(2)]);
            let gradients = (y.clone() * y.clone()).sum().backward();
            let values = vec![y.full_tensor().into_data(), gradient_of(&x, &gradients)];
            Ok((values, sent))
        });
        found.unwrap()
    };
    let (expected, _) = run(1).remove(0);
    let found = run(4);
    for (values, sent) in &found {
        compare(values, &expected, 2e-6, "four ranks");
        assert_eq!(*sent, found[0].1);
    }
}

/// One matrix for each mode of the first mode dim, shared by all modes of the second.
struct Shared;

impl Operator<5, 5> for Shared {
    fn apply<X: Field<5>>(&self, mut inputs: Vec<X>, mut parameters: Vec<Tensor<5>>) -> X {
        inputs
            .remove(0)
            .mode_product(parameters.remove(0))
            .resolve()
    }
}

#[test]
fn products_of_modes_with_weights_of_their_own_and_shared_ones() {
    for weight in [[3, 2, 5, 4, 2], [3, 2, 5, 1, 2], [3, 2, 1, 1, 2]] {
        check_op(&Shared, &[[2, 3, 5, 4, 2]], &[weight], &[0, 1, 2, 3], 2e-6);
    }
}

/// Covers several blocks of modes.
#[test]
fn a_shared_weight_is_the_weight_of_each_mode() {
    let run = |repeats: usize| {
        let leaf = |shape, name| random::<5>(shape, name, 0).detach().require_grad();
        let (x, weight) = (
            leaf([2, 3, 40, 60, 2], "x"),
            leaf([3, 2, 40, 1, 2], "weight"),
        );
        let weights = weight.clone().repeat(&[1, 1, 1, repeats, 1]);
        let y = x.clone().mode_product(weights);
        let cotangent = random::<5>(y.dims(), "cotangent", 0).detach();
        let gradients = (y.clone() * cotangent).sum().backward();
        let [of_x, of_weight] = [x, weight].map(|leaf| leaf.grad(&gradients).expect("a gradient"));
        [y.inner(), of_x, of_weight].map(Tensor::into_data)
    };
    let (shared, each) = (run(1), run(60));
    assert_eq!(shared[..2], each[..2]);
    compare(&shared[2..], &each[2..], 1e-5, "gradient of the weight");
}

/// Weights sharded in output channels, and the pairing rule where both operands are sharded.
#[test]
fn weights_may_be_sharded_in_channels() {
    let run = |ranks: usize, dim: Option<usize>| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("x", ranks)])?;
            let placement = dim.map_or(Replicate, Shard);
            let weight = random_leaf([3, 5, 4, 2], "weight", &mesh, &[placement])?;
            let x = random_leaf([2, 3, 7], "x", &mesh, &[Replicate])?;
            let y = match dim {
                Some(0) => x.clone().redistribute(&[Shard(1)]),
                _ => x.clone(),
            };
            let y = y.spectral_conv::<4>(weight.clone()).resolve();
            let gradients = (y.clone() * y.clone()).sum().backward();
            Ok(vec![
                y.full_tensor().into_data(),
                gradient_of(&x, &gradients),
                gradient_of(&weight, &gradients),
            ])
        });
        found.unwrap()
    };
    let expected = run(1, None).remove(0);
    for dim in [None, Some(0), Some(1)] {
        for found in run(2, dim) {
            let place = format!("weight sharded in {dim:?}");
            compare(&found, &expected, 2e-6, &place);
        }
    }
}

/// Modes of the weight sharded over one axis and those of `x` over both: the cells of a rank differ
/// from those of its weight.
#[test]
fn modes_that_are_sharded_differently_are_refused() {
    let refused = Launcher::local(4).run(|world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let x = ShardTensor::<4>::ones([1, 2, 8, 2], &mesh, &[Shard(2), Shard(2)])?;
        for placements in [
            [Replicate, Shard(1)],
            [Shard(1), Replicate],
            [Replicate, Shard(2)],
        ] {
            let weight = ShardTensor::<4>::ones([2, 4, 8, 2], &mesh, &placements)?;
            let error = mode_product(x.clone(), weight).unwrap_err().to_string();
            assert!(error.contains("mode_product: no rule"), "{error}");
        }
        Ok(())
    });
    refused.unwrap();
}

struct Power;

impl Operator<3, 1> for Power {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> WithDims<X, 1> {
        inputs.remove(0).power_spectrum::<4>(2).resolve()
    }
}

#[test]
fn power_of_modes_sums_to_the_mean_square() {
    check_op(&Power, &[[2, 5, 6]], &[], &[0, 1, 2], 1e-6);
    let x = random::<3>([2, 5, 7], "x", 0).inner();
    let power: f32 = x.clone().power_spectrum::<4>(1).sum().into_scalar();
    let square: f32 = (x.clone() * x).mean().into_scalar();
    assert!((power - square).abs() < 1e-6 * square);
}

#[test]
fn sums_over_a_field_are_no_limit_of_f16() {
    let x = Tensor::<4>::ones([1, 1, 256, 512], &Default::default());
    let mut one = vec![0.0_f32; 3 * 2 * 2];
    one.iter_mut().step_by(2).for_each(|real| *real = 1.0);
    let weight = Tensor::<5>::from_data(TensorData::new(one, [1, 1, 3, 2, 2]), &Default::default());
    let (x, weight) = (x.cast(FloatDType::F16), weight.cast(FloatDType::F16));
    let y = x.spectral_conv(weight);
    assert_eq!(y.dtype(), DType::F16);
    assert!(
        y.into_data()
            .iter::<f32>()
            .all(|cell| (cell - 1.0).abs() < 1e-2)
    );
}
