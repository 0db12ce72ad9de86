//! Configuration of an experiment, read from TOML.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use halocline_core::{Error, Result};
use halocline_models::parallel::Plan;
use serde::{Deserialize, Serialize};

use super::data_config::DataConfig;
use super::errors::{failed, invalid, refuse};
use super::forecast_config::ForecastConfig;
use super::near::{model_key, near, nearest};
use super::network::ModelConfig;
use super::optimizer::OptimizerConfig;
use super::overrides::overridden;
use super::training_config::TrainingConfig;

/// Configuration of an [`Experiment`](super::Experiment): its data, model, mesh and training.
///
/// Omitted keys take their defaults; unknown keys are errors. Paths are relative to the working
/// directory.
///
/// # Example
/// ```
/// use halocline::experiment::ExperimentConfig;
///
/// let config = ExperimentConfig::from_toml(r#"
///     folder = "runs/a"
///
///     [data]
///     files = ["era5.zarr"]
///     inputs = ["t2m", "z@500"]
///     lead_hours = 6.0
///     train = { until = "2018-01-01" }
///     test = { from = "2018-01-01" }
///
///     [model]
///     kind = "unet"
///     width = 32
/// "#)?;
/// assert_eq!(config.training.batch, 1);
/// assert_eq!(ExperimentConfig::from_toml(&config.to_toml())?, config);
/// let error = ExperimentConfig::from_toml("folders = \"a\"").unwrap_err();
/// assert!(error.to_string().contains("near it: folder"));
/// # Ok::<(), halocline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExperimentConfig {
    /// Folder of statistics, climatology, checkpoints and scores, on a file system that all ranks
    /// share.
    pub folder: PathBuf,
    /// Seed of parameters, noise and the order of samples.
    #[serde(default)]
    pub seed: u64,
    /// Whether maps show the coastlines of the Earth.
    #[serde(default = "yes")]
    pub coastlines: bool,
    /// Files, channels and periods.
    pub data: DataConfig,
    /// Kind and sizes of the model.
    pub model: ModelConfig,
    /// Sizes of the mesh axes: `data` shards samples, `lat` and `lon` shard fields, `member` shards
    /// ensembles. Fields are replicated over all other axes, which the plan may use. Axes are
    /// ordered by name. Default `lat` and `lon`, as square as the number of ranks allows.
    #[serde(default)]
    pub mesh: BTreeMap<String, usize>,
    /// Sharding of the parameters. Default none.
    #[serde(default)]
    pub plan: Plan,
    /// Optimizer and its learning rate.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// Epochs, batches, loss and precision of training.
    #[serde(default)]
    pub training: TrainingConfig,
    /// Forecasts for validation, scores and output.
    #[serde(default)]
    pub forecast: ForecastConfig,
}

fn yes() -> bool {
    true
}

