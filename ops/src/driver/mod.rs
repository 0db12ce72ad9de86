//! Driver of operators that need cells of other ranks: windows, plans, ranks without cells.

pub(crate) mod empty;
mod neighborhood;
pub(crate) mod place;
mod plan;
mod reach;
pub(crate) mod sampling;
mod stencil;
pub(crate) mod strides;
mod window;

pub use neighborhood::Neighborhood;
pub(crate) use plan::{Reaches, StencilPlan, exchange_of};
pub(crate) use reach::Reach;
pub use stencil::Stencil;
pub(crate) use window::windows_within;
pub use window::{Padding, Rounding, Window};
