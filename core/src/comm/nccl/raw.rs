//! CUDA driver and NCCL calls of the engine.

use std::any::Any;
use std::ffi::{CStr, c_int, c_void};
use std::fmt::Display;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, DispatchTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::Client;
use cubecl_runtime::runtime::Runtime;
use cudarc::driver::result::{DriverError, ctx, device, event, primary_ctx, stream};
use cudarc::driver::sys as cuda;
use cudarc::nccl::result::{self as nccl, NcclError};
use cudarc::nccl::sys as nccl_sys;

use super::SWITCH;
use crate::dispatch::from_dispatch;
use crate::{Error, Result};

/// The reason why NCCL cannot be used in this process, which has a driver; empty if it can. NCCL
/// messages require context events, which exist since CUDA 12.5.
pub(super) fn obstacle() -> String {
    let mut version = 0;
    // SAFETY: this only asks whether the library can be loaded.
    if unsafe { !nccl_sys::is_culib_present() } {
        return "the NCCL library was not found under the name libnccl.so (install libnccl-dev, or make a link of this \
                name to libnccl.so.2 in a folder of LD_LIBRARY_PATH)"
            .into();
    }
    // SAFETY: the driver is loaded, and writes a number.
    let code = unsafe { cuda::cuDriverGetVersion(&mut version) };
    match code.result() {
        Ok(()) if version >= 12050 => String::new(),
        Ok(()) => "the driver is older than CUDA 12.5".into(),
        Err(error) => error.to_string(),
    }
}

/// The identity of a GPU: the host's boot id and the GPU's address on the host. A part of a GPU has
/// the identity of the whole, because NCCL requires a whole GPU for each rank.
///
/// # Errors
/// There is no driver.
pub(super) fn identity(index: usize) -> Result<Vec<u8>> {
    const ROOM: usize = 32;
    // SAFETY: this only asks whether the library can be loaded.
    if unsafe { !cuda::is_culib_present() } {
        return Err(Error::Engine("no CUDA driver was found".into()));
    }
    cudarc::driver::result::init().map_err(of_driver)?;
    let mut place = [0_u8; ROOM];
    let device = device::get(index as c_int).map_err(of_driver)?;
    // SAFETY: the driver writes at most this many bytes.
    let code =
        unsafe { cuda::cuDeviceGetPCIBusId(place.as_mut_ptr().cast(), ROOM as c_int, device) };
    code.result().map_err(of_driver)?;
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id")?;
    Ok([&boot[..], &place].concat())
}

/// The id by which the ranks of a job find each other.
pub(super) fn unique_id() -> Result<Vec<u8>> {
    let id = nccl::get_uniqueid().map_err(of_nccl)?;
    Ok(id.internal.map(|byte| byte as u8).to_vec())
}

fn failed(library: &str, error: impl Display) -> Error {
    Error::Engine(format!(
        "{library}: {error}; {SWITCH}=0 has messages between GPUs go through the host, NCCL_DEBUG=INFO tells more"
    ))
}

fn of_driver(error: DriverError) -> Error {
    failed("CUDA", format!("{:?}", error.0))
}

fn of_nccl(error: NcclError) -> Error {
    // SAFETY: NCCL returns a zero-terminated text about its last error in this process.
    let text = unsafe { CStr::from_ptr(nccl_sys::ncclGetLastError(std::ptr::null_mut())) };
    failed("NCCL", format!("{:?}, {}", error.0, text.to_string_lossy()))
}

/// Event of the CUDA driver.
#[derive(Debug)]
pub(super) struct Event(cuda::CUevent);

// SAFETY: handles of the driver may be used by any thread.
unsafe impl Send for Event {}
// SAFETY: as above, by several threads at a time.
unsafe impl Sync for Event {}

