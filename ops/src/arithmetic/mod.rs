//! Elementwise arithmetic of several fields in one pass over memory.

mod kernel;

use burn::backend::{DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{Shape, Tensor};
use halocline_core::ops::{self, BackwardPass, Operator, Recompute, to_dispatch};
use halocline_core::{Error, Result, ShardTensor};

use crate::field::{Field, run};
use crate::kernel::flex::{self, with_float};
use crate::kernel::simd::Isa;
use crate::operand::{Operand, part_beside};
use crate::rearrange::distribute_beside;
use kernel::Rows;

/// Adds a scaled field, `x + y · scale`: what a residual connection is, with a factor for every channel.
///
/// `scale` has the shape of `x`, or one cell in some dims. If the dims where it has more lie next to each other and
/// before the last ones, as in `[1, channels, 1, 1]`, a kernel reads and writes every cell once; else this is the
/// product and the sum.
///
/// # Adjoint
/// Gradients of `scale` are summed over all ranks between which `x` is sharded.
///
/// # Errors
/// Shapes that do not fit, layouts that cannot be paired, partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::arithmetic::addcmul;
///
/// let [x, y] = [1.0, 2.0].map(|value| ShardTensor::solo(Tensor::<2>::full([2, 3], value, &Default::default())));
/// let z = addcmul(x, y, Tensor::<2>::from([[0.5], [-0.5]]))?.into_parts().0;
/// z.into_data().assert_eq(&[[2.0_f32; 3], [0.0; 3]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn addcmul<const D: usize>(
    x: ShardTensor<D>,
    y: ShardTensor<D>,
    scale: impl Into<Operand<D>>,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "addcmul";
    x.require_resolved(NAME)?;
    y.require_resolved(NAME)?;
    let scale = distribute_beside(&y, scale)?;
    let dtypes = [x.local(), y.local(), scale.local()].map(Tensor::dtype);
    let alike = x.layout() == y.layout() && dtypes == [dtypes[0]; 3];
    match channels(&x.dims(), &scale.dims()) {
        Some(dims) if alike && flex::runs_on(&x.device()) => {
            let scale = part_beside(scale, &x, NAME);
            let (y, (x, layout, mesh)) = (y.into_parts().0, x.into_parts());
            let inputs = [x, y, scale].map(Tensor::into_dispatch);
            let sum = Tensor::from_dispatch(ops::apply(AddScaled { dims }, inputs));
            Ok(ShardTensor::from_parts(sum, layout, mesh))
        }
        _ => Error::catch(|| x + y * scale),
    }
}

/// Arithmetic as methods.
pub trait ArithmeticField<const D: usize>: Field<D> {
    /// Adds a scaled field, `self + y · scale`. See [`addcmul`](fn@addcmul).
    ///
    /// # Panics
    /// Panics where [`addcmul`](fn@addcmul) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ArithmeticField;
    ///
    /// let [x, y] = [[1.0, 2.0], [3.0, 4.0]].map(Tensor::<1>::from);
    /// let z = x.addcmul(y, Tensor::<1>::from([0.5]));
    /// z.into_data().assert_eq(&[2.5_f32, 4.0].into(), true);
    /// ```
    #[must_use]
    fn addcmul(self, y: Self, scale: impl Into<Operand<D>>) -> Self {
        run(self, |x| addcmul(x, y.into_shard(), scale))
    }
}

impl<const D: usize, X: Field<D>> ArithmeticField<D> for X {}

/// The dims before, of and after the channels of factors, as the ends of the first two; `None` if the kernel has no
/// such rows.
fn channels(shape: &[usize], scale: &[usize]) -> Option<[usize; 2]> {
    /// Least cells of a row.
    const ROW: usize = 16;
    let many = |dim: &usize| scale[*dim] != 1;
    let start = (0..shape.len()).find(many).unwrap_or(0);
    let end = (0..shape.len()).rfind(many).map_or(start, |last| last + 1);
    let fits = scale[start..end] == shape[start..end];
    let row: usize = shape[end..].iter().product();
    (fits && row >= ROW).then_some([start, end])
}

/// `x + y · scale` of one rank, with factors for some dims of the field.
#[derive(Clone, Debug)]
struct AddScaled {
    dims: [usize; 2],
}

impl AddScaled {
    fn rows(&self, shape: &Shape) -> Rows {
        let [start, end] = self.dims;
        let product = |dims: &[usize]| dims.iter().product();
        Rows {
            outer: product(&shape[..start]),
            channels: product(&shape[start..end]),
            inner: product(&shape[end..]),
        }
    }
}