impl ExperimentConfig {
    /// Reads a TOML file.
    ///
    /// # Errors
    /// A file that cannot be read; the errors of [`from_toml`](Self::from_toml), with the path.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::load_with(path, &[])
    }

    /// Reads a TOML file, some of whose keys are replaced by settings `KEY=VALUE`: dotted keys and
    /// values in TOML, as the option `--set` of the program takes them.
    ///
    /// # Errors
    /// A setting that is not a key and a value; the errors of [`load`](Self::load), with the
    /// settings that cause them, or else the line of the file.
    ///
    /// # Example
    /// ```
    /// use halocline::experiment::ExperimentConfig;
    ///
    /// let settings = ["training.epochs=5".to_string()];
    /// let config = ExperimentConfig::load_with("examples/configs/weather.toml", &settings)?;
    /// assert_eq!(config.training.epochs, 5);
    /// # Ok::<(), halocline::Error>(())
    /// ```
    pub fn load_with(path: impl AsRef<Path>, settings: &[String]) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(failed(path))?;
        if settings.is_empty() {
            return Self::from_toml(&text).map_err(failed(path));
        }
        // Lines of the text with the settings are not those of the file.
        let without_lines = |error: &toml::de::Error| format!("{}\n", error.message());
        let merged = overridden(&text, settings).map_err(failed(path))?;
        let error = match Self::parsed(&merged, without_lines) {
            Ok(config) => return Ok(config),
            Err(error) => error.to_string(),
        };
        let fails_alike = |settings: &[String]| {
            let merged = overridden(&text, settings);
            let other = merged.and_then(|merged| Self::parsed(&merged, without_lines));
            other.is_err_and(|other| other.to_string() == error)
        };
        if fails_alike(&[]) {
            return Self::from_toml(&text).map_err(failed(path));
        }
        let is_cause = |place: &usize| {
            let mut others = settings.to_vec();
            others.remove(*place);
            !fails_alike(&others)
        };
        let causes = (0..settings.len()).filter(is_cause);
        let causes: Vec<String> = causes.map(|place| settings[place].clone()).collect();
        // Where each of several settings causes the error alone, none is found.
        let named: &[String] = if causes.is_empty() { settings } else { &causes };
        let named = named.join(" --set ");
        Err(failed(path)(format!("--set {named}: {error}")))
    }

    /// Parses TOML.
    ///
    /// # Errors
    /// Text that is not TOML; an unknown key, with the names nearest to it; a missing key; a value
    /// of the wrong type or out of range.
    pub fn from_toml(text: &str) -> Result<Self> {
        Self::parsed(text, |error| error.to_string())
    }

    /// Parses TOML, with a function that formats an error of the parser.
    fn parsed(text: &str, told: impl Fn(&toml::de::Error) -> String) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let near =
                near(error.message()).map_or(String::new(), |near| format!("near it: {near}\n"));
            let wrong = model_key(text).filter(|key| !error.message().contains(&key[..]));
            let wrong = wrong.map_or(String::new(), |key| format!("key: model.{key}\n"));
            let mut message = told(&error);
            for integer in ["expected usize", "expected u64"] {
                message = message.replace(integer, "expected a whole number from 0 on");
            }
            Error::other(format!("{message}{wrong}{near}"))
        })?;
        config.check()?;
        Ok(config)
    }

    /// Serializes to TOML, defaults included.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration is tables, lists, numbers and texts")
    }

    /// Rejects axes over which nothing would be sharded: those neither in `known` nor named by the
    /// plan.
    fn check_axes(&self, known: &[&str]) -> Result<()> {
        let mut known = known.to_vec();
        known.extend(self.plan.axes());
        let mut names = self.mesh.keys();
        match names.find(|name| !known.contains(&name.as_str())) {
            None => Ok(()),
            Some(name) => {
                let near = nearest(name, &known);
                Err(Error::other(format!(
                    "mesh.{name}: nothing is sharded over this axis, which the plan does not name; expected {}\nnear it: \
                     {near}\n",
                    known.join(", ")
                )))
            }
        }
    }

    /// Checks the configuration for a run.
    pub(super) fn check_run(&self) -> Result<()> {
        self.check_values()?;
        self.check_axes(&FIELD_AXES)
    }

    /// Checks the configuration as read from a file, or for choosing a plan by price.
    pub(super) fn check(&self) -> Result<()> {
        self.check_values()?;
        self.check_axes(&[&FIELD_AXES[..], &[PRICED]].concat())
    }

    fn check_values(&self) -> Result<()> {
        self.data.check()?;
        self.training.check()?;
        ranks_of(self.mesh.values().copied())?;
        let (training, noise_channels) = (&self.training, self.data.noise_channels);
        refuse(&[
            (
                training.loss.is_of_ensembles() && training.noise == 0.0 && noise_channels == 0,
                "training.noise: 0, with which all members of the loss crps or energy are the same; expected a standard \
                 deviation, such as 0.1, or data.noise_channels",
            ),
            (
                training.patience.is_some() && self.data.validation.is_none(),
                "training.patience: without data.validation, of whose scores it counts",
            ),
            (
                self.model.mask().is_some() && !self.plan.layers.is_empty(),
                "model.mask: with a plan of layers, which masked convolutions do not follow; expected [[plan.store]] only",
            ),
            (
                self.mesh.values().any(|size| *size == 0),
                "mesh: an axis of 0 ranks; expected at least 1",
            ),
        ])?;
        self.forecast.check(noise_channels)?;
        self.optimizer.check()
    }
}

