//! Packages of trained models: folders with everything that forecasts from other files need.

use std::path::{Path, PathBuf};

use halocline_core::{Error, Result};
use halocline_io::{CheckpointConfig, Checkpoints, Period};

use super::config::ExperimentConfig;
use super::network::OwnNetwork;
use super::record::{self, CHECKPOINTS, CLIMATOLOGY, STATISTICS};
use super::setup::{CheckpointChoice, Experiment, Files};
use super::static_fields::save_static_fields;
use super::summary::FILES;
use crate::root::on_root;
use crate::trainer::{check_new, save_model};

/// Name of the folder of the constants file in a package.
const CONSTANTS: &str = "constants";

impl<N: OwnNetwork> Experiment<N> {
    /// Writes a package: a folder with the weights of a trained model, the statistics, the
    /// climatology, the constants and the configuration, which is enough for forecasts and scores
    /// from [other files](Self::of_files), on any number of ranks. It holds the forcings from the
    /// files that are the same at all times and in all files of training, such as orography: they
    /// replace those of other files, which may lack them. The mesh, the plan and the state of
    /// training are left out.
    ///
    /// # Errors
    /// No checkpoint; a path that exists; files that cannot be read or written; a failure of
    /// communication.
    ///
    /// # Example
    /// ```no_run
    /// use halocline::experiment::{CheckpointChoice, Experiment, ExperimentConfig};
    /// use halocline::prelude::*;
    ///
    /// let config = ExperimentConfig::load("weather.toml")?;
    /// config.launcher(4).run(|world| {
    ///     Experiment::new(&world, &config)?.package(CheckpointChoice::Best, "model")
    /// })?;
    /// // Elsewhere, with the folder `model` and new files alone:
    /// let config = ExperimentConfig::load_package("model")?;
    /// config.launcher(1).run(|world| {
    ///     let experiment = Experiment::of_files(&world, &config, &["2023.nc".into()])?;
    ///     println!("{}", experiment.score(&experiment.trained(CheckpointChoice::Best)?, &config.forecast)?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline::Error>(())
    /// ```
    pub fn package(&self, choice: CheckpointChoice, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let model = self.trained(choice)?;
        let mut config = self.config.clone();
        let constants = config.data.constants.take();
        config.data.constants = constants.as_deref().map(constants_in);
        (config.mesh, config.plan) = Default::default();
        (config.data.statistics, config.training.pretrained) = Default::default();
        on_root(&self.world, || self.copy_files(path, constants.as_deref()))?;
        let folder = path.join(CLIMATOLOGY);
        let checkpoints = Checkpoints::open(&self.world, folder, &CheckpointConfig::new())?;
        self.climatology()?.save(&self.world, checkpoints)?;
        save_model(&self.world, &path.join(CHECKPOINTS), &model)?;
        // Written last, so that an incomplete package cannot be loaded.
        config.folder = path.into();
        on_root(&self.world, || record::save_copy(&config))
    }

    /// Copies the files of the folder that belong to a package, and the constants. Writes the
    /// static forcings.
    fn copy_files(&self, path: &Path, constants: Option<&Path>) -> Result<()> {
        check_new(path)?;
        for name in [STATISTICS, FILES] {
            copy(&self.config.folder.join(name), &path.join(name))?;
        }
        let period = match self.files {
            Files::Trained => self.config.data.train.clone(),
            Files::Others => Period::default(),
        };
        save_static_fields(&self.data, &self.statistics, &period, path)?;
        match constants {
            Some(constants) => copy(constants, &path.join(constants_in(constants))),
            None => Ok(()),
        }
    }
}

impl ExperimentConfig {
    /// Reads the configuration of a [package](Experiment::package), whose folder may have moved.
    ///
    /// # Errors
    /// A folder that is not a package; the errors of [`load`](Self::load).
    pub fn load_package(path: impl AsRef<Path>) -> Result<Self> {
        Self::load_package_with(path, &[])
    }

    /// Reads the configuration of a [package](Experiment::package), some of whose keys are replaced
    /// by settings as in [`load_with`](Self::load_with). The folder is that of the package whatever
    /// they say, and a relative path of constants starts there.
    ///
    /// # Errors
    /// A folder that is not a package; the errors of [`load_with`](Self::load_with).
    ///
    /// # Example
    /// ```no_run
    /// use halocline::experiment::ExperimentConfig;
    ///
    /// let settings = ["forecast.every_hours=12".to_string()];
    /// let config = ExperimentConfig::load_package_with("model", &settings)?;
    /// # Ok::<(), halocline::Error>(())
    /// ```
    pub fn load_package_with(path: impl AsRef<Path>, settings: &[String]) -> Result<Self> {
        let path = path.as_ref();
        let mut config = Self::load_with(path.join(record::COPY), settings)?;
        config.folder = path.into();
        config.data.constants = config.data.constants.map(|constants| path.join(constants));
        Ok(config)
    }
}

/// Returns the path of the constants within a package.
fn constants_in(constants: &Path) -> PathBuf {
    Path::new(CONSTANTS).join(constants.file_name().unwrap_or_default())
}

/// Copies a file, or a folder with its content.
///
/// # Errors
/// A source that is missing or cannot be read; a target that cannot be written.
fn copy(source: &Path, target: &Path) -> Result<()> {
    let failed = |error| {
        let (source, target) = (source.display(), target.display());
        Error::other(format!("{source} to {target}: {error}"))
    };
    if source.is_dir() {
        std::fs::create_dir_all(target).map_err(failed)?;
        for entry in std::fs::read_dir(source).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            copy(&entry.path(), &target.join(entry.file_name()))?;
        }
        return Ok(());
    }
    let folder = target.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder).map_err(failed)?;
    std::fs::copy(source, target).map_err(failed).map(drop)
}
