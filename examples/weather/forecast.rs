//! Forecasts from unseen states, compared with persistence and climatology.

use std::time::Duration;

use clap::Args;
use halocline::io::ndarray::{Array4, ArrayView4, Axis, concatenate, s};
use halocline::io::{FieldFile, FieldWriter, Progress, WriterConfig};
use halocline::models::Evaluation;
use halocline::plot::{Chart, Map, animate, save_charts, save_maps};
use halocline::prelude::*;
use serde::Serialize;

use crate::{Common, PLACEMENTS, VARIABLES, square_mesh, train};

#[derive(Args)]
#[group(id = "forecast")]
pub(crate) struct Options {
    /// The longest lead time, in steps of the data.
    #[arg(long, default_value_t = 16)]
    steps: usize,
    /// Forecasts from each test trajectory.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    starts: u16,
}

/// Scores at one lead time, of one variable, in its unit.
#[derive(Serialize)]
pub(crate) struct Score {
    pub(crate) lead_hours: f64,
    pub(crate) variable: String,
    pub(crate) rmse: f64,
    pub(crate) rmse_persistence: f64,
    pub(crate) rmse_climatology: f64,
    pub(crate) acc: f64,
}

pub(crate) fn run(world: &World, common: &Common, options: &Options) -> Result<()> {
    let mesh = square_mesh(world)?;
    let model = train::load(world, common)?.valid();
    let statistics = common.statistics()?;
    let grid = statistics.metadata().grid();
    let (latitudes, weights) = (grid.lat().to_vec(), grid.latitude_weights());
    let hours = statistics.metadata().time_step() / 3600.0;

    // Rank 0 reads, and scatters every field.
    let truth = if world.is_root() {
        Some(Truth::read(common, options)?)
    } else {
        None
    };
    let shard = |field: Option<Array4<f32>>| -> Result<ShardTensor<4>> {
        let device = world.device().clone().inner();
        let tensor = field.map(|field| {
            let shape: [usize; 4] = field.dim().into();
            let values = field
                .as_standard_layout()
                .iter()
                .copied()
                .collect::<Vec<f32>>();
            Tensor::from_data(TensorData::new(values, shape), &device)
        });
        Ok(scatter_tensor(tensor, 0, &mesh, &PLACEMENTS)?.inner())
    };
    let climatology = shard(truth.as_ref().map(|truth| truth.climatology.clone()))?;
    let start = shard(truth.as_ref().map(|truth| truth.at(0)))?;
    let means = start.profile(1, statistics.means());
    let stds = start.profile(1, statistics.stds());

    let mut state = (start.clone() - means.clone()) / stds.clone();
    let mut scores = Vec::new();
    let mut first = vec![gather_first(&start)?];
    let progress = Progress::new(world.rank(), "forecast", options.steps);
    for step in 1..=options.steps {
        state = train::with_constants(state, &latitudes).apply(&model);
        let forecast = state.clone() * stds.clone() + means.clone();
        let observed = shard(truth.as_ref().map(|truth| truth.at(step)))?;
        let everywhere = observed.clone() * 0.0 + climatology.clone();
        let evaluate = |forecast: ShardTensor<4>| {
            let mut evaluation = Evaluation::new(&weights, VARIABLES.len());
            evaluation.add(forecast, observed.clone(), climatology.clone())?;
            Ok::<_, Error>(evaluation.scores())
        };
        let ours = evaluate(forecast.clone())?;
        let persistence = evaluate(start.clone())?;
        let climate = evaluate(everywhere)?;
        for (variable, name) in VARIABLES.iter().enumerate() {
            scores.push(Score {
                lead_hours: step as f64 * hours,
                variable: name.to_string(),
                rmse: ours[variable].rmse,
                rmse_persistence: persistence[variable].rmse,
                rmse_climatology: climate[variable].rmse,
                acc: ours[variable].acc,
            });
        }
        first.push(gather_first(&forecast)?);
        progress.advance();
    }
    progress.finish();
    if let Some(truth) = truth {
        let first = first.into_iter().flatten().collect::<Vec<_>>();
        report(common, options, &truth, &first, hours, &scores)?;
    }
    world.barrier()
}

/// Gathers the first forecast of a batch on rank 0.
fn gather_first(batch: &ShardTensor<4>) -> Result<Option<Array4<f32>>> {
    let gathered = batch.clone().narrow(0, 0, 1).gather_tensor(0)?;
    Ok(gathered.map(|field| {
        let shape = field.dims();
        let values = field.into_data().iter().collect();
        Array4::from_shape_vec(shape, values).expect("a tensor has the elements of its shape")
    }))
}

/// The true fields: test trajectories, and the mean of the training ones.
struct Truth {
    /// [time, variable, lat, lon] of every test file.
    fields: Vec<Array4<f32>>,
    /// The times at which forecasts start.
    starts: Vec<usize>,
    climatology: Array4<f32>,
}

