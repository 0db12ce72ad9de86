//! The calls into MPI that the engine makes, behind functions that are safe to call.

use std::ffi::{c_char, c_int};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::{Mutex, MutexGuard};

use ::mpi::Threading;
use ::mpi::environment::Universe;
use ::mpi::ffi;

use crate::{Error, Result};

/// MPI counts in `int`; counted in blocks of this many bytes, a message may have up to 128 GiB.
pub(super) const BLOCK: usize = 64;

/// What a message is, for its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// A payload of a batch.
    Message = 0,
    /// The sender's program has ended; nothing comes after it.
    End = 1,
}

/// A communicator of our own over all processes of the job.
pub(super) struct Link {
    comm: ffi::MPI_Comm,
    block: ffi::MPI_Datatype,
    rank: usize,
    size: usize,
    /// Held during every call, so that no two threads are in MPI at once; `None` when MPI is finalised.
    universe: Mutex<Option<Universe>>,
}

// SAFETY: the handles are values that MPI gives meaning to, valid on every thread of the process; `universe` is held
// during each call that uses them, as `MPI_THREAD_SERIALIZED` asks for.
unsafe impl Send for Link {}
// SAFETY: see `Send`.
unsafe impl Sync for Link {}

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
        let mut block = MaybeUninit::uninit();
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
            let made =
                ffi::MPI_Type_contiguous(BLOCK as c_int, ffi::RSMPI_UINT8_T, block.as_mut_ptr());
            check("MPI_Type_contiguous", made)?;
            check("MPI_Type_commit", ffi::MPI_Type_commit(block.as_mut_ptr()))?;
            Ok(Self {
                comm,
                block: block.assume_init(),
                rank: rank as usize,
                size: size as usize,
                universe: Mutex::new(Some(universe)),
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

    fn lock(&self) -> MutexGuard<'_, Option<Universe>> {
        self.universe.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The right to call MPI.
    fn enter(&self) -> Result<MutexGuard<'_, Option<Universe>>> {
        let universe = self.lock();
        if universe.is_none() {
            return Err(self.closed());
        }
        Ok(universe)
    }

    /// The error of communication after the end.
    pub(super) fn closed(&self) -> Error {
        Error::Engine(format!(
            "rank {}: communication after the Launcher's program has ended",
            self.rank
        ))
    }

    /// Starts to send whole blocks.
    pub(super) fn send(&self, peer: usize, tag: Tag, buffer: Vec<u8>) -> Result<Transfer<u8>> {
        debug_assert!(buffer.len().is_multiple_of(BLOCK));
        let count = c_int::try_from(buffer.len() / BLOCK).map_err(|_| {
            Error::Engine(format!(
                "a message of {} bytes for rank {peer}; MPI can send {} at once",
                buffer.len(),
                c_int::MAX as usize * BLOCK
            ))
        })?;
        let mut transfer = Transfer::new(buffer);
        let _open = self.enter()?;
        // SAFETY: MPI is open; the transfer keeps the buffer alive and unchanged until the request is complete.
        let code = unsafe {
            ffi::MPI_Isend(
                transfer.buffer.as_ptr().cast(),
                count,
                self.block,
                peer as c_int,
                tag as c_int,
                self.comm,
                &mut transfer.request,
            )
        };
        check("MPI_Isend", code)?;
        Ok(transfer)
    }

    /// Starts to receive the next message of a peer, if there is one.
    ///
    /// Messages are received as words, because that is how most elements are aligned.
    pub(super) fn receive(&self, peer: usize) -> Result<Option<(Tag, Transfer<u32>)>> {
        let _open = self.enter()?;
        let (mut found, mut count) = (0, 0);
        let mut message = MaybeUninit::uninit();
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        // SAFETY: MPI is open, and all out-pointers are valid.
        let code = unsafe {
            ffi::MPI_Improbe(
                peer as c_int,
                ffi::RSMPI_ANY_TAG,
                self.comm,
                &mut found,
                message.as_mut_ptr(),
                status.as_mut_ptr(),
            )
        };
        check("MPI_Improbe", code)?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: MPI found a message, so it wrote its status.
        let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), self.block, &mut count) };
        check("MPI_Get_count", code)?;
        // SAFETY: as above.
        let tag = match unsafe { status.assume_init_ref() }.MPI_TAG {
            1 => Tag::End,
            _ => Tag::Message,
        };
        let length = count as usize * (BLOCK / size_of::<u32>());
        let mut transfer = Transfer::<u32>::new(Vec::with_capacity(length));
        transfer.length = length;
        // SAFETY: the buffer has room for `count` blocks, and the transfer keeps it alive until the request is
        // complete.
        let code = unsafe {
            ffi::MPI_Imrecv(
                transfer.buffer.as_mut_ptr().cast(),
                count,
                self.block,
                message.as_mut_ptr(),
                &mut transfer.request,
            )
        };
        check("MPI_Imrecv", code)?;
        Ok(Some((tag, transfer)))
    }

    /// The buffer of a transfer that is complete.
    pub(super) fn poll<T: Copy>(&self, transfer: &mut Transfer<T>) -> Result<Option<Vec<T>>> {
        let _open = self.enter()?;
        let mut complete = 0;
        // SAFETY: MPI is open; the request is one of MPI's, or null after it was complete once.
        let code = unsafe {
            ffi::MPI_Test(
                &mut transfer.request,
                &mut complete,
                ffi::RSMPI_STATUS_IGNORE,
            )
        };
        check("MPI_Test", code)?;
        Ok((complete != 0).then(|| transfer.take()))
    }

    /// Ends all processes of the job. Returns only if MPI is closed.
    pub(super) fn abort(&self) {
        if let Ok(_open) = self.enter() {
            // SAFETY: MPI is open.
            unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
        }
    }

    /// Finalises MPI. All transfers must be complete, on all processes.
    pub(super) fn close(&self) {
        drop(self.lock().take());
    }
}

/// A message in transit, with the memory that MPI reads or writes until it is complete.
///
/// If it is dropped before, its memory is leaked: MPI may still use it.
pub(super) struct Transfer<T> {
    request: ffi::MPI_Request,
    buffer: ManuallyDrop<Vec<T>>,
    /// How many elements are initialised when the transfer is complete.
    length: usize,
}

// SAFETY: a request may be completed by any thread, and the buffer is owned.
unsafe impl<T: Send> Send for Transfer<T> {}

impl<T: Copy> Transfer<T> {
    fn new(buffer: Vec<T>) -> Self {
        Self {
            // SAFETY: a constant of the MPI library.
            request: unsafe { ffi::RSMPI_REQUEST_NULL },
            length: buffer.len(),
            buffer: ManuallyDrop::new(buffer),
        }
    }

    /// The buffer. Only for a transfer that is complete.
    fn take(&mut self) -> Vec<T> {
        let mut buffer = std::mem::take(&mut *self.buffer);
        // SAFETY: the buffer was made with room for `length` integers, and the completed transfer has written them, or
        // they were there before. A second take finds an empty buffer and a length of zero.
        unsafe { buffer.set_len(std::mem::take(&mut self.length)) };
        buffer
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
