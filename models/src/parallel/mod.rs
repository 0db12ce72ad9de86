//! Models sharded by a plan: tensor parallelism, sequence parallelism, parameters stored in shards
//! (FSDP).
//!
//! A [`Plan`] specifies by layer path how parameters are sharded, and how tensors enter and leave
//! layers; it fits in a small file. [`parallelize_module`] applies it to a module that all ranks
//! hold. [`resolve`](fn@resolve) computes the effects of a plan without applying it.
//!
//! # Example
//! Two linear layers over two ranks, the first sharded by columns and the second by rows, with one
//! sum over the ranks in each direction.
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::Tensor;
//! use halocline_core::{Launcher, Replicate, ShardTensor};
//! use halocline_models::parallel::{Plan, Style, parallelize_module};
//! use halocline_ops::prelude::*;
//!
//! #[derive(Module, Debug)]
//! struct Mlp {
//!     up: Linear,
//!     down: Linear,
//! }
//!
//! impl<X: Field<2>> Layer<X> for Mlp {
//!     type Output = X;
//!
//!     fn forward(&self, x: X) -> X {
//!         x.apply(&self.up).gelu().apply(&self.down)
//!     }
//! }
//!
//! let plan = Plan::default()
//!     .with_layer("up", Style::colwise("tensor"))
//!     .with_layer("down", Style::rowwise("tensor"));
//! Launcher::local(2).run(|world| {
//!     let mesh = world.mesh([("tensor", 2)])?;
//!     let mlp = world.init(|device| Mlp {
//!         up: LinearConfig::new(4, 6).init(device),
//!         down: LinearConfig::new(6, 4).init(device),
//!     })?;
//!     let x = Tensor::<2>::ones([3, 4], world.device());
//!     let whole = x.clone().apply(&mlp);
//!     let mlp = parallelize_module(mlp, &mesh, &plan)?;
//!     assert_eq!(mlp.up.weight.dims(), [4, 3]); // this rank's columns
//!     let y = ShardTensor::distribute(x, &mesh, &[Replicate])?.apply(&mlp);
//!     let off = (y.full_tensor() - whole).abs().max();
//!     assert!(off.into_scalar::<f32>() < 1e-5);
//!     Ok(())
//! })?;
//! # Ok::<(), halocline_core::Error>(())
//! ```

mod apply;
mod automatic;
mod initial;
mod machine;
mod pattern;
mod plan;
pub mod price;
mod resolve;
mod sites;
mod style;
mod table;
#[cfg(test)]
mod tests;
mod zoo;

pub use apply::{
    distribute_module, distribute_module_with, init_parallel, init_parallel_with,
    parallelize_module,
};
pub use automatic::{PricedPlan, linear_pairs};
pub use machine::{Link, Machine};
pub use plan::{Entry, Plan, Store};
pub use price::{Price, Workload};
pub use resolve::{ResolvedParam, ResolvedPlan, resolve};
pub use style::{Axes, LayerSharding, Split, Style};
pub use zoo::{sequence_parallel, transformer_encoder};
