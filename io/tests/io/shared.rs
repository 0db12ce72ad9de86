//! Chunks shared by the ranks of one process.

use halocline_core::{Launcher, Shard};
use halocline_io::{
    ConvertConfig, DatasetConfig, FieldDataset, FieldLoader, LoaderConfig, Order, OutputConfig,
    Source, Traffic, convert, open,
};
use rayon::prelude::*;

use crate::numbered_file;

/// Creates a store with one chunk per time and channel.
fn one_chunk_a_state() -> (tempfile::TempDir, std::path::PathBuf) {
    let (folder, source) = numbered_file([9, 3, 7, 10]);
    let path = folder.path().join("states.zarr");
    let config = ConvertConfig::new().with_output(OutputConfig::new());
    convert(&open(source).unwrap(), &path, &config, |_| ()).unwrap();
    (folder, path)
}

#[test]
fn local_ranks_decode_a_chunk_once() {
    let (_folder, path) = one_chunk_a_state();
    for ranks in 1..=4 {
        let config = LoaderConfig::new(2)
            .with_source(Source::PerRank)
            .with_order(Order::Shuffled { seed: 3 });
        // Over an epoch, each field is read twice, as input and as target.
        let traffic = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("lat", ranks)])?;
            let loader = FieldLoader::new(&mesh, &[Shard(2)], &config, || {
                FieldDataset::open(&[&path], &DatasetConfig::new())
            })?;
            for batch in loader.epoch(0) {
                let batch = batch?;
                let values: Vec<f32> = batch.input.local().to_data().try_to_vec().unwrap();
                assert_eq!(values[0] as usize / 1000, batch.samples[0]);
            }
            Ok(loader.traffic())
        });
        let total = traffic
            .unwrap()
            .into_iter()
            .fold(Traffic::default(), |sum, one| sum + one);
        assert_eq!(total.needed, 8 * 2 * 3 * 7 * 10 * 4);
        let all = 9 * 3 * 7 * 10 * 4;
        if ranks == 1 {
            // A box of whole chunks is not cached.
            assert_eq!(total.decoded, total.needed);
        } else if ranks == 2 {
            assert_eq!(total.decoded, all, "{total}");
        } else {
            // The chunks are still cached.
            assert_eq!(total.decoded, 0, "{total}");
        }
    }
}

#[test]
fn tasks_of_rayon_read_chunks_that_others_decode() {
    let (_folder, path) = one_chunk_a_state();
    let fields = open(&path).unwrap();
    (0..100_usize).into_par_iter().for_each(|task| {
        let first = task % 3;
        let found = fields.read([0..9, 0..3, first..first + 4, 0..10]).unwrap();
        assert_eq!(found[[8, 2, 0, 9]], (8000 + 200 + first * 10 + 9) as f32);
    });
}

#[test]
fn a_store_that_was_replaced_is_read_anew() {
    let (folder, path) = one_chunk_a_state();
    let half = [0..9, 0..3, 0..3, 0..10];
    let before = open(&path).unwrap().read(half.clone()).unwrap();
    let (_other, other) = numbered_file([9, 3, 7, 10]);
    let source = open(other).unwrap();
    let shifted = folder.path().join("shifted.h5");
    let values = source.read(source.shape().map(|size| 0..size)).unwrap() + 5.0;
    crate::write(&shifted, &values, &halocline_io::WriterConfig::new());
    std::fs::remove_dir_all(&path).unwrap();
    convert(
        &open(shifted).unwrap(),
        &path,
        &ConvertConfig::new(),
        |_| (),
    )
    .unwrap();
    assert_eq!(open(&path).unwrap().read(half).unwrap(), before + 5.0);
}
