//! Sharded parameters: layouts that travel with burn's [`Param`](burn::module::Param).

mod ahead;
mod apply;
mod exchange;
mod gathering;
mod guard;
mod initial;
mod layout;
mod module;

pub use apply::{shard_parameters, shard_parameters_with};
pub use guard::{GatherAhead, gather_ahead};
pub use initial::InitialValues;
pub use layout::{Gather, ParamShard};
pub use module::{param_shards, unshard};
