//! Rotary position embeddings in several dims.

use burn::tensor::{Tensor, TensorData};
use halocline_core::OrRaise;
use halocline_ops::attention::rotary;
use halocline_ops::prelude::*;

/// Rotary position embedding (J. Su et al., "RoFormer", 2021) of the cells of a field: the elements of a head are divided
/// among the spatial dims, and pairs of them rotated by angles that grow with the place in their dim.
///
/// In a periodic dim of `n` cells the angles of all places are multiples of `2π / n`, so that products of queries and keys
/// depend on their distance across the end, too.
#[derive(Clone, Debug)]
pub struct Rotary {
    base: f64,
    periodic: Vec<bool>,
}

impl Rotary {
    /// An embedding with angles per cell from 1 down to `1 / base`.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_models::Rotary;
    ///
    /// // [batch, cells, heads, width]
    /// let x = Tensor::<4>::ones([1, 6, 1, 4], &Default::default());
    /// let y = Rotary::new(100.0, &[true]).rotated(x);
    /// let length = y.square().sum_dim(3).into_data(); // a rotation
    /// assert!(length.iter::<f32>().all(|length| (length - 4.0).abs() < 1e-5));
    /// ```
    pub fn new(base: f64, periodic: &[bool]) -> Self {
        Self {
            base,
            periodic: periodic.to_vec(),
        }
    }

    /// The angle from one cell to the next, of `count` pairs in a dim of `size` cells.
    fn angles(&self, dim: usize, size: usize, count: usize) -> Vec<f64> {
        let angle = |pair: usize| self.base.powf(-(pair as f64) / count as f64);
        let unit = std::f64::consts::TAU / size.max(1) as f64;
        let angles = (0..count).map(angle);
        if self.periodic[dim] {
            // At least one turn, so that no pair stands still.
            angles
                .map(|angle| (angle / unit).round().max(1.0) * unit)
                .collect()
        } else {
            angles.collect()
        }
    }

    /// Rotates queries or keys `[batch, *spatial, heads, width]`.
    ///
    /// # Panics
    /// Panics for another number of spatial dims, and for a width that is not a multiple of twice their number.
    #[must_use]
    pub fn rotated<const D: usize, X: Field<D>>(&self, x: X) -> X {
        let (shape, spatial) = (x.dims(), self.periodic.len());
        let width = shape[D - 1];
        assert!(
            D == spatial + 3 && width.is_multiple_of(2 * spatial),
            "{spatial} spatial dims of {shape:?}; expected [batch, *spatial, heads, width] and a width of 2·{spatial}·n"
        );
        let dims = 0..spatial;
        let angles = dims.map(|dim| self.angles(dim, shape[dim + 1], width / (2 * spatial)));
        let angles: Vec<Vec<f64>> = angles.collect();
        x.try_op(|x| rotary(x, &angles)).or_raise()
    }
}

/// Values that all ranks compute alike, in the shards and the number type of a field.
pub(super) fn constant<const D: usize, X: Field<D>>(x: &X, values: TensorData) -> X {
    let shard = x.clone().into_shard();
    let options = (&shard.device().inner(), shard.local().dtype());
    x.distribute_beside(Tensor::from_data(values, options))
}
