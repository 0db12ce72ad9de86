use std::fs::File;
use std::io::Read;
use std::path::Path;

use burn::store::ModuleRecord;
use burn_pack::{HEADER_SIZE, Header};

use super::file;
use crate::{Error, Result};

/// Loads a burn record from a file written by `model.into_record().save(path)`, for
/// `model.try_load_record`.
///
/// Unlike [`ModuleRecord::load`], never allocates more memory than the size of the file, even if it
/// is damaged.
///
/// # Errors
/// A file that cannot be read, or is not a record.
///
/// # Example
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Device;
/// use halocline_io::load_record;
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.bpk");
///
/// let device = Device::default();
/// let model: Linear = LinearConfig::new(3, 2).init(&device);
/// model.clone().into_record().save(&path)?;
/// let loaded = LinearConfig::new(3, 2).init(&device).try_load_record(load_record(&path)?)?;
/// loaded.weight.val().into_data().assert_eq(&model.weight.val().into_data(), true);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load_record(path: impl AsRef<Path>) -> Result<ModuleRecord> {
    let path = path.as_ref();
    let (mut opened, size) = file::open(&file::followed(path)?)?;
    check_header(&mut opened, size).map_err(|cause| Error::checkpoint(path, cause))?;
    ModuleRecord::load(path).map_err(|error| Error::checkpoint(path, error.to_string()))
}

/// Checks that a file is large enough for the metadata size in its header, which burn trusts.
fn check_header(file: &mut File, size: u64) -> Result<(), String> {
    let mut bytes = [0; HEADER_SIZE];
    file.read_exact(&mut bytes)
        .map_err(|error| error.to_string())?;
    let header = Header::from_bytes(&bytes).map_err(|error| error.to_string())?;
    if size.saturating_sub(HEADER_SIZE as u64) >= u64::from(header.metadata_size) {
        Ok(())
    } else {
        Err(format!(
            "{} bytes of metadata in a file of {size}",
            header.metadata_size
        ))
    }
}
