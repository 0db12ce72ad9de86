//! Subcommands of experiments.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use halocline::Ended;
use halocline::core::{Launcher, World};
use halocline::experiment::{
    CheckpointChoice, Experiment, ExperimentConfig, ForecastConfig, MeshComparison, Outlook,
    device_name,
};
use halocline::io::{Existing, save_json};
use halocline::models::parallel::{Link, Machine};

use crate::hints::hint_at_device;
use crate::report::Result;

/// Configuration and ranks.
#[derive(Args)]
pub(crate) struct Run {
    /// Configuration (TOML file)
    #[arg(long)]
    config: PathBuf,
    /// Key of the configuration to replace, such as training.epochs=5; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Number of local ranks, if the configuration has no mesh and no launcher such as mpirun
    /// starts ranks
    #[arg(long)]
    ranks: Option<usize>,
}

impl Run {
    /// Runs a program on all ranks.
    fn run<T: Send>(
        &self,
        program: impl Fn(&World, &ExperimentConfig) -> halocline::Result<T> + Send + Sync,
    ) -> Result<Vec<T>> {
        let config = ExperimentConfig::load_with(&self.config, &self.set)?;
        run_on(&config, self.ranks, program)
    }
}

/// Checks the number of ranks, if it is given, against the mesh of a configuration.
fn check_ranks(config: &ExperimentConfig, ranks: Option<usize>) -> Result {
    let of_mesh = config.mesh.values().product::<usize>();
    match ranks {
        Some(ranks) if !config.mesh.is_empty() && ranks != of_mesh => Err(format!(
            "--ranks {ranks}: the configured mesh has {of_mesh} ranks; leave one of them out"
        )
        .into()),
        _ => Ok(()),
    }
}

/// Runs a program of an experiment on all ranks, after a line with their number and device.
fn run_on<T: Send>(
    config: &ExperimentConfig,
    ranks: Option<usize>,
    program: impl Fn(&World, &ExperimentConfig) -> halocline::Result<T> + Send + Sync,
) -> Result<Vec<T>> {
    check_ranks(config, ranks)?;
    let launcher = config.launcher(ranks.unwrap_or(1));
    Ok(launcher.collect(|world| {
        if world.is_root() {
            let device = device_name(world.device());
            eprintln!("halocline: {} on {device}", counted(world.size()));
            hint_at_device(&device);
        }
        program(&world, config)
    })?)
}

/// Formats a number of ranks.
fn counted(ranks: usize) -> String {
    match ranks {
        1 => "1 rank".into(),
        _ => format!("{ranks} ranks"),
    }
}

/// Configuration or package of a trained model, and ranks.
#[derive(Args)]
pub(crate) struct Trained {
    /// Configuration (TOML file)
    #[arg(long, required_unless_present = "package")]
    config: Option<PathBuf>,
    /// Package of a trained model, in place of the configuration
    #[arg(long, conflicts_with = "config", requires = "files")]
    package: Option<PathBuf>,
    /// Key of the configuration to replace, such as forecast.every_hours=12; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Number of local ranks, if the configuration has no mesh and no launcher such as mpirun
    /// starts ranks
    #[arg(long)]
    ranks: Option<usize>,
}

impl Trained {
    /// Runs a program on all ranks.
    fn run<T: Send>(
        &self,
        program: impl Fn(&World, &ExperimentConfig) -> halocline::Result<T> + Send + Sync,
    ) -> Result<Vec<T>> {
        let config = match (&self.package, &self.config) {
            (Some(package), _) => ExperimentConfig::load_package_with(package, &self.set)?,
            (None, Some(config)) => ExperimentConfig::load_with(config, &self.set)?,
            (None, None) => return Err("--config or --package: expected one of them".into()),
        };
        run_on(&config, self.ranks, program)
    }

    /// Returns the folder of outputs without a name: that of the experiment or, with a package, the
    /// current one.
    fn folder(&self, config: &ExperimentConfig) -> PathBuf {
        match self.package {
            Some(_) => PathBuf::new(),
            None => config.folder.clone(),
        }
    }
}

