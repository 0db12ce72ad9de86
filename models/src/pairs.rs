//! Distances between the members of an ensemble.

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, Flex};
use burn::tensor::{DType, ElementConversion, FloatDType, Tensor};
use halocline_core::memory::{CpuFloat, elements, elements_mut, is_cpu, unwritten};
use halocline_core::ops::{
    BackwardPass, Operator, apply, blank, from_dispatch, in_order, to_dispatch,
};
use halocline_core::{Error, Result, ShardTensor, tasks};
use halocline_ops::widened;

/// Number of cells of a task, which stay in cache with all members.
const CELLS: usize = 1 << 10;
/// Number of tasks that is worth a thread.
const LEAST: usize = 4;

/// Sums the cellwise distances of all unordered pairs of members, `[members, ..]` → `[1, ..]`, and
/// divides by `pairs`. No differences are stored for the gradient.
pub(crate) fn distances(ensemble: ShardTensor<5>, pairs: f64) -> Result<ShardTensor<5>> {
    let (local, layout, mesh) = ensemble.into_parts();
    let output = layout.resized(0, vec![1]);
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
        let x = widened(x);
        let sum = match x.dtype() {
            _ if !is_cpu(&x.device()) => self.composed_sum(x),
            DType::F64 => self.sum_on_cpu::<f64>(x, &shape)?,
            _ => self.sum_on_cpu::<f32>(x, &shape)?,
        };
        Ok((sum.cast(FloatDType::from(dtype)).into_dispatch(), ()))
    }

    /// Equal members contribute no gradient.
    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let x = Tensor::<5>::from_dispatch(pass.take_input(0));
        let (dtype, shape) = (x.dtype(), x.dims());
        if shape.contains(&0) {
            return Ok(vec![Some(x.into_dispatch())]);
        }
        let cotangent = widened(Tensor::<5>::from_dispatch(pass.cotangent));
        let x = widened(x);
        let gradient = match x.dtype() {
            _ if !is_cpu(&x.device()) => self.composed_gradient(x, cotangent),
            DType::F64 => self.gradient_on_cpu::<f64>(x, cotangent)?,
            _ => self.gradient_on_cpu::<f32>(x, cotangent)?,
        };
        let gradient = gradient.cast(FloatDType::from(dtype));
        Ok(vec![Some(gradient.into_dispatch())])
    }
}

impl Distances {
    fn sum_on_cpu<E: CpuFloat>(&self, x: Tensor<5>, shape: &[usize]) -> Result<Tensor<5>> {
        let (x, mut sums) = (cpu_tensor(x)?, unwritten::<E>(shape));
        let written = elements_mut(&mut sums).expect("new memory");
        write_sums::<E>(elements(&x), self.pairs.elem(), written);
        Ok(Tensor::from_dispatch(to_dispatch::<Flex>(sums)))
    }

    fn gradient_on_cpu<E: CpuFloat>(
        &self,
        x: Tensor<5>,
        cotangent: Tensor<5>,
    ) -> Result<Tensor<5>> {
        let mut gradients = unwritten::<E>(&x.dims());
        let (x, cotangent) = (cpu_tensor(x)?, cpu_tensor(cotangent)?);
        let written = elements_mut(&mut gradients).expect("new memory");
        write_gradients::<E>(
            elements(&x),
            elements(&cotangent),
            self.pairs.elem(),
            written,
        );
        Ok(Tensor::from_dispatch(to_dispatch::<Flex>(gradients)))
    }

    /// Computes the sum by burn's operators.
    fn composed_sum(&self, x: Tensor<5>) -> Tensor<5> {
        let [members, ..] = x.dims();
        let of_distance = |distance: usize| {
            let part = |first: usize| x.clone().narrow(0, first, members - distance);
            (part(distance) - part(0)).abs().sum_dim(0)
        };
        let sums = (1..members).map(of_distance);
        sums.reduce(|sum, next| sum + next).expect("two members") / self.pairs
    }

    /// Computes the gradient by burn's operators.
    fn composed_gradient(&self, x: Tensor<5>, cotangent: Tensor<5>) -> Tensor<5> {
        let ([members, ..], cotangent) = (x.dims(), cotangent / self.pairs);
        let of_member = |member: usize| {
            let signs = (x.clone().narrow(0, member, 1) - x.clone()).sign();
            signs.sum_dim(0) * cotangent.clone()
        };
        Tensor::cat((0..members).map(of_member).collect(), 0)
    }
}

/// Returns a contiguous tensor of the CPU.
fn cpu_tensor(x: Tensor<5>) -> Result<FlexTensor> {
    from_dispatch::<Flex>(in_order(x.into_dispatch()))
}

