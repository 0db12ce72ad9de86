use super::*;
use crate::prelude::*;
use crate::testing::{Operator, check_op};
use burn::tensor::DType;
use halocline_core::{Boundary, Launcher, Shard};

struct Pool(PoolOptions<2>, Kind);

enum Kind {
    Max,
    Average,
    Norm,
}

impl Operator<4, 4> for Pool {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> WithDims<X, 4> {
        let x = inputs.remove(0);
        match self.1 {
            Kind::Max => x.max_pool(&self.0),
            Kind::Average => x.avg_pool(&self.0),
            Kind::Norm => x.lp_pool(3.0, &self.0),
        }
    }
}

#[test]
fn windows_in_padding_alone_have_no_maximum() {
    let x = ShardTensor::solo(Tensor::<4>::zeros([1, 1, 5, 5], &Default::default()));
    let options = PoolOptions::new([2, 2]).with_padding([Padding::zeros(0, 2); 2]);
    let every = max_pool(x.clone(), &options.with_stride([1, 1]));
    let error = every.unwrap_err().to_string();
    assert!(
        error.contains("window 5 of 6 lies in padding alone"),
        "{error}"
    );
    // A stride may skip such windows.
    assert_eq!(max_pool(x.clone(), &options).unwrap().dims(), [1, 1, 3, 3]);
    let nothing = PoolOptions::new([0, 2]);
    let error = max_pool(x.clone(), &nothing).unwrap_err().to_string();
    assert!(error.contains("must not be zero"), "{error}");
    assert!(avg_pool(x, &options).is_ok());
}

/// As in PyTorch.
#[test]
fn windows_that_begin_inside_may_be_longer_than_the_field() {
    let x = Tensor::<4>::from([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]]]);
    let options = PoolOptions::new([4, 4]).with_stride([2, 2]);
    let error = max_pool(ShardTensor::solo(x.clone()), &options).unwrap_err();
    assert!(
        error.to_string().contains("does not fit into 3 cells"),
        "{error}"
    );
    let options = options.with_rounding(Rounding::Ceil);
    let y = x.clone().max_pool(&options).into_data();
    y.assert_eq(&[[[[9.0_f32]]]].into(), true);
    x.avg_pool(&options)
        .into_data()
        .assert_eq(&[[[[5.0_f32]]]].into(), true);
    for kind in [Kind::Max, Kind::Average, Kind::Norm] {
        check_op(
            &Pool(options, kind),
            &[[2, 2, 3, 7]],
            &[],
            &[0, 1, 2, 3],
            1e-5,
        );
    }
}

/// Windows at the edge count fewer cells; their factor is not exact in 24 bits.
#[test]
fn averages_of_f64_are_as_exact_as_that() {
    let device = burn::tensor::Device::default();
    let x = Tensor::<4>::ones([1, 1, 5, 5], (&device, DType::F64));
    let options = PoolOptions::new([5, 5]).with_padding([Padding::zeros(2, 2); 2]);
    let options = options.with_count(PaddingCount::Excluded);
    let y = avg_pool(ShardTensor::solo(x), &options).unwrap();
    for value in y.local().clone().into_data().iter::<f64>() {
        assert!((value - 1.0).abs() < 1e-15, "{value}");
    }
}

#[test]
fn overlapping_periodic_windows() {
    let padding = [Padding::zeros(1, 0), Padding::new(1, Boundary::Periodic)];
    let options = PoolOptions::new([3, 3])
        .with_stride([2, 1])
        .with_padding(padding);
    for kind in [Kind::Max, Kind::Average] {
        check_op(
            &Pool(options, kind),
            &[[2, 2, 9, 7]],
            &[],
            &[0, 1, 2, 3],
            1e-6,
        );
    }
}