impl Operator for AddScaled {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["addcmul", "addcmul (backward)"])
    }

    fn keeps(&self, input: usize) -> bool {
        input > 0
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let (dtype, shape, isa) = (inputs[0].dtype(), inputs[0].shape(), Isa::chosen()?);
        let rows = self.rows(&shape);
        let sum = with_float!(dtype, E => {
            let inputs = inputs.into_iter().map(flex::operand::<E>).collect::<Result<Vec<_>>>()?;
            let [x, mut y, scale] = inputs.try_into().expect("three inputs");
            let [x, scale] = [&x, &scale].map(flex::elements::<E>);
            if let Some(elements) = flex::elements_mut(&mut y) {
                kernel::forward_in_place(isa, rows, x, elements, scale);
                return Ok((flex::in_dtype(to_dispatch::<Flex>(y), dtype), ()));
            }
            let sum = kernel::forward(isa, rows, [x, flex::elements(&y)], scale);
            flex::result(sum, &shape, dtype)
        });
        Ok((sum, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let [y, scale] = [1, 2].map(|input| pass.take_input(input));
        let (dtype, isa) = (y.dtype(), Isa::chosen()?);
        let (shape, of_scale) = (y.shape(), scale.shape());
        let [of_y, of_scale] = with_float!(dtype, E => {
            let [y, scale] = [flex::operand::<E>(y)?, flex::operand::<E>(scale)?];
            let cotangent = flex::operand::<E>(pass.cotangent.clone())?;
            let [y, scale, cotangent] = [&y, &scale, &cotangent].map(flex::elements::<E>);
            let (y, scale) = kernel::backward(isa, self.rows(&shape), y, scale, cotangent);
            [flex::result(y, &shape, dtype), flex::small_result(scale, &of_scale, dtype)]
        });
        Ok(vec![Some(pass.cotangent), Some(of_y), Some(of_scale)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Operator as Checked, check_op};

    struct Sum;

    impl Checked<4, 4> for Sum {
        fn apply<X: Field<4>>(&self, inputs: Vec<X>, scales: Vec<Tensor<4>>) -> X {
            let [x, y] = inputs.try_into().expect("two fields");
            scales
                .into_iter()
                .fold(x, |x, scale| x.addcmul(y.clone(), scale))
        }
    }

    #[test]
    fn factors_get_the_gradients_of_all_cells() {
        let fields = [[3, 2, 5, 7]; 2];
        for scale in [
            [1, 2, 1, 1],
            [3, 2, 1, 1],
            [1; 4],
            [3, 1, 1, 1],
            [1, 1, 1, 7],
            [3, 2, 5, 7],
            [3, 1, 5, 1],
        ] {
            check_op(&Sum, &fields, &[scale], &[0, 1, 2, 3], 1e-6);
        }
        check_op(&Sum, &[[3, 0, 5, 7]; 2], &[[1, 0, 1, 1]], &[0, 1, 2], 1e-6);
    }

    /// The kernel, and product and sum by burn's operators.
    #[test]
    fn kernels_and_burns_operators_agree() {
        let scales = [[1, 2, 1, 1], [3, 1, 1, 1], [1, 1, 5, 1], [1; 4]];
        assert_eq!(
            scales.map(|scale| channels(&[3, 2, 5, 31], &scale)),
            [Some([1, 2]), Some([0, 1]), Some([2, 3]), Some([0, 0])]
        );
        assert_eq!(channels(&[3, 2, 5, 31], &[3, 1, 5, 1]), None);
        assert_eq!(channels(&[3, 2, 5, 31], &[1, 1, 1, 31]), None);
    }

    #[test]
    fn values_that_are_read_again_stay() {
        let device = burn::tensor::Device::flex();
        let [x, y] = [1.0, 2.0].map(|value| Tensor::<2>::full([2, 20], value, &device));
        let scale = Tensor::<2>::full([2, 1], 3.0, &device);
        for _ in 0..2 {
            let z = x.clone().addcmul(y.clone(), scale.clone());
            assert_eq!(z.into_data().iter::<f32>().next(), Some(7.0));
        }
        let misuse = addcmul(
            ShardTensor::solo(x),
            ShardTensor::solo(y),
            Tensor::<2>::ones([3, 1], &device),
        );
        assert!(misuse.unwrap_err().to_string().contains("[3, 1]"));
    }
}
