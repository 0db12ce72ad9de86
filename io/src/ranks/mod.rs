//! Agreement of the ranks of a job, and progress bars of rank 0.

pub(crate) mod agreement;
pub(crate) mod alike;
mod progress;

pub use progress::Progress;
