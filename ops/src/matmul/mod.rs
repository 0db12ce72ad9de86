//! Matrix products, the linear layer, and contractions by an equation ([`einsum`](fn@einsum)).
//!
//! `y[.., i, j] = Σ_k a[.., i, k] · b[.., k, j]`.
//!
//! # Placement
//!
//! | `a` | `b` | `y` |
//! |---|---|---|
//! | `Shard(batch dim)` | the same | the same |
//! | `Shard(rows)` | `Replicate` | `Shard(rows)` |
//! | `Replicate` | `Shard(columns)` | `Shard(columns)` |
//! | `Shard(columns)` | `Shard(rows)` | `Partial(Sum)` |
//! | `Replicate` | `Replicate` | `Replicate` |
//!
//! # Adjoint
//! Each rank computes the single-device adjoint of its shards. The gradient of a replicated operand
//! is summed over the axes on which the other one is sharded.

mod affine;
mod choice;
pub mod einsum;
mod gated;
mod golden;
mod product;

pub(crate) use choice::activation_of;
pub use einsum::einsum;
pub(crate) use golden::OPERATORS;

use burn::nn::Linear;
use burn::tensor::{DType, Tensor};
use halocline_core::ops::{fan_out, fan_out_with};
use halocline_core::plan::{Linearity, Pairing, Role, Term};
use halocline_core::{Error, Result, ShardTensor};

use crate::driver::empty::{fill_all, without_fill};
use crate::field::{Field, WithDims, run};
use crate::layer_placements::{enter, leave, leave_with_bias, with_extents_of};
use crate::layers::layers;
use crate::operand::Operand;
use crate::reshape;
use product::products;

const MATMUL: &str = "matmul";

fn same_type(operator: &str, one: DType, other: DType) -> Result<()> {
    if one == other {
        return Ok(());
    }
    let message = format!("operands of {one:?} and {other:?}");
    Err(Error::operator(operator, message))
}

/// Multiplies two sharded tensors of the same batch shape. See the [module](self).
///
/// # Errors
/// Fails for placements without a rule, and for shapes, element types or meshes that do not match.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Partial, ReduceOp, Shard, ShardTensor};
/// use halocline_ops::matmul::matmul;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let a = ShardTensor::<2>::ones([3, 5], &mesh, &[Shard(1)])?;
///     let b = ShardTensor::<2>::ones([5, 4], &mesh, &[Shard(0)])?;
///     let y = matmul(a, b)?;
///     assert_eq!((y.dims(), y.placements()), ([3, 4], &[Partial(ReduceOp::Sum)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn matmul<const D: usize>(a: ShardTensor<D>, b: ShardTensor<D>) -> Result<ShardTensor<D>> {
    let (shape_a, shape_b) = (a.dims(), b.dims());
    if D < 2 || shape_a[..D - 2] != shape_b[..D - 2] || shape_a[D - 1] != shape_b[D - 2] {
        let message =
            format!("shapes {shape_a:?} and {shape_b:?}; expected [.., m, k] and [.., k, n]");
        return Err(Error::operator(MATMUL, message));
    }
    let result: [Role; D] = std::array::from_fn(Role::Common);
    let (mut roles_a, mut roles_b) = (result, result);
    roles_a[D - 1] = Role::Common(D);
    roles_b[D - 2] = Role::Common(D);
    contracted(MATMUL, (a, &roles_a), (b, &roles_b), &result, products)
}

/// Contracts two operands with the given roles of their dims, by a function of their shards.
fn contracted<const A: usize, const B: usize, const R: usize>(
    operator: &'static str,
    (a, roles_a): (ShardTensor<A>, &[Role]),
    (b, roles_b): (ShardTensor<B>, &[Role]),
    result: &[Role],
    contract: impl FnOnce(Tensor<A>, Tensor<B>) -> Tensor<R>,
) -> Result<ShardTensor<R>> {
    same_type(operator, a.local().dtype(), b.local().dtype())?;
    let term = |layout, roles| Term {
        name: "",
        layout,
        roles,
    };
    let terms = [term(a.layout(), roles_a), term(b.layout(), roles_b)];
    let pairing = Pairing::new(operator, &terms, result, Linearity::Multiplicative)?;
    let layout = pairing.layout(a.layout());
    let (a, layout_a, mesh) = a.into_parts();
    let (b, layout_b, _) = b.into_parts();
    let b = fan_out_with(b, &a, &mesh, pairing.fan_out(1), operator);
    let a = fan_out(a, &mesh, pairing.fan_out(0), operator);
    let y = contract(
        fill_all(a, &layout_a, operator, 0.0)?,
        fill_all(b, &layout_b, operator, 0.0)?,
    );
    without_fill(y, layout, mesh, operator)
}

