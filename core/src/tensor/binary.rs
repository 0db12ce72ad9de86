//! Sums, differences and products of tensors of the same shape, or of a large tensor and one that
//! is broadcast, computed on the CPU by all threads in reused memory.

use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Shape, Tensor};

use super::unary::{Number, cpu_tensor, is_served, negated, updated};
use crate::Result;
use crate::dispatch::{here, of_cpu};
use crate::memory::{self, elements_mut};
use crate::operator::{BackwardPass, Operator, Recompute, apply, is_tracked};

/// Least number of consecutive elements that are computed in one loop for a tensor that is
/// broadcast.
const LONG: usize = 16;

/// Arithmetic operator on pairs of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Binary {
    Sum,
    Difference,
    Product,
}

/// Node of the autodiff graph for an operator on pairs of elements.
#[derive(Clone, Copy, Debug)]
struct Pairs {
    binary: Binary,
    /// Whether each operand is read by the gradient of the other.
    keeps: [bool; 2],
}

impl Operator for Pairs {
    /// Shapes of the operands.
    type Saved = [Shape; 2];

    fn keeps(&self, input: usize) -> bool {
        self.keeps[input]
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, [Shape; 2])> {
        let [lhs, rhs]: [DispatchTensor; 2] = inputs.try_into().expect("two inputs");
        let shapes = [lhs.shape(), rhs.shape()];
        Ok((self.binary.apply(lhs, rhs)?, shapes))
    }

    fn backward(
        &self,
        mut pass: BackwardPass<'_, [Shape; 2]>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let &[first, second] = pass.wanted else {
            unreachable!("two inputs")
        };
        let factors = match self.binary {
            Binary::Product => [(1, first), (0, second)]
                .map(|(other, wanted)| wanted.then(|| pass.take_input(other))),
            _ => [None, None],
        };
        // The last gradient may reuse the cotangent's memory.
        let (of_first, of_second) = if second {
            (first.then(|| pass.cotangent.clone()), Some(pass.cotangent))
        } else {
            (Some(pass.cotangent), None)
        };
        let gradient = |cotangent: Option<_>, factor: Option<_>| match (cotangent, factor) {
            (Some(cotangent), Some(factor)) => self.binary.apply(cotangent, factor).map(Some),
            (cotangent, _) => Ok(cotangent),
        };
        let [rhs, lhs] = factors;
        let of_first = gradient(of_first, rhs)?;
        let of_second = match self.binary {
            Binary::Difference => of_second.map(negated).transpose()?,
            _ => gradient(of_second, lhs)?,
        };
        let gradients = [of_first, of_second].into_iter().zip(pass.saved);
        let gradients = gradients.map(|(gradient, shape)| Some(summed(gradient?, shape)));
        Ok(gradients.collect())
    }
}

impl Binary {
    /// Applies the operator as one node of the graph.
    pub(super) fn of<const D: usize, K: Basic>(
        self,
        lhs: Tensor<D, K>,
        rhs: Tensor<D, K>,
    ) -> Tensor<D, K> {
        let pair = [lhs, rhs].map(Tensor::into_dispatch);
        let keeps = [&pair[1], &pair[0]].map(|other| self == Self::Product && is_tracked(other));
        let node = Pairs {
            binary: self,
            keeps,
        };
        Tensor::from_dispatch(apply(node, pair))
    }

    fn apply(self, lhs: DispatchTensor, rhs: DispatchTensor) -> Result<DispatchTensor> {
        let dtype = |tensor| here(tensor).map(TensorMetadata::dtype);
        let alike = dtype(&lhs) == dtype(&rhs) && fits([&lhs.shape(), &rhs.shape()]);
        match dtype(&lhs).filter(|_| alike) {
            Some(DType::F32) => self.on_cpu::<f32>(lhs, rhs),
            Some(DType::F64) => self.on_cpu::<f64>(lhs, rhs),
            _ => Ok(match self {
                Self::Sum => Dispatch::float_add(lhs, rhs),
                Self::Difference => Dispatch::float_sub(lhs, rhs),
                Self::Product => Dispatch::float_mul(lhs, rhs),
            }),
        }
    }

    fn on_cpu<E: Number>(self, lhs: DispatchTensor, rhs: DispatchTensor) -> Result<DispatchTensor> {
        let (lhs, rhs) = (cpu_tensor(lhs)?, cpu_tensor(rhs)?);
        Ok(of_cpu(match self {
            Self::Sum => combined::<E>(lhs, rhs, |a, b| a + b),
            Self::Difference => combined::<E>(lhs, rhs, |a, b| a - b),
            Self::Product => combined::<E>(lhs, rhs, |a, b| a * b),
        }))
    }
}

/// Whether the kernels serve two tensors: one is large, and the other has its shape or is broadcast
/// to it.
pub(super) fn are_served<const D: usize, K: Basic>(lhs: &Tensor<D, K>, rhs: &Tensor<D, K>) -> bool {
    (is_served(lhs) || is_served(rhs))
        && lhs.dtype() == rhs.dtype()
        && fits([&lhs.dims(), &rhs.dims()])
}

