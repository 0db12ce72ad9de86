//! Messages on their way out.

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use super::Patience;
use super::raw::{Link, Transfer};
use crate::{Error, Result};

/// Messages that this rank has sent and that have not left.
///
/// A thread drives them on, so that a rank that computes for long, or reads a file, does not hold up those that wait
/// for what it has sent: MPI itself works during its calls only.
pub(super) struct Outbox {
    posted: mpsc::Sender<Transfer<u8>>,
    thread: JoinHandle<Result<()>>,
}

impl Outbox {
    /// Starts the thread.
    pub(super) fn open(link: Arc<Link>) -> Result<Self> {
        let (posted, messages) = mpsc::channel();
        let thread = std::thread::Builder::new().name("mpi outbox".into());
        let thread = thread.spawn(move || drive(&link, &messages))?;
        Ok(Self { posted, thread })
    }

    /// Takes over a message that MPI has begun to send.
    pub(super) fn post(&self, transfer: Transfer<u8>) -> Result<()> {
        self.posted
            .send(transfer)
            .map_err(|_| Error::Engine("MPI failed to send an earlier message".into()))
    }

    /// Waits until all messages have left.
    pub(super) fn close(self) -> Result<()> {
        drop(self.posted);
        let ended = self.thread.join();
        ended.unwrap_or_else(|_| Err(Error::Engine("the thread that sends panicked".into())))
    }
}

fn drive(link: &Link, messages: &mpsc::Receiver<Transfer<u8>>) -> Result<()> {
    while let Ok(first) = messages.recv() {
        let mut leaving = vec![first];
        let mut patience = Patience::default();
        while !leaving.is_empty() {
            for mut transfer in std::mem::take(&mut leaving) {
                match link.poll(&mut transfer)? {
                    Some(_) => patience = Patience::default(),
                    None => leaving.push(transfer),
                }
            }
            leaving.extend(messages.try_iter());
            patience.wait();
        }
    }
    Ok(())
}
