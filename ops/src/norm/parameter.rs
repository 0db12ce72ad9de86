//! Weight and bias, distributed as a field is.

use burn::tensor::Tensor;
use halocline_core::{Error, Result, ShardTensor};

use crate::operand::{Operand, part_beside};
use crate::rearrange::{distribute_operand, placements_beside, reshape};

/// Distributes one value per cell of `dim` as a field is; replicated where the field is sharded in
/// other dims.
pub(super) fn along<const D: usize>(
    x: &ShardTensor<D>,
    dim: usize,
    parameter: Operand<1>,
    operator: &'static str,
) -> Result<ShardTensor<D>> {
    require(x, dim, &parameter, operator)?;
    let mut shape = [1; D];
    shape[dim] = x.dims()[dim];
    let parameter: ShardTensor<D> = reshape(parameter.place_on(x)?, shape)?;
    distribute_operand(x, parameter)
}

/// Weight and bias [`along`] a dim, where there are any.
pub(super) fn both_along<const D: usize>(
    x: &ShardTensor<D>,
    dim: usize,
    [weight, bias]: [Option<Operand<1>>; 2],
    operator: &'static str,
) -> Result<[Option<ShardTensor<D>>; 2]> {
    let placed = |parameter| along(x, dim, parameter, operator);
    Ok([
        weight.map(placed).transpose()?,
        bias.map(placed).transpose()?,
    ])
}

/// This rank's parts of weight and bias for kernels, by default ones and zeros.
pub(super) fn factors<const D: usize>(
    x: &ShardTensor<D>,
    dim: usize,
    [weight, bias]: [Option<Operand<1>>; 2],
    operator: &'static str,
) -> Result<[Tensor<1>; 2]> {
    let held = x.local_dims()[dim];
    let options = (&x.device(), x.local().dtype());
    let part = |parameter: Option<Operand<1>>, default: f64| -> Result<Tensor<1>> {
        let Some(parameter) = parameter else {
            return Ok(Tensor::full([held], default, options));
        };
        require(x, dim, &parameter, operator)?;
        if !x.layout().is_sharded(dim) {
            return parameter.replicated_for(x, operator);
        }
        let held = parameter.place_on(x)?;
        let place = |sharded| (sharded == dim).then_some(0);
        let placements = placements_beside(x, &held, place);
        let extents = vec![x.layout().extents(dim).to_vec()];
        let layout = x.layout().derive(placements, extents);
        Ok(part_beside(held.try_redistribute(&layout)?, x, operator))
    };
    Ok([part(weight, 1.0)?, part(bias, 0.0)?])
}

/// Multiplies by a weight and adds a bias, where there are any.
pub(super) fn affine<const D: usize>(
    y: ShardTensor<D>,
    [weight, bias]: [Option<ShardTensor<D>>; 2],
) -> ShardTensor<D> {
    let y = match weight {
        Some(weight) => y * weight,
        None => y,
    };
    match bias {
        Some(bias) => y + bias,
        None => y,
    }
}

/// Requires one value of the field's element type per cell of `dim`.
fn require<const D: usize>(
    x: &ShardTensor<D>,
    dim: usize,
    parameter: &Operand<1>,
    operator: &'static str,
) -> Result<()> {
    let size = x.dims()[dim];
    let (dtype, expected) = (parameter.dtype(), x.local().dtype());
    if parameter.dims() == [size] && dtype == expected {
        return Ok(());
    }
    let message = format!(
        "a parameter {:?} of {dtype:?} for {size} elements of {expected:?}",
        parameter.dims()
    );
    Err(Error::operator(operator, message))
}
