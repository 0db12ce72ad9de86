//! Lateral boundary of forecasts of a region: the cells at its edge, with given values.

use halocline_core::{Error, Result};
use halocline_ops::masked::apply_mask;
use halocline_ops::prelude::*;

/// Weights of the cells of a region: zero on its rim, the cells less than `width` cells from the
/// edge, and one inside. As a mask they leave the rim out of a loss or a score.
///
/// # Shapes
/// `[batch, channels, lat, lon]` → `[1, 1, lat, lon]`.
///
/// # Placement
/// Any; the result has the shards of latitude and longitude. Nothing is sent.
///
/// # Errors
/// A rim that leaves no cell inside.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_models::interior;
///
/// let weights = interior(&Tensor::<4>::ones([1, 2, 3, 4], &Default::default()), 1)?;
/// assert_eq!((weights.dims(), weights.sum().into_scalar::<f32>()), ([1, 1, 3, 4], 2.0));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn interior<X: Field<4>>(x: &X, width: usize) -> Result<X> {
    let [_, _, rows, columns] = x.dims();
    if width >= rows.min(columns).div_ceil(2) {
        let message =
            format!("a rim of {width} cells on {rows} x {columns} cells; expected cells inside it");
        return Err(Error::operator("interior", message));
    }
    let weights = |size: usize| -> Vec<f64> {
        let inside = width..size - width;
        let weight = |cell: usize| f64::from(inside.contains(&cell));
        (0..size).map(weight).collect()
    };
    Error::catch(|| x.profile(2, &weights(rows)) * x.profile(3, &weights(columns)))
}

/// Replaces the rim of a prediction, the cells less than `width` cells from the edge, by given
/// values: those of a coarser forecast, or of the data. In the step of a
/// [`rollout`](crate::rollout()), the next steps then start from them.
///
/// Values of `x` on the rim, and of `given` inside it, NaN included, affect neither the result nor
/// a gradient.
///
/// # Shapes
/// `x` `[batch, channels, lat, lon]`, `given` the same or with a batch of one → the shape of `x`.
///
/// # Placement
/// Any that is the same in latitude and longitude. Nothing is sent.
///
/// # Errors
/// A rim that leaves no cell inside; fields that do not broadcast.
///
/// # Example
/// A forecast whose rim is zero at every step:
/// ```
/// use burn::tensor::Tensor;
/// use halocline_models::{rollout, with_rim};
///
/// let x = Tensor::<4>::ones([1, 1, 3, 3], &Default::default());
/// let rim = x.zeros_like();
/// let y = rollout(x, None, 2, &[0], |_, x| with_rim(x * 2.0, rim.clone(), 1))?;
/// let inside = y.sum_dim(2).sum_dim(3).into_data();
/// assert_eq!(inside.iter::<f32>().collect::<Vec<_>>(), [2.0, 4.0]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn with_rim<X: Field<4>>(x: X, given: X, width: usize) -> Result<X> {
    let inside = interior(&x, width)?;
    let outside = Error::catch(|| inside.clone() * -1.0 + 1.0)?;
    let (x, given) = (apply_mask(x, inside)?, apply_mask(given, outside)?);
    Error::catch(|| x + given)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Tensor, TensorData};
    use halocline_core::{Launcher, Placement, Shard, ShardTensor};

    use super::*;
    use crate::testing::distributed;

    /// Returns a field with a replaced rim of two cells, and the gradients of its square.
    fn replaced(axes: &[(&str, usize)], placements: &[Placement]) -> Vec<[TensorData; 3]> {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let place = |batch: usize, start: f32| {
                let values = (0..batch * 2 * 5 * 7).map(|cell| start + cell as f32);
                let data = TensorData::new(values.collect::<Vec<f32>>(), [batch, 2, 5, 7]);
                distributed::<4>(data, &mesh, placements).map(ShardTensor::require_grad)
            };
            let (x, given) = (place(3, 1.0)?, place(1, 500.0)?);
            let y = with_rim(x.clone(), given.clone(), 2)?;
            let gradients = y.clone().square().sum().backward();
            let gradient = |x: &ShardTensor<4>| x.grad(&gradients).expect("a gradient");
            Ok([
                y.full_tensor().into_data(),
                gradient(&x).full_tensor().into_data(),
                gradient(&given).full_tensor().into_data(),
            ])
        });
        found.unwrap()
    }

    #[test]
    fn a_rim_is_given_on_any_mesh() {
        let expected = replaced(&[("lat", 1)], &[Shard(2)]).remove(0);
        for (cell, value) in expected[0].iter::<f32>().enumerate() {
            let (row, column) = (cell / 7 % 5, cell % 7);
            let is_inside = row == 2 && (2..5).contains(&column);
            let value_there = if is_inside {
                1.0 + cell as f32
            } else {
                500.0 + (cell % 70) as f32
            };
            assert_eq!(value, value_there);
        }
        type Mesh<'a> = (&'a [(&'a str, usize)], &'a [Placement]);
        let meshes: [Mesh; 3] = [
            (&[("lat", 2), ("lon", 3)], &[Shard(2), Shard(3)]),
            (&[("lat", 4)], &[Shard(2)]),
            (&[("data", 2), ("lon", 2)], &[Shard(0), Shard(3)]),
        ];
        for (axes, placements) in meshes {
            for found in replaced(axes, placements) {
                for (found, expected) in found.iter().zip(&expected) {
                    found.assert_eq(expected, true);
                }
            }
        }
    }

    #[test]
    fn a_rim_leaves_cells_inside() {
        let x = Tensor::<4>::ones([1, 1, 4, 9], &Default::default());
        assert!(interior(&x, 1).is_ok());
        let error = interior(&x, 2).unwrap_err().to_string();
        assert!(error.contains("a rim of 2 cells on 4 x 9"), "{error}");
    }
}
