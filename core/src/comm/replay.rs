//! Communicator that records received messages and replays them without communication.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use super::collectives::AGREEMENT_TO_GATHER;
use super::{
    Batch, Communicator, Counters, Expected, InFlight, Payload, Pending, Settings, Traffic,
};
use crate::Result;
use crate::lock::lock;

/// Engine that first records the batches of a program, then replays them once to the same program
/// without any message, and finally passes batches on. Gathers of parameters are always passed on.
#[derive(Debug)]
pub(crate) struct Replay {
    engine: Arc<dyn Communicator>,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// Messages received by each batch, in start order; `None` for a batch in flight.
    Recording(Vec<Option<Vec<Received>>>),
    Repeating(VecDeque<Vec<Received>>),
    Passing,
}

/// Message received for an [`Expected`].
#[derive(Debug)]
enum Received {
    Payload(Payload),
    Place(Vec<u8>),
}

impl Replay {
    /// Records the batches of an engine.
    pub(crate) fn of(engine: Arc<dyn Communicator>) -> Self {
        Self {
            engine,
            state: Mutex::new(State::Recording(Vec::new())),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Ends the recording, and starts the replay.
    pub(crate) fn repeat(&self) {
        let mut state = self.state();
        if let State::Recording(record) = &mut *state {
            let finished = record
                .drain(..)
                .map(|batch| batch.expect("a finished batch"));
            *state = State::Repeating(finished.collect());
        }
    }

    /// Ends the replay, and passes on later batches, which are those of a backward pass.
    pub(crate) fn pass_on(&self) {
        let before = std::mem::replace(&mut *self.state(), State::Passing);
        let repeated = match before {
            State::Repeating(rest) => rest.is_empty(),
            _ => true,
        };
        assert!(
            repeated,
            "recompute: the block received less than in its first run"
        );
    }
}

/// Batch whose messages are recorded on arrival.
struct Recorded {
    in_flight: InFlight,
    expected: Vec<Expected>,
    /// Index of the batch in the record.
    index: usize,
    replay: Arc<Replay>,
}

impl Pending for Recorded {
    fn finish(self: Box<Self>) -> Result<Vec<Payload>> {
        let payloads = self.in_flight.finish()?;
        let received = self.expected.iter().zip(&payloads);
        let received = received.map(|(expected, payload)| match expected {
            Expected::Place(place) => Received::Place(place.read()),
            _ => Received::Payload(payload.clone()),
        });
        if let State::Recording(record) = &mut *self.replay.state() {
            record[self.index] = Some(received.collect());
        }
        Ok(payloads)
    }

    fn in_background(&self) {
        self.in_flight.in_background();
    }
}

impl Communicator for Replay {
    fn rank(&self) -> usize {
        self.engine.rank()
    }

    fn size(&self) -> usize {
        self.engine.size()
    }

    fn stands_in(&self) -> bool {
        true
    }

    fn is_dry(&self) -> bool {
        self.engine.is_dry()
    }

    fn start(self: Arc<Self>, batch: Batch) -> Result<InFlight> {
        enum Turn {
            Record(usize),
            Repeat(Vec<Received>),
            Pass,
        }

        // Parameters are gathered again, because keeping them would defeat storing them in shards.
        // Ranks agree to a gather where it starts, which may be before the block.
        let operation = &batch.operation;
        if operation.traffic() == Traffic::Gather || operation.name() == AGREEMENT_TO_GATHER {
            return self.engine.clone().start(batch);
        }
        let turn = match &mut *self.state() {
            State::Recording(record) => {
                record.push(None);
                Turn::Record(record.len() - 1)
            }
            State::Repeating(record) => {
                let received = record.pop_front();
                let received = received.expect("recompute: more messages than in the first run");
                Turn::Repeat(received)
            }
            State::Passing => Turn::Pass,
        };
        match turn {
            Turn::Pass => self.engine.clone().start(batch),
            Turn::Record(index) => {
                let expected = batch.receives.iter().map(|(_, expected)| expected.clone());
                let expected = expected.collect();
                Ok(InFlight::new(Recorded {
                    in_flight: self.engine.clone().start(batch)?,
                    expected,
                    index,
                    replay: self,
                }))
            }
            Turn::Repeat(received) => {
                let pairs = batch.receives.into_iter().zip(received);
                let payloads = pairs.map(|((_, expected), received)| match (expected, received) {
                    (Expected::Place(place), Received::Place(bytes)) => {
                        place.write(&bytes);
                        Payload::Tensors(Vec::new())
                    }
                    (_, Received::Payload(payload)) => payload,
                    (expected, Received::Place(_)) => {
                        panic!("recompute: {expected} where the first run received a place")
                    }
                });
                let payloads: Vec<_> = payloads.collect();
                Ok(InFlight::new(|| Ok(payloads)))
            }
        }
    }

    fn fail(&self, rank: usize, cause: &str) {
        self.engine.fail(rank, cause);
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.engine.failure()
    }

    fn takes_time(&self) -> bool {
        self.engine.takes_time()
    }

    fn settings(&self) -> &Settings {
        self.engine.settings()
    }

    fn counters(&self) -> &Counters {
        self.engine.counters()
    }

    fn describe_boxes(&self, boxes: &dyn fmt::Display) {
        if !matches!(*self.state(), State::Repeating(_)) {
            self.engine.describe_boxes(boxes);
        }
    }
}
