//! Tests that an operator on shards returns the results of one device.

use burn::tensor::{Gradients, Tensor, TensorData};
use halocline_core::{
    DeviceMesh, Distribution, Fan, IndexBox, Launcher, Partial, RandomKey, ReduceOp, Result,
    ShardTensor,
};

use crate::field::{Field, WithDims};
use crate::golden::{Arguments, Golden};
use crate::reduce::ReduceField;
use crate::sharding::sharded;
pub use crate::sharding::{Sharding, shardings};

/// An operator under test, written once for both kinds of tensor: maps inputs and parameters to a
/// result.
pub trait Operator<const D: usize, const E: usize>: Sync {
    /// Applies the operator.
    fn apply<X: Field<D>>(&self, inputs: Vec<X>, parameters: Vec<Tensor<D>>) -> WithDims<X, E>;
}

/// Checks that an operator on shards has the values and gradients of one device, and that each
/// gradient has the layout of its tensor.
///
/// Inputs, parameters and the cotangent are random with a fixed seed. Every sharding of
/// [`shardings`] over `dims` is tried on up to four ranks. For operands that differ in kind or
/// number of dims, and for other dtypes, use [`check_golden`].
///
/// # Panics
/// Panics with the sharding and the largest difference if a value or gradient differs by more than
/// `tolerance` times the largest magnitude, or if the layout of a gradient differs from that of its
/// tensor.
pub fn check_op<const D: usize, const E: usize>(
    operator: &impl Operator<D, E>,
    inputs: &[[usize; D]],
    parameters: &[[usize; D]],
    dims: &[usize],
    tolerance: f64,
) {
    let all = |shapes: &[[usize; D]], name: &str| -> Vec<Tensor<D>> {
        let shapes = shapes.iter().enumerate();
        shapes.map(|(i, shape)| random(*shape, name, i)).collect()
    };
    // On a rank, because a Launcher must come before anything that uses a GPU.
    let expected = Launcher::local(1)
        .collect(|_| {
            let (inputs, parameters) = (all(inputs, "input"), all(parameters, "parameter"));
            Ok(on_one_device(operator, &inputs, &parameters))
        })
        .unwrap_or_else(|error| panic!("on one device: {error}"))
        .remove(0);
    for sharding in shardings(&inputs[0], dims, 4) {
        let results = Launcher::local(sharding.ranks())
            .collect(|world| {
                let mesh = world.mesh_of(&sharding.axes)?;
                let (inputs, parameters) = (all(inputs, "input"), all(parameters, "parameter"));
                on_mesh(operator, &inputs, &parameters, &mesh, &sharding)
            })
            .unwrap_or_else(|error| panic!("{sharding:?}: {error}"));
        for (rank, found) in results.iter().enumerate() {
            let place = format!("{sharding:?}, rank {rank}");
            compare(found, &expected, tolerance, &place);
        }
    }
}

/// Checks that an operator of the registry returns the same value and gradients on every sharding
/// over these numbers of ranks as on one rank, whatever the kinds and numbers of dims of its inputs
/// and parameters.
///
/// The cotangent is random with a fixed seed and has the dtype of the first input.
///
/// # Panics
/// Panics with the sharding if a value or gradient differs by more than `tolerance` times the
/// largest magnitude.
pub fn check_golden(golden: &Golden, arguments: &Arguments, ranks: &[usize], tolerance: f64) {
    let dtype = arguments.inputs[0].1.dtype();
    let cotangent = |shape: &[usize]| normal(shape, "cotangent", 0).convert_dtype(dtype);
    let run = |sharding: &Sharding| {
        let found = Launcher::local(sharding.ranks()).collect(|world| {
            let mesh = world.mesh_of(&sharding.axes)?;
            golden.run_on(&mesh, sharding, arguments, cotangent)
        });
        found.unwrap_or_else(|error| panic!("{}, {sharding:?}: {error}", golden.name))
    };
    let one = &golden.shardings(arguments, &[1])[0];
    let (expected, expected_gradients) = run(one).remove(0);
    for sharding in golden.shardings(arguments, ranks) {
        for (found, gradients) in run(&sharding) {
            let place = format!("{}, {sharding:?}", golden.name);
            compare(&[found], std::slice::from_ref(&expected), tolerance, &place);
            assert_eq!(gradients.len(), expected_gradients.len(), "{place}");
            for ((name, found), (_, expected)) in gradients.iter().zip(&expected_gradients) {
                let place = format!("{place}: gradient of {name}");
                compare(found.as_slice(), expected.as_slice(), tolerance, &place);
            }
        }
    }
}

