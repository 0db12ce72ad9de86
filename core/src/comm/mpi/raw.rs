//! The calls into MPI that the engine makes, behind functions that are safe to call.

use std::ffi::{c_char, c_int};
use std::mem::{ManuallyDrop, MaybeUninit};

use ::mpi::Threading;
use ::mpi::environment::Universe;
use ::mpi::ffi;
use burn::backend::flex::FlexTensor;

use crate::memory::Block;
use crate::{Error, Result};

/// A transfer is made of messages of at most so many bytes: MPI counts in `int`, and each one that has come shows that
/// a long transfer goes on.
const PIECE: usize = 64 << 20;

/// Which kind of messages a transfer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// What comes first of a payload, and all of a short one.
    Head = 0,
    /// The rest of a long payload.
    Body = 1,
}

/// A communicator of our own over all processes of the job. MPI is finalised when it is dropped.
pub(super) struct Link {
    comm: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    _universe: Universe,
}

// SAFETY: the handles are values that MPI gives meaning to, valid on every thread of the process. A `Link` is not
// `Sync`: one thread at a time is in MPI, as `MPI_THREAD_SERIALIZED` asks for.
unsafe impl Send for Link {}

impl Link {
    /// Initialises MPI.
    pub(super) fn open() -> Result<Self> {
        let required = Threading::Serialized;
        // Multiple, so that the program's own libraries may call MPI beside us.
        let (universe, provided) = ::mpi::initialize_with_threading(Threading::Multiple)
            .ok_or_else(|| {
                Error::Engine(
                    "MPI has been initialised in this process before, and it cannot be again; \
                     run one Launcher per process"
                        .into(),
                )
            })?;
        if provided < required {
            return Err(Error::Engine(format!(
                "this MPI library provides threads at level {provided:?}, {required:?} is required; \
                 use a build of MPI with thread support"
            )));
        }
        let mut comm = MaybeUninit::uninit();
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialised, out-pointers are valid, and a handle is read after the call that wrote it.
        unsafe {
            check(
                "MPI_Comm_dup",
                ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, comm.as_mut_ptr()),
            )?;
            let comm = comm.assume_init();
            let handler = ffi::RSMPI_ERRORS_RETURN;
            check(
                "MPI_Comm_set_errhandler",
                ffi::MPI_Comm_set_errhandler(comm, handler),
            )?;
            check("MPI_Comm_rank", ffi::MPI_Comm_rank(comm, &mut rank))?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(comm, &mut size))?;
            Ok(Self {
                comm,
                rank: rank as usize,
                size: size as usize,
                _universe: universe,
            })
        }
    }

    /// This process.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// The number of processes.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Starts to send bytes.
    pub(super) fn send(
        &self,
        peer: usize,
        tag: Tag,
        memory: Outgoing,
    ) -> Result<Transfer<Outgoing>> {
        let (start, bytes) = memory.span();
        let (peer, tag) = (peer as c_int, tag as c_int);
        // SAFETY: MPI is open; the transfer keeps the memory alive and unchanged until its requests are complete.
        Transfer::new(memory).post("MPI_Isend", start, bytes, |start, count, request| unsafe {
            let start = start.cast();
            ffi::MPI_Isend(
                start,
                count,
                ffi::RSMPI_UINT8_T,
                peer,
                tag,
                self.comm,
                request,
            )
        })
    }

    /// Starts to receive what a peer sends: so many bytes, or at most so many if they are less than a piece.
    pub(super) fn receive(
        &self,
        peer: usize,
        tag: Tag,
        memory: Block,
        bytes: usize,
    ) -> Result<Transfer<Block>> {
        assert!(bytes <= memory.size());
        let start = memory.start().as_ptr();
        let (peer, tag) = (peer as c_int, tag as c_int);
        // SAFETY: MPI is open; the transfer keeps the block, which has room for the bytes, until its requests are complete.
        Transfer::new(memory).post("MPI_Irecv", start, bytes, |start, count, request| unsafe {
            let start = start.cast_mut().cast();
            ffi::MPI_Irecv(
                start,
                count,
                ffi::RSMPI_UINT8_T,
                peer,
                tag,
                self.comm,
                request,
            )
        })
    }

    /// Drives a transfer on.
    pub(super) fn poll<M>(&self, transfer: &mut Transfer<M>) -> Result<Step> {
        let before = transfer.done;
        while let Some(request) = transfer.requests.get_mut(transfer.done) {
            let mut complete = 0;
            // SAFETY: MPI is open, and the request is one of MPI's.
            let code = unsafe { ffi::MPI_Test(request, &mut complete, ffi::RSMPI_STATUS_IGNORE) };
            check("MPI_Test", code)?;
            if complete == 0 {
                return Ok(if transfer.done == before {
                    Step::None
                } else {
                    Step::Some
                });
            }
            transfer.done += 1;
        }
        Ok(Step::Complete)
    }

    /// Ends all processes of the job.
    pub(super) fn abort(&self) {
        // SAFETY: MPI is open.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
    }
}

