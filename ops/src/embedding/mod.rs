//! Embedding: looks up rows of a table by index.
//!
//! `y[.., f] = weight[index[..], f]`, with a table of `[rows, features]`.
//!
//! # Placement
//!
//! | `index` | `weight` | `y` |
//! |---|---|---|
//! | any | `Replicate` | as `index` |
//! | `Replicate` | `Shard(1)`, features | `Shard(last)` |
//! | `Replicate` | `Shard(0)`, rows | `Partial(Sum)` |
//!
//! Nothing is sent, except that with checks enabled a wrong index of one rank is an error on all
//! ranks.
//!
//! # Adjoint
//! The gradient of a row is the sum of the cotangents of its occurrences; the gradient of a
//! replicated table is summed over the ranks between which the indices are sharded.

mod position;

use burn::nn::Embedding;
use burn::tensor::{Int, Shape, Tensor};
use halocline_core::ops::{agree_on, fan_out};
use halocline_core::plan::{Linearity, Pairing, Role, Term};
use halocline_core::{
    Error, Fan, Layout, OrRaise, PlanPlacement, Replicate, Result, Shard, ShardTensor,
};

use crate::driver::empty::{fill_all, without_fill};
use crate::field::{Field, run};
use crate::golden::{Golden, output};
use crate::kernel::flex::{self, with_integers};
use crate::kernel::gathered::Cell;
use crate::kernel::taken::{Places, take};
use crate::layer::Layer;
use crate::layer_placements::{enter, leave, with_extents_of};
use crate::matmul::linear;
use crate::operand::Operand;
use crate::precision::{cast, widened_for_gradient};
use crate::rearrange::permute;

const NAME: &str = "embedding";

/// Looks up rows of a table. The result has `E` dims, one more than the indices. See the
/// [module](self).
///
/// # Errors
/// A wrong number of dims; an index outside the table (detected on CPUs; on other devices the row
/// is undefined); a combination of placements without a rule.
///
/// # Example
/// ```
/// use burn::tensor::{Int, Tensor};
/// use halocline_core::ShardTensor;
/// use halocline_ops::embedding::embedding;
///
/// let index = ShardTensor::solo(Tensor::<1, Int>::from([1, 0, 1]));
/// let table = Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]);
/// let y: ShardTensor<2> = embedding(index, table)?;
/// let expected = [[3.0_f32, 4.0], [1.0, 2.0], [3.0, 4.0]];
/// y.local().to_data().assert_eq(&expected.into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn embedding<const D: usize, const E: usize>(
    index: ShardTensor<D, Int>,
    weight: impl Into<Operand<2>>,
) -> Result<ShardTensor<E>> {
    if D + 1 != E {
        let message = format!("indices {:?} for a result of {E} dims", index.dims());
        return Err(Error::operator(NAME, message));
    }
    let weight = weight.into().place_on(&index)?;
    let [rows, _] = weight.dims();
    // The placement rule is that of a matrix product with the indices as one-hot vectors over rows.
    let result: Vec<Role> = (0..E).map(Role::Common).collect();
    let (taken, features) = (Role::Common(E), Role::Common(D));
    let mut of_index = result[..D].to_vec();
    of_index.push(taken);
    let pairs = index.placements().iter().zip(weight.placements());
    let both = |pair| matches!(pair, (&Shard(_), &Shard(0)));
    if let Some(axis) = pairs.into_iter().position(both) {
        return Err(Error::placement(
            NAME,
            format!(
                "{} of index with Shard(0) of weight on axis \"{}\"",
                index.placements()[axis],
                index.layout().mesh().names()[axis]
            ),
            "redistribute one of them to Replicate",
        ));
    }
    let one_hot = one_hot(index.layout(), weight.layout());
    let terms = [
        Term {
            name: "index",
            layout: &one_hot,
            roles: &of_index,
        },
        Term {
            name: "weight",
            layout: weight.layout(),
            roles: &[taken, features],
        },
    ];
    let pairing = Pairing::new(NAME, &terms, &result, Linearity::None)?;
    let layout = pairing.layout(index.layout());
    let mesh = index.mesh().clone();
    let (weight, layout_weight, _) = weight.into_parts();
    let weight = fan_out(weight, &mesh, pairing.fan_out(1), NAME);
    let weight = fill_all(weight, &layout_weight, NAME, 0.0)?;
    let axes = index.layout().sharded_axes();
    let index = flex::signed(index.into_local());
    if flex::runs_on(&index.device()) {
        agree_on(&mesh, &axes, NAME, check(&index, rows))?;
    }
    let mut shape = index.dims().map(|size| size.max(1)).to_vec();
    let count: usize = shape.iter().product();
    shape.push(weight.dims()[1]);
    // A rank without indices looks up a row and drops it, so that the graph is the same on all
    // ranks.
    let index = if index.dims().contains(&0) {
        Tensor::zeros([count], &index.device())
    } else {
        index.reshape([count])
    };
    let y = if layout_weight.is_sharded(0) {
        // Rows on other ranks count as zero here.
        let held = layout_weight.local_box(mesh.position()).ranges()[0].clone();
        let [first, end] = [held.start, held.end].map(|row| row as i64);
        let elsewhere = index
            .clone()
            .lower_elem(first)
            .bool_or(index.clone().greater_equal_elem(end));
        let last = weight.dims()[0] as i64 - 1;
        let y = rows_of(weight, (index - first).clamp(0, last));
        let elsewhere = elsewhere.unsqueeze_dim::<2>(1).expand(y.dims());
        y.mask_fill(elsewhere, 0.0)
    } else {
        rows_of(weight, index)
    };
    without_fill(y.reshape(Shape::from(shape)), layout, mesh, NAME)
}

