//! Times: calendars, units and dates, and time axes.

mod calendar;
pub(crate) mod times;
pub(crate) mod units;

pub use calendar::Calendar;
pub use times::{Gaps, falls_at, falls_on};
pub use units::parse_time;
