//! Integers that operators of other devices take as tensors.

use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, Int, Tensor, TensorData};

/// Tensor of the same integers on each device that has used it.
#[derive(Debug, Default)]
pub(crate) struct Ints(Mutex<Vec<Tensor<1, Int>>>);

impl Ints {
    /// Returns the tensor on a device, with `numbers` if it is not there yet.
    pub(crate) fn on(
        &self,
        device: &Device,
        numbers: impl Iterator<Item = usize>,
    ) -> Tensor<1, Int> {
        let device = device.clone().inner();
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tensor) = kept.iter().find(|tensor| tensor.device() == device) {
            return tensor.clone();
        }
        let numbers: Vec<i64> = numbers.map(|number| number as i64).collect();
        let count = numbers.len();
        let tensor = Tensor::from_data(TensorData::new(numbers, [count]), &device);
        kept.push(tensor.clone());
        tensor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_receives_the_numbers_once() {
        let (ints, device) = (Ints::default(), Device::flex());
        let first = ints.on(&device, [3, 0].into_iter());
        let again = ints.on(&device.autodiff(), std::iter::from_fn(|| unreachable!()));
        again.into_data().assert_eq(&first.into_data(), true);
    }
}
