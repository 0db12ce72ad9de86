//! Attention: a query's weighted mean of values, by the products of the query with their keys.
//!
//! # Neighborhood attention
//! `y[i] = Σ_j softmax_j(scale · q[i]·k[j]) · v[j]` over the keys in the query's [`Neighborhood`] in every spatial dim.
//! Semantics follow NATTEN 0.21, with periodic dims in addition.
//!
//! ## Shapes
//! Global `q` is `[batch, *spatial, heads, width]`, `k` `[batch, *spatial, key_heads, width]`, `v` and the result have a width of
//! their own: `[batch, *spatial, key_heads, value_width]` and `[batch, *spatial, heads, value_width]`. One head of keys and values
//! serves `heads / key_heads` neighbouring heads of queries.
//!
//! ## Placement
//! Batch, spatial dims and heads may be sharded, in any combination and with any extents, alike for all three; widths must be
//! whole, values resolved. Keys and values that other ranks hold travel together, in one exchange; queries never travel.
//!
//! ## Adjoint
//! Scores are computed anew. Gradients of keys and values of other ranks travel back and add up there.

mod composed;
mod dense;
mod engine;
mod golden;
mod node;
mod passes;
#[cfg(test)]
mod tests;

use halocline_core::{Error, Exchange, Layout, Operation, Result, ShardTensor, Traffic};

use crate::driver::{Neighborhood, Reach, Reaches};
use crate::field::{Field, run};
use crate::kernel::flex;
use crate::kernel::simd::Isa;
pub use dense::{AttentionOptions, causal_extents, scaled_dot_product_attention};
use engine::tiles::Dim;
pub(crate) use golden::OPERATORS;
use node::NeighborhoodRun;

/// Neighborhoods of `N` spatial dims, and the scale of scores.
///
/// # Example
/// ```
/// use halocline_ops::NeighborhoodOptions;
///
/// // A weather field: clamped at the poles, periodic in longitude.
/// let options = NeighborhoodOptions::new([7, 7]).with_periodic([false, true]);
/// assert_eq!(options.dims[1].kernel, 7);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NeighborhoodOptions<const N: usize> {
    /// The neighborhood in every spatial dim.
    pub dims: [Neighborhood; N],
    /// What scores are multiplied with: `width^-1/2` if it is not given.
    pub scale: Option<f64>,
}

impl<const N: usize> NeighborhoodOptions<N> {
    /// Neighborhoods of so many neighbouring keys in every dim.
    pub fn new(kernel: [usize; N]) -> Self {
        Self {
            dims: kernel.map(Neighborhood::new),
            scale: None,
        }
    }

    fn with<T: Copy>(mut self, values: [T; N], set: impl Fn(&mut Neighborhood, T)) -> Self {
        self.dims.iter_mut().zip(values).for_each(|(dim, value)| set(dim, value));
        self
    }

    /// These options with another distance from one key to the next.
    #[must_use]
    pub fn with_dilation(self, dilation: [usize; N]) -> Self {
        self.with(dilation, |dim, value| dim.dilation = value)
    }

    /// These options with so many neighbouring queries that share a window.
    #[must_use]
    pub fn with_stride(self, stride: [usize; N]) -> Self {
        self.with(stride, |dim, value| dim.stride = value)
    }

    /// These options with dims in which only keys up to the query's own place count.
    #[must_use]
    pub fn with_causal(self, causal: [bool; N]) -> Self {
        self.with(causal, |dim, value| dim.causal = value)
    }

    /// These options with dims that go on at their other end.
    #[must_use]
    pub fn with_periodic(self, periodic: [bool; N]) -> Self {
        self.with(periodic, |dim, value| dim.periodic = value)
    }

    /// These options with another scale of scores.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self {
            scale: Some(scale),
            ..self
        }
    }
}

