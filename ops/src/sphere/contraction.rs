//! Legendre sums over latitudes or degrees, for each order, as a node of the graph.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::table::Table;
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::{load, store};
use crate::kernel::lines::vectors;
use crate::kernel::matrices::{self, Matrix};
use crate::kernel::memory::Shared;
use crate::kernel::simd::{Element, Isa};
use crate::reshape;

/// Orders of a task; their cells are contiguous.
const ORDERS: usize = 8;
/// Fields of a task.
const FIELDS: usize = 32;
/// Most columns (parts of fields) for which the sums take less time than reading the functions; the
/// functions are then read in their stored order.
const FEW: usize = 4;
/// Functions read together.
const TOGETHER: usize = 4;

/// Sum over one side of a table: `[fields, points, orders, 2]` to or from
/// `[fields, degrees, orders, 2]`.
#[derive(Clone, Debug)]
pub(super) struct Contraction {
    pub(super) table: Arc<Table>,
    pub(super) to: To,
    /// Factors of latitudes; symmetric about the equator.
    pub(super) points: Arc<[f64]>,
    /// Factors of degrees.
    pub(super) degrees: Arc<[f64]>,
    pub(super) factor: Factor,
}

/// Index of the result of a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    Degrees,
    Points,
}

/// Power of `i` that multiplies the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Factor {
    One,
    PlusI,
    MinusI,
}

impl Factor {
    fn times<E: Float>(self, [re, im]: [E; 2]) -> [E; 2] {
        let zero = E::default();
        match self {
            Self::One => [re, im],
            Self::PlusI => [zero - im, re],
            Self::MinusI => [im, zero - re],
        }
    }
}

impl Contraction {
    /// Computes the sums of one shard, which holds the orders of the table.
    pub(super) fn run(self, x: Tensor<4>) -> Tensor<4> {
        if flex::runs_on(&x.device()) {
            Tensor::from_dispatch(apply(self, [x.into_dispatch()]))
        } else {
            self.composed(x)
        }
    }

    fn adjoint(&self) -> Self {
        Self {
            to: match self.to {
                To::Degrees => To::Points,
                To::Points => To::Degrees,
            },
            factor: match self.factor {
                Factor::One => Factor::One,
                Factor::PlusI => Factor::MinusI,
                Factor::MinusI => Factor::PlusI,
            },
            ..self.clone()
        }
    }

    /// Numbers of points or degrees, before and after.
    fn sizes(&self) -> [usize; 2] {
        let sizes = [self.table.points, self.table.degrees];
        match self.to {
            To::Degrees => sizes,
            To::Points => [sizes[1], sizes[0]],
        }
    }

    fn compute<E: Float>(&self, isa: Isa, x: &[E], fields: usize) -> Buffer<E> {
        let ([before, after], orders) = (self.sizes(), self.table.orders.len());
        assert_eq!(x.len(), fields * before * orders * 2);
        let blocks = [fields.div_ceil(FIELDS), orders.div_ceil(ORDERS)];
        // SAFETY: the tasks write all elements.
        unsafe {
            Buffer::filled(fields * after * orders * 2, |y| {
                tasks::for_each_init(blocks[0] * blocks[1], 1, Vec::new, |room, task| {
                    let first = [task / blocks[1] * FIELDS, task % blocks[1] * ORDERS];
                    let block = Block {
                        first,
                        len: [FIELDS.min(fields - first[0]), ORDERS.min(orders - first[1])],
                    };
                    block.compute(self, x, y, room, isa);
                });
            })
        }
    }

