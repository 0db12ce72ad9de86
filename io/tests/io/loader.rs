use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use halocline_core::{Launcher, Partial, Placement, ReduceOp, Replicate, Result, Shard, World};
use halocline_io::{
    DatasetConfig, FieldDataset, FieldFile, FieldLoader, LastBatch, LoaderConfig, Order, Source,
    Statistics, WriterConfig,
};
use proptest::prelude::*;

use crate::{numbered, numbered_file, write};

/// Opens with a history of two, so that inputs have more channels than targets.
fn open(path: &Path) -> halocline_io::Result<FieldDataset> {
    FieldDataset::open(&[path], &DatasetConfig::new().with_history(2))
}

/// One rank's part of an epoch: the samples, local shapes and bits of every batch.
type Part = Vec<(Vec<usize>, [[usize; 4]; 2], Vec<u32>)>;

fn part_of_epoch(loader: &FieldLoader, epoch: usize) -> Result<Part> {
    let epoch = loader.epoch(epoch);
    assert_eq!(epoch.len(), loader.batches());
    epoch
        .map(|batch| {
            let batch = batch?;
            let bits = [&batch.input, &batch.target]
                .into_iter()
                .flat_map(|tensor| {
                    let values: Vec<f32> = tensor.local().to_data().try_to_vec().unwrap();
                    values.into_iter().map(f32::to_bits)
                });
            let bits = bits.collect();
            Ok((
                batch.samples,
                [batch.input.local_dims(), batch.target.local_dims()],
                bits,
            ))
        })
        .collect()
}

/// A mesh by the sizes of its two axes, and the placements on them.
type Case = ([usize; 2], [Placement; 2]);

/// Every rank's part of an epoch.
fn parts(path: &Path, case: &Case, config: &LoaderConfig, epoch: usize) -> Result<Vec<Part>> {
    let (sizes, placements) = case;
    Launcher::local(sizes[0] * sizes[1]).collect(|world| {
        let mesh = world.mesh([("first", sizes[0]), ("second", sizes[1])])?;
        part_of_epoch(
            &FieldLoader::new(&mesh, placements, config, || open(path))?,
            epoch,
        )
    })
}

const CASES: [Case; 7] = [
    ([1, 1], [Shard(2), Shard(3)]),
    ([2, 1], [Shard(2), Shard(3)]),
    ([2, 2], [Shard(2), Shard(3)]),
    ([2, 2], [Shard(0), Shard(2)]),
    ([2, 2], [Shard(2), Shard(2)]),
    ([1, 3], [Replicate, Shard(1)]),
    // More ranks than rows: some hold nothing.
    ([4, 1], [Shard(2), Replicate]),
];

#[test]
fn both_sources_give_the_same_bits_and_the_right_ones() {
    let shape = [9, 2, 3, 5];
    let (_folder, path) = numbered_file(shape);
    let fields = numbered(shape, 0.0);
    for case in CASES {
        let config = LoaderConfig::new(3)
            .with_order(Order::Shuffled { seed: 5 })
            .with_last_batch(LastBatch::Keep);
        let scattered = parts(&path, &case, &config, 1).unwrap();
        let config = config.with_source(Source::PerRank).with_prefetch(0);
        assert_eq!(
            scattered,
            parts(&path, &case, &config, 1).unwrap(),
            "{case:?}"
        );

        let order = |part: &Part| part.iter().map(|batch| batch.0.clone()).collect::<Vec<_>>();
        let batches = order(&scattered[0]);
        assert!(
            scattered.iter().all(|part| order(part) == batches),
            "{case:?}"
        );
        let layout = |world: World| {
            let mesh = world.mesh([("first", case.0[0]), ("second", case.0[1])])?;
            let layouts = [4, 2].map(|channels| {
                let shape = |samples: &Vec<usize>| [samples.len(), channels, 3, 5];
                let layouts = batches.iter().map(|samples| {
                    halocline_core::Layout::new(mesh.shape(), &shape(samples), &case.1)
                });
                layouts
                    .map(|layout| Ok(layout?.local_box(mesh.position())))
                    .collect::<Result<Vec<_>>>()
            });
            let [inputs, targets] = layouts;
            Ok((inputs?, targets?))
        };
        let boxes = Launcher::local(case.0[0] * case.0[1])
            .collect(layout)
            .unwrap();
        for (part, (inputs, targets)) in scattered.iter().zip(&boxes) {
            for (index, (samples, _, bits)) in part.iter().enumerate() {
                let mut expected = Vec::new();
                for (cells, lead) in [(&inputs[index], 0), (&targets[index], 2)] {
                    let [batch, channels, rows, columns] = cells.ranges() else {
                        panic!()
                    };
                    for &sample in &samples[batch.clone()] {
                        for channel in channels.clone() {
                            for (i, j) in rows
                                .clone()
                                .flat_map(|i| columns.clone().map(move |j| (i, j)))
                            {
                                let at = [sample + lead + channel / 2, channel % 2, i, j];
                                expected.push(fields[at].to_bits());
                            }
                        }
                    }
                }
                assert_eq!(bits, &expected, "{case:?}, batch {index}");
            }
        }
    }
}

