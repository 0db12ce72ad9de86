//! Rotary position embedding: pairs of elements of queries and keys, rotated by angles that grow
//! with the position of their cell.
//!
//! The elements of a head are divided among the spatial dims. In the part of a dim, which has `2n`
//! elements, elements `i` and `i + n` form a pair that is rotated by `angles[dim][i]` times the
//! global index of the cell in that dim.
//!
//! # Placement
//! All dims but the elements of a head may be sharded; values must be resolved. Nothing is sent.
//!
//! # Adjoint
//! The opposite rotation.

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Tensor, TensorData};
use halocline_core::ops::{BackwardPass, Operator, Recompute, apply};
use halocline_core::{Error, IndexBox, Result, ShardTensor, tasks};
use pulp::{Simd, WithSimd};

use crate::driver::empty::{drop_empty, fill_empty};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::{load, store};
use crate::kernel::lines::{slice, vectors};
use crate::kernel::simd::{Element, Isa};

const NAME: &str = "rotary";
/// Number of elements of a task.
const TASK: usize = 1 << 14;

/// Rotates queries or keys `[batch, *spatial, heads, width]` by angles, in radians per cell, for
/// each spatial dim. See the [module](self).
///
/// # Errors
/// A number of angle lists other than that of the field's spatial dims, or more than three; lists
/// that do not have one angle for every two elements of a dim; a sharded width; partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::attention::rotary;
///
/// // [batch, cells, heads, width]: the second cell is turned by a quarter.
/// let x = ShardTensor::solo(Tensor::<4>::from([[[[1.0, 0.0]], [[1.0, 0.0]]]]));
/// let y = rotary(x, &[vec![std::f64::consts::FRAC_PI_2]])?;
/// let expected = Tensor::<4>::from([[[[1.0, 0.0]], [[0.0, 1.0]]]]);
/// assert!((y.into_local() - expected).abs().max().into_scalar::<f32>() < 1e-6);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn rotary<const D: usize>(x: ShardTensor<D>, angles: &[Vec<f64>]) -> Result<ShardTensor<D>> {
    x.require_resolved(NAME)?;
    let (shape, spatial) = (x.dims(), angles.len());
    let fits = (1..=3).contains(&spatial)
        && D == spatial + 3
        && shape[D - 1] > 0
        && angles
            .iter()
            .all(|angles| 2 * spatial * angles.len() == shape[D - 1])
        && !x.layout().is_sharded(D - 1);
    if !fits {
        let counts: Vec<usize> = angles.iter().map(Vec::len).collect();
        let message = format!(
            "{counts:?} angles for {shape:?}; expected [batch, *spatial, heads, width] with one to three spatial dims, a whole \
             width, and as many angles for every spatial dim, together half of the width"
        );
        return Err(Error::operator(NAME, message));
    }
    let (local, layout, mesh) = x.into_parts();
    let turns = Turns::new(angles, &layout.local_box(mesh.position()));
    let local = if flex::runs_on(&local.device()) {
        Tensor::from_dispatch(apply(turns, [local.into_dispatch()]))
    } else {
        let all: Vec<usize> = (0..D).collect();
        let y = composed(fill_empty(local, &layout, &all, NAME, 0.0)?, &turns);
        drop_empty(y, &layout, mesh.position(), NAME)?
    };
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Rotations of the cells of a shard.
#[derive(Clone, Debug)]
struct Turns {
    /// Cosine and sine of every pair of every cell, for each spatial dim.
    of_dims: Vec<Vec<[f64; 2]>>,
    /// Number of pairs of a dim.
    pairs: usize,
}

impl Turns {
    fn new(angles: &[Vec<f64>], cells: &IndexBox) -> Self {
        let of_dim = |(dim, angles): (usize, &Vec<f64>)| {
            let cells = cells.ranges()[dim + 1].clone();
            // An empty shard may have been padded with one cell.
            let cells = cells.start..cells.end.max(cells.start + 1);
            let turn = |cell: usize, angle: &f64| {
                let (sin, cos) = (cell as f64 * angle).sin_cos();
                [cos, sin]
            };
            cells
                .flat_map(|cell| angles.iter().map(move |angle| turn(cell, angle)))
                .collect()
        };
        Self {
            of_dims: angles.iter().enumerate().map(of_dim).collect(),
            pairs: angles[0].len(),
        }
    }
}

