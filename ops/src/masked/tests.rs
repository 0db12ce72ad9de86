use burn::nn::BatchNormConfig;
use burn::tensor::{Tensor, TensorData};
use halocline_core::{Boundary, Launcher, Shard};

use super::*;
use crate::conv::{ConvOptions, ConvTransposeOptions};
use crate::driver::Padding;
use crate::pool::PoolOptions;
use crate::prelude::*;
use crate::resample::{Interpolation, Mode, interpolate};
use crate::testing::{Operator, check_op, difference, gradient_of, random};

const SHAPE: [usize; 4] = [2, 4, 5, 7];

/// Zeros, ones and, where `weighted`, other weights.
fn mask_values(shape: [usize; 4], weighted: bool) -> Vec<f32> {
    let count: usize = shape.iter().product();
    let weight = |i: usize| match i * 7 % 5 {
        0 | 3 => 0.0,
        other if weighted => other as f32,
        _ => 1.0,
    };
    (0..count).map(weight).collect()
}

/// Transposed convolution to twice the size, in which windows overlap in one dim.
fn doubled() -> ConvTransposeOptions<2> {
    let options = ConvTransposeOptions::default().with_stride([2, 2]);
    options.with_padding([1, 0]).with_output_padding([1, 0])
}

/// A mask distributed as a field is.
fn mask_beside<X: Field<4>>(x: &X, shape: [usize; 4], weighted: bool) -> X {
    let device = x.clone().into_shard().device();
    let mask = TensorData::new(mask_values(shape, weighted), shape);
    x.distribute_operand(Tensor::<4>::from_data(mask, &device.inner()))
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Conv,
    Transposed,
    Interpolated(Mode),
    Pool,
    Max,
    Mean,
    Group,
    Layer,
    Batch,
}

impl Kind {
    fn run<X: Field<4>>(self, x: X, mut parameters: Vec<Tensor<4>>) -> X {
        let spatial = [1, 1, SHAPE[2], SHAPE[3]];
        let ones = mask_beside(&x, spatial, false);
        let weighted = mask_beside(&x, spatial, true);
        let pool = PoolOptions::<2>::new([2, 3]).with_stride([2, 1]);
        let mut channels = || -> Operand<1> { parameters.remove(0).flatten::<1>(0, 3).into() };
        match self {
            Self::Conv => {
                let padding = [
                    Padding::new(1, Boundary::Zeros),
                    Padding::new(1, Boundary::Periodic),
                ];
                let options = ConvOptions::<2>::default().with_padding(padding);
                let bias = parameters.remove(1).flatten::<1>(0, 3).into();
                masked_conv(x, ones, parameters.remove(0), Some(bias), &options)
            }
            Self::Transposed => {
                let bias = parameters.remove(1).flatten::<1>(0, 3).into();
                masked_conv_transpose(x, ones, parameters.remove(0), Some(bias), &doubled())
            }
            Self::Interpolated(mode) => {
                let boundary = [Boundary::Replicate, Boundary::Periodic];
                let interpolation = Interpolation::new(mode).with_boundary(boundary);
                masked_interpolate(x, weighted, [9, 4], interpolation)
            }
            Self::Pool => masked_avg_pool(x, weighted, &pool),
            Self::Max => masked_max_pool(x, weighted, &pool),
            Self::Mean => masked_mean_dims(x, weighted, &[1, 3]),
            Self::Batch => {
                let (weight, bias) = (channels(), channels());
                masked_batch_norm_train(x, weighted, Some(weight), Some(bias), 1e-2).map(|(y, _)| y)
            }
            Self::Group => {
                let (weight, bias) = (channels(), channels());
                masked_group_norm(x, weighted, 2, Some(weight), Some(bias), 1e-2)
            }
            Self::Layer => {
                let (bias, weight) = (parameters.remove(1), parameters.remove(0));
                masked_layer_norm(x, ones, 2, Some(weight.into()), Some(bias.into()), 1e-2)
            }
        }
        .unwrap()
    }

    fn parameters(self) -> Vec<[usize; 4]> {
        match self {
            Self::Conv => vec![[3, 4, 3, 3], [1, 3, 1, 1]],
            Self::Transposed => vec![[4, 3, 3, 2], [1, 3, 1, 1]],
            Self::Group | Self::Batch => vec![[1, 4, 1, 1]; 2],
            Self::Layer => vec![[1, 1, SHAPE[2], SHAPE[3]]; 2],
            Self::Pool | Self::Max | Self::Mean | Self::Interpolated(_) => Vec::new(),
        }
    }
}

