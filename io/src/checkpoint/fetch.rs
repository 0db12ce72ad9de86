//! Collective reading: one rank reads each piece and sends it to the ranks that need it.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::{DType, TensorData};
use halocline_core::{DeviceMesh, IndexBox, Layout, Traffic};

use super::index::{PieceEntry, TensorEntry};
use super::{file, pieces};
use crate::ranks::agreement::{self, Fallible, agree, broadcast, same};
use crate::{Error, Result};

/// Name of checkpoint communication in errors.
pub(super) const OPERATION: &str = "checkpoint";

/// Total bytes that all ranks read before each exchange.
const BYTES_PER_ROUND: usize = 256 << 20;

/// Tensor to read, with its target layout.
#[derive(Debug)]
pub(super) struct Wanted<'a> {
    pub name: &'a str,
    pub entry: &'a TensorEntry,
    pub layout: Layout,
}

/// Description of a tensor for comparison among ranks: text, and a checksum of its pieces and
/// ranks.
type Description = (String, u32);

impl Wanted<'_> {
    /// Returns the cells of a rank. Its position is looked up because layouts may order the ranks
    /// differently.
    fn cells(&self, rank: usize) -> IndexBox {
        let mut ranks = self.layout.mesh().ranks().iter();
        let position = ranks.position(|other| *other == rank);
        self.layout
            .local_box(position.expect("a layout on the ranks of the mesh"))
    }

    fn description(&self) -> Description {
        let Self {
            name,
            entry,
            layout,
        } = self;
        let details = serde_json::to_vec(&(&entry.pieces, layout.mesh().ranks()))
            .expect("numbers and strings are JSON");
        let text = format!("{name:?}, {} {layout}", entry.dtype);
        (text, crc32fast::hash(&details))
    }
}

