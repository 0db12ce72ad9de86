//! Experiments with a network that a program defines itself.

use std::path::Path;

use halocline::Ended;
use halocline::experiment::{CheckpointChoice, Experiment, ExperimentConfig, OwnModel, Signature};
use halocline::io::Existing;
use halocline::models::{FieldConv2d, FieldConv2dConfig};
use halocline::prelude::*;

use super::{CONFIG, Replaced, fail, prepared, values, write};

#[derive(Module, Debug)]
struct MyNet {
    first: FieldConv2d,
    last: FieldConv2d,
}

impl<X: Field<4>> Layer<X> for MyNet {
    type Output = X;

    fn forward(&self, x: X) -> X {
        x.apply(&self.first).gelu().apply(&self.last)
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    width: usize,
}

fn make(model: &OwnModel, signature: &Signature, device: &Device) -> Result<MyNet> {
    let settings: Settings = model.parse()?;
    let conv = |channels: [usize; 2]| {
        let config = FieldConv2dConfig::new(channels, [3, 3]);
        config.with_boundary(signature.grid.boundary()).init(device)
    };
    Ok(MyNet {
        first: conv([signature.channels_in(), settings.width]),
        last: conv([settings.width, signature.channels_out()]),
    })
}

fn config() -> String {
    let model = "kind = \"own\"\nname = \"my_net\"\nwidth = 4";
    CONFIG.replaced("kind = \"cnn\"\nwidth = 6\nblocks = 1", model)
}

fn load(folder: &Path) -> ExperimentConfig {
    ExperimentConfig::load(folder.join("config.toml")).unwrap()
}

/// Trains until the end of an epoch.
fn train(folder: &Path, config: &str, ranks: usize, epochs: usize) -> Result<()> {
    write(folder, config, epochs);
    let config = load(folder);
    config.launcher(ranks).run(|world| {
        let experiment = Experiment::with_network(&world, &config, make)?;
        assert_eq!(experiment.train()?, Ended::Completed);
        Ok(())
    })
}

/// Returns the RMSE of all channels, leads and regions.
fn errors(folder: &Path, ranks: usize) -> Vec<f64> {
    let config = load(folder);
    let found = config.launcher(ranks).collect(|world| {
        let experiment = Experiment::with_network(&world, &config, make)?;
        let model = experiment.trained(CheckpointChoice::Best)?;
        let report = experiment.score(&model, &config.forecast)?;
        let errors = report.rows.iter().map(|row| row.score.metrics.rmse);
        Ok(errors.collect::<Vec<f64>>())
    });
    found.unwrap().remove(0)
}

#[test]
fn an_own_network_is_resumed_to_the_same_bits_and_scored_on_any_ranks() {
    let config = config();
    let mut first: Option<Vec<f64>> = None;
    for ranks in [1, 2] {
        let (whole, resumed) = (prepared(&config), prepared(&config));
        train(whole.path(), &config, ranks, 4).unwrap();
        for epochs in [2, 4] {
            train(resumed.path(), &config, ranks, epochs).unwrap();
        }
        let found = errors(whole.path(), ranks);
        assert_eq!(found, errors(resumed.path(), ranks));
        let expected = first.get_or_insert_with(|| found.clone());
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found / *expected - 1.0).abs() < 1e-3,
                "{found}, {expected}"
            );
        }
    }
}

#[test]
fn an_own_network_is_packaged_and_forecasts_other_files() {
    let config = config();
    let folder = prepared(&config);
    let path = folder.path();
    train(path, &config, 1, 1).unwrap();
    let config = load(path);
    let files = [path.join("2018.h5")];
    let forecast = |experiment: &Experiment<MyNet>, name: &str| {
        let model = experiment.trained(CheckpointChoice::Best)?;
        let (output, existing) = (path.join(name), Existing::Reject);
        experiment.forecast(
            &model,
            Some("2018-01-10"),
            &config.forecast,
            &output,
            existing,
        )
    };
    let run = config.launcher(1).run(|world| {
        let experiment = Experiment::with_network(&world, &config, make)?;
        forecast(&experiment, "expected.zarr")?;
        experiment.package(CheckpointChoice::Best, path.join("model"))
    });
    run.unwrap();
    let package = ExperimentConfig::load_package(path.join("model")).unwrap();
    let run = package.launcher(2).run(|world| {
        let experiment = Experiment::of_files_with_network(&world, &package, &files, make)?;
        forecast(&experiment, "found.zarr")?;
        Ok(())
    });
    run.unwrap();
    let [found, expected] = ["found.zarr", "expected.zarr"].map(|name| values(&path.join(name)));
    assert_eq!(found.dim().0, 3);
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            (found / expected - 1.0).abs() < 1e-5,
            "{found} for {expected}"
        );
    }
}

#[test]
fn mistakes_with_an_own_network_are_named() {
    let config = config();
    let folder = prepared(&config);
    let refused = |config: &str| {
        let error = train(folder.path(), config, 1, 1).unwrap_err();
        error.to_string()
    };
    let error = refused(&config.replaced("width = 4", "width = \"wide\""));
    assert!(
        error.contains("model my_net:") && error.contains("width"),
        "{error}"
    );
    // The program has no network of its own.
    write(folder.path(), &config, 1);
    for command in ["train", "plan"] {
        let error = fail(folder.path(), &[command]);
        assert!(error.contains("Experiment::with_network"), "{error}");
    }
    train(folder.path(), &config, 1, 1).unwrap();
    let error = refused(&config.replaced("my_net", "other"));
    assert!(error.contains("another [model], by its name"), "{error}");
    let error = refused(&config.replaced("width = 4", "width = 5"));
    assert!(error.contains("another [model], by its width"), "{error}");
}
