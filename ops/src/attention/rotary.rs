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

use burn::backend::{DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{Bool, Tensor, TensorData};
use halocline_core::memory::elements_mut;
use halocline_core::ops::{BackwardPass, Operator, Recompute, apply, to_dispatch};
use halocline_core::{Error, IndexBox, Result, ShardTensor, tasks};
use pulp::{Simd, WithSimd};

use crate::driver::empty::{drop_empty, fill_all};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::{load, store};
use crate::kernel::lines::vectors;
use crate::kernel::memory::{Shared, with_scratch};
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
    rotary_in_groups(x, angles, [1, 1])
}

/// Rotates the first `rotated` of every `group` heads, such as the queries and keys of a projection
/// to queries, keys and values, before it is split. See [`rotary`].
///
/// # Errors
/// Those of [`rotary`]; heads that are not a multiple of the group; more rotated heads than a group
/// has.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::attention::rotary_in_groups;
///
/// // [batch, cells, heads, width]: a query, a key and a value of the second cell.
/// let x = ShardTensor::solo(Tensor::<4>::ones([1, 2, 3, 2], &Default::default()));
/// let y = rotary_in_groups(x, &[vec![std::f64::consts::PI]], [2, 3])?;
/// let second = y.into_local().narrow(1, 1, 1).into_data();
/// for (y, expected) in second.iter::<f32>().zip([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0]) {
///     assert!((y - expected).abs() < 1e-6);
/// }
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn rotary_in_groups<const D: usize>(
    x: ShardTensor<D>,
    angles: &[Vec<f64>],
    [rotated, group]: [usize; 2],
) -> Result<ShardTensor<D>> {
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
    if group == 0 || rotated > group || !shape[D - 2].is_multiple_of(group) {
        let heads = shape[D - 2];
        let message = format!(
            "{rotated} of every {group} heads of {heads}; expected a divisor of the heads, and at most as many rotated ones"
        );
        return Err(Error::operator(NAME, message));
    }
    let (local, layout, mesh) = x.into_parts();
    let turns = Turns::new(angles, [rotated, group], &layout.local_box(mesh.position()));
    let local = if flex::runs_on(&local.device()) {
        Tensor::from_dispatch(apply(turns, [local.into_dispatch()]))
    } else {
        let y = composed(fill_all(local, &layout, NAME, 0.0)?, &turns);
        drop_empty(y, &layout, mesh.position(), NAME)?
    };
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Rotations of the heads of the cells of a shard.
#[derive(Clone, Debug)]
struct Turns {
    /// Cosine and sine of every pair of every cell, for each spatial dim.
    of_dims: Vec<Vec<[f64; 2]>>,
    /// Number of pairs of a dim.
    pairs: usize,
    /// Whether each head is rotated.
    heads: Vec<bool>,
}

impl Turns {
    fn new(angles: &[Vec<f64>], [rotated, group]: [usize; 2], cells: &IndexBox) -> Self {
        let ranges = cells.ranges();
        // An empty shard may have been padded with one cell.
        let padded = |dim: usize| ranges[dim].start..ranges[dim].end.max(ranges[dim].start + 1);
        let of_dim = |(dim, angles): (usize, &Vec<f64>)| {
            let turn = |cell: usize, angle: &f64| {
                let (sin, cos) = (cell as f64 * angle).sin_cos();
                [cos, sin]
            };
            padded(dim + 1)
                .flat_map(|cell| angles.iter().map(move |angle| turn(cell, angle)))
                .collect()
        };
        Self {
            of_dims: angles.iter().enumerate().map(of_dim).collect(),
            pairs: angles[0].len(),
            heads: padded(ranges.len() - 2)
                .map(|head| head % group < rotated)
                .collect(),
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

/// Rotates a shard forward, or backward if `sign` is −1; in place if nothing else uses its memory.
fn rotated(turns: &Turns, x: DispatchTensor, sign: f64) -> Result<DispatchTensor> {
    let (dtype, shape) = (x.dtype(), x.shape());
    Ok(with_float!(dtype, E => {
        let mut x = flex::operand::<E>(x)?;
        let kernel = Kernel::<E>::new(turns, &shape, sign)?;
        match elements_mut::<E>(&mut x) {
            Some(elements) => {
                kernel.run(Shared::new(elements), None);
                flex::in_dtype(to_dispatch::<Flex>(x), dtype)
            }
            None => {
                let elements = flex::elements::<E>(&x);
                let rotate = |y| kernel.run(y, Some(elements));
                // SAFETY: the kernel writes all elements of all cells.
                let y = unsafe { Buffer::filled(elements.len(), rotate) };
                flex::result(y, &shape, dtype)
            }
        }
    }))
}

/// Rotation of a shard `[.., heads, width]`.
struct Kernel<'a, E> {
    /// Sizes of the dims before the heads.
    cells: &'a [usize],
    heads: &'a [bool],
    width: usize,
    pairs: usize,
    /// Factors of the elements of every cell, and of their partners, for each spatial dim.
    tables: Vec<[Vec<E>; 2]>,
    isa: Isa,
}

impl<'a, E: Float> Kernel<'a, E> {
    fn new(turns: &'a Turns, shape: &'a [usize], sign: f64) -> Result<Self> {
        let [cells @ .., heads, width] = shape else {
            unreachable!("a width and heads");
        };
        let tables = turns.of_dims.iter().map(|of_dim| {
            let factors = |which: usize, signs: [f64; 2]| {
                let halves = |turns: &'a [[f64; 2]]| {
                    signs.map(|sign| turns.iter().map(move |turn| turn[which] * sign))
                };
                let elements = of_dim.chunks(turns.pairs).flat_map(halves).flatten();
                elements.map(E::from_f64).collect()
            };
            [factors(0, [1.0, 1.0]), factors(1, [-sign, sign])]
        });
        Ok(Self {
            cells,
            // Without the padding of a shard without heads.
            heads: &turns.heads[..*heads],
            width: *width,
            pairs: turns.pairs,
            tables: tables.collect(),
            isa: Isa::chosen()?,
        })
    }

    /// Rotates the cells of `y`, after copying them from `x` if it is given.
    fn run(&self, y: Shared<E>, x: Option<&[E]>) {
        let of_cell = self.heads.len() * self.width;
        let count = self.cells.iter().product();
        let together = (TASK / of_cell.max(1)).max(1);
        tasks::for_each(count, together, |cell| {
            let elements = cell * of_cell..(cell + 1) * of_cell;
            // SAFETY: the cell belongs to this task.
            let y = unsafe { y.slice(elements.clone()) };
            if let Some(x) = x {
                y.copy_from_slice(&x[elements]);
            }
            let mut rest = cell;
            let mut places = [0; 4];
            for (place, size) in places.iter_mut().zip(self.cells).rev() {
                (*place, rest) = (rest % size, rest / size);
            }
            let size = 2 * self.pairs;
            let factors = self.tables.iter().zip(&places[1..]).map(|(table, place)| {
                let elements = place * size..(place + 1) * size;
                table.each_ref().map(|factors| &factors[elements.clone()])
            });
            self.isa.run(Cell {
                factors,
                pairs: self.pairs,
                heads: self.heads,
                width: self.width,
                y,
            });
        });
    }
}

/// Rotates the pairs of a cell: one half of a dim's elements holds the first of each pair, the
/// other half the second.
struct Cell<'a, E, T> {
    /// Factors of the elements, and of their partners, for each spatial dim.
    factors: T,
    pairs: usize,
    /// Whether each head is rotated.
    heads: &'a [bool],
    width: usize,
    y: &'a mut [E],
}

impl<'a, E: Element, T: Iterator<Item = [&'a [E]; 2]>> WithSimd for Cell<'a, E, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (width, pairs) = (self.width, self.pairs);
        with_scratch(
            3 * width,
            #[inline(always)]
            |scratch: &mut [E]| {
                let (partners, factors) = scratch.split_at_mut(width);
                let (cos, sin) = factors.split_at_mut(width);
                for (dim, factors) in self.factors.enumerate() {
                    let elements = 2 * dim * pairs..2 * (dim + 1) * pairs;
                    cos[elements.clone()].copy_from_slice(factors[0]);
                    sin[elements].copy_from_slice(factors[1]);
                }
                for (rotated, y) in self.heads.iter().zip(self.y.chunks_exact_mut(width)) {
                    if !rotated {
                        continue;
                    }
                    match pairs {
                        2 => swap_halves::<E, 2>(y, partners),
                        4 => swap_halves::<E, 4>(y, partners),
                        8 => swap_halves::<E, 8>(y, partners),
                        _ => swap_any_halves(y, partners, pairs),
                    }
                    for part in vectors::<S, E>(width) {
                        let [x, partner, cos, sin] = [&*y, &*partners, &*cos, &*sin]
                            .map(|elements| load(simd, &elements[part.clone()]));
                        let turned =
                            E::plus(simd, E::times(simd, x, cos), E::times(simd, partner, sin));
                        store(simd, &mut y[part], turned);
                    }
                }
            },
        );
    }
}

