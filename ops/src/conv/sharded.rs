//! Compares convolutions on shards with those on one device.

use super::*;
use crate::prelude::*;
use crate::testing::{Operator, check_op, random_leaf};
use burn::tensor::{FloatDType, Tensor, TensorData};
use halocline_core::{Boundary, DeviceMesh, Launcher, Overlap, Placement, Replicate, Shard};

struct Conv<const N: usize>(ConvOptions<N>);

impl<const D: usize, const N: usize> Operator<D, D> for Conv<N> {
    fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, mut parameters: Vec<Tensor<D>>) -> X {
        inputs.remove(0).conv(parameters.remove(0), None, &self.0)
    }
}

#[test]
fn weather_padding_is_periodic_in_longitude_and_zero_beyond_the_poles() {
    let padding = [
        Padding::new(1, Boundary::Zeros),
        Padding::new(2, Boundary::Periodic),
    ];
    let options = ConvOptions::default().with_padding(padding);
    check_op(
        &Conv(options),
        &[[2, 3, 7, 9]],
        &[[4, 3, 3, 5]],
        &[0, 2, 3],
        1e-5,
    );
}

/// Checks that results on a mesh of two by two ranks have the same bits whether those that need no
/// halo are computed before it arrives or after.
fn check_overlap(results: impl Fn(&DeviceMesh) -> Result<Vec<TensorData>> + Sync) {
    let run = |overlap| {
        let launcher = Launcher::local(4).overlap(overlap);
        let found = launcher.collect(|world| results(&world.mesh([("lat", 2), ("lon", 2)])?));
        found.unwrap()
    };
    let (early, late) = (run(Overlap::On), run(Overlap::Off));
    for (early, late) in early.iter().flatten().zip(late.iter().flatten()) {
        early.assert_eq(late, true);
    }
}

/// This rank's result of a convolution of random numbers with weights of this shape.
fn convolved(
    mesh: &DeviceMesh,
    (shape, placements): ([usize; 4], [Placement; 2]),
    weight: [usize; 4],
    options: &ConvOptions<2>,
) -> Result<TensorData> {
    let x = random_leaf(shape, "x", mesh, &placements)?.inner();
    let weight = random_leaf(weight, "weight", mesh, &[Replicate; 2])?.inner();
    let y = conv(x, weight.into_local(), None, options)?;
    Ok(y.into_local().into_data())
}

/// On any mesh, with any boundary and window.
#[test]
fn halos_may_travel_while_the_interior_is_computed() {
    let boundaries = [Boundary::Zeros, Boundary::Periodic, Boundary::Reflect];
    check_overlap(|mesh| {
        let mut found = Vec::new();
        for (case, [low, high]) in [[0, 1], [1, 1], [1, 2], [2, 0]].into_iter().enumerate() {
            let (low, high) = (boundaries[low], boundaries[high]);
            let options = ConvOptions::default()
                .with_padding([Padding::new(1, low), Padding::new(2, high)])
                .with_stride([1 + case % 2, 1])
                .with_dilation([1, 1 + case / 2]);
            for placements in [[Shard(2), Shard(3)], [Shard(0), Shard(2)]] {
                let x = ([3, 2, 13, 19], placements);
                found.push(convolved(mesh, x, [4, 2, 3, 3], &options)?);
            }
        }
        Ok(found)
    });
}

/// Shards that hold a periodic dim whole compute gradients from a periodic cotangent, others do
/// not.
#[test]
fn gradients_across_periodic_ends_are_those_of_any_mesh() {
    let behind = Padding {
        low: 2,
        ..Padding::new(0, Boundary::Periodic)
    };
    let around = Padding::new(1, Boundary::Periodic);
    for rows in [around, behind, Padding::new(1, Boundary::PoleEdge)] {
        let columns = if rows == behind { around } else { behind };
        let options = ConvOptions::default().with_padding([rows, columns]);
        check_op(
            &Conv(options),
            &[[2, 8, 9, 12]],
            &[[8, 8, 3, 3]],
            &[0, 2, 3],
            1e-5,
        );
    }
}

/// As many channels and rows as Winograd's method requires, with shards that cut its tiles.
#[test]
fn rows_of_several_results_may_be_cut_by_shards() {
    let padding = [
        Padding::new(1, Boundary::Replicate),
        Padding::new(1, Boundary::Periodic),
    ];
    let options = ConvOptions::default().with_padding(padding);
    check_op(
        &Conv(options),
        &[[2, 8, 27, 9]],
        &[[9, 8, 3, 3]],
        &[0, 2, 3],
        1e-5,
    );
}

