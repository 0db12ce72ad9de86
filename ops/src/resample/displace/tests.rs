use burn::tensor::{Tensor, TensorData};
use halocline_core::{Launcher, Shard, Traffic};

use super::*;
use crate::prelude::*;
use crate::testing::{Operator, check_op, difference, random};

struct Displaced<const N: usize>(SampleOptions<N>);

impl<const D: usize, const N: usize> Operator<D, D> for Displaced<N> {
    fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<D>>) -> WithDims<X, D> {
        let displacement = inputs.remove(1);
        inputs.remove(0).displace(displacement, &self.0)
    }
}

/// Displacements are normally distributed, so some exceed a bound of two.
#[test]
fn places_are_on_any_rank_within_the_bound() {
    use Boundary::{Periodic, Reflect, Replicate, Zeros};
    let options = SampleOptions::new([2, 1]).with_out_of_bounds(OutOfBounds::Clamp);
    for (mode, boundary) in [
        (Mode::Linear, [Replicate, Periodic]),
        (Mode::Cubic, [Reflect, Zeros]),
        (Mode::Linear, [Zeros, Reflect]),
    ] {
        let options = options.with_mode(mode).with_boundary(boundary);
        let shapes = [[2, 3, 5, 7], [2, 2, 5, 7]];
        check_op(&Displaced(options), &shapes, &[], &[0, 2, 3], 1e-5);
    }
    let options = SampleOptions::new([4]).with_boundary([Periodic]);
    check_op(
        &Displaced(options),
        &[[2, 3, 6], [2, 1, 6]],
        &[],
        &[0, 2],
        1e-5,
    );
}

/// Compares values and gradients of our kernel with those of burn's operators.
#[test]
fn kernel_and_burns_operators_agree() {
    let device = burn::tensor::Device::flex().autodiff();
    let shape = [2, 2, 5, 4];
    for mode in [Mode::Nearest, Mode::Linear, Mode::Cubic] {
        let options = SampleOptions::new([1, 2])
            .with_mode(mode)
            .with_out_of_bounds(OutOfBounds::Clamp);
        let reach = [0, 1].map(|dim: usize| options.reach(dim).iter().sum::<usize>());
        let held = [2, 3, 5 + reach[0], 4 + reach[1]];
        let run = |composed: bool| {
            let leaf = |shape: [usize; 4], name| {
                let data = crate::testing::normal(&shape, name, 0);
                Tensor::<4>::from_data(data, &device).require_grad()
            };
            let (cells, points) = (leaf(held, "cells"), leaf(shape, "points"));
            let y = if composed {
                local::sampled(cells.clone(), points.clone(), &options, [1, 0])
            } else {
                let sample = Sample {
                    options,
                    first: [1, 0],
                };
                let inputs = [cells.clone(), points.clone()].map(Tensor::into_dispatch);
                Tensor::<4>::from_dispatch(ops::apply(sample, inputs))
            };
            let gradients = (y.clone() * y.clone().sin()).sum().backward();
            let gradient =
                |leaf: &Tensor<4>| leaf.grad(&gradients).expect("a gradient").into_data();
            [y.inner().into_data(), gradient(&cells), gradient(&points)]
        };
        for (ours, burns) in run(false).iter().zip(&run(true)) {
            if burns.iter::<f64>().all(|gradient| gradient == 0.0) {
                assert!(ours.iter::<f64>().all(|gradient| gradient == 0.0))
            } else {
                assert!(difference(ours, burns) < 1e-5)
            }
        }
    }
}

/// Channels are sharded and displacements are not, so displacement gradients are summed over ranks.
#[test]
fn channels_may_be_sharded() {
    let run = |ranks: usize| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("tensor", ranks)])?;
            let [x, wind] = [[1, 5, 7], [1, 1, 7]].map(|shape| random::<3>(shape, "x", 0).inner());
            let x = ShardTensor::distribute(x, &mesh, &[Shard(1)])?.require_grad();
            let wind = ShardTensor::distribute(wind, &mesh, &[halocline_core::Replicate])?;
            let wind = wind.require_grad();
            let y = displace(x.clone(), wind.clone(), &SampleOptions::new([4]))?;
            let gradients = (y.clone() * y).sum().backward();
            let gradient = |leaf: &ShardTensor<3>| leaf.grad(&gradients).expect("a gradient");
            let both = [gradient(&x), gradient(&wind)];
            Ok(both.map(|x| x.full_tensor().into_data()))
        });
        found.unwrap()
    };
    let expected = run(1).remove(0);
    for found in run(3) {
        for (found, expected) in found.iter().zip(&expected) {
            assert!(difference(found, expected) < 1e-5);
        }
    }
}

#[test]
fn whole_cells_are_a_shift() {
    let x = random::<4>([2, 3, 5, 7], "x", 0).inner();
    for boundary in [
        Boundary::Periodic,
        Boundary::Replicate,
        Boundary::Zeros,
        Boundary::Reflect,
    ] {
        for mode in [Mode::Nearest, Mode::Linear, Mode::Cubic] {
            let wind = Tensor::<4>::full([2, 1, 5, 7], -2.0, &x.device());
            let wind = Tensor::cat(vec![wind.clone() * 0.0, wind], 1);
            let options = SampleOptions::new([0, 2])
                .with_mode(mode)
                .with_corners(Corners::Centers)
                .with_boundary([boundary; 2]);
            let y = x.clone().displace(wind, &options).into_data();
            let expected = x.clone().shift(3, 2, boundary).into_data();
            assert!(difference(&y, &expected) < 1e-6, "{boundary:?} {mode:?}");
        }
    }
}

