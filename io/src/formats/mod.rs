//! Formats of files and stores: their recognition, readers, and the writer of field files.

mod anemoi;
pub(crate) mod cf;
mod compressed;
mod data_json;
mod field_file;
mod field_writer;
mod file_bytes;
mod hdf5;
mod inspect;
mod layout;
mod metadata;
mod netcdf;
mod open;
mod packing;
pub(crate) mod zarr;

pub use field_file::FieldFile;
pub use field_writer::{FieldWriter, WriterConfig};
pub use inspect::{Inspection, Scan, inspect};
pub use metadata::Metadata;
pub use open::{OpenConfig, open};