#[test]
fn rows_of_several_results_may_be_computed_while_halos_travel() {
    check_overlap(|mesh| {
        let x = ([2, 8, 41, 19], [Shard(2), Shard(3)]);
        let options = ConvOptions::default().with_padding([Padding::new(1, Boundary::Periodic); 2]);
        Ok(vec![convolved(mesh, x, [8, 8, 3, 3], &options)?])
    });
}

#[test]
fn a_side_may_have_a_boundary_of_its_own() {
    let side = Padding {
        low: 2,
        high: 1,
        boundary: [Boundary::Reflect, Boundary::Replicate],
    };
    let options = ConvOptions::default()
        .with_padding([side, side])
        .with_stride([2, 1]);
    check_op(
        &Conv(options),
        &[[1, 2, 8, 6]],
        &[[2, 2, 3, 2]],
        &[2, 3],
        1e-5,
    );
}

#[test]
fn strides_dilations_and_groups_may_be_anything() {
    let options = ConvOptions::<1>::default()
        .with_stride([3])
        .with_dilation([2])
        .with_groups(2)
        .with_padding([Padding::zeros(0, 3)]);
    check_op(&Conv(options), &[[2, 4, 17]], &[[6, 2, 4]], &[2], 1e-5);
}

#[test]
fn a_halo_may_span_several_neighbours() {
    let options = ConvOptions::<1>::default().with_padding([Padding::new(8, Boundary::Periodic)]);
    check_op(&Conv(options), &[[1, 1, 6]], &[[1, 1, 17]], &[2], 1e-5);
}

#[test]
fn three_dims_with_uneven_padding() {
    let padding = [
        Padding::zeros(1, 0),
        Padding::new(1, Boundary::Periodic),
        Padding::zeros(0, 2),
    ];
    let options = ConvOptions::default()
        .with_padding(padding)
        .with_stride([1, 2, 2]);
    check_op(
        &Conv(options),
        &[[1, 2, 5, 6, 4]],
        &[[3, 2, 2, 3, 3]],
        &[2, 3, 4],
        1e-5,
    );
}

#[test]
fn three_dims_on_a_three_dimensional_mesh() {
    let run = |ranks: usize| {
        let outputs = Launcher::local(ranks).collect(|world| {
            let sizes = if ranks == 1 { [1, 1, 1] } else { [2, 2, 2] };
            let mesh = world.mesh([("z", sizes[0]), ("y", sizes[1]), ("x", sizes[2])])?;
            let placements = [Shard(2), Shard(3), Shard(4)];
            let x = random_leaf([1, 2, 5, 3, 7], "x", &mesh, &placements)?;
            let options =
                ConvOptions::default().with_padding([Padding::new(1, Boundary::Periodic); 3]);
            let weight = Tensor::<5>::ones([2, 2, 3, 3, 3], world.device());
            let y = x.conv(weight, None, &options);
            Ok(y.full_tensor().into_data())
        });
        outputs.unwrap()
    };
    let whole = run(1).remove(0);
    for y in run(8) {
        assert!(crate::testing::difference(&y, &whole) < 1e-6);
    }
}

#[test]
fn sharded_channels_are_refused_before_anything_is_sent() {
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("model", 2)])?;
            let x = ShardTensor::<4>::ones([1, 4, 6, 6], &mesh, &[Shard(1)])?;
            let weight = Tensor::<4>::ones([2, 4, 3, 3], world.device());
            let before = world.comm_stats();
            let error = conv(x, weight, None, &ConvOptions::<2>::default()).unwrap_err();
            assert_eq!(
                error.to_string(),
                "conv2d: no rule for Shard(1) on axis \"model\"; redistribute(&[Replicate]) first"
            );
            assert_eq!(world.comm_stats(), before);
            Ok(())
        })
        .unwrap();
}

struct Joined<const N: usize>(ConvOptions<N>);

impl<const D: usize, const N: usize> Operator<D, D> for Joined<N> {
    fn apply<X: Field<D>>(&self, inputs: Vec<X>, mut parameters: Vec<Tensor<D>>) -> X {
        let fields = inputs.into_iter().map(Field::into_shard).collect();
        let y = conv_cat(fields, parameters.remove(0), None, &self.0);
        X::from_shard(y.unwrap())
    }
}

#[test]
fn fields_may_be_joined_along_channels() {
    let around = [
        Padding::new(1, Boundary::Replicate),
        Padding::new(1, Boundary::Periodic),
    ];
    let options = ConvOptions::default().with_padding(around);
    let shapes = |channels: &[usize]| -> Vec<[usize; 4]> {
        channels
            .iter()
            .map(|channels| [2, *channels, 9, 11])
            .collect()
    };
    // Direct sums, Winograd's method, groups that span both fields, more than two fields.
    let cases = [
        (&[2, 3][..], [4, 5], 1),
        (&[9, 8], [8, 17], 1),
        (&[1, 3], [4, 2], 2),
        (&[1, 2, 2, 1], [3, 6], 1),
    ];
    for (channels, [outputs, inputs], groups) in cases {
        let joined = Joined(options.with_groups(groups));
        let weight = [outputs, inputs, 3, 3];
        check_op(&joined, &shapes(channels), &[weight], &[0, 2, 3], 1e-5);
    }
}