/// PyTorch rounds global coordinates, ties to the even cell.
#[test]
fn half_way_the_even_cell_is_the_nearest() {
    let x = Tensor::<3>::from([[[0.0, 1.0, 2.0, 3.0]]]);
    let half = Tensor::<3>::from([[[0.5, 0.5, 0.5, -0.5]]]);
    let options = SampleOptions::new([1]).with_mode(Mode::Nearest);
    let y = x.displace(half, &options).into_data();
    y.assert_eq(&[[[0.0_f32, 2.0, 2.0, 2.0]]].into(), true);
}

/// In f32 some of these points are farther than two cells.
#[test]
fn places_at_the_bound_are_within_it() {
    let cells: usize = 1440;
    let values: Vec<f32> = (0..cells).map(|cell| (cell * 7 % 31) as f32).collect();
    let place =
        |cell: usize| ((2 * (cell + 2).min(cells - 1) + 1) as f64 / cells as f64 - 1.0) as f32;
    let places: Vec<f32> = (0..cells).map(place).collect();
    let device = Default::default();
    let x = Tensor::<3>::from_data(TensorData::new(values.clone(), [1, 1, cells]), &device);
    let grid = Tensor::<3>::from_data(TensorData::new(places, [1, cells, 1]), &device);
    let y = x.grid_sample(grid, &SampleOptions::new([2])).into_data();
    let expected = [&values[2..], &[values[cells - 1]; 2]].concat();
    assert!(difference(&y, &TensorData::new(expected, [1, 1, cells])) < 1e-2);
}

#[test]
fn a_displacement_beyond_the_bound_is_an_error_on_all_ranks() {
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let x = ShardTensor::<3>::ones([1, 1, 4], &mesh, &[Shard(2)])?;
            // Only the second rank exceeds it.
            let wind = Tensor::<3>::from([[[0.0, 1.0, 0.5, f32::NAN]]]);
            let wind = wind.to_device(world.device());
            let strong = wind.clone().zeros_like() + 2.5;
            for (wind, told) in [(wind, "inf cells"), (strong, "2.5 cells")] {
                let wind = ShardTensor::distribute(wind, &mesh, &[Shard(2)])?;
                let before = world.comm_stats();
                let error = displace(x.clone(), wind, &SampleOptions::new([2])).unwrap_err();
                let error = error.to_string();
                assert!(
                    error.contains(told) && error.contains("OutOfBounds::Clamp"),
                    "{error}"
                );
                let sent = world.comm_stats().since(&before);
                assert_eq!(sent.of(Traffic::Exchange).bytes, 0);
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn more_cells_than_are_numbered_are_refused_on_all_ranks_before_anything_is_sent() {
    let run = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("x", 2)])?;
        let x = ShardTensor::<3>::ones([1, 1, 5], &mesh, &[Shard(2)])?;
        for (bound, cells) in [(1 << 30, 2_147_483_652), (usize::MAX, usize::MAX)] {
            let before = world.comm_stats();
            let error = displace(x.clone(), x.clone(), &SampleOptions::new([bound]));
            let error = error.unwrap_err().to_string();
            // The same on both ranks, which hold three and two cells.
            let told = format!("{cells} cells of a channel on a rank");
            assert!(error.contains(&told), "{error}");
            assert_eq!(world.comm_stats(), before);
        }
        Ok(())
    });
    run.unwrap();
}

#[test]
fn misuse_is_told() {
    let x = ShardTensor::solo(Tensor::<3>::ones([1, 2, 4], &Default::default()));
    let error = displace(x.clone(), x.clone(), &SampleOptions::new([1])).unwrap_err();
    assert!(
        error.to_string().contains("expected [batch, 1, *spatial]"),
        "{error}"
    );
    let error = grid_sample(x.clone(), x, &SampleOptions::new([1])).unwrap_err();
    assert!(error.to_string().contains("expected [1, 4, 1]"), "{error}");
}

/// Gradients at points exactly on cells, as in PyTorch: zero at the end cells where values beyond
/// stay constant or reflect.
#[test]
fn places_on_the_first_and_last_cell_have_no_gradient() {
    for boundary in [Boundary::Replicate, Boundary::Reflect] {
        let device = burn::tensor::Device::default().autodiff();
        let x = Tensor::<3>::from_data([[[1.0, 2.0, 4.0, 8.0]]], &device);
        let grid = Tensor::<3>::from_data([[[-1.0], [-0.3], [0.4], [1.0]]], &device);
        let grid = grid.require_grad();
        let options = SampleOptions::new([1]).with_corners(Corners::Centers);
        let y = x.grid_sample(grid.clone(), &options.with_boundary([boundary]));
        let gradient = grid
            .grad(&y.sum().backward())
            .expect("a gradient")
            .into_data();
        let gradient: Vec<f32> = gradient.iter().collect();
        for (found, slope) in gradient.iter().zip([0.0, 2.0, 4.0, 0.0]) {
            assert!(
                (found - 1.5 * slope).abs() < 1e-5,
                "{boundary:?}: {gradient:?}"
            );
        }
    }
}
