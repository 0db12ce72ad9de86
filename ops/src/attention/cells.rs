//! Dense attention among the cells of a field.

use halocline_core::{DeviceMesh, Error, Layout, Result, ShardTensor};

use super::attended::AttentionOutput;
use super::dense::{
    self, AttentionOptions, scaled_dot_product_attention, scaled_dot_product_attention_with_lse,
};
use super::tokens;
use crate::graph::merged;
use crate::operand::fan_out_alike;
use crate::reshape;

/// Attention of every cell of a field to all cells of a field: `[batch, *spatial, heads, width]`,
/// with one to three spatial dims. Queries may have other spatial dims than keys and values.
///
/// Cells become tokens in the order in which ranks hold them, so that a field sharded in several
/// dims needs no redistribution; the result does not depend on the order. Placement and
/// communication are those of [`scaled_dot_product_attention`] with tokens sharded over all axes on
/// which a spatial dim is. Queries may be replicated where cells of keys are sharded.
///
/// # Errors
/// The errors of [`scaled_dot_product_attention`]; causal order, a bias, key padding or dropout,
/// which would depend on the order; keys and values with different layouts of their spatial dims.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::{AttentionOptions, attention::cell_attention};
///
/// Launcher::local(4).run(|world| {
///     let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
///     let field = || ShardTensor::<5>::ones([1, 3, 5, 2, 4], &mesh, &[Shard(1), Shard(2)]);
///     let y = cell_attention(field()?, field()?, field()?, &AttentionOptions::default())?;
///     assert_eq!((y.dims(), y.placements()), ([1, 3, 5, 2, 4], &[Shard(1), Shard(2)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cell_attention<const D: usize>(
    q: ShardTensor<D>,
    k: ShardTensor<D>,
    v: ShardTensor<D>,
    options: &AttentionOptions,
) -> Result<ShardTensor<D>> {
    let [q, k, v] = fan_out_alike([q, k, v])?;
    check("cell_attention", &k, &v, options)?;
    let (layout, mesh) = (q.layout().clone(), q.mesh().clone());
    let y = scaled_dot_product_attention(flat(q), flat(k), flat(v), options)?;
    Ok(cells(y, &layout, &mesh))
}

/// Attention of every cell of a field to all its cells and to further tokens, with one softmax over
/// both.
///
/// The `keys` and `values` of these tokens are as in
/// [`neighborhood_attention_with_tokens`](super::neighborhood_attention_with_tokens). If queries
/// and keys are of two fields, the placement of the tokens follows the queries.
///
/// # Errors
/// The errors of [`cell_attention`]; tokens that do not fit.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::{AttentionOptions, attention::cell_attention_with_tokens};
///
/// let field = |value| ShardTensor::solo(Tensor::<4>::full([1, 3, 1, 4], value, &Default::default()));
/// let token = |value| ShardTensor::solo(Tensor::<4>::full([1, 1, 1, 4], value, &Default::default()));
/// // Three cells with values of 1, and a token with a value of 5.
/// let y = cell_attention_with_tokens(
///     [field(0.0), field(0.0), field(1.0)],
///     [token(0.0), token(5.0)],
///     &AttentionOptions::default(),
/// )?;
/// assert_eq!(y.into_local().into_data().iter::<f32>().next(), Some(2.0));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cell_attention_with_tokens<const D: usize>(
    fields: [ShardTensor<D>; 3],
    tokens: [ShardTensor<4>; 2],
    options: &AttentionOptions,
) -> Result<ShardTensor<D>> {
    Ok(cell_attention_with_tokens_and_lse(fields, tokens, options)?.output)
}

/// Attention of every cell of a field to all its cells and to further tokens, with its log-sum-exps
/// over both. See [`cell_attention_with_tokens`].
///
/// # Errors
/// The errors of [`cell_attention_with_tokens`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::{AttentionOptions, attention::cell_attention_with_tokens_and_lse};
///
/// let field = || ShardTensor::solo(Tensor::<4>::zeros([1, 3, 1, 4], &Default::default()));
/// let token = || ShardTensor::solo(Tensor::<4>::zeros([1, 1, 1, 4], &Default::default()));
/// let y = cell_attention_with_tokens_and_lse(
///     [field(), field(), field()],
///     [token(), token()],
///     &AttentionOptions::default(),
/// )?;
/// let lse = y.lse.into_local().into_data(); // of three cells and a token
/// assert!(lse.iter::<f32>().all(|lse| (lse - 4.0_f32.ln()).abs() < 1e-6));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cell_attention_with_tokens_and_lse<const D: usize>(
    [q, k, v]: [ShardTensor<D>; 3],
    tokens: [ShardTensor<4>; 2],
    options: &AttentionOptions,
) -> Result<AttentionOutput<ShardTensor<D>>> {
    const NAME: &str = "cell_attention_with_tokens";
    let [q, k, v] = fan_out_alike([q, k, v])?;
    check(NAME, &k, &v, options)?;
    let [queries, keys, values] = [&q, &k, &v].map(|field| flat(field.clone()));
    dense::check(&queries, &keys, &values)?;
    let global = tokens::attention(NAME, q.clone(), [&k, &v], tokens, options.scale)?;
    let all = with_lse([q, k, v], options)?;
    Ok(AttentionOutput::merge(vec![all, global]))
}

