//! Tensors saved on one mesh and loaded on another.

use std::fs;

use burn::tensor::{DType, Float, Tensor, TensorData};
use halocline_core::{Launcher, Layout, Placement, Replicate, Shard, ShardTensor};
use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};
use proptest::prelude::*;

use super::{CASES, SHAPE, field, flags, large, mesh, same, save};

/// Returns the bytes that this thread has read from files.
fn bytes_read() -> u64 {
    let io = fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.unwrap().parse().unwrap()
}

#[test]
fn what_any_mesh_saved_any_mesh_loads_reading_it_once() {
    for saved in &CASES {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), saved, 3);
        let path = folder.path().join("step_000000003");
        for case in &CASES {
            let loaded = Launcher::local(case.0[0] * case.0[1]).collect(|world| {
                let before = bytes_read();
                let checkpoint = Checkpoint::open(&path)?;
                let mesh = mesh(&world, case.0)?;
                let found = checkpoint.sharded(&mesh, "field", &case.1)?;
                same(found.local().clone(), field(&world, case)?.into_local());
                same(checkpoint.tensor(&world, "large")?, large(&world));
                same(checkpoint.tensor(&world, "flags")?, flags(&world));
                assert_eq!(
                    checkpoint.tensor::<1, Float>(&world, "nothing")?.dims(),
                    [0]
                );
                assert_eq!(checkpoint.value::<f64>("rate")?, 0.1);
                assert_eq!(checkpoint.ranks(), saved.0[0] * saved.0[1]);
                Ok(bytes_read() - before)
            });
            let read: u64 = loaded.unwrap().iter().sum();
            let state = 4 * (SHAPE.iter().product::<usize>() + 1300 * 1000) + 3;
            // Every rank reads the index.
            let index = fs::metadata(path.join("index.json")).unwrap().len() as usize;
            let allowed = state + state / 10 + index * case.0[0] * case.0[1];
            assert!(
                read < allowed as u64,
                "{saved:?} to {case:?}: {read} of {state}"
            );
        }
        let data = Checkpoint::open(&path).unwrap().data("large").unwrap();
        assert_eq!(
            data.iter::<f32>().sum::<f32>(),
            (0..1_300_000).map(|i| (i % 7919) as f32).sum::<f32>()
        );
    }
}

#[test]
fn shards_of_other_extents_are_loaded_too() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &CASES[3], 1);
    let path = folder.path().join("step_000000001");
    let loaded = Launcher::local(3).run(|world| {
        let mesh = world.mesh([("lat", 3)])?;
        let layout = Layout::new(mesh.shape(), &SHAPE, &[Shard(2)])?;
        let layout = layout.with_extents(2, &[12, 0, 1])?;
        let found: ShardTensor<4> = Checkpoint::open(&path)?.sharded(&mesh, "field", &layout)?;
        let (expected, ..) = field(&world, &([1, 3], [Replicate, Replicate]))?.into_parts();
        let expected = ShardTensor::distribute(expected, &mesh, &layout)?;
        same(found.into_local(), expected.into_local());
        Ok(())
    });
    loaded.unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_layout_becomes_any_other(
        shape in prop::array::uniform3(0_usize..6),
        saved in (0_usize..4, 0_usize..4),
        loaded in (0_usize..4, 0_usize..4),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let placements = |(a, b): (usize, usize)| [a, b].map(|dim| if dim < 3 { Shard(dim) } else { Replicate });
        let cells = shape.iter().product::<usize>();
        let data = TensorData::new((0..cells).map(|i| i as f64 / 7.0).collect(), shape);
        let path = folder.path();
        Launcher::local(4).run(|world| {
            let mesh = mesh(&world, [2, 2])?;
            let whole = Tensor::<3>::from_data(data.clone(), (world.device(), DType::F64));
            let of = |p: [Placement; 2]| ShardTensor::distribute(whole.clone(), &mesh, &p);
            let mut checkpoints = Checkpoints::open(&world, path, &CheckpointConfig::new())?;
            let mut snapshot = Snapshot::new(&world);
            snapshot.sharded("x", &of(placements(saved))?)?;
            checkpoints.save(1, snapshot, None)?;
            let checkpoint = checkpoints.latest()?.expect("it was saved");
            let found = checkpoint.sharded(&mesh, "x", &placements(loaded))?;
            same(found.into_local(), of(placements(loaded))?.into_local());
            Ok(())
        }).unwrap();
    }
}
