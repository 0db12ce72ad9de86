//! MPI calls of the engine, as safe functions.

use std::ffi::{c_char, c_int};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Range;

use ::mpi::Threading;
use ::mpi::environment::Universe;
use ::mpi::ffi;
use smallvec::SmallVec;

use super::wire::Tag;
use crate::comm::Place;
use crate::comm::wire::Outgoing;
use crate::memory::Block;
use crate::{Error, Result};

/// Maximum size of a message of a long transfer: MPI counts in `int`, and each arrival shows
/// progress.
const PIECE: usize = 4 << 20;
/// Number of bytes that Open MPI sends within a host at once: 4096 with a header. Longer messages
/// start with a handshake, so that two short ones are faster than one of up to twice this size. (A
/// peer that sends another size whose tag happens to be the same may then be detected only by the
/// timeout, as with sizes of several pieces.)
const AT_ONCE: usize = 4032;

/// Communicator of this engine over all processes of the job. MPI is finalised when it is dropped.
pub(super) struct Link {
    comm: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    tag_bits: u32,
    _universe: Universe,
}

// SAFETY: the handles are opaque values of MPI, valid on every thread of the process. A `Link` is
// not `Sync`, so one thread at a time is in MPI, as `MPI_THREAD_SERIALIZED` requires.
unsafe impl Send for Link {}

impl Link {
    /// Initialises MPI.
    pub(super) fn open() -> Result<Self> {
        let required = Threading::Serialized;
        // `Multiple`, so that the program's own libraries may call MPI at the same time.
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
        // SAFETY: MPI is initialised, out-pointers are valid, and a handle is read after the call
        // that wrote it.
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
            let (mut largest_tag, mut found) = (std::ptr::null::<c_int>(), 0);
            check(
                "MPI_Comm_get_attr",
                ffi::MPI_Comm_get_attr(
                    ffi::RSMPI_COMM_WORLD,
                    ffi::MPI_TAG_UB as c_int,
                    (&raw mut largest_tag).cast(),
                    &mut found,
                ),
            )?;
            let largest_tag = if found != 0 {
                *largest_tag
            } else {
                i16::MAX.into()
            };
            Ok(Self {
                comm,
                rank: rank as usize,
                size: size as usize,
                // Rounded down, so that all numbers of this many bits are at most the largest tag.
                tag_bits: (largest_tag as u32 + 1).ilog2(),
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

    /// The number of bits of a tag.
    pub(super) fn tag_bits(&self) -> u32 {
        self.tag_bits
    }

    /// Starts to send bytes.
    pub(super) fn send(
        &self,
        peer: usize,
        tag: Tag,
        memory: Outgoing,
    ) -> Result<Transfer<Outgoing>> {
        let bytes = memory.bytes();
        let (start, bytes) = (bytes.as_ptr(), bytes.len());
        let (peer, tag) = (peer as c_int, tag.0 as c_int);
        // SAFETY: MPI is open; the transfer keeps the memory alive and unchanged until its requests
        // are complete.
        let post = |start: *const u8, count, request| unsafe {
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
        };
        Transfer::new(memory).post("MPI_Isend", start, bytes, most(bytes), post)
    }

    /// Starts to receive from a peer into a range of memory. The range must be filled, except that
    /// a transfer of one message may be shorter.
    pub(super) fn receive(
        &self,
        peer: usize,
        tag: Tag,
        memory: Incoming,
        target: Range<usize>,
    ) -> Result<Transfer<Incoming>> {
        let most = most(target.len());
        self.receive_by(most, peer, tag, memory, target)
    }

    /// Starts to receive one message.
    pub(super) fn receive_message(
        &self,
        peer: usize,
        tag: Tag,
        memory: Block,
    ) -> Result<Transfer<Incoming>> {
        let bytes = memory.size();
        self.receive_by(bytes.max(1), peer, tag, Incoming::Block(memory), 0..bytes)
    }

    fn receive_by(
        &self,
        most: usize,
        peer: usize,
        tag: Tag,
        memory: Incoming,
        target: Range<usize>,
    ) -> Result<Transfer<Incoming>> {
        let (start, size) = match &memory {
            Incoming::Block(block) => (block.start(), block.size()),
            Incoming::Place(place) => (place.start(), place.bytes()),
        };
        assert!(target.start <= target.end && target.end <= size);
        // SAFETY: within the memory.
        let start = unsafe { start.as_ptr().add(target.start) };
        let bytes = target.len();
        let (peer, tag) = (peer as c_int, tag.0 as c_int);
        // SAFETY: MPI is open; the transfer keeps the memory, which has room for the bytes, until
        // its requests are complete.
        let post = |start: *const u8, count, request| unsafe {
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
        };
        Transfer::new(memory).post("MPI_Irecv", start, bytes, most, post)
    }

    /// Drives a transfer.
    pub(super) fn poll<M>(&self, transfer: &mut Transfer<M>) -> Result<Step> {
        let before = transfer.done;
        while let Some(request) = transfer.requests.get_mut(transfer.done) {
            let (mut complete, mut status) = (0, MaybeUninit::uninit());
            // SAFETY: MPI is open, and the request is one of MPI's.
            let code = unsafe { ffi::MPI_Test(request, &mut complete, status.as_mut_ptr()) };
            check("MPI_Test", code)?;
            if complete == 0 {
                return Ok(if transfer.done == before {
                    Step::None
                } else {
                    Step::Some
                });
            }
            // SAFETY: the request is complete, so that the status was written.
            transfer.bytes += bytes(unsafe { status.assume_init_ref() })?;
            transfer.done += 1;
        }
        Ok(Step::Complete)
    }

    /// Returns tag and size in bytes of the first message of a peer that no request matches, if
    /// there is one.
    pub(super) fn stray(&self, peer: usize) -> Result<Option<(Tag, usize)>> {
        let (mut found, mut status) = (0, MaybeUninit::uninit());
        // SAFETY: MPI is open, and the out-pointers are valid.
        let code = unsafe {
            let any = ffi::RSMPI_ANY_TAG;
            ffi::MPI_Iprobe(
                peer as c_int,
                any,
                self.comm,
                &mut found,
                status.as_mut_ptr(),
            )
        };
        check("MPI_Iprobe", code)?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: a message was found, so that the status was written.
        let status = unsafe { status.assume_init_ref() };
        Ok(Some((Tag(status.MPI_TAG as u32), bytes(status)?)))
    }

    /// Cancels a receive and drops its memory, with the bytes received so far.
    pub(super) fn cancel(&self, mut transfer: Transfer<Incoming>) -> Result<()> {
        for request in &mut transfer.requests[transfer.done..] {
            // SAFETY: MPI is open, the request is one of MPI's, and its memory is kept until it has
            // ended.
            unsafe {
                check("MPI_Cancel", ffi::MPI_Cancel(request))?;
                check("MPI_Wait", ffi::MPI_Wait(request, ffi::RSMPI_STATUS_IGNORE))?;
            }
        }
        transfer.done = transfer.requests.len();
        drop(transfer.into_memory());
        Ok(())
    }

    /// Ends all processes of the job.
    pub(super) fn abort(&self) {
        // SAFETY: MPI is open.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
    }
}

/// The size of a message.
fn bytes(status: &ffi::MPI_Status) -> Result<usize> {
    let mut bytes = 0;
    // SAFETY: MPI is open, and wrote the status.
    let code = unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut bytes) };
    check("MPI_Get_count", code)?;
    Ok(bytes as usize)
}

/// Maximum size of the messages of a transfer of this many bytes.
fn most(bytes: usize) -> usize {
    if bytes <= 2 * AT_ONCE { AT_ONCE } else { PIECE }
}

/// Start and size of each message of a transfer; at least one.
fn pieces(start: *const u8, bytes: usize, most: usize) -> impl Iterator<Item = (*const u8, c_int)> {
    (0..bytes.div_ceil(most).max(1)).map(move |piece| {
        let from = piece * most;
        (start.wrapping_add(from), (bytes - from).min(most) as c_int)
    })
}

/// Progress of a transfer in one poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// No progress.
    None,
    /// Some of its messages were completed.
    Some,
    /// All of its messages are complete.
    Complete,
}

