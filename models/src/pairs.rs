//! Distances between the members of an ensemble.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, FloatDType, Tensor};
use halocline_core::ops::{BackwardPass, Operator, apply, blank};
use halocline_core::{Error, Result, ShardTensor};

/// Sums the cellwise distances of all unordered pairs of members, `[members, ..]` → `[1, ..]`, and
/// divides by `pairs`. No differences are stored for the gradient.
pub(crate) fn distances(ensemble: ShardTensor<5>, pairs: f64) -> Result<ShardTensor<5>> {
    let (local, layout, mesh) = ensemble.into_parts();
    let mut extents = layout.all_extents().to_vec();
    extents[0] = vec![1];
    let output = layout.derive(layout.placements().to_vec(), extents);
    let sum = Error::catch(|| apply(Distances { pairs }, [local.into_dispatch()]))?;
    Ok(ShardTensor::from_parts(
        Tensor::from_dispatch(sum),
        output,
        mesh,
    ))
}

#[derive(Debug)]
struct Distances {
    pairs: f64,
}

impl Operator for Distances {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["distances of members", "distances of members (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let x = Tensor::<5>::from_dispatch(inputs.remove(0));
        let (dtype, mut shape) = (x.dtype(), x.dims());
        let members = shape[0];
        shape[0] = 1;
        if shape.contains(&0) || members < 2 {
            return Ok((blank(&x.into_dispatch(), &shape, Some(0.0)), ()));
        }
        let x = wide(x);
        let of_distance = |distance: usize| {
            let part = |first: usize| x.clone().narrow(0, first, members - distance);
            (part(distance) - part(0)).abs().sum_dim(0)
        };
        let sums = (1..members).map(of_distance);
        let sum = sums.reduce(|sum, next| sum + next).expect("two members");
        let sum = sum / self.pairs;
        Ok((sum.cast(FloatDType::from(dtype)).into_dispatch(), ()))
    }

    /// Equal members contribute no gradient.
    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let x = Tensor::<5>::from_dispatch(pass.take_input(0));
        let (dtype, shape) = (x.dtype(), x.dims());
        if shape.contains(&0) {
            return Ok(vec![Some(x.into_dispatch())]);
        }
        let (x, cotangent) = (wide(x), wide(Tensor::<5>::from_dispatch(pass.cotangent)));
        let cotangent = cotangent / self.pairs;
        let of_member = |member: usize| {
            let signs = (x.clone().narrow(0, member, 1) - x.clone()).sign();
            signs.sum_dim(0) * cotangent.clone()
        };
        let gradient = Tensor::cat((0..shape[0]).map(of_member).collect(), 0);
        let gradient = gradient.cast(FloatDType::from(dtype));
        Ok(vec![Some(gradient.into_dispatch())])
    }
}

/// Casts half precision to f32.
fn wide(x: Tensor<5>) -> Tensor<5> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(FloatDType::F32),
        _ => x,
    }
}
