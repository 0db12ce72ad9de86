//! Attention with masked keys.

use burn::tensor::Tensor;
use halocline_core::{Error, Result, ShardTensor};

use super::{apply_mask, weights};
use crate::attention::{
    AttentionOptions, NeighborhoodOptions, cell_attention, neighborhood_attention,
};
use crate::field::Field;
use crate::precision::{cast_shard, wider};
use crate::rearrange::cat;

/// Score of a key that does not count: its attention weight is zero next to any other key.
const NOTHING: f64 = -1e9;

/// Neighborhood attention to the keys that count, each with its weight: `Σ m·exp(s)·v / Σ m·exp(s)`
/// over the window of a query, and zero if none of its keys counts. Queries in cells of weight zero
/// attend as a query of zeros does.
///
/// # Shapes
/// `q`, `k` and `v` as for [`neighborhood_attention`]; `mask` is `[batch or 1, *spatial, 1, 1]`.
///
/// # Errors
/// Fails for a mask of another shape, and for a scale that is zero or not finite; otherwise errors
/// of [`neighborhood_attention`] and [`apply_mask`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::NeighborhoodOptions;
/// use halocline_ops::masked::masked_neighborhood_attention;
///
/// let field = |cells: [f32; 4]| Tensor::<1>::from(cells).reshape([1, 4, 1, 1]);
/// let zeros = || field([0.0; 4]); // scores that are alike
/// let v = field([1.0, f32::NAN, 3.0, 5.0]);
/// let mask = field([1.0, 0.0, 1.0, 1.0]);
/// let options = NeighborhoodOptions::new([3]);
/// let y = masked_neighborhood_attention(zeros(), zeros(), v, mask, &options)?;
/// let y = y.into_data().iter::<f32>().collect::<Vec<_>>();
/// assert_eq!(y, [2.0, 2.0, 4.0, 4.0]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_neighborhood_attention<const D: usize, const N: usize, X: Field<D>>(
    q: X,
    k: X,
    v: X,
    mask: X,
    options: &NeighborhoodOptions<N>,
) -> Result<X> {
    const NAME: &str = "masked_neighborhood_attention";
    attended(NAME, [q, k, v], mask, options.scale, |[q, k, v], scale| {
        neighborhood_attention(q, k, v, &options.with_scale(scale))
    })
}

/// Attention of every cell to the cells that count, each with its weight, such as its area; zero if
/// none counts.
///
/// # Shapes
/// `q`, `k` and `v` as for [`cell_attention`]; `mask` is `[batch or 1, *spatial, 1, 1]`.
///
/// # Errors
/// Fails for a mask of another shape, and for a scale that is zero or not finite; otherwise errors
/// of [`cell_attention`] and [`apply_mask`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::AttentionOptions;
/// use halocline_ops::masked::masked_cell_attention;
///
/// let field = |cells: [f32; 4]| Tensor::<1>::from(cells).reshape([1, 4, 1, 1]);
/// let zeros = || field([0.0; 4]);
/// let v = field([1.0, f32::NAN, 3.0, 5.0]);
/// let areas = field([1.0, 0.0, 2.0, 1.0]);
/// let options = AttentionOptions::default();
/// let y = masked_cell_attention(zeros(), zeros(), v, areas, &options)?;
/// assert!((y.into_data().iter::<f32>().next().unwrap() - 3.0).abs() < 1e-5);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_cell_attention<const D: usize, X: Field<D>>(
    q: X,
    k: X,
    v: X,
    mask: X,
    options: &AttentionOptions,
) -> Result<X> {
    const NAME: &str = "masked_cell_attention";
    attended(NAME, [q, k, v], mask, options.scale, |[q, k, v], scale| {
        cell_attention(q, k, v, &options.clone().with_scale(scale))
    })
}

/// Runs attention with the width extended by one element: keys hold the logarithms of their weights
/// there, and queries the factor that adds these to the scores.
fn attended<const D: usize, X: Field<D>>(
    operator: &str,
    [q, k, v]: [X; 3],
    mask: X,
    scale: Option<f64>,
    attention: impl FnOnce([ShardTensor<D>; 3], f64) -> Result<ShardTensor<D>>,
) -> Result<X> {
    let [k, v, mask] = [k, v, mask].map(Field::into_shard);
    q.try_op(|q| {
        let (held, shape) = (mask.dims(), k.dims());
        let follows = |dim: usize| held[dim] == shape[dim] || (dim == 0 && held[0] == 1);
        if D < 4 || held[D - 2..] != [1, 1] || !(0..D - 2).all(follows) {
            let message = format!(
                "a mask {held:?} for keys {shape:?}; expected [batch or 1, *spatial, 1, 1]"
            );
            return Err(Error::operator(operator, message));
        }
        let scale = scale.unwrap_or_else(|| (q.dims()[D - 1] as f64).powf(-0.5));
        if scale == 0.0 || !scale.is_finite() {
            let message = format!("scale {scale}; expected a finite number other than zero");
            return Err(Error::operator(operator, message));
        }
        let dtype = q.local().dtype();
        let mask = weights(mask, dtype)?;
        let [q, k, v] = [q, k, v].map(|x| cast_shard(x, wider(dtype)));
        let [q, k, v] = [q, k, v].map(|x| apply_mask(x, mask.clone()));
        let (q, k, v) = (q?, k?, v?);
        let (ones, zeros) = (column(&q, scale.recip()), column(&k, 0.0));
        let logarithms = Error::catch(|| zeros + logarithms(mask))?;
        let q = cat(vec![q, ones], D - 1)?;
        let k = cat(vec![k, logarithms], D - 1)?;
        Ok(cast_shard(attention([q, k, v], scale)?, dtype))
    })
}

/// Logarithms of weights.
fn logarithms<const D: usize>(mask: ShardTensor<D>) -> ShardTensor<D> {
    let (local, layout, mesh) = mask.into_parts();
    let none = local.clone().lower_equal_elem(0.0);
    let logarithms = local.mask_fill(none.clone(), 1.0).log();
    ShardTensor::from_parts(logarithms.mask_fill(none, NOTHING), layout, mesh)
}

/// One-element extension of the width of a field, with a constant value.
fn column<const D: usize>(x: &ShardTensor<D>, value: f64) -> ShardTensor<D> {
    let layout = x.layout().resized(D - 1, vec![1]);
    let mut shape = x.local().dims();
    shape[D - 1] = 1;
    let full = Tensor::full(shape, value, (&x.local().device(), x.local().dtype()));
    ShardTensor::from_parts(full, layout, x.mesh().clone())
}
