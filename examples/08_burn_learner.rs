//! burn's own training loop on a mesh, with burn's metrics, checkpoints and early stopping; only
//! rank 0 prints.
//!
//! `cargo run --features learner --example 08_burn_learner -- [RANKS]`; with burn-train's feature
//! `tui`, rank 0 shows burn's dashboard.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::AdamWConfig;
use burn_train::metric::LossMetric;
use burn_train::metric::store::{Aggregate, Direction, Split};
use burn_train::{
    InferenceStep, MetricEarlyStoppingStrategy, StoppingCondition, SupervisedTraining, TrainOutput,
    TrainStep,
};
use halocline::core::OrRaise;
use halocline::io::ndarray::Array3;
use halocline::io::{
    Batch, DatasetConfig, FieldDataset, FieldLoader, FieldWriter, Grid, LoaderConfig, WriterConfig,
};
use halocline::learner::{FieldBatches, LaunchOn, StepLoss, train_output};
use halocline::models::{FieldConv2d, FieldConv2dConfig, weighted_mse};
use halocline::prelude::*;

const ROWS: usize = 9;

/// A wave that moves east by one cell per state.
fn write_wave(path: &std::path::Path) -> halocline::io::Result<()> {
    let grid = Grid::cell_centered(ROWS, 18)?;
    let mut writer = FieldWriter::create(path, &grid, &["wave"], &WriterConfig::new())?;
    for state in 0..25 {
        let wave = |(_, _, column): (usize, usize, usize)| {
            ((column as f32 - state as f32) * std::f32::consts::TAU / 9.0).sin()
        };
        let field = Array3::from_shape_fn((1, ROWS, 18), wave);
        writer.append(f64::from(state) * 3600.0, field.view())?;
    }
    writer.finish()
}

/// Learns the next position of the wave.
#[derive(Module, Debug)]
struct Model {
    conv: FieldConv2d,
}

impl Model {
    fn loss(&self, batch: Batch) -> ShardTensor<1> {
        weighted_mse(batch.input.apply(&self.conv), batch.target, &[1.0; ROWS]).or_raise()
    }
}

impl TrainStep for Model {
    type Input = Batch;
    type Output = StepLoss;

    fn step(&self, batch: Batch) -> TrainOutput<StepLoss> {
        train_output(self, self.loss(batch))
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = StepLoss;

    fn step(&self, batch: Batch) -> StepLoss {
        StepLoss::new(self.loss(batch))
    }
}

fn main() -> Result<()> {
    let ranks = std::env::args().nth(1).map_or(Ok(2), |ranks| ranks.parse());
    let ranks = ranks.map_err(|e| Error::other(format!("RANKS: {e}")))?;
    let scratch = tempfile::tempdir()?;
    Launcher::from_env().ranks(ranks).run(|world| {
        // One folder for all ranks.
        let folder = scratch.path().to_string_lossy().into_owned();
        let folder = world.broadcast_bytes(0, Some(folder.into()))?;
        let folder = std::path::PathBuf::from(String::from_utf8_lossy(&folder).into_owned());
        let path = folder.join("wave.h5");
        if world.is_root() {
            write_wave(&path)?;
        }
        world.barrier()?;

        let mesh = world.mesh([("lat", world.size())])?;
        let batches = || {
            let open = || FieldDataset::open(&[&path], &DatasetConfig::new());
            FieldLoader::new(&mesh, &[Shard(2)], &LoaderConfig::new(4), open).map(FieldBatches::new)
        };
        let loss = LossMetric::new();
        let stopping = MetricEarlyStoppingStrategy::new(
            &loss,
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
            StoppingCondition::NoImprovementSince { n_epochs: 3 },
        );
        let model = world.init(|device| Model {
            conv: FieldConv2dConfig::new([1, 1], [3, 3]).init(device),
        })?;
        let result = SupervisedTraining::new(folder.join("run"), batches()?, batches()?)
            .metrics((loss,))
            .with_default_checkpointers()
            .early_stopping(stopping)
            .num_epochs(12)
            .summary()
            .launch_on(
                &world,
                model,
                AdamWConfig::new().init(),
                ModuleLrScheduler::new(0.05),
            )?;

        // The model has learned the step: the loss of the wave itself is one half.
        let held = batches()?;
        let batch = burn::data::dataloader::DataLoader::iter(held.as_ref()).next();
        let batch = batch.expect("a batch").map_err(Error::other)?;
        let loss = StepLoss::new(result.model.loss(batch))
            .loss
            .into_scalar::<f32>();
        if world.is_root() {
            println!("loss {loss:.4} on {} ranks", world.size());
        }
        assert!(loss < 0.1, "{loss}");
        Ok(())
    })
}