/// Options for the trained model and its forecasts.
#[derive(Args)]
pub(crate) struct Forecasting {
    /// Checkpoint of the model
    #[arg(long, default_value = "best")]
    checkpoint: Checkpoint,
    /// Steps per forecast, in place of those of the configuration
    #[arg(long)]
    steps: Option<usize>,
    /// Members per ensemble, in place of those of the configuration; they differ by the noise, or by
    /// data.noise_channels
    #[arg(long)]
    members: Option<usize>,
    /// Standard deviation of the noise on the initial states of members, in standard deviations of
    /// the inputs, in place of that of the configuration
    #[arg(long, allow_negative_numbers = true)]
    noise: Option<f64>,
    /// Other files to take states from, all of them, in place of those of the configuration
    #[arg(long, num_args = 1..)]
    files: Vec<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Checkpoint {
    /// The one with the best validation, or else the last.
    Best,
    /// The last.
    Last,
}

impl Checkpoint {
    fn choice(self) -> CheckpointChoice {
        match self {
            Self::Best => CheckpointChoice::Best,
            Self::Last => CheckpointChoice::Last,
        }
    }
}

impl Forecasting {
    fn config(&self, config: &ExperimentConfig) -> ForecastConfig {
        ForecastConfig {
            steps: self.steps.unwrap_or(config.forecast.steps),
            members: self.members.unwrap_or(config.forecast.members),
            noise: self.noise.unwrap_or(config.forecast.noise),
            ..config.forecast.clone()
        }
    }

    /// Prints a line on rank 0 if `--noise` has no effect.
    fn hint_at_noise(&self, world: &World, config: &ForecastConfig) {
        if world.is_root()
            && config.members == 1
            && let Some(noise) = self.noise.filter(|noise| *noise > 0.0)
        {
            eprintln!(
                "halocline: --noise {noise}, which a forecast of one member does not get; choose --members 2 or more"
            );
        }
    }

    /// Returns the part of the names of outputs for other files and for options that differ from
    /// the configuration, such as `-2023.nc-members1-noise0`.
    fn suffix(&self, config: &ExperimentConfig) -> String {
        let (configured, chosen) = (&config.forecast, self.config(config));
        let mut suffix = String::new();
        if let [first, others @ ..] = &self.files[..] {
            // With the extension, by which files of one name in several formats differ.
            let name = first.file_name().unwrap_or_default();
            suffix += &format!("-{}", name.to_string_lossy());
            if !others.is_empty() {
                suffix += &format!("+{}", others.len());
            }
        }
        if chosen.steps != configured.steps {
            suffix += &format!("-steps{}", chosen.steps);
        }
        if chosen.members != configured.members {
            suffix += &format!("-members{}", chosen.members);
        }
        if chosen.noise != configured.noise {
            suffix += &format!("-noise{}", chosen.noise);
        }
        if matches!(self.checkpoint, Checkpoint::Last) {
            suffix += "-last";
        }
        suffix
    }

