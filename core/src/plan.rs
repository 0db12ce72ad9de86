//! Plans of operators, made from layouts alone: the cells that each rank needs, the boxes that
//! travel, and the placements of a result. Planning sends nothing; [`ops`](crate::ops) runs plans.

pub use crate::cache::PlanCache;
pub use crate::exchange::{ExchangePlan, Need, Piece, Source, Transfer};
pub use crate::pairing::{Linearity, Pairing, Role, Term};
pub use crate::region::{Segment, Sides, check_poles, segments};