/// `x · weight + bias` over the last dim, with `weight` `[features_in, features_out]` as in burn.
///
/// # Placement
/// As for [`matmul`], with the leading dims of `x` as rows, and `bias` sharded as the weight's
/// columns. If `features_in` is sharded, the result is partial and there must be no bias: add it to
/// the resolved result.
///
/// # Errors
/// Fails for placements without a rule, and for shapes or element types that do not match.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::matmul::linear;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 2.0]]));
/// let weight = Tensor::<2>::from([[1.0], [10.0]]);
/// let y = linear(x, weight, Some(Tensor::<1>::from([0.5]).into()))?;
/// y.into_local().into_data().assert_eq(&[[21.5_f32]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn linear<const D: usize>(
    x: ShardTensor<D>,
    weight: impl Into<Operand<2>>,
    bias: Option<Operand<1>>,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "linear";
    let weight = weight.into().place_on(&x)?;
    let bias = bias.map(|bias| bias.place_on(&x)).transpose()?;
    let [features_in, features_out] = weight.dims();
    if x.dims()[D - 1] != features_in {
        let message = format!("weight [{features_in}, {features_out}] on {:?}", x.dims());
        return Err(Error::operator(NAME, message));
    }
    same_type(NAME, x.local().dtype(), weight.local().dtype())?;
    if let Some(bias) = &bias {
        same_type(NAME, x.local().dtype(), bias.local().dtype())?;
        if bias.dims() != [features_out] {
            let message = format!("bias {:?} for {features_out} features", bias.dims());
            return Err(Error::operator(NAME, message));
        }
    }
    let result: [Role; D] = std::array::from_fn(Role::Common);
    let (columns, summed) = (Role::Common(D - 1), Role::Common(D));
    let mut roles = result;
    roles[D - 1] = summed;
    let (roles_weight, roles_bias) = ([summed, columns], [columns]);
    let term = |name, layout, roles| Term {
        name,
        layout,
        roles,
    };
    let mut terms = vec![
        term("x", x.layout(), &roles[..]),
        term("weight", weight.layout(), &roles_weight),
    ];
    terms.extend(
        bias.iter()
            .map(|bias| term("bias", bias.layout(), &roles_bias)),
    );
    let linearity = match bias {
        Some(_) => Linearity::None,
        None => Linearity::Multiplicative,
    };
    let pairing = Pairing::new(NAME, &terms, &result, linearity)?;
    let layout = pairing.layout(x.layout());
    let (x, layout_x, mesh) = x.into_parts();
    let (weight, layout_weight, _) = weight.into_parts();
    let weight = fan_out_with(weight, &x, &mesh, pairing.fan_out(1), NAME);
    let weight = fill_all(weight, &layout_weight, NAME, 0.0)?;
    let bias = bias.map(|bias| {
        let (bias, layout_bias, _) = bias.into_parts();
        let bias = fan_out_with(bias, &x, &mesh, pairing.fan_out(2), NAME);
        fill_all(bias, &layout_bias, NAME, 0.0)
    });
    let bias = bias.transpose()?;
    let x = fan_out(x, &mesh, pairing.fan_out(0), NAME);
    let y = product(fill_all(x, &layout_x, NAME, 0.0)?, weight, bias);
    without_fill(y, layout, mesh, NAME)
}

/// Multiplies all rows with a weight and adds a bias. burn's own operator takes a path that depends
/// on the sizes, which differ by rank: the graph would differ, too, and would keep gathered
/// weights.
fn product<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    let mut shape = x.dims().to_vec();
    let [inputs, outputs] = weight.dims();
    let rows: usize = shape[..D - 1].iter().product();
    let y = affine::affine(reshape(x, vec![rows, inputs]), weight, bias);
    shape[D - 1] = outputs;
    reshape(y, shape)
}

