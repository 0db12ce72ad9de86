//! The engine of jobs on several GPUs: cells travel from device memory to device memory, by NCCL.
//!
//! Another engine is beneath it, MPI or TCP, which carries what lies on the host and, for every message between GPUs, its
//! size: so a rank that has ended, is silent or in another operation is noticed when a batch is finished. What is not noticed
//! is a rank that is silent while NCCL itself connects two ranks, at their first message: that call waits for both.
//!
//! # Order
//! Nothing waits for a device. NCCL works on a stream of its own. Before a batch it waits for all that the context was given
//! before (an event of the context, `cuCtxRecordEvent`: CubeCL keeps its streams to itself), and what the context is given
//! after [`finish`](InFlight::finish) waits for the batch. Memory of a batch is kept until then.
//!
//! **Type-checked only**: this engine has not run yet.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};

use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{CubeDevice, tensor::CubeTensor};
use cubecl_runtime::runtime::Runtime;
use cudarc::driver::result::{ctx, device, event, primary_ctx, stream};
use cudarc::driver::sys as cuda;
use cudarc::nccl::result as nccl;
use cudarc::nccl::sys as nccl_sys;

use super::{
    Batch, Communicator, Counters, Expected, InFlight, Operation, Payload, Settings, collectives,
    within,
};
use crate::bridge::{from_dispatch, reshaped};
use crate::{Error, Result};

/// The switch that has messages between GPUs go through the host.
const SWITCH: &str = "HALOCLINE_NCCL";

/// NCCL between the GPUs of a job, over the engine that connects its processes.
pub(crate) struct Nccl {
    control: Arc<dyn Communicator>,
    /// Held while a group of messages is posted, whose calls belong together.
    gpu: Mutex<Gpu>,
    counters: Counters,
}

/// This rank's GPU as NCCL and the driver know it.
struct Gpu {
    comm: nccl_sys::ncclComm_t,
    context: cuda::CUcontext,
    /// Where NCCL works.
    stream: cuda::CUstream,
}

// SAFETY: handles of the driver and of NCCL may be used by any thread, one at a time, which the lock around them sees to.
unsafe impl Send for Gpu {}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nccl(over {:?})", self.control)
    }
}

/// NCCL over an engine, if every rank computes on a CUDA device of its own and has the library; else the engine itself.
///
/// # Errors
/// A failure of communication, or of NCCL.
pub(crate) fn over(control: Arc<dyn Communicator>, on: &Device) -> Result<Arc<dyn Communicator>> {
    let switched = crate::launch::switch(SWITCH);
    let index = cuda_index(on.clone().inner().as_dispatch());
    // SAFETY: this only asks whether the libraries can be loaded.
    let loads = || unsafe { nccl_sys::is_culib_present() && cuda::is_culib_present() };
    let gpu = match index {
        _ if switched == Some(false) => Err("it is switched off".to_string()),
        None => Err("the device is no CUDA device".into()),
        Some(_) if !loads() => Err("the NCCL library was not found".into()),
        Some(index) => identity(index),
    };
    // The GPU's identity, or why it cannot be.
    let told = match &gpu {
        Ok(identity) => [&[1], &identity[..]].concat(),
        Err(reason) => [&[0], reason.as_bytes()].concat(),
    };
    let group: Vec<usize> = (0..control.size()).collect();
    let operation = Operation::new("nccl", super::Traffic::Control, None);
    let all = collectives::all_gather_bytes(&control, &group, &operation, &told)?;
    let reasons = all
        .iter()
        .enumerate()
        .filter_map(|(rank, told)| match told.split_first() {
            Some((1, identity)) => {
                let first = all.iter().position(|other| other[1..] == *identity)?;
                (first != rank).then(|| format!("ranks {first} and {rank} share a GPU"))
            }
            _ => Some(format!(
                "{}, on rank {rank}",
                String::from_utf8_lossy(&told[1..])
            )),
        });
    let reason = reasons.min();
    let (Some(index), None) = (index, &reason) else {
        if let (Some(_), Some(reason)) = (index, reason)
            && control.rank() == 0
            && switched != Some(false)
        {
            eprintln!("halocline: messages between GPUs go through the host: {reason}");
        }
        return Ok(control);
    };
    let own = control.rank() == 0;
    let id = own.then(nccl::get_uniqueid).transpose().map_err(failed)?;
    let bytes = id.map(|id| id.internal.map(|byte| byte as u8).to_vec());
    let id = collectives::broadcast_bytes(&control, &group, 0, &operation, bytes)?;
    let gpu = Gpu::open(index, &id, &control)?;
    Ok(Arc::new(Nccl {
        control,
        gpu: Mutex::new(gpu),
        counters: Counters::default(),
    }))
}