impl Event {
    /// Makes an event of the current context.
    fn new() -> Result<Self> {
        let event = event::create(cuda::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        event.map(Self).map_err(of_driver)
    }

    /// Whether the work before the event is done. A failure of the device is reported by its next
    /// use.
    pub(super) fn is_over(&self) -> bool {
        // SAFETY: the event is valid.
        let state = unsafe { event::query(self.0) };
        state != Err(DriverError(cuda::CUresult::CUDA_ERROR_NOT_READY))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is valid; the driver frees it when nothing waits for it any more.
        let _ = unsafe { event::destroy(self.0) };
    }
}

/// Driver context of a GPU.
#[derive(Clone, Copy)]
pub(super) struct Context(cuda::CUcontext);

// SAFETY: a driver handle, which any thread may use.
unsafe impl Send for Context {}

impl Context {
    /// Makes this the current context of the thread.
    pub(super) fn enter(&self) -> Result<()> {
        // SAFETY: the context is valid; it is never released.
        unsafe { ctx::set_current(self.0) }.map_err(of_driver)
    }
}

/// NCCL communicator.
#[derive(Clone, Copy)]
pub(super) struct Comm(nccl_sys::ncclComm_t);

// SAFETY: a handle; calls that must not run at the same time are behind the lock around `Gpu`.
unsafe impl Send for Comm {}

impl Comm {
    /// An NCCL error since messages were submitted, for example because another rank's process has
    /// died.
    pub(super) fn error(&self) -> Option<Error> {
        let mut state = nccl_sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is valid, and may be queried at any time.
        let asked = unsafe { nccl_sys::ncclCommGetAsyncError(self.0, &mut state) };
        let error = asked.result().and_then(|_| state.result()).err();
        error.map(of_nccl)
    }
}

/// Handles of NCCL and of the driver for this rank's GPU.
pub(super) struct Gpu {
    comm: Comm,
    context: Context,
    /// The stream of NCCL.
    stream: cuda::CUstream,
}

// SAFETY: handles of the driver and of NCCL may be used by any thread, one at a time, which the
// lock around them ensures.
unsafe impl Send for Gpu {}

impl Gpu {
    /// Joins all ranks. Collective: every rank calls it.
    pub(super) fn open(index: usize, id: &[u8], rank: usize, size: usize) -> Result<Self> {
        let mut unique = nccl_sys::ncclUniqueId { internal: [0; 128] };
        for (target, byte) in unique.internal.iter_mut().zip(id) {
            *target = *byte as _;
        }
        cudarc::driver::result::init().map_err(of_driver)?;
        let device = device::get(index as c_int).map_err(of_driver)?;
        // SAFETY: the device exists. The primary context is shared with CubeCL and never released.
        let context = Context(unsafe { primary_ctx::retain(device) }.map_err(of_driver)?);
        context.enter()?;
        let stream = stream::create(stream::StreamKind::NonBlocking).map_err(of_driver)?;
        let mut comm = MaybeUninit::uninit();
        // SAFETY: `comm` is read only if the call that writes it succeeds.
        let comm = unsafe {
            nccl::comm_init_rank(comm.as_mut_ptr(), size as c_int, unique, rank as c_int)
                .map_err(of_nccl)?;
            Comm(comm.assume_init())
        };
        Ok(Self {
            comm,
            context,
            stream,
        })
    }

    pub(super) fn comm(&self) -> Comm {
        self.comm
    }

    pub(super) fn context(&self) -> Context {
        self.context
    }

    /// Submits all messages of a batch, and returns them with their memory. The first message
    /// between two ranks waits for both.
    pub(super) fn post(&self, messages: Vec<Message>) -> Result<Posted> {
        // If this fails, NCCL may still use the memory, so it is never freed.
        let messages = ManuallyDrop::new(messages);
        self.context.enter()?;
        // SAFETY: context, stream and communicator live as long as this; the events are of this
        // context; the buffers have the sizes given and are kept until the context has been made to
        // wait for `done`.
        unsafe {
            let (ready, done) = (Event::new()?, Event::new()?);
            let code = cuda::cuCtxRecordEvent(self.context.0, ready.0);
            code.result().map_err(of_driver)?;
            let flags = cuda::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            stream::wait_event(self.stream, ready.0, flags).map_err(of_driver)?;
            nccl::group_start().map_err(of_nccl)?;
            let mut messages_in = messages.iter();
            let given = messages_in.try_for_each(|message| self.give(message));
            // Called even after an error; otherwise the group would stay open on this thread.
            let ended = nccl::group_end();
            given.and(ended).map_err(of_nccl)?;
            event::record(done.0, self.stream).map_err(of_driver)?;
            Ok(Posted {
                ready: Arc::new(ready),
                done: Arc::new(done),
                messages: ManuallyDrop::into_inner(messages),
            })
        }
    }