/// Computes an operator's value and the gradients of its inputs and parameters on shards of tensors
/// that are the same on all ranks. The cotangent is random with a fixed seed.
///
/// # Errors
/// A failure of the operator's communication.
///
/// # Panics
/// Panics if the layout of a gradient differs from that of its tensor.
pub fn on_mesh<const D: usize, const E: usize>(
    operator: &impl Operator<D, E>,
    inputs: &[Tensor<D>],
    parameters: &[Tensor<D>],
    mesh: &DeviceMesh,
    sharding: &Sharding,
) -> Result<Vec<TensorData>> {
    let shard = |whole: &Tensor<D>| -> Result<ShardTensor<D>> {
        let layout = sharding.layout(mesh, &whole.dims())?;
        let shard = ShardTensor::distribute(whole.clone().inner(), mesh, &layout)?;
        Ok(shard.require_grad())
    };
    let inputs: Vec<_> = inputs.iter().map(shard).collect::<Result<_>>()?;
    let parameters = leaves(parameters);
    let y = operator.apply(inputs.clone(), parameters.clone());
    let y = sharded(y.resolve());
    let loss = (y.clone() * cotangent_of(&y)?).sum();
    let gradients = loss.backward();
    let mut found = vec![y.full_tensor().into_data()];
    found.extend(inputs.iter().map(|input| gradient_of(input, &gradients)));
    for parameter in &parameters {
        let gradient = parameter.grad(&gradients);
        found.push(gradient.expect("a parameter has a gradient").into_data());
    }
    Ok(found)
}

/// Returns the random cotangent of a result, distributed as the result is.
pub(crate) fn cotangent_of<const D: usize>(y: &ShardTensor<D>) -> Result<ShardTensor<D>> {
    let cotangent = normal(&y.dims(), "cotangent", 0);
    let cotangent = Tensor::<D>::from_data(cotangent, &y.device().inner());
    let cotangent = cotangent.cast(y.local().dtype());
    ShardTensor::distribute(cotangent, y.mesh(), y.layout())
}

/// Returns the whole gradient of an input, which must have the layout of the input.
pub(crate) fn gradient_of<const D: usize>(
    input: &ShardTensor<D>,
    gradients: &Gradients,
) -> TensorData {
    let gradient = input.grad(gradients).expect("an input has a gradient");
    require_layout(&gradient, input);
    gradient.full_tensor().into_data()
}

/// Returns random values of which gradients are required, distributed over a mesh.
#[cfg(test)]
pub(crate) fn random_leaf<const D: usize>(
    shape: [usize; D],
    name: &str,
    mesh: &DeviceMesh,
    placements: &[halocline_core::Placement],
) -> Result<ShardTensor<D>> {
    let whole = Tensor::<D>::from_data(normal(&shape, name, 0), mesh.device());
    Ok(ShardTensor::distribute(whole, mesh, placements)?.require_grad())
}

/// Requires that the gradient of an input has the layout of the input, with partial sums where the
/// input fans out.
pub(crate) fn require_layout<const D: usize>(gradient: &ShardTensor<D>, input: &ShardTensor<D>) {
    let placements = input.layout().map_placements(|placement| match placement {
        Fan => Partial(ReduceOp::Sum),
        other => other,
    });
    let extents = input.layout().all_extents().to_vec();
    let expected = input.layout().derive(placements, extents);
    assert_eq!(*gradient.layout(), expected, "layout of a gradient");
}