const KINDS: [Kind; 10] = [
    Kind::Conv,
    Kind::Transposed,
    Kind::Interpolated(Mode::Linear),
    Kind::Interpolated(Mode::Nearest),
    Kind::Pool,
    Kind::Max,
    Kind::Mean,
    Kind::Group,
    Kind::Layer,
    Kind::Batch,
];

impl Operator<4, 4> for Kind {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<4>>) -> X {
        self.run(inputs.remove(0), parameters)
    }
}

#[test]
fn any_mesh_gives_what_one_device_gives() {
    for kind in KINDS {
        check_op(&kind, &[SHAPE], &kind.parameters(), &[0, 2, 3], 2e-5);
    }
}

/// Cells of weight zero reach no result, and have a gradient of zero.
#[test]
fn no_masked_cell_reaches_a_result_or_a_gradient() {
    let run = |kind: Kind, hole: f32, ranks: usize| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("lat", ranks)])?;
            let cells = mask_values([1, 1, SHAPE[2], SHAPE[3]], false);
            let drawn = random(SHAPE, "x", 0).into_data();
            let numbers = drawn.iter::<f32>().zip(cells.iter().cycle());
            let holed = numbers.map(|(x, mask)| if *mask == 0.0 { hole } else { x });
            let x = Tensor::<4>::from_data(
                TensorData::new(holed.collect(), SHAPE),
                &world.device().clone().inner(),
            );
            let x = ShardTensor::distribute(x, &mesh, &[Shard(2)])?.require_grad();
            let leaf = |(i, shape)| random::<4>(shape, "parameter", i).detach().require_grad();
            let leaves = kind.parameters().into_iter().enumerate().map(leaf);
            let leaves: Vec<Tensor<4>> = leaves.collect();
            let y = kind.run(x.clone(), leaves.clone());
            let gradients = y.clone().square().sum().backward();
            let mut found = vec![y.full_tensor().into_data(), gradient_of(&x, &gradients)];
            let of_leaves = leaves.iter().map(|leaf| leaf.grad(&gradients));
            found.extend(of_leaves.map(|gradient| gradient.expect("a gradient").into_data()));
            Ok(found)
        });
        found.unwrap().remove(0)
    };
    for kind in KINDS {
        let expected = run(kind, 0.0, 1);
        for ranks in [1, 3] {
            let found = run(kind, f32::NAN, ranks);
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    difference(found, expected) < 1e-5,
                    "{kind:?} on {ranks} ranks"
                );
            }
            let cells = mask_values([1, 1, SHAPE[2], SHAPE[3]], false);
            let gradient = found[1].iter::<f32>();
            assert!(
                gradient
                    .zip(cells.iter().cycle())
                    .all(|(g, mask)| *mask > 0.0 || g == 0.0)
            );
        }
    }
}

/// A mask of one column is the same as one with that column everywhere.
#[test]
fn windows_count_the_cells_of_a_mask_that_is_broadcast_in_space() {
    let run = |ranks: usize, columns: usize| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("lon", ranks)])?;
            let x = random::<4>(SHAPE, "x", 0).inner();
            let shape = [1, 1, SHAPE[2], 1];
            let column = TensorData::new(mask_values(shape, true), shape);
            let mask = Tensor::<4>::from_data(column, &x.device());
            let mask = mask.repeat_dim(3, columns);
            let weight = Tensor::<4>::ones([2, SHAPE[1], 3, 3], &x.device());
            let x = ShardTensor::distribute(x, &mesh, &[Shard(3)])?;
            let mask = x.distribute_operand(mask);
            let padding = [Padding::new(1, Boundary::Zeros); 2];
            let options = ConvOptions::<2>::default().with_padding(padding);
            let pool = PoolOptions::<2>::new([3, 3]).with_padding(padding);
            let results = [
                masked_conv(x.clone(), mask.clone(), weight, None, &options)?,
                masked_avg_pool(x.clone(), mask.clone(), &pool)?,
                masked_max_pool(x, mask, &pool)?,
            ];
            Ok(results.map(|y| y.full_tensor().into_data()))
        });
        found.unwrap().remove(0)
    };
    let expected = run(1, SHAPE[3]);
    for ranks in [1, 2] {
        for (found, expected) in run(ranks, 1).iter().zip(&expected) {
            assert!(difference(found, expected) < 1e-5, "{ranks} ranks");
        }
    }
}

