//! Contractions of two tensors by an equation, as in PyTorch's `einsum`.
//!
//! `bchw,co->bohw` is `y[b, o, h, w] = Σ_c a[b, c, h, w] · x[c, o]`: one letter for each dim of
//! both operands and of the result. Letters absent from the result are summed over.
//!
//! # Placement
//! On each axis the operands are sharded in one common letter, or one of them is replicated. If
//! that letter is absent from the result, the result is a partial sum. If one operand has a letter
//! in which the other is sharded, but is itself replicated on those axes, each rank takes its part
//! of it: nothing is sent.
//!
//! # Adjoint
//! Contractions of the cotangent with the other operand. The gradient of a replicated operand is
//! summed over the axes on which the other one is sharded in a letter that it lacks, and gathered
//! over those of a common letter.

use burn::tensor::Tensor;
use halocline_core::plan::Role;
use halocline_core::{Error, Replicate, Result, Shard, ShardTensor};

use super::contracted;
use super::product::products;
use crate::golden::{Case, Golden, Output, output, with_dims};
use crate::operand::Operand;
use crate::reshape;

const NAME: &str = "einsum";

/// Contracts two tensors by an equation. See the [module](self).
///
/// # Errors
/// Fails for an equation without exactly two operands, for a letter that occurs twice in one
/// tensor, for a letter of the result that no operand has, for other numbers of dims, for two sizes
/// of one letter, for different element types, and for placements without a rule.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Partial, ReduceOp, Shard, ShardTensor};
/// use halocline_ops::matmul::einsum;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([2, 3, 5, 7], &mesh, &[Shard(2)])?;
///     let areas = Tensor::<1>::ones([5], world.device());
///     let y: ShardTensor<2> = einsum("bchw,h->bc", x, areas)?; // nothing is sent
///     assert_eq!((y.dims(), y.placements()), ([2, 3], &[Partial(ReduceOp::Sum)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn einsum<const A: usize, const B: usize, const R: usize>(
    equation: &str,
    a: ShardTensor<A>,
    b: impl Into<Operand<B>>,
) -> Result<ShardTensor<R>> {
    let b = b.into().place_on(&a)?;
    let equation = Equation::parse(equation, [&a.dims(), &b.dims()], R)?;
    let [letters_a, letters_b, _] = equation.letters.each_ref().map(Vec::as_slice);
    let b = aligned((b, letters_b), (&a, letters_a))?;
    let a = aligned((a, letters_a), (&b, letters_b))?;
    let [roles_a, roles_b, result] = equation.letters.each_ref().map(|letters| {
        let roles = letters.iter().map(|letter| Role::Common(*letter as usize));
        roles.collect::<Vec<_>>()
    });
    let contract = |a, b| equation.contract(a, b);
    contracted(NAME, (a, &roles_a), (b, &roles_b), &result, contract)
}

/// Shards an operand in the letters in which the other operand is sharded and this one is
/// replicated.
fn aligned<const A: usize, const B: usize>(
    (x, letters): (ShardTensor<A>, &[char]),
    (other, others): (&ShardTensor<B>, &[char]),
) -> Result<ShardTensor<A>> {
    if x.layout().mesh() != other.layout().mesh() {
        return Ok(x);
    }
    let mut placements = x.placements().to_vec();
    let mut extents = x.layout().all_extents().to_vec();
    for (dim, letter) in others.iter().enumerate() {
        let axes = other.layout().axes_of(dim);
        let replicated = axes.iter().all(|axis| placements[*axis] == Replicate);
        let place = letters.iter().position(|held| held == letter);
        if let Some(place) = place
            && replicated
            && !axes.is_empty()
            && !placements.contains(&Shard(place))
        {
            axes.iter()
                .for_each(|axis| placements[*axis] = Shard(place));
            extents[place] = other.layout().extents(dim).to_vec();
        }
    }
    if placements == x.placements() {
        return Ok(x);
    }
    let layout = x.layout().derive(placements, extents);
    x.try_redistribute(&layout)
}

