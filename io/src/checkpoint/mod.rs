//! Saved states of programs: written by all ranks, whole or not at all, read on any mesh.
//!
//! A checkpoint is a folder. Each rank writes a safetensors file with the boxes of cells that are its own; `index.json`
//! says which tensor has which cells where, with a checksum of each. Reading, every piece is read once, by a rank that
//! needs it, and passed on to others that need it too.

mod commit;
mod dtype;
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
mod training;

pub use load::Checkpoint;
pub use record::load_record;
pub use retention::CheckpointConfig;
pub use save::Checkpoints;
pub use snapshot::Snapshot;
