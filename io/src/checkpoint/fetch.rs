//! Reading on all ranks: every piece once, and to who needs it.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::{DType, TensorData};
use halocline_core::{Batch, DeviceMesh, Expected, IndexBox, Layout, Operation, Payload, Traffic};

use super::index::{PieceEntry, TensorEntry};
use super::load::dtype_of;
use super::{file, pieces};
use crate::Result;
use crate::agreement::{Fallible, agree};

/// Bytes of pieces that all ranks together read before they send them to each other.
const AT_ONCE: usize = 256 << 20;

/// Each rank's cells of tensors in their layouts. Every piece is read once, by a rank that needs most of it, and its
/// parts are sent to the others that need them.
pub(super) fn fetch(
    folder: &Path,
    mesh: &DeviceMesh,
    wanted: &[(&TensorEntry, Layout)],
) -> halocline_core::Result<Vec<TensorData>> {
    let own = mesh.position();
    let mut arrays: Vec<Array> = wanted
        .iter()
        .map(|(entry, layout)| Array::zeros(layout.local_box(own), dtype_of(entry)))
        .collect();
    let mut reading = BTreeMap::new();
    let mut jobs = Vec::new();
    let mut bytes = 0;
    for (target, (entry, layout)) in wanted.iter().enumerate() {
        let needs: Vec<(usize, IndexBox)> = (0..mesh.size())
            .map(|position| (position, layout.local_box(position)))
            .collect();
        for piece in &entry.pieces {
            let cells = piece.cells();
            let Some(reader) = pieces::reader(&cells, piece.len(), &needs, &mut reading) else {
                continue;
            };
            let parts = needs
                .iter()
                .filter_map(|(position, need)| Some((*position, cells.intersection(need)?)));
            jobs.push(Job {
                target,
                piece,
                cells: cells.clone(),
                reader,
                parts: parts.collect(),
            });
            bytes += piece.len();
            if bytes >= AT_ONCE {
                run(folder, mesh, &jobs, &mut arrays)?;
                jobs.clear();
                bytes = 0;
            }
        }
    }
    run(folder, mesh, &jobs, &mut arrays)?;
    let arrays = arrays.into_iter();
    Ok(arrays
        .map(|a| TensorData::from_bytes_vec(a.bytes, a.cells.shape(), a.dtype))
        .collect())
}

/// Reads this rank's pieces, sends their parts to who needs them, and receives those of others.
fn run(
    folder: &Path,
    mesh: &DeviceMesh,
    jobs: &[Job<'_>],
    arrays: &mut [Array],
) -> halocline_core::Result<()> {
    let (own, ranks) = (mesh.position(), mesh.shape().ranks());
    let read = jobs
        .iter()
        .filter(|job| job.reader == own)
        .map(|job| Ok((job, file::read(folder, job.piece)?)))
        .collect::<Result<Vec<_>>>();
    let read = agree(mesh, "checkpoint", Fallible::All, read)?;

    let mut sends: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for (job, bytes) in &read {
        for (position, part) in &job.parts {
            let array = &mut arrays[job.target];
            if *position == own {
                array.put((bytes, &job.cells), part);
            } else {
                let element = array.dtype.size();
                let send = sends.entry(*position).or_default();
                let start = send.len();
                send.resize(start + part.volume() * element, 0);
                pieces::copy(
                    (bytes, &job.cells),
                    (&mut send[start..], part),
                    part,
                    element,
                );
            }
        }
    }
    drop(read);
    let mut expected: BTreeMap<usize, Vec<(usize, &IndexBox)>> = BTreeMap::new();
    for job in jobs.iter().filter(|job| job.reader != own) {
        let parts = job.parts.iter().filter(|(position, _)| *position == own);
        for (_, part) in parts {
            expected
                .entry(job.reader)
                .or_default()
                .push((job.target, part));
        }
    }
    let batch = Batch {
        operation: Operation::new("checkpoint", Traffic::Scatter, None),
        sends: sends
            .into_iter()
            .map(|(position, bytes)| (ranks[position], Payload::Bytes(bytes)))
            .collect(),
        receives: expected
            .keys()
            .map(|&position| (ranks[position], Expected::Bytes))
            .collect(),
    };
    let received = mesh.comm().clone().start(batch)?.finish()?;
    for (payload, parts) in received.into_iter().zip(expected.into_values()) {
        let Payload::Bytes(bytes) = payload else {
            unreachable!("the engine gives what was expected, or an error");
        };
        let mut rest = &bytes[..];
        for (target, part) in parts {
            let array = &mut arrays[target];
            let (bytes, others) = rest.split_at(part.volume() * array.dtype.size());
            array.put((bytes, part), part);
            rest = others;
        }
    }
    Ok(())
}

/// A piece to read.
#[derive(Debug)]
struct Job<'a> {
    /// The array that it is of.
    target: usize,
    piece: &'a PieceEntry,
    cells: IndexBox,
    /// The mesh position that reads it.
    reader: usize,
    /// What of it each position needs.
    parts: Vec<(usize, IndexBox)>,
}

/// Cells of a tensor in memory.
#[derive(Debug)]
struct Array {
    cells: IndexBox,
    dtype: DType,
    bytes: Vec<u8>,
}

impl Array {
    fn zeros(cells: IndexBox, dtype: DType) -> Self {
        Self {
            bytes: vec![0; cells.volume() * dtype.size()],
            cells,
            dtype,
        }
    }

    fn put(&mut self, source: (&[u8], &IndexBox), cells: &IndexBox) {
        let element = self.dtype.size();
        pieces::copy(source, (&mut self.bytes, &self.cells), cells, element);
    }
}
