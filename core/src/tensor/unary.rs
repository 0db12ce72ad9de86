//! Functions of one large tensor, computed on the CPU by all threads in reused memory.

use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, Flex, TensorMetadata};
use burn::tensor::kind::Basic;
use burn::tensor::{DType, ElementConversion, Tensor};

use crate::dispatch::{from_dispatch, here, of_cpu};
use crate::memory::{self, CpuFloat, elements_mut, is_cpu, unwritten};
use crate::operator::{BackwardPass, Operator, Recompute, apply, one};
use crate::ops::in_order;
use crate::{Result, tasks};

/// Number of elements per task.
const TASK: usize = 1 << 12;
/// Number of tasks that is worth a thread.
const LEAST: usize = 8;
/// Number of elements that is worth two threads.
const LARGE: usize = 2 * LEAST * TASK;

/// Function of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unary {
    /// `x + number`.
    Plus(f64),
    /// `x · number`.
    Times(f64),
    /// `−x`.
    Negative,
    /// `|x|`.
    Absolute,
    /// `x²`.
    Square,
}

/// Float type of the kernels.
pub(super) trait Number: CpuFloat {
    fn absolute(self) -> Self;

    /// −1, 0 or 1; 0 for NaN, as burn has it.
    fn sign(self) -> Self;
}

macro_rules! number {
    ($($float:ident),*) => {
        $(impl Number for $float {
            fn absolute(self) -> Self {
                self.abs()
            }

            fn sign(self) -> Self {
                if self > 0.0 {
                    1.0
                } else if self < 0.0 {
                    -1.0
                } else {
                    0.0
                }
            }
        })*
    };
}

number!(f32, f64);

/// Returns the absolute values.
pub(super) fn absolute<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Unary::Absolute.of(x, |x| x.abs())
}

/// Returns the squares.
pub(super) fn square<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Unary::Square.of(x, |x| x.square())
}

/// Returns `x + number`.
pub(super) fn plus<const D: usize>(x: Tensor<D>, number: f64) -> Tensor<D> {
    Unary::Plus(number).of(x, |x| x + number)
}

/// Returns `x − number`.
pub(super) fn minus<const D: usize>(x: Tensor<D>, number: f64) -> Tensor<D> {
    Unary::Plus(-number).of(x, |x| x - number)
}

/// Returns `x · number`.
pub(super) fn times<const D: usize>(x: Tensor<D>, number: f64) -> Tensor<D> {
    Unary::Times(number).of(x, |x| x * number)
}

/// Returns `−x` of a tensor without autodiff.
pub(super) fn negated(x: DispatchTensor) -> Result<DispatchTensor> {
    match here(&x).map(TensorMetadata::dtype) {
        Some(DType::F32 | DType::F64) => Unary::Negative.apply(x),
        _ => Ok(Dispatch::float_neg(x)),
    }
}

/// Whether the kernels serve a tensor: f32 or f64 on the CPU, large enough for several threads.
/// burn's functions take less time for others.
pub(super) fn is_served<const D: usize, K: Basic>(x: &Tensor<D, K>) -> bool {
    matches!(x.dtype(), DType::F32 | DType::F64)
        && x.shape().num_elements() >= LARGE
        && is_cpu(&x.device())
}

impl Unary {
    /// Applies the function as one node of the graph, or burn's function to tensors that the
    /// kernels do not serve.
    pub(super) fn of<const D: usize, K: Basic>(
        self,
        x: Tensor<D, K>,
        burns: impl FnOnce(Tensor<D, K>) -> Tensor<D, K>,
    ) -> Tensor<D, K> {
        if is_served(&x) {
            Tensor::from_dispatch(apply(self, [x.into_dispatch()]))
        } else {
            burns(x)
        }
    }

    fn apply(self, x: DispatchTensor) -> Result<DispatchTensor> {
        match x.dtype() {
            DType::F64 => self.on_cpu::<f64>(x),
            _ => self.on_cpu::<f32>(x),
        }
    }

    fn on_cpu<E: Number>(self, x: DispatchTensor) -> Result<DispatchTensor> {
        let x = cpu_tensor(x)?;
        Ok(of_cpu(match self {
            Self::Plus(number) => {
                let number: E = number.elem();
                mapped::<E>(x, |x| x + number)
            }
            Self::Times(number) => {
                let number: E = number.elem();
                mapped::<E>(x, |x| x * number)
            }
            Self::Negative => mapped::<E>(x, |x| -x),
            Self::Absolute => mapped::<E>(x, E::absolute),
            Self::Square => mapped::<E>(x, |x| x * x),
        }))
    }

    /// Computes the gradient from the argument of [`Absolute`](Self::Absolute) or
    /// [`Square`](Self::Square).
    fn gradient<E: Number>(
        self,
        x: DispatchTensor,
        cotangent: DispatchTensor,
    ) -> Result<DispatchTensor> {
        let (x, cotangent) = (cpu_tensor(x)?, cpu_tensor(cotangent)?);
        let x = memory::elements::<E>(&x);
        Ok(of_cpu(match self {
            Self::Square => updated::<E>(cotangent, |place, part| {
                for (element, x) in part.iter_mut().zip(&x[place..]) {
                    let half = *element * *x;
                    *element = half + half;
                }
            }),
            _ => updated::<E>(cotangent, |place, part| {
                for (element, x) in part.iter_mut().zip(&x[place..]) {
                    *element = *element * x.sign();
                }
            }),
        }))
    }
}