/// [`cell_attention`] with its log-sum-exps.
pub(super) fn with_lse<const D: usize>(
    [q, k, v]: [ShardTensor<D>; 3],
    options: &AttentionOptions,
) -> Result<AttentionOutput<ShardTensor<D>>> {
    let (layout, mesh) = (q.layout().clone(), q.mesh().clone());
    let all = scaled_dot_product_attention_with_lse(flat(q), flat(k), flat(v), options)?;
    Ok(all.map(|y| cells(y, &layout, &mesh)))
}

fn check<const D: usize>(
    operator: &str,
    k: &ShardTensor<D>,
    v: &ShardTensor<D>,
    options: &AttentionOptions,
) -> Result<()> {
    let fail = |message: String| Err(Error::operator(operator, message));
    if !(4..=6).contains(&D) {
        return fail(format!(
            "{:?}; expected [batch, *spatial, heads, width]",
            k.dims()
        ));
    }
    let orderless = options.bias.is_none() && options.key_padding.is_none();
    if options.causal || !orderless || options.dropout.is_some() {
        return fail(
            "causal order, bias, padding and dropout need an order of cells; flatten() gives one"
                .into(),
        );
    }
    let spatial = |tensor: &ShardTensor<D>| tensor.layout().all_extents()[1..D - 2].to_vec();
    if spatial(k) == spatial(v) && k.placements() == v.placements() {
        return Ok(());
    }
    Err(Error::placement(
        operator,
        format!("keys {} with values {}", k.layout(), v.layout()),
        "redistribute the values to the layout of the keys",
    ))
}

/// Reshapes tokens to the cells of a field of this layout, except for its width.
fn cells<const D: usize>(y: ShardTensor<4>, layout: &Layout, mesh: &DeviceMesh) -> ShardTensor<D> {
    let layout = layout.resized(D - 1, vec![y.dims()[3]]);
    let local = reshape(y.into_local(), layout.local_shape(mesh.position()));
    ShardTensor::from_parts(local, layout, mesh.clone())
}

/// Flattens cells to tokens, in the order in which ranks hold them.
fn flat<const D: usize>(x: ShardTensor<D>) -> ShardTensor<4> {
    merged(x, 1..D - 2)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Tensor, TensorData};
    use halocline_core::{Launcher, Placement, Replicate, Shard};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op, compare, cotangent_of, gradient_of, random_leaf};

    struct Cells;

    impl Operator<5, 5> for Cells {
        fn apply<X: Field<5>>(&self, inputs: Vec<X>, _: Vec<Tensor<5>>) -> X {
            let mut inputs = inputs.into_iter().map(Field::into_shard);
            let [q, k, v] = [(); 3].map(|()| inputs.next().unwrap());
            X::from_shard(cell_attention(q, k, v, &AttentionOptions::default()).unwrap())
        }
    }

    #[test]
    fn queries_that_do_not_fit_tokens_are_refused() {
        let cells = |heads, width| {
            let cells = Tensor::<4>::zeros([1, 4, heads, width], &Default::default());
            ShardTensor::solo(cells)
        };
        for (heads, width) in [(3, 8), (2, 4)] {
            let fields = [cells(heads, width), cells(2, 8), cells(2, 8)];
            let tokens = [cells(2, 8), cells(2, 8)];
            let refused = cell_attention_with_tokens(fields, tokens, &Default::default());
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("n·heads"), "{error}");
        }
    }

    /// Output, and gradients of queries, keys and the keys of tokens.
    fn results(
        axes: [usize; 2],
        queries: [Placement; 2],
        placed: [Placement; 2],
    ) -> Vec<Vec<TensorData>> {
        let found = Launcher::local(axes[0] * axes[1]).collect(|world| {
            let mesh = world.mesh([("a", axes[0]), ("b", axes[1])])?;
            let q = random_leaf([2, 2, 3, 4, 5], "q", &mesh, &queries)?;
            let k = random_leaf([2, 3, 5, 2, 5], "k", &mesh, &placed)?;
            let v = random_leaf([2, 3, 5, 2, 5], "v", &mesh, &placed)?;
            let token = |name: &str| random_leaf([1, 2, 2, 5], name, &mesh, &[Replicate; 2]);
            let (key, value) = (token("key")?, token("value")?);
            let y = cell_attention_with_tokens(
                [q.clone(), k.clone(), v],
                [key.clone(), value],
                &AttentionOptions::default(),
            )?;
            let gradients = crate::reduce::sum(y.clone() * cotangent_of(&y)?)?.backward();
            let [query, keys] = [q, k].map(|leaf| gradient_of(&leaf, &gradients));
            let key = gradient_of(&key, &gradients);
            Ok(vec![y.full_tensor().into_data(), query, keys, key])
        });
        found.unwrap()
    }

    #[test]
    fn queries_may_be_of_another_field() {
        let whole = [Replicate; 2];
        let expected = results([1, 1], whole, whole).remove(0);
        for (axes, queries, placed) in [
            ([2, 2], whole, [Shard(1), Shard(2)]),
            ([2, 4], [Shard(2), Replicate], [Shard(1), Shard(1)]),
            ([2, 2], [Shard(2), Shard(1)], [Replicate, Shard(2)]),
        ] {
            for found in results(axes, queries, placed) {
                let place = format!("queries {queries:?}, keys {placed:?}");
                compare(&found, &expected, 2e-5, &place);
            }
        }
    }

    #[test]
    fn any_sharding_gives_the_result_of_one_device() {
        let shape = [2, 3, 4, 2, 5];
        check_op(&Cells, &[shape; 3], &[], &[0, 1, 2, 3], 1e-5);
    }
}