    fn open(&self, world: &World, config: &ExperimentConfig) -> halocline::Result<Experiment> {
        match &self.files[..] {
            [] => {
                // Without a checkpoint, nothing is computed or written.
                config.require_trained()?;
                Experiment::new(world, config)
            }
            files => Experiment::of_files(world, config, files),
        }
    }
}

#[derive(Args)]
pub(crate) struct TrainOptions {
    #[command(flatten)]
    run: Run,
}

pub(crate) fn train(options: &TrainOptions) -> Result {
    let ended = options
        .run
        .run(|world, config| Experiment::new(world, config)?.train())?;
    if ended.contains(&Ended::Interrupted) {
        // Training is incomplete: the exit status asks for another start.
        std::process::exit(75);
    }
    Ok(())
}

#[derive(Args)]
pub(crate) struct ForecastOptions {
    #[command(flatten)]
    run: Trained,
    #[command(flatten)]
    forecasting: Forecasting,
    /// Date of the state to start from, such as 2018-01-01T06:00; by default every state of the
    /// test period, or those that forecast.every_hours or at_hours choose
    #[arg(long)]
    from: Option<String>,
    /// Zarr store to write, or NetCDF file if it ends in .nc; without --from, the folder of the
    /// stores. By default forecast-DATE.zarr or the folder forecasts, in the folder of the
    /// experiment, with other names such as forecasts-FILE-steps4 for --files and options that
    /// differ from the configuration; with --package in the current folder
    #[arg(long)]
    output: Option<PathBuf>,
    /// Replace existing outputs; without it they are kept, or with --from are an error
    #[arg(long)]
    replace: bool,
}

impl ForecastOptions {
    /// Returns the path of the output.
    fn path(
        &self,
        experiment: &Experiment,
        config: &ExperimentConfig,
    ) -> halocline::Result<PathBuf> {
        if let Some(output) = &self.output {
            return Ok(output.clone());
        }
        let suffix = self.forecasting.suffix(config);
        let name = match &self.from {
            Some(date) => format!("forecast-{}{suffix}.zarr", experiment.output_stem(date)?),
            None => format!("forecasts{suffix}"),
        };
        Ok(self.run.folder(config).join(name))
    }
}

pub(crate) fn forecast(options: &ForecastOptions) -> Result {
    let ForecastOptions {
        forecasting,
        from,
        replace,
        ..
    } = options;
    let existing = if *replace {
        Existing::Replace
    } else {
        Existing::Reject
    };
    let written = options.run.run(|world, config| {
        let experiment = forecasting.open(world, config)?;
        let model = experiment.trained(forecasting.checkpoint.choice())?;
        let path = options.path(&experiment, config)?;
        let config = forecasting.config(config);
        forecasting.hint_at_noise(world, &config);
        let written = experiment.forecast(&model, from.as_deref(), &config, &path, existing)?;
        Ok(Some(written).filter(|_| world.is_root()))
    })?;
    // A closed output pipe, as after `head`, is not a failure.
    let mut out = std::io::stdout();
    // Of rank 0.
    for paths in written.into_iter().flatten() {
        if paths.is_empty() {
            let _ = writeln!(out, "nothing is written: all forecasts are there already");
        }
        for path in paths {
            let _ = writeln!(out, "written to {}", path.display());
        }
    }
    Ok(())
}

#[derive(Args)]
pub(crate) struct ScoreOptions {
    #[command(flatten)]
    run: Trained,
    #[command(flatten)]
    forecasting: Forecasting,
    /// JSON file of all scores by channel, lead and region; by default scores.json in the folder of
    /// the experiment, with other names such as scores-FILE-steps4.json for --files and options that
    /// differ from the configuration; with --package in the current folder
    #[arg(long)]
    output: Option<PathBuf>,
    /// Draw no pictures; otherwise they are in a folder next to the scores
    #[cfg(feature = "plot")]
    #[arg(long)]
    no_pictures: bool,
}

pub(crate) fn score(options: &ScoreOptions) -> Result {
    let ScoreOptions {
        forecasting,
        output,
        ..
    } = options;
    options.run.run(|world, config| {
        let name = format!("scores{}.json", forecasting.suffix(config));
        let path = match output {
            Some(output) => output.clone(),
            None => options.run.folder(config).join(name),
        };
        // Next to scores.json are spectra.json and pictures; next to scores of another name, theirs
        // have that name too.
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let beside = match stem.strip_prefix("scores") {
            Some(name) => name.to_string(),
            None => format!("-{stem}"),
        };
        let experiment = forecasting.open(world, config)?;
        let model = experiment.trained(forecasting.checkpoint.choice())?;
        // Fails before the forecasts are made.
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        let forecast = forecasting.config(config);
        forecasting.hint_at_noise(world, &forecast);
        let report = experiment.score(&model, &forecast)?;
        if world.is_root() {
            println!("{report}\nall regions: {}", path.display());
        }
        save_json(world, &path, &report.rows)?;
        if !report.spectra.is_empty() {
            let spectra = path.with_file_name(format!("spectra{beside}.json"));
            save_json(world, spectra, &report.spectra)?;
        }
        #[cfg(feature = "plot")]
        if !options.no_pictures {
            let folder = path.with_file_name(format!("pictures{beside}"));
            let drawn = experiment.save_pictures(&model, &forecast, &report, &folder)?;
            if world.is_root() {
                println!("{} pictures: {}", drawn.len(), folder.display());
            }
        }
        Ok(())
    })?;
    Ok(())
}

#[derive(Args)]
pub(crate) struct PackageOptions {
    #[command(flatten)]
    run: Run,
    /// Checkpoint of the model
    #[arg(long, default_value = "best")]
    checkpoint: Checkpoint,
    /// Folder to write, which must not exist; by default package in the folder of the experiment
    #[arg(long)]
    output: Option<PathBuf>,
}

pub(crate) fn package(options: &PackageOptions) -> Result {
    let choice = options.checkpoint.choice();
    let written = options.run.run(|world, config| {
        config.require_trained()?;
        let output = options.output.clone();
        let output = output.unwrap_or_else(|| config.folder.join("package"));
        Experiment::new(world, config)?.package(choice, &output)?;
        Ok(Some(output).filter(|_| world.is_root()))
    })?;
    for path in written.into_iter().flatten() {
        println!("written to {}", path.display());
    }
    Ok(())
}

#[derive(Args)]
pub(crate) struct PlanOptions {
    #[command(flatten)]
    run: Run,
    /// Latency of messages between ranks, in microseconds; measured on this machine by default
    #[arg(long, requires = "bandwidth", allow_negative_numbers = true)]
    latency: Option<f64>,
    /// Bandwidth between ranks, in GB/s
    #[arg(long, requires = "latency", allow_negative_numbers = true)]
    bandwidth: Option<f64>,
    /// Compare other meshes of as many ranks by the time and memory of a batch
    #[arg(long)]
    compare: bool,
    /// Memory of a rank, in GB: meshes that need more come last
    #[arg(long, requires = "compare", allow_negative_numbers = true)]
    memory: Option<f64>,
}

pub(crate) fn plan(options: &PlanOptions) -> Result {
    let run = &options.run;
    let config = ExperimentConfig::load_with(&run.config, &run.set)?;
    check_ranks(&config, run.ranks)?;
    if let Some(memory) = options.memory {
        let is_size = memory > 0.0 && memory.is_finite();
        if !is_size {
            return Err(format!("--memory {memory}: expected GB above 0").into());
        }
    }
    let budget = options.memory.map(|memory| (1e9 * memory) as usize);
    let measured = Launcher::local(2)
        .collect(|world| Machine::measure(&world.mesh([("rank", world.size())])?))?;
    let mut machine = measured
        .into_iter()
        .next()
        .ok_or("no rank measured the machine")?;
    if let (Some(latency), Some(bandwidth)) = (options.latency, options.bandwidth) {
        let is_link = latency >= 0.0 && latency.is_finite() && bandwidth > 0.0;
        if !is_link || !bandwidth.is_finite() {
            return Err(format!(
                "--latency {latency} --bandwidth {bandwidth}: expected microseconds from 0 on, and GB/s above 0"
            )
            .into());
        }
        let network = Link {
            latency: 1e-6 * latency,
            bandwidth: 1e9 * bandwidth,
        };
        machine = Machine {
            links: Default::default(),
            network,
            ..machine
        };
    }
    // Ranks that are given are as many as those of a mesh.
    let of_mesh = || config.mesh.values().product::<usize>();
    let ranks = options.run.ranks.unwrap_or_else(of_mesh);
    Launcher::local(1).run(|world| {
        let (planned, device) = (counted(ranks), device_name(world.device()));
        eprintln!("halocline: plan for {planned}, computed on {device}");
        hint_at_device(&device);
        if !options.compare {
            println!("{}", Outlook::new(&world, &config, ranks, &machine)?);
            return Ok(());
        }
        let compared = MeshComparison::new(&world, &config, ranks, &machine, budget)?;
        println!("{compared}");
        Ok(())
    })?;
    Ok(())
}
