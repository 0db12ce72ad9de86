//! Legendre functions of a range of orders on the northern half of a grid.

use std::fmt;
use std::ops::Range;

use burn::tensor::DType;
use rayon::prelude::*;

use super::legendre::Function;
use crate::kernel::flex::Float;

/// Legendre functions of a range of orders, for degrees from each order on.
pub(super) struct Table {
    pub(super) function: Function,
    pub(super) orders: Range<usize>,
    pub(super) degrees: usize,
    /// Number of latitudes.
    pub(super) points: usize,
    values: Values,
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

    /// Functions of an order on the whole sphere, for all degrees: `[degree, point]`.
    pub(super) fn dense<E: Float>(&self, order: usize) -> Vec<E> {
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
