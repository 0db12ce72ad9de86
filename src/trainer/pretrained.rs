//! Start from the weights of another run.

use std::path::Path;

use burn::module::Module;
use halocline_core::{Error, Result, World};
use halocline_io::Checkpoint;

use super::{Trainer, validated_name};

/// Name of the note of the folder whose weights a run started from.
const NOTE: &str = "pretrained";

/// Opens the checkpoint of a folder with the best validation, or else the last.
pub(crate) fn best_or_latest(world: &World, folder: &Path) -> Result<Option<Checkpoint>> {
    match Checkpoint::best(world, folder)? {
        Some(best) => Ok(Some(best)),
        None => Checkpoint::latest(world, folder),
    }
}

impl<M: Module> Trainer<M> {
    /// Resumes like [`resume_or_start`](Self::resume_or_start), but a run without a checkpoint
    /// starts from the weights of another run (fine-tuning): those of the best checkpoint in the
    /// folder `pretrained`, or else of the last one, averaged if that run has an average. The
    /// optimizer and its schedule start anew. Once `folder` has a checkpoint, `pretrained` is not
    /// read.
    ///
    /// # Errors
    /// Returned on all ranks: no checkpoint in `pretrained`, or one of another model; a run that
    /// started without `pretrained`, or from another folder; the errors of
    /// [`resume_or_start`](Self::resume_or_start).
    ///
    /// # Example
    /// ```
    /// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
    /// use burn::nn::conv::{Conv2d, Conv2dConfig};
    /// use burn::optim::AdamWConfig;
    /// use halocline::Trainer;
    /// use halocline::prelude::*;
    /// # let folder = tempfile::tempdir()?;
    /// # let (old, new) = (folder.path().join("old"), folder.path().join("new"));
    ///
    /// fn start(world: &World) -> Result<Trainer<Conv2d>> {
    ///     let model = world.init(|device| Conv2dConfig::new([1, 1], [3, 3]).init(device))?;
    ///     let rate = ModuleLrScheduler::new(1e-4);
    ///     Ok(Trainer::new(world, model, AdamWConfig::new().init(), rate))
    /// }
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mut trained = start(&world)?.resume_or_start(&old)?;
    ///     trained.finish()?; // after some epochs
    ///     let tuned = start(&world)?.resume_or_start_from(&new, &old)?;
    ///     let weights = |trainer: &Trainer<Conv2d>| trainer.model().weight.val().into_data();
    ///     assert_eq!(weights(&tuned), weights(&trained));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn resume_or_start_from(
        self,
        folder: impl AsRef<Path>,
        pretrained: impl AsRef<Path>,
    ) -> Result<Self> {
        let pretrained = pretrained.as_ref();
        let name = pretrained.display().to_string();
        let mut trainer = self.resume_or_start(folder)?;
        let is_resumed = trainer.saved.is_some();
        if !is_resumed {
            trainer.load_weights(pretrained)?;
            trainer.note(NOTE, &name)?;
            return Ok(trainer);
        }
        let expected = match trainer.noted::<String>(NOTE)? {
            Some(before) if before == name => return Ok(trainer),
            Some(before) => {
                format!(
                    "{before}, from which this run started; resume it without, or choose another folder"
                )
            }
            None => "none, as this run started without; choose another folder".into(),
        };
        Err(Error::from(halocline_io::Error::Argument {
            argument: NOTE,
            got: name,
            expected,
        }))
    }

    /// Loads the validated model of a folder of checkpoints.
    fn load_weights(&mut self, folder: &Path) -> Result<()> {
        let checkpoint = best_or_latest(&self.world, folder)?.ok_or_else(|| {
            Error::other(format!(
                "{}: no checkpoint; expected one to start from",
                folder.display()
            ))
        })?;
        let name = validated_name(&checkpoint);
        let model = checkpoint.module(&self.world, name, self.model().clone())?;
        self.restore_ema(&checkpoint, &model)?;
        self.model = Some(model);
        self.forget_rounded();
        Ok(())
    }
}