/// Selects rows of the table by index.
fn rows_of(weight: Tensor<2>, index: Tensor<1, Int>) -> Tensor<2> {
    if !flex::runs_on(&weight.device()) {
        let dtype = weight.dtype();
        return cast(widened_for_gradient(weight).select(0, index), dtype);
    }
    let index = flex::integers(index);
    let rows = with_integers!(&index, rows => rows.iter().map(|row| *row as usize).collect());
    take(weight, 0, &Places::new(rows))
}

/// Layout of the indices as one-hot vectors over the rows, which are sharded like those of the
/// table.
fn one_hot(index: &Layout, weight: &Layout) -> Layout {
    let rows = index.shape().len();
    let pairs = index.placements().iter().zip(weight.placements());
    let placements = pairs.map(|(index, weight)| match (index, weight) {
        (Replicate | Fan, Shard(0)) => Shard(rows),
        (index, _) => *index,
    });
    let mut extents = index.all_extents().to_vec();
    extents.push(weight.extents(0).to_vec());
    index.derive(placements.collect(), extents)
}

/// Checks that indices are rows of the table.
fn check<const D: usize>(index: &Tensor<D, Int>, rows: usize) -> Result<()> {
    let index = flex::integers(index.clone());
    let beyond = with_integers!(&index, all => {
        let beyond = all.iter().find(|index| index.number() >= rows);
        beyond.map(ToString::to_string)
    });
    match beyond {
        None => Ok(()),
        Some(index) => {
            let message = format!("index {index} of a table of {rows} rows");
            Err(Error::operator(NAME, message))
        }
    }
}

macro_rules! layer {
    ($tensor:ident, $apply:expr) => {
        impl Layer<$tensor<2, Int>> for Embedding {
            type Output = $tensor<3>;

            #[track_caller]
            fn forward(&self, index: $tensor<2, Int>) -> $tensor<3> {
                let apply: fn(&Self, $tensor<2, Int>) -> Result<$tensor<3>> = $apply;
                apply(self, index).or_raise()
            }
        }
    };
}

layer!(ShardTensor, |layer, index| {
    let index = enter(&layer.weight, index)?;
    leave(&layer.weight, embedding(index, &layer.weight)?)
});
layer!(Tensor, |layer, index| {
    let y = embedding(ShardTensor::solo(index), &layer.weight)?;
    Ok(y.into_local())
});

