//! Sharded tensors and their communication: meshes, layouts, exchange plans, engines.
//!
//! A [`Layout`] computes, by arithmetic alone, the cells of a field that each rank of a
//! [`DeviceMesh`] holds. An [`ExchangePlan`] lists the boxes to move so that each rank has the
//! cells an operator needs. A [`ShardTensor`] is one burn tensor per rank together with its layout.
//! [`Launcher`] runs a program on every rank.
//!
//! This crate contains no convolutions, files or models.

mod balance;
mod cache;
mod cells;
mod comm;
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
mod paths;
mod placement;
mod reduce;
mod region;
mod replicas;
mod rng;
mod scoped;
mod settings;
mod sphere;
pub mod tasks;
mod tensor;
pub mod trace;
mod world;

pub use balance::Balance;
pub use burn::tensor::Distribution;
pub use cache::PlanCache;
pub use comm::{
    Batch, CommStats, Communicator, Count, Counters, Expected, InFlight, ModuleStats, Operation,
    Overlap, Payload, Pending, Place, PlannedMessages, PlannedOperation, Settings, Traffic,
};
pub use descriptors::raise_descriptor_limit;
pub use device_mesh::DeviceMesh;
pub use dry_mesh::DryMesh;
pub use error::{Error, OrRaise, Result};
pub use exchange::{Direction, Exchange, ExchangePlan, Move, Need, Piece, Source, Transfer};
pub use healpix::{HealpixOrder, healpix_centers, healpix_numbers};
pub use into_layout::IntoLayout;
pub use launch::{Launcher, with_all_threads};
pub use layer_keys::LayerKeys;
pub use layer_placements::{LayerPlacements, PlanPlacement};
pub use layout::{Fan, Layout, Partial, Placement, ReduceOp, Replicate, Shard};
pub use memory::release_memory;
pub use mesh::MeshShape;
pub use module_scope::{ModuleScope, module_scope};
pub use near::nearest_names;
pub use pairing::{Linearity, Pairing, Role, Term};
pub use param::{
    Gather, GatherAhead, ParamShard, gather_ahead, is_running_state, param_shards,
    shard_parameters, unshard,
};
pub use paths::{PathVisitor, visit_paths};
pub use region::{Boundary, IndexBox, Segment, Sides, check_poles, segments};
pub use rng::{RandomKey, philox4x32_10};
pub use sphere::sphere_point;
pub use tensor::{
    Halo, Halos, LocalGradient, MeshOptions, ShardTensor, is_recomputing, scatter_tensor,
};
pub use world::World;