impl Truth {
    fn read(common: &Common, options: &Options) -> Result<Self> {
        let whole = |path: &std::path::PathBuf| -> Result<Array4<f32>> {
            let file = FieldFile::open(path)?;
            Ok(file.read(file.shape().map(|size| 0..size))?)
        };
        let fields = common
            .test_files()?
            .iter()
            .map(whole)
            .collect::<Result<Vec<_>>>()?;
        let times = fields
            .iter()
            .map(|field| field.shape()[0])
            .min()
            .unwrap_or(0);
        let last = times.checked_sub(options.steps + 1).ok_or_else(|| {
            Error::other(format!(
                "{} steps ahead in test trajectories of {times} times; simulate more days or forecast fewer steps",
                options.steps
            ))
        })?;
        let starts = usize::from(options.starts);
        let every = (last / starts).max(1);
        let mut mean: Option<Array4<f64>> = None;
        let files = common.train_files()?;
        for path in &files {
            let file_mean = whole(path)?
                .mapv(f64::from)
                .mean_axis(Axis(0))
                .ok_or_else(|| Error::other("a training file without times"))?
                .insert_axis(Axis(0));
            mean = Some(mean.map_or(file_mean.clone(), |mean| mean + file_mean));
        }
        let mean = mean.ok_or_else(|| Error::other("no training files"))?;
        Ok(Self {
            fields,
            starts: (0..=last).step_by(every).take(starts).collect(),
            climatology: mean.mapv(|sum| (sum / files.len() as f64) as f32),
        })
    }

    /// The fields a number of steps after every start, `[forecast, variable, lat, lon]`.
    fn at(&self, step: usize) -> Array4<f32> {
        let times: Vec<usize> = self.starts.iter().map(|start| start + step).collect();
        let selected: Vec<Array4<f32>> = self
            .fields
            .iter()
            .map(|field| field.select(Axis(0), &times))
            .collect();
        let views: Vec<ArrayView4<f32>> = selected.iter().map(|field| field.view()).collect();
        concatenate(Axis(0), &views).expect("test files have one shape")
    }
}

/// Writes files and prints the table.
fn report(
    common: &Common,
    options: &Options,
    truth: &Truth,
    first: &[Array4<f32>],
    hours: f64,
    scores: &[Score],
) -> Result<()> {
    let grid = FieldFile::open(&common.train_files()?[0])?.grid().clone();
    let path = |name: &str| common.folder.join(name);
    let mut writer =
        FieldWriter::create(path("forecast.h5"), &grid, &VARIABLES, &WriterConfig::new())?;
    for (step, field) in first.iter().enumerate() {
        writer.append(step as f64 * hours * 3600.0, field.slice(s![0, .., .., ..]))?;
    }
    writer.finish()?;
    std::fs::write(
        path("metrics.json"),
        serde_json::to_vec_pretty(scores).map_err(Error::other)?,
    )?;

    let last = options.steps;
    let depth = |field: &Array4<f32>| field.slice(s![0, 0, .., ..]).to_owned();
    // The planet has no coasts.
    let map = |title: String, field| {
        let map = Map::new(&title, &grid, field)?.with_unit("m");
        Ok::<_, Error>(map.without_coastlines())
    };
    let lead = last as f64 * hours;
    let (observed, forecast) = (depth(&truth.at(last)), depth(&first[last]));
    let error = Map::difference("forecast − truth", &grid, &forecast, &observed)?;
    let maps = [
        map(format!("truth after {lead} h: depth"), observed)?,
        map(format!("forecast after {lead} h: depth"), forecast)?,
        error.with_unit("m").without_coastlines(),
    ];
    save_maps(path("forecast.png"), &maps)?;
    let frame = |(step, field): (usize, &Array4<f32>)| {
        let title = format!("forecast after {} h: depth", step as f64 * hours);
        Ok(vec![map(title, depth(field))?])
    };
    let frames = first.iter().enumerate().map(frame);
    let frames = frames.collect::<Result<Vec<_>>>()?;
    animate(path("forecast.gif"), &frames, Duration::from_millis(300))?;
    save_charts(path("rmse.png"), &VARIABLES.map(|name| chart(name, scores)))?;

    println!(
        "\n{:>6}  {:<16}{:>10}{:>14}{:>14}{:>8}",
        "hours", "variable", "RMSE", "persistence", "climatology", "ACC"
    );
    let shown = |score: &&Score| {
        let step = (score.lead_hours / hours).round() as usize;
        step.is_multiple_of(2)
    };
    for score in scores.iter().filter(shown) {
        println!(
            "{:>6}  {:<16}{:>10.3}{:>14.3}{:>14.3}{:>8.3}",
            score.lead_hours,
            score.variable,
            score.rmse,
            score.rmse_persistence,
            score.rmse_climatology,
            score.acc
        );
    }
    let better = scores
        .iter()
        .filter(|score| score.rmse < score.rmse_persistence)
        .count();
    println!(
        "\nbetter than persistence in {better} of {} scores",
        scores.len()
    );
    println!("look at:");
    for name in [
        "forecast.h5",
        "metrics.json",
        "forecast.png",
        "forecast.gif",
        "rmse.png",
    ] {
        println!("  {}", path(name).display());
    }
    Ok(())
}

/// Root-mean-square error of a variable against lead time.
fn chart(variable: &str, scores: &[Score]) -> Chart {
    let curve = |error: fn(&Score) -> f64| {
        let scores = scores.iter().filter(|score| score.variable == variable);
        let points = scores.map(|score| (score.lead_hours, error(score)));
        points.collect::<Vec<_>>()
    };
    Chart::new(&variable.replace('_', " "), "lead time in hours", "RMSE")
        .with_curve("surrogate", curve(|score| score.rmse))
        .with_curve("persistence", curve(|score| score.rmse_persistence))
        .with_curve("climatology", curve(|score| score.rmse_climatology))
}
