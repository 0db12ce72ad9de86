//! Elementwise arithmetic on several fields in one pass over memory.

mod kernel;

use burn::backend::{DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{Shape, Tensor};
use halocline_core::ops::{self, BackwardPass, Operator, Recompute, to_dispatch};
use halocline_core::{Error, Layout, Result, ShardTensor};

use crate::field::{Field, run};
use crate::golden::{Golden, output, with_dims};
use crate::kernel::flex::{self, with_float};
use crate::kernel::simd::Isa;
use crate::operand::{Operand, part_beside};
use crate::rearrange::distribute_operand;
use kernel::Rows;

/// Registry entry of `addcmul`.
pub(crate) const OPERATORS: &[Golden] = &[Golden::new("addcmul", |case| {
    with_dims!(case.dims(), D => {
        let scale = case.needed::<D>("scale")?;
        output(addcmul(case.input::<D>(0)?, case.input(1)?, scale))
    })
})
.with_travels(["–", "sums of factors' gradients"])];

/// Adds a scaled field, `x + y · scale`, as in residual connections with one factor per channel.
///
/// `scale` has the shape of the fields, or size one in some dims; it is sharded like `y`
/// ([`distribute_operand`]). On CPUs this is one pass if both fields have the same layout, and if
/// the dims in which `scale` has several cells are adjacent and followed by rows of at least 16
/// cells, as in `[1, channels, 1, 1]`. Otherwise it is a product and a sum.
///
/// # Adjoint
/// The gradient of `scale` is summed over all ranks between which the fields are sharded, and
/// gathered where `scale` was sharded.
///
/// # Errors
/// Fields of different shapes or dtypes, a `scale` that does not fit, layouts that cannot be
/// paired, partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::arithmetic::addcmul;
///
/// let [x, y] = [1.0, 2.0].map(|value| ShardTensor::solo(Tensor::<2>::full([2, 3], value, &Default::default())));
/// let z = addcmul(x, y, Tensor::<2>::from([[0.5], [-0.5]]))?.into_local();
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
    let scale = distribute_operand(&y, scale)?;
    let dtypes = [&x, &y, &scale].map(|tensor| tensor.local().dtype());
    if x.dims() != y.dims() || dtypes != [dtypes[0]; 3] {
        let told = |x: &ShardTensor<D>| format!("{:?} of {:?}", x.dims(), x.local().dtype());
        let (x, y) = (told(&x), told(&y));
        let message = format!("{x} and {y} with a scale of {:?}", dtypes[2]);
        return Err(Error::operator(NAME, message));
    }
    let dims = channels(y.layout(), scale.layout());
    let dims = dims.filter(|_| x.layout() == y.layout() && flex::runs_on(&y.device()));
    Error::catch(|| match dims {
        Some(dims) => {
            let scale = part_beside(scale, &y, NAME);
            let (x, (y, layout, mesh)) = (x.into_local(), y.into_parts());
            let inputs = [x, y, scale].map(Tensor::into_dispatch);
            let sum = Tensor::from_dispatch(ops::apply(AddScaled { dims }, inputs));
            ShardTensor::from_parts(sum, layout, mesh)
        }
        None => x + y * scale,
    })
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
    #[track_caller]
    fn addcmul(self, y: Self, scale: impl Into<Operand<D>>) -> Self {
        run(self, |x| addcmul(x, y.into_shard(), scale))
    }
}

impl<const D: usize, X: Field<D>> ArithmeticField<D> for X {}

/// The first dim of the channels of `scale` and the first dim after them; `None` if the kernel does
/// not support these layouts.
pub(crate) fn channels(field: &Layout, scale: &Layout) -> Option<[usize; 2]> {
    /// Minimum number of cells of a row.
    const ROW: usize = 16;
    let (shape, factors) = (field.shape(), scale.shape());
    // A dim of one cell counts, too, if some ranks lack that cell.
    let many = |dim: &usize| factors[*dim] != 1 || scale.is_sharded(*dim);
    let start = (0..shape.len()).find(many).unwrap_or(0);
    let end = (0..shape.len()).rfind(many).map_or(start, |last| last + 1);
    let row: usize = shape[end..].iter().product();
    (factors[start..end] == shape[start..end] && row >= ROW).then_some([start, end])
}

