//! Messages: payloads, expected forms, and batches in flight.

use std::fmt;
use std::time::Instant;

use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape};

use super::host::Place;
use super::operation::Operation;
use crate::Result;

/// Content of a message; see the example of [`Communicator`](super::Communicator).
#[derive(Clone, Debug)]
pub enum Payload {
    /// Pieces of a field.
    Tensors(Vec<DispatchTensor>),
    /// Metadata.
    Bytes(Vec<u8>),
}

impl Payload {
    /// The size of the payload in bytes.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Tensors(tensors) => tensors
                .iter()
                .map(|t| t.shape().num_elements() * t.dtype().size())
                .sum(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }
}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensors(tensors) => {
                let shapes: Vec<_> = tensors.iter().map(|t| t.shape().to_vec()).collect();
                write!(f, "{shapes:?}")
            }
            Self::Bytes(bytes) => write!(f, "{} bytes of metadata", bytes.len()),
        }
    }
}

/// Form of an expected message; see the example of [`Communicator`](super::Communicator).
#[derive(Clone, Debug)]
pub enum Expected {
    /// Tensors of these shapes.
    Tensors {
        /// The shapes.
        shapes: Vec<Shape>,
        /// The element type.
        dtype: DType,
        /// The device of the received tensors.
        device: DispatchDevice,
    },
    /// A tensor that is written to its place in a larger one; the returned payload then has no
    /// tensors.
    Place(Place),
    /// Metadata of any length.
    Bytes,
}

impl Expected {
    /// The size of the message in bytes; `None` if it may have any size.
    pub(crate) fn bytes(&self) -> Option<usize> {
        match self {
            Self::Bytes => None,
            Self::Place(place) => Some(place.bytes()),
            Self::Tensors { shapes, dtype, .. } => {
                let cells = shapes.iter().map(Shape::num_elements);
                Some(cells.sum::<usize>() * dtype.size())
            }
        }
    }

    /// Whether a payload has the expected form.
    pub(crate) fn accepts(&self, payload: &Payload) -> bool {
        match (self, payload) {
            (Self::Bytes, Payload::Bytes(_)) => true,
            (Self::Place(place), Payload::Tensors(_)) => payload.bytes() == place.bytes(),
            (Self::Tensors { shapes, dtype, .. }, Payload::Tensors(tensors)) => {
                let fits = |(shape, tensor): (&Shape, &DispatchTensor)| {
                    *shape == tensor.shape() && *dtype == tensor.dtype()
                };
                shapes.len() == tensors.len() && shapes.iter().zip(tensors).all(fits)
            }
            _ => false,
        }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensors { shapes, dtype, .. } => {
                let shapes: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
                write!(f, "{dtype:?} {shapes:?}")
            }
            Self::Place(place) => write!(f, "{} bytes of a larger tensor", place.bytes()),
            Self::Bytes => f.write_str("metadata"),
        }
    }
}

/// Messages that one rank sends and receives in one operation; see the example of
/// [`Communicator`](super::Communicator).
#[derive(Debug)]
pub struct Batch {
    /// The operation.
    pub operation: Operation,
    /// Messages for ranks of the world.
    pub sends: Vec<(usize, Payload)>,
    /// Messages from ranks of the world.
    pub receives: Vec<(usize, Expected)>,
}

/// Batch in flight; [`finish`](InFlight::finish) waits for its messages. Batches may be finished in
/// any order. See the example of [`Communicator`](super::Communicator).
#[must_use = "the messages of a batch are lost unless it is finished"]
pub struct InFlight(Box<dyn Pending>);

/// State of an engine for a batch in flight.
pub trait Pending {
    /// Waits for the messages and returns them in the order of [`Batch::receives`].
    ///
    /// # Errors
    /// The errors of [`InFlight::finish`].
    fn finish(self: Box<Self>) -> Result<Vec<Payload>>;

    /// Lets the messages progress while the rank computes, on engines that must be asked to.
    fn in_background(&self) {}
}

impl<F: FnOnce() -> Result<Vec<Payload>>> Pending for F {
    fn finish(self: Box<Self>) -> Result<Vec<Payload>> {
        self()
    }
}

impl InFlight {
    /// Makes a batch in flight.
    pub fn new(pending: impl Pending + 'static) -> Self {
        Self(Box::new(pending))
    }

    /// Lets the messages progress while the rank computes, on engines that must be asked to.
    ///
    /// For operators that have work to do before they [`finish`](Self::finish).
    pub fn in_background(&self) {
        self.0.in_background();
    }

    /// Adds a callback that runs when all messages have arrived, with the time at which the rank
    /// started to wait.
    pub(crate) fn then(self, callback: impl FnOnce(Instant) + 'static) -> Self {
        struct Then<F>(InFlight, F);

        impl<F: FnOnce(Instant)> Pending for Then<F> {
            fn finish(self: Box<Self>) -> Result<Vec<Payload>> {
                let Self(in_flight, callback) = *self;
                let waited_from = Instant::now();
                let payloads = in_flight.finish()?;
                callback(waited_from);
                Ok(payloads)
            }

            fn in_background(&self) {
                self.0.in_background();
            }
        }

        Self::new(Then(self, callback))
    }

    /// Waits for the messages and returns them in the order of [`Batch::receives`].
    ///
    /// # Errors
    /// A message does not arrive within the timeout, belongs to another operation or has another
    /// shape; a rank has ended.
    pub fn finish(self) -> Result<Vec<Payload>> {
        self.0.finish()
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InFlight")
    }
}
