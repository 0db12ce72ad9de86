//! Tests of closures that are elementwise, and of closures that are not.

use super::*;
use crate::{Launcher, Layout, Replicate, Shard};
use burn::tensor::{Bool, DType, Device, Int, activation};

type Map = fn(Tensor<2>) -> Tensor<2>;

fn cells(rows: usize, columns: usize) -> Vec<f32> {
    let count = rows * columns;
    (0..count)
        .map(|i| ((i * 7 + 2) % count) as f32 / 4.0 - 1.0)
        .collect()
}

/// Returns the error of a closure on rows that are distributed by `extents`.
fn refused(extents: &[usize], check: bool, f: impl Fn(Tensor<2>) -> Tensor<2> + Sync) -> String {
    let result = Launcher::local(extents.len()).check(check).run(|world| {
        let mesh = world.mesh([("rows", extents.len())])?;
        let rows = extents.iter().sum();
        let data = TensorData::new(cells(rows, 3), [rows, 3]);
        let x = Tensor::<2>::from_data(data, world.device()).require_grad();
        let layout =
            Layout::new(mesh.shape(), &[rows, 3], &[Shard(0)])?.with_extents(0, extents)?;
        ShardTensor::distribute(x, &mesh, &layout)?.map_local(&f);
        Ok(())
    });
    result.map_or_else(|error| error.to_string(), |()| String::new())
}

/// Covers integers that f64 cannot represent, and a division by non-zero cells.
#[test]
fn closures_of_integers_are_run_on_integers_of_the_field() {
    let result = Launcher::local(2).check(true).run(|world| {
        let mesh = world.mesh([("rows", 2)])?;
        let field = |first: i64| {
            let data = TensorData::new((first..first + 12).collect::<Vec<_>>(), [12]);
            let options = (world.device(), DType::I64);
            let x = Tensor::<1, Int>::from_data(data, options);
            ShardTensor::distribute(x, &mesh, &[Shard(0)])
        };
        field((1 << 53) + 1)?.map_local(|x| x + 1);
        field(1)?.map_local(|x| x.ones_like() * 100 / x);
        Ok(())
    });
    result.unwrap();
    let places = |x: Tensor<2, Int>| x.flip([0]);
    let refused = Launcher::local(1).check(true).run(|world| {
        let mesh = world.mesh([("rows", 1)])?;
        let data = TensorData::new((1_i64..13).collect::<Vec<_>>(), [4, 3]);
        let x = Tensor::<2, Int>::from_data(data, world.device());
        ShardTensor::distribute(x, &mesh, &[Shard(0)])?.map_local(places);
        Ok(())
    });
    assert!(refused.unwrap_err().to_string().contains("not elementwise"));
}

#[test]
fn closures_that_are_not_elementwise_are_refused() {
    let closures: [(&str, Map); 9] = [
        ("softmax", |x| activation::softmax(x, 0)),
        ("flip", |x| x.flip([0])),
        ("cumsum", |x| x.cumsum(0)),
        ("roll", |x| x.roll(&[1], &[0])),
        ("anomaly", |x| x.clone() - x.mean_dim(0)),
        ("global anomaly", |x| x.clone() - x.mean().reshape([1, 1])),
        ("scaled by the largest", |x| {
            x.clone() / x.abs().max().reshape([1, 1])
        }),
        ("scaled by the size", |x| {
            let rows = x.dims()[0] as f64;
            x / rows
        }),
        ("weighted by place", |x| {
            let [rows, columns] = x.dims();
            let weights = Tensor::<1, Int>::arange(1..rows as i64 + 1, &x.device());
            x * weights.float().reshape([rows, 1]).expand([rows, columns])
        }),
    ];
    for (name, f) in closures {
        for extents in [vec![4], vec![3, 2], vec![1, 1], vec![1, 4]] {
            let error = refused(&extents, true, f);
            assert!(
                error.contains("map_local: the closure") && error.contains("is not elementwise"),
                "{name} on {extents:?}: {error:?}"
            );
        }
    }
    let offset = 1.0;
    let error = refused(&[2, 2], true, |x| activation::softmax(x + offset, 1));
    assert!(
        error.contains("closure::tests::closures_that_are_not"),
        "{error}"
    );
}