impl Operator for Unary {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        matches!(self, Self::Absolute | Self::Square)
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [x] = one(inputs);
        Ok((self.apply(x)?, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let gradient = match self {
            Self::Plus(_) => pass.cotangent,
            Self::Times(_) | Self::Negative => self.apply(pass.cotangent)?,
            Self::Absolute | Self::Square => {
                let x = pass.take_input(0);
                match x.dtype() {
                    DType::F64 => self.gradient::<f64>(x, pass.cotangent)?,
                    _ => self.gradient::<f32>(x, pass.cotangent)?,
                }
            }
        };
        Ok(vec![Some(gradient)])
    }
}

/// Returns a contiguous tensor of the CPU.
pub(super) fn cpu_tensor(x: DispatchTensor) -> Result<FlexTensor> {
    from_dispatch::<Flex>(in_order(x))
}

/// Applies a function to all elements.
fn mapped<E: Number>(x: FlexTensor, function: impl Fn(E) -> E + Sync) -> FlexTensor {
    updated::<E>(x, |_, part| {
        for element in part {
            *element = function(*element);
        }
    })
}

/// Changes the elements of a contiguous tensor in parts, given with the index of their first
/// element: in place if nothing else uses the tensor's memory, else in a copy.
pub(super) fn updated<E: Number>(
    mut x: FlexTensor,
    update: impl Fn(usize, &mut [E]) + Sync,
) -> FlexTensor {
    if let Some(elements) = elements_mut::<E>(&mut x) {
        tasks::for_each_part(elements, TASK, LEAST, |task, part| {
            update(task * TASK, part);
        });
        return x;
    }
    let elements = memory::elements::<E>(&x);
    let mut copy = unwritten::<E>(x.layout().shape());
    let written = elements_mut::<E>(&mut copy).expect("new memory");
    tasks::for_each_part(written, TASK, LEAST, |task, part| {
        let place = task * TASK;
        part.copy_from_slice(&elements[place..][..part.len()]);
        update(place, part);
    });
    copy
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};

    use crate::ShardTensor;

    type Function<T> = fn(T) -> T;

    /// The functions of our tensors and of burn's.
    const FUNCTIONS: [(Function<ShardTensor<3>>, Function<Tensor<3>>); 6] = [
        (|x| x + 0.1, |x| x + 0.1),
        (|x| x - 0.1, |x| x - 0.1),
        (|x| x * 0.1, |x| x * 0.1),
        (|x| -x, |x| -x),
        (|x| x.abs(), |x| x.abs()),
        (|x| x.square(), |x| x.square()),
    ];

    /// Bits of numbers, the same for every NaN.
    fn bits(data: &TensorData) -> Vec<u64> {
        let bits = |x: f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
        data.iter::<f64>().map(bits).collect()
    }

    /// Covers views, NaN, zeros of both signs and checkpointing.
    #[test]
    fn results_and_gradients_are_those_of_burn() {
        let (plain, shape) = (Device::flex(), [4, 150, 151]);
        let normal = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), &plain);
        let mut numbers: Vec<f64> = normal.into_data().iter().collect();
        numbers[..3].copy_from_slice(&[0.0, -0.0, f64::NAN]);
        for dtype in [DType::F32, DType::F64] {
            let numbers = TensorData::new(numbers.clone(), shape).convert_dtype(dtype);
            for device in [
                plain.clone().autodiff(),
                plain.clone().autodiff().gradient_checkpointing(),
            ] {
                let run = |function: &dyn Fn(Tensor<3>) -> Tensor<3>| {
                    let leaves = [(); 2].map(|()| {
                        Tensor::<3>::from_data(numbers.clone(), (&device, dtype)).require_grad()
                    });
                    let [x, y] = leaves.clone();
                    let x = function(function(x)).narrow(0, 0, 3).permute([0, 2, 1]);
                    let z = x * function(y.narrow(0, 1, 3).permute([0, 2, 1]));
                    let gradients = (z.clone() * z.clone()).sum().backward();
                    let [of_x, of_y] = leaves.map(|leaf| leaf.grad(&gradients).unwrap());
                    [z.inner(), of_x, of_y].map(|tensor| bits(&tensor.into_data()))
                };
                for (place, (ours, burns)) in FUNCTIONS.into_iter().enumerate() {
                    let found = run(&|x| ours(ShardTensor::solo(x)).into_local());
                    assert!(found == run(&burns), "function {place}, {dtype:?}");
                }
            }
        }
    }

    #[test]
    fn an_argument_that_is_read_again_stays() {
        let x = Tensor::<3>::full([4, 150, 151], -2.0, &Device::flex());
        for (ours, burns) in FUNCTIONS {
            let y = ours(ShardTensor::solo(x.clone())).into_local();
            assert_eq!(y.into_data(), burns(x.clone()).into_data());
            let expected = Tensor::<3>::full([4, 150, 151], -2.0, &Device::flex());
            assert_eq!(x.clone().into_data(), expected.into_data());
        }
    }
}
