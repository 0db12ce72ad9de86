//! Flip: reversal of the cells of dims.
//!
//! `y[i] = x[n − 1 − i]` in each of the dims. Semantics follow PyTorch's `torch.flip`.
//!
//! # Placement
//! All dims may be sharded; the result has the layout of `x`.
//!
//! # Adjoint
//! The same flip.

use burn::tensor::kind::Basic;
use halocline_core::plan::Segment;
use halocline_core::{Result, ShardTensor};

use super::roll::moved;
use crate::golden::{Golden, output, with_dims};

/// Reverses the order of the cells of dims.
///
/// # Errors
/// A dim that does not exist or is repeated; partial values; a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::RearrangeField;
///
/// let x = Tensor::<1>::from([1.0, 2.0, 3.0]);
/// let y = RearrangeField::flip(x, &[0]);
/// y.into_data().assert_eq(&[3.0_f32, 2.0, 1.0].into(), true);
/// ```
pub fn flip<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    dims: &[usize],
) -> Result<ShardTensor<D, K>> {
    moved(x, "flip", &vec![0; dims.len()], dims, |cells, size, _| {
        if cells.is_empty() {
            return Vec::new();
        }
        vec![Segment {
            dst: 0,
            src: size - cells.end..size - cells.start,
            flip: true,
        }]
    })
}

/// Registry entry of flip.
pub(super) const GOLDEN: Golden = Golden::new("flip2d", |case| {
    with_dims!(case.dims(), D => {
        output(flip(case.input::<D>(0)?, &case.attributes.dims("dims", D)))
    })
})
.with_pytorch("flip")
.with_travels(["cells that change their rank", "the same back"]);

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Flip;

    impl Operator<3, 3> for Flip {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).flip(&[1, 2])
        }
    }

    #[test]
    fn cells_come_in_reverse_order() {
        check_op(&Flip, &[[2, 5, 7]], &[], &[0, 1, 2], 1e-6);
    }
}