/// Letters of the dims of both operands and of the result.
#[derive(Clone, Debug)]
struct Equation {
    letters: [Vec<char>; 3],
}

impl Equation {
    fn parse(text: &str, shapes: [&[usize]; 2], result: usize) -> Result<Self> {
        let fail = |what: &str| {
            let message =
                format!("\"{text}\" for {shapes:?}, with a result of {result} dims: {what}");
            Err(Error::operator(NAME, message))
        };
        let compact: String = text.split_whitespace().collect();
        let parts = compact.split_once("->").and_then(|(operands, result)| {
            let (a, b) = operands.split_once(',')?;
            Some([a, b, result])
        });
        let Some(parts) = parts else {
            return fail("expected two operands and a result, as in \"ij,jk->ik\"");
        };
        let letters = parts.map(|part| part.chars().collect::<Vec<char>>());
        let [a, b, of_result] = &letters;
        let alphabetic = letters
            .iter()
            .flatten()
            .all(|letter| letter.is_ascii_alphabetic());
        if !alphabetic
            || [a.len(), b.len(), of_result.len()] != [shapes[0].len(), shapes[1].len(), result]
        {
            return fail("expected a letter for each dim");
        }
        let twice = |letters: &Vec<char>| {
            let mut rest = letters.iter().enumerate();
            rest.any(|(dim, letter)| letters[..dim].contains(letter))
        };
        if letters.iter().any(twice) {
            return fail("a letter occurs twice in a tensor");
        }
        if of_result
            .iter()
            .any(|letter| !a.contains(letter) && !b.contains(letter))
        {
            return fail("no operand has a letter of the result");
        }
        let sizes = |operand: usize| letters[operand].iter().zip(shapes[operand]);
        let differ = |(letter, size)| sizes(1).any(|(other, held)| letter == other && size != held);
        if sizes(0).any(differ) {
            return fail("a letter has two sizes");
        }
        Ok(Self { letters })
    }

    /// Letters of operand `first` that the other operand has (`other`) or lacks, and that the
    /// result has (`result`) or lacks.
    fn of(&self, first: usize, other: bool, result: bool) -> Vec<char> {
        let [held, others, of_result] = [first, 1 - first, 2].map(|tensor| &self.letters[tensor]);
        let wanted = |letter: &char| {
            others.contains(letter) == other && of_result.contains(letter) == result
        };
        held.iter().copied().filter(wanted).collect()
    }

    /// Contracts local tensors by a matrix product.
    fn contract<const A: usize, const B: usize, const R: usize>(
        &self,
        a: Tensor<A>,
        b: Tensor<B>,
    ) -> Tensor<R> {
        let (batch, summed) = (self.of(0, true, true), self.of(0, true, false));
        let (left, right) = (self.of(0, false, true), self.of(1, false, true));
        let shapes = [a.dims().to_vec(), b.dims().to_vec()];
        let sizes = |letters: &[char]| -> Vec<usize> {
            let size = |letter: &char| {
                let find =
                    |operand: usize| self.letters[operand].iter().position(|held| held == letter);
                find(0).map_or_else(
                    || shapes[1][find(1).expect("a letter of an operand")],
                    |dim| shapes[0][dim],
                )
            };
            letters.iter().map(size).collect()
        };
        let count = |letters: &[char]| sizes(letters).iter().product::<usize>();
        let matrix = [count(&batch), count(&left), count(&summed), count(&right)];
        let [matrices, rows, inner, columns] = matrix;
        let alone = [self.of(0, false, false), self.of(1, false, false)];
        // Operands are swapped if the last letter of the result is in `a`, so that rows of the
        // product are rows of the result.
        let last = self.letters[2].last();
        let swapped = last.is_some_and(|letter| left.contains(letter));
        let of_a = if swapped {
            ([&summed, &left], [matrices, inner, rows])
        } else {
            ([&left, &summed], [matrices, rows, inner])
        };
        let of_b = if swapped {
            ([&right, &summed], [matrices, columns, inner])
        } else {
            ([&summed, &right], [matrices, inner, columns])
        };
        let order = |[first, second]: [&Vec<char>; 2]| [&batch[..], first, second].concat();
        let a = matrix_of(a, &self.letters[0], order(of_a.0), of_a.1, &alone[0]);
        let b = matrix_of(b, &self.letters[1], order(of_b.0), of_b.1, &alone[1]);
        let [first, second] = if swapped { [b, a] } else { [a, b] };
        let elementwise = [&left, &summed, &right].map(Vec::is_empty) == [true; 3];
        let y = if elementwise {
            first * second
        } else {
            products(first, second)
        };
        let outer = if swapped {
            [&right, &left]
        } else {
            [&left, &right]
        };
        let found = order(outer);
        let y: Tensor<R> = reshape(y, sizes(&found));
        y.permute(places(&self.letters[2], &found))
    }
}

