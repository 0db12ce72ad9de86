//! Sharded tensors and their communication: meshes, layouts, exchange plans, engines.
//!
//! A [`Layout`] computes, by arithmetic alone, the cells of a field that each rank of a
//! [`DeviceMesh`] holds. A [`ShardTensor`] is one burn tensor per rank together with its layout.
//! [`Launcher`] runs a program on every rank. The items for models and training programs are at the
//! root of the crate, the others in modules:
//!
//! | module | for |
//! |---|---|
//! | [`plan`], [`ops`], [`tasks`], [`memory`] | operators: the boxes to move so that each rank has the cells it needs, their exchange with its adjoint, kernels |
//! | [`comm`] | engines, and code that sends messages itself |
//! | [`paths`], [`trace`], [`sphere`], [`support`] | tools: visits of modules, timelines, points on the sphere, names in errors |
//!
//! This crate contains no convolutions, files or models.

mod balance;
mod cache;
mod cells;
pub mod comm;
#[cfg(feature = "cube")]
mod cube;
mod descriptors;
mod device_mesh;
mod dispatch;
mod dry_mesh;
mod error;
mod exchange;
mod healpix;
mod into_layout;
mod launch;
mod layer_keys;
mod layer_placements;
mod layout;
mod layout_table;
mod lock;
pub mod memory;
mod mesh;
mod module;
mod module_scope;
mod near;
mod operator;
pub mod ops;
mod pairing;
mod param;
pub mod paths;
mod placement;
pub mod plan;
mod reduce;
mod region;
mod replicas;
mod rng;
mod scoped;
mod settings;
pub mod sphere;
pub mod support;
pub mod tasks;
mod tensor;
pub mod trace;
mod world;

pub use balance::Balance;
pub use burn::tensor::Distribution;
pub use comm::counters::{CommStats, ModuleStats};
pub use comm::dry_run::{PlannedMessages, PlannedOperation};
pub use comm::operation::Traffic;
pub use device_mesh::DeviceMesh;
pub use dry_mesh::DryMesh;
pub use error::{Error, OrRaise, Result};
pub use into_layout::IntoLayout;
pub use launch::Launcher;
pub use layer_keys::LayerKeys;
pub use layer_placements::{LayerPlacements, PlanPlacement};
pub use layout::{Fan, Layout, Partial, Placement, ReduceOp, Replicate, Shard};
pub use mesh::MeshShape;
pub use module_scope::{ModuleScope, module_scope};
pub use param::{
    Gather, GatherAhead, InitialValues, ParamShard, gather_ahead, param_shards, shard_parameters,
    shard_parameters_with, unshard,
};
pub use region::{Boundary, IndexBox};
pub use rng::RandomKey;
pub use settings::Overlap;
pub use tensor::{
    Halo, Halos, LocalGradient, MeshOptions, ShardTensor, is_recomputing, scatter_tensor,
};
pub use world::World;
