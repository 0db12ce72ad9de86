//! Losses, precision, validation and resumption of training.

use std::process::Stdio;

use serde_json::Value;

use super::files::{write_fields, write_parts};
use super::{
    CONFIG, Replaced, SCORE, TEST, TIMES, command, fail, halocline, interrupt_at, prepared, score,
    scores, succeed, train, trained, trained_with, write,
};

/// Returns the losses that training prints, by epoch.
fn losses(training: &str) -> (tempfile::TempDir, Vec<f64>) {
    losses_on("", training)
}

/// Returns the losses of training on a mesh, or on one rank.
pub(super) fn losses_on(mesh: &str, training: &str) -> (tempfile::TempDir, Vec<f64>) {
    losses_of("kind = \"cnn\"\nwidth = 6\nblocks = 1", mesh, training)
}

/// Returns the losses of training a model.
fn losses_of(model: &str, mesh: &str, training: &str) -> (tempfile::TempDir, Vec<f64>) {
    let config = CONFIG
        .replaced("kind = \"cnn\"\nwidth = 6\nblocks = 1", model)
        .replaced("[optimizer]", &format!("{mesh}\n[optimizer]"))
        .replaced("noise = 0.01", training)
        .replaced("EPOCHS", "3")
        .replaced("[[4, 2]]", "[[3, 2]]");
    let folder = prepared(&config);
    let out = succeed(folder.path(), &["train"]);
    let losses = out.lines().filter_map(|line| {
        let (_, loss) = line.split_once(": loss ")?;
        loss.split(',').next()?.parse().ok()
    });
    let losses: Vec<f64> = losses.collect();
    assert_eq!(losses.len(), 3, "{out}");
    assert!(out.contains("read amplification"), "{out}");
    (folder, losses)
}

#[test]
fn losses_are_named_in_the_configuration() {
    let [(_, squared), (_, again), (ensemble, crps), (_, spectral)] = [
        "noise = 0.01",
        "noise = 0.01\nrecompute = true",
        "noise = 0.1\nloss = \"crps\"\nmembers = 3",
        "noise = 0.01\nloss = \"spectral\"",
    ]
    .map(losses);
    assert_eq!(squared, again, "recomputed steps have the same bits");
    for losses in [&crps, &spectral] {
        assert!(losses[1] < losses[0] && losses[1] > 0.0, "{losses:?}");
        assert_ne!(*losses, squared);
    }
    // Members sharded over an axis, with samples over another, have the losses of one rank.
    let training = "noise = 0.1\nloss = \"crps\"\nmembers = 3";
    for mesh in ["data = 1\nlat = 2\nmember = 2", "data = 2\nmember = 2"] {
        let (_, sharded) = losses_on(&format!("[mesh]\n{mesh}"), training);
        for (one, other) in sharded.iter().zip(&crps) {
            assert!((one - other).abs() < 2e-4, "{sharded:?} for {crps:?}");
        }
    }
    // The spectral loss adds amplitudes to the squared error.
    assert!(spectral[0] > squared[0]);
    succeed(ensemble.path(), SCORE);
    assert!(score(&scores(ensemble.path()), "t2m", 6.0, "rmse").is_finite());
    assert!(!ensemble.path().join("run/pictures").exists());
}

/// Increments in half precision are added to states in f32.
#[test]
fn half_precision_follows_f32() {
    let kinds = [
        "kind = \"cnn\"\nwidth = 6\nblocks = 1",
        "kind = \"unet\"\nwidth = 4\nlevels = 1",
        "kind = \"transformer\"\nd_model = 16\nheads = 2\nblocks = 1\nkernel = [3, 3]",
        "kind = \"fno\"\nwidth = 4\nblocks = 1\nmodes = [3, 3]",
    ];
    for kind in kinds {
        let losses = ["f32", "bf16", "f16"].map(|precision| {
            let training = format!("noise = 0.01\nprecision = \"{precision}\"");
            losses_of(kind, "[mesh]\nlat = 2", &training).1
        });
        let [single, bf16, f16] = losses;
        for (found, expected) in bf16.iter().zip(&single) {
            assert!(
                (found / expected - 1.0).abs() < 0.02,
                "{kind}: {bf16:?} for {single:?}"
            );
        }
        // Steps are skipped while the loss scale is too large.
        assert!(
            f16[2] < f16[0] && f16[2] < 1.5 * single[2],
            "{kind}: {f16:?} for {single:?}"
        );
    }
}