    /// Adds a message to the open group.
    ///
    /// # Safety
    /// The buffer must be kept until the message is done.
    unsafe fn give(&self, message: &Message) -> Result<(), NcclError> {
        let Message { peer, way, buffer } = message;
        let (memory, peer) = (buffer.address as *mut c_void, *peer as c_int);
        let (comm, stream) = (self.comm.0, self.stream.cast());
        let bytes = nccl_sys::ncclDataType_t::ncclUint8;
        // SAFETY: guaranteed by the caller; the buffer has this many bytes.
        let given = unsafe {
            match way {
                Way::Out => nccl::send(memory, buffer.bytes, bytes, peer, comm, stream),
                Way::In => nccl::recv(memory, buffer.bytes, bytes, peer, comm, stream),
            }
        };
        given.map(|_| ())
    }

    /// Makes work submitted to the context from now on wait for an event.
    pub(super) fn wait_for(&self, event: &Event) -> Result<()> {
        self.context.enter()?;
        // SAFETY: context and event are valid.
        let code = unsafe { cuda::cuCtxWaitEvent(self.context.0, event.0) };
        code.result().map_err(of_driver)
    }
}

/// Device memory in a batch.
pub(super) struct Buffer {
    address: u64,
    bytes: usize,
    /// The operations of the thread, which are submitted to CubeCL in groups.
    operations: Client<FusionCubeRuntime>,
    tensor: CubeTensor,
    /// Keeps the memory at its address.
    _resource: Box<dyn Any + Send>,
}

impl Buffer {
    /// Makes a buffer of the contiguous elements of a tensor, and submits their computation to the
    /// device.
    pub(super) fn of(tensor: DispatchTensor) -> Result<Self> {
        let fused: FloatTensor<Cube> = from_dispatch::<Cube>(tensor)?;
        let client = fused.client.clone();
        let tensor: CubeTensor = into_contiguous(client.resolve_tensor_float::<CubeBackend>(fused));
        let bytes = tensor.meta.num_elements() * tensor.dtype.size();
        let handle = tensor.handle.clone();
        let resource = tensor
            .client
            .get_resource::<<CudaRuntime as Runtime>::Server>(handle);
        let resource = resource.map_err(|error| failed("CubeCL", format!("{error:?}")))?;
        Ok(Self {
            address: resource.resource().ptr,
            bytes,
            operations: client,
            tensor,
            _resource: Box::new(resource),
        })
    }
}

#[derive(Clone, Copy)]
pub(super) enum Way {
    Out,
    In,
}

pub(super) struct Message {
    pub(super) peer: usize,
    pub(super) way: Way,
    pub(super) buffer: Buffer,
}

/// Messages submitted to NCCL, with their memory, which must not be reused before they are done.
pub(super) struct Posted {
    /// The end of the work submitted to the context before the messages, at which they start.
    pub(super) ready: Arc<Event>,
    pub(super) done: Arc<Event>,
    messages: Vec<Message>,
}

impl Posted {
    /// Submits all work of this thread to the device: operations that wait for fusion, and kernels
    /// on their way to CubeCL's thread.
    pub(super) fn give_all(&self) -> Result<()> {
        let Some(Message { buffer, .. }) = self.messages.first() else {
            return Ok(());
        };
        let given = buffer.operations.try_sync(|| ());
        given.map_err(|error| failed("CubeCL", format!("{error:?}")))?;
        let flushed = buffer.tensor.client.flush();
        flushed.map_err(|error| failed("CubeCL", format!("{error:?}")))
    }
}
