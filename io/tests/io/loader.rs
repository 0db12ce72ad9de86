use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use halocline_core::{Launcher, Partial, Placement, ReduceOp, Replicate, Result, Shard, World};
use halocline_io::{
    DatasetConfig, FieldDataset, FieldLoader, LastBatch, LoaderConfig, Order, Source, WriterConfig,
};
use proptest::prelude::*;

use crate::{numbered, numbered_file, write};

/// Opens a dataset with a history of two, so that inputs have more channels than targets.
pub(crate) fn open(path: &Path) -> halocline_io::Result<FieldDataset> {
    FieldDataset::open(&[path], &DatasetConfig::new().with_history(2))
}

/// Part of an epoch on one rank: samples, local shapes and bits of each batch.
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

/// Sizes of the two axes of a mesh, and the placements on them.
type Case = ([usize; 2], [Placement; 2]);

/// Returns the part of an epoch on each rank.
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
    // More ranks than rows: some hold no cells.
    ([4, 1], [Shard(2), Replicate]),
];

#[test]
fn both_sources_give_the_same_bits_and_the_right_ones() {
    let shape = [9, 2, 3, 5];
    let (_folder, path) = numbered_file(shape);
    let fields = numbered(shape, 0.0);
    for case in CASES {
        let config = LoaderConfig::new(3)
            .with_source(Source::Scatter)
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
fn shards_may_have_extents_of_their_own() {
    let (_folder, path) = numbered_file([9, 2, 3, 5]);
    let case = ([2, 2], [Shard(2), Shard(3)]);
    let config = LoaderConfig::new(3)
        .with_source(Source::Scatter)
        .with_extents(Some([vec![1, 2], vec![5, 0]]));
    let scattered = parts(&path, &case, &config, 0).unwrap();
    let shapes = scattered.iter().map(|part| part[0].1[1]);
    assert_eq!(
        shapes.collect::<Vec<_>>(),
        [[3, 2, 1, 5], [3, 2, 1, 0], [3, 2, 2, 5], [3, 2, 2, 0]]
    );
    let config = config.with_source(Source::PerRank);
    assert_eq!(scattered, parts(&path, &case, &config, 0).unwrap());
    let config = config.with_extents(Some([vec![1, 1], vec![5, 0]]));
    let error = parts(&path, &case, &config, 0).unwrap_err().to_string();
    assert!(error.contains("[1, 1]"), "{error}");
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

#[test]
fn inputs_that_are_the_targets_are_read_once() {
    let (_folder, path) = numbered_file([4, 2, 3, 4]);
    for source in [Source::Scatter, Source::PerRank] {
        let needed = Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let config = LoaderConfig::new(1).with_source(source);
            let loader = FieldLoader::new(&mesh, &[Shard(2)], &config, || {
                FieldDataset::open(&[&path], &DatasetConfig::new().with_lead(0))
            })?;
            let batch = loader.load(&[3])?;
            let [input, target] = [batch.input, batch.target].map(|field| field.full_tensor());
            assert_eq!(input.dims(), [1, 2, 3, 4]);
            let (input, target) = (input.into_data(), target.into_data());
            input.assert_eq(&target, true);
            assert_eq!(input.iter::<f32>().next(), Some(3000.0));
            Ok(loader.traffic().needed)
        });
        let bytes = 4 * 2 * 3 * 4;
        assert_eq!(needed.unwrap().iter().sum::<u64>(), bytes, "{source:?}");
    }
}

/// Creates a file whose fields have a NaN in the last row at time 3.
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
    // With PerRank, only the second rank reads the last rows.
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
                // The ranks are still in step.
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