/// Neighborhood attention. See the [module](self).
///
/// # Errors
/// Shapes, number types or placements that do not fit; a neighborhood that does not fit its dim; a failure of
/// communication.
///
/// # Example
/// ```
/// use halocline_core::{Distribution, Launcher, RandomKey, Shard, ShardTensor};
/// use halocline_ops::{NeighborhoodOptions, attention::neighborhood_attention};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let normal = Distribution::Normal { mean: 0.0, std: 1.0 };
///     // [batch, latitude, longitude, heads, width]
///     let field = |name: &str| {
///         ShardTensor::<5>::random([1, 6, 12, 2, 8], normal, RandomKey::new(0, name), &mesh, &[Shard(2)])
///     };
///     let options = NeighborhoodOptions::new([3, 5]).with_periodic([false, true]);
///     let y = neighborhood_attention(field("q")?, field("k")?, field("v")?, &options)?;
///     assert_eq!(y.dims(), [1, 6, 12, 2, 8]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn neighborhood_attention<const D: usize, const N: usize>(
    q: ShardTensor<D>,
    k: ShardTensor<D>,
    v: ShardTensor<D>,
    options: &NeighborhoodOptions<N>,
) -> Result<ShardTensor<D>> {
let prepared = Prepared::new(&q, &k, &v, options)?;
    let mesh = q.mesh().clone();
    let y = if flex::runs_on(&q.device()) {
        let [q, k, v] = [q, k, v].map(|tensor| tensor.into_parts().0);
        Error::catch(|| node::attention(q, k, v, prepared.run))?
    } else {
        composed::attention(q, k, v, &prepared)?
    };
    Ok(ShardTensor::from_parts(y, prepared.output, mesh))
}

/// What a rank does, and the layouts that follow from the rule.
struct Prepared {
    operator: &'static str,
    run: NeighborhoodRun,
    /// Keys and values, beside each other in every head.
    pairs: Layout,
    output: Layout,
}

impl Prepared {
    /// # Errors
    /// Those of [`neighborhood_attention`] but failures of communication.
    fn new<const D: usize, const N: usize>(
        q: &ShardTensor<D>,
        k: &ShardTensor<D>,
        v: &ShardTensor<D>,
        options: &NeighborhoodOptions<N>,
    ) -> Result<Self> {
    let operator = match N {
        1 => "na1d",
        2 => "na2d",
        3 => "na3d",
        _ => "neighborhood_attention",
    };
    if D != N + 3 || !(1..=3).contains(&N) {
        let message = format!(
            "neighborhoods of {N} dims for a tensor {:?}; expected [batch, *spatial, heads, width] with one to three spatial dims",
            q.dims()
        );
        return Err(Error::operator(operator, message));
    }
    check(operator, q, k, v)?;
    Isa::chosen()?;
    let [key_width, value_width] = [k.dims()[D - 1], v.dims()[D - 1]];
    let with_width = |layout: &Layout, width| {
        let mut extents = layout.all_extents().to_vec();
        extents[D - 1] = vec![width];
        layout.derive(layout.placements().to_vec(), extents)
    };
    // Keys and values travel as one tensor, beside each other in every head.
    let pairs = with_width(k.layout(), key_width + value_width);
    let (mesh, cache) = (q.mesh().clone(), q.mesh().cache());
    let plan = cache.get_or_make((operator, options.dims, pairs.clone()), |(_, dims, pairs)| {
        let reaches = dims.map(Reach::Neighborhood);
        let reaches = Reaches {
            operator,
            first: 1,
            dims: &reaches,
        };
        reaches.plan(pairs, &mesh, pairs.all_extents().to_vec(), 0.0)
    })?;
    let output = with_width(q.layout(), value_width);
    let own = q.layout().local_box(mesh.position());
    let mut dims = [(); 3].map(|()| Dim::single());
    for dim in 0..N {
        let (size, queries) = (q.dims()[dim + 1], own.ranges()[dim + 1].clone());
        let neighborhood = options.dims[dim];
        let local = k.layout().local_shape(mesh.position())[dim + 1];
        let (first_key, keys) = match &plan.exchange {
            Some(exchange) if supplied(&neighborhood, k.layout(), dim + 1) => {
                let first = neighborhood.input_range(&queries, size).start;
                (first, exchange.output_shape[dim + 1])
            }
            _ => (queries.start as isize, local),
        };
        dims[3 - N + dim] = Dim {
            neighborhood,
            size,
            queries,
            first_key,
            keys,
        };
    }
    let run = NeighborhoodRun {
        dims,
        exchange: plan.exchange.as_ref().map(|plan| {
            let operation = Operation::new(operator, Traffic::Exchange, Some(&pairs));
            let ranks = mesh.shape().ranks().into();
            Exchange::with_adjoint(operation, mesh.comm().clone(), ranks, plan.clone())
        }),
        widths: [key_width, value_width],
        scale: options.scale.unwrap_or(1.0 / (key_width as f64).sqrt()),
    };
    Ok(Self {
        operator,
        run,
        pairs,
        output,
    })
    }
}