    /// Computes the sums by burn's operators, with the table of the whole sphere as a matrix.
    pub(super) fn composed(&self, x: Tensor<4>) -> Tensor<4> {
        let ([before, after], dtype) = (self.sizes(), x.dtype());
        let [fields, _, orders, _] = x.dims();
        let device = x.device().inner();
        let [points, degrees] = [&self.points, &self.degrees].map(|factors| {
            let factors = TensorData::new(factors.to_vec(), [1, factors.len(), 1]);
            Tensor::<3>::from_data(factors, (&device, dtype))
        });
        let matrix = self.table.matrix(&device, dtype); // [orders, degrees, points]
        let (matrix, factors_before, factors_after) = match self.to {
            To::Degrees => (matrix, points, degrees),
            To::Points => (matrix.swap_dims(1, 2), degrees, points),
        };
        let x: Tensor<3> = reshape(x.permute([2, 1, 0, 3]), vec![orders, before, fields * 2]);
        let y = matrix.matmul(x * factors_before) * factors_after;
        let y: Tensor<4> = reshape(y, vec![orders, after, fields, 2]);
        let y = y.permute([2, 1, 0, 3]);
        let [re, im] = [0, 1].map(|part| y.clone().narrow(3, part, 1));
        match self.factor {
            Factor::One => y,
            Factor::PlusI => Tensor::cat(vec![im.neg(), re], 3),
            Factor::MinusI => Tensor::cat(vec![im, re.neg()], 3),
        }
    }
}

impl Operator for Contraction {
    type Saved = usize;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["legendre", "legendre_backward"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, usize)> {
        let x = inputs.remove(0);
        let fields = x.shape()[0];
        Ok((self.on(x, fields)?, fields))
    }

    fn backward(&self, pass: BackwardPass<'_, usize>) -> Result<Vec<Option<DispatchTensor>>> {
        let gradient = self.adjoint().on(pass.cotangent, *pass.saved)?;
        Ok(vec![Some(gradient)])
    }
}

impl Contraction {
    fn on(&self, x: DispatchTensor, fields: usize) -> Result<DispatchTensor> {
        let (dtype, isa) = (x.dtype(), Isa::chosen()?);
        let shape = [fields, self.sizes()[1], self.table.orders.len(), 2];
        Ok(with_float!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            flex::result(self.compute::<E>(isa, flex::elements(&x), fields), &shape, dtype)
        }))
    }
}

/// Fields and orders of a task.
struct Block {
    first: [usize; 2],
    len: [usize; 2],
}

