//! Plans: what they resolve to, and what travels.

mod counts;
mod plans;
