//! Products of modes: a complex matrix over channels for each mode.
//!
//! `y[b, o, k] = Σ_i x[b, i, k] · w[i, o, k]` in complex arithmetic; the last dim holds real and
//! imaginary parts.
//!
//! # Shapes
//! `x` `[batch, channels_in, *modes, 2]`, `weight` `[channels_in, channels_out, *modes, 2]`.
//! Trailing mode dims of `weight` may have size 1, which broadcasts. The result is
//! `[batch, channels_out, *modes, 2]`.
//!
//! # Placement
//! All dims but the last may be sharded. A replicated weight is cut to the modes and channels of
//! `x`. A weight sharded in `channels_out` makes the result sharded in its channels. Where
//! `channels_in` is sharded, the result is `Partial(Sum)`.
//!
//! # Adjoint
//! `x̄ = ȳ · w*` and `w̄ = x* · ȳ`, where `*` is the complex conjugate, summed over the dims that
//! the operand lacks.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Tensor};
use halocline_core::ops::{BackwardPass, Operator, apply, fan_out, fan_out_with};
use halocline_core::{
    Error, Fan, Layout, Linearity, Pairing, Placement, Replicate, Result, Role, Shard, ShardTensor,
    Term, tasks,
};

use crate::driver::empty::{drop_empty, fill_empty};
use crate::kernel::buffer::{Buffer, filled};
use crate::kernel::flex::{self, Float, with_float};
use crate::operand::Operand;
use crate::reshape;

const NAME: &str = "mode_product";

/// Multiplies the channels of every mode by a complex matrix. See the [module](self).
///
/// # Errors
/// Shapes or dtypes that do not match; a weight with partial values; operands whose shardings do
/// not combine.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::spectral::mode_product;
///
/// // One channel and one mode: (1 + 2i)(3 + 4i) = −5 + 10i.
/// let x = ShardTensor::solo(Tensor::<4>::from([[[[1.0, 2.0]]]]));
/// let y = mode_product(x, Tensor::<4>::from([[[[3.0, 4.0]]]]))?;
/// y.into_local().into_data().assert_eq(&[[[[-5.0_f32, 10.0]]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn mode_product<const D: usize>(
    x: ShardTensor<D>,
    weight: impl Into<Operand<D>>,
) -> Result<ShardTensor<D>> {
    let weight = weight.into();
    let own = own_modes(NAME, &x.dims(), x.local().dtype(), &weight)?;
    let weight = weight.place_on(&x)?;
    x.require_whole(NAME, D - 1)?;
    weight.require_whole(NAME, D - 1)?;
    let cut = cut(x.layout(), weight.layout(), own);
    let weight = weight.try_redistribute(&cut)?;
    let (layout, fans) = rule(NAME, x.layout(), weight.layout(), own)?;
    let kernels = flex::runs_on(&x.local().device());
    let filled = |local: Tensor<D>, layout: &Layout| {
        let all: Vec<usize> = (0..D).collect();
        if kernels {
            Ok(local)
        } else {
            fill_empty(local, layout, &all, NAME, 0.0)
        }
    };
    let (x, layout_x, mesh) = x.into_parts();
    let (weight, layout_weight, _) = weight.into_parts();
    let weight = fan_out_with(weight, &x, &mesh, &fans[1], NAME);
    let x = fan_out(x, &mesh, &fans[0], NAME);
    let (x, weight) = (filled(x, &layout_x)?, filled(weight, &layout_weight)?);
    let mut y = if kernels {
        let inputs = [x.into_dispatch(), weight.into_dispatch()];
        Tensor::from_dispatch(apply(ModeProduct, inputs))
    } else {
        composed(x, weight)
    };
    if !kernels {
        y = drop_empty(y, &layout, mesh.position(), NAME)?;
    }
    Ok(ShardTensor::from_parts(y, layout, mesh))
}

