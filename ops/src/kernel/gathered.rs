//! Gather and scatter-add along a dim with one index per element; each is the adjoint of the other.
//! Values are summed in order, whatever the number of threads.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{IndexingUpdateOp, Int, Shape, Tensor};
use halocline_core::ops::{BackwardPass, Operator, Recompute, apply};
use halocline_core::{Error, Result, tasks};

use super::buffer::Buffer;
use super::flex::{self, with_float, with_integers, with_numbers};
use super::lanes::CHUNK;
use super::lines::{Columns, Lines};
use super::memory::Shared;
use super::simd::Element;
use crate::precision::{cast, widened, widened_for_gradient};

/// Integer type of cell numbers.
pub(crate) trait Cell: Copy + Sync {
    /// Cell number; a negative one becomes larger than any cell.
    fn number(self) -> usize;
}

impl Cell for u32 {
    fn number(self) -> usize {
        self as usize
    }
}

impl Cell for i32 {
    fn number(self) -> usize {
        self as usize
    }
}

impl Cell for i64 {
    fn number(self) -> usize {
        self as usize
    }
}

/// `y[.., i, ..] = x[.., index[.., i, ..], ..]`.
///
/// # Errors
/// Fails if an index is out of range; only checked on CPU devices.
pub(crate) fn gather<const D: usize>(
    operator: &'static str,
    x: Tensor<D>,
    dim: usize,
    index: Tensor<D, Int>,
) -> Result<Tensor<D>> {
    if !flex::runs_on(&x.device()) {
        let dtype = x.dtype();
        return Ok(cast(widened_for_gradient(x).gather(dim, index), dtype));
    }
    let gather = Gather(Index::new(operator, dim, index));
    Error::catch(|| Tensor::from_dispatch(apply(gather, [x.into_dispatch()])))
}

/// `y = x`, and `y[.., index[.., i, ..], ..] += values[.., i, ..]`.
///
/// # Errors
/// Errors of [`gather`].
pub(crate) fn scatter_add<const D: usize>(
    operator: &'static str,
    x: Tensor<D>,
    dim: usize,
    index: Tensor<D, Int>,
    values: Tensor<D>,
) -> Result<Tensor<D>> {
    if !flex::runs_on(&x.device()) {
        let (dtype, values) = (x.dtype(), widened(values));
        let sum = widened(x).scatter(dim, index, values, IndexingUpdateOp::Add);
        return Ok(cast(sum, dtype));
    }
    let add = ScatterAdd(Index::new(operator, dim, index));
    let inputs = [x, values].map(Tensor::into_dispatch);
    Error::catch(|| Tensor::from_dispatch(apply(add, inputs)))
}

/// Index tensor, and the dim that it indexes.
#[derive(Debug)]
struct Index {
    operator: &'static str,
    dim: usize,
    shape: Shape,
    cells: FlexTensor,
}

impl Index {
    fn new<const D: usize>(operator: &'static str, dim: usize, index: Tensor<D, Int>) -> Self {
        Self {
            operator,
            dim,
            shape: index.shape(),
            cells: flex::integers(index),
        }
    }

    fn taken(&self, x: DispatchTensor) -> Result<DispatchTensor> {
        let dtype = x.dtype();
        let lines = Lines::along(&x.shape(), self.dim..self.dim + 1);
        Ok(with_numbers!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            let x = flex::elements::<E>(&x);
            let y = with_integers!(&self.cells, cells => lines.taken(x, cells));
            flex::result(self.within(lines.cells, y)?, &self.shape, dtype)
        }))
    }

    /// Adds values to `x`, or to zeros of the given shape.
    fn added(
        &self,
        shape: &Shape,
        x: Option<DispatchTensor>,
        values: DispatchTensor,
    ) -> Result<DispatchTensor> {
        let dtype = values.dtype();
        let lines = Lines::along(shape, self.dim..self.dim + 1);
        Ok(with_float!(dtype, E => {
            let x = x.map(flex::operand::<E>).transpose()?;
            let values = flex::operand::<E>(values)?;
            let x = x.as_ref().map(flex::elements::<E>);
            let values = flex::elements(&values);
            let y = with_integers!(&self.cells, cells => lines.added(x, cells, values));
            flex::result(self.within(lines.cells, y)?, shape, dtype)
        }))
    }

    /// Checks that a kernel found all cells in a dim of this size.
    fn within<T>(&self, size: usize, found: Option<T>) -> Result<T> {
        found.ok_or_else(|| {
            let beyond = with_integers!(&self.cells, cells => {
                let beyond = cells.iter().find(|cell| cell.number() >= size);
                beyond.expect("a cell beyond the dim").to_string()
            });
            let message = format!("index {beyond} of a dim of {size} cells");
            Error::operator(self.operator, message)
        })
    }
}

