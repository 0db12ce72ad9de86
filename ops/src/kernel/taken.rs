//! Gather of the cells of a dim by number, and sums of values by cell number; each is the adjoint
//! of the other. Values are summed in order, whatever the number of threads.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{IndexingUpdateOp, Int, Shape, Tensor};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, Recompute, apply};
use halocline_core::tasks;

use super::buffer::Buffer;
use super::flex::{self, Float, with_float, with_numbers};
use super::ints::Ints;
use super::lanes::CHUNK;
use super::lines::Lines;
use crate::precision::{cast, widened, widened_for_gradient};

/// Cell numbers to gather: any cells, in any order, with repetitions.
#[derive(Debug)]
pub(crate) struct Places {
    cells: Vec<usize>,
    /// One more than the largest cell number; zero without cells.
    bound: usize,
    by_cell: OnceLock<ByCell>,
    ints: Ints,
}

/// Places at which each cell occurs.
#[derive(Debug)]
struct ByCell {
    /// Start of the places of each cell in `places`.
    starts: Vec<usize>,
    /// All places in the order of their cells; `None` if they already are in that order.
    places: Option<Vec<u32>>,
}

impl Places {
    pub(crate) fn new(cells: Vec<usize>) -> Arc<Self> {
        Arc::new(Self {
            bound: cells.iter().max().map_or(0, |last| last + 1),
            cells,
            by_cell: OnceLock::new(),
            ints: Ints::default(),
        })
    }

    pub(crate) fn cells(&self) -> &[usize] {
        &self.cells
    }

    /// One more than the largest cell number; zero without cells.
    pub(crate) fn bound(&self) -> usize {
        self.bound
    }

    fn by_cell(&self) -> &ByCell {
        self.by_cell.get_or_init(|| {
            let count = self.bound;
            let mut starts = vec![0; count + 1];
            for cell in &self.cells {
                starts[cell + 1] += 1;
            }
            for cell in 0..count {
                starts[cell + 1] += starts[cell];
            }
            let places = (!self.cells.is_sorted()).then(|| {
                let mut next = starts.clone();
                let mut places = vec![0; self.cells.len()];
                for (place, cell) in self.cells.iter().enumerate() {
                    places[next[*cell]] = u32::try_from(place).expect("fewer places than 2³²");
                    next[*cell] += 1;
                }
                places
            });
            ByCell { starts, places }
        })
    }

    fn ints<const D: usize>(&self, beside: &Tensor<D>) -> Tensor<1, Int> {
        self.ints.on(&beside.device(), self.cells.iter().copied())
    }
}

impl ByCell {
    /// Range of the places of a cell.
    fn of(&self, cell: usize) -> Range<usize> {
        match self.starts.get(cell + 1) {
            Some(end) => self.starts[cell]..*end,
            None => 0..0,
        }
    }
}

/// `y[.., i, ..] = x[.., cells[i], ..]`. Requires at least one place.
pub(crate) fn take<const D: usize>(x: Tensor<D>, dim: usize, places: &Arc<Places>) -> Tensor<D> {
    if !flex::runs_on(&x.device()) {
        let (dtype, cells) = (x.dtype(), places.ints(&x));
        return cast(widened_for_gradient(x).select(dim, cells), dtype);
    }
    let places = places.clone();
    Tensor::from_dispatch(apply(Take { places, dim }, [x.into_dispatch()]))
}

/// `y[.., cells[i], ..] += x[.., i, ..]` for every place `i`, starting from zeros of `count` cells.
pub(crate) fn add<const D: usize>(
    x: Tensor<D>,
    dim: usize,
    places: &Arc<Places>,
    count: usize,
) -> Tensor<D> {
    if !flex::runs_on(&x.device()) {
        let mut shape = x.dims();
        shape[dim] = count;
        let (dtype, cells, x) = (x.dtype(), places.ints(&x), widened(x));
        let zeros = Tensor::zeros(shape, (&x.device(), x.dtype()));
        let sums = zeros.select_assign(dim, cells, x, IndexingUpdateOp::Add);
        return cast(sums, dtype);
    }
    let places = places.clone();
    Tensor::from_dispatch(apply(Add { places, dim, count }, [x.into_dispatch()]))
}

#[derive(Debug)]
struct Take {
    places: Arc<Places>,
    dim: usize,
}

#[derive(Debug)]
struct Add {
    places: Arc<Places>,
    dim: usize,
    count: usize,
}

impl Operator for Take {
    /// Shape of the input.
    type Saved = Shape;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["take", "take (backward)"])
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
        Ok((run(x, self.dim, &self.places, None)?, shape))
    }

    fn backward(&self, pass: BackwardPass<'_, Shape>) -> Result<Vec<Option<DispatchTensor>>> {
        let count = pass.saved[self.dim];
        let gradient = run(pass.cotangent, self.dim, &self.places, Some(count))?;
        Ok(vec![Some(gradient)])
    }
}