/// What tells a GPU from all others, if its driver has what is needed: events of a context, since CUDA 12.5.
fn identity(index: usize) -> Result<Vec<u8>, String> {
    let failed = |error: cudarc::driver::result::DriverError| format!("{error:?}");
    cudarc::driver::result::init().map_err(failed)?;
    let mut version = 0;
    // SAFETY: the driver is loaded, and writes a number.
    unsafe { cuda::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(failed)?;
    if version < 12050 {
        return Err("its driver is older than CUDA 12.5".into());
    }
    let device = device::get(index as c_int).map_err(failed)?;
    Ok(device::get_uuid(device)
        .map_err(failed)?
        .bytes
        .map(|byte| byte as u8)
        .to_vec())
}

/// The number of a CUDA device.
fn cuda_index(device: &DispatchDevice) -> Option<usize> {
    match device {
        DispatchDevice::Cube(CubeDevice::Cuda(device)) => Some(device.index),
        _ => None,
    }
}

fn failed(error: impl std::fmt::Debug) -> Error {
    Error::Engine(format!(
        "NCCL: {error:?}; {SWITCH}=0 has messages between GPUs go through the host, NCCL_DEBUG=INFO tells more"
    ))
}

impl Gpu {
    fn open(index: usize, id: &[u8], control: &Arc<dyn Communicator>) -> Result<Self> {
        let mut unique = nccl_sys::ncclUniqueId { internal: [0; 128] };
        for (to, byte) in unique.internal.iter_mut().zip(id) {
            *to = *byte as _;
        }
        cudarc::driver::result::init().map_err(failed)?;
        let device = device::get(index as c_int).map_err(failed)?;
        // SAFETY: the device is there. The primary context is CubeCL's too; it is never released.
        let context = unsafe { primary_ctx::retain(device) }.map_err(failed)?;
        // SAFETY: the context has just been retained.
        unsafe { ctx::set_current(context) }.map_err(failed)?;
        let stream = stream::create(stream::StreamKind::NonBlocking).map_err(failed)?;
        let mut comm = MaybeUninit::uninit();
        let (size, rank) = (control.size() as c_int, control.rank() as c_int);
        let timeout = control.settings().timeout;
        // SAFETY: `comm` is written before it is read, where the call succeeds.
        let comm = unsafe {
            within(timeout, "of the job, by NCCL,", || {
                nccl::comm_init_rank(comm.as_mut_ptr(), size, unique, rank)
            })
            .map_err(failed)?;
            comm.assume_init()
        };
        Ok(Self {
            comm,
            context,
            stream,
        })
    }

    /// Sends and receives all of a batch. Returns the event that is there when this is done.
    fn post(&self, messages: &[Message]) -> Result<cuda::CUevent> {
        let flags = cuda::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        // SAFETY: context, stream and communicator live as long as this; the events are of this context; the buffers have
        // the sizes given and are kept by the caller until the context has been told to wait for `done`.
        unsafe {
            ctx::set_current(self.context).map_err(failed)?;
            let ready = event::create(flags).map_err(failed)?;
            let done = event::create(flags).map_err(failed)?;
            cuda::cuCtxRecordEvent(self.context, ready)
                .result()
                .map_err(failed)?;
            stream::wait_event(
                self.stream,
                ready,
                cuda::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
            )
            .map_err(failed)?;
            event::destroy(ready).map_err(failed)?;
            nccl::group_start().map_err(failed)?;
            for Message { peer, way, buffer } in messages {
                let (memory, peer) = (buffer.address as *mut c_void, *peer as c_int);
                let (comm, stream) = (self.comm, self.stream.cast());
                let bytes = nccl_sys::ncclDataType_t::ncclUint8;
                match way {
                    Way::Out => nccl::send(memory, buffer.bytes, bytes, peer, comm, stream),
                    Way::In => nccl::recv(memory, buffer.bytes, bytes, peer, comm, stream),
                }
                .map_err(failed)?;
            }
            nccl::group_end().map_err(failed)?;
            event::record(done, self.stream).map_err(failed)?;
            Ok(done)
        }
    }

    /// Has what the context is given from now on wait for an event, which is used up.
    fn wait_for(&self, done: cuda::CUevent) -> Result<()> {
        // SAFETY: context and event are valid; a destroyed event is freed when nothing waits for it any more.
        unsafe {
            ctx::set_current(self.context).map_err(failed)?;
            cuda::cuCtxWaitEvent(self.context, done)
                .result()
                .map_err(failed)?;
            event::destroy(done).map_err(failed)
        }
    }
}

/// Memory of a device that takes part in a batch.
struct Buffer {
    address: u64,
    bytes: usize,
    /// What keeps the memory where it is.
    _kept: Box<dyn Any>,
}

impl Buffer {
    /// The elements of a tensor, in one piece, whose computation the device has been given by then.
    fn of(tensor: DispatchTensor) -> Result<Self> {
        let fused: FloatTensor<Cube> = from_dispatch::<Cube>(tensor)?;
        let client = fused.client.clone();
        let tensor: CubeTensor = into_contiguous(client.resolve_tensor_float::<CubeBackend>(fused));
        let bytes = tensor.meta.num_elements() * tensor.dtype.size();
        let handle = tensor.handle.clone();
        let resource = tensor
            .client
            .get_resource::<<CudaRuntime as Runtime>::Server>(handle);
        let resource = resource.map_err(failed)?;
        Ok(Self {
            address: resource.resource().ptr,
            bytes,
            _kept: Box::new((resource, tensor)),
        })
    }
}

enum Way {
    Out,
    In,
}

struct Message {
    peer: usize,
    way: Way,
    buffer: Buffer,
}

/// A batch that NCCL has been given. Dropped, it is waited for like one that is finished: its memory must not be used
/// again before.
struct Posted {
    engine: Arc<Nccl>,
    done: Option<cuda::CUevent>,
    _messages: Vec<Message>,
}

impl Posted {
    fn finish(mut self) -> Result<()> {
        self.done
            .take()
            .map_or(Ok(()), |done| self.engine.lock().wait_for(done))
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            let _ = self.engine.lock().wait_for(done);
        }
    }
}

