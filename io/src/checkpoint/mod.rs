//! Checkpoints: states of programs, saved by all ranks as a whole or not at all, and loaded on any
//! mesh.
//!
//! A checkpoint is a folder. Each rank writes a safetensors file with its boxes of cells;
//! `index.json` lists the boxes of every tensor, with a checksum of each. On loading, every piece
//! is read once, by a rank that needs it, and sent to the others that need it.

mod commit;
mod dtype;
mod export;
mod fetch;
mod file;
mod folder;
mod index;
mod load;
mod lock;
mod parameters;
mod pieces;
mod record;
mod retention;
mod save;
mod snapshot;
mod state_dict;
mod training;

pub use load::Checkpoint;
pub use record::load_record;
pub use retention::CheckpointConfig;
pub use save::Checkpoints;
pub use snapshot::Snapshot;
pub use state_dict::{StateDict, StateName};
