//! Packages: trained models with the statistics of their data.

use std::path::Path;

use burn::module::Module;
use halocline_core::{Error, Result, World};
use halocline_io::{CheckpointConfig, Checkpoints, Snapshot, Statistics};

use super::{MODEL, Trainer};
use crate::root::on_root;

/// Name of the folder of statistics in a package or an experiment.
pub(crate) const STATISTICS: &str = "statistics";
/// Name of the folder of the model in a package or an experiment.
pub(crate) const CHECKPOINTS: &str = "checkpoints";

impl<M: Module> Trainer<M> {
    /// Writes a package: a folder with the trained model in `checkpoints`, on its own, and the
    /// statistics of its data in `statistics`. The model is the [best validated
    /// one](Self::best_model), or else the current one, averaged if the run has an
    /// [average](Self::with_ema). It can be loaded on any number of ranks, and
    /// [`resume_or_start_from`](Self::resume_or_start_from) starts from its `checkpoints`.
    ///
    /// # Errors
    /// Returned on all ranks: a path that exists; files that cannot be written; communication
    /// fails.
    ///
    /// # Example
    /// ```
    /// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
    /// use burn::nn::conv::Conv2dConfig;
    /// use burn::optim::AdamWConfig;
    /// use halocline::Trainer;
    /// use halocline::io::{Checkpoint, Statistics};
    /// use halocline::prelude::*;
    /// # use halocline::io::ndarray::Array3;
    /// # use halocline::io::{FieldFile, FieldWriter, Grid, Progress, StatisticsBuilder};
    /// # use halocline::io::WriterConfig;
    /// # let folder = tempfile::tempdir()?;
    /// # let (data, path) = (folder.path().join("data.h5"), folder.path().join("model"));
    /// # let grid = Grid::cell_centered(4, 8)?;
    /// # let mut writer = FieldWriter::create(&data, &grid, &["t2m"], &WriterConfig::new())?;
    /// # for step in 0..3 {
    /// #     let field = Array3::from_elem((1, 4, 8), step as f32);
    /// #     writer.append(f64::from(step) * 21600.0, field.view())?;
    /// # }
    /// # writer.finish()?;
    /// # let mut builder = StatisticsBuilder::new(1)?;
    /// # builder.add(&FieldFile::open(&data)?, &Progress::hidden())?;
    /// # let statistics = builder.finish()?;
    ///
    /// Launcher::local(2).run(|world| {
    ///     let make = || world.init(|device| Conv2dConfig::new([1, 1], [3, 3]).init(device));
    ///     let rate = ModuleLrScheduler::new(1e-3);
    ///     let mut trainer = Trainer::new(&world, make()?, AdamWConfig::new().init(), rate);
    ///     trainer.package(&statistics, &path)?; // after some epochs
    ///     // In another program:
    ///     let saved = Checkpoint::latest(&world, path.join("checkpoints"))?.expect("a model");
    ///     let model = saved.module(&world, "model", make()?.valid())?;
    ///     let statistics = Statistics::load(path.join("statistics"))?;
    ///     let weights = trainer.model().weight.val().into_data();
    ///     assert_eq!(model.weight.val().into_data(), weights);
    ///     assert_eq!(statistics.metadata().channels(), ["t2m"]);
    /// #   let error = trainer.package(&statistics, &path).unwrap_err();
    /// #   assert!(error.to_string().contains("it exists"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn package(&mut self, statistics: &Statistics, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        on_root(&self.world, || check_new(path))?;
        let model = match (self.best_model()?, self.ema_model()) {
            (Some(best), _) => best,
            (None, Some(average)) => average.clone(),
            (None, None) => self.model().valid(),
        };
        save_model(&self.world, &path.join(CHECKPOINTS), &model)?;
        on_root(&self.world, || Ok(statistics.save(path.join(STATISTICS))?))
    }
}

/// Refuses the path of a package that exists.
pub(crate) fn check_new(path: &Path) -> Result<()> {
    if path.exists() {
        let message = format!("{}: it exists; choose another path", path.display());
        return Err(Error::other(message));
    }
    Ok(())
}

/// Saves a model on its own in a folder of checkpoints.
pub(crate) fn save_model<M: Module>(world: &World, folder: &Path, model: &M) -> Result<()> {
    let mut checkpoints = Checkpoints::open(world, folder, &CheckpointConfig::new())?;
    let mut snapshot = Snapshot::new(world);
    snapshot.module(MODEL, model)?;
    checkpoints.save(0, snapshot, None)?;
    checkpoints.wait()
}