/// Methods for products.
pub trait MatmulField<const D: usize>: Field<D> {
    /// Matrix product. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`matmul`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::MatmulField;
    ///
    /// let (a, b) = (Tensor::<2>::from([[1.0, 2.0]]), Tensor::<2>::from([[3.0], [4.0]]));
    /// MatmulField::matmul(a, b).into_data().assert_eq(&[[11.0_f32]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn matmul(self, other: Self) -> Self {
        let other = other.into_shard();
        run(self, |x| matmul(x, other))
    }

    /// Contracts with another tensor by an equation; the result has `R` dims. See
    /// [`einsum`](fn@einsum).
    ///
    /// # Panics
    /// Panics where [`einsum`](fn@einsum) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::MatmulField;
    ///
    /// let weights = Tensor::<1>::from([1.0, 10.0]);
    /// let y = Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]).einsum::<1, 1>("ij,j->i", weights);
    /// y.into_data().assert_eq(&[21.0_f32, 43.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn einsum<const B: usize, const R: usize>(
        self,
        equation: &str,
        other: impl Into<Operand<B>>,
    ) -> WithDims<Self, R> {
        run(self, |x| einsum::<D, B, R>(equation, x, other))
    }

    /// `x · weight + bias` over the last dim, with `weight` `[features_in, features_out]`.
    ///
    /// # Panics
    /// Panics where [`linear`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::MatmulField;
    ///
    /// let weight = Tensor::<2>::from([[1.0], [10.0]]);
    /// let y = Tensor::<2>::from([[1.0, 2.0]]).linear(weight, None);
    /// y.into_data().assert_eq(&[[21.0_f32]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn linear(self, weight: impl Into<Operand<2>>, bias: Option<Operand<1>>) -> Self {
        run(self, |x| linear(x, weight, bias))
    }
}

/// Applies burn's linear layer. If it sums over shards, the result is resolved and the bias added
/// once.
fn linear_of<const D: usize>(layer: &Linear, x: ShardTensor<D>) -> Result<ShardTensor<D>> {
    let x = enter(&layer.weight, x)?;
    let bias = Operand::of_optional(&layer.bias);
    let weight = Operand::from(&layer.weight).place_on(&x)?;
    if !weight.layout().is_sharded(0) {
        return leave(&layer.weight, linear(x, weight, bias)?);
    }
    let x = with_extents_of(x, D - 1, weight.layout(), 0)?;
    let y = linear(x, weight, None)?;
    leave_with_bias(&layer.weight, y, bias, D - 1)
}

impl<const D: usize, X: Field<D>> MatmulField<D> for X {}