impl Block {
    /// Sums over both hemispheres at once: the functions are even or odd, so their northern values,
    /// applied to sums or differences of mirrored cells, cover the sphere.
    ///
    /// # Safety
    /// `y` must have room for the result, and no other task may write this block.
    unsafe fn compute<E: Float>(
        &self,
        sums: &Contraction,
        x: &[E],
        y: Shared<E>,
        room: &mut Vec<E>,
        isa: Isa,
    ) {
        let (table, [fields, orders]) = (&*sums.table, self.len);
        let (half, columns) = (table.half(), 2 * fields);
        let [sphere, spectrum] = [2 * half, table.degrees].map(|rows| rows * columns);
        room.clear();
        room.resize(orders * (sphere + spectrum), E::default());
        // `[order, even or odd, point, field and part]`, with points last for few columns, and
        // `[order, degree, field and part]`.
        let few = columns <= FEW;
        let [step, across] = if few { [1, half] } else { [columns, 1] };
        let (on_points, on_degrees) = room.split_at_mut(orders * sphere);
        let [points, degrees] = [&sums.points, &sums.degrees].map(|factors| {
            let factors = factors.iter().map(|factor| E::from_f64(*factor));
            factors.collect::<Vec<E>>()
        });
        let write = |place: usize, pair: [E; 2]| {
            for (part, value) in sums.factor.times(pair).into_iter().enumerate() {
                // SAFETY: within the result, and of this block.
                unsafe { *y.at(place + part) = value };
            }
        };
        // Cells outside and fields within, so that neighbors in the room are written together.
        match sums.to {
            To::Degrees => {
                for (k, factor) in points[..half].iter().enumerate() {
                    let mirror = table.points - 1 - k;
                    for field in 0..fields {
                        let [north, south] =
                            [k, mirror].map(|k| &x[self.row(sums, table.points, field, k)]);
                        for order in 0..orders {
                            let even = order * sphere + k * step + 2 * field * across;
                            for part in 0..2 {
                                let [north, south] =
                                    [north, south].map(|row| row[2 * order + part] * *factor);
                                let even = even + part * across;
                                let odd = even + half * columns;
                                (on_points[even], on_points[odd]) = if k == mirror {
                                    (north, E::default())
                                } else {
                                    (north + south, north - south)
                                };
                            }
                        }
                    }
                }
            }
            To::Points => {
                // Degrees below the orders have no functions.
                for l in (table.orders.start + self.first[1]).min(table.degrees)..table.degrees {
                    for field in 0..fields {
                        let row = &x[self.row(sums, table.degrees, field, l)];
                        for order in 0..orders {
                            let start = (order * table.degrees + l) * columns + 2 * field;
                            for part in 0..2 {
                                on_degrees[start + part] = row[2 * order + part] * degrees[l];
                            }
                        }
                    }
                }
            }
        }
        for order in 0..orders {
            let m = table.orders.start + self.first[1] + order;
            let points = &mut on_points[order * sphere..][..sphere];
            let degrees = &mut on_degrees[order * spectrum..][..spectrum];
            let functions = table.of::<E>(m);
            for parity in 0..2 {
                let points = &mut points[parity * half * columns..][..half * columns];
                // Even functions are every second row, starting at the first or the second one.
                let first = parity ^ usize::from(table.function.is_odd(0));
                if first >= table.rows(m) {
                    continue;
                }
                let functions = &functions[first * half..];
                let degrees = &mut degrees[(m + first) * columns..];
                let sizes = [
                    table.rows(m).saturating_sub(first).div_ceil(2),
                    half,
                    columns,
                ];
                if few {
                    isa.run(OfFew {
                        to: sums.to,
                        sizes,
                        functions,
                        points,
                        degrees,
                    })
                } else {
                    multiply(sums.to, sizes, functions, points, degrees)
                }
            }
        }
        match sums.to {
            To::Degrees => {
                for (l, factor) in degrees.iter().enumerate() {
                    for field in 0..fields {
                        let row = self.row(sums, table.degrees, field, l);
                        for order in 0..orders {
                            let start = (order * table.degrees + l) * columns + 2 * field;
                            let pair = [0, 1].map(|part| on_degrees[start + part] * *factor);
                            write(row.start + 2 * order, pair);
                        }
                    }
                }
            }
            To::Points => {
                for (k, factor) in points[..half].iter().enumerate() {
                    let mirror = table.points - 1 - k;
                    for field in 0..fields {
                        let [north, south] =
                            [k, mirror].map(|k| self.row(sums, table.points, field, k).start);
                        for order in 0..orders {
                            let even = order * sphere + k * step + 2 * field * across;
                            let [even, odd] = [even, even + half * columns].map(|start| {
                                [0, 1].map(|part| on_points[start + part * across] * *factor)
                            });
                            write(north + 2 * order, [0, 1].map(|part| even[part] + odd[part]));
                            if k != mirror {
                                write(south + 2 * order, [0, 1].map(|part| even[part] - odd[part]));
                            }
                        }
                    }
                }
            }
        }
    }

    /// Elements of the complex numbers of this block's orders, in a row of
    /// `[fields, cells, orders, 2]`.
    fn row(&self, sums: &Contraction, cells: usize, field: usize, cell: usize) -> Range<usize> {
        let row = (self.first[0] + field) * cells + cell;
        let start = 2 * (row * sums.table.orders.len() + self.first[1]);
        start..start + 2 * self.len[1]
    }
}