/// Whether the exchange supplies all keys of a dim; else they are this rank's own.
fn supplied(neighborhood: &Neighborhood, layout: &Layout, dim: usize) -> bool {
    layout.extents(dim).len() > 1 || neighborhood.periodic
}

/// Checks that queries, keys and values lie alike.
fn check<const D: usize>(
    operator: &str,
    q: &ShardTensor<D>,
    k: &ShardTensor<D>,
    v: &ShardTensor<D>,
) -> Result<()> {
    let fail = |message: String| Err(Error::operator(operator, message));
    let [shape_q, shape_k, shape_v] = [q.dims(), k.dims(), v.dims()];
    let (heads, width) = (D - 2, D - 1);
    let shared = shape_q[heads].checked_div(shape_k[heads]).unwrap_or(0);
    let fits = shape_q[..heads] == shape_k[..heads]
        && shape_q[width] == shape_k[width]
        && shape_k[..width] == shape_v[..width]
        && shape_k[heads] * shared == shape_q[heads];
    if !fits {
        return fail(format!(
            "queries {shape_q:?}, keys {shape_k:?}, values {shape_v:?}; expected [batch, *spatial, n·heads, width], \
             [batch, *spatial, heads, width] and [batch, *spatial, heads, value_width]"
        ));
    }
    let types = [q, k, v].map(|tensor| tensor.local().dtype());
    if types[1..].iter().any(|dtype| *dtype != types[0]) {
        return fail(format!("queries, keys and values of {types:?}"));
    }
    for tensor in [q, k, v] {
        tensor.require_resolved(operator)?;
        tensor.require_whole(operator, width)?;
    }
    let alike = |tensor: &ShardTensor<D>, shared: usize| {
        let heads_of = |dim: usize| if dim == heads { shared } else { 1 };
        tensor.layout().mesh() == q.layout().mesh()
            && tensor.placements() == q.placements()
            && (0..width).all(|dim| {
                let (queries, keys) = (q.layout().extents(dim), tensor.layout().extents(dim));
                let scaled = keys.iter().map(|extent| extent * heads_of(dim));
                queries.iter().copied().eq(scaled)
            })
    };
    for (name, tensor) in [("keys", k), ("values", v)] {
        if !alike(tensor, shared) {
            return fail(format!(
                "{name} {} lie otherwise than queries {}; redistribute them",
                tensor.layout(),
                q.layout()
            ));
        }
    }
    Ok(())
}

/// Attention as a method.
pub trait AttentionField<const D: usize>: Field<D> {
    /// Neighborhood attention of these queries to keys and values. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`neighborhood_attention`] returns an error.
    #[must_use]
    fn neighborhood_attention<const N: usize>(
        self,
        keys: Self,
        values: Self,
        options: &NeighborhoodOptions<N>,
    ) -> Self {
        let (keys, values) = (keys.into_shard(), values.into_shard());
        run(self, |q| neighborhood_attention(q, keys, values, options))
    }
}

impl<const D: usize, X: Field<D>> AttentionField<D> for X {}

/// Dense attention as a method.
pub trait DenseAttentionField: Field<4> {
    /// Dense attention of these queries to keys and values. See [`scaled_dot_product_attention`].
    ///
    /// # Panics
    /// Panics where [`scaled_dot_product_attention`] returns an error.
    #[must_use]
    fn scaled_dot_product_attention(
        self,
        keys: Self,
        values: Self,
        options: &AttentionOptions,
    ) -> Self {
        let (keys, values) = (keys.into_shard(), values.into_shard());
        run(self, |q| scaled_dot_product_attention(q, keys, values, options))
    }
}

impl<X: Field<4>> DenseAttentionField for X {}
