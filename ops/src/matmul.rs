//! Matrix products and the linear layer.
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
//! The single-device one on each rank; the gradient of a replicated operand is summed over the axes on which the other
//! one is sharded.

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Tensor, module};
use halocline_core::{
    Error, Layout, Partial, Placement, ReduceOp, Replicate, Result, Shard, ShardTensor,
    ops::fan_out,
};

use crate::empty::{drop_empty, fill_empty};

const MATMUL: &str = "matmul";

/// The rule of one axis: the placement of the result, and which operand fans out (0 or 1).
fn rule(a: Placement, b: Placement, dims: usize) -> Option<(Placement, Option<usize>)> {
    let (rows, columns) = (dims - 2, dims - 1);
    match (a, b) {
        (Replicate, Replicate) => Some((Replicate, None)),
        (Shard(i), Shard(j)) if i == j && i < rows => Some((a, None)),
        (Shard(i), Replicate) if i == rows => Some((a, Some(1))),
        (Replicate, Shard(j)) if j == columns => Some((b, Some(0))),
        (Shard(i), Shard(j)) if i == columns && j == rows => Some((Partial(ReduceOp::Sum), None)),
        _ => None,
    }
}

fn same_type(operator: &str, one: DType, other: DType) -> Result<()> {
    if one == other {
        return Ok(());
    }
    let message = format!("operands of {one:?} and {other:?}");
    Err(Error::operator(operator, message))
}

/// The product of two sharded tensors of the same batch shape.
///
/// # Errors
/// A combination of placements without a rule, shapes, number types or meshes that do not fit.
pub fn matmul<const D: usize>(a: ShardTensor<D>, b: ShardTensor<D>) -> Result<ShardTensor<D>> {
    let (shape_a, shape_b) = (a.dims(), b.dims());
    if D < 2 || shape_a[..D - 2] != shape_b[..D - 2] || shape_a[D - 1] != shape_b[D - 2] {
        let message =
            format!("shapes {shape_a:?} and {shape_b:?}; expected [.., m, k] and [.., k, n]");
        return Err(Error::operator(MATMUL, message));
    }
    same_type(MATMUL, a.local().dtype(), b.local().dtype())?;
    if a.layout().mesh() != b.layout().mesh() {
        let message = format!("{} and {} are on two meshes", a.layout(), b.layout());
        return Err(Error::operator(MATMUL, message));
    }
    let mut placements = Vec::new();
    let mut fans = [Vec::new(), Vec::new()];
    for (axis, (&of_a, &of_b)) in a.placements().iter().zip(b.placements()).enumerate() {
        let name = &a.layout().mesh().names()[axis];
        let (placement, fan) = rule(of_a, of_b, D).ok_or_else(|| Error::Placement {
            operator: MATMUL.into(),
            placement: format!("{of_a} with {of_b} on axis \"{name}\""),
            help: format!(
                "redistribute to Shard({}) with Replicate, Replicate with Shard({}), or Shard({}) with Shard({})",
                D - 2, D - 1, D - 1, D - 2
            ),
        })?;
        placements.push(placement);
        if let Some(operand) = fan {
            fans[operand].push(axis);
        }
    }
    let same = |dim_a: usize, dim_b: usize| a.layout().extents(dim_a) == b.layout().extents(dim_b);
    if !same(D - 1, D - 2) || (0..D - 2).any(|dim| !same(dim, dim)) {
        let message = format!("extents differ: {} and {}", a.layout(), b.layout());
        return Err(Error::operator(MATMUL, message));
    }
    let extents = (0..D).map(|dim| {
        let of = if dim == D - 1 { b.layout() } else { a.layout() };
        of.extents(dim).to_vec()
    });
    let layout = a.layout().derive(placements, extents.collect());
    let all: Vec<usize> = (0..D).collect();
    let (a, layout_a, mesh) = a.into_parts();
    let (b, layout_b, _) = b.into_parts();
    let a = fan_out(a, &mesh, &fans[0], MATMUL);
    let b = fan_out(b, &mesh, &fans[1], MATMUL);
    let a = fill_empty(a, &layout_a, &all, MATMUL, 0.0)?;
    let b = fill_empty(b, &layout_b, &all, MATMUL, 0.0)?;
    // `Tensor::matmul` records more steps for some local shapes, and the graph must be the same on every rank.
    let product =
        Tensor::<D>::from_dispatch(Dispatch::float_matmul(a.into_dispatch(), b.into_dispatch()));
    let product = drop_empty(product, &layout, mesh.position(), MATMUL)?;
    Ok(ShardTensor::from_parts(product, layout, mesh))
}