/// Reshapes an operand to matrices, with its dims in this order; the dims `alone` are summed over.
fn matrix_of<const D: usize>(
    x: Tensor<D>,
    letters: &[char],
    order: Vec<char>,
    shape: [usize; 3],
    alone: &[char],
) -> Tensor<3> {
    let order = [&order[..], alone].concat();
    let x: Tensor<D> = x.permute(places(&order, letters));
    if alone.is_empty() {
        return reshape(x, shape.to_vec());
    }
    let count = x.dims()[order.len() - alone.len()..].iter().product();
    let x: Tensor<2> = reshape(x, vec![shape.iter().product(), count]);
    reshape(x.sum_dim(1), shape.to_vec())
}

/// Positions of letters among others.
fn places<const D: usize>(letters: &[char], among: &[char]) -> [usize; D] {
    std::array::from_fn(|dim| {
        let place = among.iter().position(|held| *held == letters[dim]);
        place.expect("a letter of the equation")
    })
}

/// Registry entry of contractions.
pub(super) const GOLDEN: Golden = Golden::new(NAME, run).with_travels([
    "– (partial where a summed dim is sharded)",
    "sums of replicated operands' gradients, gathered over common letters",
]);

/// Number of dims to which operands are padded in the registry, so that there is one instance per
/// number of dims of the result.
const MOST: usize = 6;

/// Contracts with a replicated parameter.
fn run(case: &Case) -> Result<Box<dyn Output>> {
    let equation = case.attributes.text("equation");
    let (operands, result) = equation.split_once("->").unwrap_or_default();
    let (left, right) = operands.split_once(',').unwrap_or_default();
    let a = with_dims!(case.dims(), A => Ok(padded(case.input::<A>(0)?)))?;
    let b = with_dims!(right.len(), B => Ok(padded(a.replicate_operand(case.needed::<B>("w")?))))?;
    let mut unused = ('A'..='Z').filter(|letter| !equation.contains(*letter));
    let mut pad =
        |letters: &str| -> String { letters.chars().chain(unused.by_ref()).take(MOST).collect() };
    let equation = format!("{},{}->{result}", pad(left), pad(right));
    with_dims!(result.len(), R => output(einsum::<MOST, MOST, R>(&equation, a, b)))
}

/// Appends dims of one cell to a tensor.
fn padded<const D: usize>(x: ShardTensor<D>) -> ShardTensor<MOST> {
    let (local, layout, mesh) = x.into_parts();
    let (mut shape, mut extents) = (local.dims().to_vec(), layout.all_extents().to_vec());
    shape.resize(MOST, 1);
    extents.resize(MOST, vec![1]);
    let layout = layout.derive(layout.placements().to_vec(), extents);
    ShardTensor::from_parts(reshape(local, shape), layout, mesh)
}

#[cfg(test)]
mod tests {
    use halocline_core::{Fan, Launcher, Placement};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    /// A replicated parameter with letters in another order.
    struct Mixed;

