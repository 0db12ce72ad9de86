//! Tensors of a GPU that go from one thread of this process to another.
//!
//! A fused tensor belongs to the operations of its thread, which do not know what other threads are yet to do with it. So
//! its memory is handed over, once the device has been given all that computes it. The device has one stream for all threads,
//! so that it does everything in the order in which it is given, and memory that several have a handle to is not updated in
//! place. Nothing is copied, and nobody waits for the device.

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

/// Has a device do all that the threads of this process give it in one order; whether it will.
///
/// CubeCL would have a stream for each thread. One may then write to memory that another has let go of before that one's
/// kernels have read it: wrong sums, on wgpu.
pub(crate) fn one_stream() -> bool {
    static ONE: OnceLock<bool> = OnceLock::new();
    *ONE.get_or_init(|| {
        let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
        config.streaming.max_streams = 1;
        // Not if the program has used a GPU before.
        CubeClRuntimeConfig::try_set(config)
            || CubeClRuntimeConfig::get().streaming.max_streams == 1
    })
}

/// Whether a device is CubeCL's.
pub(crate) fn is_on_gpu(device: &Device) -> bool {
    matches!(
        device.clone().inner().as_dispatch(),
        DispatchDevice::Cube(_)
    )
}

type Fused = FusionTensor<FusionCubeRuntime>;

/// A tensor on its way.
pub(super) enum Handle {
    /// With its memory.
    Memory(Memory),
    /// Nothing is to be read.
    Empty(DispatchTensor),
}

/// The memory of a tensor, and what the tensor is made from again.
pub(super) struct Memory {
    memory: Box<CubeTensor>,
    shape: Shape,
    dtype: DType,
    client: Client<FusionCubeRuntime>,
    kind: fn(Fused) -> BackendTensor<Cube>,
}

impl Handle {
    /// The memory of tensors that are on a GPU.
    ///
    /// # Errors
    /// Gives back tensors that are not.
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
        // A second handle, so that this rank's operations get to know that the tensor is dropped.
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
