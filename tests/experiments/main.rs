//! Experiments through the program `halocline`: trained, resumed, scored and forecast on any number
//! of ranks.

mod curvilinear;
mod data;
mod files;
mod forecasts;
mod graph;
mod network;
mod options;
mod orders;
mod own;
mod package;
mod training;
mod tuning;

use std::path::Path;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use halocline::io::ndarray::{Array3, Array4, Axis};
use halocline::io::{Fields, Grid, Missing, OpenConfig, open, parse_time};
use serde_json::Value;

use files::write_fields;

const ROWS: usize = 10;
const COLUMNS: usize = 18;
/// Number of times, six hours apart.
const TIMES: usize = 48;
/// Index of the first time of the test period.
const TEST: usize = 36;

/// Arguments that score without pictures.
const SCORE: &[&str] = if cfg!(feature = "plot") {
    &["score", "--no-pictures"]
} else {
    &["score"]
};

const CONFIG: &str = r#"
folder = "FOLDER/run"
seed = 3

[data]
files = ["FOLDER/2018.h5"]
inputs = ["t2m", "z@500"]
forcings = ["sin_latitude", "cos_solar_zenith_angle"]
lead_hours = 6.0
climatology = "mean"
train = { until = "2018-01-08" }
validation = { from = "2018-01-08", until = "2018-01-10" }
test = { from = "2018-01-10" }

[model]
kind = "cnn"
width = 6
blocks = 1

[optimizer]
learning_rate = 5e-3
schedule = "constant"

[training]
epochs = EPOCHS
batch = 2
curriculum = [[4, 2]]
noise = 0.01
clip_norm = 1.0

[forecast]
steps = 3
"#;

/// Returns the command that runs the program in a folder with its configuration.
fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halocline"));
    command
        .args(arguments)
        .args(["--config", "config.toml"])
        .current_dir(folder)
        .env("BURN_DEVICE", "flex");
    command
}

fn halocline(folder: &Path, arguments: &[&str]) -> Output {
    command(folder, arguments).output().unwrap()
}

/// Returns the arguments that write a forecast from a date.
fn forecast_from<'a>(date: &'a str, output: &'a str, options: &[&'a str]) -> Vec<&'a str> {
    let forecast = ["forecast", "--from", date, "--output", output];
    [&forecast[..], options].concat()
}

/// Interrupts a program, as Ctrl-C does, once a path exists or after two minutes.
fn interrupt_at(program: &Child, path: &Path) {
    let start = Instant::now();
    while !path.exists() && start.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(2));
    }
    let signal = ["-INT", &program.id().to_string()].map(String::from);
    let sent = Command::new("kill").args(signal).status().unwrap();
    assert!(sent.success());
}

/// Returns the standard output of a run that must succeed.
fn succeed(folder: &Path, arguments: &[&str]) -> String {
    let output = halocline(folder, arguments);
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{arguments:?}: {out}{err}");
    out.into_owned()
}

/// Returns a folder with data, which are waves that move east, and a configuration.
fn prepared(config: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_fields(&folder.path().join("2018.h5"), |time, _| Some(time));
    write(folder.path(), config, 4);
    folder
}

/// Returns a folder with a model trained for one epoch.
fn trained(config: &str) -> tempfile::TempDir {
    trained_with(config, |_| ())
}

/// Returns a folder with further files, and a model trained for one epoch.
fn trained_with(config: &str, prepare: impl Fn(&Path)) -> tempfile::TempDir {
    let folder = prepared(config);
    prepare(folder.path());
    train(folder.path(), config);
    folder
}

/// Trains until the end of the first epoch.
fn train(folder: &Path, config: &str) {
    write(folder, config, 1);
    succeed(folder, &["train"]);
}

/// Replacement of a part that must be there.
trait Replaced {
    fn replaced(&self, part: &str, other: &str) -> String;
}

impl Replaced for str {
    fn replaced(&self, part: &str, other: &str) -> String {
        assert!(self.contains(part), "{part} in\n{self}");
        self.replace(part, other)
    }
}