impl Operator for Add {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["add by cell", "add by cell (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let y = run(inputs.remove(0), self.dim, &self.places, Some(self.count))?;
        Ok((y, ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let gradient = run(pass.cotangent, self.dim, &self.places, None)?;
        Ok(vec![Some(gradient)])
    }
}

/// Adds to `count` cells, or gathers cells if there is no count.
fn run(
    x: DispatchTensor,
    dim: usize,
    places: &Places,
    count: Option<usize>,
) -> Result<DispatchTensor> {
    let (dtype, mut shape) = (x.dtype(), x.shape().to_vec());
    let lines = Lines::along(&shape, dim..dim + 1);
    shape[dim] = count.unwrap_or(places.cells.len());
    Ok(match count {
        Some(count) => with_float!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            let y = added(lines, flex::elements::<E>(&x), places, count);
            flex::result(y, &shape, dtype)
        }),
        None => with_numbers!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            let y = taken(lines, flex::elements::<E>(&x), places);
            flex::result(y, &shape, dtype)
        }),
    })
}

fn taken<E: Copy + Send + Sync>(lines: Lines, x: &[E], places: &Places) -> Buffer<E> {
    let Lines {
        outer,
        cells,
        inner,
    } = lines;
    let shape = [outer, places.cells.len(), inner];
    rows(shape, |outer, chosen, columns, y| {
        let x = &x[outer * cells * inner..][..cells * inner];
        copy(x, y, inner, columns, places.cells[chosen].iter().copied());
    })
}

fn added<E: Float>(lines: Lines, x: &[E], places: &Places, count: usize) -> Buffer<E> {
    let Lines {
        outer,
        cells,
        inner,
    } = lines;
    let by_cell = places.by_cell();
    let place = |index: usize| match &by_cell.places {
        Some(places) => places[index] as usize,
        None => index,
    };
    let once = cells == count && by_cell.starts.iter().copied().eq(0..=count);
    rows([outer, count, inner], |outer, chosen, columns, y| {
        let x = &x[outer * cells * inner..][..cells * inner];
        if once {
            return copy(x, y, inner, columns, chosen.map(place));
        }
        for (y, cell) in y.chunks_exact_mut(columns.len()).zip(chosen) {
            y.fill(E::default());
            for index in by_cell.of(cell) {
                let x = &x[place(index) * inner + columns.start..];
                for (y, x) in y.iter_mut().zip(x) {
                    *y += *x;
                }
            }
        }
    })
}

/// Copies a range of columns of rows of `inner` elements.
fn copy<E: Copy>(
    x: &[E],
    y: &mut [E],
    inner: usize,
    columns: Range<usize>,
    rows: impl Iterator<Item = usize>,
) {
    if inner == 1 {
        y.iter_mut().zip(rows).for_each(|(y, row)| *y = x[row]);
        return;
    }
    for (y, row) in y.chunks_exact_mut(columns.len()).zip(rows) {
        y.copy_from_slice(&x[row * inner..][columns.clone()]);
    }
}

/// Creates a buffer of `[outer, count, inner]`; `fill` writes a range of rows of `inner`, or of
/// columns of one row.
pub(crate) fn rows<E: Copy + Send + Sync>(
    [outer, count, inner]: [usize; 3],
    fill: impl Fn(usize, Range<usize>, Range<usize>, &mut [E]) + Sync,
) -> Buffer<E> {
    let (high, wide) = ((CHUNK / inner.max(1)).max(1), inner.clamp(1, CHUNK));
    let [down, across] = [count.div_ceil(high), inner.div_ceil(wide)];
    // SAFETY: every element is written, each by one task.
    unsafe {
        Buffer::filled(outer * count * inner, |y| {
            tasks::for_each(outer * down * across, 1, |task| {
                let (band, column) = (task / across, task % across * wide);
                let (outer, row) = (band / down, band % down * high);
                let rows = row..count.min(row + high);
                let columns = column..inner.min(column + wide);
                let place = |row: usize| (outer * count + row) * inner;
                let cells = place(rows.start) + columns.start..place(rows.end - 1) + columns.end;
                fill(outer, rows, columns, y.slice(cells));
            });
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{difference, random};

    /// Compares values and gradients with burn's operators.
    #[test]
    fn kernels_and_burns_operators_agree() {
        for cells in [vec![2, 0, 2, 4, 1, 2], vec![0, 0, 3], vec![4]] {
            let places = Places::new(cells.clone());
            for dim in 0..3 {
                let x = random::<3>([5, 5, 5], "x", 0).detach().require_grad();
                let mut shape = [5; 3];
                shape[dim] = cells.len();
                let messages = random::<3>(shape, "m", 0).detach().require_grad();
                let run = |ours: bool| {
                    let ints = places.ints(&x);
                    let (y, sums) = if ours {
                        (
                            take(x.clone(), dim, &places),
                            add(messages.clone(), dim, &places, 5),
                        )
                    } else {
                        (
                            x.clone().select(dim, ints.clone()),
                            Tensor::zeros([5; 3], &x.device()).select_assign(
                                dim,
                                ints,
                                messages.clone(),
                                IndexingUpdateOp::Add,
                            ),
                        )
                    };
                    let weighted = (y.clone() * random::<3>(y.dims(), "w", 0).detach()).sum()
                        + (sums.clone() * random::<3>([5; 3], "v", 0).detach()).sum();
                    let gradients = weighted.backward();
                    [
                        y.inner(),
                        sums.inner(),
                        x.grad(&gradients).unwrap(),
                        messages.grad(&gradients).unwrap(),
                    ]
                    .map(Tensor::into_data)
                };
                for (ours, burns) in run(true).iter().zip(&run(false)) {
                    assert!(difference(ours, burns) < 1e-6, "{cells:?}, dim {dim}");
                }
            }
        }
    }
}
