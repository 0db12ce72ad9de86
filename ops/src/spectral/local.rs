//! Transforms of lines as operators on one shard.

use burn::tensor::{Tensor, TensorData};
use halocline_core::{Layout, Result, ShardTensor};

use super::kernel::transform;
use super::line::Line;
use super::pencil::{whole, whole_layout};
use crate::driver::empty::{drop_empty, fill_all};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float};
use crate::kernel::local::LocalOperator;
use crate::kernel::memory::Shared;
use crate::kernel::simd::Isa;
use crate::reshape;

/// Transforms the lines along a dim, making it whole first; see [`whole`] for `fixed` and
/// `pending`. Complex numbers occupy the last dim, which a real-to-complex transform adds and a
/// complex-to-real one removes.
pub(crate) fn along<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    dim: usize,
    line: Line,
    [fixed, pending]: [&[usize]; 2],
    operator: &'static str,
) -> Result<ShardTensor<E>> {
    let fixed = with_pairs(x.layout(), line, fixed, operator)?;
    let (mut local, layout, mesh) = whole(x, dim, &fixed, pending, operator)?.into_parts();
    let kernels = flex::runs_on(&local.device());
    if !kernels {
        local = fill_all(local, &layout, operator, 0.0)?;
    }
    let shape = local.dims().to_vec();
    let [outer, inner] = [&shape[..dim], &shape[dim + 1..]].map(|sizes| sizes.iter().product());
    let lines: Tensor<3> = reshape(local, vec![outer, shape[dim], inner]);
    let layout = transformed_layout(&layout, dim, line);
    let shape = transformed(shape, dim, line, |size| size);
    let mut local = reshape(line.run(lines), shape);
    if !kernels {
        local = drop_empty(local, &layout, mesh.position(), operator)?;
    }
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Layout of the result of [`along`], without a transform.
pub(crate) fn along_layout(
    layout: &Layout,
    dim: usize,
    line: Line,
    [fixed, pending]: [&[usize]; 2],
    operator: &str,
) -> Result<Layout> {
    let fixed = with_pairs(layout, line, fixed, operator)?;
    let lines = whole_layout(layout, dim, &fixed, pending, operator)?;
    Ok(transformed_layout(&lines, dim, line))
}

/// Adds the dim of complex numbers, if there is one, to the dims that keep their placement.
fn with_pairs(layout: &Layout, line: Line, fixed: &[usize], operator: &str) -> Result<Vec<usize>> {
    let [parts, _] = line.parts();
    if parts == 1 {
        return Ok(fixed.to_vec());
    }
    let last = layout.shape().len() - 1;
    layout.require_whole(operator, last)?;
    Ok([fixed, &[last]].concat())
}

/// Layout of transformed lines.
pub(super) fn transformed_layout(lines: &Layout, dim: usize, line: Line) -> Layout {
    let extents = transformed(lines.all_extents().to_vec(), dim, line, |size| vec![size]);
    lines.derive(lines.placements().to_vec(), extents)
}

/// Replaces the size of the transformed dim, and adds or removes the dim of complex numbers.
fn transformed<T>(
    mut sizes: Vec<T>,
    dim: usize,
    line: Line,
    extent: impl Fn(usize) -> T,
) -> Vec<T> {
    let ([parts_x, parts_y], [_, cells]) = (line.parts(), line.cells());
    sizes[dim] = extent(cells);
    match (parts_x, parts_y) {
        (1, 2) => sizes.push(extent(2)),
        (2, 1) => {
            sizes.pop();
        }
        _ => {}
    }
    sizes
}

/// Acts on `[outer, cells, inner · parts]`.
impl LocalOperator for Line {
    const NAMES: [&'static str; 2] = ["transform", "transform_backward"];
    const KEEPS_INPUT: bool = false;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        let [outer, cells, inner] = *shape else {
            panic!("lines of shape {shape:?}");
        };
        let [parts_x, parts_y] = self.parts();
        let [cells_x, cells_y] = self.cells();
        assert_eq!((cells, inner % parts_x), (cells_x, 0), "{self:?}");
        let inner = inner / parts_x;
        let (len, sides) = (outer * cells_y * inner * parts_y, [outer, inner]);
        // SAFETY: the transform writes all elements.
        let y = unsafe {
            Buffer::filled(len, |y: Shared<E>| match size_of::<E>() {
                8 => transform::<f64>(isa, self, bytemuck::cast_slice(x), y.cast(), sides),
                _ => transform::<f32>(isa, self, bytemuck::cast_slice(x), y.cast(), sides),
            })
        };
        (y, vec![outer, cells_y, inner * parts_y])
    }

    fn backward<E: Float>(self, isa: Isa, _: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        let [parts_x, parts_y] = self.parts();
        let [_, cells_y] = self.cells();
        let shape = [shape[0], cells_y, shape[2] / parts_x * parts_y];
        self.adjoint().forward(isa, cotangent, &shape).0
    }

    /// Multiplies by the matrix of the transform.
    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        let [outer, cells, inner] = *x.dims().as_slice() else {
            panic!("lines of shape {:?}", x.dims());
        };
        let ([parts_x, parts_y], [_, cells_y]) = (self.parts(), self.cells());
        let lines = inner / parts_x;
        let rows = self.matrix();
        let shape = [rows.len(), cells_y * parts_y];
        let (device, dtype) = (x.device().inner(), x.dtype());
        let matrix = TensorData::new(rows.concat(), shape);
        let matrix = Tensor::<2>::from_data(matrix, (&device, dtype));
        let x: Tensor<4> = reshape(x, vec![outer, cells, lines, parts_x]);
        let x: Tensor<2> = reshape(x.swap_dims(1, 2), vec![outer * lines, cells * parts_x]);
        let y: Tensor<4> = reshape(x.matmul(matrix), vec![outer, lines, cells_y, parts_y]);
        reshape(y.swap_dims(1, 2), vec![outer, cells_y, lines * parts_y])
    }
}

