//! Models that a configuration can name, behind one type. Each family has a file, which checks
//! sizes against the channels and the grid.

mod cnn;
mod config;
mod fno;
mod graph;
mod mask;
mod model;
mod own;
mod signature;
#[cfg(test)]
mod tests;
mod transformer;
mod unet;

pub use config::ModelConfig;
pub use model::FieldModel;
pub(super) use model::{places_of_targets, select_channels};
pub(super) use own::no_network;
pub use own::{Maker, NoNetwork, OwnModel, OwnNetwork};
pub use signature::Signature;
