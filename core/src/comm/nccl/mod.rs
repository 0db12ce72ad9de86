//! Engine of jobs on several GPUs: cells travel from device memory to device memory, by NCCL.
//!
//! It is built on another engine, MPI or TCP, which carries messages of the host and, for every
//! message between GPUs, its size. A rank that has ended, is silent or is in another operation is
//! therefore detected when a batch is finished.
//!
//! # Order
//! The host waits for the device only when the program has ended, before the process leaves the
//! job. NCCL runs on its own stream. On the device, a batch waits for all work submitted to the
//! context before it (by a context event, `cuCtxRecordEvent`, because CubeCL's streams are
//! private), and work submitted after [`finish`](InFlight::finish) waits for the batch. The memory
//! of a batch is kept until then.
//!
//! # Silence
//! NCCL has no timeout for a silent rank: its calls wait at the first message between two ranks,
//! and later the device waits. A watchdog thread ends the process after the timeout, or after an
//! NCCL error.
//!
//! **Type-checked only**: this engine has not run yet.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::CubeDevice;

use super::watch::Watch;
use super::{
    Batch, Communicator, Counters, Expected, InFlight, Operation, Payload, Pending, Settings,
    collectives, within,
};
use crate::comm::gpu;
use crate::dispatch::reshaped;
use crate::lock::lock;
use crate::settings::GRACE;
use crate::{Error, Result};
use raw::{Buffer, Comm, Gpu, Message, Posted, Way};

mod raw;

/// Environment variable that routes messages between GPUs through the host (`0`), or makes a job of
/// one rank use NCCL (`1`).
const SWITCH: &str = "HALOCLINE_NCCL";

/// NCCL between the GPUs of a job, on top of the engine that connects its processes.
pub(crate) struct Nccl {
    control: Arc<dyn Communicator>,
    /// Locked while a group of messages is posted, whose calls belong together.
    gpu: Mutex<Gpu>,
    /// Work that waits for other ranks.
    watch: Arc<Mutex<Watch>>,
    counters: Counters,
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nccl(over {:?})", self.control)
    }
}

/// Returns NCCL on top of an engine, if every rank computes on its own CUDA device and has the
/// library; otherwise the engine itself.
///
/// # Errors
/// Ranks share a GPU and may not; communication or NCCL fails.
pub(crate) fn over(control: Arc<dyn Communicator>, on: &Device) -> Result<Arc<dyn Communicator>> {
    let switched = crate::settings::switch(SWITCH);
    if control.size() == 1 && switched != Some(true) {
        return Ok(control);
    }
    let index = cuda_index(on.clone().inner().as_dispatch());
    // The identity of the GPU, empty if there is none, and the reason against NCCL, empty if there
    // is none.
    let (identity, reason) = match index {
        None => (Vec::new(), "the device is no CUDA device".to_string()),
        Some(index) => match raw::identity(index) {
            Err(error) => (Vec::new(), error.to_string()),
            Ok(identity) if switched == Some(false) => (identity, "it is switched off".into()),
            Ok(identity) => (identity, raw::obstacle()),
        },
    };
    let group: Vec<usize> = (0..control.size()).collect();
    let operation = Operation::new("nccl", super::Traffic::Control, None);
    let gather = |text: &[u8]| collectives::all_gather_bytes(&control, &group, &operation, text);
    let identities = gather(&identity)?;
    let mut shared = identities.iter().enumerate().filter_map(|(rank, gpu)| {
        let first = identities.iter().position(|other| other == gpu)?;
        let shares = first != rank && !gpu.is_empty();
        shares.then(|| format!("ranks {first} and {rank} share a GPU"))
    });
    let shared = shared.next();
    if let Some(shared) = &shared
        && !gpu::may_share()
    {
        let message = format!(
            "{shared}; give each process a GPU of its own, or set {}=1 to let them share",
            gpu::SHARE
        );
        return Err(Error::Engine(message));
    }
    let reasons = gather(reason.as_bytes())?;
    let reasons = reasons.iter().enumerate();
    let mut reasons = reasons.filter(|(_, reason)| !reason.is_empty());
    let reason = reasons.next().map(|(rank, reason)| {
        let reason = String::from_utf8_lossy(reason);
        format!("{reason}, on rank {rank}")
    });
    let reason = shared.or(reason);
    let (Some(index), None) = (index, &reason) else {
        if let (Some(true), Some(reason)) = (switched, &reason) {
            let message = format!("{SWITCH}=1 asks for NCCL, which cannot be used: {reason}");
            return Err(Error::Engine(message));
        }
        if let (Some(_), Some(reason)) = (index, reason)
            && control.rank() == 0
            && switched != Some(false)
        {
            eprintln!("halocline: messages between GPUs go through the host: {reason}");
        }
        return Ok(control);
    };
    let is_root = control.rank() == 0;
    let id = is_root.then(raw::unique_id).transpose()?;
    let id = collectives::broadcast_bytes(&control, &group, 0, &operation, id)?;
    let timeout = control.settings().timeout;
    let (rank, size) = (control.rank(), control.size());
    let open = || Gpu::open(index, &id, rank, size);
    let gpu = within(timeout, "of the job, by NCCL,", open)?;
    let watch = Arc::<Mutex<Watch>>::default();
    let (watched, comm, beneath) = (Arc::downgrade(&watch), gpu.comm(), control.clone());
    let context = gpu.context();
    let thread = std::thread::Builder::new().name("nccl watch".into());
    thread.spawn(move || match context.enter() {
        Ok(()) => look_after(&watched, comm, &*beneath),
        Err(error) => beneath.fail(beneath.rank(), &error.to_string()),
    })?;
    Ok(Arc::new(Nccl {
        control,
        gpu: Mutex::new(gpu),
        watch,
        counters: Counters::default(),
    }))
}

