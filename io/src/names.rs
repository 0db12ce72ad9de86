//! Strings of variable length as HDF5 keeps them, read with every bound checked.
//!
//! HDF5 1.10 trusts what a file says of its global heap (HDF5 File Format Specification 3.0, section III.E), and crashes
//! where that is damaged. Here it is an error.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Seek, SeekFrom};

/// Bytes of an element: the length of the string, the address of a collection, and the number of an object in it.
const ELEMENT: usize = 16;
/// Bytes before the objects of a collection, and before the bytes of each object.
const HEADER: usize = 16;
/// The largest collection that is read. HDF5 makes them of 4 KiB, or as large as their only string.
const LARGEST: u64 = 1 << 24;

/// Whether a file has addresses of eight bytes that count from its beginning, as nearly all have.
pub(crate) fn can_read(file: &mut File) -> Result<bool> {
    let start = bytes(file, 0, HEADER)?;
    // By the version of the superblock.
    let address = if start[8] < 2 { start[13] } else { start[9] };
    Ok(start.starts_with(b"\x89HDF\r\n\x1a\n") && address == 8)
}

/// The strings of a dataset of `count` elements that lies in one piece, from `offset` on.
pub(crate) fn read(file: &mut File, offset: u64, count: usize) -> Result<Vec<String>> {
    let elements = bytes(file, offset, count * ELEMENT)?;
    let mut collection = (0, Vec::new());
    let mut names = Vec::with_capacity(count);
    for element in elements.chunks_exact(ELEMENT) {
        let length = number(&element[..4]) as usize;
        let (address, object) = (number(&element[4..12]), number(&element[12..]));
        if length == 0 {
            names.push(String::new());
            continue;
        }
        if collection.0 != address {
            collection = (address, heap(file, address)?);
        }
        let name = find(&collection.1, object).and_then(|object| object.get(..length));
        let name = name.ok_or_else(|| broken("a string lies outside of its heap"))?;
        let name = std::str::from_utf8(name).map_err(|_| broken("a string is not UTF-8"))?;
        names.push(name.trim_end_matches('\0').into());
    }
    Ok(names)
}

/// A collection of the global heap.
fn heap(file: &mut File, address: u64) -> Result<Vec<u8>> {
    let header = bytes(file, address, HEADER)?;
    let size = number(&header[8..]);
    if &header[..5] != b"GCOL\x01" || !(HEADER as u64..=LARGEST).contains(&size) {
        return Err(broken("there is no heap where a string says it is"));
    }
    bytes(file, address, size as usize)
}

/// The bytes of an object of a collection.
fn find(collection: &[u8], wanted: u64) -> Option<&[u8]> {
    let mut rest = collection.get(HEADER..)?;
    loop {
        let (header, after) = rest.split_at_checked(HEADER)?;
        let (index, size) = (number(&header[..2]), number(&header[8..]));
        let size = usize::try_from(size).ok()?;
        // Number 0 is what is left of the collection.
        if index == 0 {
            return None;
        }
        if index == wanted {
            return after.get(..size);
        }
        rest = after.get(size.checked_next_multiple_of(8)?..)?;
    }
}

/// Bytes of a file, which must have as many.
fn bytes(file: &mut File, offset: u64, length: usize) -> Result<Vec<u8>> {
    let end = offset.checked_add(length as u64);
    if end.is_none_or(|end| end > u64::MAX / 2) || file.metadata()?.len() < end.unwrap_or(0) {
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