/// Checks a weight against modes; returns the number of leading mode dims that it does not
/// broadcast.
pub(crate) fn own_modes<const D: usize>(
    operator: &'static str,
    x: &[usize],
    dtype: DType,
    weight: &Operand<D>,
) -> Result<usize> {
    let (shape, weight_dtype) = (weight.dims(), weight.dtype());
    if weight_dtype != dtype {
        let message = format!("a weight of {weight_dtype:?} for {dtype:?}");
        return Err(Error::operator(operator, message));
    }
    if let ([_, channels, modes @ .., 2], [channels_in, _, held @ .., 2]) = (x, &shape[..])
        && channels == channels_in
    {
        let own = modes.len() - held.iter().rev().take_while(|&&size| size == 1).count();
        if modes[..own] == held[..own] {
            return Ok(own);
        }
    }
    let message = format!(
        "x {x:?} and weight {shape:?}; expected [batch, in, *modes, 2] and [in, out, *modes, 2], where the last modes of a \
         weight may be 1"
    );
    Err(Error::operator(operator, message))
}

/// Checks the sharding of a weight against a field, before the field is transformed and anything is
/// sent. Channels keep their shards; a mesh axis that shards a spatial dim of the field shards
/// modes afterwards, in the same dim or another.
pub(crate) fn check_channels<const D: usize>(
    operator: &str,
    field: &Layout,
    weight: &Operand<D>,
) -> Result<()> {
    let weight = weight.layout_on(field.mesh());
    if weight.mesh() != field.mesh() {
        let message = format!("{field} and {weight} are on two meshes");
        return Err(Error::operator(operator, message));
    }
    weight.require_whole(operator, D - 1)?;
    let moves = |axis: &usize| matches!(field.placements()[*axis], Shard(dim) if dim >= 2);
    let mut placements = weight.placements().to_vec();
    let mut extents = weight.all_extents().to_vec();
    for (dim, extents) in extents.iter_mut().enumerate().take(D - 1).skip(2) {
        let axes = weight.axes_of(dim);
        if !axes.iter().all(moves) {
            weight.require_whole(operator, dim)?;
        }
        axes.iter().for_each(|axis| placements[*axis] = Replicate);
        *extents = vec![weight.shape()[dim]];
    }
    let channels = weight.derive(placements, extents);
    let mut extents = field.all_extents().to_vec();
    extents.push(vec![2]);
    let modes = field.derive(field.placements().to_vec(), extents);
    rule(operator, &modes, &cut(&modes, &channels, 0), 0).map(drop)
}

/// Layout of a weight, cut to the cells of `x` where it is replicated or fanned out.
fn cut(x: &Layout, weight: &Layout, own: usize) -> Layout {
    let mut extents = weight.all_extents().to_vec();
    let pairs = x.placements().iter().zip(weight.placements());
    let placements: Vec<Placement> = pairs
        .map(|(placement, held)| {
            let dim = match (placement, held) {
                (Shard(1), Replicate | Fan) => 0,
                (Shard(dim), Replicate | Fan) if (2..2 + own).contains(dim) => *dim,
                _ => return *held,
            };
            // Already sharded over another axis, or not replicated on every axis that shards x:
            // left to the pairing rule.
            let free = |axis: usize| matches!(weight.placements()[axis], Replicate | Fan);
            if weight.is_sharded(dim) || !x.axes_of(dim.max(1)).into_iter().all(free) {
                return *held;
            }
            extents[dim] = x.extents(dim.max(1)).to_vec();
            Shard(dim)
        })
        .collect();
    weight.derive(placements, extents)
}

/// Layout of the result, and the axes over which each operand fans out.
fn rule(
    operator: &str,
    x: &Layout,
    weight: &Layout,
    own: usize,
) -> Result<(Layout, [Vec<usize>; 2])> {
    let dims = x.shape().len();
    let result: Vec<Role> = (0..dims).map(Role::Common).collect();
    let (mut roles_x, mut roles_weight) = (result.clone(), result.clone());
    roles_x[1] = Role::Common(dims);
    roles_weight[0] = Role::Common(dims);
    roles_weight[2 + own..dims - 1].fill(Role::Broadcast);
    let term = |name, layout, roles| Term {
        name,
        layout,
        roles,
    };
    let terms = [
        term("x", x, &roles_x[..]),
        term("weight", weight, &roles_weight),
    ];
    let pairing = Pairing::new(operator, &terms, &result, Linearity::Multiplicative)?;
    let fans = [0, 1].map(|operand| pairing.fan_out(operand).to_vec());
    Ok((pairing.layout(x), fans))
}

