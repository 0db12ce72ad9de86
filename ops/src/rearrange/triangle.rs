//! Triangles of matrices: the cells on and below, or on and above, a diagonal.
//!
//! `y[.., i, j] = x[.., i, j]` where `j − i ≤ diagonal` (lower) or `j − i ≥ diagonal` (upper), and
//! zero elsewhere. Semantics follow PyTorch's `tril` and `triu`.
//!
//! # Placement
//! All dims may be sharded; rows and columns are counted globally. Nothing is sent.
//!
//! # Adjoint
//! The same triangle of the cotangent.

use std::ops::Range;

use burn::tensor::Tensor;
use halocline_core::{Error, Result, ShardTensor};

use crate::driver::empty::{fill_all, without_fill};
use crate::golden::{Case, Golden, output, with_dims};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::Float;
use crate::kernel::lanes::{CHUNK, filled_bands};
use crate::kernel::local::{LocalOperator, planes};
use crate::kernel::simd::Isa;

/// Keeps the cells on and below a diagonal of the last two dims; 0 is the main diagonal. See the
/// [module](self).
///
/// # Errors
/// A tensor of one dim.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::tril;
///
/// let x = ShardTensor::solo(Tensor::<2>::ones([2, 2], &Default::default()));
/// let y = tril(x, 0)?;
/// y.local().to_data().assert_eq(&[[1.0_f32, 0.0], [1.0, 1.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn tril<const D: usize>(x: ShardTensor<D>, diagonal: i64) -> Result<ShardTensor<D>> {
    triangle(x, "tril", true, diagonal)
}

/// Keeps the cells on and above a diagonal of the last two dims; 0 is the main diagonal. See the
/// [module](self).
///
/// # Errors
/// A tensor of one dim.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::triu;
///
/// let x = ShardTensor::solo(Tensor::<2>::ones([2, 2], &Default::default()));
/// let y = triu(x, 1)?;
/// y.local().to_data().assert_eq(&[[0.0_f32, 1.0], [0.0, 0.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn triu<const D: usize>(x: ShardTensor<D>, diagonal: i64) -> Result<ShardTensor<D>> {
    triangle(x, "triu", false, diagonal)
}

fn triangle<const D: usize>(
    x: ShardTensor<D>,
    operator: &'static str,
    lower: bool,
    diagonal: i64,
) -> Result<ShardTensor<D>> {
    if D < 2 {
        let message = format!("{:?}; expected rows and columns", x.dims());
        return Err(Error::operator(operator, message));
    }
    let (local, layout, mesh) = x.into_parts();
    let held = layout.local_box(mesh.position());
    let [rows, columns] = [D - 2, D - 1].map(|dim| held.ranges()[dim].start as i64);
    let local = fill_all(local, &layout, operator, 0.0)?;
    let diagonal = diagonal.saturating_add(rows - columns);
    let local = Triangle { lower, diagonal }.run(local);
    without_fill(local, layout, mesh, operator)
}

/// Triangle of the matrices of one shard.
#[derive(Clone, Copy, Debug)]
struct Triangle {
    lower: bool,
    diagonal: i64,
}

impl Triangle {
    /// Returns the columns of a row that are kept.
    fn kept(self, row: usize, columns: usize) -> Range<usize> {
        let on_diagonal = (row as i64).saturating_add(self.diagonal);
        let column = |place: i64| place.clamp(0, columns as i64) as usize;
        if self.lower {
            0..column(on_diagonal.saturating_add(1))
        } else {
            column(on_diagonal)..columns
        }
    }

    fn of<E: Float>(self, x: &[E], shape: &[usize]) -> Buffer<E> {
        let [planes, rows, columns] = planes(shape);
        let band = (CHUNK / columns.max(1)).max(1);
        let run = |[plane, index]: [usize; 2], y: &mut [E]| {
            let first = index * band;
            let x = &x[(plane * rows + first) * columns..][..y.len()];
            let lines = y.chunks_exact_mut(columns).zip(x.chunks_exact(columns));
            for (row, (y, x)) in lines.enumerate() {
                let kept = self.kept(first + row, columns);
                y[..kept.start].fill(E::default());
                y[kept.end..].fill(E::default());
                y[kept.clone()].copy_from_slice(&x[kept]);
            }
        };
        // SAFETY: a band consists of whole rows, all elements of which are written.
        unsafe { filled_bands([planes, rows, columns], band, run) }
    }
}

impl LocalOperator for Triangle {
    const NAMES: [&'static str; 2] = ["triangle", "triangle (backward)"];
    const KEEPS_INPUT: bool = false;

    fn forward<E: Float>(self, _: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        (self.of(x, shape), shape.to_vec())
    }

    fn backward<E: Float>(self, _: Isa, _: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        self.of(cotangent, shape)
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        if self.lower {
            x.tril(self.diagonal)
        } else {
            x.triu(self.diagonal)
        }
    }
}

/// Registry entries of triangles.
pub(super) const GOLDEN: [Golden; 2] = [
    Golden::new("tril", |case| {
        with_dims!(case.dims(), D => {
            output(tril(case.input::<D>(0)?, diagonal(case)))
        })
    }),
    Golden::new("triu", |case| {
        with_dims!(case.dims(), D => {
            output(triu(case.input::<D>(0)?, diagonal(case)))
        })
    }),
];

fn diagonal(case: &Case) -> i64 {
    case.attributes.number("diagonal").unwrap_or(0.0) as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::local::{check_composed, check_composed_of};
    use burn::tensor::TensorData;
    use halocline_core::{Launcher, Shard};

    #[test]
    fn diagonals_far_away_are_so_on_all_ranks() {
        let found = Launcher::local(3).collect(|world| {
            let mesh = world.mesh([("x", 3)])?;
            let x = ShardTensor::<2>::ones([5, 4], &mesh, &[Shard(0)])?;
            let whole = tril(x.clone(), i64::MAX)?.full_tensor();
            let x = x.redistribute(&[Shard(1)]);
            let all = triu(x, i64::MIN)?.full_tensor();
            Ok((whole + all).into_data())
        });
        for found in found.unwrap() {
            found.assert_eq(&TensorData::from([[2.0_f32; 4]; 5]), true);
        }
    }

    #[test]
    fn kernels_and_burns_operators_agree() {
        for lower in [true, false] {
            for diagonal in [-9, -3, 0, 2, 7] {
                check_composed(Triangle { lower, diagonal });
            }
            for diagonal in [-150, 1, 120] {
                check_composed_of([1, 2, 300, 200], Triangle { lower, diagonal });
            }
        }
    }
}
