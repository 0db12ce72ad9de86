mod finite;
mod wanted;

use std::fs;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Bool, DType, Float, Int, Tensor, TensorData};
use halocline_core::{
    DeviceMesh, Distribution, Error, Launcher, Layout, LocalGradient, Partial, Placement,
    RandomKey, ReduceOp, Replicate, Result, Shard, ShardTensor, World,
};
use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot, load_record};
use proptest::prelude::*;

use crate::listing;

const SHAPE: [usize; 4] = [2, 3, 13, 18];

/// A mesh by the sizes of its two axes, and the placements on them.
type Case = ([usize; 2], [Placement; 2]);

const CASES: [Case; 6] = [
    ([1, 1], [Replicate, Replicate]),
    ([2, 1], [Shard(2), Shard(3)]),
    ([1, 3], [Replicate, Shard(3)]),
    ([2, 2], [Shard(2), Shard(3)]),
    ([4, 1], [Replicate, Replicate]),
    ([2, 3], [Shard(3), Shard(3)]),
];

fn mesh(world: &World, sizes: [usize; 2]) -> Result<DeviceMesh> {
    world.mesh([("first", sizes[0]), ("second", sizes[1])])
}

fn field(world: &World, case: &Case) -> Result<ShardTensor<4>> {
    let normal = Distribution::Normal {
        mean: 0.0,
        std: 1.0,
    };
    let key = RandomKey::new(5, "field");
    ShardTensor::random(SHAPE, normal, key, &mesh(world, case.0)?, &case.1)
}

/// A tensor that all ranks hold, of 5 MB: large enough to be shared.
fn large(world: &World) -> Tensor<2> {
    let values: Vec<f32> = (0..1300 * 1000).map(|i| (i % 7919) as f32).collect();
    let data = TensorData::new(values, [1300, 1000]);
    Tensor::from_data(data, world.device())
}

fn flags(world: &World) -> Tensor<1, Bool> {
    Tensor::<1, Int>::from_ints([3, 0, 1], world.device()).bool()
}

fn save(folder: &Path, case: &Case, step: u64) {
    let ranks = case.0[0] * case.0[1];
    let saved = Launcher::local(ranks).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder, &CheckpointConfig::new())?;
        let mut snapshot = Snapshot::new(&world);
        snapshot.sharded("field", &field(&world, case)?)?;
        snapshot.tensor("large", &large(&world))?;
        snapshot.tensor("flags", &flags(&world))?;
        snapshot.data("nothing", &TensorData::new(Vec::<f64>::new(), [0]))?;
        snapshot.value("rate", &0.1_f64)?;
        checkpoints.save(step, snapshot, None)?;
        checkpoints.wait()
    });
    saved.unwrap();
}

fn same<const D: usize, K: burn::tensor::kind::Basic>(found: Tensor<D, K>, expected: Tensor<D, K>) {
    found.into_data().assert_eq(&expected.into_data(), true);
}

/// Bytes that this thread has read from files.
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
                let found = checkpoint.sharded("field", &mesh, &case.1)?;
                same(found.local().clone(), field(&world, case)?.into_parts().0);
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
        let found: ShardTensor<4> = Checkpoint::open(&path)?.sharded_to("field", &mesh, &layout)?;
        let (expected, ..) = field(&world, &([1, 3], [Replicate, Replicate]))?.into_parts();
        let expected = ShardTensor::distribute(expected, &mesh, &layout)?;
        same(found.into_parts().0, expected.into_parts().0);
        Ok(())
    });
    loaded.unwrap();
}

/// Saves a number at every step, and says which steps are there then.
fn steps(folder: &Path, config: &CheckpointConfig, metrics: &[Option<f64>]) -> Vec<String> {
    let saved = Launcher::local(2).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder, config)?;
        for (step, metric) in (1..).zip(metrics) {
            let mut snapshot = Snapshot::new(&world);
            snapshot.value("step", &step)?;
            snapshot.data("x", &TensorData::from([step as f32]))?;
            checkpoints.save(step, snapshot, *metric)?;
        }
        checkpoints.wait()
    });
    saved.unwrap();
    names_in(folder)
}

/// What is in a folder of checkpoints, in order.
fn names_in(folder: &Path) -> Vec<String> {
    let mut names = listing(folder);
    names.retain(|name| name != ".lock");
    names.sort();
    names
}

fn latest(folder: &Path) -> Option<u64> {
    let found = Launcher::local(2).collect(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder, &CheckpointConfig::new())?;
        let latest = checkpoints.latest()?;
        if let Some(checkpoint) = &latest {
            assert_eq!(checkpoint.value::<u64>("step")?, checkpoint.step());
            let x: Tensor<1> = checkpoint.tensor(&world, "x")?;
            assert_eq!(x.into_scalar::<f32>(), checkpoint.step() as f32);
        }
        Ok(latest.map(|checkpoint| checkpoint.step()))
    });
    let found = found.unwrap();
    assert_eq!(found[0], found[1]);
    found[0]
}