/// Product of one shard, as a node of the graph.
#[derive(Debug)]
struct ModeProduct;

/// Sizes of a product: `x` has `own · shared` modes, of which the weight has `own`.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    channels: [usize; 2],
    own: usize,
    shared: usize,
}

impl Sizes {
    fn of(x: &[usize], weight: &[usize]) -> Self {
        let modes = |shape: &[usize]| shape[2..shape.len() - 1].to_vec();
        let (modes, held) = (modes(x), modes(weight));
        // Where sizes differ, the weight has size 1.
        let pairs = || modes.iter().zip(&held);
        Self {
            batch: x[0],
            channels: [weight[0], weight[1]],
            own: held.iter().product(),
            shared: pairs()
                .filter(|(x, own)| x != own)
                .map(|(x, _)| x)
                .product(),
        }
    }

    fn modes(self) -> usize {
        self.own * self.shared
    }
}

impl Operator for ModeProduct {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some([NAME, "mode_product_backward"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let (weight, x) = (inputs.remove(1), inputs.remove(0));
        let (dtype, mut shape) = (x.dtype(), x.shape().to_vec());
        let sizes = Sizes::of(&shape, &weight.shape());
        let [channels_in, channels_out] = sizes.channels;
        shape[1] = channels_out;
        let y = with_float!(dtype, E => {
            let (x, weight) = (flex::operand::<E>(x)?, flex::operand::<E>(weight)?);
            let (x, weight) = (flex::elements::<E>(&x), flex::elements::<E>(&weight));
            let rows = [sizes.batch, channels_out, channels_in];
            let y = products(rows, sizes, [x, weight], Factors::Plain, |b, o, i| {
                [b * channels_in + i, i * channels_out + o]
            });
            flex::result(y, &shape, dtype)
        });
        Ok((y, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let [x, weight] = [0, 1].map(|input| pass.take_input(input));
        let (dtype, shapes) = (x.dtype(), [x.shape().to_vec(), weight.shape().to_vec()]);
        let sizes = Sizes::of(&shapes[0], &shapes[1]);
        let ([channels_in, channels_out], batch) = (sizes.channels, sizes.batch);
        Ok(with_float!(dtype, E => {
            let y = flex::operand::<E>(pass.cotangent)?;
            let (x, weight) = (flex::operand::<E>(x)?, flex::operand::<E>(weight)?);
            let (x, weight) = (flex::elements::<E>(&x), flex::elements::<E>(&weight));
            let y = flex::elements::<E>(&y);
            let of_x = pass.wanted[0].then(|| {
                let rows = [batch, channels_in, channels_out];
                let found = products(rows, sizes, [y, weight], Factors::Conjugate, |b, i, o| {
                    [b * channels_out + o, i * channels_out + o]
                });
                flex::result(found, &shapes[0], dtype)
            });
            let of_weight = pass.wanted[1].then(|| {
                let rows = [channels_in, channels_out, batch];
                let found = products(rows, sizes, [y, x], Factors::SummedConjugate, |i, o, b| {
                    [b * channels_out + o, b * channels_in + i]
                });
                flex::result(found, &shapes[1], dtype)
            });
            vec![of_x, of_weight]
        }))
    }
}

/// Kind of a product of rows.
#[derive(Clone, Copy)]
enum Factors {
    /// Modes times the weight.
    Plain,
    /// Modes times the conjugate weight.
    Conjugate,
    /// Modes times conjugate modes, summed over those that share a weight.
    SummedConjugate,
}

/// Computes rows of modes `[rows, columns]`, each the sum of `terms` products of rows of the two
/// factors.
fn products<E: Float>(
    [rows, columns, terms]: [usize; 3],
    sizes: Sizes,
    [left, right]: [&[E]; 2],
    factors: Factors,
    places: impl Fn(usize, usize, usize) -> [usize; 2] + Sync,
) -> Buffer<E> {
    let (modes, own, shared) = (sizes.modes(), sizes.own, sizes.shared);
    let [length, length_right] = match factors {
        Factors::SummedConjugate => [own, modes],
        _ => [modes, own],
    };
    let mut y = filled(rows * columns * length * 2, 0.0);
    if length == 0 {
        return y;
    }
    tasks::for_each_part(y.elements_mut(), 2 * length, 1, |place, sums| {
        for term in 0..terms {
            let [a, b] = places(place / columns, place % columns, term);
            let a = &left[2 * a * modes..][..2 * modes];
            let b = &right[2 * b * length_right..][..2 * length_right];
            match factors {
                Factors::Plain if shared == 1 => add(sums, a, b),
                _ => add_shared(sums, a, b, shared, factors),
            }
        }
    });
    y
}

/// `sums += a · b`.
fn add<E: Float>(sums: &mut [E], a: &[E], b: &[E]) {
    let pairs = sums
        .chunks_exact_mut(2)
        .zip(a.chunks_exact(2))
        .zip(b.chunks_exact(2));
    for ((sum, a), b) in pairs {
        sum[0] += a[0] * b[0] - a[1] * b[1];
        sum[1] += a[0] * b[1] + a[1] * b[0];
    }
}

/// The sum of [`add`], for all kinds of factors.
fn add_shared<E: Float>(sums: &mut [E], left: &[E], right: &[E], shared: usize, factors: Factors) {
    for (k, a) in left.chunks_exact(2).enumerate() {
        let (sum, b) = match factors {
            Factors::SummedConjugate => (k / shared, k),
            _ => (k, k / shared),
        };
        let (sum, b) = (&mut sums[2 * sum..][..2], &right[2 * b..][..2]);
        if let Factors::Plain = factors {
            sum[0] += a[0] * b[0] - a[1] * b[1];
            sum[1] += a[0] * b[1] + a[1] * b[0];
        } else {
            sum[0] += a[0] * b[0] + a[1] * b[1];
            sum[1] += a[1] * b[0] - a[0] * b[1];
        }
    }
}

/// Computes the product by burn's operators: one real matrix product for each mode.
fn composed<const D: usize>(x: Tensor<D>, weight: Tensor<D>) -> Tensor<D> {
    let mut shape = x.dims().to_vec();
    let sizes = Sizes::of(&shape, &weight.dims());
    let (modes, batch, [channels_in, channels_out]) = (sizes.modes(), sizes.batch, sizes.channels);
    let x: Tensor<4> = reshape(x, vec![batch, channels_in, modes, 2]);
    let x: Tensor<3> = reshape(x.permute([2, 0, 1, 3]), vec![modes, batch, 2 * channels_in]);
    let own = vec![channels_in, channels_out, sizes.own, 1, 2];
    let weight: Tensor<5> = reshape(weight, own);
    let weight = weight.repeat(&[1, 1, 1, sizes.shared, 1]);
    let weight: Tensor<4> = reshape(weight, vec![channels_in, channels_out, modes, 2]);
    let [re, im] = [0, 1].map(|part| weight.clone().narrow(3, part, 1));
    let rows = [vec![re.clone(), im.clone()], vec![im.neg(), re]];
    let rows = rows.map(|row| Tensor::cat(row, 3)); // [in, out, modes, part of y]
    let matrix = Tensor::stack::<5>(rows.into(), 3); // [in, out, modes, part of x, part of y]
    let matrix = matrix.permute([2, 0, 3, 1, 4]);
    let matrix: Tensor<3> = reshape(matrix, vec![modes, 2 * channels_in, 2 * channels_out]);
    let y: Tensor<4> = reshape(x.matmul(matrix), vec![modes, batch, channels_out, 2]);
    shape[1] = channels_out;
    reshape(y.permute([1, 2, 0, 3]), shape)
}