/// The number of a CUDA device.
fn cuda_index(device: &DispatchDevice) -> Option<usize> {
    match device {
        DispatchDevice::Cube(CubeDevice::Cuda(device)) => Some(device.index),
        _ => None,
    }
}

/// Ends the process when watched work has waited for too long, or after an NCCL error, because a
/// thread that waits for NCCL or for the device cannot be stopped otherwise.
fn look_after(watched: &Weak<Mutex<Watch>>, comm: Comm, control: &dyn Communicator) {
    const PERIOD: Duration = Duration::from_millis(200);
    let timeout = control.settings().timeout;
    while let Some(watch) = watched.upgrade() {
        let mut watch = lock(&watch);
        let overdue = watch.overdue(timeout).map(|operation| {
            let seconds = timeout.as_secs_f64();
            format!(
                "{operation}: other ranks were silent for {seconds} s, while NCCL waited for them"
            )
        });
        // If nothing waits, other ranks may have left the job already.
        let broken = watch.is_waiting().then(|| comm.error()).flatten();
        let cause = overdue.or_else(|| broken.map(|error| error.to_string()));
        drop(watch);
        if let Some(cause) = cause {
            control.fail(control.rank(), &cause);
            std::thread::sleep(GRACE);
            eprintln!(
                "halocline: rank {} failed: {cause}\n\
                 halocline: it did not stop within {GRACE:?}; ending the process",
                control.rank()
            );
            // The handlers of a regular exit may wait for the device.
            std::process::abort();
        }
        std::thread::sleep(PERIOD);
    }
}

impl Nccl {
    /// Submits the messages of an operation to NCCL.
    fn post(&self, operation: &Operation, messages: Vec<Message>) -> Result<Posted> {
        let returned = Arc::new(AtomicBool::new(false));
        let seen = returned.clone();
        let returns = Box::new(move || seen.load(Ordering::Relaxed));
        lock(&self.watch).add(operation.clone(), Box::new(|| true), returns);
        let posted = lock(&self.gpu).post(messages);
        returned.store(true, Ordering::Relaxed);
        let posted = posted?;
        let (ready, done) = (posted.ready.clone(), posted.done.clone());
        let (begun, ended) = (move || ready.is_over(), move || done.is_over());
        lock(&self.watch).add(operation.clone(), Box::new(begun), Box::new(ended));
        Ok(posted)
    }
}

