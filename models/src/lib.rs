//! Layers, models, losses, metrics, and a solver that generates training data.
//!
//! Models are burn modules whose forward pass is written for [`Field`](halocline_ops::Field), so
//! that the same code runs on one device and on many. This crate reads and writes no files.

mod conv;
mod metrics;
pub mod shallow_water;
mod surrogate;
mod unet;

pub use conv::{FieldConv2d, FieldConv2dConfig};
pub use metrics::{Evaluation, Scores, weighted_mse};
pub use surrogate::{SurrogateCnn, SurrogateCnnConfig};
pub use unet::{UNet, UNetConfig};
