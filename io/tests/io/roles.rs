//! Channels by role, several targets, and missing values in samples and batches.

use std::path::{Path, PathBuf};

use halocline_core::{Launcher, Placement, Shard, ShardTensor};
use halocline_io::{
    Channels, DatasetConfig, FieldDataset, FieldFile, FieldLoader, FieldWriter, Gaps, LoaderConfig,
    Missing, Source, Statistics, WriterConfig,
};
use ndarray::{Array4, s};

use crate::formats::store;
use crate::{numbered, numbered_file, write};

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).into()).collect()
}

fn config() -> DatasetConfig {
    DatasetConfig::new()
        .with_history(2)
        .with_steps(2)
        .with_inputs(Some(names(&["z3", "z1"])))
        .with_targets(Some(names(&["z1", "z0", "z3"])))
        .with_forcings(names(&["z2", "cos_local_time", "mask:z1"]))
}

#[test]
fn samples_have_the_channels_of_their_roles() {
    let fields = numbered([6, 4, 3, 4], 0.0);
    let (_folder, path) = numbered_file([6, 4, 3, 4]);
    let dataset = FieldDataset::open(&[&path], &config()).unwrap();
    let channels = Channels {
        inputs: names(&["z3", "z1"]),
        forcings: names(&["z2", "cos_local_time", "mask:z1"]),
        targets: names(&["z1", "z0", "z3"]),
    };
    assert_eq!(*dataset.channels(), channels);
    assert_eq!(channels.feedback().unwrap(), [2, 0]);
    assert_eq!((dataset.len(), dataset.steps()), (3, 2));
    let field = |time: usize, channel: usize| fields.slice(s![time, channel, .., ..]);
    let sample = dataset.sample(1).unwrap();
    for (place, (time, channel)) in [(1, 3), (1, 1), (2, 3), (2, 1)].into_iter().enumerate() {
        assert_eq!(sample.input.slice(s![place, .., ..]), field(time, channel));
    }
    let targets = [(3, 1), (3, 0), (3, 3), (4, 1), (4, 0), (4, 3)];
    for (place, (time, channel)) in targets.into_iter().enumerate() {
        assert_eq!(sample.target.slice(s![place, .., ..]), field(time, channel));
    }
    for (step, time) in [2, 3].into_iter().enumerate() {
        let part = |place: usize| sample.forcing.slice(s![3 * step + place, .., ..]);
        assert_eq!(part(0), field(time, 2));
        // Steps of six hours, and four columns.
        let angle = |column: usize| std::f64::consts::TAU * (time + column) as f64 / 4.0;
        for ((_, column), value) in part(1).indexed_iter() {
            assert!((f64::from(*value) - angle(column).cos()).abs() < 1e-6);
        }
        assert!(part(2).iter().all(|value| *value == 1.0));
    }
    assert_eq!(dataset.leads(1), [6.0, 12.0]);
}

#[test]
fn channels_that_were_not_chosen_are_told_too() {
    let config = DatasetConfig::new()
        .with_gaps(Gaps::Allow)
        .with_missing(Missing::Allow)
        .with_inputs(Some(names(&["t2m"])));
    let message = |config: DatasetConfig| {
        let dataset = FieldDataset::open(&[store("v2.zarr")], &config);
        dataset.unwrap_err().to_string()
    };
    let found = message(config.clone().with_forcings(names(&["cos_latitud"])));
    assert!(
        found.starts_with("forcings: got cos_latitud, expected channels of "),
        "{found}"
    );
    for part in ["orography", "z@500", "mask: before one", "sin_latitude"] {
        assert!(found.contains(part), "{part} in {found}");
    }
    let found = message(config.with_targets(Some(names(&["z@250"]))));
    assert!(
        found.starts_with("targets: got z@250") && found.contains("z@500"),
        "{found}"
    );
}

#[test]
fn channels_of_no_file_are_told_with_those_that_there_are() {
    let (_folder, path) = numbered_file([6, 2, 3, 4]);
    let message = |config: DatasetConfig| {
        let dataset = FieldDataset::open(&[&path], &config);
        dataset.unwrap_err().to_string()
    };
    let new = DatasetConfig::new;
    let found = message(new().with_targets(Some(names(&["z7"]))));
    assert!(
        found.starts_with("targets: got z7, expected channels of the files"),
        "{found}"
    );
    let found = message(new().with_forcings(names(&["sun"])));
    assert!(
        found.contains("z0, z1, mask: before one of them, or cos_latitude"),
        "{found}"
    );
    let found = message(new().with_forcings(names(&["z0", "z0"])));
    assert_eq!(found, "forcings: got z0 twice, expected each channel once");
    let found = message(new().with_inputs(Some(names(&["z1", "z1"]))));
    assert_eq!(found, "inputs: got z1 twice, expected each channel once");
    let found = message(new().with_forcings(names(&["z0", "z1"])));
    assert_eq!(found, "inputs: got none, expected at least one channel");
    assert!(message(new().with_steps(0)).starts_with("steps: got 0"));
    assert!(message(new().with_steps(6)).contains("got 1 and 1 times 6 steps"));
    let given = new().with_targets(Some(names(&["z0"])));
    let dataset = FieldDataset::open(&[&path], &given).unwrap();
    let found = dataset.channels().feedback().unwrap_err().to_string();
    assert_eq!(
        found,
        "inputs: got z1, expected a target too (z0), or a forcing, which is known at every step"
    );
}

