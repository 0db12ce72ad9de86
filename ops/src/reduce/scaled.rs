//! Product of a field with one factor per line, whose gradient is a sum along the line.

use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use halocline_core::ops::{BackwardPass, Operator, apply, fan_out, fan_out_with};
use halocline_core::plan::{Linearity, Pairing, Role, Term};
use halocline_core::{Result, ShardTensor};

use super::kernel;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lines::Lines;
use crate::kernel::simd::Isa;

/// Multiplies a field by factors that have one cell in some of its dims. If these dims are adjacent
/// and our kernels run, each gradient takes one pass.
///
/// # Errors
/// Partial values; placements without a rule.
pub(crate) fn scaled<const D: usize>(
    x: ShardTensor<D>,
    factors: ShardTensor<D>,
    operator: &'static str,
) -> Result<ShardTensor<D>> {
    let (shape, held) = (x.dims(), factors.dims());
    let may = |dim: usize| held[dim] == 1 && !factors.layout().is_sharded(dim);
    // A dim of one cell that some ranks lack counts as well; one that all ranks hold may lie
    // between.
    let must = |dim: &usize| may(*dim) && (shape[*dim] != 1 || x.layout().is_sharded(*dim));
    let first = (0..D).find(must).unwrap_or(0);
    let along = first..(0..D).rfind(must).map_or(first, |last| last + 1);
    let alike = |dim: usize| {
        if along.contains(&dim) {
            may(dim)
        } else {
            shape[dim] == held[dim]
        }
    };
    let same_type = x.local().dtype() == factors.local().dtype();
    if !(0..D).all(alike) || !same_type || !flex::runs_on(&x.device()) {
        return Ok(x * factors);
    }
    let cells: [Role; D] = std::array::from_fn(Role::Common);
    let lines: [Role; D] = std::array::from_fn(|dim| {
        if along.contains(&dim) {
            Role::Broadcast
        } else {
            Role::Common(dim)
        }
    });
    let operands = [(x.layout(), &cells), (factors.layout(), &lines)];
    let operands = operands.map(|(layout, roles)| Term {
        name: "",
        layout,
        roles,
    });
    let pairing = Pairing::new(operator, &operands, &cells, Linearity::None)?;
    let layout = pairing.layout(x.layout());
    let factors = factors.into_local();
    let (x, _, mesh) = x.into_parts();
    let factors = fan_out_with(factors, &x, &mesh, pairing.fan_out(1), operator);
    let x = fan_out(x, &mesh, pairing.fan_out(0), operator);
    let inputs = [x, factors].map(Tensor::into_dispatch);
    let y = Tensor::from_dispatch(apply(Scaled(along), inputs));
    Ok(ShardTensor::from_parts(y, layout, mesh))
}

/// Product of a shard with factors that have one cell in these dims.
#[derive(Clone, Debug)]
struct Scaled(Range<usize>);

impl Operator for Scaled {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["scaled", "scaled (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let (dtype, shape) = (inputs[0].dtype(), inputs[0].shape());
        let lines = Lines::along(&shape, self.0.clone());
        let y = with_float!(dtype, E => {
            let [x, factors] = pair::<E>(inputs)?;
            let y = kernel::scaled(Isa::chosen()?, lines, flex::elements::<E>(&x), flex::elements(&factors));
            flex::result(y, &shape, dtype)
        });
        Ok((y, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let dtype = pass.cotangent.dtype();
        let inputs = vec![pass.take_input(0), pass.take_input(1)];
        let [shape, reduced] = [0, 1].map(|input| inputs[input].shape());
        let lines = Lines::along(&shape, self.0.clone());
        Ok(with_float!(dtype, E => {
            let (isa, cotangent) = (Isa::chosen()?, flex::operand::<E>(pass.cotangent)?);
            let cotangent = flex::elements::<E>(&cotangent);
            let [x, factors] = pair::<E>(inputs)?;
            let of_x = pass.wanted[0].then(|| {
                let found = kernel::scaled(isa, lines, cotangent, flex::elements(&factors));
                flex::result(found, &shape, dtype)
            });
            let of_factors = pass.wanted[1].then(|| {
                let products = kernel::Term::Product(flex::elements(&x));
                let found = kernel::forward(isa, lines, cotangent, products, 1.0);
                flex::small_result(found, &reduced, dtype)
            });
            vec![of_x, of_factors]
        }))
    }
}

fn pair<E: Float>(inputs: Vec<DispatchTensor>) -> Result<[FlexTensor; 2]> {
    let inputs: Result<Vec<_>> = inputs.into_iter().map(flex::operand::<E>).collect();
    Ok(inputs?.try_into().expect("two inputs"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{difference, random};

    /// Covers factors of contiguous and strided lines, and factors without a kernel.
    #[test]
    fn kernels_and_burns_operators_agree() {
        for (shape, held) in [
            ([3, 700, 37], [3, 1, 37]),
            ([2, 5, 5000], [2, 5, 1]),
            ([3, 19, 37], [1, 1, 37]),
            ([3, 19, 37], [1, 19, 1]),
            ([3, 19, 37], [3, 19, 37]),
            ([1, 19, 37], [1, 1, 1]),
            ([5, 1, 37], [1, 1, 1]),
            ([1, 1, 1], [1, 1, 1]),
        ] {
            let results = |composed: bool| {
                let x = random::<3>(shape, "x", 0).detach().require_grad();
                let factors = random::<3>(held, "factors", 0).detach().require_grad();
                let y = if composed {
                    x.clone() * factors.clone()
                } else {
                    let [x, factors] = [&x, &factors].map(|x| ShardTensor::solo(x.clone()));
                    scaled(x, factors, "scaled").unwrap().into_local()
                };
                let weight = random::<3>(y.dims(), "y", 0).detach();
                let gradients = (y.clone() * weight).sum().backward();
                let gradient = |x: &Tensor<3>| x.grad(&gradients).unwrap();
                [y.inner(), gradient(&x), gradient(&factors)].map(Tensor::into_data)
            };
            for (ours, burns) in results(false).iter().zip(&results(true)) {
                assert!(difference(ours, burns) < 2e-6, "{shape:?}, {held:?}");
            }
        }
    }
}
