//! Ranks whose loaders differ in data or settings, or that iterate over different batches.

use std::path::PathBuf;

use halocline_core::{Launcher, Shard};
use halocline_io::{
    DatasetConfig, FieldDataset, FieldFile, FieldLoader, LastBatch, LoaderConfig, Order, Source,
    Statistics, WriterConfig,
};

use crate::loader::open;
use crate::{numbered, numbered_file, write};

/// Returns the errors of ranks whose loaders differ from that of the first rank.
fn messages_of<D>(
    ranks: usize,
    config: impl Fn(usize) -> LoaderConfig + Sync,
    open: D,
) -> Vec<String>
where
    D: Fn(usize) -> halocline_io::Result<FieldDataset> + Sync,
{
    let messages = Launcher::local(ranks).collect(|world| {
        let mesh = world.mesh([("lat", ranks)])?;
        let rank = world.rank();
        let loader = FieldLoader::new(&mesh, &[Shard(2)], &config(rank), || open(rank));
        // The ranks are still in step.
        world.barrier()?;
        Ok(loader
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default())
    });
    messages.unwrap()
}

/// Returns the message of a rank that differs, which must be the same on all ranks; empty if none
/// differs.
fn message_of_rank(rank: usize, messages: &[String]) -> &str {
    let own = &messages[rank];
    let repeated = match own.as_str() {
        "" => String::new(),
        _ => format!("rank {rank} failed: {own}"),
    };
    for (other, message) in messages.iter().enumerate() {
        assert!(other == rank || message == &repeated, "{messages:?}");
    }
    own
}

#[test]
fn ranks_that_open_other_data_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let shape = [5, 1, 4, 3];
    // Trajectories: files of equal size with the same times.
    let [a, b, longer] =
        [("a.h5", 0.0, 5), ("b.h5", 7.0, 5), ("longer.h5", 0.0, 6)].map(|(name, value, times)| {
            let path = folder.path().join(name);
            let config = WriterConfig::new().with_deflate(0);
            write(
                &path,
                &numbered([times, shape[1], shape[2], shape[3]], value),
                &config,
            );
            path
        });
    let config = |_| LoaderConfig::new(1).with_source(Source::PerRank);
    let open = |paths: &[&PathBuf], history: usize, lead: usize| {
        let config = DatasetConfig::new().with_history(history).with_lead(lead);
        FieldDataset::open(paths, &config)
    };
    let messages = messages_of(3, config, |rank| match rank {
        2 => open(&[&b, &a], 1, 1),
        _ => open(&[&a, &b], 1, 1),
    });
    let message = message_of_rank(2, &messages);
    assert!(
        message.starts_with("files: got ") && message.ends_with(" as file 0, as on the first rank"),
        "{message}"
    );
    let of_second = |other: &(dyn Fn() -> halocline_io::Result<FieldDataset> + Sync)| {
        let messages = messages_of(2, config, |rank| match rank {
            1 => other(),
            _ => open(&[&a], 2, 1),
        });
        message_of_rank(1, &messages).to_string()
    };
    // The sum of history and lead, and thus the number of samples, is the same.
    assert_eq!(
        of_second(&|| open(&[&a], 1, 2)),
        "history: got 1, expected 2, as on the first rank"
    );
    assert_eq!(
        of_second(&|| open(&[&a, &a], 2, 1)),
        "number of files: got 2, expected 1, as on the first rank"
    );
    assert!(of_second(&|| open(&[&longer], 2, 1)).starts_with("files: got "));
    let scaled = of_second(&|| {
        let statistics = Statistics::compute(&[FieldFile::open(&a)?], 1)?;
        open(&[&a], 2, 1)?.with_statistics(&statistics)
    });
    assert!(
        scaled.starts_with("statistics: got statistics with checksum ")
            && scaled.ends_with("expected none, as on the first rank"),
        "{scaled}"
    );
    // As many samples, of other times.
    let of_hours = |configs: [DatasetConfig; 2]| {
        let open = |rank: usize| FieldDataset::open(&[&longer], &configs[rank]);
        message_of_rank(1, &messages_of(2, config, open)).to_string()
    };
    let at_hour = |hour| DatasetConfig::new().with_at_hours(vec![hour]);
    assert_eq!(
        of_hours([at_hour(6), at_hour(12)]),
        "at_hours: got [12], expected [6], as on the first rank"
    );
    let every = |hours| DatasetConfig::new().with_every_hours(Some(hours));
    assert_eq!(
        of_hours([every(18), every(24)]),
        "every_hours: got Some(24), expected Some(18), as on the first rank"
    );
    // A copy counts as the same data, whatever its name.
    let copy = folder.path().join("copy.h5");
    std::fs::copy(&a, &copy).unwrap();
    assert_eq!(of_second(&|| open(&[&copy], 2, 1)), "");
}

