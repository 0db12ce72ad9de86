//! Train and run neural surrogates of fields that are too large for one device.
//!
//! A field lives on a mesh of ranks, each holding one shard of its grid. Operators compute the
//! single-device result, forward and backward, by moving exactly the cells that each shard needs.
//! `use halocline::prelude::*` imports the items that most programs use.
//!
//! | crate | contents |
//! |---|---|
//! | [`core`] | meshes, layouts, exchange plans, sharded tensors, engines, launch, random numbers |
//! | [`ops`] | operators on sharded tensors, layers, losses |
//! | [`io`] | field files, datasets, loaders, checkpoints |
//! | [`models`] | models, parallelization plans, metrics, a shallow-water solver |
//!
//! A [`Trainer`] runs the steps of a training and makes it survive failures. An [`experiment`]
//! covers a whole project, from a configuration file to the scores of its forecasts.

pub mod experiment;
#[cfg(feature = "learner")]
pub mod learner;
#[cfg(feature = "plot")]
pub mod plot;
mod root;
mod trainer;

pub use halocline_core as core;
pub use halocline_io as io;
pub use halocline_models as models;
pub use halocline_ops as ops;

pub use halocline_core::{Error, Result};
pub use trainer::{
    Ended, LossScale, NonFinite, Trainer, Validation, check_optimizer, clip_grad_norm,
};

/// Items that most programs use.
pub mod prelude {
    pub use burn::module::Module;
    pub use burn::tensor::{Device, Tensor, TensorData};
    pub use halocline_core::{
        Boundary, DeviceMesh, Distribution, Error, Halo, Halos, IntoLayout, Launcher, Layout,
        LocalGradient, Partial, Placement, RandomKey, ReduceOp, Replicate, Result, Shard,
        ShardTensor, World, scatter_tensor,
    };
    pub use halocline_ops::prelude::*;
}

/// Code of README and docs, compiled and run as doctests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../docs/data.md")]
    mod data {}
    #[doc = include_str!("../docs/extending.md")]
    mod extending {}
    #[doc = include_str!("../docs/migrating.md")]
    mod migrating {}
    #[doc = include_str!("../docs/parallel.md")]
    mod parallel {}
    #[doc = include_str!("../docs/program.md")]
    mod program {}
    #[doc = include_str!("../docs/training.md")]
    mod training {}
}
