//! Names of the datasets of a field file.

pub(crate) const FIELDS: &str = "fields";
pub(crate) const TIMESTAMP: &str = "timestamp";
pub(crate) const CHANNEL: &str = "channel";
pub(crate) const LAT: &str = "lat";
pub(crate) const LON: &str = "lon";
/// Names of the dimension scales, in the order of the dims of [`FIELDS`].
pub(crate) const SCALES: [&str; 4] = [TIMESTAMP, CHANNEL, LAT, LON];
