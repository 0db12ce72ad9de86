//! Outputs: forecasts written by all ranks, conversion of fields, and tables of scores.

mod blocks;
mod chunking;
mod classic;
mod config;
mod convert;
mod forecast;
mod journal;
mod schema;
mod staged_folder;
mod store;
mod table;
mod target;

pub use config::{Compression, OutputConfig, OutputFormat};
pub use convert::{Conversion, ConvertConfig, convert};
pub use forecast::ForecastWriter;
pub use staged_folder::Existing;
pub use table::Table;
