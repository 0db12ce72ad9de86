//! Strings in HDF5 files, of fixed and variable length. For variable-length strings, every bound is
//! checked.
//!
//! HDF5 1.10 trusts the description of the global heap in a file (HDF5 File Format Specification
//! 3.0, section III.E), and crashes if it is damaged. Here, damage is an error.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use hdf5_metno::dataset::Layout;
use hdf5_metno::types::{FixedAscii, FixedUnicode, TypeDescriptor, VarLenAscii, VarLenUnicode};
use hdf5_metno::{Container, Dataset, H5Type};

/// Longest fixed-length string that is read, in bytes.
const FIXED: usize = 256;
/// Bytes of an element: length of the string, address of a collection, and index of an object in
/// it.
const ELEMENT: usize = 16;
/// Bytes of the header of a collection, and of the header of each object.
const HEADER: usize = 16;
/// Size of the largest collection that is read. HDF5 creates collections of 4 KiB, or as large as
/// their only string.
const LARGEST: u64 = 1 << 24;

/// Reads all strings of the dataset called `name`.
pub(crate) fn of_dataset(
    path: &Path,
    name: &'static str,
    dataset: &Dataset,
) -> crate::Result<Vec<String>> {
    let error = |cause: String| crate::Error::data(path, name, cause);
    // Each fixed-length string takes `FIXED` bytes of memory, however short it is in the file.
    let size = std::fs::metadata(path).map_err(|e| crate::Error::io(path, e))?;
    let limit = (1 << 20) + size.len().saturating_mul(16);
    if dataset.size().saturating_mul(FIXED) as u64 > limit {
        let cause = format!("{} names in a file of {} bytes", dataset.size(), size.len());
        return Err(error(cause));
    }
    // Contiguous elements are read here, with the checks that HDF5 lacks.
    let kind = dataset.dtype().and_then(|dtype| dtype.to_descriptor());
    let in_heap = matches!(
        kind,
        Ok(TypeDescriptor::VarLenUnicode | TypeDescriptor::VarLenAscii)
    );
    if let (true, Layout::Contiguous, Some(offset)) = (in_heap, dataset.layout(), dataset.offset())
    {
        let checked = || {
            let mut file = File::open(path)?;
            let usual = can_read(&mut file)?;
            usual
                .then(|| read(&mut file, offset, dataset.size()))
                .transpose()
        };
        if let Some(names) = checked().map_err(|e| error(e.to_string()))? {
            return Ok(names);
        }
    }
    read_strings(dataset).map_err(|e| error(e.to_string()))
}

/// Reads the strings of a dataset or an attribute with HDF5.
pub(crate) fn read_strings(container: &Container) -> hdf5_metno::Result<Vec<String>> {
    fn read<T: H5Type + ToString>(container: &Container) -> hdf5_metno::Result<Vec<String>> {
        let strings: Vec<T> = container.read_raw()?;
        Ok(strings.iter().map(ToString::to_string).collect())
    }
    match container.dtype()?.to_descriptor()? {
        TypeDescriptor::VarLenUnicode => read::<VarLenUnicode>(container),
        TypeDescriptor::VarLenAscii => read::<VarLenAscii>(container),
        TypeDescriptor::FixedUnicode(_) => read::<FixedUnicode<FIXED>>(container),
        TypeDescriptor::FixedAscii(_) => read::<FixedAscii<FIXED>>(container),
        other => Err(format!("expected strings, found {other}").into()),
    }
}

/// Whether addresses and lengths have eight bytes and are relative to the beginning of the file, as
/// in nearly all files.
fn can_read(file: &mut File) -> Result<bool> {
    let start = bytes(file, 0, HEADER)?;
    // The position of their sizes depends on the version of the superblock.
    let sizes = if start[8] < 2 {
        &start[13..15]
    } else {
        &start[9..11]
    };
    Ok(start.starts_with(b"\x89HDF\r\n\x1a\n") && sizes == [8, 8])
}

/// Reads the strings of a contiguous dataset of `count` elements at `offset`.
fn read(file: &mut File, offset: u64, count: usize) -> Result<Vec<String>> {
    let size = file.metadata()?.len();
    // Strings and heaps that do not overlap have no more bytes than the file. Overlapping ones,
    // which could take much more memory, are refused.
    let mut left = [size; 2];
    let mut spend = |kind: usize, bytes: u64| match left[kind].checked_sub(bytes) {
        Some(rest) => {
            left[kind] = rest;
            Ok(())
        }
        None => Err(broken("strings share their bytes")),
    };
    let elements = bytes(file, offset, count.saturating_mul(ELEMENT))?;
    let mut heaps: HashMap<u64, Heap> = HashMap::new();
    let mut names = Vec::with_capacity(count);
    for element in elements.chunks_exact(ELEMENT) {
        let length = number(&element[..4]);
        let (address, object) = (number(&element[4..12]), number(&element[12..]));
        if length == 0 {
            names.push(String::new());
            continue;
        }
        spend(0, length)?;
        let heap = match heaps.entry(address) {
            Entry::Occupied(heap) => heap.into_mut(),
            Entry::Vacant(heap) => {
                let read = Heap::read(file, address)?;
                spend(1, read.bytes.len() as u64)?;
                heap.insert(read)
            }
        };
        let name = heap
            .object(object)
            .and_then(|object| object.get(..length as usize))
            .ok_or_else(|| broken("a string lies outside of its heap"))?;
        let name = std::str::from_utf8(name).map_err(|_| broken("a string is not UTF-8"))?;
        names.push(name.trim_end_matches('\0').into());
    }
    Ok(names)
}

/// Collection of the global heap.
struct Heap {
    bytes: Vec<u8>,
    /// Byte ranges of the objects, by index.
    objects: HashMap<u64, Range<usize>>,
}

impl Heap {
    fn read(file: &mut File, address: u64) -> Result<Self> {
        let header = bytes(file, address, HEADER)?;
        let size = number(&header[8..]);
        if &header[..5] != b"GCOL\x01" || !(HEADER as u64..=LARGEST).contains(&size) {
            return Err(broken("there is no heap where a string says it is"));
        }
        let bytes = bytes(file, address, size as usize)?;
        let mut objects = HashMap::new();
        let mut position = HEADER;
        while let Some(header) = bytes.get(position..position + HEADER) {
            let (index, size) = (number(&header[..2]), number(&header[8..]) as usize);
            let start = position + HEADER;
            // Object 0 is the free space at the end of the collection.
            let end = start
                .checked_add(size)
                .filter(|end| index != 0 && *end <= bytes.len());
            let Some(end) = end else {
                break;
            };
            objects.insert(index, start..end);
            position = end.next_multiple_of(8);
        }
        Ok(Self { bytes, objects })
    }

    fn object(&self, number: u64) -> Option<&[u8]> {
        self.bytes.get(self.objects.get(&number)?.clone())
    }
}

/// Reads `length` bytes of a file at `offset`.
fn bytes(file: &mut File, offset: u64, length: usize) -> Result<Vec<u8>> {
    let size = file.metadata()?.len();
    let end = offset.checked_add(length as u64);
    if end.is_none_or(|end| end > size) {
        return Err(broken("a string lies outside of the file"));
    }
    let mut bytes = vec![0; length];
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn number(little_endian: &[u8]) -> u64 {
    little_endian
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn broken(cause: &str) -> Error {
    Error::new(ErrorKind::InvalidData, cause)
}
