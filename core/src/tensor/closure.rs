//! User-supplied elementwise closures, and checks that they are elementwise.

use std::any::{Any, type_name};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::kind::Basic;
use burn::tensor::{Tensor, TensorData};

use super::ShardTensor;
use crate::comm::{Operation, Traffic};
use crate::ops::all_gather_numbers;
use crate::pairing::Linearity;
use crate::{DeviceMesh, Error, OrRaise, RandomKey, Result};

/// The value of the single cell on which closures are tested.
const CELL: f32 = 1.5;

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// Applies an elementwise closure to every shard.
    ///
    /// The closure's result for a cell must depend only on the value of that cell, and the closure
    /// must be the same on all ranks. It may run more than once. A closure that captures values
    /// also runs on a single cell, without gradients. With checks enabled
    /// ([`Settings::check`](crate::comm::Settings::check)), its results are compared with those for
    /// the same cells in another order and shape, and its result for the single cell is compared
    /// between all ranks.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values, if `f` changes the shape, or if it captures a
    /// tensor with gradients, which would only be this rank's part of them: make that tensor an
    /// operand, `x * x.replicate_operand(parameter)`. With checks enabled, also panics if the result
    /// for a cell depends on other cells, on the position of the cell, or on the rank.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::full([5], 3.0, &mesh, &[Shard(0)])?;
    ///     let y = x.map_local(|x| x.clone() * x + 1.0);
    ///     let whole = y.full_tensor().into_data();
    ///     whole.assert_eq(&[10.0_f32; 5].into(), false);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    pub fn map_local<L: Basic + 'static>(
        self,
        f: impl Fn(Tensor<D, K>) -> Tensor<D, L>,
    ) -> ShardTensor<D, L> {
        let closure = Closure::new("map_local", &f);
        self.require_resolved("map_local").or_raise();
        let local = closure.apply([self.local], |[x]| f(x), &self.mesh);
        ShardTensor {
            local: local.or_raise(),
            layout: self.layout,
            mesh: self.mesh,
        }
    }
}

impl<const D: usize> ShardTensor<D> {
    /// Applies an elementwise closure to two tensors; the closure must meet the requirements of
    /// [`map_local`](Self::map_local).
    ///
    /// # Panics
    /// Panics if the layouts cannot be paired, and where [`map_local`](Self::map_local) does.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let u = ShardTensor::<1>::full([5], 3.0, &mesh, &[Shard(0)])?;
    ///     let v = ShardTensor::<1>::full([5], 4.0, &mesh, &[Shard(0)])?;
    ///     let speed = u.zip_local(v, |u, v| (u.square() + v.square()).sqrt());
    ///     let whole = speed.full_tensor().into_data();
    ///     whole.assert_eq(&[5.0_f32; 5].into(), false);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    pub fn zip_local(self, other: Self, f: impl Fn(Tensor<D>, Tensor<D>) -> Tensor<D>) -> Self {
        const NAME: &str = "zip_local";
        let closure = Closure::new(NAME, &f);
        // A closure need not give every operand a gradient, so the sum of one gradient must not
        // wait for the other.
        let paired = self.paired(other, NAME, Linearity::None, false);
        let ((layout, mesh), lhs, rhs) = paired.or_raise();
        let local = closure.apply([lhs, rhs], |[lhs, rhs]| f(lhs, rhs), &mesh);
        Self::from_parts(local.or_raise(), layout, mesh)
    }
}

/// User-supplied closure that must be elementwise, with its name for error messages.
struct Closure {
    operator: &'static str,
    name: &'static str,
    captures: bool,
}

impl Closure {
    fn new<F>(operator: &'static str, f: &F) -> Self {
        Self {
            operator,
            name: type_name::<F>(),
            captures: size_of_val(f) > 0,
        }
    }