layers! {
    Linear: |linear, x| run(x, |x| linear_of(linear, x));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};
    use halocline_core::{Launcher, Layout, Replicate, Shard};

    struct Dense;

    impl Operator<2, 2> for Dense {
        fn apply<X: Field<2>>(
            &self,
            mut inputs: Vec<X>,
            mut parameters: Vec<Tensor<2>>,
        ) -> WithDims<X, 2> {
            inputs.remove(0).linear(parameters.remove(0), None)
        }
    }

    /// Shards the columns of one weight and the rows of the next: one sum over the ranks, uneven
    /// and empty shards included.
    #[test]
    fn weights_may_be_sharded_in_columns_and_rows() {
        let run = |ranks: usize, extents: &[usize]| {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("data", 1), ("tensor", ranks)])?;
                let random = |shape: [usize; 2], name, placement, dim: usize| {
                    let placements = [Replicate, placement];
                    let mut layout = Layout::new(mesh.shape(), &shape, &placements)?;
                    if placement != Replicate {
                        layout = layout.with_extents(dim, extents)?;
                    }
                    let whole = crate::testing::random::<2>(shape, name, 0).inner();
                    let tensor = ShardTensor::distribute(whole, &mesh, &layout)?;
                    Ok::<_, Error>(tensor.require_grad())
                };
                let x = random([3, 4], "x", Replicate, 0)?;
                let first = random([4, 7], "first", Shard(1), 1)?;
                let second = random([7, 5], "second", Shard(0), 0)?;
                let bias = Tensor::<1>::full([5], 0.5, world.device()).require_grad();
                let hidden = x.clone().linear(first.clone(), None).gelu();
                let y = hidden.linear(second.clone(), None).resolve() + bias.clone().unsqueeze();
                let gradients = (y.clone() * y.clone()).sum().backward();
                let mut found = vec![y.full_tensor().into_data()];
                for tensor in [x, first, second] {
                    let gradient = tensor.grad(&gradients).expect("a gradient");
                    assert_eq!(gradient.layout(), tensor.layout());
                    found.push(gradient.full_tensor().into_data());
                }
                found.push(bias.grad(&gradients).expect("a gradient").into_data());
                Ok(found)
            });
            found.unwrap()
        };
        let expected = run(1, &[7]).remove(0);
        for extents in [vec![4, 3], vec![0, 7], vec![5, 1, 1], vec![2, 2, 2, 1]] {
            for found in run(extents.len(), &extents) {
                crate::testing::compare(&found, &expected, 1e-5, &format!("{extents:?}"));
            }
        }
    }

    #[test]
    fn a_linear_layer_on_sharded_rows() {
        check_op(&Dense, &[[7, 5]], &[[5, 3]], &[0], 1e-6);
    }

    /// One rank has a single row. Its product lies in the graph between two operators that
    /// communicate: with more nodes than on other ranks, the ranks would run the backward pass in
    /// different orders.
    #[test]
    fn ranks_with_one_row_go_through_the_same_graph() {
        let gradient = |ranks: usize| {
            let gradients = Launcher::local(ranks).check(false).collect(|world| {
                let mesh = world.mesh([("x", ranks)])?;
                let key = halocline_core::RandomKey::new(1, "a");
                let uniform = halocline_core::Distribution::Uniform(0.5, 1.5);
                let a = ShardTensor::<3>::random([1, 3, 4], uniform, key, &mesh, &[Shard(1)])?;
                let a = a.require_grad();
                let weight = a.replicate_operand(Tensor::ones([1, 4, 4], world.device()));
                let u = matmul(a.clone() * 2.0 * 1.0, weight)?.redistribute(&[Shard(2)]);
                let v = (a.clone() * 3.0)
                    .sin()
                    .exp()
                    .abs()
                    .redistribute(&[Shard(2)]);
                let loss = crate::reduce::sum(u * 5.0 + v)?;
                let gradient = a.grad(&loss.backward()).expect("a gradient");
                Ok(gradient.full_tensor().into_data())
            });
            gradients.unwrap().remove(0)
        };
        let off = crate::testing::difference(&gradient(2), &gradient(1));
        assert!(off < 1e-5, "off by {off:e}");
    }

    #[test]
    fn operands_on_two_meshes_are_refused() {
        let refused = Launcher::local(4).run(|world| {
            let mesh = world.mesh([("data", 2), ("model", 2)])?;
            let a = ShardTensor::<2>::ones([4, 4], &mesh, &[Replicate, Replicate])?;
            let b = ShardTensor::<2>::ones([4, 4], &mesh.submesh(&["model"])?, &[Shard(1)])?;
            matmul(a, b).map(drop)
        });
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("two meshes"), "{error}");
    }

    #[test]
    fn operands_of_two_number_types_are_refused() {
        let ones = |dtype| Tensor::<2>::ones([4, 4], (&Default::default(), dtype));
        let single = || ShardTensor::solo(ones(DType::F32));
        let products = [
            matmul(single(), ShardTensor::solo(ones(DType::F64))),
            linear(single(), ones(DType::F64), None),
        ];
        for (product, name) in products.into_iter().zip(["matmul", "linear"]) {
            let error = product.unwrap_err().to_string();
            assert_eq!(error, format!("{name}: operands of F32 and F64"));
        }
    }

    #[test]
    fn a_combination_without_a_rule_is_refused() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("x", 2)])?;
                let ones = |placement| ShardTensor::<2>::ones([4, 4], &mesh, &[placement]);
                let error = matmul(ones(Shard(0))?, ones(Shard(1))?)
                    .unwrap_err()
                    .to_string();
                assert!(
                    error.starts_with("matmul: no rule for Shard(0) with Shard(1) on axis \"x\""),
                    "{error}"
                );
                Ok(())
            })
            .unwrap();
    }
}