#[test]
fn the_newest_and_the_best_stay_in_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let config = CheckpointConfig::new().with_keep_last(2).with_keep_best(1);
    let metrics = [Some(3.0), Some(1.0), None, Some(2.0), None];
    let names = steps(folder.path(), &config, &metrics);
    assert_eq!(
        names,
        ["step_000000002", "step_000000004", "step_000000005"]
    );
    assert_eq!(latest(folder.path()), Some(5));
    let best = Launcher::local(2).collect(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder.path(), &config)?;
        Ok(checkpoints.best()?.map(|checkpoint| checkpoint.step()))
    });
    assert_eq!(best.unwrap(), [Some(2), Some(2)]);
}

#[test]
fn a_crash_between_any_two_steps_of_a_save_leaves_what_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    assert_eq!(latest(path), None);
    steps(path, &CheckpointConfig::new(), &[None, None]);
    let second = path.join("step_000000002");
    // Files without an index: never finished.
    let partial = path.join(".step_000000003.0123456789abcdef");
    fs::create_dir(&partial).unwrap();
    fs::copy(
        second.join("rank_00000.safetensors"),
        partial.join("rank_00000.safetensors"),
    )
    .unwrap();
    // A removal that stopped half-way.
    let removed = path.join(".step_000000000.removed");
    fs::create_dir(&removed).unwrap();
    fs::copy(second.join("index.json"), removed.join("index.json")).unwrap();
    assert_eq!(latest(path), Some(2));
    assert!(!partial.exists() && !removed.exists());
    // All that is missing is the name.
    fs::rename(&second, path.join(".step_000000002.0123456789abcdef")).unwrap();
    assert_eq!(latest(path), Some(2));
    assert!(second.exists());
    // A file that went away, and one that is too short: what is damaged is put out of the way, and stays.
    let put_back = || {
        let damaged = |entry: &String| entry.starts_with("damaged_step_000000002");
        let damaged = listing(path)
            .into_iter()
            .find(damaged)
            .expect("it was damaged");
        fs::rename(path.join(damaged), &second).unwrap();
    };
    let file = second.join("rank_00000.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    assert_eq!(latest(path), Some(1));
    put_back();
    fs::remove_file(&file).unwrap();
    assert_eq!(latest(path), Some(1));
    put_back();
    fs::write(&file, &bytes).unwrap();
    assert_eq!(latest(path), Some(2));
    // A name that is not that of its step.
    fs::rename(&second, path.join("step_000000007")).unwrap();
    assert_eq!(latest(path), Some(1));
    fs::rename(path.join("damaged_step_000000007"), &second).unwrap();
    // The same step again, stopped when the old one had lost its name and the new one had not got it.
    let again = path.join(".step_000000002.0123456789abcdef.1");
    let copied = std::process::Command::new("cp")
        .arg("-r")
        .args([&second, &again])
        .status();
    assert!(copied.unwrap().success());
    fs::rename(&second, path.join(".step_000000002.removed")).unwrap();
    assert_eq!(latest(path), Some(2));
    let index = second.join("index.json");
    fs::write(&index, &fs::read(&index).unwrap()[..100]).unwrap();
    assert_eq!(latest(path), Some(1));
    // None left: training must not begin anew as if nothing had been there.
    fs::write(path.join("step_000000001/index.json"), "{}").unwrap();
    let none = Launcher::local(2).run(|world| {
        let open = Checkpoints::open(&world, path, &CheckpointConfig::new());
        let beside = Checkpoint::latest(&world, path);
        assert!(beside.unwrap_err().to_string().contains("not an index"));
        open.map(|_| ())
    });
    assert!(none.unwrap_err().to_string().contains("not an index"));
}

#[test]
fn a_folder_belongs_to_one_job_and_others_may_read() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let shared = Launcher::local(2).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, path, &CheckpointConfig::new())?;
        let mut snapshot = Snapshot::new(&world);
        snapshot.tensor("large", &large(&world))?;
        checkpoints.save(1, snapshot, None)?;
        let second = Checkpoints::open(&world, path, &CheckpointConfig::new());
        let error = second.unwrap_err().to_string();
        assert!(error.contains("another job has it open"), "{error}");
        checkpoints.wait()?;
        let found = Checkpoint::latest(&world, path)?.expect("it is there");
        assert_eq!(found.step(), 1);
        Ok(())
    });
    shared.unwrap();
    let mode = |name: &str| {
        let file = path.join("step_000000001").join(name);
        fs::metadata(file).unwrap().permissions().mode()
    };
    assert_eq!(mode("rank_00000.safetensors"), mode("index.json"));
}

