//! Operators that need cells of other ranks: windows, plans, ranks without cells.

pub(crate) mod empty;
mod stencil;
mod window;

pub use stencil::{Stencil, StencilPlan};
pub(crate) use window::windows_within;
pub use window::{Padding, Rounding, Window};
