//! Helpers of tests.

use burn::tensor::{DType, Device, Tensor, TensorData};
use halocline_core::{DeviceMesh, Placement, Replicate, Result, Shard, ShardTensor};

/// Distributes a tensor over a mesh. If its first dim has one cell, that dim stays whole.
pub(crate) fn distributed<const D: usize>(
    data: TensorData,
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<ShardTensor<D>> {
    let whole = Tensor::<D>::from_data(data, &mesh.device().clone().inner());
    let is_single = whole.dims()[0] == 1;
    let placements = placements.iter().map(|placement| match placement {
        Shard(0) if is_single => Replicate,
        other => *other,
    });
    let placements: Vec<Placement> = placements.collect();
    ShardTensor::distribute(whole, mesh, &placements)
}

/// Checks every element of the gradients of a scalar by its central difference with this step, in
/// f64.
pub(crate) fn check_gradients<const D: usize, const N: usize>(
    inputs: [TensorData; N],
    step: f64,
    scalar: impl Fn([Tensor<D>; N]) -> Tensor<1>,
) {
    let device = Device::default().autodiff();
    let as_leaf = |data: &TensorData| {
        let whole = Tensor::<D>::from_data(data.clone(), (&device, DType::F64));
        whole.require_grad()
    };
    let leaves = inputs.each_ref().map(as_leaf);
    let y = scalar(leaves.clone());
    assert_eq!(y.dtype(), DType::F64);
    let gradients = y.backward();
    for (input, leaf) in leaves.iter().enumerate() {
        let gradient = leaf.grad(&gradients).expect("a gradient");
        let gradient: Vec<f64> = gradient.into_data().iter().collect();
        let largest = gradient.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
        assert!(largest > 0.0, "input {input}: a gradient of zero");
        for (cell, found) in gradient.into_iter().enumerate() {
            let moved = |step: f64| {
                let mut values: Vec<f64> = inputs[input].iter().collect();
                values[cell] += step;
                let mut inputs = inputs.clone();
                inputs[input] = TensorData::new(values, leaf.dims());
                scalar(inputs.each_ref().map(as_leaf)).into_scalar::<f64>()
            };
            let expected = (moved(step) - moved(-step)) / (2.0 * step);
            let off = (found - expected).abs() / largest;
            let place = format!("input {input}, cell {cell}");
            assert!(off < 1e-6, "{place}: {found} for {expected}");
        }
    }
}