/// Scored forecasts end with the data, and so do forcings without a formula.
#[test]
fn forcings_may_be_fields_of_the_files() {
    let inputs = CONFIG.replaced(r#"inputs = ["t2m", "z@500"]"#, r#"inputs = ["t2m"]"#);
    let forcings = r#"forcings = ["sin_latitude", "cos_solar_zenith_angle"]"#;
    let config = inputs.replaced(forcings, r#"forcings = ["z@500"]"#);
    let folder = prepared(&config);
    write(folder.path(), &config, 1);
    let out = succeed(folder.path(), &["train"]);
    assert!(out.contains("validation"), "{out}");
    succeed(folder.path(), SCORE);
    assert!(score(&scores(folder.path()), "t2m", 18.0, "rmse").is_finite());
    // The last two states lack forcings for the third step.
    let out = succeed(folder.path(), &["forecast", "--output", "forecasts"]);
    assert_eq!(out.lines().count(), TIMES - TEST - 2, "{out}");
    let far = ["forecast", "--steps", "40", "--output", "far"];
    let found = fail(folder.path(), &far);
    assert!(
        found.contains("forecast.steps: 40, and no state"),
        "{found}"
    );
    assert!(!folder.path().join("far").exists(), "nothing is made");
}

/// Steps and members of validation must not change while epochs are left, because patience compares
/// the scores.
#[test]
fn validations_of_another_kind_are_refused() {
    let folder = trained(CONFIG);
    let other = CONFIG.replaced("steps = 3\n", "steps = 2\n");
    train(folder.path(), &other);
    write(folder.path(), &other, 2);
    let copy = folder.path().join("run/experiment.toml");
    let before = std::fs::read_to_string(&copy).unwrap();
    let found = fail(folder.path(), &["train"]);
    assert!(found.contains("halocline score"), "{found}");
    // The copy is still that of the last training.
    assert_eq!(std::fs::read_to_string(&copy).unwrap(), before);
    write(folder.path(), CONFIG, 2);
    succeed(folder.path(), &["train"]);
}

/// The best score and patience compare scores of the same states.
#[test]
fn files_of_validation_must_not_change_while_epochs_are_left() {
    let files = "[\"FOLDER/first.h5\", \"FOLDER/rest.h5\"]";
    let config = CONFIG.replaced("[\"FOLDER/2018.h5\"]", files);
    let validation = 28; // the first time of the period
    let folder = trained_with(&config, |path| write_parts(path, validation));
    let rest = folder.path().join("rest.h5");
    let before = std::fs::read(&rest).unwrap();
    write_fields(&rest, |time, _| (time >= validation).then_some(time + 1));
    write(folder.path(), &config, 2);
    let found = fail(folder.path(), &["train"]);
    let told = "the files by which the epochs before were validated";
    assert!(found.contains(told), "{found}");
    // Not written again, since a file of HDF5 contains the time at which it was.
    std::fs::write(&rest, before).unwrap();
    succeed(folder.path(), &["train"]);
}

/// A signal arrives before all forecasts of the validation are made.
#[test]
fn an_epoch_whose_validation_was_interrupted_is_validated_first() {
    let ensemble = "steps = 3\nmembers = 300\nnoise = 0.1\n";
    let long = CONFIG.replaced("steps = 3\n", ensemble);
    let folder = prepared(&long);
    write(folder.path(), &long, 1);
    let program = command(folder.path(), &["train"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let checkpoint = folder.path().join("run/checkpoints/step_000000013");
    interrupt_at(&program, &checkpoint);
    let output = program.wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(75), "{out}");
    assert!(
        out.contains("interrupted, and saved") && !out.contains("validation"),
        "{out}"
    );
    write(folder.path(), CONFIG, 1);
    let out = succeed(folder.path(), &["train"]);
    assert!(out.contains("1 of 1 epochs are done"), "{out}");
    assert!(out.contains("epoch 1: validation"), "{out}");
    assert!(folder.path().join("run/validation.json").exists());
    let out = succeed(folder.path(), &["train"]);
    assert!(!out.contains("validation"), "{out}");
}

#[test]
fn the_log_has_a_line_for_each_epoch() {
    let folder = prepared(CONFIG);
    for epochs in [1, 3] {
        write(folder.path(), CONFIG, epochs);
        succeed(folder.path(), &["train"]);
    }
    let text = std::fs::read_to_string(folder.path().join("run/log.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<Value> = lines.collect();
    assert_eq!(lines.len(), 3);
    for (index, line) in lines.iter().enumerate() {
        assert_eq!(line["epoch"], index + 1);
        assert_eq!(line["step"], 13 * (index + 1));
        assert_eq!(line["rollout"], 1);
        assert_eq!(line["skipped"], 0);
        assert_eq!(line["learning_rate"], 5e-3);
        for name in [
            "loss",
            "validation",
            "rmse_t2m",
            "rmse_z@500",
            "seconds",
            "samples_per_second",
        ] {
            let value = line[name].as_f64();
            assert!(value.is_some_and(|value| value > 0.0), "{name} in {line}");
        }
    }
}

#[test]
fn the_log_of_steps_is_that_of_an_uninterrupted_run() {
    let config = CONFIG.replaced("batch = 2", "batch = 2\nlog_every = 5");
    let folder = trained(&config);
    let run = folder.path().join("run");
    let read = || -> Vec<Value> {
        let text = std::fs::read_to_string(run.join("steps.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        lines.collect()
    };
    write(folder.path(), &config, 2);
    let out = succeed(folder.path(), &["train"]);
    assert!(out.contains("epoch 2, step 15: loss "), "{out}");
    let lines = read();
    assert_eq!(lines.len(), 5);
    for (index, line) in lines.iter().enumerate() {
        assert_eq!(line["step"], 5 * (index + 1));
        assert_eq!(line["epoch"], 1 + usize::from(index > 1));
        assert_eq!(line["learning_rate"], 5e-3);
        for name in ["loss", "grad_norm", "seconds"] {
            let value = line[name].as_f64();
            assert!(value.is_some_and(|value| value > 0.0), "{name} in {line}");
        }
    }
    // A resume from the first epoch repeats the second.
    std::fs::remove_dir_all(run.join("checkpoints/step_000000026")).unwrap();
    succeed(folder.path(), &["train"]);
    let again = read();
    assert_eq!(again.len(), 5);
    for (line, before) in again.iter().zip(&lines) {
        for name in ["step", "loss", "grad_norm"] {
            assert_eq!(line[name], before[name], "{name}");
        }
    }
}

#[test]
fn a_test_period_without_forecasts_is_told() {
    let last = "test = { from = \"2018-01-12T18:00\" }";
    let config = CONFIG.replaced("test = { from = \"2018-01-10\" }", last);
    let folder = prepared(&config);
    write(folder.path(), &config, 1);
    let output = halocline(folder.path(), &["train"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let told = "data.test has no forecast to score: no state of the period is a step after another";
    assert!(error.contains(told), "{error}");
}

#[test]
fn ranks_beside_a_mesh_of_others_are_refused() {
    let folder = prepared(&format!("{CONFIG}\n[mesh]\nlat = 2\n"));
    let found = fail(folder.path(), &["train", "--ranks", "3"]);
    assert!(
        found.contains("--ranks 3") && found.contains("has 2 ranks"),
        "{found}"
    );
}

#[test]
fn a_run_that_has_ended_stays_as_it_is() {
    let averaged = CONFIG.replaced("noise = 0.01", "noise = 0.01\nema = 0.9");
    let folder = trained(&averaged);
    let run = folder.path().join("run");
    let read = || {
        ["checkpoints/step_000000013/index.json", "experiment.toml"]
            .map(|name| std::fs::read_to_string(run.join(name)).unwrap())
    };
    let before = read();
    assert!(before[0].contains("\"ema."));
    write(folder.path(), &CONFIG.replaced("batch = 2", "batch = 3"), 1);
    let out = succeed(folder.path(), &["train"]);
    assert_eq!(out, "1 of 1 epochs are done\n");
    assert_eq!(read(), before);
}

#[test]
fn another_kind_of_optimizer_is_refused() {
    for (before, after, told) in [
        (
            "kind = \"adamw\"",
            "kind = \"adam\"",
            "got adam, expected adamw,",
        ),
        (
            "kind = \"sgd\"",
            "kind = \"sgd\"\nmomentum = 0.9",
            "got sgd with momentum, expected sgd,",
        ),
    ] {
        let [before, after] = [before, after]
            .map(|kind| CONFIG.replaced("[optimizer]", &format!("[optimizer]\n{kind}")));
        let folder = trained(&before);
        write(folder.path(), &after, 2);
        let found = fail(folder.path(), &["train"]);
        assert!(
            found.contains("optimizer.kind") && found.contains(told),
            "{found}"
        );
        write(folder.path(), &before, 2);
        succeed(folder.path(), &["train"]);
    }
}

#[test]
fn another_seed_or_optimizer_is_told_once() {
    let config = CONFIG.replaced("batch = 2", "batch = 2\nsave_every = 5");
    let folder = trained(&config);
    for (before, after, told) in [
        ("seed = 3", "seed = 4", "seed: got 4, expected 3,"),
        (
            "[optimizer]",
            "[optimizer]\nkind = \"sgd\"",
            "optimizer: got an optimizer of another kind",
        ),
    ] {
        write(folder.path(), &config.replaced(before, after), 2);
        let found = fail(folder.path(), &["train"]);
        assert_eq!(found.matches(told).count(), 1, "{found}");
        assert!(
            !found.contains("Launcher") && !found.contains("passed over"),
            "{found}"
        );
    }
    write(folder.path(), &config, 2);
    succeed(folder.path(), &["train"]);
}

#[test]
fn a_reader_that_ends_does_not_end_the_training() {
    let folder = prepared(CONFIG);
    write(folder.path(), CONFIG, 2);
    let mut program = command(folder.path(), &["train"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(program.stdout.take());
    assert_eq!(program.wait().unwrap().code(), Some(0));
    let last = folder.path().join("run/checkpoints/step_000000026");
    assert!(last.exists());
}
