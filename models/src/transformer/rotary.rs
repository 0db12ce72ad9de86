//! Rotary position embedding in several dims.

use burn::tensor::{Tensor, TensorData};
use halocline_core::OrRaise;
use halocline_ops::attention::rotary_in_groups;
use halocline_ops::prelude::*;

/// Rotary position embedding (J. Su et al., "RoFormer", 2021) for the cells of a field: the
/// elements of a head are divided among the spatial dims, and pairs of them are rotated by angles
/// proportional to the position in their dim.
///
/// In a periodic dim of `n` cells, all angles are multiples of `2π / n`, so that products of
/// queries and keys depend on their distance across the boundary, too.
#[derive(Clone, Debug)]
pub struct Rotary {
    base: f64,
    periodic: Vec<bool>,
}

impl Rotary {
    /// Makes an embedding with angles per cell that decrease from 1 towards `1 / base`.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_models::Rotary;
    ///
    /// // [batch, cells, heads, width]
    /// let x = Tensor::<4>::ones([1, 6, 1, 4], &Default::default());
    /// let y = Rotary::new(100.0, &[true]).rotate(x);
    /// let length = y.square().sum_dim(3).into_data(); // a rotation
    /// assert!(length.iter::<f32>().all(|length| (length - 4.0).abs() < 1e-5));
    /// ```
    pub fn new(base: f64, periodic: &[bool]) -> Self {
        Self {
            base,
            periodic: periodic.to_vec(),
        }
    }

    /// Returns the angles between neighbouring cells, of `count` pairs in a dim of `size` cells.
    fn angles(&self, dim: usize, size: usize, count: usize) -> Vec<f64> {
        let angle = |pair: usize| self.base.powf(-(pair as f64) / count as f64);
        let unit = std::f64::consts::TAU / size.max(1) as f64;
        let angles = (0..count).map(angle);
        if self.periodic[dim] {
            // At least one turn, so that no pair is left unrotated.
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
    /// Panics if the number of spatial dims differs, or the width is not a multiple of twice that
    /// number.
    #[must_use]
    pub fn rotate<const D: usize, X: Field<D>>(&self, x: X) -> X {
        self.rotate_in_groups(x, [1, 1])
    }

    /// Rotates the first `rotated` of every `group` heads, such as queries and keys beside values.
    ///
    /// # Panics
    /// As [`rotate`](Self::rotate); also if the heads are not a multiple of the group, or a group
    /// has fewer heads than are rotated.
    #[must_use]
    pub fn rotate_in_groups<const D: usize, X: Field<D>>(
        &self,
        x: X,
        [rotated, group]: [usize; 2],
    ) -> X {
        let (shape, spatial) = (x.dims(), self.periodic.len());
        let width = shape[D - 1];
        assert!(
            D == spatial + 3 && width.is_multiple_of(2 * spatial),
            "{spatial} spatial dims of {shape:?}; expected [batch, *spatial, heads, width] and a width of 2·{spatial}·n"
        );
        let dims = 0..spatial;
        let angles = dims.map(|dim| self.angles(dim, shape[dim + 1], width / (2 * spatial)));
        let angles: Vec<Vec<f64>> = angles.collect();
        x.try_op(|x| rotary_in_groups(x, &angles, [rotated, group]))
            .or_raise()
    }
}

/// Makes a constant, the same on all ranks, in the shards and the dtype of a field.
pub(super) fn constant<const D: usize, X: Field<D>>(x: &X, values: TensorData) -> X {
    let shard = x.clone().into_shard();
    let options = (&shard.device().inner(), shard.local().dtype());
    x.distribute_operand(Tensor::from_data(values, options))
}