/// Embedding as a method.
pub trait EmbeddingField<const D: usize>: Field<D> {
    /// Computes logits over the rows of an embedding's table, `x · weightᵀ`: the head of a language
    /// model that shares ("ties") the weights of its embedding, as one parameter in one layout.
    ///
    /// # Placement
    /// As for [`linear`](fn@crate::matmul::linear), with the transposed table as the weight: a
    /// table with sharded rows produces logits with sharded classes, which
    /// [`cross_entropy`](fn@crate::cross_entropy) accepts. If the columns of the table are sharded,
    /// each rank multiplies the features of its columns, and the parts are added up.
    ///
    /// # Panics
    /// Panics where [`linear`](fn@crate::matmul::linear) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::nn::EmbeddingConfig;
    /// use burn::tensor::{Int, Tensor};
    /// use halocline_ops::EmbeddingField;
    /// use halocline_ops::prelude::*;
    ///
    /// let embedding = EmbeddingConfig::new(7, 4).init(&Default::default());
    /// let x = Tensor::<2, Int>::from([[6, 0, 3]]).apply(&embedding);
    /// assert_eq!(x.apply_unembedding(&embedding).dims(), [1, 3, 7]);
    /// ```
    #[must_use]
    #[track_caller]
    fn apply_unembedding(self, embedding: &Embedding) -> Self {
        run(self, |x| {
            let table = Operand::from(&embedding.weight).place_on(&x)?;
            let weight = permute(table, [1, 0])?;
            // The table has sharded columns: each rank multiplies its features.
            let columns = weight.layout().axes_of(0);
            let features: Vec<_> = columns
                .iter()
                .map(|axis| (*axis, PlanPlacement::Shard(-1)))
                .collect();
            let x = x.redistribute_axes(&features)?;
            let x = with_extents_of(x, D - 1, weight.layout(), 0)?;
            Ok(linear(x, weight, None)?.resolve())
        })
    }
}

impl<const D: usize, X: Field<D>> EmbeddingField<D> for X {}