#[test]
fn an_epoch_is_a_permutation_that_seed_and_number_determine() {
    let (_folder, path) = numbered_file([14, 1, 3, 4]);
    let epoch = |seed, epoch, ranks| -> Vec<usize> {
        let config = LoaderConfig::new(5).with_order(Order::Shuffled { seed });
        let case = ([ranks, 1], [Shard(2), Replicate]);
        let parts = parts(
            &path,
            &case,
            &config.with_last_batch(LastBatch::Keep),
            epoch,
        )
        .unwrap();
        let orders = parts
            .iter()
            .map(|part| part.iter().flat_map(|batch| batch.0.clone()).collect());
        let orders: Vec<Vec<usize>> = orders.collect();
        assert!(orders.iter().all(|order| order == &orders[0]));
        orders[0].clone()
    };
    let first = epoch(1, 0, 1);
    assert_eq!(first, epoch(1, 0, 2), "the same on any mesh, and again");
    assert_ne!(first, epoch(1, 1, 1), "another in every epoch");
    assert_ne!(first, epoch(2, 0, 1), "another for every seed");
    let mut sorted = first.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..12).collect::<Vec<_>>());
    assert_ne!(first, sorted);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn the_last_batch_is_dropped_or_kept(times in 4..12_usize, batch in 1..9_usize) {
        let (_folder, path) = numbered_file([times, 1, 2, 3]);
        let samples = times - 2;
        for (last_batch, sizes) in [
            (LastBatch::Drop, vec![batch; samples / batch]),
            (LastBatch::Keep, (0..samples).step_by(batch).map(|at| batch.min(samples - at)).collect()),
        ] {
            let config = LoaderConfig::new(batch).with_last_batch(last_batch);
            let parts = parts(&path, &CASES[0], &config, 0);
            if sizes.is_empty() {
                let message = parts.unwrap_err().to_string();
                prop_assert!(message.ends_with(&format!(
                    "batch_size: got {batch}, expected at most the {samples} samples, or LastBatch::Keep"
                )), "{}", message);
                continue;
            }
            let found: Vec<Vec<usize>> = parts.unwrap()[0].iter().map(|batch| batch.0.clone()).collect();
            prop_assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), sizes);
            prop_assert!(found.into_iter().flatten().eq((0..samples).take(batch * parts_len(samples, batch, last_batch))));
        }
    }
}

fn parts_len(samples: usize, batch: usize, last_batch: LastBatch) -> usize {
    match last_batch {
        LastBatch::Drop => samples / batch,
        LastBatch::Keep => samples.div_ceil(batch),
    }
}

#[test]
fn only_the_ranks_that_read_open_files() {
    let (_folder, path) = numbered_file([4, 1, 3, 4]);
    for (source, expected) in [(Source::Scatter, 1), (Source::PerRank, 3)] {
        let opened = AtomicUsize::new(0);
        Launcher::local(3)
            .run(|world| {
                let mesh = world.mesh([("lat", 3)])?;
                let config = LoaderConfig::new(1).with_source(source);
                let loader = FieldLoader::new(&mesh, &[Shard(2)], &config, || {
                    opened.fetch_add(1, Ordering::Relaxed);
                    open(&path)
                })?;
                assert_eq!(loader.samples(), 2);
                Ok(())
            })
            .unwrap();
        assert_eq!(opened.into_inner(), expected, "{source:?}");
    }
}