/// Multiplies the functions `[every second degree, point]` by cells `[point, column]`, giving
/// `[every second degree, column]`, or the transposed functions by the latter.
fn multiply<E: Float>(
    to: To,
    [degrees, points, columns]: [usize; 3],
    functions: &[E],
    on_points: &mut [E],
    on_degrees: &mut [E],
) {
    assert!(on_points.len() >= points * columns);
    assert!(on_degrees.len() >= (2 * degrees - 1) * columns);
    let (rows, strides, (y, y_row), (x, x_row)) = match to {
        To::Degrees => (
            [degrees, points],
            [2 * points, 1],
            (on_degrees, 2 * columns),
            (&*on_points, columns),
        ),
        To::Points => (
            [points, degrees],
            [1, 2 * points],
            (on_points, columns),
            (&*on_degrees, 2 * columns),
        ),
    };
    let functions = Matrix::strided(functions, rows, strides);
    let x = Matrix::strided(x, [rows[1], columns], [x_row, 1]);
    // SAFETY: all rows are within the slice, as asserted above.
    unsafe { matrices::multiply((y.as_mut_ptr(), y_row), functions, x) };
}

/// [`multiply`] for few columns, each with contiguous points.
struct OfFew<'a, E> {
    to: To,
    sizes: [usize; 3],
    functions: &'a [E],
    points: &'a mut [E],
    degrees: &'a mut [E],
}

impl<E: Element> WithSimd for OfFew<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        match self.sizes[2] {
            2 => self.run::<S, 2>(simd),
            _ => self.run::<S, 4>(simd),
        }
    }
}

impl<E: Element> OfFew<'_, E> {
    #[inline(always)]
    fn run<S: Simd, const N: usize>(&mut self, simd: S) {
        let [degrees, points, columns] = self.sizes;
        assert!(columns == N && self.points.len() >= N * points);
        let mut lines = self.points.chunks_exact_mut(points);
        let mut lines: [&mut [E]; N] = std::array::from_fn(|_| lines.next().expect("counted"));
        let zero = E::splat(simd, E::default());
        for first in (0..degrees).step_by(TOGETHER) {
            // Beyond the last function, the group's first one is repeated and its results are
            // ignored.
            let count = TOGETHER.min(degrees - first);
            let functions: [&[E]; TOGETHER] = std::array::from_fn(|row| {
                let degree = first + if row < count { row } else { 0 };
                &self.functions[2 * points * degree..][..points]
            });
            let place = |row: usize| 2 * (first + row) * N;
            match self.to {
                To::Degrees => {
                    let mut sums = [[zero; N]; TOGETHER];
                    for at in vectors::<S, E>(points) {
                        let cells = lines.each_ref().map(|line| load(simd, &line[at.clone()]));
                        for (sums, functions) in sums.iter_mut().zip(functions) {
                            let function = load(simd, &functions[at.clone()]);
                            for (sum, cells) in sums.iter_mut().zip(cells) {
                                *sum = E::mul_add(simd, function, cells, *sum);
                            }
                        }
                    }
                    for (row, sums) in sums.into_iter().enumerate().take(count) {
                        for (column, sum) in sums.into_iter().enumerate() {
                            self.degrees[place(row) + column] = E::sum(simd, sum);
                        }
                    }
                }
                To::Points => {
                    let factors: [[E::Vector<S>; N]; TOGETHER] = std::array::from_fn(|row| {
                        std::array::from_fn(|column| {
                            if row < count {
                                E::splat(simd, self.degrees[place(row) + column])
                            } else {
                                zero
                            }
                        })
                    });
                    for at in vectors::<S, E>(points) {
                        let mut sums = lines.each_ref().map(|line| load(simd, &line[at.clone()]));
                        for (functions, factors) in functions.iter().zip(factors) {
                            let function = load(simd, &functions[at.clone()]);
                            for (sum, factor) in sums.iter_mut().zip(factors) {
                                *sum = E::mul_add(simd, function, factor, *sum);
                            }
                        }
                        for (line, sum) in lines.iter_mut().zip(sums) {
                            store(simd, &mut line[at.clone()], sum);
                        }
                    }
                }
            }
        }
    }
}
