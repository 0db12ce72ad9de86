//! Layers, models, losses and metrics on sharded fields, and the solver that makes data for them.
//!
//! [`shallow_water`] solves the shallow-water equations on the rotating sphere, with the grid sharded over ranks.

pub mod shallow_water;