/// Whether the kernels serve tensors of these shapes.
fn fits([lhs, rhs]: [&[usize]; 2]) -> bool {
    run_length(lhs, rhs).or(run_length(rhs, lhs)).is_some()
}

/// Number of consecutive elements of the shape `whole` that have the same cell of a tensor of the
/// shape `part`, when that is broadcast; the elements after them have the next cell. `None` unless
/// the dims in which `part` has several cells are adjacent and runs are long.
fn run_length(whole: &[usize], part: &[usize]) -> Option<usize> {
    if whole == part {
        return Some(1);
    }
    let several = |size: &usize| *size != 1;
    let end = part.iter().rposition(several).map_or(0, |dim| dim + 1);
    let first = part.iter().position(several).unwrap_or(0);
    let run: usize = whole[end..].iter().product();
    let long: usize = match run {
        1 => part[first..end].iter().product(),
        _ => run,
    };
    (whole[first..end] == part[first..end] && long >= LONG).then_some(run)
}

/// Sums a gradient over the dims in which the operand was broadcast.
fn summed(gradient: DispatchTensor, shape: &Shape) -> DispatchTensor {
    let sizes = gradient.shape();
    let dims: Vec<usize> = (0..shape.len())
        .filter(|&dim| sizes[dim] != shape[dim])
        .collect();
    match dims[..] {
        [] => gradient,
        _ => Dispatch::float_sum_dims(gradient, &dims),
    }
}

/// Applies a function to all pairs of elements, in the memory of a tensor of the result's shape if
/// nothing else uses it.
fn combined<E: Number>(
    mut lhs: FlexTensor,
    mut rhs: FlexTensor,
    function: impl Fn(E, E) -> E + Sync,
) -> FlexTensor {
    let [shape, other] = [&lhs, &rhs].map(|tensor| tensor.layout().shape());
    let (is_whole, is_same) = (run_length(shape, other).is_some(), shape == other);
    let may_change = |tensor: &mut FlexTensor| elements_mut::<E>(tensor).is_some();
    if !is_whole || is_same && !may_change(&mut lhs) && may_change(&mut rhs) {
        changed(rhs, &lhs, |rhs, lhs| function(lhs, rhs))
    } else {
        changed(lhs, &rhs, function)
    }
}

/// Applies a function to the elements of a tensor and of one that is broadcast to its shape.
fn changed<E: Number>(
    whole: FlexTensor,
    part: &FlexTensor,
    function: impl Fn(E, E) -> E + Sync,
) -> FlexTensor {
    let run = run_length(whole.layout().shape(), part.layout().shape());
    let (run, cells) = (run.expect("shapes that fit"), memory::elements::<E>(part));
    updated::<E>(whole, |place, elements| {
        change(elements, place, cells, run, &function);
    })
}

/// Changes consecutive elements, the first of which has the index `place`. Each cell belongs to
/// `run` elements.
fn change<E: Copy>(
    mut elements: &mut [E],
    mut place: usize,
    cells: &[E],
    run: usize,
    function: impl Fn(E, E) -> E,
) {
    while !elements.is_empty() {
        let cell = place / run % cells.len();
        let len = match run {
            1 => cells.len() - cell,
            _ => run - place % run,
        };
        let (now, later) = elements.split_at_mut(len.min(elements.len()));
        if run == 1 {
            for (element, other) in now.iter_mut().zip(&cells[cell..]) {
                *element = function(*element, *other);
            }
        } else {
            let other = cells[cell];
            for element in now {
                *element = function(*element, other);
            }
        }
        elements = later;
        place += len;
    }
}

#[cfg(test)]
mod tests {
    use std::ops::{Add, Mul, Sub};

    use burn::tensor::{Device, Distribution, FloatDType, Tensor};

    use crate::{Launcher, Replicate, Shard, ShardTensor};

    type Of<T> = fn(T, T) -> T;

    /// The operators on our tensors or on burn's.
    fn of<T: Add<Output = T> + Sub<Output = T> + Mul<Output = T>>() -> [Of<T>; 3] {
        [T::add, T::sub, T::mul]
    }

    fn of_shards(f: Of<ShardTensor<3>>, x: Tensor<3>, y: Tensor<3>) -> Tensor<3> {
        f(ShardTensor::solo(x), ShardTensor::solo(y)).into_local()
    }

