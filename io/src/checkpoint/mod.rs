//! Checkpoints: program state that all ranks save atomically and any mesh loads.
//!
//! A checkpoint is a folder. Each rank writes a safetensors file with its boxes of cells;
//! `index.json` lists the boxes of every tensor with their checksums. On loading, one of the ranks
//! that need a piece reads it and sends it to the others.

mod commit;
mod direction;
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

pub use direction::Direction;
pub use load::Checkpoint;
pub use record::load_record;
pub use retention::CheckpointConfig;
pub use save::Checkpoints;
pub use snapshot::Snapshot;
pub use state_dict::{StateDict, StateName};
