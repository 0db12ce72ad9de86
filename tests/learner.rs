//! burn's Learner on a mesh takes the steps of our Trainer, and stops at the same point on all
//! ranks.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Dropout, DropoutConfig, PaddingConfig2d};
use burn::optim::AdamWConfig;
use burn_train::metric::store::{Aggregate, Direction, Split};
use burn_train::metric::{LossMetric, Metric, MetricMetadata, MetricName, SerializedEntry};
use burn_train::{
    InferenceStep, Interrupter, LearningResult, MetricEarlyStoppingStrategy, StoppingCondition,
    SupervisedTraining, TrainOutput, TrainStep,
};
use halocline::Trainer;
use halocline::core::{Layout, OrRaise, ParamShard, shard_parameters};
use halocline::io::ndarray::Array3;
use halocline::io::{
    Batch, DatasetConfig, FieldDataset, FieldLoader, FieldWriter, Grid, LoaderConfig, Order,
    WriterConfig,
};
use halocline::learner::{FieldBatches, LaunchOn, StepLoss, train_output};
use halocline::ops::{Reduction, mse_loss};
use halocline::prelude::*;

const STATES: usize = 8;
const BATCHES: usize = 3;
const EPOCHS: usize = 3;

fn write_states(path: &Path) -> halocline::io::Result<()> {
    let grid = Grid::cell_centered(5, 8)?;
    let mut writer = FieldWriter::create(path, &grid, &["t2m"], &WriterConfig::new())?;
    for state in 0..STATES {
        let value = |(_, row, column): (usize, usize, usize)| {
            ((state + 2 * row) as f32 * 0.7 + column as f32).sin()
        };
        writer.append(
            state as f64 * 21600.0,
            Array3::from_shape_fn((1, 5, 8), value).view(),
        )?;
    }
    writer.finish()
}

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    dropout: Dropout,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([1, 1], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            dropout: DropoutConfig::new(0.2).init(),
        }
    }

    fn loss(&self, batch: Batch) -> ShardTensor<1> {
        let y = batch.input.apply(&self.conv).apply(&self.dropout);
        mse_loss(y, batch.target, Reduction::Mean).or_raise()
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = StepLoss;

    fn step(&self, batch: Batch) -> TrainOutput<StepLoss> {
        train_output(self, self.loss(batch))
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = StepLoss;

    fn step(&self, batch: Batch) -> StepLoss {
        StepLoss::new(self.loss(batch))
    }
}

/// Metric that keeps all losses, and calls a function at each.
#[derive(Clone)]
struct Losses {
    values: Arc<Mutex<Vec<f64>>>,
    at: Arc<dyn Fn(usize) + Send + Sync>,
}

impl Losses {
    fn new(at: impl Fn(usize) + Send + Sync + 'static) -> Self {
        Self {
            values: Arc::default(),
            at: Arc::new(at),
        }
    }
}

impl Metric for Losses {
    type Input = burn_train::metric::LossInput;

    fn name(&self) -> MetricName {
        Arc::new("Losses".into())
    }

    fn update(
        &mut self,
        input: &Self::Input,
        metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, burn::tensor::TensorReadError> {
        // The value of the input is private; burn's own metric reads it.
        let mut loss = LossMetric::new();
        let entry = loss.update(input, metadata)?;
        let value = burn_train::metric::Numeric::value(&loss)
            .expect("an update")
            .current();
        let mut values = self.values.lock().unwrap();
        values.push(value);
        (self.at)(values.len());
        Ok(entry)
    }

    fn compute(&mut self) -> Result<SerializedEntry, burn::tensor::TensorReadError> {
        Ok(SerializedEntry::new("-".into(), "-".into()))
    }

    fn clear(&mut self) {}
}

fn loader(mesh: &DeviceMesh, placement: Placement, path: &Path) -> Result<FieldLoader> {
    let config = LoaderConfig::new(2).with_order(Order::Shuffled { seed: 4 });
    FieldLoader::new(mesh, &[placement], &config, || {
        FieldDataset::open(&[path], &DatasetConfig::new())
    })
}

fn training(
    mesh: &DeviceMesh,
    placement: Placement,
    folder: &Path,
) -> Result<SupervisedTraining<Net>> {
    let open = || loader(mesh, placement, &folder.join("states.h5")).map(FieldBatches::new);
    Ok(
        SupervisedTraining::new(folder.join("run"), open()?, open()?)
            .num_epochs(EPOCHS)
            .with_application_logger(None),
    )
}

fn launch(world: &World, training: SupervisedTraining<Net>) -> Result<LearningResult<Net>> {
    let model = world.init(Net::new)?;
    let rate = ModuleLrScheduler::new(3e-2);
    training.launch_on(world, model, AdamWConfig::new().init(), rate)
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_states(&folder.path().join("states.h5")).unwrap();
    folder
}

#[test]
fn the_learner_takes_the_steps_of_the_trainer() {
    let folder = folder();
    let parameters = |model: &Net| model.conv.weight.val().into_data();
    for (ranks, placement) in [(1, Shard(2)), (2, Shard(2)), (2, Shard(0)), (3, Shard(3))] {
        let losses = Losses::new(|_| {});
        let learned = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("mesh", ranks)])?;
            let training = training(&mesh, placement, folder.path())?;
            let result = launch(&world, training.metric_train(losses.clone()))?;
            assert!(result.interrupted.is_none() && result.error.is_none());
            Ok(parameters(&result.model))
        });
        let trained = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("mesh", ranks)])?;
            let data = loader(&mesh, placement, &folder.path().join("states.h5"))?;
            assert_eq!(data.batches(), BATCHES);
            let model = world.init(Net::new)?;
            let rate = ModuleLrScheduler::new(3e-2);
            let mut trainer = Trainer::new(&world, model, AdamWConfig::new().init(), rate);
            while trainer.epoch() < EPOCHS {
                let _ = trainer.train_epoch(
                    |epoch, first| data.epoch_from(epoch, first),
                    |model, batch| Ok(model.loss(batch?)),
                )?;
            }
            let found = parameters(&trainer.model().valid());
            Ok((found, trainer.losses().to_vec()))
        });
        let (learned, trained) = (learned.unwrap(), trained.unwrap());
        for (learned, (trained, _)) in learned.iter().zip(&trained) {
            assert_eq!(learned, trained, "{ranks} ranks");
        }
        // Only rank 0 has metrics.
        assert_eq!(*losses.values.lock().unwrap(), trained[0].1);
        assert!(trained[0].1[EPOCHS * BATCHES - 1] < trained[0].1[0]);
    }
}