#[derive(Debug)]
struct Gather(Index);

#[derive(Debug)]
struct ScatterAdd(Index);

impl Operator for Gather {
    /// Shape of the input.
    type Saved = Shape;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["gather", "gather (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Shape)> {
        let x = inputs.remove(0);
        let shape = x.shape();
        Ok((self.0.taken(x)?, shape))
    }

    fn backward(&self, pass: BackwardPass<'_, Shape>) -> Result<Vec<Option<DispatchTensor>>> {
        Ok(vec![Some(self.0.added(
            pass.saved,
            None,
            pass.cotangent,
        )?)])
    }
}

impl Operator for ScatterAdd {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["scatter_add", "scatter_add (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let values = inputs.pop().expect("values");
        let x = inputs.pop().expect("cells");
        Ok((self.0.added(&x.shape(), Some(x), values)?, ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let values = pass.wanted[1].then(|| self.0.taken(pass.cotangent.clone()));
        Ok(vec![Some(pass.cotangent), values.transpose()?])
    }
}

impl Lines {
    /// Gathers cells along lines, one per place; `None` if a cell does not exist.
    pub(crate) fn taken<E: Copy + Default + Send + Sync>(
        self,
        x: &[E],
        places: &[impl Cell],
    ) -> Option<Buffer<E>> {
        let Self { cells, inner, .. } = self;
        let block = places.len() / self.outer.max(1);
        let beyond = AtomicBool::new(false);
        let take = |x: &[E], place: &mut E, cell: usize| match x.get(cell) {
            Some(x) => *place = *x,
            None => {
                *place = E::default();
                beyond.store(true, Ordering::Relaxed);
            }
        };
        let fill = |range: Range<usize>, y: &mut [E]| {
            let start = range.start;
            for run in runs(range, block) {
                let x = &x[run.start / block * cells * inner..][..cells * inner];
                if inner == 1 {
                    let y = &mut y[run.start - start..run.end - start];
                    let pairs = y.iter_mut().zip(&places[run]);
                    pairs.for_each(|(y, cell)| take(x, y, cell.number()));
                    continue;
                }
                for row in runs(run, inner) {
                    let y = &mut y[row.start - start..row.end - start];
                    let columns = row.start % inner..;
                    for ((y, cell), column) in y.iter_mut().zip(&places[row]).zip(columns) {
                        take(
                            x,
                            y,
                            cell.number().saturating_mul(inner).saturating_add(column),
                        );
                    }
                }
            }
        };
        // SAFETY: the tasks write all elements, each task its own.
        let y = unsafe {
            Buffer::filled(places.len(), |y| {
                tasks::for_each(places.len().div_ceil(CHUNK), 1, |part| {
                    let range = part * CHUNK..places.len().min((part + 1) * CHUNK);
                    fill(range.clone(), y.slice(range));
                });
            })
        };
        (!beyond.into_inner()).then_some(y)
    }

    /// Adds values to `start`, or to zeros, each at the cell of its line given by its place; `None`
    /// if a cell does not exist.
    pub(crate) fn added<E: Element>(
        self,
        start: Option<&[E]>,
        places: &[impl Cell],
        values: &[E],
    ) -> Option<Buffer<E>> {
        let Self { cells, inner, .. } = self;
        let beyond = AtomicBool::new(false);
        let from = Self {
            cells: values.len() / self.count().max(1),
            ..self
        };
        let add = |sum: Option<&mut E>, value: E| match sum {
            Some(sum) => *sum += value,
            None => beyond.store(true, Ordering::Relaxed),
        };
        let begin = |sums: &mut [E], range: Range<usize>| match start {
            Some(start) => sums.copy_from_slice(&start[range]),
            None => sums.fill(E::default()),
        };
        let along = |line: usize, y: Shared<E>| {
            let [of_x, of_values] = [cells, from.cells].map(|len| line * len..(line + 1) * len);
            // SAFETY: elements of this line.
            let sums = unsafe { y.slice(of_x.clone()) };
            begin(sums, of_x);
            let pairs = places[of_values.clone()].iter().zip(&values[of_values]);
            pairs.for_each(|(cell, value)| add(sums.get_mut(cell.number()), *value));
        };
        let beside = |part: &Columns, y: Shared<E>| {
            for cell in 0..cells {
                let range = self.part(part, cell);
                // SAFETY: elements of these columns.
                begin(unsafe { y.slice(range.clone()) }, range);
            }
            for place in 0..from.cells {
                let range = from.part(part, place);
                let pairs = places[range.clone()].iter().zip(&values[range]);
                for ((cell, value), column) in pairs.zip(part.columns.clone()) {
                    let cell = Some(cell.number()).filter(|cell| *cell < cells);
                    let place = cell.map(|cell| (part.outer * cells + cell) * inner + column);
                    // SAFETY: an element of these columns.
                    add(place.map(|place| unsafe { &mut *y.at(place) }), *value);
                }
            }
        };
        // SAFETY: the tasks write all elements, each task its own columns.
        let y = unsafe {
            self.filled(self.len(), |part, y| match inner {
                1 => along(part.outer, y),
                _ => beside(&part, y),
            })
        };
        (!beyond.into_inner()).then_some(y)
    }
}

/// Splits a range at multiples of `block`.
fn runs(range: Range<usize>, block: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let end = ((start / block + 1) * block).min(range.end);
        let run = start..end;
        start = end;
        (!run.is_empty()).then_some(run)
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::{FloatDType, IntDType, Tolerance};

    use super::*;
    use crate::testing::random;

    /// Compares values and gradients with burn's operators.
    #[test]
    fn kernels_and_burns_operators_agree() {
        let device = burn::tensor::Device::default();
        for (shape, count) in [
            ([3, 5, 1], 4),
            ([2, 7, 300], 2),
            ([5, 1, 3], 6),
            ([1, 9, 1], 40_000),
            ([1, 3, 9000], 5),
        ] {
            let mut of_index = shape;
            of_index[1] = count;
            let total = of_index.iter().product::<usize>();
            let cells = (0..total).map(|place| (place * place + place / 7) % shape[1]);
            let cells = cells.map(|cell| cell as i64).collect::<Vec<_>>();
            let index = Tensor::<1, Int>::from_data(&cells[..], &device).reshape(of_index);
            let index = index.cast(if count % 2 == 0 {
                IntDType::I64
            } else {
                IntDType::I32
            });
            let run = |ours: bool| {
                let [x, sums] = ["x", "sums"].map(|name| random::<3>(shape, name, 0));
                let values = random::<3>(of_index, "values", 0);
                let [x, sums, values] = [x, sums, values].map(|x| x.detach().require_grad());
                let (taken, added) = if ours {
                    (
                        gather("", x.clone(), 1, index.clone()).unwrap(),
                        scatter_add("", sums.clone(), 1, index.clone(), values.clone()).unwrap(),
                    )
                } else {
                    let (index, values) = (index.clone(), values.clone());
                    let add = IndexingUpdateOp::Add;
                    (
                        x.clone().gather(1, index.clone()),
                        sums.clone().scatter(1, index, values, add),
                    )
                };
                let weighted = |y: &Tensor<3>| (y.clone() * y.clone().detach().cos()).sum();
                let gradients = (weighted(&taken) + weighted(&added)).backward();
                let [x, sums, values] =
                    [x, sums, values].map(|leaf: Tensor<3>| leaf.grad(&gradients).unwrap());
                [taken.inner(), added.inner(), x, sums, values].map(Tensor::into_data)
            };
            for (ours, burns) in run(true).iter().zip(&run(false)) {
                ours.assert_approx_eq(burns, Tolerance::<f32>::rel_abs(1e-5, 1e-5));
            }
        }
    }

    #[test]
    fn numbers_of_half_precision_are_taken_as_they_are() {
        let device = burn::tensor::Device::default();
        let index = Tensor::<2, Int>::from_data([[3, 0], [1, 1]], &device);
        for dtype in [FloatDType::BF16, FloatDType::F16] {
            let x = random::<2>([4, 2], "x", 0).detach().cast(dtype);
            let wide = x.clone().cast(FloatDType::F32);
            let y = gather("", x, 0, index.clone()).unwrap();
            assert_eq!(y.dtype(), dtype.into());
            let expected = wide.gather(0, index.clone()).into_data();
            y.cast(FloatDType::F32)
                .into_data()
                .assert_eq(&expected, true);
        }
    }

    #[test]
    fn a_cell_beyond_is_told() {
        let device = burn::tensor::Device::default();
        for (shape, beyond) in [([4, 1], 4_i64), ([4, 3], -1)] {
            let x = || Tensor::<2>::zeros(shape, &device);
            let index = || Tensor::<2, Int>::full(shape, beyond, &device);
            let told = format!("test: index {beyond} of a dim of 4 cells");
            let refused = [
                gather("test", x(), 0, index()),
                scatter_add("test", x(), 0, index(), x()),
            ];
            for refused in refused {
                assert_eq!(refused.unwrap_err().to_string(), told);
            }
        }
    }
}