impl Nccl {
    fn lock(&self) -> std::sync::MutexGuard<'_, Gpu> {
        self.gpu.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Whether a message goes from GPU to GPU: sender and receiver decide alike, by its kind.
fn is_sent(payload: &Payload) -> bool {
    let Payload::Tensors(tensors) = payload else {
        return false;
    };
    tensors
        .iter()
        .all(|tensor| tensor.dtype().is_float() && cuda_index(&tensor.device()).is_some())
}

/// [`is_sent`], of what is received.
fn is_received(expected: &Expected) -> bool {
    matches!(expected, Expected::Tensors { dtype, device, .. } if dtype.is_float() && cuda_index(device).is_some())
}

impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn start(self: Arc<Self>, batch: Batch) -> Result<InFlight> {
        let Batch {
            operation,
            sends,
            receives,
        } = batch;
        let mut messages = Vec::new();
        let mut control = Batch {
            operation: operation.clone(),
            sends: Vec::new(),
            receives: Vec::new(),
        };
        for (peer, payload) in sends {
            self.counters.count(&operation, payload.bytes());
            if !is_sent(&payload) {
                control.sends.push((peer, payload));
                continue;
            }
            let size = payload.bytes() as u64;
            control
                .sends
                .push((peer, Payload::Bytes(size.to_le_bytes().to_vec())));
            let Payload::Tensors(tensors) = payload else {
                unreachable!("only tensors are sent by NCCL");
            };
            for tensor in tensors {
                let buffer = Buffer::of(tensor)?;
                messages.push(Message {
                    peer,
                    way: Way::Out,
                    buffer,
                });
            }
        }
        let mut incoming = Vec::new();
        for (peer, expected) in receives {
            let Expected::Tensors {
                shapes,
                dtype,
                device,
            } = &expected
            else {
                control.receives.push((peer, expected));
                incoming.push(None);
                continue;
            };
            if !is_received(&expected) {
                control.receives.push((peer, expected));
                incoming.push(None);
                continue;
            }
            let mut tensors = Vec::new();
            for shape in shapes {
                // Flat, because rows of a matrix may be apart.
                let elements = [shape.num_elements()];
                let flat = Tensor::<1>::empty(elements, (&Device::new(device.clone()), *dtype))
                    .into_dispatch();
                let buffer = Buffer::of(flat.clone())?;
                messages.push(Message {
                    peer,
                    way: Way::In,
                    buffer,
                });
                tensors.push((flat, shape.clone()));
            }
            control.receives.push((peer, Expected::Bytes));
            incoming.push(Some((peer, tensors)));
        }
        messages.retain(|message| message.buffer.bytes > 0);
        // First, so that a rank that waits for this one in vain can tell.
        let control = self.control.clone().start(control)?;
        let done = match messages.is_empty() {
            true => None,
            false => Some(self.lock().post(&messages)?),
        };
        let posted = Posted {
            engine: self.clone(),
            done,
            _messages: messages,
        };
        let rank = self.rank();
        Ok(InFlight::new(move || {
            let told = control.finish()?;
            posted.finish()?;
            let payloads = told.into_iter().zip(incoming);
            let payloads = payloads.map(|(told, incoming)| match incoming {
                None => Ok(told),
                Some((peer, tensors)) => received(told, tensors, (rank, peer), &operation),
            });
            payloads.collect()
        }))
    }

    fn fail(&self, cause: &str) {
        // What NCCL still waits for on the device ends with the process.
        self.control.fail(cause);
    }

    fn settings(&self) -> &Settings {
        self.control.settings()
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }
}

/// What has come from a peer, if it sent as much as was expected.
fn received(
    told: Payload,
    tensors: Vec<(DispatchTensor, Shape)>,
    (rank, peer): (usize, usize),
    operation: &Operation,
) -> Result<Payload> {
    let bytes: usize = tensors
        .iter()
        .map(|(flat, _)| flat.shape().num_elements() * flat.dtype().size())
        .sum();
    let sent = match &told {
        Payload::Bytes(size) => size[..].try_into().map(u64::from_le_bytes).ok(),
        Payload::Tensors(_) => None,
    };
    if sent != Some(bytes as u64) {
        return Err(Error::Diverged {
            rank,
            operation: format!("{operation}, expecting {bytes} bytes"),
            peer,
            peer_operation: format!("the same operation, sending {sent:?}"),
        });
    }
    let shaped = tensors
        .into_iter()
        .map(|(flat, shape)| reshaped(flat, shape));
    Ok(Payload::Tensors(shaped.collect()))
}