/// With and without checks.
#[test]
fn closures_that_capture_gradients_are_refused() {
    let device = Device::default().autodiff();
    for check in [false, true] {
        for shape in [[1, 1], [1, 3], [2, 3]] {
            let scale = Tensor::<2>::ones(shape, &device).require_grad();
            let result = scale.clone().exp();
            for captured in [scale, result] {
                let error = refused(&[2, 2], check, |x| x.tanh() * captured.clone());
                assert!(
                    error.contains("captures a tensor with gradients"),
                    "{error}"
                );
                assert!(error.contains("replicate_operand"), "{error}");
            }
        }
        let constant = Tensor::<2>::ones([1, 1], &device) * 3.0;
        assert_eq!(refused(&[2, 2], check, |x| x * constant.clone()), "");
    }
}

/// Detected only with checks enabled.
#[test]
fn closures_that_capture_a_value_of_their_rank_are_refused() {
    let run = |check: bool| {
        Launcher::local(3).check(check).run(|world| {
            let mesh = world.mesh([("rows", 3)])?;
            let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?;
            let rank = world.rank() as f64;
            let _ = x.map_local(|x| x - rank);
            Ok(())
        })
    };
    assert!(run(false).is_ok());
    let error = run(true).unwrap_err().to_string();
    assert!(error.contains("differs between ranks"), "{error}");
    assert!(
        error.contains("on rank 0") && error.contains("on rank 1"),
        "{error}"
    );
}

/// With and without checks, because the field does not broadcast with a shard.
#[test]
fn closures_that_capture_a_whole_field_are_refused() {
    for check in [false, true] {
        let whole = Tensor::<2>::ones([4, 3], &Default::default());
        let error = refused(&[2, 2], check, |x| x * whole.clone());
        assert!(error.contains("panics on this rank's shard"), "{error}");
        assert!(error.contains("make that an operand"), "{error}");
    }
}

#[test]
fn closures_that_change_the_shape_are_refused() {
    for check in [false, true] {
        let error = refused(&[2, 2], check, |x| x.sum_dim(1));
        assert!(
            error.contains("gives shape [2, 1] for cells of shape [2, 3]"),
            "{error}"
        );
        let columns = 2;
        let error = refused(&[2, 2], check, |x| x.narrow(1, 0, columns));
        assert!(
            error.contains("gives shape [2, 2] for cells of shape [2, 3]"),
            "{error}"
        );
    }
    let weights = TensorData::new(cells(2, 3), [2, 3]);
    let device = Device::default();
    let weights = Tensor::<2>::from_data(weights, &device);
    let error = refused(&[2, 2], true, |x| x * weights.clone());
    assert!(error.contains("operand"), "{error}");
}

#[test]
fn elementwise_closures_are_not_refused() {
    let closures: [Map; 6] = [
        |x| x.exp().sin() / 3.0,
        |x| activation::gelu(x).powf_scalar(1.5),
        |x| x.log().recip(),
        |x| x.clone().mask_fill(x.is_nan(), 2.0).floor(),
        |x| (x * 1e30).exp() - 1.0,
        |x| x.zeros_like(),
    ];
    Launcher::local(2)
        .check(true)
        .run(|world| {
            let mesh = world.mesh([("rows", 2)])?;
            for rows in [1, 2, 5, 23] {
                let mut values = cells(rows, 3);
                values[1] = f32::NAN;
                values[2] = f32::INFINITY;
                for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
                    let data = TensorData::new(values.clone(), [rows, 3]);
                    let x = Tensor::<2>::from_data(data, (world.device(), dtype));
                    let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
                    for f in closures {
                        let _ = x.clone().map_local(f);
                    }
                    let low = x.map_local(|x| x.lower_elem(0.5));
                    let _ = low.map_local::<Bool>(|low| low.bool_not()).int();
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn closures_of_two_tensors_are_checked_too() {
    let run = |f: fn(Tensor<2>, Tensor<2>) -> Tensor<2>| {
        let result = Launcher::local(2).check(true).run(|world| {
            let mesh = world.mesh([("rows", 2)])?;
            let data = TensorData::new(cells(5, 3), [5, 3]);
            let x = Tensor::<2>::from_data(data, world.device());
            let row = ShardTensor::distribute(x.clone().narrow(0, 0, 1), &mesh, &[Replicate])?;
            let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
            x.zip_local(row, f);
            Ok(())
        });
        result.map_or_else(|error| error.to_string(), |()| String::new())
    };
    assert_eq!(run(|x, row| (x - row).exp()), "");
    let error = run(|x, row| x.flip([0]) + row);
    assert!(
        error.contains("zip_local: the closure") && error.contains("not elementwise"),
        "{error}"
    );
}
