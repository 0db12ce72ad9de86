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
use halocline_core::plan::{Linearity, Pairing, Role, Term};
use halocline_core::{Error, Fan, Layout, Placement, Replicate, Result, Shard, ShardTensor};

use super::products::{Factors, Sizes, products};
use crate::driver::empty::{drop_empty, fill_all};
use crate::kernel::flex::{self, with_float};
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
    multiplied(x, weight.into(), Modes::Any)
}

/// [`mode_product`] of spherical harmonics `[.., degrees, orders, 2]`, whose orders above the
/// degree are zero.
pub(crate) fn harmonic_product<const D: usize>(
    x: ShardTensor<D>,
    weight: Operand<D>,
) -> Result<ShardTensor<D>> {
    multiplied(x, weight, Modes::Harmonics)
}

/// Modes of a product.
enum Modes {
    Any,
    /// The last two dims are degrees and orders. Orders above the degree are zero.
    Harmonics,
}

fn multiplied<const D: usize>(
    x: ShardTensor<D>,
    weight: Operand<D>,
    modes: Modes,
) -> Result<ShardTensor<D>> {
    let own = own_modes(NAME, &x.dims(), x.local().dtype(), &weight)?;
    check_modes(NAME, x.layout(), &weight, own)?;
    let weight = weight.place_on(&x)?;
    let cut = cut(x.layout(), weight.layout(), own);
    let weight = weight.try_redistribute(&cut)?;
    let (layout, fans) = rule(NAME, x.layout(), weight.layout(), own)?;
    let (x, layout_x, mesh) = x.into_parts();
    let (weight, layout_weight, _) = weight.into_parts();
    let weight = fan_out_with(weight, &x, &mesh, &fans[1], NAME);
    let x = fan_out(x, &mesh, &fans[0], NAME);
    let y = if flex::runs_on(&x.device()) {
        let cells = layout_x.local_box(mesh.position());
        let harmonics = match modes {
            Modes::Any => None,
            Modes::Harmonics => Some([D - 3, D - 2].map(|dim| cells.ranges()[dim].start)),
        };
        let inputs = [x.into_dispatch(), weight.into_dispatch()];
        Tensor::from_dispatch(apply(ModeProduct { harmonics }, inputs))
    } else {
        let x = fill_all(x, &layout_x, NAME, 0.0)?;
        let weight = fill_all(weight, &layout_weight, NAME, 0.0)?;
        drop_empty(composed(x, weight), &layout, mesh.position(), NAME)?
    };
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
    let weight = layout_on(operator, field, weight)?;
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

/// Checks the sharding of a weight against modes, before it is gathered.
pub(crate) fn check_modes<const D: usize>(
    operator: &str,
    modes: &Layout,
    weight: &Operand<D>,
    own: usize,
) -> Result<()> {
    modes.require_whole(operator, D - 1)?;
    let weight = layout_on(operator, modes, weight)?;
    rule(operator, modes, &cut(modes, &weight, own), own).map(drop)
}

/// Layout in which a weight is used on the mesh of a field, with whole complex numbers.
fn layout_on<const D: usize>(
    operator: &str,
    field: &Layout,
    weight: &Operand<D>,
) -> Result<Layout> {
    let weight = weight.layout_on(field.mesh());
    if weight.mesh() != field.mesh() {
        let message = format!("{field} and {weight} are on two meshes");
        return Err(Error::operator(operator, message));
    }
    weight.require_whole(operator, D - 1)?;
    Ok(weight)
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
struct ModeProduct {
    /// First degree and first order of a shard of [`Modes::Harmonics`].
    harmonics: Option<[usize; 2]>,
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
        let sizes = Sizes::of(&shape, &weight.shape(), self.harmonics);
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
        let sizes = Sizes::of(&shapes[0], &shapes[1], self.harmonics);
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

/// Computes the product by burn's operators: one real matrix product for each mode.
fn composed<const D: usize>(x: Tensor<D>, weight: Tensor<D>) -> Tensor<D> {
    let mut shape = x.dims().to_vec();
    let sizes = Sizes::of(&shape, &weight.dims(), None);
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