/// Creates channels with missing values: land in `z1`, and one missing value in `z0`.
fn holed(folder: &Path) -> (PathBuf, Array4<f32>) {
    let mut fields = numbered([6, 4, 3, 4], 0.0);
    fields.slice_mut(s![.., 1, 0, 1..3]).fill(f32::NAN);
    fields[[3, 0, 2, 2]] = f32::NAN;
    let path = folder.join("holes.h5");
    write(&path, &fields, &WriterConfig::new());
    (path, fields)
}

#[test]
fn missing_values_are_filled_on_any_mesh_and_masked() {
    let folder = tempfile::tempdir().unwrap();
    let (path, fields) = holed(folder.path());
    let file = FieldFile::open(&path).unwrap().with_missing(Missing::Allow);
    let statistics = Statistics::compute(&[file], 1).unwrap();
    assert!(statistics.means().iter().all(|mean| mean.is_finite()));
    let open = || {
        let dataset = FieldDataset::open(&[&path], &config().with_missing(Missing::Fill))?;
        dataset.with_statistics(&statistics)
    };
    let whole = |x: &ShardTensor<4>| {
        let whole = x.full_tensor().into_data();
        whole.try_to_vec::<f32>().unwrap()
    };
    type Parts = Vec<[Vec<f32>; 5]>;
    let load = |ranks: usize, placements: &[Placement; 1], source, steps| -> Parts {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("x", ranks)])?;
            let config = LoaderConfig::new(2).with_source(source);
            let mut loader = FieldLoader::new(&mesh, placements, &config, open)?;
            assert_eq!((loader.steps(), loader.channels().forcings.len()), (2, 3));
            loader.set_steps(steps)?;
            let parts = |batch: halocline_core::Result<halocline_io::Batch>| {
                let batch = batch?;
                let (mask, forcing) = (batch.mask.unwrap(), batch.forcing.unwrap());
                assert_eq!(batch.leads[0].len(), steps);
                assert_eq!(mask.layout(), batch.target.layout());
                let of_input = batch.input_mask.unwrap();
                assert_eq!(of_input.layout(), batch.input.layout());
                Ok([&batch.input, &forcing, &batch.target, &mask, &of_input].map(whole))
            };
            loader
                .epoch(0)
                .map(parts)
                .collect::<halocline_core::Result<Parts>>()
        });
        found.unwrap().remove(0)
    };
    let one = load(1, &[Shard(2)], Source::PerRank, 2);
    let [input, forcing, target, mask, of_input] = &one[0];
    // Two samples of two times: land in z1.
    let filled = input.iter().zip(of_input).filter(|(_, mask)| **mask == 0.0);
    assert!(filled.clone().all(|(value, _)| *value == 0.0));
    assert_eq!(filled.count(), 2 * 2 * 2);
    assert!(
        [input, forcing, target]
            .iter()
            .all(|part| part.iter().all(|x| x.is_finite()))
    );
    let sizes = [input, forcing, target, mask].map(|part| part.len() / 24);
    assert_eq!(sizes, [4, 6, 6, 6]);
    // The targets of the first sample are those of times 2 and 3, in the order z1, z0, z3.
    let mut missing = 0;
    for (place, (time, channel)) in [(2, 1), (2, 0), (2, 3), (3, 1), (3, 0), (3, 3)]
        .into_iter()
        .enumerate()
    {
        for (cell, value) in fields.slice(s![time, channel, .., ..]).iter().enumerate() {
            let (target, mask) = (target[12 * place + cell], mask[12 * place + cell]);
            assert_eq!(mask == 1.0, !value.is_nan());
            let scaled =
                (f64::from(*value) - statistics.means()[channel]) / statistics.stds()[channel];
            let expected = if value.is_nan() { 0.0 } else { scaled as f32 };
            assert_eq!(target, expected);
            missing += usize::from(value.is_nan());
        }
    }
    assert_eq!(missing, 5);
    // The mask of z1 as a forcing of the second step: land in the first row.
    assert_eq!(
        forcing[5 * 12..6 * 12],
        [[1.0, 0.0, 0.0, 1.0], [1.0; 4], [1.0; 4]].concat()
    );
    for (ranks, placement) in [(2, Shard(2)), (3, Shard(3)), (2, Shard(0)), (4, Shard(1))] {
        for source in [Source::PerRank, Source::Scatter] {
            let found = load(ranks, &[placement], source, 2);
            assert_eq!(found, one, "{ranks} ranks with {placement} from {source:?}");
        }
    }
    // One step of two.
    let short = load(2, &[Shard(2)], Source::Scatter, 1);
    let first = |part: &Vec<f32>| [&part[..36], &part[72..108]].concat();
    let [_, forcing, target, mask, _] = &short[0];
    assert_eq!([forcing, target, mask].map(Vec::clone), {
        let [_, forcing, target, mask, _] = &one[0];
        [first(forcing), first(target), first(mask)]
    });
}