#[test]
fn early_stopping_and_interruptions_end_all_ranks() {
    let folder = folder();
    let epochs = Losses::new(|_| {});
    let steps = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        // Lower losses count as worse, so that training stops after the second epoch.
        let stopping = MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            Direction::Highest,
            Split::Valid,
            StoppingCondition::NoImprovementSince { n_epochs: 1 },
        );
        let early = training(&mesh, Shard(2), folder.path())?
            .metrics((LossMetric::new(),))
            .metric_valid(epochs.clone())
            .early_stopping(stopping);
        let result = launch(&world, early)?;
        assert!(result.interrupted.is_none());

        // If either rank is stopped, both end.
        let interrupter = Interrupter::new();
        let stop = interrupter.clone();
        let seen = Losses::new(move |count| {
            if count == 2 {
                stop.stop(Some("enough"));
            }
        });
        let interrupted = training(&mesh, Shard(2), folder.path())?
            .with_interrupter(interrupter)
            .metric_train(seen.clone());
        let result = launch(&world, interrupted)?;
        let seen = seen.values.lock().unwrap().len();
        Ok((seen, result.interrupted.and_then(|stopped| stopped.reason)))
    });
    assert_eq!(epochs.values.lock().unwrap().len(), 2 * BATCHES);
    let steps = steps.unwrap();
    assert!((2..=BATCHES + 1).contains(&steps[0].0), "{steps:?}");
    assert_eq!(steps[0].1.as_deref(), Some("enough"));
    assert_eq!(steps[1], (0, Some("rank 0 was stopped".into())));
}

#[test]
fn a_training_resumes_from_burns_checkpoints() {
    let folder = folder();
    let run = |epochs: usize, checkpoint: Option<usize>| {
        let parameters = Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let path = folder.path().join("states.h5");
            let train = loader(&mesh, Shard(2), &path)?;
            let train = FieldBatches::from_epoch(train, checkpoint.unwrap_or(0));
            let valid = FieldBatches::new(loader(&mesh, Shard(2), &path)?);
            let name = if epochs == EPOCHS && checkpoint.is_none() {
                "whole"
            } else {
                "parts"
            };
            let training = SupervisedTraining::new(folder.path().join(name), train, valid)
                .metrics((LossMetric::new(),))
                .with_default_checkpointers()
                .with_application_logger(None)
                .num_epochs(epochs);
            let training = match checkpoint {
                Some(epoch) => training.checkpoint(epoch),
                None => training,
            };
            let result = launch(&world, training)?;
            Ok(result.model.conv.weight.val().into_data())
        });
        parameters.unwrap()
    };
    let whole = run(EPOCHS, None);
    run(2, None);
    assert_eq!(run(EPOCHS, Some(2)), whole);
}

#[test]
fn errors_are_those_of_all_ranks() {
    let folder = folder();
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            // Sharded parameters, which neither burn's checkpoints nor all optimizers support.
            let sharded = || {
                shard_parameters(world.init(Net::new)?, |_, shape| {
                    let layout = Layout::new(mesh.shape(), shape, &[Shard(2)]);
                    let shard = (shape.len() == 4).then(|| Ok(ParamShard::new(layout?, &mesh)));
                    shard.transpose()
                })
            };
            let rate = || ModuleLrScheduler::new(3e-2);
            let training = || training(&mesh, Shard(2), folder.path());
            let checked = training()?.with_default_checkpointers();
            let error = checked
                .launch_on(&world, sharded()?, AdamWConfig::new().init(), rate())
                .err()
                .expect("checkpoints of shards");
            assert!(error.to_string().contains("by a Trainer"), "{error}");
            let clipping = GradientClippingConfig::Norm(1.0);
            let optimizer = AdamWConfig::new().with_grad_clipping(Some(clipping));
            let refused = training()?.launch_on(&world, sharded()?, optimizer.init(), rate());
            let error = refused.err().expect("clipping of shards");
            assert!(error.to_string().contains("whole parameter"), "{error}");

            // Failure of one rank.
            let interrupter = Interrupter::new();
            if !world.is_root() {
                interrupter.fail(burn::data::dataset::DatasetError::new(Error::other(
                    "no file",
                )));
            }
            let failing = training()?.with_interrupter(interrupter);
            let error = launch(&world, failing).err().expect("a failure of rank 1");
            assert!(matches!(error, Error::Rank { rank: 1, .. }), "{error}");
            assert!(error.to_string().contains("no file"), "{error}");
            Ok(())
        })
        .unwrap();
}
