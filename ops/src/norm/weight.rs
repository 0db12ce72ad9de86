//! Weight normalization: a direction and a length for each output of a layer.
//!
//! `w = v · g / ‖v‖`, with the norm over all dims but one, or over all (T. Salimans and D. Kingma,
//! "Weight normalization", 2016). Semantics follow PyTorch's `weight_norm`.
//!
//! # Placement
//! All dims of `v` may be sharded; values must be resolved.
//!
//! # Communication
//! One sum per norm, forward and backward, if the norm runs over a sharded dim.
//!
//! # Adjoint
//! For `g`, the component of the cotangent along `v`; for `v`, the rest, times `g / ‖v‖`.

use halocline_core::{Error, Result, ShardTensor};

use crate::golden::{Golden, output, with_dims};
use crate::operand::Operand;
use crate::rearrange::distribute_operand;
use crate::reduce::{scaled, vector_norm};

/// Computes weights from directions `v` and lengths `g`, which have size one in all dims but `dim`;
/// with `None` there is one length. See the [module](self).
///
/// # Errors
/// Fails for a dim that does not exist, for lengths of another shape or element type, for partial
/// values, and if communication fails.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::norm::weight_norm;
///
/// let v = ShardTensor::solo(Tensor::<2>::from([[3.0, 4.0], [0.0, 2.0]]));
/// let g = Tensor::<2>::from([[10.0], [1.0]]);
/// let w = weight_norm(v, g, 0)?;
/// w.local().to_data().assert_eq(&[[6.0_f32, 8.0], [0.0, 1.0]].into(), true);
/// let v = ShardTensor::solo(Tensor::<2>::from([[3.0], [4.0]]));
/// let w = weight_norm(v, Tensor::<2>::from([[10.0]]), None)?;
/// w.local().to_data().assert_eq(&[[6.0_f32], [8.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn weight_norm<const D: usize>(
    v: ShardTensor<D>,
    g: impl Into<Operand<D>>,
    dim: impl Into<Option<usize>>,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "weight_norm";
    let (g, dim) = (g.into(), dim.into());
    let size = |other| {
        if dim == Some(other) {
            v.dims()[other]
        } else {
            1
        }
    };
    let expected = std::array::from_fn(size);
    let (dtype, of_v) = (g.dtype(), v.local().dtype());
    if dim.is_some_and(|dim| dim >= D) || g.dims() != expected || dtype != of_v {
        let along = dim.map_or("no dim".into(), |dim| format!("dim {dim}"));
        let message = format!(
            "lengths {:?} of {dtype:?} along {along} of {:?} of {of_v:?}",
            g.dims(),
            v.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    let others: Vec<usize> = (0..D).filter(|other| dim != Some(*other)).collect();
    let norm = vector_norm(v.clone(), 2.0, &others)?;
    let g = distribute_operand(&norm, g)?;
    scaled(v, g / norm, NAME)
}

/// Registry entry of weight normalization.
pub(super) const GOLDEN: Golden = Golden::new("weight_norm", |case| {
    let dim = case.attributes.number("dim");
    let dim = dim.map(|_| case.attributes.dim("dim", case.dims()));
    with_dims!(case.dims(), D => {
        output(weight_norm(case.input::<D>(0)?, case.needed::<D>("g")?, dim))
    })
})
.with_travels([
    "a sum of each norm",
    "a sum of the gradients of factors, which are lengths over norms",
]);