/// Writes the sum of `|x_i − x_j|` over all pairs of members for each cell, divided by `pairs`.
fn write_sums<E: CpuFloat>(x: &[E], pairs: E, sums: &mut [E]) {
    let (cells, zero) = (sums.len(), E::default());
    let members = x.len() / cells;
    tasks::for_each_part(sums, CELLS, LEAST, |task, sums| {
        let len = sums.len();
        let member = |member: usize| &x[member * cells + task * CELLS..][..len];
        let mut parts = [zero; CELLS];
        let parts = &mut parts[..len];
        sums.fill(zero);
        // In the order of the composed sum, so that the bits are the same.
        for distance in 1..members {
            parts.fill(zero);
            for first in 0..members - distance {
                let values = member(first + distance).iter().zip(member(first));
                for (part, (a, b)) in parts.iter_mut().zip(values) {
                    *part += if a > b { *a - *b } else { *b - *a };
                }
            }
            for (sum, part) in sums.iter_mut().zip(&*parts) {
                *sum += *part;
            }
        }
        for sum in sums {
            *sum = *sum / pairs;
        }
    });
}

/// Writes the sum of `sign(x_i − x_j)` over all members `j` for each member `i` and cell, times the
/// cotangent of the cell divided by `pairs`.
fn write_gradients<E: CpuFloat>(x: &[E], cotangent: &[E], pairs: E, gradients: &mut [E]) {
    let cells = cotangent.len();
    let [zero, one, minus_one] = [0_i8, 1, -1].map(E::from);
    let blocks = cells.div_ceil(CELLS);
    let mut blocks: Vec<Vec<&mut [E]>> = (0..blocks).map(|_| Vec::new()).collect();
    for member in gradients.chunks_mut(cells) {
        for (block, part) in blocks.iter_mut().zip(member.chunks_mut(CELLS)) {
            block.push(part);
        }
    }
    tasks::for_each_part(&mut blocks, 1, LEAST, |task, blocks| {
        let start = task * CELLS;
        let members = || x.chunks(cells).map(move |member| &member[start..]);
        for (gradients, first) in blocks[0].iter_mut().zip(members()) {
            gradients.fill(zero);
            for second in members() {
                let values = first.iter().zip(second);
                for (gradient, (a, b)) in gradients.iter_mut().zip(values) {
                    *gradient += if a > b {
                        one
                    } else if a < b {
                        minus_one
                    } else {
                        zero
                    };
                }
            }
            for (gradient, cotangent) in gradients.iter_mut().zip(&cotangent[start..]) {
                *gradient = *gradient * (*cotangent / pairs);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Distribution, TensorData};

    use super::*;

    /// Bits of numbers, the same for every NaN.
    fn bits(x: Tensor<5>) -> Vec<u64> {
        let bits = |x: f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
        x.into_data().iter::<f64>().map(bits).collect()
    }

    fn kernels<E: CpuFloat>(
        distances: &Distances,
        x: &Tensor<5>,
        cotangent: &Tensor<5>,
    ) -> (Tensor<5>, Tensor<5>) {
        let sum = distances.sum_on_cpu::<E>(x.clone(), &cotangent.dims());
        let gradient = distances.gradient_on_cpu::<E>(x.clone(), cotangent.clone());
        (sum.unwrap(), gradient.unwrap())
    }

    /// Covers equal members, infinities, NaN, several tasks, and a cotangent that is a view.
    #[test]
    fn kernels_have_the_bits_of_burns_operators() {
        let (shape, distances) = ([5, 1, 2, 61, 40], Distances { pairs: 20.0 });
        let normal = Distribution::Normal(0.0, 1.0);
        let numbers = Tensor::<5>::random(shape, normal, &Device::flex()).into_data();
        let mut numbers: Vec<f64> = numbers.iter().collect();
        for member in [0, 1] {
            let place = member * 2 * 61 * 40;
            numbers[place..place + 3].copy_from_slice(&[1.0, f64::INFINITY, f64::NAN]);
        }
        for dtype in [DType::F32, DType::F64] {
            let data = TensorData::new(numbers.clone(), shape).convert_dtype(dtype);
            let x = Tensor::<5>::from_data(data, (&Device::flex(), dtype));
            let cotangent = x.clone().narrow(0, 1, 1);
            let (sum, gradient) = match dtype {
                DType::F64 => kernels::<f64>(&distances, &x, &cotangent),
                _ => kernels::<f32>(&distances, &x, &cotangent),
            };
            assert!(bits(sum) == bits(distances.composed_sum(x.clone())));
            assert!(bits(gradient) == bits(distances.composed_gradient(x, cotangent)));
        }
    }
}