impl Operator for Turns {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some([NAME, "rotary (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        Ok((rotated(self, inputs.remove(0), 1.0)?, ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        Ok(vec![Some(rotated(self, pass.cotangent, -1.0)?)])
    }
}

/// Rotates a shard forward, or backward if `sign` is −1.
fn rotated(turns: &Turns, x: DispatchTensor, sign: f64) -> Result<DispatchTensor> {
    let (dtype, shape) = (x.dtype(), x.shape());
    Ok(with_float!(dtype, E => {
        let mut x = flex::cast::<E>(x)?;
        if x.layout().strides()[shape.len() - 1] != 1 {
            x = flex::contiguous(x);
        }
        flex::result(kernel::<E>(turns, &x, sign)?, &shape, dtype)
    }))
}

fn kernel<E: Float>(turns: &Turns, x: &FlexTensor, sign: f64) -> Result<Buffer<E>> {
    let layout = x.layout();
    let (shape, strides) = (layout.shape(), layout.strides());
    let dims = shape.len();
    let (cells, [heads, width]) = (&shape[..dims - 2], [shape[dims - 2], shape[dims - 1]]);
    let count: usize = cells.iter().product();
    let elements: &[E] = x.storage();
    let (pairs, of_cell) = (turns.pairs, heads * width);
    let tables: Vec<[Vec<E>; 2]> = turns
        .of_dims
        .iter()
        .map(|turns| {
            let part = |which: usize, factor: f64| {
                let values = turns.iter().map(|turn| E::from_f64(turn[which] * factor));
                values.collect()
            };
            [part(0, 1.0), part(1, sign)]
        })
        .collect();
    let isa = Isa::chosen()?;
    let run = |y: &mut [E], cell: usize| {
        let (mut rest, mut from) = (cell, layout.start_offset() as isize);
        let mut places = [0; 4];
        for (dim, size) in cells.iter().enumerate().rev() {
            let place = rest % size;
            rest /= size;
            from += place as isize * strides[dim];
            places[dim] = place;
        }
        let turns = tables.iter().zip(&places[1..]).map(|(table, place)| {
            let turns = place * pairs..(place + 1) * pairs;
            table.each_ref().map(|values| &values[turns.clone()])
        });
        isa.run(Cell {
            turns,
            pairs,
            x: elements,
            from,
            head: strides[dims - 2],
            width,
            y,
        });
    };
    let together = (TASK / of_cell.max(1)).max(1);
    // SAFETY: together, the tasks write all cells.
    Ok(unsafe {
        Buffer::filled(count * of_cell, |y| {
            tasks::for_each(count, together, |cell| {
                // SAFETY: the cell belongs to this task, which writes every element of it and reads
                // none.
                run(slice(y, cell * of_cell..(cell + 1) * of_cell), cell);
            });
        })
    })
}

/// Rotates the pairs of a cell: one half of a dim's elements holds the first of each pair, the
/// other half the second.
struct Cell<'a, E, T> {
    /// Cosines and sines of the pairs, for each spatial dim.
    turns: T,
    pairs: usize,
    x: &'a [E],
    /// Position of the first head, and the distance to the next.
    from: isize,
    head: isize,
    width: usize,
    y: &'a mut [E],
}

impl<'a, E: Element, T: Iterator<Item = [&'a [E]; 2]>> WithSimd for Cell<'a, E, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for (dim, [cos, sin]) in self.turns.enumerate() {
            let start = 2 * dim * self.pairs;
            for (head, y) in self.y.chunks_exact_mut(self.width).enumerate() {
                let from = (self.from + head as isize * self.head) as usize + start;
                let x = &self.x[from..][..2 * self.pairs];
                let (x_first, x_second) = x.split_at(self.pairs);
                let (y_first, y_second) = y[start..][..2 * self.pairs].split_at_mut(self.pairs);
                for part in vectors::<S, E>(self.pairs) {
                    let cos = load(simd, &cos[part.clone()]);
                    let sin = load(simd, &sin[part.clone()]);
                    let first = load(simd, &x_first[part.clone()]);
                    let second = load(simd, &x_second[part.clone()]);
                    let turned = E::minus(
                        simd,
                        E::times(simd, first, cos),
                        E::times(simd, second, sin),
                    );
                    store(simd, &mut y_first[part.clone()], turned);
                    let turned = E::plus(
                        simd,
                        E::times(simd, first, sin),
                        E::times(simd, second, cos),
                    );
                    store(simd, &mut y_second[part], turned);
                }
            }
        }
    }
}

