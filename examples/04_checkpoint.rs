//! A field and a model, saved by some ranks and loaded by others.
//!
//! `04_checkpoint [RANKS] [FOLDER]`: with a folder, the checkpoint is kept there.

use std::path::PathBuf;

use burn::nn::conv::Conv2dConfig;
use halocline::io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};
use halocline::prelude::*;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let ranks = arguments.next().map_or(Ok(4), |ranks| ranks.parse());
    let ranks = ranks.map_err(|e| Error::other(format!("RANKS: {e}")))?;
    let kept: Option<PathBuf> = arguments.next().map(PathBuf::from);
    let scratch = tempfile::tempdir()?;
    Launcher::from_env().ranks(ranks).run(|world| {
        // One folder for all ranks.
        let folder = kept.clone().unwrap_or_else(|| scratch.path().into());
        let folder =
            world.broadcast_bytes(0, Some(folder.to_string_lossy().into_owned().into()))?;
        let folder = PathBuf::from(String::from_utf8_lossy(&folder).into_owned());

        // A field whose values identify its cells, sharded by latitude.
        let mesh = world.mesh([("lat", world.size())])?;
        let shape = [2, 45, 90]; // [channel, lat, lon]
        let cells: Vec<f32> = (0..shape.iter().product())
            .map(|cell: usize| cell as f32)
            .collect();
        let whole = Tensor::<3>::from_data(TensorData::new(cells, shape), world.device());
        let field = ShardTensor::distribute(whole.clone(), &mesh, &[Shard(1)])?;
        let conv = world.init(|device| Conv2dConfig::new([2, 8], [3, 3]).init(device))?;

        let mut checkpoints = Checkpoints::open(&world, &folder, &CheckpointConfig::new())?;
        let mut snapshot = Snapshot::new(&world);
        snapshot.sharded("field", &field)?;
        snapshot.module("model", &conv)?;
        snapshot.value("epoch", &3)?;
        checkpoints.save(120, snapshot, None)?; // returns at once; each rank writes its share
        checkpoints.wait()?;

        // Loads on any mesh: here, each rank loads alone, like a job of one rank.
        if world.is_root() {
            let path = folder.join("step_000000120");
            Launcher::local(1).run(|alone| {
                let checkpoint = Checkpoint::open(&path)?;
                let mesh = alone.mesh([("lon", 1)])?;
                let loaded: ShardTensor<3> = checkpoint.sharded(&mesh, "field", &[Shard(2)])?;
                let fresh = alone.init(|device| Conv2dConfig::new([2, 8], [3, 3]).init(device))?;
                let model = checkpoint.module(&alone, "model", fresh)?;
                assert_eq!(loaded.into_local().into_data(), whole.clone().into_data());
                assert_eq!(
                    model.weight.val().into_data(),
                    conv.weight.val().into_data()
                );
                assert_eq!(checkpoint.value::<u32>("epoch")?, 3);
                Ok(())
            })?;
            println!(
                "saved on {} ranks, loaded on one: {}",
                world.size(),
                path.display()
            );
        }
        world.barrier()
    })
}
