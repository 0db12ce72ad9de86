//! Attention results with their log-sum-exps, by which results over parts of the keys can be
//! merged.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Tensor};
use halocline_core::ops::cut;
use halocline_core::{DeviceMesh, IndexBox, Layout, Result, ShardTensor};

use super::engine::weights::row_products;
use crate::field::Field;
use crate::kernel::flex::{self, Float};
use crate::precision::cast_shard;
use crate::rearrange::narrow;

/// Result of attention, with the logarithm of the sum of exponentials (log-sum-exp).
///
/// # Example
/// Attention to all keys, from attention to two halves of them:
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Distribution, RandomKey, ShardTensor};
/// use halocline_ops::attention::{AttentionOutput, scaled_dot_product_attention_with_lse};
/// use halocline_ops::prelude::*;
///
/// let normal = burn::tensor::Distribution::Normal(0.0, 1.0);
/// let tokens = || Tensor::<4>::random([1, 10, 2, 4], normal, &Default::default());
/// let (q, k, v) = (tokens(), tokens(), tokens());
/// let options = AttentionOptions::default();
/// let part = |start| {
///     let half = |x: &Tensor<4>| x.clone().narrow(1, start, 5);
///     q.clone().scaled_dot_product_attention_with_lse(half(&k), half(&v), &options)
/// };
/// let merged = AttentionOutput::merge(vec![part(0), part(5)]).output;
/// let whole = q.clone().scaled_dot_product_attention(k.clone(), v.clone(), &options);
/// assert!((merged - whole).abs().max().into_scalar::<f32>() < 1e-6);
/// ```
#[derive(Clone, Debug)]
pub struct AttentionOutput<X> {
    /// Result, `[.., heads, value_width]`.
    pub output: X,
    /// Logarithm of the sum of exponentials of the scores of every query and head,
    /// `[.., heads, 1]`, in at least f32; about −1e30 for a query without keys.
    pub lse: X,
}

impl<X> AttentionOutput<X> {
    /// Applies a function to both tensors.
    pub(super) fn map<Y>(self, f: impl Fn(X) -> Y) -> AttentionOutput<Y> {
        AttentionOutput {
            output: f(self.output),
            lse: f(self.lse),
        }
    }

    /// Merges results of the same queries over parts of the keys into the result over all keys.
    /// Gradients flow to all parts.
    ///
    /// # Panics
    /// Panics if there are no parts, or if their tensors have different layouts.
    #[must_use]
    pub fn merge<const D: usize>(parts: Vec<Self>) -> Self
    where
        X: Field<D>,
    {
        let parts: Vec<_> = parts
            .into_iter()
            .map(|part| part.map(X::into_shard))
            .collect();
        merged(parts).map(X::from_shard)
    }
}

fn merged<const D: usize>(
    parts: Vec<AttentionOutput<ShardTensor<D>>>,
) -> AttentionOutput<ShardTensor<D>> {
    let numbers = parts.iter().map(|part| part.lse.clone().detach());
    // Any number near the largest will do: it cancels.
    let most = numbers.reduce(|one, other| {
        let larger = other.clone().greater(one.clone());
        one.mask_where(larger, other)
    });
    let most = most.expect("parts to merge");
    let dtype = parts[0].output.local().dtype();
    let wide = most.local().dtype();
    let sums = parts.into_iter().map(|AttentionOutput { output, lse }| {
        let weight = (lse - most.clone()).exp();
        (cast_shard(output, wide) * weight.clone(), weight)
    });
    let sums = sums.reduce(|(output, sum), (more, weight)| (output + more, sum + weight));
    let (output, sum) = sums.expect("parts to merge");
    AttentionOutput {
        output: cast_shard(output / sum.clone(), dtype),
        lse: sum.log() + most,
    }
}

/// Result of an attention operator: the output, with the logarithms as its last column if they are
/// requested.
pub(super) fn packed(
    output: &DispatchTensor,
    lse: &DispatchTensor,
    with_lse: bool,
) -> DispatchTensor {
    if !with_lse {
        return output.clone();
    }
    let last = output.shape().len() - 1;
    let output = flex::in_dtype(output.clone(), lse.dtype());
    Dispatch::float_cat(vec![output, lse.clone()], last)
}

/// Splits the gradient of a result into those of the output and, if the result has them, of the
/// logarithms.
pub(super) fn unpacked(
    cotangent: DispatchTensor,
    with_lse: bool,
) -> (DispatchTensor, Option<DispatchTensor>) {
    if !with_lse {
        return (cotangent, None);
    }
    let whole = IndexBox::whole(&cotangent.shape()[..]);
    let last = whole.ranges().len() - 1;
    let width = whole.ranges()[last].len() - 1;
    let columns = |columns| cut(&cotangent, &whole.with_range(last, columns));
    (columns(0..width), Some(columns(width..width + 1)))
}

/// Products of output and cotangent, row by row, less the gradients of the logarithms, which enter
/// the gradients of scores in the same way.
pub(super) fn products<E: Float>(
    output: &[E],
    cotangent: &[E],
    width: usize,
    of_lse: Option<DispatchTensor>,
) -> Result<Vec<E>> {
    let mut products = row_products(output, cotangent, width);
    if let Some(of_lse) = of_lse {
        let of_lse = flex::operand::<E>(of_lse)?;
        for (product, more) in products.iter_mut().zip(flex::elements::<E>(&of_lse)) {
            *product = *product - *more;
        }
    }
    Ok(products)
}

/// Splits the result of [`packed`]; `layout` is that of the output.
pub(super) fn attended<const D: usize>(
    both: Tensor<D>,
    layout: &Layout,
    mesh: &DeviceMesh,
    dtype: DType,
) -> Result<AttentionOutput<ShardTensor<D>>> {
    let width = layout.shape()[D - 1];
    let layout = layout.resized(D - 1, vec![width + 1]);
    let both = ShardTensor::from_parts(both, layout, mesh.clone());
    Ok(AttentionOutput {
        output: cast_shard(narrow(both.clone(), D - 1, 0, width)?, dtype),
        lse: narrow(both, D - 1, width, 1)?,
    })
}
