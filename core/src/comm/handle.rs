//! Tensors on a GPU that are handed from one thread of this process to another.
//!
//! A fused tensor belongs to the operations of its thread, which do not include the later
//! operations of other threads. Therefore its memory is handed over, once all kernels that compute
//! it have been submitted to the device. All threads share one stream of the device, so that it
//! runs kernels in the order of submission, and memory with several handles is not updated in
//! place. Nothing is copied, and no thread waits for the device.

use std::sync::OnceLock;

use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::Shape;
use burn_cubecl::cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

use crate::cube::Memory;

/// Makes devices use one stream for all threads of this process; returns whether they do.
///
/// By default, CubeCL has one stream per thread. One thread may then write to memory that another
/// has released before the other's kernels have read it; on wgpu this has produced wrong sums.
pub(crate) fn one_stream() -> bool {
    static ONE: OnceLock<bool> = OnceLock::new();
    *ONE.get_or_init(|| {
        let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
        config.streaming.max_streams = 1;
        // Fails if the program has already used a GPU.
        CubeClRuntimeConfig::try_set(config)
            || CubeClRuntimeConfig::get().streaming.max_streams == 1
    })
}

/// Tensor in flight.
pub(super) enum Handle {
    /// A tensor with its memory.
    Memory(Memory),
    /// A tensor without elements.
    Empty(DispatchTensor),
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
        Self::Memory(Memory::of(tensor))
    }

    /// The shape.
    pub(super) fn shape(&self) -> Shape {
        match self {
            Self::Memory(memory) => memory.shape.clone(),
            Self::Empty(tensor) => tensor.shape(),
        }
    }

    /// Makes the tensor, owned by the calling thread.
    pub(super) fn into_tensor(self) -> DispatchTensor {
        match self {
            Self::Empty(tensor) => tensor,
            Self::Memory(memory) => memory.into_tensor(),
        }
    }
}
