//! Maxima, minima and products over ranks: results, gradients, and traffic.

use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use halocline_core::{
    Error, Fan, Launcher, Layout, Partial, Placement, ReduceOp, Replicate, Result, Shard,
    ShardTensor, Traffic, World,
};

const OPS: [ReduceOp; 4] = [
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Product,
    ReduceOp::Sum,
];

/// The contribution of a rank: few distinct values, so that ranks tie, with zeros among them;
/// products have no rounding error.
fn contribution(rank: usize, elements: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 31 + rank * 17 + i * rank) % 5) as f32 - 2.0;
    (0..elements).map(value).collect()
}

/// The value and gradients of a reduction, by definition.
fn expected(op: ReduceOp, values: &[f32], cotangent: f32) -> (f32, Vec<f32>) {
    let result = match op {
        ReduceOp::Max => values.iter().copied().fold(f32::NEG_INFINITY, f32::max),
        ReduceOp::Min => values.iter().copied().fold(f32::INFINITY, f32::min),
        ReduceOp::Sum => values.iter().sum(),
        ReduceOp::Product => values.iter().product(),
    };
    let first = values.iter().position(|value| *value == result);
    let gradient = |rank: usize| match op {
        ReduceOp::Sum => cotangent,
        ReduceOp::Product => {
            let others = values
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != rank);
            cotangent * others.map(|(_, value)| value).product::<f32>()
        }
        _ if first == Some(rank) => cotangent,
        _ => 0.0,
    };
    (result, (0..values.len()).map(gradient).collect())
}

/// Checks values and gradients of a reduction of this many rows of 3, to a placement.
fn check(
    world: &World,
    axes: &[(&str, usize)],
    op: ReduceOp,
    rows: usize,
    to: &[Placement],
) -> Result<()> {
    let mesh = world.mesh_of(axes)?;
    let (ranks, elements) = (world.size(), 3 * rows);
    let partial = vec![Partial(op); axes.len()];
    let layout = Layout::new(mesh.shape(), &[rows, 3], &partial)?;
    let data = TensorData::new(contribution(world.rank(), elements), [rows, 3]);
    let leaf = Tensor::<2>::from_data(data, world.device()).require_grad();
    let x = ShardTensor::from_parts(leaf.clone(), layout, mesh.clone());
    let y = if to.contains(&Replicate) && to.len() == 1 {
        x.resolve()
    } else {
        x.redistribute(to)
    };
    let found = y.full_tensor().into_data();
    let all: Vec<Vec<f32>> = (0..ranks)
        .map(|rank| contribution(rank, elements))
        .collect();
    let of = |i: usize| -> Vec<f32> { all.iter().map(|values| values[i]).collect() };
    let cotangents: Vec<f32> = (0..elements).map(|i| (i % 5) as f32 - 1.0).collect();
    let (values, gradients): (Vec<f32>, Vec<f32>) = (0..elements)
        .map(|i| expected(op, &of(i), cotangents[i]))
        .map(|(value, gradients)| (value, gradients[world.rank()]))
        .unzip();
    assert_eq!(found, TensorData::new(values, [rows, 3]), "{op:?} {to:?}");
    let weights = Tensor::<2>::from_data(TensorData::new(cotangents, [rows, 3]), world.device());
    let weights = ShardTensor::distribute(weights, &mesh, y.layout())?;
    // The gradient of a replicated tensor is complete on each rank.
    let gradient = leaf.grad(&(y * weights).local().clone().sum().backward());
    let gradient = gradient.expect("a gradient").into_data();
    assert_eq!(
        gradient,
        TensorData::new(gradients, [rows, 3]),
        "{op:?} {to:?}"
    );
    Ok(())
}

