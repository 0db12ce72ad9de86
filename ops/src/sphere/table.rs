//! Legendre functions of a range of orders on the northern half of a grid.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn::tensor::{DType, Device, Tensor, TensorData};
use rayon::prelude::*;

use super::legendre::Function;
use crate::kernel::flex::{Float, with_float};

/// Legendre functions of a range of orders, for degrees from each order on.
pub(super) struct Table {
    pub(super) function: Function,
    pub(super) orders: Range<usize>,
    pub(super) degrees: usize,
    /// Number of latitudes.
    pub(super) points: usize,
    values: Values,
    /// The [matrix](Self::matrix) on each device and in each dtype that it was used in.
    matrices: Mutex<Vec<Tensor<3>>>,
}

enum Values {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

/// Contents of a table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) function: Function,
    pub(super) orders: Range<usize>,
    pub(super) dtype: DType,
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            function, orders, ..
        } = self;
        write!(f, "Table({function:?} of orders {orders:?})")
    }
}

impl Table {
    /// Computes the table for latitudes with these cosines, which must be symmetric; `phase`
    /// negates odd orders (Condon–Shortley).
    pub(super) fn new(key: &Key, degrees: usize, cosines: &[f64], phase: bool) -> Self {
        let north = &cosines[..cosines.len().div_ceil(2)];
        let orders = key.orders.clone().into_par_iter();
        let rows = orders.flat_map_iter(|order| {
            let sign = if phase && order % 2 == 1 { -1.0 } else { 1.0 };
            let rows = key.function.rows(order, degrees, north);
            rows.into_iter().map(move |value| sign * value)
        });
        Self {
            function: key.function,
            orders: key.orders.clone(),
            degrees,
            points: cosines.len(),
            values: match key.dtype {
                DType::F64 => Values::F64(rows.collect()),
                _ => Values::F32(rows.map(|value| value as f32).collect()),
            },
            matrices: Mutex::default(),
        }
    }

    /// Number of northern points, equator included.
    pub(super) fn half(&self) -> usize {
        self.points.div_ceil(2)
    }

    /// Number of degrees of an order.
    pub(super) fn rows(&self, order: usize) -> usize {
        self.degrees.saturating_sub(order)
    }

    /// Functions of an order: `[degree, northern point]`.
    pub(super) fn of<E: Float>(&self, order: usize) -> &[E] {
        let before: usize = (self.orders.start..order)
            .map(|order| self.rows(order))
            .sum();
        let range = before * self.half()..(before + self.rows(order)) * self.half();
        match &self.values {
            Values::F32(values) => bytemuck::cast_slice(&values[range]),
            Values::F64(values) => bytemuck::cast_slice(&values[range]),
        }
    }

    /// Functions of all orders on the whole sphere, as a tensor on a device: `[order, degree,
    /// point]`. It is made on first use and kept, as the functions are.
    pub(super) fn matrix(&self, device: &Device, dtype: DType) -> Tensor<3> {
        let mut kept = self.matrices.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |matrix: &&Tensor<3>| matrix.device() == *device && matrix.dtype() == dtype;
        if let Some(matrix) = kept.iter().find(is_same) {
            return matrix.clone();
        }
        let shape = [self.orders.len(), self.degrees, self.points];
        let functions = with_float!(dtype, E => {
            let mut functions: Vec<E> = Vec::with_capacity(shape.iter().product());
            for order in self.orders.clone() {
                functions.extend(self.dense::<E>(order));
            }
            TensorData::new(functions, shape)
        });
        let matrix = Tensor::from_data(functions, (device, dtype));
        kept.push(matrix.clone());
        matrix
    }

    /// Functions of an order on the whole sphere, for all degrees: `[degree, point]`.
    fn dense<E: Float>(&self, order: usize) -> Vec<E> {
        let (half, northern) = (self.half(), self.of::<E>(order));
        let mut found = vec![E::default(); self.degrees * self.points];
        for row in 0..self.rows(order) {
            let line = &mut found[(order + row) * self.points..][..self.points];
            let north = &northern[row * half..][..half];
            for (k, value) in north.iter().enumerate() {
                let mirrored = if self.function.is_odd(row) {
                    E::default() - *value
                } else {
                    *value
                };
                line[self.points - 1 - k] = mirrored;
                line[k] = *value;
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_receives_the_functions_once() {
        let key = Key {
            function: Function::Value,
            orders: 1..3,
            dtype: DType::F32,
        };
        let table = Table::new(&key, 4, &[0.5, 0.0, -0.5], false);
        let matrix = |dtype| table.matrix(&Device::flex(), dtype);
        assert_eq!(matrix(DType::F32).dims(), [2, 4, 3]);
        let first = matrix(DType::F32).into_data();
        matrix(DType::F32).into_data().assert_eq(&first, true);
        assert_eq!(matrix(DType::BF16).dtype(), DType::BF16);
        assert_eq!(table.matrices.lock().unwrap().len(), 2);
    }
}
