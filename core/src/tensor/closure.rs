//! Elementwise closures of the user, and checks that they are elementwise.

use std::any::{Any, type_name};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::kind::Basic;
use burn::tensor::{Tensor, TensorData};

use super::ShardTensor;
use crate::comm::{Operation, Traffic};
use crate::ops::all_gather_numbers;
use crate::{DeviceMesh, Error, Linearity, OrRaise, RandomKey, Result};

/// The value of the single cell that closures run on.
const CELL: f32 = 1.5;

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// Applies an elementwise closure to every shard.
    ///
    /// The closure's value for a cell must depend on the value of that cell alone, and the closure
    /// must be the same on all ranks. It may run more than once. A closure that captures values
    /// also runs on a single cell, without gradients. With checks on
    /// ([`Settings::check`](crate::Settings::check)) its values are compared with those of the same
    /// cells in another order and shape, and that of the single cell between all ranks.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values, if `f` changes the shape, or if it captures a
    /// tensor with gradients, which would be this rank's part of them only: make that tensor an
    /// operand, `x * x.replicate_beside(parameter)`. With checks on, also if the value of `f` for a
    /// cell depends on other cells, on the position of the cell, or on the rank.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, LocalGradient, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::full([5], 3.0, &mesh, &[Shard(0)])?;
    ///     let y = x.map_local(|x| x.clone() * x + 1.0);
    ///     let whole = y.full_tensor(LocalGradient::Replicated).into_data();
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
        let closure = Closure::new("map", &f);
        self.require_resolved("map").or_raise();
        let local = closure.apply([self.local], |[x]| f(x), &self.mesh);
        ShardTensor {
            local: local.or_raise(),
            layout: self.layout,
            mesh: self.mesh,
        }
    }
}

impl<const D: usize> ShardTensor<D> {
    /// Applies an elementwise closure to two tensors, as [`map_local`](Self::map_local) does to
    /// one.
    ///
    /// # Panics
    /// Panics if the layouts cannot be paired, and where [`map_local`](Self::map_local) does.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, LocalGradient, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let u = ShardTensor::<1>::full([5], 3.0, &mesh, &[Shard(0)])?;
    ///     let v = ShardTensor::<1>::full([5], 4.0, &mesh, &[Shard(0)])?;
    ///     let speed = u.zip_local(v, "speed", |u, v| (u.square() + v.square()).sqrt());
    ///     let whole = speed.full_tensor(LocalGradient::Replicated).into_data();
    ///     whole.assert_eq(&[5.0_f32; 5].into(), false);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    pub fn zip_local(
        self,
        other: Self,
        operator: &'static str,
        f: impl Fn(Tensor<D>, Tensor<D>) -> Tensor<D>,
    ) -> Self {
        let closure = Closure::new(operator, &f);
        // A closure may give an operand no gradient, so none waits for that of the other.
        let paired = self.paired(other, operator, Linearity::None, false);
        let ((layout, mesh), lhs, rhs) = paired.or_raise();
        let local = closure.apply([lhs, rhs], |[lhs, rhs]| f(lhs, rhs), &mesh);
        Self::from_parts(local.or_raise(), layout, mesh)
    }
}

