//! Retention of checkpoints: a pure function of their steps, metrics and finiteness.

use std::collections::BTreeMap;

use burn::config::Config;

use super::direction::Direction;
use super::index::Index;

/// Configuration of [`Checkpoints`](super::Checkpoints): how many checkpoints a folder keeps.
///
/// Checkpoints that are not [finite](super::Checkpoint::not_finite) do not count, and are removed
/// when the next one has been written. If none is finite, all count.
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
    /// Number of newest checkpoints to keep; at least one.
    #[config(default = "3")]
    pub keep_last: usize,
    /// Number of checkpoints to keep for their metric: those with the best finite one.
    #[config(default = "0")]
    pub keep_best: usize,
    /// Direction in which the metric improves.
    #[config(default = "Direction::Lowest")]
    pub direction: Direction,
}

/// Checkpoints of a folder.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Properties of the checkpoints, by step.
    pub steps: BTreeMap<u64, Worth>,
    /// Step of the checkpoint that was written last.
    pub newest: Option<u64>,
}

/// Properties of a checkpoint that decide whether it is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Worth {
    /// Whether all parameters and other state tensors are finite.
    pub finite: bool,
    /// [Cost](Direction::cost) of the metric.
    pub cost: Option<f64>,
}

impl Worth {
    pub(super) fn of(index: &Index) -> Self {
        Self {
            finite: index.not_finite.is_none(),
            cost: index.metric.map(|metric| index.direction.cost(metric)),
        }
    }
}

/// Lists the steps that have a metric, sorted: finite checkpoints first, then by metric, then
/// newest first.
pub(super) fn by_metric(steps: &BTreeMap<u64, Worth>) -> Vec<u64> {
    let mut measured: Vec<(u64, bool, f64)> = steps
        .iter()
        .filter_map(|(step, worth)| Some((*step, worth.finite, worth.cost?)))
        .collect();
    measured.sort_by(|a, b| {
        let by_metric = a.2.total_cmp(&b.2);
        b.1.cmp(&a.1).then(by_metric).then(b.0.cmp(&a.0))
    });
    measured.into_iter().map(|(step, ..)| step).collect()
}

/// Lists the checkpoints to remove after the one of `step` was written. Later ones, left from
/// before training returned to an earlier step, do not count and are not removed.
pub(super) fn superseded(
    steps: &BTreeMap<u64, Worth>,
    step: u64,
    config: &CheckpointConfig,
) -> Vec<u64> {
    let so_far: BTreeMap<u64, Worth> = steps
        .range(..=step)
        .map(|(step, worth)| (*step, *worth))
        .collect();
    // A checkpoint that is not finite does not replace a finite one.
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
        let finite = |cost| Worth { finite: true, cost };
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
        // After training returned to step 20, its checkpoint and all later ones are kept; the later
        // ones do not count.
        let config = CheckpointConfig::new().with_keep_last(1);
        assert_eq!(superseded(&metrics, 20, &config), [10]);
    }
}