/// Start and size of the messages of a transfer; at least one.
fn pieces(start: *const u8, bytes: usize) -> impl Iterator<Item = (*const u8, c_int)> {
    (0..bytes.div_ceil(PIECE).max(1)).map(move |piece| {
        let from = piece * PIECE;
        (start.wrapping_add(from), (bytes - from).min(PIECE) as c_int)
    })
}

/// How far a transfer came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nowhere.
    None,
    /// Some of its messages are complete.
    Some,
    /// All are.
    Complete,
}

/// Memory that is sent.
pub(super) enum Outgoing {
    /// The first bytes of a block that begins with a head.
    Message(Block, usize),
    /// The first bytes of a block.
    Block(Block, usize),
    /// All of it.
    Bytes(Vec<u8>),
    /// The elements of a contiguous tensor, which nobody changes as long as there is a second handle.
    Tensor(FlexTensor),
}

impl Outgoing {
    fn span(&self) -> (*const u8, usize) {
        match self {
            Self::Message(block, bytes) | Self::Block(block, bytes) => {
                assert!(*bytes <= block.size());
                (block.start().as_ptr(), *bytes)
            }
            Self::Bytes(bytes) => (bytes.as_ptr(), bytes.len()),
            Self::Tensor(tensor) => {
                let layout = tensor.layout();
                assert!(layout.is_contiguous());
                let size = tensor.dtype().size();
                let bytes = &tensor.bytes()[layout.start_offset() * size..];
                (bytes.as_ptr(), bytes[..layout.num_elements() * size].len())
            }
        }
    }
}

/// A message in transit, with the memory that MPI reads or writes until it is complete.
///
/// If it is dropped before, its memory is leaked: MPI may still use it.
pub(super) struct Transfer<M> {
    requests: Vec<ffi::MPI_Request>,
    /// How many of the requests are complete.
    done: usize,
    memory: ManuallyDrop<M>,
}

// SAFETY: a request may be completed by any thread, and the memory is owned.
unsafe impl<M: Send> Send for Transfer<M> {}

impl<M> Transfer<M> {
    fn new(memory: M) -> Self {
        Self {
            requests: Vec::with_capacity(1),
            done: 0,
            memory: ManuallyDrop::new(memory),
        }
    }

    /// Starts the messages of the transfer, each by a call that writes its request.
    fn post(
        mut self,
        name: &str,
        start: *const u8,
        bytes: usize,
        call: impl Fn(*const u8, c_int, *mut ffi::MPI_Request) -> c_int,
    ) -> Result<Self> {
        for (start, count) in pieces(start, bytes) {
            let mut request = MaybeUninit::uninit();
            check(name, call(start, count, request.as_mut_ptr()))?;
            // SAFETY: the call succeeded, so it wrote the request.
            self.requests.push(unsafe { request.assume_init() });
        }
        Ok(self)
    }

    /// The memory of a transfer that is complete.
    pub(super) fn into_memory(self) -> M {
        assert_eq!(self.done, self.requests.len());
        ManuallyDrop::into_inner(self.memory)
    }
}

fn check(call: &str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    const ROOM: usize = 4096;
    let mut text = [0_u8; ROOM];
    let mut length = 0;
    // SAFETY: the array has more room than `MPI_MAX_ERROR_STRING` of any MPI library (Open MPI 256, MPICH 512).
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let text = String::from_utf8_lossy(&text[..(length.max(0) as usize).min(ROOM)]);
    Err(Error::Engine(format!("{call}: {text}")))
}
