//! Batches of messages: kinds of payload, order, and batches that fail or are dropped.

use std::time::{Duration, Instant};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use halocline_core::comm::{Batch, Expected, Operation, Payload};
use halocline_core::{Error, Result, Traffic, World};

use super::Found;

/// Sends a payload to each rank, this one included, and returns the payloads received.
pub(super) fn exchange(
    world: &World,
    payload: impl Fn(usize) -> Payload,
    expected: impl Fn(usize) -> Expected,
) -> Result<Vec<Payload>> {
    let ranks = 0..world.size();
    let batch = Batch {
        operation: Operation::new("test", Traffic::Control, None),
        sends: ranks.clone().map(|rank| (rank, payload(rank))).collect(),
        receives: ranks.map(|rank| (rank, expected(rank))).collect(),
    };
    world.comm().clone().start(batch)?.finish()
}

fn data(tensor: DispatchTensor) -> TensorData {
    match tensor.dtype() {
        DType::Bool(_) => Tensor::<2, Bool>::from_dispatch(tensor).into_data(),
        dtype if dtype.is_float() => Tensor::<2>::from_dispatch(tensor).into_data(),
        _ => Tensor::<2, Int>::from_dispatch(tensor).into_data(),
    }
}

/// Every kind of payload: several tensors, views, elements other than floats, and empty ones.
pub(super) fn payloads(world: World) -> Result<Found> {
    let device = world.device().clone().inner();
    let integers = Tensor::<1, Int>::arange(0..30, &device).reshape([5, 6]) + world.rank() as i64;
    let floats = integers.clone().float();
    let views = [
        floats.clone().transpose(),
        floats.clone().slice([1..4, 2..5]),
        floats.clone().flip([0]),
        floats.clone().slice([2..2, 0..6]),
    ];
    let half = floats.clone().slice([0..1, 0..3]).cast(DType::F16);
    let groups = [
        views.map(Tensor::into_dispatch).to_vec(),
        vec![integers.clone().slice([0..5, 1..4]).into_dispatch()],
        vec![integers.greater_elem(7).into_dispatch()],
        vec![
            floats.clone().slice([1..2, 1..2]).into_dispatch(),
            floats.into_dispatch(),
        ],
        vec![half.into_dispatch()],
        vec![],
    ];
    let mut found = Vec::new();
    for tensors in groups {
        let expected = Expected::Tensors {
            shapes: tensors.iter().map(TensorMetadata::shape).collect(),
            dtype: tensors.first().map_or(DType::F32, TensorMetadata::dtype),
            device: device.as_dispatch().clone(),
        };
        let sent = Payload::Tensors(tensors);
        for payload in exchange(&world, |_| sent.clone(), |_| expected.clone())? {
            let Payload::Tensors(tensors) = payload else {
                panic!("{payload:?}")
            };
            found.extend(tensors.into_iter().map(data));
        }
    }
    for length in [0, 1, 47, 48, 49, 5000] {
        let send = |peer| Payload::Bytes(vec![peer as u8; length]);
        for payload in exchange(&world, send, |_| Expected::Bytes)? {
            let Payload::Bytes(bytes) = payload else {
                panic!("{payload:?}")
            };
            found.push(TensorData::new(bytes, [length]));
        }
    }
    Ok(found)
}

/// Batches that are all started before the first is finished, each with several messages for a
/// peer.
pub(super) fn many_in_flight(world: World) -> Result<Found> {
    let peers = || (0..world.size()).filter(|&peer| peer != world.rank());
    let comm = world.comm().clone();
    let in_flight = (0..200_usize).map(|i| {
        let bytes = |part| Payload::Bytes(vec![part; (i * 997) % 100_000]);
        comm.clone().start(Batch {
            operation: Operation::new("test", Traffic::Control, None),
            sends: peers()
                .flat_map(|peer| [(peer, bytes(1)), (peer, bytes(2))])
                .collect(),
            receives: peers()
                .flat_map(|peer| [peer; 2])
                .map(|peer| (peer, Expected::Bytes))
                .collect(),
        })
    });
    let mut found = Vec::new();
    // Finished in another order than they were started in.
    let in_flight = in_flight.collect::<Result<Vec<_>>>()?;
    for batch in in_flight.into_iter().rev() {
        for payload in batch.finish()? {
            let Payload::Bytes(bytes) = payload else {
                panic!("{payload:?}")
            };
            let length = bytes.len();
            found.push(TensorData::new(bytes, [length]));
        }
    }
    Ok(found)
}