/// Copies each element to the place of its partner in a pair, `N` elements away.
#[inline(always)]
fn swap_halves<E: Copy, const N: usize>(x: &[E], y: &mut [E]) {
    let (x, y) = (x.as_chunks::<N>().0, y.as_chunks_mut::<N>().0);
    for (x, y) in x.chunks_exact(2).zip(y.chunks_exact_mut(2)) {
        (y[0], y[1]) = (x[1], x[0]);
    }
}

#[inline(always)]
fn swap_any_halves<E: Copy>(x: &[E], y: &mut [E], pairs: usize) {
    for (x, y) in x.chunks_exact(2 * pairs).zip(y.chunks_exact_mut(2 * pairs)) {
        let (first, second) = x.split_at(pairs);
        y[..pairs].copy_from_slice(second);
        y[pairs..].copy_from_slice(first);
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
    let y = Tensor::cat(parts.collect(), D - 1);
    if turns.heads.iter().all(|head| *head) {
        return y;
    }
    let mut sizes = [1; D];
    sizes[D - 2] = turns.heads.len();
    let rotated = TensorData::new(turns.heads.clone(), sizes);
    let rotated = Tensor::<D, Bool>::from_data(rotated, &device).expand(x.dims());
    x.mask_where(rotated, y)
}

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, Placement};

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
        let turns = Turns::new(&angles(), [1, 2], &whole);
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
            composed(x, &Turns::new(&angles(), [1, 1], &empty)).dims(),
            [2, 1, 4, 2, 8]
        );
    }

    #[test]
    fn any_number_of_pairs_is_rotated() {
        for pairs in [1, 3, 4, 8, 17] {
            let angles: Vec<f64> = (0..pairs).map(|pair| 0.9 / (pair + 1) as f64).collect();
            let shape = [2, 5, 3, 2 * pairs];
            let turns = Turns::new(&[angles], [1, 1], &IndexBox::whole(&shape));
            let x = random::<4>(shape, "x", 0).inner();
            let y = apply(turns.clone(), [x.clone().into_dispatch()]);
            let y = Tensor::<4>::from_dispatch(y).into_data();
            let expected = composed(x, &turns).into_data();
            assert!(difference(&y, &expected) < 1e-5, "{pairs} pairs");
        }
    }

    #[test]
    fn heads_turn_by_their_group() {
        let grouped = |x: ShardTensor<5>| {
            let y = rotary_in_groups(x, &angles(), [2, 3]).expect("a rotation");
            y.full_tensor()
        };
        let x = random::<5>([2, 3, 5, 6, 8], "x", 0).inner();
        let y = grouped(ShardTensor::solo(x.clone()));
        let whole = rotary(ShardTensor::solo(x.clone()), &angles()).expect("a rotation");
        let whole = whole.into_local();
        for head in 0..6 {
            let expected = if head % 3 < 2 { &whole } else { &x };
            let [y, expected] = [&y, expected].map(|y| y.clone().narrow(3, head, 1).into_data());
            assert_eq!(y, expected, "head {head}");
        }
        Launcher::local(4)
            .run(|world| {
                let mesh = world.mesh([("heads", 4)])?;
                let x = ShardTensor::distribute(x.clone(), &mesh, &[Placement::Shard(3)])?;
                assert_eq!(grouped(x).into_data(), y.clone().into_data());
                Ok(())
            })
            .expect("four ranks");
    }

    #[test]
    fn tensors_used_elsewhere_keep_their_values() {
        for pairs in [2, 16] {
            let x = random::<4>([1, 5, 2, 2 * pairs], "x", 0);
            let before = x.to_data();
            let y = rotary(ShardTensor::solo(x.clone()), &[vec![0.5; pairs]]).expect("a rotation");
            assert_eq!(x.to_data(), before);
            drop(before);
            let again = rotary(ShardTensor::solo(x * 1.0), &[vec![0.5; pairs]]);
            let again = again.expect("a rotation").into_local().into_data();
            assert_eq!(y.into_local().into_data(), again);
        }
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