    /// Returns the closure's result on the shards of its operands.
    fn apply<const D: usize, const N: usize, K: Basic, L: Basic + 'static>(
        &self,
        operands: [Tensor<D, K>; N],
        f: impl Fn([Tensor<D, K>; N]) -> Tensor<D, L>,
        mesh: &DeviceMesh,
    ) -> Result<Tensor<D, L>> {
        let check = mesh.comm().settings().check;
        let shape = std::array::from_fn(|dim| broadcast(&operands, dim));
        let cell = |x: &Tensor<D, K>| {
            let data = TensorData::full([1; D], CELL);
            Tensor::from_data(data, (&x.device().inner(), x.dtype()))
        };
        let cells = self.captures.then(|| operands.each_ref().map(cell));
        let kept = check.then(|| operands.clone());
        let result = self.run_on("this rank's shard", || f(operands))?;
        if result.dims() != shape {
            return Err(self.error(format!(
                "gives shape {:?} for cells of shape {shape:?}; an elementwise function keeps the shape, others go \
                 through Field's operators or a Stencil",
                result.dims()
            )));
        }
        if let Some(cells) = cells {
            let of_cell = self.run_on("a single cell", || f(cells))?;
            self.refuse_captured_leaves(&of_cell)?;
            if check {
                self.compare_with_other_ranks(&of_cell, mesh)?;
            }
        }
        if let Some(operands) = kept {
            self.compare_with_other_cells(&operands, &result, &f)?;
        }
        Ok(result)
    }

    /// Refuses captured tensors with gradients, which show as a tracked result for cells without
    /// gradients.
    fn refuse_captured_leaves<const D: usize, L: Basic + 'static>(
        &self,
        of_cell: &Tensor<D, L>,
    ) -> Result<()> {
        let result: &dyn Any = of_cell;
        match result.downcast_ref::<Tensor<D>>() {
            Some(result) if result.is_tracked() => Err(self.error(
                "captures a tensor with gradients, which would be this rank's part of them only; make it an operand \
                 instead: x * x.replicate_operand(parameter)",
            )),
            _ => Ok(()),
        }
    }

    /// Compares the result for a single cell between all ranks of the mesh.
    fn compare_with_other_ranks<const D: usize, L: Basic>(
        &self,
        of_cell: &Tensor<D, L>,
        mesh: &DeviceMesh,
    ) -> Result<()> {
        let (ranks, numbers) = (mesh.shape().ranks(), values(of_cell));
        let operation = Operation::new(self.operator, Traffic::Control, None);
        let all = all_gather_numbers(mesh.comm(), ranks, &operation, &numbers)?;
        let tolerance = tolerance(of_cell, &all.concat());
        for (rank, found) in ranks.iter().zip(&all) {
            if !found
                .iter()
                .zip(&all[0])
                .all(|(a, b)| are_near(*a, *b, tolerance))
            {
                return Err(self.error(format!(
                    "differs between ranks: for a cell of {CELL} it gives {:?} on rank {} and {found:?} on rank {rank}; \
                     what it captures must be the same on all ranks: resolve it over all of them, or make it an operand",
                    all[0], ranks[0]
                )));
            }
        }
        Ok(())
    }

    /// Compares the result with that for the same cells in another order and shape, in two parts,
    /// each with zeros between its cells: no cell keeps its position or its neighbours, and no part
    /// has the sum or maximum of all cells.
    fn compare_with_other_cells<const D: usize, const N: usize, K: Basic, L: Basic>(
        &self,
        operands: &[Tensor<D, K>; N],
        result: &Tensor<D, L>,
        f: impl Fn([Tensor<D, K>; N]) -> Tensor<D, L>,
    ) -> Result<()> {
        let expected = values(result);
        if expected.is_empty() {
            return Ok(());
        }
        let inputs = operands
            .each_ref()
            .map(|x| values(&x.clone().expand(result.dims())));
        let is_float = operands.iter().all(|x| x.dtype().is_float());
        // Larger integers are not compared, because values pass through f64.
        let mut all = inputs.iter().chain([&expected]).flatten();
        if !is_float && all.any(|value| value.abs() > 2_f64.powi(53)) {
            return Ok(());
        }
        let tolerance = tolerance(result, &expected);
        let order = RandomKey::new(0, "closure").permutation(expected.len());
        for cells in order.chunks(order.len().div_ceil(2)) {
            let shape = other_shape(result.dims(), cells.len() + cells.len().div_ceil(4));
            // One place in five is a zero or, for integers, by which the closure may divide, the
            // first cell; cells repeat until the shape is full.
            let first = cells[0];
            let mut cells = cells.iter().copied().cycle();
            let arranged: Vec<Option<usize>> = (0..shape.iter().product())
                .map(|place| if place % 5 == 1 { None } else { cells.next() })
                .collect();
            let tensor = |operand: usize| {
                let gap = if is_float {
                    0.0
                } else {
                    inputs[operand][first]
                };
                let value = |cell: &Option<usize>| cell.map_or(gap, |cell| inputs[operand][cell]);
                let data: Vec<f64> = arranged.iter().map(value).collect();
                let like = &operands[operand];
                let options = (&like.device().inner(), like.dtype());
                Tensor::from_data(TensorData::new(data, shape), options)
            };
            let found = self.run_on("the cells in another order and shape", || {
                values(&f(std::array::from_fn(tensor)))
            })?;
            for (cell, found) in arranged.iter().zip(found) {
                let Some(cell) = *cell else { continue };
                let value = expected[cell];
                if !are_near(value, found, tolerance) {
                    let input: Vec<f64> = inputs.iter().map(|input| input[cell]).collect();
                    return Err(self.error(format!(
                        "is not elementwise: for a cell of {input:?} it gives {value} on this rank's shard, and {found} \
                         among other cells; use an operator of Field, or a Stencil for what depends on neighbours, and \
                         pass what varies by cell as an operand"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Runs the closure on cells for which it may panic unless it is elementwise.
    fn run_on<T>(&self, cells: &str, f: impl FnOnce() -> T) -> Result<T> {
        catch_unwind(AssertUnwindSafe(f)).map_err(|payload| match payload.downcast::<Error>() {
            Ok(error) => *error,
            Err(_) => self.error(format!(
                "panics on {cells}; an elementwise function must not depend on the shape, nor capture a tensor that \
                 varies by cell: make that an operand"
            )),
        })
    }

    fn error(&self, fault: impl std::fmt::Display) -> Error {
        Error::operator(self.operator, format!("the closure {} {fault}", self.name))
    }
}

/// The broadcast size of a dim of operands, some of which may have one cell in it.
fn broadcast<const D: usize, K: Basic>(operands: &[Tensor<D, K>], dim: usize) -> usize {
    let mut sizes = operands.iter().map(|x| x.dims()[dim]);
    let first = sizes.next().unwrap_or(1);
    sizes.fold(first, |size, other| if size == 1 { other } else { size })
}

/// Returns a shape of at least `cells` cells that differs from `shape` in every dim.
fn other_shape<const D: usize>(shape: [usize; D], cells: usize) -> [usize; D] {
    let mut other = shape.map(|size| 4 + usize::from(size == 4));
    let rows: usize = other[..D - 1].iter().product();
    other[D - 1] = other[D - 1].max(cells.div_ceil(rows));
    other[D - 1] += usize::from(other[D - 1] == shape[D - 1]);
    other
}

fn are_near(a: f64, b: f64, tolerance: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance
}

fn values<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> Vec<f64> {
    tensor.clone().into_data().iter().collect()
}

/// Tolerance of the comparison: vector and scalar instructions may round differently, and a closure
/// may amplify that.
fn tolerance<const D: usize, K: Basic>(result: &Tensor<D, K>, values: &[f64]) -> f64 {
    let finite = values.iter().filter(|value| value.is_finite());
    let scale = finite.fold(0.0, |scale: f64, value| scale.max(value.abs()));
    let epsilon = result.dtype().finfo().map_or(0.0, |info| info.epsilon);
    epsilon.sqrt() * scale
}

#[cfg(test)]
mod tests;