/// Rank 0 sends a message that MPI cannot send at once, and then is busy without calling MPI.
pub(super) fn sends_do_not_wait(world: World) -> Result<()> {
    let operation = || Operation::new("test", Traffic::Control, None);
    world.barrier()?;
    let start = Instant::now();
    if world.is_root() {
        let in_flight = world.comm().clone().start(Batch {
            operation: operation(),
            sends: vec![(1, Payload::Bytes(vec![5; 8 << 20]))],
            receives: vec![],
        })?;
        in_flight.finish()?;
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "{:?}",
            start.elapsed()
        );
        std::thread::sleep(Duration::from_secs(2));
    } else {
        let in_flight = world.comm().clone().start(Batch {
            operation: operation(),
            sends: vec![],
            receives: vec![(0, Expected::Bytes)],
        })?;
        let received = in_flight.finish()?;
        assert!(matches!(&received[..], [Payload::Bytes(bytes)] if *bytes == vec![5; 8 << 20]));
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "{:?}",
            start.elapsed()
        );
    }
    Ok(())
}

/// A message of more bytes than an `int` can count.
pub(super) fn large_message(world: World) -> Result<()> {
    let length = (1 << 31) + 4;
    let in_flight = world.comm().clone().start(Batch {
        operation: Operation::new("test", Traffic::Control, None),
        sends: if world.is_root() {
            vec![(1, Payload::Bytes(vec![7; length]))]
        } else {
            vec![]
        },
        receives: if world.is_root() {
            vec![]
        } else {
            vec![(0, Expected::Bytes)]
        },
    })?;
    match &in_flight.finish()?[..] {
        [] if world.is_root() => {}
        [Payload::Bytes(bytes)] => {
            assert!(bytes.len() == length && bytes.iter().all(|&byte| byte == 7));
        }
        other => panic!("{} payloads", other.len()),
    }
    Ok(())
}

/// Messages of a dropped batch are never received; the job still ends in order.
pub(super) fn dropped_in_flight(world: World) -> Result<()> {
    let peers = || (0..world.size()).filter(|&peer| peer != world.rank());
    // Many, so that some arrive between the steps in which a rank ends.
    let sizes = [1 << 20].into_iter().chain([4 << 10; 40]);
    for bytes in sizes {
        let _ = world.comm().clone().start(Batch {
            operation: Operation::new("test", Traffic::Control, None),
            sends: peers()
                .map(|peer| (peer, Payload::Bytes(vec![0; bytes])))
                .collect(),
            receives: peers().map(|peer| (peer, Expected::Bytes)).collect(),
        })?;
    }
    Ok(())
}

/// A long message of another operation is an error, and the next message is not mistaken for it.
pub(super) fn unexpected_in_flight(world: World) -> Result<()> {
    // Travels in several pieces, of which the last is not one of the shortest.
    const LONG: usize = (4 << 20) + 5000;
    let peer = 1 - world.rank();
    let exchange = |name, byte| {
        let in_flight = world.comm().clone().start(Batch {
            operation: Operation::new(name, Traffic::Control, None),
            sends: vec![(peer, Payload::Bytes(vec![byte; LONG]))],
            receives: vec![(peer, Expected::Bytes)],
        })?;
        in_flight.finish()
    };
    let error = exchange(["sum", "mean"][world.rank()], 1).expect_err("operations differ");
    assert!(matches!(error, Error::Diverged { .. }), "{error}");
    let received = exchange("same", 2)?;
    assert!(matches!(&received[..], [Payload::Bytes(bytes)] if *bytes == vec![2; LONG]));
    Ok(())
}