#[test]
fn ranks_with_other_settings_say_so() {
    let (_folder, path) = numbered_file([9, 1, 4, 3]);
    for source in [Source::Scatter, Source::PerRank] {
        let of_second = |other: LoaderConfig| {
            let config = |rank| match rank {
                1 => other.clone(),
                _ => LoaderConfig::new(2)
                    .with_order(Order::Shuffled { seed: 5 })
                    .with_source(source),
            };
            let messages = messages_of(2, config, |_| open(&path));
            message_of_rank(1, &messages).to_string()
        };
        let shuffled = |batch, seed| {
            LoaderConfig::new(batch)
                .with_order(Order::Shuffled { seed })
                .with_source(source)
        };
        assert_eq!(
            of_second(shuffled(2, 6)),
            "order: got Shuffled { seed: 6 }, expected Shuffled { seed: 5 }, as on the first rank"
        );
        assert_eq!(
            of_second(shuffled(3, 5)),
            "batch_size: got 3, expected 2, as on the first rank"
        );
        assert_eq!(
            of_second(shuffled(2, 5).with_last_batch(LastBatch::Keep)),
            "last_batch: got Keep, expected Drop, as on the first rank"
        );
        assert_eq!(of_second(shuffled(2, 5).with_prefetch(7)), "");
    }
    let messages = messages_of(
        2,
        |rank| LoaderConfig::new(1).with_source([Source::Scatter, Source::PerRank][rank]),
        |_| open(&path),
    );
    assert_eq!(
        message_of_rank(1, &messages),
        "source: got PerRank, expected Scatter, as on the first rank"
    );
}

#[test]
fn ranks_in_other_epochs_or_batches_say_so() {
    let (_folder, path) = numbered_file([9, 1, 4, 3]);
    let run = |source, place: [(usize, usize); 2]| {
        Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let config = LoaderConfig::new(2).with_source(source);
            let loader = FieldLoader::new(&mesh, &[Shard(2)], &config, || open(&path))?;
            let (epoch, first) = place[world.rank()];
            let batch = loader.epoch_from(epoch, first).next().unwrap();
            Ok(batch
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default())
        })
    };
    let messages = run(Source::PerRank, [(0, 0), (1, 0)]).unwrap();
    for message in &messages {
        assert!(
            message.starts_with(
                "rank 1 failed: batch: got epoch 1, 3 batches before its end, samples "
            ) && message.contains(", expected epoch 0, 3 batches before its end, samples "),
            "{message}"
        );
    }
    let messages = run(Source::PerRank, [(0, 0), (0, 1)]).unwrap();
    assert!(
        messages[0].contains("got epoch 0, 2 batches before"),
        "{messages:?}"
    );
    // If only rank 0 reads, the other rank detects the difference, and its error ends the job.
    let run = |source| {
        Launcher::local(2).run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let config = LoaderConfig::new(2).with_source(source);
            let loader = FieldLoader::new(&mesh, &[Shard(2)], &config, || open(&path))?;
            for batch in loader.epoch(world.rank()) {
                batch?;
            }
            world.barrier()
        })
    };
    let error = run(Source::Scatter).unwrap_err().to_string();
    assert!(
        error.contains("batch: got epoch 1, 3 batches before"),
        "{error}"
    );
}
