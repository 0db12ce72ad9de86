//! The rule by which checkpoints are kept: a pure function of their steps, metrics and finiteness.

use std::collections::BTreeMap;

use burn::config::Config;

use super::index::Index;

/// Configuration of [`Checkpoints`](super::Checkpoints): the number of checkpoints that a folder
/// keeps.
///
/// Checkpoints that are not [finite](super::Checkpoint::not_finite) do not count, and are removed
/// when the next one is written. If none is finite, all count.
///
/// # Example
/// ```
/// use halocline_io::CheckpointConfig;
///
/// let config = CheckpointConfig::new().with_keep_best(1);
/// assert_eq!((config.keep_last, config.keep_best), (3, 1));
/// ```
#[derive(Config, Debug)]
pub struct CheckpointConfig {
    /// The number of newest checkpoints; at least one.
    #[config(default = "3")]
    pub keep_last: usize,
    /// The number of further checkpoints: those with the lowest metric that is finite.
    #[config(default = "0")]
    pub keep_best: usize,
}

/// The checkpoints of a folder.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The properties of checkpoints, by step.
    pub steps: BTreeMap<u64, Worth>,
    /// The one that was written last.
    pub newest: Option<u64>,
}

/// Properties of a checkpoint that decide whether it is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Worth {
    /// Whether all parameters and states are finite.
    pub finite: bool,
    pub metric: Option<f64>,
}

impl Worth {
    pub(super) fn of(index: &Index) -> Self {
        Self {
            finite: index.not_finite.is_none(),
            metric: index.metric,
        }
    }
}

/// Lists the steps with a metric: finite ones first, then by metric, then the newest first.
pub(super) fn by_metric(steps: &BTreeMap<u64, Worth>) -> Vec<u64> {
    let mut measured: Vec<(u64, bool, f64)> = steps
        .iter()
        .filter_map(|(step, worth)| Some((*step, worth.finite, worth.metric?)))
        .collect();
    measured.sort_by(|a, b| {
        let by_metric = a.2.total_cmp(&b.2);
        b.1.cmp(&a.1).then(by_metric).then(b.0.cmp(&a.0))
    });
    measured.into_iter().map(|(step, ..)| step).collect()
}

/// Lists the checkpoints to remove after that of `step` was written. Later ones remain from before
/// training returned to an earlier step: they do not count, and are not removed.
pub(super) fn superseded(
    steps: &BTreeMap<u64, Worth>,
    step: u64,
    config: &CheckpointConfig,
) -> Vec<u64> {
    let so_far: BTreeMap<u64, Worth> = steps
        .range(..=step)
        .map(|(step, worth)| (*step, *worth))
        .collect();
    // A checkpoint that is not finite does not take the place of one that is.
    let mut counted = so_far.clone();
    if so_far.values().any(|worth| worth.finite) {
        counted.retain(|_, worth| worth.finite);
    }
    let last = counted.keys().rev().take(config.keep_last).copied();
    let best = by_metric(&counted).into_iter().take(config.keep_best);
    let keep: Vec<u64> = last.chain(best).chain([step]).collect();
    so_far
        .into_keys()
        .filter(|step| !keep.contains(step))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_and_the_best_are_kept() {
        let metrics = [
            (10, Some(0.3)),
            (20, Some(0.1)),
            (30, None),
            (40, Some(0.2)),
            (50, Some(0.1)),
        ];
        let finite = |metric| Worth {
            finite: true,
            metric,
        };
        let metrics = metrics.map(|(step, metric)| (step, finite(metric))).into();
        let old = |last, best| {
            let config = CheckpointConfig::new()
                .with_keep_last(last)
                .with_keep_best(best);
            superseded(&metrics, 50, &config)
        };
        assert_eq!(old(1, 0), [10, 20, 30, 40]);
        assert_eq!(old(2, 0), [10, 20, 30]);
        assert_eq!(old(1, 2), [10, 30, 40]);
        assert_eq!(old(1, 3), [10, 30]);
        assert!(old(5, 0).is_empty());
        // Written after going back: it is kept, and so are later ones, which do not count.
        let config = CheckpointConfig::new().with_keep_last(1);
        assert_eq!(superseded(&metrics, 20, &config), [10]);
    }
}