/// Reads this rank's cells of tensors in their layouts. Every piece is read once, by one of the
/// ranks that need most of it, which sends the other ranks the parts that they need.
///
/// # Errors
/// Fails on all ranks if the ranks request different tensors or layouts, before anything is read,
/// or if any rank cannot read.
pub(super) fn fetch(
    folder: &Path,
    mesh: &DeviceMesh,
    wanted: &[Wanted<'_>],
) -> halocline_core::Result<Vec<TensorData>> {
    check_same(mesh, wanted)?;
    let ranks = mesh.shape().ranks();
    let here = ranks[mesh.position()];
    let mut arrays: Vec<Array> = wanted
        .iter()
        .map(|wanted| Array::zeros(wanted.cells(here), wanted.entry.element_type()))
        .collect();
    let mut reading = BTreeMap::new();
    let mut jobs = Vec::new();
    let mut bytes = 0;
    for (target, wanted) in wanted.iter().enumerate() {
        let needs: Vec<(usize, IndexBox)> = (0..mesh.size())
            .map(|position| (position, wanted.cells(ranks[position])))
            .collect();
        for piece in &wanted.entry.pieces {
            let cells = piece.cells();
            let Some(reader) = pieces::reader(&cells, piece.len(), &needs, &mut reading) else {
                continue;
            };
            let parts = needs
                .iter()
                .filter_map(|(position, need)| Some((*position, cells.intersection(need)?)))
                .collect();
            jobs.push(Job {
                target,
                piece,
                cells,
                reader,
                parts,
            });
            bytes += piece.len();
            if bytes >= BYTES_PER_ROUND {
                exchange(folder, mesh, &jobs, &mut arrays)?;
                jobs.clear();
                bytes = 0;
            }
        }
    }
    exchange(folder, mesh, &jobs, &mut arrays)?;
    Ok(arrays
        .into_iter()
        .map(|a| TensorData::from_bytes_vec(a.bytes, a.cells.shape(), a.dtype))
        .collect())
}

/// Checks that all ranks request the same tensors in the same layouts and order, since messages
/// carry no description of their cells.
fn check_same(mesh: &DeviceMesh, wanted: &[Wanted<'_>]) -> halocline_core::Result<()> {
    let descriptions: Vec<Description> = wanted.iter().map(Wanted::description).collect();
    let list = serde_json::to_vec(&descriptions).expect("numbers and strings are JSON");
    if same(mesh, OPERATION, &crc32fast::hash(&list).to_le_bytes())? {
        return Ok(());
    }
    let first = broadcast(mesh, OPERATION, list)?;
    let first: Vec<Description> = serde_json::from_slice(&first).expect("another rank encoded it");
    let ranks = [mesh.comm().rank(), mesh.shape().ranks()[0]];
    agree(
        mesh,
        OPERATION,
        Fallible::All,
        compare(&descriptions, &first, ranks),
    )
}

/// Compares the tensors that a rank requests with those of the first rank of the mesh.
fn compare(own: &[Description], first: &[Description], ranks: [usize; 2]) -> Result<()> {
    let differs = |index: &usize| own.get(*index) != first.get(*index);
    let Some(index) = (0..own.len().max(first.len())).find(differs) else {
        return Ok(());
    };
    let [mut got, expected] = [own, first].map(|list| match list.get(index) {
        Some((words, _)) => words.clone(),
        None => format!("no more than {index} tensors"),
    });
    if got == expected {
        got.push_str(" of another checkpoint, or on other ranks,");
    }
    let [own, first] = ranks;
    Err(Error::argument(
        "checkpoint",
        format!("{got} on rank {own}"),
        format!(
            "{expected} as on rank {first}; load the same tensors on all ranks, in the same order"
        ),
    ))
}

/// Reads this rank's pieces, sends the parts that other ranks need, and receives those of this
/// rank.
fn exchange(
    folder: &Path,
    mesh: &DeviceMesh,
    jobs: &[Job<'_>],
    arrays: &mut [Array],
) -> halocline_core::Result<()> {
    let (here, ranks) = (mesh.position(), mesh.shape().ranks());
    let read = jobs
        .iter()
        .filter(|job| job.reader == here)
        .map(|job| Ok((job, file::read(folder, job.piece)?)))
        .collect::<Result<Vec<_>>>();
    let read = agree(mesh, OPERATION, Fallible::All, read)?;

    let mut sends: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for (job, bytes) in &read {
        for (position, part) in &job.parts {
            let array = &mut arrays[job.target];
            if *position == here {
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
    for job in jobs.iter().filter(|job| job.reader != here) {
        let parts = job.parts.iter().filter(|(position, _)| *position == here);
        for (_, part) in parts {
            expected
                .entry(job.reader)
                .or_default()
                .push((job.target, part));
        }
    }
    let readers = expected.keys().copied();
    let received = agreement::exchange(mesh, OPERATION, Traffic::Scatter, sends, readers)?;
    for (bytes, (position, parts)) in received.into_iter().zip(expected) {
        put_parts(&bytes, &parts, arrays).map_err(|expected| {
            let got = format!("{} bytes from rank {}", bytes.len(), ranks[position]);
            Error::argument("checkpoint", got, format!("{expected}, as its pieces have"))
        })?;
    }
    Ok(())
}

/// Copies the consecutive parts of a message into their arrays. Returns the expected length as the
/// error if the message has another one.
fn put_parts(
    mut bytes: &[u8],
    parts: &[(usize, &IndexBox)],
    arrays: &mut [Array],
) -> std::result::Result<(), usize> {
    let size = |(target, part): &(usize, &IndexBox)| part.volume() * arrays[*target].dtype.size();
    let expected = parts.iter().map(size).sum();
    if bytes.len() != expected {
        return Err(expected);
    }
    for (target, part) in parts {
        let array = &mut arrays[*target];
        let (cells, rest) = bytes.split_at(part.volume() * array.dtype.size());
        array.put((cells, part), part);
        bytes = rest;
    }
    Ok(())
}

/// Piece to read.
#[derive(Debug)]
struct Job<'a> {
    /// Index of the tensor.
    target: usize,
    piece: &'a PieceEntry,
    cells: IndexBox,
    /// Mesh position of the rank that reads the piece.
    reader: usize,
    /// Part that each mesh position needs.
    parts: Vec<(usize, IndexBox)>,
}

/// Box of cells of a tensor, in memory.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_another_length_are_refused() {
        let part = IndexBox::whole(&[3]);
        let mut arrays = [Array::zeros(part.clone(), DType::F32)];
        let mut put = |bytes: &[u8]| put_parts(bytes, &[(0, &part)], &mut arrays);
        for length in [0, 11, 13] {
            assert_eq!(put(&[1; 13][..length]), Err(12));
        }
        assert_eq!(put(&[1; 12]), Ok(()));
        assert_eq!(arrays[0].bytes, [1; 12]);
    }

    #[test]
    fn the_first_tensor_that_differs_is_named() {
        let description = |name: &str, sum| (name.to_string(), sum);
        let (a, b) = (description("a", 1), description("b", 1));
        let message = |own: &[Description], first: &[Description]| {
            compare(own, first, [3, 0]).map_err(|error| error.to_string())
        };
        let list = [a.clone(), b.clone()];
        assert_eq!(message(&list, &list), Ok(()));
        for (own, first, words) in [
            (
                &list[..],
                &list[..1],
                ["got b on rank 3", "no more than 1 tensors as on rank 0"],
            ),
            (
                &list[..1],
                &list,
                ["got no more than 1 tensors on rank 3", "b as on rank 0"],
            ),
            (
                &[b, a.clone()],
                &list,
                ["got b on rank 3", "expected a as on rank 0"],
            ),
            (
                &[description("a", 2)],
                &[a],
                ["a of another checkpoint", "a as on rank 0"],
            ),
        ] {
            let error = message(own, first).unwrap_err();
            assert!(words.iter().all(|words| error.contains(words)), "{error}");
        }
    }
}
