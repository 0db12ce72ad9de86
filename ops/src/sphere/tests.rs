//! Tests of the transforms for every sharding, of their inverses, and of known harmonics.

use std::f64::consts::PI;
use std::sync::Arc;

use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use halocline_core::{Launcher, Replicate, Shard, ShardTensor};

use super::contraction::{Contraction, Factor, To};
use super::legendre::Function;
use crate::prelude::*;
use crate::sphere::{isht, sht, sphere_conv, sphere_conv_between};
use crate::testing::{Operator, check_op, difference, random};

const GRIDS: [SphereGrid; 3] = [
    SphereGrid::LegendreGauss,
    SphereGrid::Lobatto,
    SphereGrid::Equiangular,
];

struct Harmonics(Sht);

impl Operator<3, 4> for Harmonics {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> WithDims<X, 4> {
        SphereField::sht::<4>(inputs.remove(0), &self.0)
    }
}

struct Grid(Sht);

impl Operator<4, 3> for Grid {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> WithDims<X, 3> {
        SphereField::isht::<3>(inputs.remove(0), &self.0)
    }
}

/// Round trip through vector harmonics.
struct Wind(Sht);

impl Operator<4, 4> for Wind {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> WithDims<X, 4> {
        let y = SphereField::vector_sht::<5>(inputs.remove(0), &self.0);
        SphereField::vector_isht::<4>(y, &self.0)
    }
}

/// One channel matrix per degree, from one grid to another.
struct Filter([Sht; 2]);

impl Operator<4, 4> for Filter {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, mut parameters: Vec<Tensor<4>>) -> X {
        let weight = parameters.remove(0).unsqueeze_dim::<5>(3); // [in, out, degrees, 1, 2]
        let transforms = self.0.each_ref();
        let y = inputs.remove(0).sphere_conv_between(weight, transforms);
        y.resolve()
    }
}

/// Interpolation by harmonics.
struct Resampled([Sht; 2]);

impl Operator<4, 4> for Resampled {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
        inputs.remove(0).sphere_resample::<5>(self.0.each_ref())
    }
}

struct Power;

impl Operator<4, 4> for Power {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
        inputs.remove(0).sphere_power().resolve()
    }
}

#[test]
fn fields_and_harmonics_on_shards_of_all_dims() {
    let sht = Sht::new([5, 8], SphereGrid::LegendreGauss).unwrap();
    check_op(&Harmonics(sht.clone()), &[[3, 5, 8]], &[], &[0, 1, 2], 3e-6);
    check_op(&Grid(sht), &[[3, 5, 5, 2]], &[], &[0, 1, 2], 3e-6);
    check_op(&Power, &[[3, 4, 5, 2]], &[], &[0, 1, 2], 1e-6);
}

#[test]
fn convolutions_on_shards_of_all_dims() {
    let sht = Sht::new([5, 8], SphereGrid::Lobatto).unwrap();
    let other = Sht::new([4, 6], SphereGrid::LegendreGauss).unwrap();
    let resampled = Resampled([sht.clone(), other.clone()]);
    check_op(&resampled, &[[2, 3, 5, 8]], &[], &[0, 1, 2, 3], 5e-6);
    for transforms in [[sht.clone(), sht.clone()], [sht, other]] {
        check_op(
            &Filter(transforms),
            &[[2, 3, 5, 8]],
            &[[3, 2, 4, 2]],
            &[0, 1, 2, 3],
            5e-6,
        );
    }
}

