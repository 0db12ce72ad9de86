//! Plans: what they resolve to, and training with them.

mod counts;
mod plans;
mod training;
