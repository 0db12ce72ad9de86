//! Memory of tensors on CubeCL devices.
//!
//! burn fuses operators, so a tensor may not have been computed yet. Its memory is known once all
//! kernels that compute it have been submitted to the device, which runs them before later ones.

use burn::backend::{BackendTensor, Cube, DispatchDevice, DispatchKindConversion, DispatchTensor};
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::stream::StreamId;
use burn_fusion::{Client, FusionTensor, NoOp};
use burn_ir::{InitOperationIr, OperationIr};

use crate::layout::Layout;

type Fused = FusionTensor<FusionCubeRuntime>;

/// Whether a device is a CubeCL device.
pub fn is_on_gpu(device: &Device) -> bool {
    matches!(
        device.clone().inner().as_dispatch(),
        DispatchDevice::Cube(_)
    )
}

/// Refuses layouts with which operators could be lost.
///
/// burn 0.22.1 fuses an operator on tensors with one cell in a dim into the kernel of an operator
/// on more cells, to which these tensors are broadcast. An operator on zero cells has no kernel, so
/// the fused operators are not computed either.
///
/// # Panics
/// Panics on every rank if some rank holds no cells, unless burn does not fuse.
pub(crate) fn refuse_lost_operators(layout: &Layout, device: &Device) {
    let fuses = || {
        let config = burn::runtime_config();
        config.fusion().beam_search.max_explorations != Some(0)
    };
    assert!(
        !layout.has_empty_shard() || !is_on_gpu(device) || !fuses(),
        "{layout}: some ranks hold no cells, beside which burn 0.22.1 loses operators that it fuses on GPUs; set \
         BURN_FUSION_MAX_EXPLORATIONS=0, so that it does not fuse, or use fewer ranks or other extents"
    );
}

/// Memory of a tensor, and the data needed to make the tensor again.
pub(crate) struct Memory {
    pub(crate) memory: Box<CubeTensor>,
    pub(crate) shape: Shape,
    dtype: DType,
    client: Client<FusionCubeRuntime>,
    kind: fn(Fused) -> BackendTensor<Cube>,
}

impl Memory {
    /// Resolves the memory of a CubeCL tensor that has elements and no gradients.
    pub(crate) fn of(tensor: DispatchTensor) -> Self {
        type Resolve = fn(&Client<FusionCubeRuntime>, Fused) -> CubeTensor;
        let tensor = DispatchTensor::try_into_backend(tensor);
        let (fused, kind, resolve): (_, fn(_) -> _, Resolve) = match tensor {
            Ok(BackendTensor::<Cube>::Float(fused)) => (
                fused,
                BackendTensor::Float,
                Client::resolve_tensor_float::<CubeBackend>,
            ),
            Ok(BackendTensor::Int(fused)) => (
                fused,
                BackendTensor::Int,
                Client::resolve_tensor_int::<CubeBackend>,
            ),
            Ok(BackendTensor::Bool(fused)) => (
                fused,
                BackendTensor::Bool,
                Client::resolve_tensor_bool::<CubeBackend>,
            ),
            other => unreachable!("numbers without gradients are sent, not {:?}", other.err()),
        };
        let (client, shape, dtype) = (fused.client.clone(), fused.shape.clone(), fused.dtype);
        // A clone, so that the drop of the tensor is one of this rank's operations.
        let memory = Box::new(resolve(&client, fused.clone()));
        Self {
            memory,
            shape,
            dtype,
            client,
            kind,
        }
    }

    /// Makes the tensor again, owned by the calling thread.
    pub(crate) fn into_tensor(self) -> DispatchTensor {
        let Self {
            memory,
            shape,
            dtype,
            client,
            kind,
        } = self;
        let known = || client.register_tensor_handle((*memory).into());
        let operation = OperationIr::Init(InitOperationIr::create(shape, dtype, known));
        let here = StreamId::current();
        let tensors = client.register(here, operation, NoOp::<CubeBackend>::new());
        let tensor = tensors.into_iter().next().expect("one tensor is made");
        DispatchTensor::from_backend(kind(tensor))
    }
}

/// Passes the memory of tensors, in row-major order, to CubeCL kernels, and makes float tensors of
/// the results.
///
/// # Panics
/// Panics for tensors of another backend, with gradients, or without elements.
pub fn with_memory<const N: usize, const M: usize>(
    tensors: [DispatchTensor; N],
    kernels: impl FnOnce([CubeTensor; N]) -> [CubeTensor; M],
) -> [DispatchTensor; M] {
    let tensors = tensors.map(Memory::of);
    let client = tensors[0].client.clone();
    let results = kernels(tensors.map(|tensor| into_contiguous(*tensor.memory)));
    results.map(|memory| {
        let result = Memory {
            shape: Shape::from(memory.meta.shape().to_vec()),
            dtype: memory.dtype,
            memory: Box::new(memory),
            client: client.clone(),
            kind: BackendTensor::Float,
        };
        result.into_tensor()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Launcher, Shard, ShardTensor};

    #[test]
    fn operators_that_would_be_lost_are_refused() {
        let on_two_ranks = |cells: usize| {
            Launcher::local(2).collect(|world| {
                let mesh = world.mesh([("x", 2)])?;
                ShardTensor::<1>::zeros([cells], &mesh, &[Shard(0)])
            })
        };
        assert!(on_two_ranks(2).is_ok());
        let refused = is_on_gpu(&Device::default());
        assert_eq!(on_two_ranks(1).is_err(), refused);
    }
}