#[test]
fn what_was_saved_after_going_back_stays() {
    let folder = tempfile::tempdir().unwrap();
    let config = CheckpointConfig::new().with_keep_last(1).with_keep_best(1);
    let names = steps(
        folder.path(),
        &config,
        &[Some(0.5), Some(f64::NAN), Some(0.7)],
    );
    assert_eq!(names, ["step_000000001", "step_000000003"]);
    let gone_back = Launcher::local(1).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder.path(), &config)?;
        assert_eq!(checkpoints.committed(), Some(3));
        checkpoints.save(2, Snapshot::new(&world), None)?;
        checkpoints.wait()?;
        assert_eq!(checkpoints.committed(), Some(2));
        let loaded = checkpoints.resume(|checkpoint| match checkpoint.step() {
            2 => Ok("loaded"),
            _ => Err(halocline_core::Error::other("of no use")),
        })?;
        assert_eq!(loaded, Some("loaded"));
        assert_eq!(checkpoints.latest()?.expect("saved").step(), 2);
        // What may be sound stays.
        let denied = checkpoints.resume(|checkpoint| -> halocline_core::Result<()> {
            let path = folder.path().join(format!("{}", checkpoint.step()));
            let source = std::io::ErrorKind::PermissionDenied.into();
            Err(halocline_io::Error::Io { path, source }.into())
        });
        assert!(
            denied
                .unwrap_err()
                .to_string()
                .contains("permission denied")
        );
        assert_eq!(checkpoints.latest()?.expect("saved").step(), 2);
        Ok(())
    });
    gone_back.unwrap();
    assert!(folder.path().join("damaged_step_000000003").exists());
}

/// What an attempt to load from a folder of saved tensors says.
fn failure(path: &Path) -> String {
    let loaded = Launcher::local(2).run(|world| {
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.tensor::<2, Float>(&world, "large")?;
        checkpoint.sharded::<4, Float>("field", &mesh(&world, [2, 1])?, &[Shard(2), Replicate])?;
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
    // Made with intent: a sum that fits.
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
    // Whether what rank 0 knows of is written by rank 1, which lacks it, or by rank 0, so that it would be whole.
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
        let placement = checkpoint.sharded::<2, Float>("large", &mesh, &[Partial(ReduceOp::Sum)]);
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

struct ToF64;

impl ModuleMapper for ToF64 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(DType::F64))
    }
}

#[test]
fn a_model_is_one_file_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let [single, record] = ["model.safetensors", "model.bpk"].map(|name| folder.path().join(name));
    let passed = Launcher::local(2).seed(4).run(|world| {
        let fresh = || world.init(|device| LinearConfig::new(7, 5).init(device));
        let model: Linear = fresh()?;
        let mut checkpoints = Checkpoints::open(&world, folder.path(), &CheckpointConfig::new())?;
        let mut snapshot = Snapshot::new(&world);
        snapshot.module("model", &model)?;
        checkpoints.save(1, snapshot, None)?;
        let saved = checkpoints.latest()?.expect("it was saved");
        if world.is_root() {
            saved.export("model", &single)?;
            saved
                .module_record("model")?
                .save(&record)
                .map_err(Error::other)?;
        }
        world.barrier()?;
        let of_tensors = Checkpoint::open(&single)?.module(&world, "", fresh()?)?;
        let of_record = fresh()?
            .try_load_record(load_record(&record)?)
            .map_err(Error::other)?;
        for found in [of_tensors, of_record] {
            same(found.weight.val(), model.weight.val());
            same(
                found.bias.expect("a bias").val(),
                model.bias.clone().expect("a bias").val(),
            );
        }
        // Another shape, another type, and a module with more in it.
        let failed = |module: Linear| {
            let loaded = Checkpoint::open(&single)?.module(&world, "", module);
            Ok::<_, Error>(loaded.unwrap_err().to_string())
        };
        let other = world.init(|device| LinearConfig::new(7, 6).init(device))?;
        assert!(failed(other)?.contains("shape mismatch"));
        assert!(failed(fresh()?.map(&mut ToF64))?.contains("is of F32, expected F64"));
        let less = world.init(|device| LinearConfig::new(7, 5).with_bias(false).init(device))?;
        assert!(failed(less)?.contains("Unused"));
        Ok(())
    });
    passed.unwrap();
}

/// A tensor whose value is the sum of what the ranks hold.
fn partial(mesh: &DeviceMesh) -> Result<ShardTensor<2>> {
    let layout = Layout::new(mesh.shape(), &[2, 4], &[Partial(ReduceOp::Sum)])?;
    ShardTensor::from_local(
        Tensor::ones([2, 4], mesh.device()),
        &layout,
        mesh,
        LocalGradient::Replicated,
    )
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
            let found = checkpoint.sharded("x", &mesh, &placements(loaded))?;
            same(found.into_parts().0, of(placements(loaded))?.into_parts().0);
            Ok(())
        }).unwrap();
    }
}
