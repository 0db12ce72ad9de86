//! Experiments: a TOML file names data, a model and a mesh, and an [`Experiment`] trains the model,
//! makes forecasts, and scores them against persistence and climatology. The program `halocline`
//! runs experiments; a program of your own does the same with these types, also with [a network of
//! its own](Experiment::with_network).
//!
//! # Example
//! ```no_run
//! use halocline::experiment::{CheckpointChoice, Experiment, ExperimentConfig};
//! use halocline::prelude::*;
//!
//! let config = ExperimentConfig::load("weather.toml")?;
//! config.launcher(4).run(|world| {
//!     let experiment = Experiment::new(&world, &config)?;
//!     let _ended = experiment.train()?;
//!     let model = experiment.trained(CheckpointChoice::Best)?;
//!     println!("{}", experiment.score(&model, &config.forecast)?);
//!     Ok(())
//! })?;
//! # Ok::<(), halocline::Error>(())
//! ```

mod areas;
mod bounds;
mod capacity;
mod channels;
mod checks;
mod climatology;
mod comparison;
mod config;
mod cycle;
mod data;
mod data_config;
mod device;
mod errors;
#[cfg(test)]
mod fixture;
mod forecast;
mod forecast_config;
mod geometry;
mod keys;
mod lateral;
mod lock;
mod log;
mod loss;
mod member_groups;
mod meshes;
mod near;
mod network;
mod noise;
mod normals;
mod open;
mod optimizer;
mod order;
mod outlook;
mod outputs;
mod overrides;
mod pace;
mod package;
mod patterns;
#[cfg(feature = "plot")]
mod pictures;
mod precision;
mod pretrained;
mod record;
mod regions;
mod replicas;
mod score;
mod setup;
mod state_cache;
mod static_fields;
mod step_log;
mod summary;
mod timeline;
mod train;
mod training_config;

pub use comparison::{ComparedMesh, MeshComparison};
pub use config::ExperimentConfig;
pub use cycle::Cycle;
pub use data_config::DataConfig;
pub use device::device_name;
pub use forecast_config::{ForecastConfig, RegionConfig};
pub use keys::in_keys;
pub use network::{FieldModel, Maker, ModelConfig, NoNetwork, OwnModel, OwnNetwork, Signature};
pub use optimizer::{OptimizerConfig, OptimizerKind, Schedule};
pub use outlook::Outlook;
pub use precision::Precision;
pub use score::{Report, Row};
pub use setup::{CheckpointChoice, Experiment};
pub use training_config::{Loss, RolloutGradient, TrainingConfig};