/// Rotates with burn's operators, on devices without our kernels.
fn composed<const D: usize>(x: Tensor<D>, turns: &Turns) -> Tensor<D> {
    let (pairs, device) = (turns.pairs, x.device());
    let parts = turns.of_dims.iter().enumerate().map(|(dim, turns)| {
        let table = |which: usize| {
            let rows = turns.chunks(pairs);
            let values = rows.flat_map(|row| row.iter().chain(row).map(move |turn| turn[which]));
            let mut sizes = [1; D];
            (sizes[dim + 1], sizes[D - 1]) = (turns.len() / pairs, 2 * pairs);
            let values = TensorData::new(values.collect::<Vec<f64>>(), sizes);
            Tensor::<D>::from_data(values, (&device, x.dtype()))
        };
        let part = x.clone().narrow(D - 1, 2 * dim * pairs, 2 * pairs);
        let first = part.clone().narrow(D - 1, 0, pairs);
        let second = part.clone().narrow(D - 1, pairs, pairs);
        part * table(0) + Tensor::cat(vec![-second, first], D - 1) * table(1)
    });
    Tensor::cat(parts.collect(), D - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;
    use crate::testing::{check_op, difference, random};

    fn angles() -> Vec<Vec<f64>> {
        vec![vec![1.0, 0.3], vec![0.7, 0.1]]
    }

    struct Rotated;

    impl crate::testing::Operator<5, 5> for Rotated {
        fn apply<X: Field<5>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<5>>) -> X {
            let x = inputs.remove(0);
            x.try_op(|x| rotary(x, &angles())).expect("a rotation")
        }
    }

    #[test]
    fn cells_turn_by_their_global_index() {
        check_op(&Rotated, &[[2, 3, 5, 2, 8]], &[], &[0, 1, 2, 3], 1e-5);
    }

    #[test]
    fn the_kernel_and_burns_operators_agree() {
        type View = fn(Tensor<5>) -> Tensor<5>;

        let whole = IndexBox::whole(&[2, 3, 4, 2, 8]);
        let turns = Turns::new(&angles(), &whole);
        let of = |kernel: bool, x: Tensor<5>, view: View| {
            let x = x.detach().require_grad();
            let seen = view(x.clone());
            let y = if kernel {
                Tensor::<5>::from_dispatch(apply(turns.clone(), [seen.into_dispatch()]))
            } else {
                composed(seen, &turns)
            };
            let gradients = (y.clone() * y.clone().detach().cos()).sum().backward();
            [y.inner(), x.grad(&gradients).unwrap()].map(Tensor::into_data)
        };
        // Heads, and elements of a head, that are not adjacent.
        let views: [([usize; 5], View); 3] = [
            ([2, 3, 4, 2, 8], |x| x),
            ([2, 3, 4, 2, 24], |x| x.narrow(4, 8, 8)),
            ([2, 8, 4, 2, 3], |x| x.swap_dims(1, 4)),
        ];
        for (shape, view) in views {
            let x = random::<5>(shape, "x", 0);
            let (ours, burns) = (of(true, x.clone(), view), of(false, x, view));
            for (ours, burns) in ours.iter().zip(&burns) {
                assert!(difference(ours, burns) < 1e-5, "{shape:?}");
            }
        }
        // A shard without cells, which has been padded with one.
        let empty = IndexBox::new(vec![0..2, 3..3, 0..4, 0..2, 0..8]);
        let x = random::<5>([2, 1, 4, 2, 8], "x", 0);
        assert_eq!(
            composed(x, &Turns::new(&angles(), &empty)).dims(),
            [2, 1, 4, 2, 8]
        );
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<5>::ones([1, 2, 3, 1, 6], &Default::default()));
        let error = rotary(x, &angles()).unwrap_err().to_string();
        assert!(
            error.contains("[2, 2] angles for [1, 2, 3, 1, 6]"),
            "{error}"
        );
    }
}