/// Returns the standard error of a run that must fail.
fn fail(folder: &Path, arguments: &[&str]) -> String {
    let output = halocline(folder, arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Writes the configuration with a number of epochs.
fn write(folder: &Path, config: &str, epochs: usize) {
    let text = config.replace("FOLDER", folder.to_str().unwrap());
    std::fs::write(
        folder.join("config.toml"),
        text.replace("EPOCHS", &epochs.to_string()),
    )
    .unwrap();
}

fn scores(folder: &Path) -> Vec<Value> {
    scores_in(folder, "scores.json")
}

fn scores_in(folder: &Path, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("run").join(name)).unwrap();
    serde_json::from_str::<Vec<Value>>(&text).unwrap()
}

/// Returns the named score of a channel on the globe, at a lead in hours.
fn score(scores: &[Value], channel: &str, lead: f64, name: &str) -> f64 {
    let found = scores
        .iter()
        .find(|row| row["channel"] == channel && row["lead"] == lead && row["region"] == "globe");
    found.unwrap()[name].as_f64().unwrap()
}

/// Returns the values of a file, with NaN for missing ones.
fn values(path: &Path) -> Array4<f32> {
    let open = OpenConfig::new().with_missing(Missing::Allow);
    let fields = open.open(path).unwrap();
    fields.read(fields.shape().map(|size| 0..size)).unwrap()
}

/// Returns the area-weighted root mean square of fields of a channel.
fn rmse(errors: &[Array3<f32>], channel: usize) -> f64 {
    let weights = Grid::cell_centered(ROWS, COLUMNS)
        .unwrap()
        .latitude_weights();
    let mean = |error: &Array3<f32>| {
        let field = error.index_axis(Axis(0), channel);
        let squares = field
            .indexed_iter()
            .map(|((row, _), value)| weights[row] * f64::from(*value).powi(2));
        squares.sum::<f64>() / (ROWS * COLUMNS) as f64
    };
    (errors.iter().map(mean).sum::<f64>() / errors.len() as f64).sqrt()
}

#[test]
fn runs_are_resumed_scored_and_forecast_on_any_ranks() {
    let mut first: Option<Vec<Value>> = None;
    for ranks in ["1", "2", "4"] {
        let (whole, resumed) = (prepared(CONFIG), prepared(CONFIG));
        let ranks = ["--ranks", ranks];
        let train = |folder: &Path| succeed(folder, &[&["train"][..], &ranks].concat());
        let score_run = |folder: &Path| succeed(folder, &[&["score"][..], &ranks].concat());
        let out = train(whole.path());
        assert!(
            out.contains("epoch 4: loss") && out.contains("2 step(s)"),
            "{out}"
        );
        assert!(out.contains("(the best)") && out.contains("t2m"), "{out}");
        // Stopped after two epochs, and resumed.
        write(resumed.path(), CONFIG, 2);
        let out = train(resumed.path());
        assert!(
            out.contains("epoch 2:") && !out.contains("epoch 3:"),
            "{out}"
        );
        write(resumed.path(), CONFIG, 4);
        let out = train(resumed.path());
        assert!(
            out.starts_with("epoch 3:") && out.contains("epoch 4:"),
            "{out}"
        );
        assert_eq!(train(resumed.path()), "4 of 4 epochs are done\n");

        let table = score_run(whole.path());
        #[cfg(feature = "plot")]
        for name in ["t2m.png", "t2m_map.png", "t2m.gif", "z@500.gif"] {
            let path = whole.path().join("run/pictures").join(name);
            let bytes = std::fs::read(&path).unwrap();
            let magic: &[u8] = if name.ends_with("gif") {
                b"GIF8"
            } else {
                b"\x89PNG"
            };
            assert!(bytes.starts_with(magic), "{name}");
        }
        let spectra = std::fs::read_to_string(whole.path().join("run/spectra.json")).unwrap();
        let spectra: Vec<Value> = serde_json::from_str(&spectra).unwrap();
        // The waves have two crests around the globe.
        let power = |name: &str, wave: u64| {
            let found = spectra.iter().find(|power| {
                power["channel"] == "t2m" && power["lead"] == 6.0 && power["wavenumber"] == wave
            });
            found.unwrap()[name].as_f64().unwrap()
        };
        assert!(power("truth", 2) > 100.0 * power("truth", 3));
        assert!(power("forecast", 2) > 0.0);
        assert!(
            table.contains("persistence") && table.contains("of 6 RMSE"),
            "{table}"
        );
        score_run(resumed.path());
        let found = scores(whole.path());
        assert_eq!(found, scores(resumed.path()));
        let rows = first.get_or_insert_with(|| found.clone());
        for lead in [6.0, 12.0, 18.0] {
            for channel in ["t2m", "z@500"] {
                let of = |rows: &[Value]| score(rows, channel, lead, "rmse");
                assert!(
                    (of(rows) / of(&found) - 1.0).abs() < 1e-3,
                    "{ranks:?}: {table}"
                );
            }
        }
        forecasts_have_the_scores(whole.path(), &ranks, &found);
    }
}

#[test]
fn a_transformer_is_better_than_persistence_at_every_lead() {
    let kind = "kind = \"transformer\"\nd_model = 16\nheads = 2\nblocks = 3\ndense_blocks = 1\ntokens = 2\npatch = [1, 1]\n\
                kernel = [3, 3]";
    let config = CONFIG.replaced("kind = \"cnn\"\nwidth = 6\nblocks = 1", kind);
    let folder = prepared(&config);
    write(folder.path(), &config, 12);
    for command in ["train", "score"] {
        succeed(folder.path(), &[command, "--ranks", "2"]);
    }
    let found = scores(folder.path());
    for lead in [6.0, 12.0, 18.0] {
        for channel in ["t2m", "z@500"] {
            let [ours, persistence] =
                ["rmse", "rmse_persistence"].map(|name| score(&found, channel, lead, name));
            assert!(
                ours < 0.7 * persistence,
                "{channel} after {lead} hours: {ours} for {persistence}"
            );
        }
    }
}

/// Writes the forecasts of the test period, and compares their errors with the scores.
fn forecasts_have_the_scores(folder: &Path, ranks: &[&str], found: &[Value]) {
    let arguments = [&["forecast", "--output", "forecasts"][..], ranks].concat();
    let out = succeed(folder, &arguments);
    assert_eq!(out.lines().count(), TIMES - TEST, "{out}");
    let truth = values(&folder.join("2018.h5"));
    let state = |time: usize| truth.index_axis(Axis(0), time);
    for step in 1..=3 {
        let starts = TEST..TIMES - step;
        let error = |start: usize| {
            let hours = 6 * (start - TEST);
            let name = format!("2018-01-{:02}T{:02}00.zarr", 10 + hours / 24, hours % 24);
            let forecast = values(&folder.join("forecasts").join(name));
            assert_eq!(forecast.dim().0, 3);
            let forecast = forecast.index_axis(Axis(0), step - 1).to_owned();
            forecast - state(start + step)
        };
        let ours: Vec<_> = starts.clone().map(error).collect();
        let persistence: Vec<_> = starts
            .map(|start| state(start).to_owned() - state(start + step))
            .collect();
        for (index, channel) in ["t2m", "z@500"].into_iter().enumerate() {
            for (errors, name) in [(&ours, "rmse"), (&persistence, "rmse_persistence")] {
                let (expected, found) = (
                    rmse(errors, index),
                    score(found, channel, 6.0 * step as f64, name),
                );
                assert!(
                    (found / expected - 1.0).abs() < 1e-3,
                    "{name} of {channel}: {found} for {expected}"
                );
            }
        }
    }
    // A second run overwrites nothing.
    let out = succeed(folder, &arguments);
    assert!(out.starts_with("nothing is written"), "{out}");
    // Beyond the end of the data.
    let steps = [&["--steps", "5"][..], ranks].concat();
    let last = forecast_from("2018-01-12T18:00", "last.nc", &steps);
    succeed(folder, &last);
    let last = open(folder.join("last.nc")).unwrap();
    assert_eq!(last.times().len(), 5);
    assert_eq!(
        last.times()[4],
        parse_time("2018-01-14T00", Default::default()).unwrap()
    );
    let error = halocline(folder, &forecast_from("2019-01-01", "a.nc", ranks));
    assert!(String::from_utf8_lossy(&error.stderr).contains("the data are from 2018-01-01"));
}

#[test]
fn ensembles_of_anomalies_have_probabilistic_scores() {
    let config = CONFIG
        .replaced(
            "climatology = \"mean\"",
            "climatology = \"day\"\nanomalies = true",
        )
        .replaced(
            "kind = \"cnn\"\nwidth = 6\nblocks = 1",
            "kind = \"unet\"\nwidth = 4\nlevels = 1",
        )
        .replaced("steps = 3", "steps = 2\nmembers = 3\nnoise = 0.1")
        .replaced("[optimizer]", "[mesh]\nlat = 2\nmember = 2\n[optimizer]")
        .replaced("noise = 0.01", "noise = 0.01\nema = 0.9");
    let folder = prepared(&config);
    write(folder.path(), &config, 2);
    succeed(folder.path(), &["train"]);
    let table = succeed(folder.path(), &["score"]);
    assert!(table.contains("CRPS"), "{table}");
    let found = scores(folder.path());
    for name in ["rmse", "crps", "spread", "acc", "rmse_climatology"] {
        let score = score(&found, "t2m", 12.0, name);
        assert!(
            score.is_finite() && score != 0.0,
            "{name}: {score}\n{table}"
        );
    }
    assert!(score(&found, "t2m", 6.0, "crps") < score(&found, "t2m", 6.0, "rmse"));
    let forecast = forecast_from("2018-01-10", "ensemble.zarr", &[]);
    succeed(folder.path(), &forecast);
    let text = std::fs::read_to_string(folder.path().join("ensemble.zarr/zarr.json")).unwrap();
    assert!(text.contains("realization"), "{text}");
}

#[test]
fn plans_are_priced_before_they_run() {
    let config = CONFIG.replaced("[[4, 2]]", "[[4, 4]]");
    let config = format!("{config}\n[mesh]\ndata = 2\nlat = 2\ntensor = 2\n");
    let folder = prepared(&config);
    let network = ["--latency", "5", "--bandwidth", "10"];
    let out = succeed(folder.path(), &[&["plan"][..], &network].concat());
    for part in [
        "mesh: data 2 x lat 2 x tensor 2",
        "MB of parameters, gradients and optimizer states",
        "operations of exchange",
        "operations of reduce",
        "read amplification",
        // Batches of samples with targets of four steps.
        "4 epochs of 12 batches",
        "without validations",
        "plan 1 by the cost model",
    ] {
        assert!(out.contains(part), "{part} in\n{out}");
    }
    let out = succeed(
        folder.path(),
        &[&["plan", "--compare"][..], &network].concat(),
    );
    for mesh in [
        "data 2 x lat 2 x lon 1 x tensor 2",
        "data 1 x lat 2 x lon 2 x tensor 2",
    ] {
        let line = out.lines().find(|line| line.starts_with(mesh));
        assert!(
            line.is_some_and(|line| line.contains(" ms  ")),
            "{mesh} in\n{out}"
        );
    }
    let fastest = out.lines().nth(1).unwrap_or_default();
    assert!(fastest.contains(" ms  fastest"), "{out}");
    let marked = |line: &&str| line.ends_with("configured");
    assert_eq!(out.lines().filter(marked).count(), 1, "{out}");
    let found = fail(folder.path(), &["plan", "--compare", "--memory", "0"]);
    assert!(found.contains("--memory 0: expected GB above 0"), "{found}");
    assert!(!folder.path().join("run").exists(), "nothing is written");
}

#[test]
fn mistakes_are_one_line_and_end_with_a_code() {
    let folder = prepared(CONFIG);
    let error = |arguments: &[&str]| fail(folder.path(), arguments);
    assert!(error(&["score"]).contains("no checkpoint; train first"));
    assert!(!folder.path().join("run").exists(), "nothing is made");
    train(folder.path(), CONFIG);
    write(folder.path(), &CONFIG.replaced("width = 6", "width = 7"), 4);
    // A mistake for which all ranks fail is not the failure of a rank.
    for ranks in ["1", "3"] {
        let found = error(&["train", "--ranks", ranks]);
        assert!(found.contains("has another [model], by its width"));
        assert!(!found.contains("rank 0 failed"), "{found}");
        assert!(
            found.starts_with(&format!("halocline: {ranks} rank")),
            "{found}"
        );
    }
    write(folder.path(), &CONFIG.replaced("width", "widht"), 4);
    assert!(error(&["train"]).contains("near it: width"));
    for (wrong, part) in [
        ("kernel = 4", "model.kernel: 4"),
        ("kernel = 99", "model.kernel: 99"),
    ] {
        let config = CONFIG.replaced("width = 6", &format!("width = 6\n{wrong}"));
        write(folder.path(), &config, 4);
        let found = error(&["plan"]);
        assert!(found.contains(part), "{part} in {found}");
    }
    write(
        folder.path(),
        &CONFIG.replaced("\"z@500\"]", "\"z@250\"]"),
        4,
    );
    let found = error(&["plan"]);
    assert!(
        found.contains("inputs: got z@250, expected channels"),
        "{found}"
    );
    for (from, to, told) in [
        (
            "batch = 2",
            "batch = 40",
            "training.batch: got 40, expected at most",
        ),
        (
            "[[4, 2]]",
            "[[4, 90]]",
            "training.curriculum: got 90 steps, expected at most",
        ),
        (
            "batch = 2",
            "batch = 2\naccumulation = 99",
            "training.accumulation: got 99, expected at most",
        ),
    ] {
        write(folder.path(), &CONFIG.replaced(from, to), 4);
        for arguments in [&["plan"][..], &["train", "--ranks", "2"]] {
            let found = error(arguments);
            assert!(found.contains(&format!("error: {told}")), "{found}");
        }
    }
}
