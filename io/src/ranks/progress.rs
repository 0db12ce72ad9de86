use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

const STYLE: &str = "{msg} [{bar:32}] {pos}/{len}, {elapsed} of {duration}";

/// Progress bar that rank 0 draws, only on a terminal, so that logs of jobs stay clean.
///
/// # Example
/// ```
/// use halocline_io::Progress;
///
/// let world_rank = 0;
/// let progress = Progress::new(world_rank, "epoch 1", 20);
/// for step in 0..20 {
///     progress.title(format!("epoch 1, loss {:.3}", 1.0 / (step + 1) as f64));
///     progress.advance();
/// }
/// assert_eq!(progress.steps(), 20);
/// progress.finish();
/// ```
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Creates a bar of `total` steps on standard error, drawn if `rank` is 0 and standard error is
    /// a terminal.
    pub fn new(rank: usize, title: impl Into<String>, total: usize) -> Self {
        let target = match rank {
            // indicatif draws nothing where standard error is not a terminal.
            0 => ProgressDrawTarget::stderr(),
            _ => ProgressDrawTarget::hidden(),
        };
        let style = ProgressStyle::with_template(STYLE).expect("the template is constant");
        let bar = ProgressBar::with_draw_target(Some(total as u64), target);
        let bar = bar.with_style(style).with_message(title.into());
        Self(bar.with_finish(ProgressFinish::Abandon))
    }

    /// Creates a bar that is not drawn.
    pub fn hidden() -> Self {
        Self(ProgressBar::hidden())
    }

    /// Counts a completed step.
    pub fn advance(&self) {
        self.0.inc(1);
    }

    /// Changes the title, for example to one with the loss.
    pub fn title(&self, title: impl Into<String>) {
        self.0.set_message(title.into());
    }

    /// Returns the number of completed steps.
    pub fn steps(&self) -> usize {
        self.0.position() as usize
    }

    /// Ends the bar and leaves it on the screen.
    pub fn finish(self) {
        self.0.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rank_0_draws_and_all_count() {
        for rank in [0, 1] {
            let progress = Progress::new(rank, "read", 3);
            // Under a test runner standard error may be a terminal, so rank 0 may draw or not.
            assert!(rank == 0 || progress.0.is_hidden());
            progress.advance();
            progress.advance();
            assert_eq!(progress.steps(), 2);
        }
        assert!(Progress::hidden().0.is_hidden());
    }
}