/// User's closure that must be elementwise, with its name for errors.
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

    /// The closure's value on the shards of its operands.
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

    /// Refuses captured tensors with gradients: without them, cells without gradients have a result
    /// without gradients.
    fn refuse_captured_leaves<const D: usize, L: Basic + 'static>(
        &self,
        of_cell: &Tensor<D, L>,
    ) -> Result<()> {
        let result: &dyn Any = of_cell;
        match result.downcast_ref::<Tensor<D>>() {
            Some(result) if result.is_tracked() => Err(self.error(
                "captures a tensor with gradients, which would be this rank's part of them only; make it an operand \
                 instead: x * x.replicate_beside(parameter)",
            )),
            _ => Ok(()),
        }
    }

    /// Compares the value for a single cell between all ranks of the mesh.
    fn compare_with_other_ranks<const D: usize, L: Basic>(
        &self,
        of_cell: &Tensor<D, L>,
        mesh: &DeviceMesh,
    ) -> Result<()> {
        let (ranks, own) = (mesh.shape().ranks(), values(of_cell));
        let operation = Operation::new(self.operator, Traffic::Control, None);
        let all = all_gather_numbers(mesh.comm(), ranks, &operation, &own)?;
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

    /// Compares the result with that of the same cells in another order and shape, in two parts,
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
        let tolerance = tolerance(result, &expected);
        let order = RandomKey::new(0, "closure").permutation(expected.len());
        for cells in order.chunks(order.len().div_ceil(2)) {
            let shape = other_shape(result.dims(), cells.len() + cells.len().div_ceil(4));
            // One place in five is a zero; cells repeat until the shape is full.
            let mut cells = cells.iter().copied().cycle();
            let arranged: Vec<Option<usize>> = (0..shape.iter().product())
                .map(|place| if place % 5 == 1 { None } else { cells.next() })
                .collect();
            let tensor = |operand: usize| {
                let value = |cell: &Option<usize>| cell.map_or(0.0, |cell| inputs[operand][cell]);
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

    /// Runs the closure on cells on which it may panic unless it is elementwise.
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

/// The common size of a dim of operands, some of which may have one cell in it.
fn broadcast<const D: usize, K: Basic>(operands: &[Tensor<D, K>], dim: usize) -> usize {
    let mut sizes = operands.iter().map(|x| x.dims()[dim]);
    let first = sizes.next().unwrap_or(1);
    sizes.fold(first, |size, other| if size == 1 { other } else { size })
}

/// A shape of at least `cells` cells that differs from `shape` in every dim.
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
mod tests {
    use super::*;
    use crate::{Launcher, Layout, Replicate, Shard};
    use burn::tensor::{Bool, DType, activation};

    type Map = fn(Tensor<2>) -> Tensor<2>;

    fn cells(rows: usize, columns: usize) -> Vec<f32> {
        let count = rows * columns;
        (0..count)
            .map(|i| ((i * 7 + 2) % count) as f32 / 4.0 - 1.0)
            .collect()
    }

    /// The error of a closure on rows that lie on ranks by `extents`.
    fn refused(
        extents: &[usize],
        check: bool,
        f: impl Fn(Tensor<2>) -> Tensor<2> + Sync,
    ) -> String {
        let result = Launcher::local(extents.len()).check(check).run(|world| {
            let mesh = world.mesh([("rows", extents.len())])?;
            let rows = extents.iter().sum();
            let data = TensorData::new(cells(rows, 3), [rows, 3]);
            let x = Tensor::<2>::from_data(data, world.device()).require_grad();
            let layout =
                Layout::new(mesh.shape(), &[rows, 3], &[Shard(0)])?.with_extents(0, extents)?;
            ShardTensor::distribute(x, &mesh, &layout)?.map_local(&f);
            Ok(())
        });
        result.map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn closures_that_are_not_elementwise_are_refused() {
        let closures: [(&str, Map); 9] = [
            ("softmax", |x| activation::softmax(x, 0)),
            ("flip", |x| x.flip([0])),
            ("cumsum", |x| x.cumsum(0)),
            ("roll", |x| x.roll(&[1], &[0])),
            ("anomaly", |x| x.clone() - x.mean_dim(0)),
            ("global anomaly", |x| x.clone() - x.mean().reshape([1, 1])),
            ("scaled by the largest", |x| {
                x.clone() / x.abs().max().reshape([1, 1])
            }),
            ("scaled by the size", |x| {
                let rows = x.dims()[0] as f64;
                x / rows
            }),
            ("weighted by place", |x| {
                let [rows, columns] = x.dims();
                let weights =
                    Tensor::<1, burn::tensor::Int>::arange(1..rows as i64 + 1, &x.device());
                x * weights.float().reshape([rows, 1]).expand([rows, columns])
            }),
        ];
        for (name, f) in closures {
            for extents in [vec![4], vec![3, 2], vec![1, 1], vec![1, 4]] {
                let error = refused(&extents, true, f);
                assert!(
                    error.contains("map: the closure") && error.contains("is not elementwise"),
                    "{name} on {extents:?}: {error:?}"
                );
            }
        }
        let offset = 1.0;
        let error = refused(&[2, 2], true, |x| activation::softmax(x + offset, 1));
        assert!(
            error.contains("closure::tests::closures_that_are_not"),
            "{error}"
        );
    }

    /// With and without checks.
    #[test]
    fn closures_that_capture_gradients_are_refused() {
        let device = burn::tensor::Device::default().autodiff();
        for check in [false, true] {
            for shape in [[1, 1], [1, 3], [2, 3]] {
                let scale = Tensor::<2>::ones(shape, &device).require_grad();
                let result = scale.clone().exp();
                for captured in [scale, result] {
                    let error = refused(&[2, 2], check, |x| x.tanh() * captured.clone());
                    assert!(
                        error.contains("captures a tensor with gradients"),
                        "{error}"
                    );
                    assert!(error.contains("beside"), "{error}");
                }
            }
            let constant = Tensor::<2>::ones([1, 1], &device) * 3.0;
            assert_eq!(refused(&[2, 2], check, |x| x * constant.clone()), "");
        }
    }

    /// With checks on.
    #[test]
    fn closures_that_capture_a_value_of_their_rank_are_refused() {
        let run = |check: bool| {
            Launcher::local(3).check(check).run(|world| {
                let mesh = world.mesh([("rows", 3)])?;
                let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?;
                let own = world.rank() as f64;
                let _ = x.map_local(|x| x - own);
                Ok(())
            })
        };
        assert!(run(false).is_ok());
        let error = run(true).unwrap_err().to_string();
        assert!(error.contains("differs between ranks"), "{error}");
        assert!(
            error.contains("on rank 0") && error.contains("on rank 1"),
            "{error}"
        );
    }

    /// With and without checks: it does not broadcast with a shard.
    #[test]
    fn closures_that_capture_a_whole_field_are_refused() {
        for check in [false, true] {
            let whole = Tensor::<2>::ones([4, 3], &Default::default());
            let error = refused(&[2, 2], check, |x| x * whole.clone());
            assert!(error.contains("panics on this rank's shard"), "{error}");
            assert!(error.contains("make that an operand"), "{error}");
        }
    }

    #[test]
    fn closures_that_change_the_shape_are_refused() {
        for check in [false, true] {
            let error = refused(&[2, 2], check, |x| x.sum_dim(1));
            assert!(
                error.contains("gives shape [2, 1] for cells of shape [2, 3]"),
                "{error}"
            );
            let columns = 2;
            let error = refused(&[2, 2], check, |x| x.narrow(1, 0, columns));
            assert!(
                error.contains("gives shape [2, 2] for cells of shape [2, 3]"),
                "{error}"
            );
        }
        let weights = TensorData::new(cells(2, 3), [2, 3]);
        let device = burn::tensor::Device::default();
        let weights = Tensor::<2>::from_data(weights, &device);
        let error = refused(&[2, 2], true, |x| x * weights.clone());
        assert!(error.contains("operand"), "{error}");
    }

    #[test]
    fn elementwise_closures_are_not_refused() {
        let closures: [Map; 6] = [
            |x| x.exp().sin() / 3.0,
            |x| activation::gelu(x).powf_scalar(1.5),
            |x| x.log().recip(),
            |x| x.clone().mask_fill(x.is_nan(), 2.0).floor(),
            |x| (x * 1e30).exp() - 1.0,
            |x| x.zeros_like(),
        ];
        Launcher::local(2)
            .check(true)
            .run(|world| {
                let mesh = world.mesh([("rows", 2)])?;
                for rows in [1, 2, 5, 23] {
                    let mut values = cells(rows, 3);
                    values[1] = f32::NAN;
                    values[2] = f32::INFINITY;
                    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
                        let data = TensorData::new(values.clone(), [rows, 3]);
                        let x = Tensor::<2>::from_data(data, (world.device(), dtype));
                        let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
                        for f in closures {
                            let _ = x.clone().map_local(f);
                        }
                        let low = x.map_local(|x| x.lower_elem(0.5));
                        let _ = low.map_local::<Bool>(|low| low.bool_not()).int();
                    }
                }
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn closures_of_two_tensors_are_checked_too() {
        let run = |f: fn(Tensor<2>, Tensor<2>) -> Tensor<2>| {
            let result = Launcher::local(2).check(true).run(|world| {
                let mesh = world.mesh([("rows", 2)])?;
                let data = TensorData::new(cells(5, 3), [5, 3]);
                let x = Tensor::<2>::from_data(data, world.device());
                let row = ShardTensor::distribute(x.clone().narrow(0, 0, 1), &mesh, &[Replicate])?;
                let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
                x.zip_local(row, "test", f);
                Ok(())
            });
            result.map_or_else(|error| error.to_string(), |()| String::new())
        };
        assert_eq!(run(|x, row| (x - row).exp()), "");
        let error = run(|x, row| x.flip([0]) + row);
        assert!(
            error.contains("test: the closure") && error.contains("not elementwise"),
            "{error}"
        );
    }
}