#[test]
fn values_and_gradients_are_those_of_one_device() {
    for op in OPS {
        // No elements, fewer than ranks, and more than the size above which reductions are split.
        for rows in [0, 1, 5, 6000] {
            for to in [Replicate, Shard(0), Shard(1)] {
                let program = |world: World| check(&world, &[("x", 3)], op, rows, &[to]);
                Launcher::local(3).run(program).unwrap();
            }
        }
        for to in [
            [Replicate, Replicate],
            [Shard(0), Replicate],
            [Replicate, Shard(1)],
            [Shard(1), Shard(1)],
        ] {
            let axes = [("a", 2), ("b", 2)];
            Launcher::local(4)
                .run(|world| check(&world, &axes, op, 5, &to))
                .unwrap();
        }
    }
    // Enough ranks to reduce in rows and columns.
    let axes = [("x", 18)];
    for op in [ReduceOp::Max, ReduceOp::Product] {
        Launcher::local(18)
            .run(|world| check(&world, &axes, op, 7, &[Replicate]))
            .unwrap();
    }
}

#[test]
fn what_is_not_a_number_is_never_lost() {
    for op in [ReduceOp::Max, ReduceOp::Min] {
        // On any rank, and also if a share of the elements is reduced by another rank.
        for (owner, elements) in [
            (0, 3),
            (1, 3),
            (2, 3),
            (0, 20_000),
            (1, 20_000),
            (2, 20_000),
        ] {
            let program = |world: World| {
                let mesh = world.mesh([("x", 3)])?;
                let mut values = vec![world.rank() as f32; elements];
                if world.rank() == owner {
                    values[1] = f32::NAN;
                }
                let leaf =
                    Tensor::<1>::from_floats(values.as_slice(), world.device()).require_grad();
                for to in [Replicate, Shard(0)] {
                    let layout = Layout::new(mesh.shape(), &[elements], &[Partial(op)])?;
                    let y =
                        ShardTensor::from_local(leaf.clone(), &mesh, &layout)?.redistribute(&[to]);
                    let whole: Vec<f32> = y.full_tensor().into_data().iter().collect();
                    assert!(whole[1].is_nan(), "{op:?} {to} of rank {owner}");
                    assert!(whole.iter().filter(|value| value.is_nan()).count() == 1);
                    let gradient = leaf
                        .grad(&y.local().clone().sum().backward())
                        .expect("a gradient");
                    let gradient: Vec<f32> = gradient.into_data().iter().collect();
                    assert_eq!(gradient[1], f32::from(world.rank() == owner), "{op:?} {to}");
                }
                Ok(())
            };
            Launcher::local(3).run(program).unwrap();
        }
    }
}

