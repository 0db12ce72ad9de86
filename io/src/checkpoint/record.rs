use std::fs::File;
use std::io::Read;
use std::path::Path;

use burn::store::ModuleRecord;
use burn_pack::{HEADER_SIZE, Header};

use super::file;
use crate::{Error, Result};

/// Loads the file of a burn record, written by `model.into_record().save(path)`, for
/// `model.try_load_record`.
///
/// Unlike [`ModuleRecord::load`], takes no more memory for a damaged file than the size of the
/// file.
///
/// # Errors
/// A file that cannot be read, or is not a record.
pub fn load_record(path: impl AsRef<Path>) -> Result<ModuleRecord> {
    let path = path.as_ref();
    let (mut opened, size) = file::open(&file::followed(path)?)?;
    check_header(&mut opened, size).map_err(|cause| Error::checkpoint(path, cause))?;
    ModuleRecord::load(path).map_err(|error| Error::checkpoint(path, error.to_string()))
}

/// Checks that a file has as much metadata as its header says, which burn trusts.
fn check_header(file: &mut File, size: u64) -> Result<(), String> {
    let mut bytes = [0; HEADER_SIZE];
    file.read_exact(&mut bytes)
        .map_err(|error| error.to_string())?;
    let header = Header::from_bytes(&bytes).map_err(|error| error.to_string())?;
    match size.saturating_sub(HEADER_SIZE as u64) >= u64::from(header.metadata_size) {
        true => Ok(()),
        false => Err(format!(
            "{} bytes of metadata in a file of {size}",
            header.metadata_size
        )),
    }
}