/// `x · weight + bias` over the last dim, with `weight` `[features_in, features_out]` as in burn.
///
/// # Errors
/// A last dim that is sharded or of another size than the weight's, other number types, partial values.
pub fn linear<const D: usize>(
    x: ShardTensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "linear";
    x.require_resolved(NAME)?;
    x.require_whole(NAME, D - 1)?;
    let [features_in, features_out] = weight.dims();
    if x.dims()[D - 1] != features_in {
        let message = format!("weight [{features_in}, {features_out}] on {:?}", x.dims());
        return Err(Error::operator(NAME, message));
    }
    same_type(NAME, x.local().dtype(), weight.dtype())?;
    if let Some(bias) = &bias {
        same_type(NAME, x.local().dtype(), bias.dtype())?;
        if bias.dims() != [features_out] {
            let message = format!("bias {:?} for {features_out} features", bias.dims());
            return Err(Error::operator(NAME, message));
        }
    }
    let axes = crate::sharded_axes(&x);
    let mut extents = x.layout().all_extents().to_vec();
    extents[D - 1] = vec![features_out];
    let layout: Layout = x.layout().derive(x.placements().to_vec(), extents);
    let all: Vec<usize> = (0..D).collect();
    let (local, from, mesh) = x.into_parts();
    let weight = fan_out(weight, &mesh, &axes, NAME);
    let bias = bias.map(|bias| fan_out(bias, &mesh, &axes, NAME));
    let local = module::linear(fill_empty(local, &from, &all, NAME, 0.0)?, weight, bias);
    let local = drop_empty(local, &layout, mesh.position(), NAME)?;
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Field;
    use crate::testing::{Operator, check_op};
    use halocline_core::Launcher;

    struct Dense;

    impl Operator<2, 2> for Dense {
        fn apply<X: Field<2>>(
            &self,
            mut inputs: Vec<X>,
            mut parameters: Vec<Tensor<2>>,
        ) -> X::Rank<2> {
            let y = inputs.remove(0).linear(parameters.remove(0), None);
            X::from_shard(y.into_shard())
        }
    }

    #[test]
    fn a_linear_layer_on_sharded_rows() {
        check_op(&Dense, &[[7, 5]], &[[5, 3]], &[0], 1e-6);
    }

    /// The product of a rank with one row lies between two others that communicate at the depths next to its own: if it
    /// took more steps there than elsewhere, ranks would run the backward pass in different orders.
    #[test]
    fn ranks_with_one_row_go_through_the_same_graph() {
        let gradient = |ranks: usize| {
            let gradients = Launcher::local(ranks).check(false).collect(|world| {
                let mesh = world.mesh([("x", ranks)])?;
                let key = halocline_core::RandomKey::new(1, "a");
                let uniform = halocline_core::Distribution::Uniform {
                    low: 0.5,
                    high: 1.5,
                };
                let a = ShardTensor::<3>::random([1, 3, 4], uniform, key, &mesh, &[Shard(1)])?;
                let a = a.require_grad();
                let weight = a.replicate_beside(Tensor::ones([1, 4, 4], world.device()));
                let u = matmul(a.clone() * 2.0 * 1.0, weight)?.redistribute(&[Shard(2)]);
                let v = (a.clone() * 3.0)
                    .sin()
                    .exp()
                    .abs()
                    .redistribute(&[Shard(2)]);
                let loss = crate::reduce::sum(u * 5.0 + v)?;
                let gradient = a.grad(&loss.backward()).expect("a gradient");
                Ok(gradient
                    .full_tensor(halocline_core::LocalGradient::Replicated)
                    .into_data())
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
        let of = |dtype| Tensor::<2>::ones([4, 4], (&Default::default(), dtype));
        let single = || ShardTensor::solo(of(DType::F32));
        let products = [
            matmul(single(), ShardTensor::solo(of(DType::F64))),
            linear(single(), of(DType::F64), None),
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
                let of = |placement| ShardTensor::<2>::ones([4, 4], &mesh, &[placement]);
                let error = matmul(of(Shard(0))?, of(Shard(1))?)
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