/// Computes on one device the results that [`on_mesh`] must return.
pub fn on_one_device<const D: usize, const E: usize>(
    operator: &impl Operator<D, E>,
    inputs: &[Tensor<D>],
    parameters: &[Tensor<D>],
) -> Vec<TensorData> {
    let (inputs, parameters) = (leaves(inputs), leaves(parameters));
    let y = operator.apply(inputs.clone(), parameters.clone());
    let cotangent = random(y.dims(), "cotangent", 0).inner().cast(y.dtype());
    let gradients = (y.clone() * cotangent).sum().backward();
    let leaves = inputs.iter().chain(&parameters);
    let gradients = leaves.map(|leaf| {
        let gradient = leaf.grad(&gradients);
        gradient.expect("a leaf has a gradient").into_data()
    });
    std::iter::once(y.inner().into_data())
        .chain(gradients)
        .collect()
}

/// Compares results of [`on_mesh`] with those of [`on_one_device`].
///
/// # Panics
/// Panics with `place` if a value or gradient differs by more than `tolerance` times the largest
/// magnitude.
pub fn compare(found: &[TensorData], expected: &[TensorData], tolerance: f64, place: &str) {
    assert_eq!(found.len(), expected.len());
    for (which, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = difference(found, expected);
        assert!(
            off <= tolerance,
            "{place}: result {which} (0 = value, then gradients) differs by {off:e} of its largest magnitude"
        );
    }
}

fn leaves<const D: usize>(tensors: &[Tensor<D>]) -> Vec<Tensor<D>> {
    let leaf = |tensor: &Tensor<D>| tensor.clone().autodiff().detach().require_grad();
    tensors.iter().map(leaf).collect()
}

/// Returns normal random values with a fixed seed; they depend on the name and the index.
pub fn random<const D: usize>(shape: [usize; D], name: &str, index: usize) -> Tensor<D> {
    let device = burn::tensor::Device::default().autodiff();
    Tensor::from_data(normal(&shape, name, index), &device)
}

/// Returns the values of [`random`] as data.
pub fn normal(shape: &[usize], name: &str, index: usize) -> TensorData {
    let normal = Distribution::Normal(0.0, 1.0);
    let values = RandomKey::new(0, (name, index)).fill(normal, shape, &IndexBox::whole(shape));
    TensorData::new(values, shape.to_vec())
}

/// Returns the extents between cuts of a dim; the cuts may come in any order.
pub fn extents_between(mut cuts: Vec<usize>, size: usize) -> Vec<usize> {
    cuts.sort_unstable();
    cuts.push(size);
    let mut start = 0;
    let extents = cuts
        .into_iter()
        .map(|end| end - std::mem::replace(&mut start, end));
    extents.collect()
}

/// Returns the largest difference, relative to the largest expected magnitude.
pub fn difference(found: &TensorData, expected: &TensorData) -> f64 {
    assert_eq!(found.shape(), expected.shape(), "shapes differ");
    let values = |data: &TensorData| data.iter::<f64>().collect::<Vec<_>>();
    let (found, expected) = (values(found), values(expected));
    let scale = expected
        .iter()
        .fold(f64::MIN_POSITIVE, |max, value| max.max(value.abs()));
    let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    // NaN counts as an infinite difference.
    worst.fold(0.0, |max: f64, d| {
        if d.is_nan() {
            f64::INFINITY
        } else {
            max.max(d)
        }
    }) / scale
}

/// Configuration of a property test: `HALOCLINE_CASES` random cases, or `default` if it is not set.
#[cfg(test)]
pub(crate) fn cases(default: u32) -> proptest::prelude::ProptestConfig {
    use proptest::prelude::ProptestConfig;

    let cases = std::env::var("HALOCLINE_CASES").ok();
    let cases = cases.map_or(default, |cases| {
        cases.parse().expect("HALOCLINE_CASES: a number")
    });
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(cases)
    }
}