#[test]
fn without_holes_they_are_the_operators_without_a_mask() {
    let x = random::<4>(SHAPE, "x", 0).inner();
    let ones = || Tensor::<4>::ones([1, 1, SHAPE[2], SHAPE[3]], &x.device());
    let weight = random::<4>([3, 4, 3, 2], "weight", 0).inner();
    let options = ConvOptions::<2>::default();
    let transposed = random::<4>([4, 3, 3, 2], "weight", 1).inner();
    let linear = Interpolation::new(Mode::Linear);
    let pool = PoolOptions::<2>::new([2, 2]);
    let batch = crate::norm::batch_norm_train(ShardTensor::solo(x.clone()), None, None, 1e-5);
    for (ours, plain) in [
        (
            masked_max_pool(x.clone(), ones(), &pool),
            x.clone().max_pool(&pool),
        ),
        (
            masked_batch_norm_train(x.clone(), ones(), None, None, 1e-5).map(|(y, _)| y),
            batch.unwrap().0.into_local(),
        ),
        (
            masked_conv(x.clone(), ones(), weight.clone(), None, &options),
            x.clone().conv(weight, None, &options),
        ),
        (
            masked_conv_transpose(x.clone(), ones(), transposed.clone(), None, &doubled()),
            x.clone().conv_transpose(transposed, None, &doubled()),
        ),
        (
            masked_interpolate(x.clone(), ones(), [9, 4], linear),
            x.clone()
                .try_op(|x| interpolate(x, [9, 4], linear))
                .unwrap(),
        ),
        (
            masked_avg_pool(x.clone(), ones(), &pool),
            x.clone().avg_pool(&pool),
        ),
        (
            masked_mean_dims(x.clone(), ones(), &[1, 2]),
            ReduceField::mean_dims(x.clone(), &[1, 2]),
        ),
        (
            masked_group_norm(x.clone(), ones(), 2, None, None, 1e-5),
            x.clone().group_norm(2, None, None, 1e-5),
        ),
        (
            masked_layer_norm(x.clone(), ones(), 3, None, None, 1e-5),
            x.clone().layer_norm_dims(3, None, None, 1e-5),
        ),
    ] {
        assert!(difference(&ours.unwrap().into_data(), &plain.into_data()) < 1e-5);
    }
}

/// A channel of which no cell counts keeps its statistics.
#[test]
fn running_statistics_are_those_of_the_cells_that_count() {
    let found = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let config = BatchNormConfig::new(2).with_momentum(0.5);
        let norm = world.init(|device| config.init(device))?;
        let field = |cells: [[f32; 3]; 2]| {
            let cells = Tensor::<3>::from_data([cells], world.device());
            ShardTensor::distribute(cells, &mesh, &[Shard(2)])
        };
        let x = field([[1.0, f32::NAN, 5.0], [4.0, 5.0, 6.0]])?;
        let mask = field([[1.0, 0.0, 1.0], [0.0; 3]])?;
        masked_batch_norm(x, mask, &norm)?;
        Ok([&norm.running_mean, &norm.running_var].map(|state| state.value().into_data()))
    });
    for [mean, variance] in found.unwrap() {
        mean.assert_eq(&[1.5_f32, 0.0].into(), true);
        variance.assert_eq(&[2.5_f32, 1.0].into(), true);
    }
}

#[test]
fn without_training_batches_are_normalized_by_the_running_statistics() {
    let device = burn::tensor::Device::default();
    let norm = BatchNormConfig::new(1).with_epsilon(3.0).init(&device);
    let x = Tensor::<3>::from_data([[[2.0, f32::NAN, 4.0]]], &device);
    let mask = Tensor::<3>::from_data([[[1.0, 0.0, 1.0]]], &device);
    let y = masked_batch_norm(x, mask, &norm).unwrap();
    y.into_data()
        .assert_eq(&[[[1.0_f32, 0.0, 2.0]]].into(), true);
}

