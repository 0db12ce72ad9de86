//! Sums, differences and products of tensors of the same shape, computed on the CPU by all threads
//! in reused memory.

use std::ops::{Add, Mul, Sub};

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, Flex, TensorMetadata};
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Element, Tensor};

use crate::dispatch::{from_dispatch, here, of_cpu};
use crate::memory::{self, Block, elements_mut};
use crate::operator::{BackwardPass, Operator, Recompute, apply, is_tracked};
use crate::ops::in_order;
use crate::{Result, tasks};

/// Number of elements per task.
const TASK: usize = 1 << 14;

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
    type Saved = ();

    fn keeps(&self, input: usize) -> bool {
        self.keeps[input]
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [lhs, rhs] = inputs.try_into().expect("two inputs");
        Ok((self.binary.apply(lhs, rhs)?, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
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
            Binary::Difference => of_second.map(Dispatch::float_neg),
            _ => gradient(of_second, lhs)?,
        };
        Ok(vec![of_first, of_second])
    }
}

impl Binary {
    /// Applies the operator to tensors of the same shape, as one node of the graph.
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
        let alike = dtype(&lhs) == dtype(&rhs) && lhs.shape() == rhs.shape();
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

    fn on_cpu<E>(self, lhs: DispatchTensor, rhs: DispatchTensor) -> Result<DispatchTensor>
    where
        E: Element + bytemuck::Pod + Add<Output = E> + Sub<Output = E> + Mul<Output = E>,
    {
        let [lhs, rhs] = [lhs, rhs].map(in_order);
        let (lhs, rhs) = (from_dispatch::<Flex>(lhs)?, from_dispatch::<Flex>(rhs)?);
        Ok(of_cpu(match self {
            Self::Sum => combined::<E>(lhs, rhs, |a, b| a + b),
            Self::Difference => combined::<E>(lhs, rhs, |a, b| a - b),
            Self::Product => combined::<E>(lhs, rhs, |a, b| a * b),
        }))
    }
}

/// Applies a function to all pairs of elements, in the memory of one of the tensors if nothing else
/// uses it.
fn combined<E: Element + bytemuck::Pod>(
    mut lhs: FlexTensor,
    mut rhs: FlexTensor,
    function: impl Fn(E, E) -> E + Sync,
) -> FlexTensor {
    let shape = lhs.layout().shape().clone();
    let len = shape.num_elements();
    if let Some(elements) = elements_mut::<E>(&mut lhs) {
        replace(elements, memory::elements(&rhs), |lhs, rhs| {
            function(lhs, rhs)
        });
        return lhs;
    }
    if let Some(elements) = elements_mut::<E>(&mut rhs) {
        replace(elements, memory::elements(&lhs), |rhs, lhs| {
            function(lhs, rhs)
        });
        return rhs;
    }
    let [lhs, rhs] = [&lhs, &rhs].map(memory::elements::<E>);
    let bytes = len * size_of::<E>();
    let mut block = Block::new(bytes);
    let result: &mut [E] = bytemuck::cast_slice_mut(&mut block.bytes_mut()[..bytes]);
    tasks::for_each_part(result, TASK, 2, |task, part| {
        let pairs = lhs[task * TASK..].iter().zip(&rhs[task * TASK..]);
        for (element, (first, second)) in part.iter_mut().zip(pairs) {
            *element = function(*first, *second);
        }
    });
    let layout = Layout::contiguous(shape);
    FlexTensor::new(block.into_bytes(bytes), layout, E::dtype())
}

/// Replaces elements by a function of them and of other elements.
fn replace<E: Copy + Send + Sync>(
    elements: &mut [E],
    others: &[E],
    function: impl Fn(E, E) -> E + Sync,
) {
    tasks::for_each_part(elements, TASK, 2, |task, part| {
        for (element, other) in part.iter_mut().zip(&others[task * TASK..]) {
            *element = function(*element, *other);
        }
    });
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