#[test]
fn the_gradient_of_a_product_needs_no_quotient() {
    // The product of all factors is infinite, zero or not a number; the product of the other
    // factors need not be.
    Launcher::local(3)
        .run(|world| {
            let mesh = world.mesh([("x", 3)])?;
            let layout = Layout::new(mesh.shape(), &[4], &[Partial(ReduceOp::Product)])?;
            let factors = [
                [1e30, 1e-30, f32::INFINITY, 0.0],
                [1e30, 1e-30, 0.0, 3.0],
                [2.0, 2.0, 5.0, 0.0],
            ];
            let own =
                Tensor::<1>::from_floats(factors[world.rank()], world.device()).require_grad();
            let y = ShardTensor::from_local(own.clone(), &mesh, &layout)?.resolve();
            let gradient = own
                .grad(&y.local().clone().sum().backward())
                .expect("a gradient");
            let expected = [
                [2e30, 2e-30, 0.0, 0.0],
                [2e30, 2e-30, f32::INFINITY, 0.0],
                [f32::INFINITY, 0.0, f32::NAN, 0.0],
            ];
            let found: Vec<f32> = gradient.into_data().iter().collect();
            for (found, expected) in found.iter().zip(expected[world.rank()]) {
                let near = (found - expected).abs() <= 1e-6 * expected.abs();
                let same = *found == expected || (found.is_nan() && expected.is_nan());
                assert!(near || same, "{found} for {expected}");
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn half_precision_is_reduced_too() {
    Launcher::local(3)
        .run(|world| {
            let mesh = world.mesh([("x", 3)])?;
            for op in OPS {
                let values = contribution(world.rank(), 40);
                let own = Tensor::<1>::from_floats(values.as_slice(), world.device());
                let own = own.cast(DType::F16);
                let layout = Layout::new(mesh.shape(), &[40], &[Partial(op)])?;
                let y = ShardTensor::from_local(own, &mesh, &layout)?.resolve();
                assert_eq!(y.local().dtype(), DType::F16);
                let found: Vec<f32> = y.local().to_data().iter().collect();
                let all = [0, 1, 2].map(|rank| contribution(rank, 40));
                for (i, found) in found.iter().enumerate() {
                    let (value, _) = expected(op, &all.each_ref().map(|values| values[i]), 0.0);
                    assert_eq!(*found, value, "{op:?}");
                }
            }
            Ok(())
        })
        .unwrap();
}

/// Every element travels as often as in a sum: twice for an all-reduce, once for a reduce-scatter,
/// never to all ranks.
#[test]
fn nothing_is_gathered() {
    let elements = 30_000;
    let sent = |op: ReduceOp, to: Placement| -> Result<Vec<u64>> {
        Launcher::local(4).collect(|world| {
            let mesh = world.mesh([("x", 4)])?;
            let layout = Layout::new(mesh.shape(), &[elements], &[Partial(op)])?;
            let own = Tensor::<1>::ones([elements], world.device()) * (world.rank() + 1) as f64;
            let x = ShardTensor::from_local(own, &mesh, &layout)?;
            let before = world.comm_stats();
            x.redistribute(&[to]);
            let sent = world.comm_stats().since(&before);
            Ok(sent.of(Traffic::Reduce).bytes + sent.of(Traffic::Redistribute).bytes)
        })
    };
    for to in [Replicate, Shard(0)] {
        let of_sum = sent(ReduceOp::Sum, to).unwrap();
        let share = (elements * 3 / 4 * size_of::<f32>()) as u64;
        assert_eq!(of_sum, [share * if to == Replicate { 2 } else { 1 }; 4]);
        for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Product] {
            assert_eq!(sent(op, to).unwrap(), of_sum, "{op:?} → {to}");
        }
    }
}

/// 256 + 1 is 256 with eight bits of precision; the sum of all four rounds to 260.
#[test]
fn sums_of_half_precision_are_rounded_once() {
    let run = Launcher::local(4).run(|world| {
        let mesh = world.mesh([("a", 4)])?;
        let value = if world.rank() == 0 { 256.0 } else { 1.0 };
        let whole = |placement: Placement, value: f32| {
            let layout = Layout::new(mesh.shape(), &[8], &[placement])?;
            let local = Tensor::<1>::full([8], value, (world.device(), DType::BF16));
            Ok::<_, Error>(ShardTensor::from_parts(local, layout, mesh.clone()))
        };
        for to in [Replicate, Shard(0)] {
            let sum = whole(Partial(ReduceOp::Sum), value)?.redistribute(&[to]);
            let sums = sum.local().clone().into_data();
            assert!(sums.iter::<f32>().all(|sum| sum == 260.0), "{to}: {sums}");
        }
        // In the backward pass of `Shard` → `Fan`.
        let x = ShardTensor::<1>::ones([8], &mesh, &[Shard(0)])?.cast(FloatDType::BF16);
        let x = x.require_grad();
        let y = x.clone().redistribute(&[Fan]);
        let factor = y.local().clone().full_like(value);
        let loss = ShardTensor::from_parts(
            (y.local().clone() * factor).sum(),
            Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Sum)])?,
            mesh.clone(),
        );
        let gradient = x.grad(&loss.backward()).expect("a gradient");
        let gradient = gradient.local().clone().into_data();
        assert!(gradient.iter::<f32>().all(|sum| sum == 260.0), "{gradient}");
        Ok(())
    });
    run.unwrap();
}