    /// Covers views, the same tensor twice, several tasks, half precision and checkpointing.
    #[test]
    fn results_and_gradients_are_those_of_burn() {
        let plain = Device::flex();
        for (dtype, shape) in [
            (FloatDType::F32, [6, 110, 110]),
            (FloatDType::F64, [6, 7, 7]),
            (FloatDType::BF16, [6, 7, 7]),
        ] {
            let numbers = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), &plain);
            let numbers = numbers.cast(dtype).into_data();
            for device in [
                plain.clone().autodiff(),
                plain.clone().autodiff().gradient_checkpointing(),
            ] {
                let run = |f: &dyn Fn(Tensor<3>, Tensor<3>) -> Tensor<3>| {
                    let leaf = Tensor::from_data(numbers.clone(), (&device, numbers.dtype()));
                    let leaf: Tensor<3> = leaf.require_grad();
                    let [low, high] = [0, 3].map(|first| leaf.clone().narrow(0, first, 3));
                    let turned = low.clone().permute([0, 2, 1]);
                    let z = f(f(low.clone(), high), f(turned.clone(), turned));
                    let z = f(low.clone().detach(), f(z, low * 0.5));
                    let gradients = (z.clone() * z.clone()).sum().backward();
                    [z.inner(), leaf.grad(&gradients).expect("a gradient")].map(Tensor::into_data)
                };
                for (ours, burns) in of().into_iter().zip(of()) {
                    assert_eq!(run(&|x, y| of_shards(ours, x, y)), run(&burns), "{dtype:?}");
                }
            }
        }
    }

    /// A sharded dim of one cell is paired with a replicated one: ranks without the cell have no
    /// pairs.
    #[test]
    fn shapes_may_be_alike_and_shards_not() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("samples", 2)])?;
                for (ours, expected) in of().into_iter().zip([1.0_f32, -1.0, 2.0]) {
                    let x = ShardTensor::<2>::full([1, 4], 2.0, &mesh, &[Shard(0)])?;
                    let y = ShardTensor::<2>::ones([1, 4], &mesh, &[Replicate])?.require_grad();
                    let sum = ours(x, y.clone()).into_local().sum();
                    let gradient = y.grad(&sum.backward()).expect("a gradient");
                    let gradient = gradient.to_local().into_data();
                    gradient.assert_eq(&[[expected; 4]].into(), true);
                }
                Ok(())
            })
            .unwrap();
    }

    /// Covers dims of several cells that are adjacent, and some that are not.
    #[test]
    fn broadcast_operands_have_the_results_and_gradients_of_burn() {
        let (plain, normal) = (Device::flex(), Distribution::Normal(0.0, 1.0));
        let whole = [5, 130, 131];
        for part in [
            [1, 1, 1],
            [5, 1, 1],
            [1, 130, 1],
            [1, 1, 131],
            [5, 130, 1],
            [1, 130, 131],
            [5, 1, 131],
        ] {
            let shapes = [whole, part];
            let data = shapes.map(|shape| Tensor::<3>::random(shape, normal, &plain).into_data());
            let device = plain.clone().autodiff();
            let run = |f: &dyn Fn(Tensor<3>, Tensor<3>) -> Tensor<3>| {
                let leaves = data
                    .clone()
                    .map(|data| Tensor::<3>::from_data(data, &device));
                let [x, y] = leaves.map(Tensor::require_grad);
                let z = f(x.clone(), y.clone()) * f(y.clone(), x.clone());
                let gradients = (z.clone() * z.clone()).sum().backward();
                let [of_x, of_y] = [x, y].map(|leaf| leaf.grad(&gradients).expect("a gradient"));
                [z.inner(), of_x, of_y].map(Tensor::into_data)
            };
            for (ours, burns) in of().into_iter().zip(of()) {
                assert_eq!(run(&|x, y| of_shards(ours, x, y)), run(&burns), "{part:?}");
            }
        }
    }

    #[test]
    fn a_large_operand_may_be_broadcast_to_an_empty_shape() {
        for ours in of() {
            let [x, y] = [[2, 0, 70_000], [1, 1, 70_000]]
                .map(|shape| Tensor::<3>::ones(shape, &Device::flex()));
            assert_eq!(of_shards(ours, y, x).dims(), [2, 0, 70_000]);
        }
    }

    #[test]
    fn tensors_may_be_empty() {
        for ours in of() {
            let x = Tensor::<3>::zeros([2, 0, 4], &Device::flex());
            assert_eq!(of_shards(ours, x.clone(), x).dims(), [2, 0, 4]);
        }
    }

    #[test]
    fn operands_that_are_read_again_stay() {
        for (ours, burns) in of().into_iter().zip(of()) {
            let [x, y] = [2.0, 3.0].map(|value| Tensor::full([2, 3, 4], value, &Device::flex()));
            for _ in 0..2 {
                let z = of_shards(ours, x.clone(), y.clone());
                assert_eq!(z.into_data(), burns(x.clone(), y.clone()).into_data());
            }
            let z = of_shards(ours, x.clone(), y.clone());
            assert_eq!(of_shards(ours, x.clone(), y).into_data(), z.into_data());
            assert_eq!(
                x.into_data(),
                Tensor::<3>::full([2, 3, 4], 2.0, &Device::flex()).into_data()
            );
        }
    }
}
