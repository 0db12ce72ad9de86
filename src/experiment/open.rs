//! Opening of experiments, with or without a network of one's own.

use std::path::PathBuf;

use halocline_core::{Result, World};

use super::config::ExperimentConfig;
use super::network::{Maker, OwnNetwork, no_network};
use super::setup::Experiment;

impl Experiment {
    /// Opens the data, and loads or computes the statistics: those of the training period, unless
    /// [`statistics`](super::DataConfig::statistics) or, before the first checkpoint,
    /// [`pretrained`](super::TrainingConfig::pretrained) names others.
    ///
    /// # Errors
    /// A configuration with values out of range; a mesh of another number of ranks; data that
    /// cannot be read, or lack a channel; bounds of other channels than targets, and a region of
    /// scores without a cell; if there are no statistics yet, a model or plan that does not fit, a
    /// precision that the device lacks, batches, steps, weights or a loss of training that do not
    /// fit the samples, channels or grid, or a share of a rank that is larger than the memory of
    /// this machine; a folder that holds an experiment with other data or another model, whose files
    /// have changed since, or whose statistics another job is computing; given statistics that lack
    /// a channel or differ from those of the folder; a pretrained model of other data or of another
    /// configuration; periods that overlap; a failure of communication.
    pub fn new(world: &World, config: &ExperimentConfig) -> Result<Self> {
        Self::open(world, config, no_network)
    }

    /// Opens a trained experiment on other files, such as those of another year, to forecast from
    /// their states and to score the forecasts. The files may have a single time.
    ///
    /// # Errors
    /// An experiment that was not trained, or with other data or another model; files that cannot
    /// be read, lack a channel, or have another grid or other units; the errors of
    /// [`new`](Self::new).
    ///
    /// # Example
    /// ```no_run
    /// use halocline::experiment::{CheckpointChoice, Experiment, ExperimentConfig};
    /// use halocline::prelude::*;
    ///
    /// let config = ExperimentConfig::load("weather.toml")?;
    /// config.launcher(4).run(|world| {
    ///     let experiment = Experiment::of_files(&world, &config, &["2023.nc".into()])?;
    ///     println!("{}", experiment.score(&experiment.trained(CheckpointChoice::Best)?, &config.forecast)?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline::Error>(())
    /// ```
    pub fn of_files(world: &World, config: &ExperimentConfig, files: &[PathBuf]) -> Result<Self> {
        Self::open_files(world, config, files, no_network)
    }
}

impl<N: OwnNetwork> Experiment<N> {
    /// Opens the data like [`new`](Experiment::new), for a program with a network of its own, which
    /// trains, resumes, forecasts, is scored and packaged like a built-in kind. If the
    /// configuration has `kind = "own"`, `maker` makes the network from the other keys of `[model]`,
    /// which are compared between starts; other kinds run as usual. The output of the network is an
    /// increment, as [`OwnNetwork`] defines.
    ///
    /// `maker` is called several times, and must make the same layers each time, with parameters of
    /// burn's layers or of an `Initializer`: these are drawn only when they are sharded, so that
    /// they do not depend on the mesh, and no rank holds all of them.
    ///
    /// # Errors
    /// Those of [`new`](Experiment::new) and of `maker`.
    ///
    /// # Example
    /// ```
    /// use halocline::experiment::{
    ///     CheckpointChoice, Experiment, ExperimentConfig, OwnModel, Signature,
    /// };
    /// use halocline::models::{FieldConv2d, FieldConv2dConfig};
    /// use halocline::prelude::*;
    /// # use halocline::io::ndarray::Array3;
    /// # use halocline::io::{FieldWriter, Grid, WriterConfig};
    ///
    /// #[derive(Module, Debug)]
    /// struct MyNet {
    ///     first: FieldConv2d,
    ///     last: FieldConv2d,
    /// }
    ///
    /// impl<X: Field<4>> Layer<X> for MyNet {
    ///     type Output = X;
    ///
    ///     fn forward(&self, x: X) -> X {
    ///         x.apply(&self.first).gelu().apply(&self.last)
    ///     }
    /// }
    ///
    /// #[derive(serde::Deserialize)]
    /// #[serde(deny_unknown_fields)]
    /// struct Settings {
    ///     width: usize,
    /// }
    ///
    /// fn make(model: &OwnModel, signature: &Signature, device: &Device) -> Result<MyNet> {
    ///     let settings: Settings = model.parse()?;
    ///     let conv = |channels: [usize; 2]| {
    ///         let config = FieldConv2dConfig::new(channels, [3, 3]);
    ///         config.with_boundary(signature.grid.boundary()).init(device)
    ///     };
    ///     Ok(MyNet {
    ///         first: conv([signature.channels_in(), settings.width]),
    ///         last: conv([settings.width, signature.channels_out()]),
    ///     })
    /// }
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let grid = Grid::cell_centered(6, 8)?;
    /// # let path = folder.path().join("t2m.h5");
    /// # let mut writer = FieldWriter::create(path, &grid, &["t2m"], &WriterConfig::new())?;
    /// # for step in 0..12_usize {
    /// #     let value = |(_, row, column): (_, usize, usize)| ((step + row * column) % 5) as f32;
    /// #     let field = Array3::from_shape_fn((1, 6, 8), value);
    /// #     writer.append(21600.0 * step as f64, field.view())?;
    /// # }
    /// # writer.finish()?;
    /// let text = r#"
    ///     folder = "FOLDER/run"
    ///
    ///     [data]
    ///     files = ["FOLDER/t2m.h5"]
    ///     train = { until = "1970-01-03" }
    ///     test = { from = "1970-01-03" }
    ///
    ///     [model]
    ///     kind = "own"
    ///     name = "my_net"
    ///     width = 4
    ///
    ///     [training]
    ///     epochs = 1
    /// "#;
    /// let text = text.replace("FOLDER", &folder.path().display().to_string());
    /// let config = ExperimentConfig::from_toml(&text)?;
    /// config.launcher(2).run(|world| {
    ///     let experiment = Experiment::with_network(&world, &config, make)?;
    ///     let _ended = experiment.train()?;
    ///     let model = experiment.trained(CheckpointChoice::Best)?;
    ///     println!("{}", experiment.score(&model, &config.forecast)?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_network(world: &World, config: &ExperimentConfig, maker: Maker<N>) -> Result<Self> {
        Self::open(world, config, maker)
    }

    /// Opens a trained experiment on other files like [`of_files`](Experiment::of_files), for a
    /// program with a network of its own. The configuration may be that of a
    /// [package](Self::package).
    ///
    /// # Errors
    /// Those of [`of_files`](Experiment::of_files).
    pub fn of_files_with_network(
        world: &World,
        config: &ExperimentConfig,
        files: &[PathBuf],
        maker: Maker<N>,
    ) -> Result<Self> {
        Self::open_files(world, config, files, maker)
    }
}
