//! Layers, models, parallelization plans, losses, metrics, and a shallow-water solver that
//! generates training data.
//!
//! Models are burn modules whose forward pass is generic over [`Field`](halocline_ops::Field), so
//! that the same code runs on one device and on many. This crate reads plan files, and otherwise
//! neither reads nor writes files.

mod amse;
mod conv;
mod dealt;
mod energy;
mod ensemble;
mod fno;
mod geodesic;
mod graph;
mod graphcast;
mod healpix;
mod members;
mod metrics;
mod pairs;
pub mod parallel;
mod precision;
mod recompute;
mod rim;
mod rollout;
mod row_sums;
mod sfno;
pub mod shallow_water;
mod spectra;
mod sums;
mod surrogate;
#[cfg(test)]
mod testing;
mod transformer;
mod unet;
mod verification;
mod weighted_mse;

pub use amse::amse_penalty;
pub use conv::{FieldConv2d, FieldConv2dConfig};
pub use energy::{energy_score, energy_score_masked};
pub use ensemble::{CrpsEstimator, crps, crps_cells, crps_masked};
pub use fno::{
    Fno, FnoConfig, SpectralConv1d, SpectralConv1dConfig, SpectralConv2d, SpectralConv2dConfig,
    SpectralConv3d, SpectralConv3dConfig,
};
pub use geodesic::{
    DiscoConv, DiscoConvConfig, DiscoConvTranspose, SphereAttention, SphereAttentionConfig,
};
pub use graph::{GraphConv, GraphConvConfig};
pub use graphcast::{GraphCastNet, GraphCastNetConfig, GridMesh};
pub use healpix::{HealpixConv, HealpixConvConfig};
pub use members::{perturbed, repeat_members, split_members};
pub use metrics::{Evaluation, Metrics};
pub use rim::{interior, with_rim};
pub use rollout::{next_input, rollout};
pub use sfno::{Sfno, SfnoConfig, SpectralConvS2, SpectralConvS2Config};
pub use spectra::{FieldPower, Power, Spectra};
pub use surrogate::{SurrogateCnn, SurrogateCnnConfig};
pub use transformer::{
    ConditionEmbedding, ConditionEmbeddingConfig, FieldTransformer, FieldTransformerConfig,
    LearnedPosition2d, LearnedPosition2dConfig, Modulation, ModulationConfig,
    NeighborhoodAttention1d, NeighborhoodAttention1dConfig, NeighborhoodAttention2d,
    NeighborhoodAttention2dConfig, NeighborhoodAttention3d, NeighborhoodAttention3dConfig,
    PatchEmbedding2d, PatchEmbedding2dConfig, PatchRecovery2d, PatchRecovery2dConfig, Rotary,
    SinusoidalPosition2d, SphericalPosition, SphericalPositionConfig,
};
pub use unet::{UNet, UNetConfig};
pub use verification::{Region, ScoreRow, Verification};
pub use weighted_mse::weighted_mse;