#[test]
fn filling_needs_statistics_and_steps_their_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = holed(folder.path());
    let config = DatasetConfig::new().with_missing(Missing::Fill);
    let dataset = FieldDataset::open(&[&path], &config).unwrap();
    let expected = "missing: got Missing::Fill, expected FieldDataset::with_statistics";
    let found = dataset.sample(0).unwrap_err().to_string();
    assert!(found.starts_with(expected), "{found}");
    let run = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let loader = |config: &DatasetConfig| {
            FieldLoader::new(&mesh, &[Shard(2)], &LoaderConfig::new(1), || {
                FieldDataset::open(&[&path], config)
            })
        };
        let found = loader(&config).unwrap_err().to_string();
        assert!(found.contains(expected), "{found}");
        let mut loader = loader(&DatasetConfig::new().with_missing(Missing::Allow))?;
        let found = loader.set_steps(2).unwrap_err().to_string();
        assert_eq!(
            found,
            "steps: got 2, expected 1 to 1, which DatasetConfig::with_steps sets"
        );
        Ok(())
    });
    run.unwrap();
}

#[test]
fn static_fields_stand_in_for_channels_of_the_files() {
    let (folder, path) = numbered_file([6, 2, 3, 4]);
    let land = folder.path().join("land.h5");
    let fields = numbered([1, 1, 3, 4], 0.5);
    write(&land, &fields, &WriterConfig::new());
    let statistics = Statistics::compute(&[FieldFile::open(&path).unwrap()], 1).unwrap();
    let config = DatasetConfig::new()
        .with_inputs(Some(names(&["z1"])))
        .with_forcings(names(&["z0"]))
        .with_static_fields(Some(land.clone()));
    let dataset = FieldDataset::open(&[&path], &config).unwrap();
    assert!(dataset.describe_channel("z0").unwrap().is_static);
    let dataset = dataset.with_statistics(&statistics).unwrap();
    let (mean, std) = (statistics.means()[0], statistics.stds()[0]);
    let expected = fields.mapv(|value| ((f64::from(value) - mean) / std) as f32);
    for sample in 0..dataset.len() {
        let found = dataset.sample(sample).unwrap().forcing;
        let expected = expected.slice(s![0, .., .., ..]);
        for (found, expected) in found.iter().zip(expected.iter()) {
            assert!((found - expected).abs() < 1e-5, "{found} for {expected}");
        }
    }
    for (shape, told) in [
        ([1, 1, 3, 6], "land.h5: grid: found"),
        ([2, 1, 3, 4], "static_fields: got 2 times in"),
    ] {
        write(&land, &numbered(shape, 0.0), &WriterConfig::new());
        let found = FieldDataset::open(&[&path], &config)
            .unwrap_err()
            .to_string();
        assert!(found.contains(told), "{found}");
    }
}

#[test]
fn constants_are_forcings_normalised_over_their_grid() {
    let (folder, path) = numbered_file([6, 2, 3, 4]);
    let land = folder.path().join("land.h5");
    let mut fields = Array4::from_shape_fn((1, 1, 3, 4), |(_, _, row, _)| (2 * row) as f32);
    fields[[0, 0, 1, 3]] = f32::NAN;
    let name = |name: &str| vec![name.to_string()];
    let grid = crate::grid(3, 4);
    let mut writer = FieldWriter::create(&land, &grid, &["oro"], &WriterConfig::new()).unwrap();
    writer
        .append(0.0, fields.index_axis(ndarray::Axis(0), 0))
        .unwrap();
    writer.finish().unwrap();
    let config = DatasetConfig::new()
        .with_inputs(Some(names(&["z1"])))
        .with_constants(Some(land.clone()))
        .with_constants_missing(name("oro"))
        .with_forcings(name("oro"));
    let dataset = FieldDataset::open(&[&path], &config).unwrap();
    assert_eq!(dataset.channels().targets, ["z1"]);
    for sample in 0..dataset.len() {
        let oro = dataset.sample(sample).unwrap().forcing;
        // Pole, equator, pole: missing values are set to the mean, which is the value at the
        // equator.
        assert!(oro.slice(s![0, 1, ..]).iter().all(|value| *value == 0.0));
        let (north, south) = (oro[[0, 0, 0]], oro[[0, 2, 0]]);
        assert!(north < -0.9 && (north + south).abs() < 1e-6);
    }
    let other = folder.path().join("other.h5");
    write(&other, &numbered([2, 1, 3, 6], 0.0), &WriterConfig::new());
    let config = config
        .with_constants(Some(other))
        .with_constants_missing(Vec::new())
        .with_forcings(name("z0"));
    let found = FieldDataset::open(&[&path], &config)
        .unwrap_err()
        .to_string();
    assert!(found.contains("other.h5: grid: found"), "{found}");
}
