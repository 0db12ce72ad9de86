//! Plans: what they resolve to, and training with them.

mod plans;
mod training;
