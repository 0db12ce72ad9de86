//! Direction in which metrics improve.

use serde::{Deserialize, Serialize};

/// Direction in which the metric of a checkpoint improves.
///
/// # Example
/// ```
/// use halocline_io::{CheckpointConfig, Direction};
///
/// let config = CheckpointConfig::new().with_keep_best(1).with_direction(Direction::Highest);
/// assert!(config.direction.is_better(0.9, 0.8)); // a correlation
/// assert!(Direction::default().is_better(0.1, 0.2)); // an error
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Direction {
    /// A lower metric is better, as of errors.
    #[default]
    Lowest,
    /// A higher metric is better, as of correlations.
    Highest,
}

impl Direction {
    /// Whether a metric is better than another one.
    pub fn is_better(self, metric: f64, other: f64) -> bool {
        self.cost(metric) < self.cost(other)
    }

    /// Returns a number that is lower for a better metric.
    pub(super) fn cost(self, metric: f64) -> f64 {
        match self {
            Self::Lowest => metric,
            Self::Highest => -metric,
        }
    }

    /// Whether this is the default, which an index does not mention.
    pub(super) fn is_lowest(&self) -> bool {
        *self == Self::Lowest
    }
}
