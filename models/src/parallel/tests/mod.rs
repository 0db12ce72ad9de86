//! Plans: their resolution, and their communication.

mod automatic;
mod counts;
mod plans;