/// The convolution multiplies no orders above the degree, which are zero.
#[test]
fn a_convolution_is_a_product_of_all_harmonics() {
    let sht = Sht::new([9, 16], SphereGrid::LegendreGauss).unwrap();
    let sht = sht.with_orders(6).unwrap();
    let run = |convolve: &dyn Fn(Tensor<4>, Tensor<5>) -> Tensor<4>| {
        let x = random::<4>([2, 3, 9, 16], "x", 0).detach().require_grad();
        let weight = random::<5>([3, 2, sht.degrees(), 1, 2], "weight", 0);
        let weight = weight.detach().require_grad();
        let y = convolve(x.clone(), weight.clone());
        let cotangent = random::<4>(y.dims(), "cotangent", 0).detach();
        let gradients = (y.clone() * cotangent).sum().backward();
        let of_x = x.grad(&gradients).expect("a gradient").into_data();
        let of_weight = weight.grad(&gradients).expect("a gradient").into_data();
        [y.inner().into_data(), of_x, of_weight]
    };
    let found = run(&|x, weight| x.sphere_conv(weight, &sht));
    let expected = run(&|x, weight| {
        let harmonics = SphereField::sht::<5>(x, &sht);
        SphereField::isht::<4>(harmonics.mode_product(weight), &sht)
    });
    assert_eq!(found, expected);
    let finer = Sht::new([12, 20], SphereGrid::LegendreGauss).unwrap();
    let different = finer.clone();
    let finer = finer.with_degrees(9).unwrap().with_orders(6).unwrap();
    let found = run(&|x, weight| x.sphere_conv_between(weight, [&sht, &finer]));
    let expected = run(&|x, weight| {
        let harmonics = SphereField::sht::<5>(x, &sht);
        SphereField::isht::<4>(harmonics.mode_product(weight), &finer)
    });
    assert_eq!(found, expected);
    let x = ShardTensor::solo(Tensor::<4>::ones([1, 1, 9, 16], &Default::default()));
    let weight = Tensor::<5>::ones([1, 1, 9, 1, 2], &Default::default());
    let error = sphere_conv_between(x, weight, [&sht, &different]).unwrap_err();
    let expected = "transforms of [9, 6] and [11, 11] degrees and orders";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn vector_fields_on_shards_of_all_dims() {
    let sht = Sht::new([6, 7], SphereGrid::Lobatto).unwrap();
    check_op(&Wind(sht), &[[2, 2, 6, 7]], &[], &[0, 1, 2, 3], 3e-6);
}

/// `Y_2^1` with the Condon–Shortley phase has one coefficient.
#[test]
fn a_harmonic_has_one_coefficient() {
    let [latitudes, longitudes] = [9, 12];
    for grid in GRIDS {
        let sht = Sht::new([latitudes, longitudes], grid).unwrap();
        let cells = sht.cosines().iter().flat_map(|x| {
            let radius = -(15.0 / (8.0 * PI)).sqrt() * x * (1.0 - x * x).sqrt();
            let angle = move |j: usize| 2.0 * PI * j as f64 / longitudes as f64;
            (0..longitudes).map(move |j| radius * angle(j).cos())
        });
        let cells = TensorData::new(cells.collect::<Vec<f64>>(), [latitudes, longitudes]);
        let x = Tensor::<2>::from_data(cells, (&Default::default(), DType::F64));
        let y: Tensor<3> = SphereField::sht(x, &sht);
        let mut expected = vec![0.0_f64; y.dims().iter().product()];
        // The real part is half the harmonic and half its conjugate.
        expected[(2 * sht.degrees() + 1) * 2] = 0.5;
        let expected = TensorData::new(expected, y.dims());
        let off = difference(&y.into_data(), &expected);
        assert!(off < 2e-13, "{grid:?}: {off:e}");
    }
}

#[test]
fn the_inverse_gives_back_what_the_grid_resolves() {
    for grid in GRIDS {
        for norm in [ShtNorm::Ortho, ShtNorm::FourPi, ShtNorm::Schmidt] {
            let sht = Sht::new([11, 16], grid).unwrap().with_norm(norm);
            let x = random::<3>([2, 11, 16], "x", 0)
                .inner()
                .cast(FloatDType::F64);
            let smooth = |x: Tensor<3>| -> Tensor<3> {
                SphereField::isht(SphereField::sht::<4>(x, &sht), &sht)
            };
            let once = smooth(x);
            let off = difference(&smooth(once.clone()).into_data(), &once.into_data());
            assert!(off < 1e-12, "{grid:?}, {norm:?}: {off:e}");
        }
    }
}

#[test]
fn degrees_and_orders_that_a_transform_has_not_are_refused() {
    let sht = || Sht::new([6, 12], SphereGrid::LegendreGauss).unwrap();
    for degrees in [0, 8] {
        let error = sht().with_degrees(degrees).unwrap_err().to_string();
        assert!(
            error.contains(&format!("{degrees} degrees; expected 1 to 7")),
            "{error}"
        );
    }
    for orders in [0, 7] {
        let error = sht().with_orders(orders).unwrap_err().to_string();
        assert!(
            error.contains(&format!("{orders} orders; expected 1 to 6")),
            "{error}"
        );
    }
}

#[test]
fn sums_by_the_halves_are_those_of_the_whole_sphere() {
    for function in [Function::Value, Function::Slope, Function::Azimuthal] {
        for latitudes in [6, 7] {
            let sht = Sht::new([latitudes, 24], SphereGrid::LegendreGauss).unwrap();
            let sht = sht.with_degrees(11).unwrap();
            let table = sht.table(function, 2..13, DType::F32);
            for (to, factor) in [(To::Degrees, Factor::PlusI), (To::Points, Factor::MinusI)] {
                let contraction = Contraction {
                    table: table.clone(),
                    to,
                    points: sht.weights().into(),
                    degrees: (0..11)
                        .map(|degree| 1.0 + degree as f64)
                        .collect::<Arc<[f64]>>(),
                    factor,
                };
                let size = if to == To::Degrees { latitudes } else { 11 };
                let run = |composed: bool| {
                    let x = random::<4>([35, size, 11, 2], "x", 0)
                        .detach()
                        .require_grad();
                    let y = if composed {
                        contraction.composed(x.clone())
                    } else {
                        contraction.clone().run(x.clone())
                    };
                    let weight = random::<4>(y.dims(), "y", 0).detach();
                    let gradients = (y.clone() * weight).sum().backward();
                    [y.inner(), x.grad(&gradients).unwrap()].map(Tensor::into_data)
                };
                for (halves, whole) in run(false).iter().zip(&run(true)) {
                    let off = difference(halves, whole);
                    assert!(off < 2e-6, "{function:?} to {to:?}: {off:e}");
                }
            }
        }
    }
}

#[test]
fn other_sizes_are_refused_before_anything_is_sent() {
    Launcher::local(2)
        .check(false)
        .run(|world| {
            if world.rank() == 1 {
                return Ok(());
            }
            let transform = Sht::new([6, 8], SphereGrid::Lobatto)?;
            let mesh = world.mesh([("x", 2)])?;
            let x = ShardTensor::<2>::ones([6, 9], &mesh, &[Shard(0)])?;
            let error = sht::<2, 3>(x, &transform).unwrap_err().to_string();
            assert!(
                error.contains("[6, 9]; expected [.., latitudes, longitudes] with [6, 8] last"),
                "{error}"
            );
            let x = ShardTensor::<3>::ones([5, 5, 2], &mesh, &[Replicate])?;
            let error = isht::<3, 2>(x.redistribute(&[Shard(2)]), &transform);
            let error = error.unwrap_err().to_string();
            assert!(error.contains("isht: no rule for Shard(2)"), "{error}");
            let x = ShardTensor::<4>::ones([1, 2, 6, 8], &mesh, &[Shard(2)])?;
            let weight = Tensor::<5>::ones([2, 3, 4, 1, 2], world.device());
            let error = sphere_conv(x, weight, &transform).unwrap_err().to_string();
            assert!(
                error.contains("sphere_conv: x [1, 2, 5, 5, 2] and weight [2, 3, 4, 1, 2]"),
                "{error}"
            );
            let x = ShardTensor::<4>::ones([1, 2, 6, 8], &mesh, &[Shard(2)])?;
            let weight = ShardTensor::<5>::ones([2, 3, 5, 1, 2], &mesh, &[Shard(0)])?;
            let error = sphere_conv(x, weight, &transform).unwrap_err().to_string();
            let expected = "sphere_conv: no rule for Shard(2) of x with Shard(0) of weight";
            assert!(error.contains(expected), "{error}");
            // The axis that shards latitude moves to the orders.
            let x = ShardTensor::<4>::ones([1, 2, 6, 8], &mesh, &[Shard(2)])?;
            let weight = ShardTensor::<5>::ones([2, 3, 5, 5, 2], &mesh, &[Shard(2)])?;
            let error = sphere_conv(x, weight, &transform).unwrap_err().to_string();
            let expected = "sphere_conv: no rule for Shard(3) of x with Shard(2) of weight";
            assert!(error.contains(expected), "{error}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn power_in_half_precision_is_resolved_where_orders_are_sharded() {
    let result = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("orders", 2)])?;
        let device = world.device().clone().inner();
        let x = Tensor::<3>::ones([4, 5, 2], (&device, DType::BF16));
        let x = ShardTensor::distribute(x, &mesh, &[Shard(1)])?;
        let power = x.sphere_power();
        assert_eq!(power.placements(), [Replicate]);
        let power = power.local().to_data();
        // Order zero counts once, the others twice.
        assert_eq!(power.iter::<f32>().collect::<Vec<_>>(), [18.0; 4]);
        Ok(())
    });
    result.unwrap();
}