/// As in PyTorch, the power of such a window's norm is scaled by the ratio of all its cells to
/// those that count.
#[test]
fn norms_over_the_end_grow_as_averages_do() {
    let options = PoolOptions::new([2]).with_rounding(Rounding::Ceil);
    let x = Tensor::<3>::from_floats([[[3.0, 4.0, 6.0]]], &Default::default());
    let y: Vec<f32> = x.lp_pool(2.0, &options).into_data().iter().collect();
    assert!(
        (y[0] - 5.0).abs() < 1e-5 && (y[1] - 72.0_f32.sqrt()).abs() < 1e-5,
        "{y:?}"
    );
    let options = PoolOptions::new([3, 2]).with_rounding(Rounding::Ceil);
    check_op(
        &Pool(options, Kind::Norm),
        &[[2, 2, 8, 7]],
        &[],
        &[0, 1, 2, 3],
        1e-5,
    );
}

#[test]
fn norms_of_partial_values_are_refused_in_any_precision() {
    for dtype in [DType::F32, DType::BF16] {
        let error = halocline_core::Launcher::local(2).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let cells = Tensor::<3>::from_data([[[1.0, 2.0]]], (world.device(), dtype));
            let sum = [halocline_core::Partial(halocline_core::ReduceOp::Sum)];
            let layout = halocline_core::Layout::new(mesh.shape(), &[1, 1, 2], &sum)?;
            let partial = ShardTensor::from_parts(cells, layout, mesh);
            lp_pool(partial, 2.0, &PoolOptions::new([2])).map(|_| ())
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("lp_pool1d"), "{error}");
    }
}

/// With boundaries that repeat cells of the field, the average of ones is one.
#[test]
fn averages_count_what_a_boundary_supplies() {
    let ones = Tensor::<3>::ones([1, 1, 5], &Default::default());
    for boundary in [Boundary::Periodic, Boundary::Reflect, Boundary::Replicate] {
        for count in [PaddingCount::Included, PaddingCount::Excluded] {
            for rounding in [Rounding::Floor, Rounding::Ceil] {
                let options = PoolOptions::new([2])
                    .with_padding([Padding::new(1, boundary)])
                    .with_rounding(rounding)
                    .with_count(count);
                let y: Vec<f32> = ones.clone().avg_pool(&options).into_data().iter().collect();
                assert!(y.iter().all(|&y| y == 1.0), "{options:?}: {y:?}");
            }
        }
    }
}

#[test]
fn a_window_over_the_end_takes_nothing_from_the_other() {
    let x = Tensor::<3>::from_floats([[[1.0, 2.0, 3.0, 4.0, 5.0]]], &Default::default());
    let options = PoolOptions::new([2])
        .with_padding([Padding::new(0, Boundary::Periodic)])
        .with_rounding(Rounding::Ceil);
    let y: Vec<f32> = (x.clone() * -1.0)
        .max_pool(&options)
        .into_data()
        .iter()
        .collect();
    assert_eq!(y, [-1.0, -3.0, -5.0]);
    let y: Vec<f32> = x.avg_pool(&options).into_data().iter().collect();
    assert_eq!(y, [1.5, 3.5, 5.0]);
}

#[test]
fn windows_that_count_field_cells_only() {
    let options = PoolOptions::new([4, 2])
        .with_stride([3, 2])
        .with_padding([Padding::zeros(2, 1), Padding::zeros(1, 1)])
        .with_rounding(Rounding::Ceil)
        .with_count(PaddingCount::Excluded);
    check_op(
        &Pool(options, Kind::Average),
        &[[1, 2, 11, 8]],
        &[],
        &[2, 3],
        1e-6,
    );
}