#[cfg(test)]
mod tests {
    use super::super::line::{Frequencies, Scale, Sign};
    use super::*;
    use crate::testing::{difference, random};

    fn lines() -> Vec<Line> {
        let scale = Scale {
            edge: 0.7,
            interior: -1.3,
        };
        let mut found = Vec::new();
        for size in [1, 2, 3, 8, 9, 15] {
            found.push(Line::ToCosines { size, scale });
            for modes in [1, size / 2 + 1] {
                found.push(Line::ToModes { size, modes, scale });
            }
            for [low, high] in [[size, 0], [size / 2, size / 3]] {
                for sign in [Sign::Minus, Sign::Plus] {
                    if low + high > 0 {
                        found.push(Line::ToFrequencies(Frequencies {
                            size,
                            low,
                            high,
                            sign,
                            scale: 0.3,
                        }));
                    }
                }
            }
        }
        let adjoints: Vec<Line> = found.iter().map(|line| line.adjoint()).collect();
        found.into_iter().chain(adjoints).collect()
    }

    /// Compares values and gradients, the latter with the transposed matrix.
    #[test]
    fn fast_transforms_are_the_products_with_their_matrices() {
        for line in lines() {
            let run = |composed: bool| {
                let shape = [3, line.cells()[0], 19 * line.parts()[0]];
                let x = random::<3>(shape, "x", 0).detach().require_grad();
                let y = if composed {
                    line.composed(x.clone())
                } else {
                    line.run(x.clone())
                };
                let weight = random::<3>(y.dims(), "y", 0).detach();
                let gradients = (y.clone() * weight).sum().backward();
                [y.inner(), x.grad(&gradients).unwrap()].map(Tensor::into_data)
            };
            for (fast, slow) in run(false).iter().zip(&run(true)) {
                let off = difference(fast, slow);
                assert!(off < 2e-6, "{line:?}: {off:e}");
            }
        }
    }
}