    impl Operator<3, 2> for Mixed {
        fn apply<X: Field<3>>(&self, mut x: Vec<X>, mut w: Vec<Tensor<3>>) -> WithDims<X, 2> {
            x.remove(0).einsum::<3, 2>("bcx,odc->bo", w.remove(0))
        }
    }

    #[test]
    fn letters_of_one_operand_are_summed_over_where_they_are() {
        check_op(&Mixed, &[[3, 4, 7]], &[[5, 2, 4]], &[0, 2], 1e-5);
    }

    /// A replicated operand with letters in which the other one is sharded, one of them summed
    /// over.
    struct Profile;

    impl Operator<3, 2> for Profile {
        fn apply<X: Field<3>>(&self, mut x: Vec<X>, mut w: Vec<Tensor<3>>) -> WithDims<X, 2> {
            x.remove(0).einsum::<3, 2>("bcx,xoc->bc", w.remove(0))
        }
    }

    #[test]
    fn ranks_take_their_parts_of_a_replicated_operand() {
        check_op(&Profile, &[[3, 4, 7]], &[[7, 2, 4]], &[0, 1, 2], 1e-5);
    }

    /// All letters in both operands and in the result.
    struct Elementwise;

    impl Operator<3, 3> for Elementwise {
        fn apply<X: Field<3>>(&self, mut x: Vec<X>, mut w: Vec<Tensor<3>>) -> WithDims<X, 3> {
            x.remove(0).einsum::<3, 3>("bcx,xbc->cxb", w.remove(0))
        }
    }

    #[test]
    fn products_of_elements_are_in_the_order_of_the_result() {
        check_op(&Elementwise, &[[3, 4, 7]], &[[7, 3, 4]], &[0, 1, 2], 1e-5);
    }

    #[test]
    fn a_letter_may_be_sharded_over_several_axes() {
        let run = Launcher::local(4).run(|world| {
            let mesh = world.mesh([("a", 2), ("b", 2)])?;
            let nested = [Shard(1), Shard(1)];
            let x = || ShardTensor::<2>::ones([3, 9], &mesh, &nested);
            let weights = |placements: [Placement; 2]| {
                let x = ShardTensor::<1>::ones([9], &mesh, &placements)?;
                Ok::<_, Error>(x)
            };
            let y: ShardTensor<1> = einsum("bi,i->b", x()?, weights([Replicate; 2])?)?;
            let y = y.full_tensor().into_data();
            y.assert_eq(&[9.0_f32; 3].into(), true);
            for placements in [[Replicate, Fan], [Shard(0), Replicate]] {
                let refused = einsum::<2, 1, 1>("bi,i->b", x()?, weights(placements)?);
                assert!(refused.is_err(), "{placements:?}");
            }
            Ok(())
        });
        run.unwrap();
    }

    struct Both;

    impl Operator<3, 3> for Both {
        fn apply<X: Field<3>>(&self, mut x: Vec<X>, _: Vec<Tensor<3>>) -> WithDims<X, 3> {
            let other = x.remove(1).into_shard();
            x.remove(0).einsum::<3, 3>("bik,bjk->jbi", other)
        }
    }

    #[test]
    fn a_letter_of_both_may_be_sharded() {
        check_op(&Both, &[[3, 4, 7], [3, 5, 7]], &[], &[0, 2], 1e-5);
    }

    #[test]
    fn misuse_is_told() {
        let x = || ShardTensor::solo(Tensor::<2>::ones([3, 4], &Default::default()));
        for (equation, told) in [
            ("ij,jk", "expected two operands and a result"),
            ("ij,jk->ijk", "a letter for each dim"),
            ("ii,jk->ik", "occurs twice"),
            ("ij,jk->il", "no operand has"),
            ("ij,jk->ik", "two sizes"),
        ] {
            let error = einsum::<2, 2, 2>(equation, x(), x())
                .unwrap_err()
                .to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}