/// `conv_cat` has the bits of `conv` on the concatenation, with gradients, in every float type,
/// with and without overlap.
#[test]
fn joined_fields_need_not_be_made() {
    for (overlap, dtype) in [
        (Overlap::On, FloatDType::F32),
        (Overlap::Off, FloatDType::F64),
        (Overlap::On, FloatDType::BF16),
    ] {
        check_joined(Launcher::local(4).overlap(overlap), dtype);
    }
}

fn check_joined(launcher: Launcher, dtype: FloatDType) {
    let found = launcher.collect(|world| {
        let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
        let random = |name: &str, shape: [usize; 4], placements: [Placement; 2]| {
            let x = random_leaf(shape, name, &mesh, &placements)?;
            Ok::<_, Error>(x.map(|x| x.cast(dtype).detach()))
        };
        let shards = [Shard(2), Shard(3)];
        let fields = [
            random("a", [2, 9, 23, 37], shards)?,
            random("b", [2, 8, 23, 37], shards)?,
        ];
        let weight = random("weight", [8, 17, 3, 3], [Replicate; 2])?.into_local();
        let options = ConvOptions::default().with_padding([Padding::new(1, Boundary::Periodic); 2]);
        let results = |join: bool| {
            let fields = fields.clone().map(ShardTensor::require_grad);
            let weight = weight.clone().require_grad();
            let y = if join {
                conv(cat(fields.to_vec(), 1)?, weight.clone(), None, &options)?
            } else {
                conv_cat(fields.to_vec(), weight.clone(), None, &options)?
            };
            let y = y.into_local();
            let gradients = (y.clone() * y.clone()).sum().backward();
            let of_fields = fields.map(|field| field.local().grad(&gradients).unwrap());
            let mut found = of_fields.to_vec();
            found.extend([y.inner(), weight.grad(&gradients).unwrap()]);
            Ok::<_, Error>(found.into_iter().map(Tensor::into_data).collect::<Vec<_>>())
        };
        Ok([results(true)?, results(false)?])
    });
    for [joined, apart] in found.unwrap() {
        for (joined, apart) in joined.iter().zip(&apart) {
            apart.assert_eq(joined, true);
        }
    }
}

/// Padding alone would produce outputs, which no rank would own.
#[test]
fn a_field_without_cells_is_refused() {
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let options = ConvOptions::default().with_padding([Padding::zeros(1, 1); 2]);
            for shape in [[1, 1, 0, 5], [1, 1, 5, 0]] {
                let x = ShardTensor::<4>::zeros(shape, &mesh, &[Shard(2)])?;
                let weight = Tensor::<4>::ones([1, 1, 2, 2], world.device());
                let error = conv(x, weight, None, &options).unwrap_err().to_string();
                assert!(
                    error.contains("conv2d: dim") && error.contains("no cells"),
                    "{error}"
                );
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn weights_that_do_not_fit_are_told() {
    let x = ShardTensor::solo(Tensor::<4>::ones([1, 4, 6, 6], &Default::default()));
    let weight = Tensor::<4>::ones([2, 3, 3, 3], &Default::default());
    let error = conv(x.clone(), weight, None, &ConvOptions::<2>::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("weight [2, 3, 3, 3] with 1 groups on 4 channels"),
        "{error}"
    );
    let layer = burn::nn::conv::Conv2dConfig::new([3, 2], [3, 3]).init(&Default::default());
    assert_eq!(x.plan_of(&layer).unwrap_err().to_string(), error);
    let weight = Tensor::<4>::ones([2, 4, 3, 3], &Default::default());
    let bias = Some(Tensor::<1>::ones([3], &Default::default()).into());
    let error = conv(
        x.clone(),
        weight.clone(),
        bias,
        &ConvOptions::<2>::default(),
    );
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("bias [3] for 2 channels")
    );
    let options = (&Default::default(), burn::tensor::DType::F64);
    let double = Tensor::<4>::ones([2, 4, 3, 3], options);
    let error = conv(x.clone(), double, None, &ConvOptions::<2>::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("a parameter of F64 for a tensor of F32"),
        "{error}"
    );
    let error = conv(x, weight, None, &ConvOptions::<1>::default());
    assert!(error.unwrap_err().to_string().contains("options of 1 dims"));
}
