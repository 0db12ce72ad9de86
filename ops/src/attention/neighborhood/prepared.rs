//! Placement rule of neighborhood attention: layouts, and the work of each rank.

use halocline_core::{Error, Layout, Result, ShardTensor};

use super::options::NeighborhoodOptions;
use super::run::NeighborhoodRun;
use crate::attention::dense::check_rows;
use crate::attention::engine::tiles::Dim;
use crate::driver::{Neighborhood, Reach, Reaches};
use crate::kernel::simd::Isa;

/// Work of a rank, and the layouts that follow from the rule.
pub(super) struct Prepared {
    pub operator: &'static str,
    pub run: NeighborhoodRun,
    /// Layout of keys and values, concatenated in every head.
    pub pairs: Layout,
    pub output: Layout,
}

impl Prepared {
    /// # Errors
    /// Shapes, dtypes or placements that do not fit; a neighborhood that does not fit its
    /// dim.
    pub(super) fn new<const D: usize, const N: usize>(
        q: &ShardTensor<D>,
        k: &ShardTensor<D>,
        v: &ShardTensor<D>,
        options: &NeighborhoodOptions<N>,
        with_lse: bool,
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
        #[cfg(feature = "cube")]
        crate::attention::cube::check(operator, &q.device(), q.local().dtype())?;
        Isa::chosen()?;
        let [key_width, value_width] = [k.dims()[D - 1], v.dims()[D - 1]];
        // Keys and values are sent as one tensor, concatenated in every head.
        let pairs = k.layout().resized(D - 1, vec![key_width + value_width]);
        let (mesh, cache) = (q.mesh().clone(), q.mesh().cache());
        let plan = cache.get_or_make(
            (operator, options.dims, pairs.clone()),
            |(_, dims, pairs)| {
                let reaches = dims.map(Reach::Neighborhood);
                let reaches = Reaches {
                    operator,
                    first: 1,
                    dims: &reaches,
                };
                reaches.plan(pairs, &mesh, pairs, 0.0)
            },
        )?;
        let output = q.layout().resized(D - 1, vec![value_width]);
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
            exchange: plan.exchange(operator, &pairs, &mesh),
            widths: [key_width, value_width],
            scale: options.scale.unwrap_or(1.0 / (key_width as f64).sqrt()),
            with_lse,
        };
        Ok(Self {
            operator,
            run,
            pairs,
            output,
        })
    }
}

/// Whether the exchange supplies all keys of a dim; otherwise they are this rank's own.
fn supplied(neighborhood: &Neighborhood, layout: &Layout, dim: usize) -> bool {
    layout.extents(dim).len() > 1 || neighborhood.periodic
}

/// Checks that queries, keys and values have the same layout.
fn check<const D: usize>(
    operator: &str,
    q: &ShardTensor<D>,
    k: &ShardTensor<D>,
    v: &ShardTensor<D>,
) -> Result<()> {
    let [shape_q, shape_k, shape_v] = [q.dims(), k.dims(), v.dims()];
    let (heads, width) = (D - 2, D - 1);
    let shared = shape_q[heads].checked_div(shape_k[heads]).unwrap_or(0);
    let fits = shape_q[..heads] == shape_k[..heads]
        && shape_q[width] == shape_k[width]
        && shape_k[..width] == shape_v[..width]
        && shape_k[heads] * shared == shape_q[heads]
        && shared > 0
        && shape_q[width] > 0
        && shape_v[width] > 0;
    if !fits {
        let message = format!(
            "queries {shape_q:?}, keys {shape_k:?}, values {shape_v:?}; expected [batch, *spatial, n·heads, width], \
             [batch, *spatial, heads, width] and [batch, *spatial, heads, value_width]"
        );
        return Err(Error::operator(operator, message));
    }
    check_rows(operator, [q, k, v])?;
    let alike = |tensor: &ShardTensor<D>| {
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
        if !alike(tensor) {
            return Err(Error::placement(
                operator,
                format!("{name} {} with queries {}", tensor.layout(), q.layout()),
                format!(
                    "redistribute them, to a layout by Layout::with_extents if extents differ, with the same cells on every \
                     rank, and {shared} heads of queries for each of its heads of keys"
                ),
            ));
        }
    }
    Ok(())
}