/// Memory into which a message is received.
pub(super) enum Incoming {
    /// A separate block.
    Block(Block),
    /// A part of a tensor.
    Place(Place),
}

/// Message in transit, with the memory that MPI reads or writes until it is complete.
///
/// If it is dropped earlier, its memory leaks: MPI may still use it.
pub(super) struct Transfer<M> {
    requests: SmallVec<[ffi::MPI_Request; 2]>,
    /// The number of requests that are complete.
    done: usize,
    /// The number of bytes received so far, for a receive.
    bytes: usize,
    memory: ManuallyDrop<M>,
}

// SAFETY: a request may be completed by any thread, and the memory is owned.
unsafe impl<M: Send> Send for Transfer<M> {}

impl<M> Transfer<M> {
    fn new(memory: M) -> Self {
        Self {
            requests: SmallVec::new(),
            done: 0,
            bytes: 0,
            memory: ManuallyDrop::new(memory),
        }
    }

    /// Starts the messages of the transfer, each with a call that writes its request.
    fn post(
        mut self,
        name: &str,
        start: *const u8,
        bytes: usize,
        most: usize,
        call: impl Fn(*const u8, c_int, *mut ffi::MPI_Request) -> c_int,
    ) -> Result<Self> {
        for (start, count) in pieces(start, bytes, most) {
            let mut request = MaybeUninit::uninit();
            check(name, call(start, count, request.as_mut_ptr()))?;
            // SAFETY: the call succeeded, so it wrote the request.
            self.requests.push(unsafe { request.assume_init() });
        }
        Ok(self)
    }

    /// The number of bytes received so far.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the memory of a complete transfer.
    pub(super) fn into_memory(self) -> M {
        assert_eq!(self.done, self.requests.len());
        ManuallyDrop::into_inner(self.memory)
    }
}

#[inline]
fn check(call: &str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        Ok(())
    } else {
        Err(failure(call, code))
    }
}

#[cold]
fn failure(call: &str, code: c_int) -> Error {
    const ROOM: usize = 4096;
    let mut text = [0_u8; ROOM];
    let mut length = 0;
    // SAFETY: the array has more room than `MPI_MAX_ERROR_STRING` of any MPI library (Open MPI 256,
    // MPICH 512).
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let text = String::from_utf8_lossy(&text[..(length.max(0) as usize).min(ROOM)]);
    Error::Engine(format!("{call}: {text}"))
}
