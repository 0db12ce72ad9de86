//! Layers, models, losses, metrics, and a solver that makes data to train on.
//!
//! Models are burn modules whose forward pass is written for [`Field`](halocline_ops::Field), so that the same code
//! runs on one device and on many. This crate knows nothing about files.

mod conv;
mod metrics;
pub mod shallow_water;
mod surrogate;
mod unet;

pub use conv::{FieldConv2d, FieldConv2dConfig};
pub use metrics::{Evaluation, Scores, weighted_mse};
pub use surrogate::{SurrogateCnn, SurrogateCnnConfig};
pub use unet::{UNet, UNetConfig};
