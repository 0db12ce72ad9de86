//! Products with operands in every placement: combinations with a rule match one device, all others
//! are rejected.

use burn::tensor::{Int, Tensor, TensorData};
use halocline_core::{
    DeviceMesh, Error, Fan, Launcher, Placement, Replicate, Result, Shard, ShardTensor,
};

use crate::embedding::embedding;
use crate::matmul::{linear, matmul};
use crate::operand::Operand;
use crate::prelude::*;
use crate::sharding::sharded;
use crate::testing::{compare, cotangent_of, random_leaf};

const ALL: [Placement; 4] = [Replicate, Fan, Shard(0), Shard(1)];

/// The result and the requested gradients.
fn found(
    y: ShardTensor<2>,
    gradients: impl FnOnce(&burn::tensor::Gradients) -> Vec<TensorData>,
) -> Result<Vec<TensorData>> {
    let y = sharded(y.resolve());
    let all = (y.clone() * cotangent_of(&y)?).sum().backward();
    let mut found = vec![y.full_tensor().into_data()];
    found.extend(gradients(&all));
    Ok(found)
}

fn gradient<const D: usize>(x: &ShardTensor<D>, all: &burn::tensor::Gradients) -> TensorData {
    let gradient = x.grad(all).expect("a gradient");
    gradient.full_tensor().into_data()
}

/// Runs an operator on operands in all combinations of placements and returns the number of
/// combinations that have a rule.
fn check<const N: usize>(
    choices: [&[Placement]; N],
    operator: impl Fn(&DeviceMesh, [Placement; N]) -> Result<Vec<TensorData>> + Sync,
) -> usize {
    let run = |ranks: usize, placements: [Placement; N]| {
        Launcher::local(ranks)
            .collect(|world| operator(&world.mesh([("tensor", ranks)])?, placements))
    };
    let expected = run(1, [Replicate; N]).unwrap().remove(0);
    let mut allowed = 0;
    let count: usize = choices.iter().map(|choice| choice.len()).product();
    for mut index in 0..count {
        let placements = choices.map(|choice| {
            let placement = choice[index % choice.len()];
            index /= choice.len();
            placement
        });
        match run(3, placements) {
            Ok(results) => {
                allowed += 1;
                for result in results {
                    compare(&result, &expected, 1e-5, &format!("{placements:?}"));
                }
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("no rule for"), "{placements:?}: {text}");
            }
        }
    }
    allowed
}

#[test]
fn linear_layers_take_every_placement_that_has_a_rule() {
    let bias = [Replicate, Fan, Shard(0)];
    let allowed = check([&ALL, &ALL, &bias], |mesh, [x, weight, bias]| {
        let x = random_leaf([5, 4], "x", mesh, &[x])?;
        let weight = random_leaf([4, 7], "weight", mesh, &[weight])?;
        let bias = random_leaf([7], "bias", mesh, &[bias])?;
        let y = linear(x.clone(), weight.clone(), Some(Operand::from(bias.clone())))?;
        found(y, |all| {
            vec![
                gradient(&x, all),
                gradient(&weight, all),
                gradient(&bias, all),
            ]
        })
    });
    // Whole operands: four, each with two biases. Sharded rows of x: two, each with two biases.
    // Sharded columns of the weight: two.
    assert_eq!(allowed, 4 * 2 + 2 * 2 + 2);
    let without = check([&ALL, &ALL], |mesh, [x, weight]| {
        let x = random_leaf([5, 4], "x", mesh, &[x])?;
        let weight = random_leaf([4, 7], "weight", mesh, &[weight])?;
        let y = linear(x.clone(), weight.clone(), None)?;
        found(y, |all| vec![gradient(&x, all), gradient(&weight, all)])
    });
    assert_eq!(without, 4 + 2 + 2 + 1);
}

#[test]
fn products_take_every_placement_that_has_a_rule() {
    let allowed = check([&ALL, &ALL], |mesh, [a, b]| {
        let a = random_leaf([5, 4], "a", mesh, &[a])?;
        let b = random_leaf([4, 7], "b", mesh, &[b])?;
        let y = matmul(a.clone(), b.clone())?;
        found(y, |all| vec![gradient(&a, all), gradient(&b, all)])
    });
    assert_eq!(allowed, 4 + 2 + 2 + 1);
}

#[test]
fn embeddings_take_every_placement_that_has_a_rule() {
    let index = [Replicate, Fan, Shard(0)];
    let allowed = check([&index, &ALL], |mesh, [index, weight]| {
        let rows = Tensor::<1, Int>::from_ints([3, 0, 9, 9, 4], mesh.device());
        let rows = ShardTensor::distribute(rows, mesh, &[index])?;
        let weight = random_leaf([10, 4], "weight", mesh, &[weight])?;
        let y = embedding::<1, 2>(rows, weight.clone())?;
        found(y, |all| vec![gradient(&weight, all)])
    });
    assert_eq!(allowed, 2 * 4 + 2);
}

#[test]
fn elementwise_operands_take_every_placement_that_has_a_rule() {
    let allowed = check([&ALL, &ALL], |mesh, [a, b]| {
        let a = random_leaf([5, 4], "a", mesh, &[a])?;
        let b = random_leaf([5, 4], "b", mesh, &[b])?;
        let y = Error::catch(|| a.clone() * b.clone())?;
        found(y, |all| vec![gradient(&a, all), gradient(&b, all)])
    });
    assert_eq!(allowed, 4 + 2);
}
