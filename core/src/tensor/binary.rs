//! Sums, differences and products of tensors of one shape: on the CPU by all threads, in memory that is used again.

use std::ops::{Add, Mul, Sub};

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{DType, Element};

use crate::dispatch::{from_dispatch, of_cpu};
use crate::memory::Block;
use crate::operator::{BackwardPass, Operator, Recompute};
use crate::ops::of_boxes;
use crate::{IndexBox, Result, comm, tasks};

/// Elements of a task.
const TASK: usize = 1 << 14;

/// An operator on pairs of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Binary {
    Sum,
    Difference,
    Product,
}

impl Operator for Binary {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        *self == Self::Product
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [lhs, rhs] = inputs.try_into().expect("two inputs");
        Ok((self.apply(lhs, rhs)?, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let &[first, second] = pass.wanted else {
            unreachable!("two inputs")
        };
        let cotangent = pass.cotangent.clone();
        let [lhs, rhs] = match self {
            Self::Sum => [Some(cotangent.clone()), Some(cotangent)],
            Self::Difference => {
                let negative = second.then(|| Dispatch::float_neg(cotangent.clone()));
                [Some(cotangent), negative]
            }
            Self::Product => {
                let [lhs, rhs] = [0, 1].map(|input| pass.take_input(input));
                let of = |wanted: bool, other| {
                    wanted
                        .then(|| self.apply(cotangent.clone(), other))
                        .transpose()
                };
                [of(first, rhs)?, of(second, lhs)?]
            }
        };
        Ok(vec![lhs, rhs])
    }
}

impl Binary {
    fn apply(self, lhs: DispatchTensor, rhs: DispatchTensor) -> Result<DispatchTensor> {
        let dtype = |tensor| comm::here(tensor).map(TensorMetadata::dtype);
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
        let (lhs, rhs) = (in_order(lhs)?, in_order(rhs)?);
        Ok(of_cpu(match self {
            Self::Sum => combined::<E>(lhs, rhs, |a, b| a + b),
            Self::Difference => combined::<E>(lhs, rhs, |a, b| a - b),
            Self::Product => combined::<E>(lhs, rhs, |a, b| a * b),
        }))
    }
}

/// The tensor, copied by all threads if its elements are not next to each other.
fn in_order(tensor: DispatchTensor) -> Result<FlexTensor> {
    if comm::here(&tensor).is_some_and(FlexTensor::is_contiguous) {
        return from_dispatch::<Flex>(tensor);
    }
    let shape = tensor.shape().to_vec();
    let whole = [(IndexBox::whole(&shape), tensor.clone())];
    from_dispatch::<Flex>(of_boxes(&tensor, &shape, None, &whole))
}

/// A function of all pairs of elements: in the memory of the first tensor, if nothing else uses that.
fn combined<E: Element + bytemuck::Pod>(
    mut lhs: FlexTensor,
    rhs: FlexTensor,
    function: impl Fn(E, E) -> E + Sync,
) -> FlexTensor {
    let shape = lhs.layout().shape().clone();
    let len = shape.num_elements();
    let rhs = elements::<E>(&rhs);
    if lhs.storage::<E>().len() == len
        && let Some(elements) = lhs.try_storage_mut::<E>()
    {
        tasks::for_each_part(elements, TASK, 2, |task, part| {
            for (first, second) in part.iter_mut().zip(&rhs[task * TASK..]) {
                *first = function(*first, *second);
            }
        });
        return lhs;
    }
    let lhs = elements::<E>(&lhs);
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

/// The elements of a contiguous tensor.
fn elements<E: Element + bytemuck::Pod>(tensor: &FlexTensor) -> &[E] {
    let layout = tensor.layout();
    match layout.num_elements() {
        // An empty view may begin outside of the storage.
        0 => &[],
        len => &tensor.storage()[layout.start_offset()..][..len],
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Distribution, FloatDType, Tensor};

    use crate::ShardTensor;

    type Of<T> = fn(T, T) -> T;
    const OURS: [Of<ShardTensor<3>>; 3] = [|x, y| x + y, |x, y| x - y, |x, y| x * y];
    const BURNS: [Of<Tensor<3>>; 3] = [|x, y| x + y, |x, y| x - y, |x, y| x * y];

    fn of_shards(f: Of<ShardTensor<3>>, x: Tensor<3>, y: Tensor<3>) -> Tensor<3> {
        f(ShardTensor::solo(x), ShardTensor::solo(y)).into_parts().0
    }

    /// Views, one tensor twice, several tasks, half precision and checkpointing.
    #[test]
    fn results_and_gradients_are_those_of_burn() {
        let plain = Device::flex();
        for (dtype, shape) in [
            (FloatDType::F32, [6, 110, 100]),
            (FloatDType::F64, [6, 5, 7]),
            (FloatDType::BF16, [6, 5, 7]),
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
                    let turned = low.clone().permute([0, 2, 1]).permute([0, 2, 1]);
                    let z = f(f(low.clone(), high), f(turned.clone(), turned));
                    let z = f(z.clone(), low * 0.5);
                    let gradients = (z.clone() * z.clone()).sum().backward();
                    [z.inner(), leaf.grad(&gradients).expect("a gradient")].map(Tensor::into_data)
                };
                for (ours, burns) in OURS.into_iter().zip(BURNS) {
                    assert_eq!(run(&|x, y| of_shards(ours, x, y)), run(&burns), "{dtype:?}");
                }
            }
        }
    }

    #[test]
    fn tensors_may_be_empty() {
        for ours in OURS {
            let x = Tensor::<3>::zeros([2, 0, 4], &Device::flex());
            assert_eq!(of_shards(ours, x.clone(), x).dims(), [2, 0, 4]);
        }
    }

    #[test]
    fn operands_that_are_read_again_stay() {
        for (ours, burns) in OURS.into_iter().zip(BURNS) {
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