/// By the definition, with land on the borders of shards, and next to outputs that land alone
/// reaches.
#[test]
fn transposed_convolutions_and_interpolations_are_renormalized() {
    let (x, mask) = ([1.0, 2.0, 3.0, 4.0, 5.0_f32], [1.0, 0.0, 0.0, 1.0, 1.0_f32]);
    let kernel = [1.0, 10.0, 100.0_f32];
    // Outputs 2·i + k of the cells i.
    let mut by_hand = [[0.0_f32; 11]; 3];
    for (i, (x, mask)) in x.iter().zip(mask).enumerate() {
        for (k, weight) in kernel.iter().enumerate() {
            by_hand[0][2 * i + k] += weight * mask * x;
            by_hand[1][2 * i + k] += mask;
            by_hand[2][2 * i + k] += 1.0;
        }
    }
    let quotient = |i: usize| {
        let [sum, present, all] = by_hand.map(|row| row[i]);
        if present > 0.0 {
            sum * all / present
        } else {
            0.0
        }
    };
    let transposed: Vec<f32> = (0..11).map(quotient).collect();
    assert_eq!(transposed[3..6], [0.0; 3]);
    // Output j lies at cell (j + 0.5) / 2 - 0.5, with weights 3/4 and 1/4.
    let linear = [1.0, 1.0, 1.0, 0.0, 0.0, 4.0, 4.0, 4.25, 4.75, 5.0_f32];
    for ranks in [1, 2, 3] {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("lon", ranks)])?;
            let field = |cells: [f32; 5]| {
                let cells = Tensor::<3>::from_data([[cells]], world.device());
                ShardTensor::distribute(cells, &mesh, &[Shard(2)])
            };
            let weight = Tensor::<3>::from_data([[kernel]], world.device());
            let options = ConvTransposeOptions::<1>::default().with_stride([2]);
            let y = masked_conv_transpose(field(x)?, field(mask)?, weight, None, &options)?;
            let linear = Interpolation::<1>::new(Mode::Linear);
            let z = masked_interpolate(field(x)?, field(mask)?, [10], linear)?;
            Ok([y, z].map(|y| y.full_tensor().into_data()))
        });
        for [y, z] in found.unwrap() {
            for (found, expected) in [(y, &transposed[..]), (z, &linear[..])] {
                let pairs = found.iter::<f32>().zip(expected);
                for (found, expected) in pairs {
                    assert!((found - expected).abs() < 1e-3, "{found} for {expected}");
                }
            }
        }
    }
}

#[test]
fn misuse_is_told() {
    let x = Tensor::<4>::ones(SHAPE, &Default::default());
    let weight = Tensor::<4>::ones([1, 4, 1, 1], &Default::default());
    let error = masked_conv(
        x.clone(),
        x.clone(),
        weight,
        None,
        &ConvOptions::<2>::default(),
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("expected [batch or 1, 1, *spatial]"),
        "{error}"
    );
    let cubic = Interpolation::<2>::new(Mode::Cubic);
    let error = masked_interpolate(x.clone(), x.clone(), [9, 4], cubic);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("expected Nearest"), "{error}");
    let error = masked_group_norm(x.clone(), x, 3, None, None, 0.0)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("3 groups of channels of [2, 4, 5, 7]"),
        "{error}"
    );
    let ones = || Tensor::<3>::ones([8, 2, 3], &Default::default());
    let turned = Tensor::<3>::ones([1, 3, 2], &Default::default());
    let error = masked_layer_norm(ones(), ones(), 2, Some(turned.into()), None, 1e-5);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("expected [1, 2, 3]"), "{error}");
    let field = || Tensor::<4>::ones([1, 4, 1, 2], &Default::default());
    let mask = Tensor::<4>::ones([1, 4, 1, 1], &Default::default());
    let options = AttentionOptions::default().with_scale(0.0);
    let error = masked_cell_attention(field(), field(), field(), mask, &options);
    assert!(error.unwrap_err().to_string().contains("scale 0"));
}

/// Attention of a field to itself, local or global, with a mask that varies in space.
struct Attention {
    weighted: bool,
}

const ATTENDED: [usize; 5] = [2, 5, 7, 2, 3];