/// Reference gradient of a maximum: the first cell of the field that holds it receives the
/// cotangent.
fn gradient_by_cells<const D: usize, const N: usize>(
    x: &[f32],
    shape: [usize; D],
    cotangent: &[f32],
    outputs: [usize; D],
    options: &PoolOptions<N>,
) -> Vec<f32> {
    let coords = |mut index: usize, shape: &[usize; D]| {
        let mut coords = [0; D];
        for dim in (0..D).rev() {
            coords[dim] = index % shape[dim];
            index /= shape[dim];
        }
        coords
    };
    let taps = options.kernel.iter().product::<usize>();
    let mut gradient = vec![0.0; x.len()];
    for (output, cotangent) in cotangent.iter().enumerate() {
        let output = coords(output, &outputs);
        let mut best: Option<usize> = None;
        for mut tap in 0..taps {
            let mut cell = output;
            let mut inside = true;
            for dim in (0..N).rev() {
                let k = tap % options.kernel[dim];
                tap /= options.kernel[dim];
                let place = output[dim + 2] * options.stride[dim] + k * options.dilation[dim];
                inside &= (options.padding[dim].low..options.padding[dim].low + shape[dim + 2])
                    .contains(&place);
                cell[dim + 2] = place.wrapping_sub(options.padding[dim].low);
            }
            let index = (0..D).fold(0_usize, |index, dim| {
                index.wrapping_mul(shape[dim]).wrapping_add(cell[dim])
            });
            if inside && best.is_none_or(|best| x[index] > x[best]) {
                best = Some(index);
            }
        }
        gradient[best.expect("a window meets the field")] += cotangent;
    }
    gradient
}

fn check_minus_infinity<const D: usize, const N: usize>(
    shape: [usize; D],
    options: &PoolOptions<N>,
) {
    let count = shape.iter().product::<usize>();
    // Most windows contain only minus infinity.
    let value = |i: usize| {
        if i.is_multiple_of(7) {
            i as f32
        } else {
            f32::NEG_INFINITY
        }
    };
    let values: Vec<f32> = (0..count).map(value).collect();
    for (ranks, dim) in [(1, 2), (2, 2), (3, D - 1)] {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("x", ranks)])?;
            let data = TensorData::new(values.clone(), shape);
            let x = Tensor::<D>::from_data(data, world.device()).inner();
            let x = ShardTensor::distribute(x, &mesh, &[Shard(dim)])?.require_grad();
            let y = max_pool(x.clone(), options)?;
            let outputs = y.dims();
            let weights: Vec<f32> = (0..outputs.iter().product())
                .map(|i| i as f32 + 1.0)
                .collect();
            let data = TensorData::new(weights.clone(), outputs);
            let cotangent = Tensor::<D>::from_data(data, &world.device().clone().inner());
            let cotangent = ShardTensor::distribute(cotangent, &mesh, y.layout())?;
            let gradients = (y * cotangent).into_local().sum().backward();
            let gradient = x.grad(&gradients).expect("a gradient");
            let gradient = gradient.full_tensor().into_data();
            Ok((gradient.iter::<f32>().collect::<Vec<_>>(), weights, outputs))
        });
        for (gradient, weights, outputs) in found.unwrap() {
            let expected = gradient_by_cells(&values, shape, &weights, outputs, options);
            assert_eq!(gradient, expected, "{options:?} on {ranks} ranks");
        }
    }
}

/// PyTorch's rule, even if no cell of the field exceeds its padding.
#[test]
fn windows_of_minus_infinity_send_their_gradient_to_the_first_cell_of_the_field() {
    let pairs = PoolOptions::new([2, 2]).with_padding([Padding::zeros(1, 1); 2]);
    check_minus_infinity([2, 2, 6, 8], &pairs);
    let wide = PoolOptions::new([3, 3])
        .with_stride([2, 1])
        .with_dilation([1, 2])
        .with_padding([Padding::zeros(1, 0), Padding::zeros(2, 1)]);
    check_minus_infinity([1, 2, 7, 6], &wide);
    let without = PoolOptions::new([3, 2]).with_stride([2, 1]);
    check_minus_infinity([1, 2, 7, 6], &without);
    let line = PoolOptions::new([3]).with_padding([Padding::zeros(1, 1)]);
    check_minus_infinity([2, 3, 11], &line);
    let layers = PoolOptions::new([2, 3, 2]).with_padding([Padding::zeros(1, 1); 3]);
    check_minus_infinity([1, 2, 4, 5, 6], &layers);
}