/// Registry entry of the family.
pub(crate) const OPERATORS: &[Golden] = &[Golden::new("embedding", |case| {
    let weight = case.needed::<2>("weight")?;
    let [rows, features] = weight.dims();
    case.attributes.require("num_embeddings", &[rows]);
    case.attributes.require("embedding_dim", &[features]);
    match case.dims() {
        1 => output(embedding::<1, 2>(case.indices(0)?, weight)),
        2 => output(embedding::<2, 3>(case.indices(0)?, weight)),
        dims => Err(Error::other(format!("indices of {dims} dims"))),
    }
})
.with_travels(["–", "sums of tables' gradients"])
.with_modules("`Embedding`")];

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, FloatDType, TensorData};
    use halocline_core::{Launcher, Partial, Placement, ReduceOp};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{compare, random};

    /// Result and gradient for a table of 7 rows with this placement and these extents.
    fn run(ranks: usize, placement: Placement, extents: &[usize]) -> Vec<Vec<TensorData>> {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("tensor", ranks)])?;
            let mut layout = Layout::new(mesh.shape(), &[7, 5], &[placement])?;
            if let Shard(dim) = placement {
                layout = layout.with_extents(dim, extents)?;
            }
            let table = random::<2>([7, 5], "table", 0).inner();
            let table = ShardTensor::distribute(table, &mesh, &layout)?.require_grad();
            let index = Tensor::<2, Int>::from_data([[6, 0, 3], [3, 1, 5]], world.device());
            let index = ShardTensor::distribute(index, &mesh, &[Replicate])?;
            let y: ShardTensor<3> = embedding(index, table.clone())?;
            let expected = match placement {
                Shard(0) => Partial(ReduceOp::Sum),
                Shard(_) => Shard(2),
                _ => Replicate,
            };
            assert_eq!(y.placements(), [expected]);
            let y = y.resolve();
            let gradients = (y.clone() * y.clone()).sum().backward();
            let gradient = table.grad(&gradients).expect("a gradient");
            assert_eq!(gradient.layout(), table.layout());
            let whole = [
                y.full_tensor().into_data(),
                gradient.full_tensor().into_data(),
            ];
            Ok(whole.to_vec())
        });
        found.unwrap()
    }

    #[test]
    fn tables_may_be_sharded_in_rows_and_columns() {
        let expected = run(1, Replicate, &[]).remove(0);
        for (placement, extents) in [
            (Shard(0), vec![4, 3]),
            (Shard(0), vec![2, 0, 5]),
            (Shard(1), vec![3, 2]),
            (Shard(1), vec![0, 4, 1]),
        ] {
            for found in run(extents.len(), placement, &extents) {
                compare(
                    &found,
                    &expected,
                    1e-6,
                    &format!("{placement:?} {extents:?}"),
                );
            }
        }
    }

    #[test]
    fn an_index_outside_the_table_is_an_error() {
        let index = ShardTensor::solo(Tensor::<1, Int>::from([7]));
        let table = Tensor::<2>::ones([7, 2], &Default::default());
        let error = embedding::<1, 2>(index, table).unwrap_err().to_string();
        assert!(error.contains("index 7 of a table of 7 rows"), "{error}");
    }

    #[test]
    fn an_index_of_one_rank_outside_the_table_is_an_error_on_all() {
        let run = Launcher::local(2).check(true).run(|world| {
            let mesh = world.mesh([("data", 2)])?;
            let index = Tensor::<1, Int>::from_data([0, 7], world.device());
            let index = ShardTensor::distribute(index, &mesh, &[Shard(0)])?;
            let table = Tensor::<2>::ones([7, 2], world.device());
            let error = embedding::<1, 2>(index, table).unwrap_err().to_string();
            assert!(error.contains("index 7 of a table of 7 rows"), "{error}");
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn indices_may_be_of_a_type_that_does_not_hold_the_number_of_rows() {
        for ranks in [1, 2] {
            let run = Launcher::local(ranks).run(|world| {
                let mesh = world.mesh([("tensor", ranks)])?;
                let table = random::<2>([256, 3], "table", 0).inner();
                let rows = Tensor::<1, Int>::from_data([0, 127, 128, 255], &table.device());
                let expected = table.clone().select(0, rows.clone()).into_data();
                let index = ShardTensor::distribute(rows.cast(DType::U8), &mesh, &[Replicate])?;
                let table = ShardTensor::distribute(table, &mesh, &[Shard(0)])?;
                let y: ShardTensor<2> = embedding(index, table)?;
                y.full_tensor().into_data().assert_eq(&expected, true);
                Ok(())
            });
            run.unwrap();
        }
    }

    /// A sum of ones in bf16 would stop at 256.
    #[test]
    fn gradients_of_a_row_in_half_precision_add_up_in_f32() {
        let device = burn::tensor::Device::flex().autodiff();
        let table = Tensor::<2>::ones([2, 1], (&device, DType::BF16)).require_grad();
        let index = Tensor::<1, Int>::ones([1000], &device.clone().inner());
        let y: ShardTensor<2> =
            embedding(ShardTensor::solo(index), ShardTensor::solo(table.clone())).unwrap();
        assert_eq!(y.local().dtype(), DType::BF16);
        let gradients = y.into_local().sum().backward();
        let found = table.grad(&gradients).expect("a gradient");
        let found = found.cast(FloatDType::F32).into_data();
        found.assert_eq(&[[0.0_f32], [1000.0]].into(), true);
    }

    #[test]
    fn burns_module_gives_what_it_gives_there() {
        let layer = burn::nn::EmbeddingConfig::new(7, 4).init(&Default::default());
        let index = Tensor::<2, Int>::from([[6, 0, 3]]);
        let ours = index.clone().apply(&layer);
        ours.into_data()
            .assert_eq(&layer.forward(index).into_data(), true);
    }
}