/// `x + y · scale` on one rank, with one factor per index of the dims `dims[0]..dims[1]`.
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
        if pass.wanted[1..] == [false, false] {
            return Ok(vec![Some(pass.cotangent), None, None]);
        }
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
    use burn::tensor::{DType, Device, FloatDType, Tolerance};

    use super::*;
    use crate::testing::{Operator as Checked, check_op, random};

    struct Sum;

    impl Checked<4, 4> for Sum {
        fn apply<X: Field<4>>(&self, inputs: Vec<X>, scales: Vec<Tensor<4>>) -> X {
            let [x, y] = inputs.try_into().expect("two fields");
            let sum = |x: X, scale: Tensor<4>| x.addcmul(y.clone(), scale);
            scales.into_iter().fold(x, sum)
        }
    }

    #[test]
    fn factors_get_the_gradients_of_all_cells() {
        let check = |field, scale| check_op(&Sum, &[field; 2], &[scale], &[0, 1, 2, 3], 1e-6);
        for scale in [
            [1, 2, 1, 1],
            [3, 2, 1, 1],
            [1; 4],
            [3, 1, 1, 1],
            [1, 1, 1, 7],
            [3, 2, 5, 7],
            [3, 1, 5, 1],
        ] {
            check([3, 2, 5, 7], scale);
        }
        check([3, 0, 5, 7], [1, 0, 1, 1]);
    }

    #[test]
    fn some_ranks_may_lack_the_one_cell_of_a_dim() {
        for field in [[1, 2, 5, 7], [3, 2, 1, 31], [1, 2, 1, 31]] {
            for scale in [[1, 2, 1, 1], [1; 4]] {
                check_op(&Sum, &[field; 2], &[scale], &[0, 1, 2], 1e-6);
            }
        }
    }

    #[test]
    fn factors_are_of_dims_next_to_each_other() {
        let layout = |shape: [usize; 4]| {
            let x = ShardTensor::solo(Tensor::<4>::ones(shape, &Device::flex()));
            x.layout().clone()
        };
        let field = layout([3, 2, 5, 31]);
        for (scale, dims) in [
            ([1, 2, 1, 1], Some([1, 2])),
            ([3, 1, 1, 1], Some([0, 1])),
            ([1, 1, 5, 1], Some([2, 3])),
            ([1; 4], Some([0, 0])),
            ([3, 1, 5, 1], None),
            ([1, 1, 1, 31], None),
        ] {
            assert_eq!(channels(&field, &layout(scale)), dims, "{scale:?}");
        }
    }

    /// In every dtype, on slices of a tensor, on one tensor used twice, and with
    /// checkpointing.
    #[test]
    fn kernels_and_burns_operators_agree() {
        let number_types = [FloatDType::F32, FloatDType::F64, FloatDType::BF16];
        for (dtype, tolerance) in number_types.into_iter().zip([1e-6, 1e-14, 2e-2]) {
            for device in [
                Device::flex().autodiff(),
                Device::flex().autodiff().gradient_checkpointing(),
            ] {
                let run = |sum: fn([Tensor<4>; 3]) -> Tensor<4>| {
                    let leaf = |shape, name| {
                        let data = random::<4>(shape, name, 0).inner().cast(dtype).into_data();
                        Tensor::from_data(data, (&device, DType::from(dtype))).require_grad()
                    };
                    let both = leaf([2, 6, 5, 7], "both");
                    let scale = leaf([1, 3, 1, 1], "scale");
                    let [x, y] = [0, 3].map(|start| both.clone().narrow(1, start, 3));
                    let z = sum([x, y, scale.clone()]);
                    let z = sum([z.clone(), z, scale.clone()]);
                    let gradients = (z.clone() * z.clone()).sum().backward();
                    let of = [both, scale].map(|leaf| leaf.grad(&gradients).unwrap());
                    [z.inner(), of[0].clone(), of[1].clone()].map(Tensor::into_data)
                };
                let ours = run(|[x, y, scale]| x.addcmul(y, scale));
                let burns = run(|[x, y, scale]| x + y * scale);
                for (ours, burns) in ours.iter().zip(&burns) {
                    ours.assert_approx_eq::<f64>(burns, Tolerance::rel_abs(tolerance, tolerance));
                }
            }
        }
    }

    #[test]
    fn values_that_are_read_again_stay() {
        let device = Device::flex();
        let [x, y] = [1.0, 2.0].map(|value| Tensor::<2>::full([2, 20], value, &device));
        let scale = Tensor::<2>::full([2, 1], 3.0, &device);
        for _ in 0..2 {
            let z = x.clone().addcmul(y.clone(), scale.clone());
            assert_eq!(z.into_data().iter::<f32>().next(), Some(7.0));
        }
    }

    #[test]
    fn misuse_is_told() {
        let ones = |shape| Tensor::<2>::ones(shape, &Device::flex());
        let told = |y: Tensor<2>, scale: Tensor<2>| {
            let [x, y] = [ones([2, 20]), y].map(ShardTensor::solo);
            addcmul(x, y, scale).unwrap_err().to_string()
        };
        let error = told(ones([1, 20]), ones([1, 1]));
        assert!(error.contains("[2, 20] of F32 and [1, 20]"), "{error}");
        let error = told(ones([2, 20]), ones([2, 1]).cast(FloatDType::F64));
        assert!(error.contains("a scale of F64"), "{error}");
        let error = told(ones([2, 20]), ones([3, 1]));
        assert!(error.contains("[3, 1]"), "{error}");
    }
}
