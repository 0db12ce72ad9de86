//! Tensors of a GPU that are handed from one thread of this process to another.
//!
//! A fused tensor belongs to the operations of its thread, which do not include the later
//! operations of other threads. So its memory is handed over, once all kernels that compute it have
//! been submitted to the device. The device has one stream for all threads, so that it runs kernels
//! in the order of submission, and memory with several handles is not updated in place. Nothing is
//! copied, and no thread waits for the device.

use std::sync::OnceLock;

use burn::backend::{
    BackendTensor, Cube, DispatchDevice, DispatchKindConversion, DispatchTensor, TensorMetadata,
};
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::stream::StreamId;
use burn_fusion::{Client, FusionTensor, NoOp};
use burn_ir::{InitOperationIr, OperationIr};

/// Makes devices use one stream for all threads of this process; returns whether they do.
///
/// By default CubeCL has a stream for each thread. One thread may then write to memory that another
/// has released before the other's kernels have read it: wrong sums, seen on wgpu.
pub(crate) fn one_stream() -> bool {
    static ONE: OnceLock<bool> = OnceLock::new();
    *ONE.get_or_init(|| {
        let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
        config.streaming.max_streams = 1;
        // Fails if the program has used a GPU before.
        CubeClRuntimeConfig::try_set(config)
            || CubeClRuntimeConfig::get().streaming.max_streams == 1
    })
}

/// Whether a device is one of CubeCL.
pub(crate) fn is_on_gpu(device: &Device) -> bool {
    matches!(
        device.clone().inner().as_dispatch(),
        DispatchDevice::Cube(_)
    )
}

type Fused = FusionTensor<FusionCubeRuntime>;

/// Tensor in flight.
pub(super) enum Handle {
    /// With its memory.
    Memory(Memory),
    /// Without elements.
    Empty(DispatchTensor),
}

/// Memory of a tensor, and the data to make the tensor again.
pub(super) struct Memory {
    memory: Box<CubeTensor>,
    shape: Shape,
    dtype: DType,
    client: Client<FusionCubeRuntime>,
    kind: fn(Fused) -> BackendTensor<Cube>,
}

impl Handle {
    /// Makes handles of tensors on a GPU.
    ///
    /// # Errors
    /// Returns the tensors if they are not all on a GPU.
    pub(super) fn all(tensors: Vec<DispatchTensor>) -> Result<Vec<Self>, Vec<DispatchTensor>> {
        let on_gpu = |tensor: &DispatchTensor| matches!(tensor.device(), DispatchDevice::Cube(_));
        if tensors.is_empty() || !tensors.iter().all(on_gpu) {
            return Err(tensors);
        }
        Ok(tensors.into_iter().map(Self::of).collect())
    }

    fn of(tensor: DispatchTensor) -> Self {
        if tensor.shape().num_elements() == 0 {
            return Self::Empty(tensor);
        }
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
        Self::Memory(Memory {
            memory,
            shape,
            dtype,
            client,
            kind,
        })
    }

    /// The shape.
    pub(super) fn shape(&self) -> Shape {
        match self {
            Self::Memory(memory) => memory.shape.clone(),
            Self::Empty(tensor) => tensor.shape(),
        }
    }

    /// The tensor, as one of the calling thread.
    pub(super) fn into_tensor(self) -> DispatchTensor {
        let Memory {
            memory,
            shape,
            dtype,
            client,
            kind,
        } = match self {
            Self::Empty(tensor) => return tensor,
            Self::Memory(memory) => memory,
        };
        let known = || client.register_tensor_handle((*memory).into());
        let operation = OperationIr::Init(InitOperationIr::create(shape, dtype, known));
        let here = StreamId::current();
        let tensors = client.register(here, operation, NoOp::<CubeBackend>::new());
        let tensor = tensors.into_iter().next().expect("one tensor is made");
        DispatchTensor::from_backend(kind(tensor))
    }
}