/// A file whose fields have a NaN in the last row at time 3.
fn file_with_nan() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    let mut fields = numbered([6, 1, 4, 5], 0.0);
    fields[[3, 0, 3, 1]] = f32::NAN;
    write(&path, &fields, &WriterConfig::new());
    (folder, path)
}

#[test]
fn an_error_while_reading_is_the_error_of_all_ranks() {
    let (_folder, path) = file_with_nan();
    // Under PerRank, the second rank alone reads the last rows.
    for (source, reader) in [(Source::Scatter, 0), (Source::PerRank, 1)] {
        let messages = Launcher::local(2)
            .collect(|world| {
                let mesh = world.mesh([("lat", 2)])?;
                let config = LoaderConfig::new(1).with_source(source);
                let loader = FieldLoader::new(&mesh, &[Shard(2)], &config, || open(&path))?;
                let mut epoch = loader.epoch(0);
                assert!(epoch.next().unwrap().is_ok());
                let error = epoch.next().unwrap().err().unwrap().to_string();
                assert!(epoch.next().is_none(), "an error ends the epoch");
                // The ranks are still together.
                world.barrier()?;
                Ok(error)
            })
            .unwrap();
        for (rank, message) in messages.iter().enumerate() {
            assert!(
                message.contains("dataset \"fields\"[3, 0, 3, 1]: found NaN"),
                "{message}"
            );
            let prefix = format!("rank {reader} failed: ");
            assert_eq!(message.starts_with(&prefix), rank != reader, "{message}");
        }
    }
}

#[test]
fn an_error_while_opening_is_the_error_of_all_ranks() {
    let (_folder, path) = numbered_file([4, 1, 3, 4]);
    let absent = path.with_file_name("2019.h5");
    for (source, reader) in [(Source::Scatter, 0), (Source::PerRank, 2)] {
        let messages = Launcher::local(3)
            .collect(|world| {
                let mesh = world.mesh([("lat", 3)])?;
                let config = LoaderConfig::new(1).with_source(source);
                let path = if world.rank() == reader {
                    &absent
                } else {
                    &path
                };
                let loader = FieldLoader::new(&mesh, &[Shard(2)], &config, || open(path));
                Ok(loader.err().unwrap().to_string())
            })
            .unwrap();
        assert!(
            messages.iter().all(|m| m.contains("2019.h5: No such file")),
            "{messages:?}"
        );
    }
}

/// What ranks say whose loaders are made of other things than the first rank's.
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
        // The ranks are still together.
        world.barrier()?;
        Ok(loader
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default())
    });
    messages.unwrap()
}

/// The message of a deviating rank, which the others repeat; empty where none deviates.
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
    // Trajectories: files of one size with the same times.
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
    // The sum of history and lead, and so the number of samples, is the same.
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
    // A copy is the same data, whatever its name.
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
    // Where rank 0 reads, the other finds out, and the job ends by its error.
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

#[test]
fn placements_and_batch_sizes_that_do_not_fit_are_refused_before_anything_is_read() {
    let message = |placements: [Placement; 1], batch_size| {
        let run = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let config = LoaderConfig::new(batch_size);
            FieldLoader::new(&mesh, &placements, &config, || panic!("opened")).map(|_| ())
        });
        run.unwrap_err().to_string()
    };
    let partial = message([Partial(ReduceOp::Sum)], 1);
    assert!(
        partial.ends_with("FieldLoader: no rule for Partial(Sum); load to Shard or Replicate"),
        "{partial}"
    );
    assert!(message([Shard(4)], 1).contains("Shard(4) for a tensor of 4 dims"));
    assert!(message([Shard(2)], 0).ends_with("batch_size: got 0, expected at least 1 sample"));
}

#[test]
fn an_epoch_may_be_left_early_and_begun_again() {
    let (_folder, path) = numbered_file([12, 1, 3, 4]);
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let loader =
                FieldLoader::new(&mesh, &[Shard(2)], &LoaderConfig::new(2), || open(&path))?;
            for epoch in 0..3 {
                for batch in loader.epoch(epoch).take(2) {
                    assert_eq!(batch?.input.dims(), [2, 2, 3, 4]);
                }
            }
            assert_eq!(part_of_epoch(&loader, 3)?.len(), 5);
            Ok(())
        })
        .unwrap();
}
