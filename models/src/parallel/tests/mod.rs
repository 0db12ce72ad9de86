//! Plans: what they resolve to, and what travels.

mod automatic;
mod counts;
mod plans;
