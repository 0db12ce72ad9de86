//! Damaged files, ranks that fail or differ, and misuse.

use std::fs;
use std::path::Path;

use burn::tensor::{Float, Int, Tensor, TensorData};
use halocline_core::{
    DeviceMesh, Launcher, Layout, Partial, ReduceOp, Replicate, Result, Shard, ShardTensor,
};
use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};

use super::{CASES, large, latest, mesh, save};

/// Returns the error of loading from a folder of saved tensors.
fn failure(path: &Path) -> String {
    let loaded = Launcher::local(2).run(|world| {
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.tensor::<2, Float>(&world, "large")?;
        checkpoint.sharded::<4, Float>(&mesh(&world, [2, 1])?, "field", &[Shard(2), Replicate])?;
        Ok(())
    });
    loaded.unwrap_err().to_string()
}

#[test]
fn damage_is_an_error_on_all_ranks_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &CASES[3], 7);
    let path = folder.path().join("step_000000007");
    let file = path.join("rank_00002.safetensors");
    let bytes = fs::read(&file).unwrap();
    let mut flipped = bytes.clone();
    let last = flipped.len() - 1000;
    flipped[last] ^= 4;
    fs::write(&file, flipped).unwrap();
    let error = failure(&path);
    assert!(
        error.contains("rank_00002.safetensors") && error.contains("checksum"),
        "{error}"
    );
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
    let error = failure(&path);
    assert!(
        error.contains("rank_00002.safetensors: not a regular file"),
        "{error}"
    );

    let index = path.join("index.json");
    let text = fs::read_to_string(&index).unwrap();
    fs::write(&index, text.replace("1300", "1301")).unwrap();
    assert!(failure(&path).contains("its checksum is wrong"));
    // A forged index, with a valid checksum.
    let forged = |from: &str, to: &str| {
        let body = text["{\"crc32\":\"00000000\",".len()..].replace(from, to);
        assert_ne!(body, text["{\"crc32\":\"00000000\",".len()..]);
        fs::write(
            &index,
            format!(
                "{{\"crc32\":\"{:08x}\",{body}",
                crc32fast::hash(body.as_bytes())
            ),
        )
        .unwrap();
        failure(&path)
    };
    let escape = forged("rank_00002.safetensors", "../../secret.safetensors");
    assert!(
        escape.contains("is not the name of a rank's file"),
        "{escape}"
    );
    let shape = forged("[1300,1000]", "[1300,1000000000]");
    assert!(shape.contains("cells are there"), "{shape}");
    let overflow = forged("[1300,1000]", "[18446744073709551615,1000]");
    assert!(overflow.contains("its shape is too large"), "{overflow}");
    let dtype = forged(
        "\"F32\",\"shape\":[1300,1000]",
        "\"F64\",\"shape\":[1300,1000]",
    );
    assert!(dtype.contains("the bytes of a piece"), "{dtype}");
    let format = forged("halocline checkpoint 1", "halocline checkpoint 2");
    assert!(
        format.contains("expected \"halocline checkpoint 1\""),
        "{format}"
    );
    let deep = forged("\"rate\":0.1", &format!("\"rate\":{}", "[".repeat(100_000)));
    assert!(deep.contains("recursion"), "{deep}");
}

#[test]
fn a_rank_that_cannot_write_is_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let failed = Launcher::local(3).collect(|world| {
        let mut checkpoints = Checkpoints::open(&world, &run, &CheckpointConfig::new())?;
        if world.is_root() {
            fs::remove_dir_all(&run)?;
            fs::write(&run, "a file where the folder was")?;
        }
        world.barrier()?;
        let mut snapshot = Snapshot::new(&world);
        snapshot.tensor("large", &large(&world))?;
        checkpoints.save(1, snapshot, None)?;
        Ok(checkpoints.wait().unwrap_err().to_string())
    });
    for error in failed.unwrap() {
        assert!(
            error.contains("Not a directory") && error.contains("run"),
            "{error}"
        );
    }
}