/// Batch in flight. Dropping it waits like finishing it, because its memory must not be reused
/// before.
struct OnItsWay {
    engine: Arc<Nccl>,
    operation: Operation,
    /// The messages of the engine below.
    control: Option<InFlight>,
    posted: Option<Posted>,
    /// The tensors that NCCL receives, in the order of the batch.
    incoming: Vec<Option<Incoming>>,
}

/// A peer, and its tensors: flat, with their final shapes.
type Incoming = (usize, Vec<(DispatchTensor, Shape)>);

impl OnItsWay {
    fn wait(&mut self) -> Result<()> {
        let Some(posted) = self.posted.take() else {
            return Ok(());
        };
        // Submitted first, because work computed in the meantime need not wait.
        let given = posted.give_all();
        let waits = given.and_then(|()| lock(&self.engine.gpu).wait_for(&posted.done));
        if waits.is_err() {
            // NCCL may still use the memory, so it is never freed.
            std::mem::forget(posted);
        }
        waits
    }
}

impl Pending for OnItsWay {
    fn finish(mut self: Box<Self>) -> Result<Vec<Payload>> {
        let told = self
            .control
            .take()
            .map_or(Ok(Vec::new()), InFlight::finish)?;
        self.wait()?;
        let incoming = std::mem::take(&mut self.incoming);
        let payloads = told.into_iter().zip(incoming);
        let payloads = payloads.map(|(told, incoming)| match incoming {
            None => Ok(told),
            Some(incoming) => received(told, incoming, self.engine.rank(), &self.operation),
        });
        payloads.collect()
    }

    fn in_background(&self) {
        self.control.iter().for_each(InFlight::in_background);
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

/// Whether a message travels from GPU to GPU; sender and receiver decide by the same rule.
fn is_sent(payload: &Payload) -> bool {
    let Payload::Tensors(tensors) = payload else {
        return false;
    };
    let lies = |tensor: &DispatchTensor| lie_on_gpu(tensor.dtype(), &tensor.device());
    !tensors.is_empty() && tensors.iter().all(lies)
}

/// Whether cells of this type on this device travel by NCCL.
fn lie_on_gpu(dtype: DType, device: &DispatchDevice) -> bool {
    dtype.is_float() && cuda_index(device).is_some()
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
                if tensor.shape().num_elements() == 0 {
                    continue;
                }
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
            let (shapes, (device, dtype)) = match &expected {
                Expected::Tensors {
                    shapes,
                    dtype,
                    device,
                } if !shapes.is_empty() && lie_on_gpu(*dtype, device) => {
                    (shapes, (Device::new(device.clone()), *dtype))
                }
                _ => {
                    control.receives.push((peer, expected));
                    incoming.push(None);
                    continue;
                }
            };
            let mut tensors = Vec::new();
            for shape in shapes {
                // Flat, because rows of a matrix may be padded.
                let elements = [shape.num_elements()];
                let flat = Tensor::<1>::empty(elements, (&device, dtype)).into_dispatch();
                if elements != [0] {
                    let buffer = Buffer::of(flat.clone())?;
                    messages.push(Message {
                        peer,
                        way: Way::In,
                        buffer,
                    });
                }
                tensors.push((flat, shape.clone()));
            }
            control.receives.push((peer, Expected::Bytes));
            incoming.push(Some((peer, tensors)));
        }
        // Before NCCL, which may wait, so that a rank that waits for this one detects a divergence.
        let control = self.control.clone().start(control)?;
        let posted = if messages.is_empty() {
            None
        } else {
            Some(self.post(&operation, messages)?)
        };
        Ok(InFlight::new(OnItsWay {
            engine: self,
            operation,
            control: Some(control),
            posted,
            incoming,
        }))
    }

    fn fail(&self, rank: usize, cause: &str) {
        self.control.fail(rank, cause);
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.control.failure()
    }

    fn settings(&self) -> &Settings {
        self.control.settings()
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }
}

/// The payload from a peer, if it has sent the expected number of bytes.
fn received(
    told: Payload,
    (peer, tensors): Incoming,
    rank: usize,
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