impl Operator<5, 5> for Attention {
    fn apply<X: Field<5>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<5>>) -> X {
        let x = inputs.remove(0);
        let shape = [1, ATTENDED[1], ATTENDED[2], 1, 1];
        let mask = mask_values([1, 1, ATTENDED[1], ATTENDED[2]], self.weighted);
        let device = x.clone().into_shard().device();
        let mask = Tensor::<5>::from_data(TensorData::new(mask, shape), &device.inner());
        let mask = x.distribute_operand(mask);
        let (k, v) = (x.clone() * 2.0, x.clone() + 1.0);
        let options = NeighborhoodOptions::new([3, 3]).with_periodic([false, true]);
        let (q, near_k, near_v) = (x.clone(), k.clone(), v.clone());
        let near = masked_neighborhood_attention(q, near_k, near_v, mask.clone(), &options);
        let all = masked_cell_attention(x, k, v, mask, &AttentionOptions::default());
        near.unwrap() + all.unwrap()
    }
}

#[test]
fn attention_to_the_cells_that_count_is_that_of_one_device() {
    for weighted in [false, true] {
        check_op(
            &Attention { weighted },
            &[ATTENDED],
            &[],
            &[0, 1, 2, 3],
            2e-5,
        );
    }
}

#[test]
fn attention_reaches_no_masked_cell() {
    let run = |hole: f32| {
        let cells = mask_values([1, 1, ATTENDED[1], ATTENDED[2]], false);
        let drawn: Vec<f32> = random(ATTENDED, "x", 0).into_data().iter().collect();
        let inner = ATTENDED[3] * ATTENDED[4];
        let cell = |i: usize| cells[i / inner % cells.len()];
        let holed = drawn.iter().enumerate();
        let holed = holed.map(|(i, x)| if cell(i) == 0.0 { hole } else { *x });
        let x = TensorData::new(holed.collect::<Vec<_>>(), ATTENDED);
        let x = Tensor::<5>::from_data(x, &burn::tensor::Device::default().autodiff());
        let x = x.require_grad();
        let y = Attention { weighted: false }.apply(vec![x.clone()], Vec::new());
        let gradient = x.grad(&y.clone().square().sum().backward());
        [y.into_data(), gradient.expect("a gradient").into_data()]
    };
    for (found, expected) in run(f32::NAN).iter().zip(&run(0.0)) {
        assert!(difference(found, expected) < 1e-6);
    }
}

/// Weights of a mask beyond f16, as areas are, or slightly negative, as the cosine at a pole is.
#[test]
fn weights_may_be_areas_and_cosines() {
    let device = Default::default();
    let x = |dtype| Tensor::<3>::from_data([[[1.0, f32::NAN, 3.0, 5.0]]], (&device, dtype));
    let mask = |scale: f32| {
        let mask = [[[scale, -4.4e-8 * scale, scale, 3.0 * scale]]];
        Tensor::<3>::from_data(mask, &device)
    };
    let sums = |dtype| Tensor::<3>::ones([1, 1, 2], (&device, dtype));
    let run = |dtype, scale| {
        let options = ConvOptions::<1>::default();
        let y = masked_conv::<3, 1, _>(x(dtype), mask(scale), sums(dtype), None, &options);
        y.unwrap().into_data().iter::<f32>().collect::<Vec<_>>()
    };
    for scale in [1e-9, 1.0, 1e10] {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 1e-2)] {
            for (found, expected) in run(dtype, scale).iter().zip([2.0, 6.0, 9.0]) {
                let off = (found - expected).abs();
                assert!(off < tolerance, "{scale}: {found} for {expected}");
            }
        }
    }
    let mean = masked_mean_dims(x(DType::F16), mask(1e10), &[2]).unwrap();
    assert!((mean.into_scalar::<f32>() - 3.8).abs() < 2e-3);
}

/// A row without cells that count, next to one with some, with ε = 0.
#[test]
fn rows_that_do_not_count_have_no_part_in_the_gradient_of_a_weight() {
    let device = burn::tensor::Device::default().autodiff();
    let x = Tensor::<2>::from_data([[1.0, 4.0, 3.0], [2.0, 5.0, 7.0]], &device);
    let mask = Tensor::<2>::from_data([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]], &device);
    let weight = Tensor::<2>::ones([1, 3], &device).require_grad();
    let y = masked_layer_norm(x, mask, 1, Some(weight.clone().into()), None, 0.0).unwrap();
    let gradients = y.sum().backward();
    let gradient = weight.grad(&gradients).expect("a gradient").into_data();
    gradient.assert_eq(&[[-1.0_f32, 0.0, 1.0]].into(), false);
}