#[test]
fn ranks_that_save_other_tensors_get_an_error() {
    // Rank 1 lacks a tensor that rank 0 has, or vice versa, in which case the tensors of rank 0
    // would be complete.
    let names: [[&[&str]; 2]; 2] = [[&["a", "b"], &["a"]], [&["a"], &["a", "b"]]];
    for names in names {
        let folder = tempfile::tempdir().unwrap();
        let failed = Launcher::local(2).collect(|world| {
            let mut checkpoints =
                Checkpoints::open(&world, folder.path(), &CheckpointConfig::new())?;
            let mut snapshot = Snapshot::new(&world);
            for name in names[world.rank()] {
                snapshot.data(name, &TensorData::from([1.0_f32]))?;
            }
            let saved = checkpoints.save(1, snapshot, None);
            Ok(saved.unwrap_err().to_string())
        });
        for error in failed.unwrap() {
            assert!(
                error.contains("snapshot: got other tensors, or another step than 1"),
                "{error}"
            );
        }
        assert_eq!(latest(folder.path()), None);
    }
}

#[test]
fn misuse_is_an_error_that_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let config = CheckpointConfig::new().with_keep_last(0);
    let open = Launcher::local(2)
        .run(|world| Checkpoints::open(&world, folder.path(), &config).map(|_| ()));
    assert!(
        open.unwrap_err()
            .to_string()
            .contains("keep_last: got 0, expected at least 1")
    );
    save(folder.path(), &CASES[1], 1);
    let path = folder.path().join("step_000000001");
    let checked = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let mut snapshot = Snapshot::new(&world);
        let x = ShardTensor::<2>::ones([4, 4], &mesh, &[Shard(0)])?;
        let partial = snapshot
            .sharded("x", &partial(&mesh)?)
            .unwrap_err()
            .to_string();
        assert!(partial.contains("resolve() it first"), "{partial}");
        snapshot.sharded("x", &x)?;
        let taken = snapshot.sharded("x", &x).unwrap_err().to_string();
        assert!(taken.contains("a name that is not taken"), "{taken}");

        let checkpoint = Checkpoint::open(&path)?;
        let missing = checkpoint
            .tensor::<1, Float>(&world, "missing")
            .unwrap_err()
            .to_string();
        assert!(missing.contains("no tensor \"missing\""), "{missing}");
        let kind = checkpoint
            .tensor::<2, Int>(&world, "large")
            .unwrap_err()
            .to_string();
        assert!(
            kind.contains("got \"large\" as Int, expected Float: it is of F32"),
            "{kind}"
        );
        let dims = checkpoint
            .tensor::<3, Float>(&world, "large")
            .unwrap_err()
            .to_string();
        assert!(
            dims.contains("got \"large\", 3 dims, expected the 2 of [1300, 1000]"),
            "{dims}"
        );
        let value = checkpoint.value::<Vec<u8>>("rate").unwrap_err().to_string();
        assert!(value.contains("value \"rate\""), "{value}");
        let placement = checkpoint.sharded::<2, Float>(&mesh, "large", &[Partial(ReduceOp::Sum)]);
        assert!(
            placement
                .unwrap_err()
                .to_string()
                .contains("on Shard and Replicate")
        );
        Ok(())
    });
    checked.unwrap();
    let none = Checkpoint::open(folder.path().join("step_000000002"))
        .unwrap_err()
        .to_string();
    assert!(none.contains("No such file"), "{none}");
}

/// Creates a tensor whose value is the sum over ranks.
fn partial(mesh: &DeviceMesh) -> Result<ShardTensor<2>> {
    let layout = Layout::new(mesh.shape(), &[2, 4], &[Partial(ReduceOp::Sum)])?;
    ShardTensor::from_local(Tensor::ones([2, 4], mesh.device()), mesh, &layout)
}