/// Axes that have a meaning without a plan.
const FIELD_AXES: [&str; 4] = ["data", "lat", "lon", "member"];
/// Axis of the plans that the cost model proposes, which a configuration may name before it has a
/// plan.
const PRICED: &str = "tensor";

/// Largest number of ranks of a mesh.
const MOST_RANKS: usize = 1 << 20;

/// Returns the number of ranks of a mesh with axes of these sizes.
///
/// # Errors
/// More ranks than a mesh can have.
pub(super) fn ranks_of(sizes: impl Iterator<Item = usize>) -> Result<usize> {
    let ranks = sizes.fold(1, usize::saturating_mul);
    if ranks > MOST_RANKS {
        return Err(invalid(
            "mesh",
            ranks,
            format!("at most {MOST_RANKS} ranks"),
        ));
    }
    Ok(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str = "folder = \"a\"\n[data]\nfiles = [\"b\"]\n[model]\nkind = \"cnn\"\n";

    fn refused(text: &str) -> String {
        ExperimentConfig::from_toml(text).unwrap_err().to_string()
    }

    #[test]
    fn files_are_read_and_written() {
        let least = ExperimentConfig::from_toml(LEAST).unwrap();
        assert_eq!(
            ExperimentConfig::from_toml(&least.to_toml()).unwrap(),
            least
        );
        let full = include_str!("../../examples/configs/weather.toml");
        let full = ExperimentConfig::from_toml(full).unwrap();
        assert_eq!(ExperimentConfig::from_toml(&full.to_toml()).unwrap(), full);
        assert_ne!(full.training, TrainingConfig::default());
        let global = include_str!("../../examples/configs/global.toml");
        ExperimentConfig::from_toml(global).unwrap();
    }

    #[test]
    fn masks_do_not_follow_plans_of_layers() {
        let masked = format!("{LEAST}mask = \"sst\"\n");
        let layer = "[[plan.layer]]\npath = \"**\"\nstyle = { colwise = { axis = \"tensor\" } }\n";
        let found = refused(&format!("{masked}{layer}"));
        assert!(
            found.contains("model.mask: with a plan of layers"),
            "{found}"
        );
        let store = "[[plan.store]]\npath = \"**\"\naxis = \"data\"\n";
        ExperimentConfig::from_toml(&format!("{masked}{store}")).unwrap();
        ExperimentConfig::from_toml(&format!("{LEAST}{layer}")).unwrap();
    }

    #[test]
    fn errors_name_the_setting_or_the_line_that_causes_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let error = |text: &str, settings: &[&str]| {
            std::fs::write(&path, text).unwrap();
            let settings = settings.iter().map(|setting| setting.to_string());
            let settings: Vec<String> = settings.collect();
            let loaded = ExperimentConfig::load_with(&path, &settings);
            loaded.unwrap_err().to_string()
        };
        let settings = ["seed=1", "training.epochs=0.5"];
        let found = error(LEAST, &settings);
        assert!(
            found.contains(": --set training.epochs=0.5: invalid type"),
            "{found}"
        );
        let found = error(&format!("{LEAST}widht = 3"), &settings[..1]);
        assert!(
            found.contains("at line 4") && !found.contains("--set"),
            "{found}"
        );
        let found = error(LEAST, &["mesh.lat=0", "mesh.lat=0"]);
        let told = ": --set mesh.lat=0 --set mesh.lat=0: mesh: an axis of 0 ranks";
        assert!(found.contains(told), "{found}");
    }

    #[test]
    fn unknown_keys_are_errors_with_those_near_them() {
        let error = refused(&format!("{LEAST}widht = 3"));
        assert!(error.contains("near it: width"), "{error}");
        let error = refused(&LEAST.replace("cnn", "transfromer"));
        assert!(error.contains("near it: transformer"), "{error}");
        let error = refused(&format!("{LEAST}kernel = [3, 3]"));
        assert!(error.contains("key: model.kernel"), "{error}");
        let error = refused(&LEAST.replace("files", "file"));
        assert!(error.contains("near it: files"), "{error}");
        for text in [
            format!("{LEAST}[training]\nepoch = 3"),
            format!("{LEAST}[optimizer]\nlearning_rates = 3"),
            format!("{LEAST}[[plan.store]]\nwhere = \"data\""),
            LEAST.replace("[model]", "train = { to = \"2018\" }\n[model]"),
        ] {
            assert!(
                refused(&text).contains("unknown field"),
                "{}",
                refused(&text)
            );
        }
    }

    #[test]
    fn values_out_of_range_are_errors_that_name_the_key() {
        let data = |line: &str| LEAST.replace("[model]", &format!("{line}\n[model]"));
        let then = |lines: &str| format!("{LEAST}{lines}");
        for (text, part) in [
            (LEAST.replace("\"b\"", ""), "data.files"),
            (data("history = 0"), "data.history"),
            (data("history = 2\nanomalies = true"), "data.anomalies"),
            (data("lead_hours = -6.0"), "data.lead_hours"),
            (data("gaps = \"skp\""), "near it: skip"),
            (data("missing = \"allow\""), "data.missing"),
            (data("climatology = \"week\""), "week"),
            (data("climatology_hours = 5"), "data.climatology_hours"),
            (then("[mesh]\nlat = 0"), "mesh"),
            (
                then("[mesh]\nlat = 1025\nlon = 1024"),
                "mesh: got 1049600, expected at most 1048576 ranks",
            ),
            (
                then("[mesh]\nlat = 4294967296\nlon = 4294967297"),
                "expected at most 1048576 ranks",
            ),
            (then("[mesh]\nlta = 2"), "mesh.lta"),
            (
                then("[mesh]\nlta = 2\ndata = 2\n[[plan.store]]\npath = \"**\"\naxis = \"data\""),
                "mesh.lta",
            ),
            (then("[training]\nbatch = 0"), "training.batch"),
            (
                then("[training]\nbatch = -1"),
                "expected a whole number from 0 on",
            ),
            (then("width = 1.5"), "expected a whole number from 0 on"),
            (then("[training]\nminutes = 0"), "training.minutes"),
            (then("[training]\nema = 1.5"), "training.ema"),
            (then("[training]\npatience = 3"), "without data.validation"),
            (
                then("[training]\ncurriculum = [[4, 2], [2, 3]]"),
                "training.curriculum",
            ),
            (then("[training]\nnoise = nan"), "noise"),
            (then("[training]\nprecision = \"fb16\""), "near it: bf16"),
            (
                then("[training]\nloss = \"crps\""),
                "training.members from 2",
            ),
            (
                then("[training]\nmembers = 2"),
                "training.members: of a loss",
            ),
            (
                then("[training]\nloss = \"crps\"\nmembers = 2"),
                "training.noise: 0, with which",
            ),
            (then("[training]\nloss = \"crsp\""), "near it: crps"),
            (
                then("[optimizer]\nlearning_rate = 0.0"),
                "optimizer.learning_rate",
            ),
            (then("[optimizer]\nkind = \"sdg\""), "near it: sgd"),
            (then("[forecast]\nsteps = 0"), "forecast.steps"),
            (then("[forecast]\nmembers = 4"), "forecast.noise: 0"),
            (data("test = { from = \"2018\" }"), "data.train: all times"),
        ] {
            let error = refused(&text);
            assert!(error.contains(part), "{part} in\n{error}");
        }
        let ensembles = "[training]\nloss = \"crps\"\nmembers = 2\n[forecast]\nmembers = 4";
        let text = data("noise_channels = 1") + ensembles;
        ExperimentConfig::from_toml(&text).unwrap();
    }
}
