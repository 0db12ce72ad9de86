//! Damaged and malicious files: reading them returns a typed error or a value, and never panics,
//! hangs, or takes more memory than the size of the file justifies.
//!
//! `HALOCLINE_FUZZ` sets the number of mutated files per reader: few by default, 100 000 in `make
//! fuzz`.

mod memory;
mod mutation;
mod outputs;
mod stores;

use std::path::Path;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Float, TensorData};
use halocline_core::Launcher;
use halocline_io::{
    Checkpoint, CheckpointConfig, Checkpoints, FieldFile, FieldWriter, Grid, Metadata, Snapshot,
    StateDict, Statistics, WriterConfig, load_record,
};
use mutation::Mutations;
use ndarray::Array3;

/// Time limit for any input.
const SLOW: Duration = Duration::from_secs(2);
/// Memory that a reader may take: a constant, and bytes per byte of the file, since numbers and
/// names take more space than their text.
const MEMORY: [usize; 2] = [1 << 20, 64];

/// Number of mutated files per reader.
fn count() -> usize {
    let count = std::env::var("HALOCLINE_FUZZ").ok();
    count.and_then(|count| count.parse().ok()).unwrap_or(300)
}

/// Reads mutations of a file, each of which must return a value or an error. `seal` renews
/// checksums, which would otherwise reveal the mutation.
fn survive(path: &Path, seal: impl Fn(&mut Vec<u8>), read: impl Fn() -> Result<(), String>) {
    let count = count();
    let original = std::fs::read(path).unwrap();
    assert_eq!(read(), Ok(()), "the file that is mutated can be read");
    let mut refused = 0;
    for (seed, mut mutation) in Mutations::of(&original).take(count) {
        if seed % 2 == 0 {
            seal(&mut mutation);
        }
        std::fs::write(path, &mutation).unwrap();
        let start = Instant::now();
        let (result, taken) =
            memory::taken(|| std::panic::catch_unwind(std::panic::AssertUnwindSafe(&read)));
        let took = start.elapsed();
        let allowed = MEMORY[0] + MEMORY[1] * mutation.len();
        if result.is_err() || took > SLOW || taken > allowed {
            let kept = std::env::temp_dir().join(format!("halocline-hostile-{seed}"));
            std::fs::write(&kept, &mutation).unwrap();
            panic!(
                "mutation {seed}: {result:?}, {took:?}, {taken} bytes of {allowed}; it is {}",
                kept.display()
            );
        }
        refused += usize::from(matches!(result, Ok(Err(_))));
    }
    println!("{count} mutations of {}, {refused} refused", path.display());
    assert!(refused > count / 10, "{refused} of {count} were refused");
    std::fs::write(path, original).unwrap();
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Creates a folder with a checkpoint of step 1, saved by two ranks.
fn checkpoint() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let saved = Launcher::local(2).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder.path(), &CheckpointConfig::new())?;
        let mut snapshot = Snapshot::new(&world);
        let model = world.init(|device| LinearConfig::new(7, 5).init(device))?;
        let mut optimizer = AdamConfig::new().init();
        let loss = model.weight.val().sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let model: Linear = optimizer.step(1e-3, model, gradients);
        snapshot.module("model", &model)?;
        snapshot.optimizer("optimizer", &optimizer, &model)?;
        snapshot.data("losses", &TensorData::from([1.0_f64, 0.5]))?;
        snapshot.value("notes", &[("epochs", 3)])?;
        checkpoints.save(1, snapshot, Some(0.5))?;
        checkpoints.wait()
    });
    saved.unwrap();
    let path = folder.path().join("step_000000001");
    (folder, path)
}

/// Reads a whole checkpoint, with and without ranks.
fn read_checkpoint(path: &Path) -> Result<(), String> {
    let checkpoint = Checkpoint::open(path).map_err(text)?;
    for name in checkpoint.names() {
        checkpoint.data(name).map_err(text)?;
    }
    let _: serde_json::Value = checkpoint.value("notes").map_err(text)?;
    let loaded = Launcher::local(1).run(|world| {
        let model: Linear = world.init(|device| LinearConfig::new(7, 5).init(device))?;
        let model = checkpoint.module(&world, "model", model)?;
        let optimizer = AdamConfig::new().init();
        checkpoint.optimizer(&world, "optimizer", optimizer, &model)?;
        checkpoint.tensor::<1, Float>(&world, "losses").map(drop)
    });
    // A panic in a rank's program is reported as an error too, but must not pass here.
    let error = loaded.map_err(text);
    assert!(
        !matches!(&error, Err(error) if error.contains("panicked")),
        "{error:?}"
    );
    error
}

#[test]
fn indexes_of_checkpoints() {
    let (_folder, path) = checkpoint();
    let seal = |index: &mut Vec<u8>| {
        let body = "{\"crc32\":\"00000000\",".len();
        if index.len() > body {
            let sum = format!("{:08x}", crc32fast::hash(&index[body..]));
            index[body - 10..body - 2].copy_from_slice(sum.as_bytes());
        }
    };
    survive(&path.join("index.json"), seal, || read_checkpoint(&path));
}

/// Hostile indexes that random mutations hardly reach.
#[test]
fn indexes_that_were_made_to_do_harm() {
    let (_folder, path) = checkpoint();
    let index = path.join("index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    let body = &text["{\"crc32\":\"00000000\",".len()..];
    let none = |shape: &str| {
        format!("\"tensors\":{{\"none\":{{\"dtype\":\"F32\",\"shape\":{shape},\"pieces\":[]}},")
    };
    let huge = 1_u64 << 46;
    let claims = [
        ("\"tensors\":{", none("[1099511627776,0]")),
        ("\"tensors\":{", none("[0,1099511627776,1099511627776]")),
        (
            "\"rank_00000.safetensors\":",
            format!("\"rank_00002.safetensors\":{huge},\"rank_00000.safetensors\":"),
        ),
        ("\"step\":1", format!("\"step\":{}", u64::MAX)),
        ("\"ranks\":2", format!("\"ranks\":{}", u64::MAX)),
    ];
    for (from, to) in claims {
        assert!(body.contains(from), "{from}");
        let body = body.replacen(from, &to, 1);
        let sum = crc32fast::hash(body.as_bytes());
        std::fs::write(&index, format!("{{\"crc32\":\"{sum:08x}\",{body}")).unwrap();
        let (result, taken) = memory::taken(|| read_checkpoint(&path));
        assert!(taken < 4 << 20, "{from}: {taken} bytes, {result:?}");
    }
}

#[test]
fn files_of_ranks() {
    let (_folder, path) = checkpoint();
    for rank in 0..2 {
        let file = path.join(format!("rank_0000{rank}.safetensors"));
        survive(&file, |_| (), || read_checkpoint(&path));
    }
}

#[test]
fn single_safetensors_files() {
    let (folder, path) = checkpoint();
    let file = folder.path().join("model.safetensors");
    Checkpoint::open(&path)
        .unwrap()
        .export("model", &file)
        .unwrap();
    survive(
        &file,
        |_| (),
        || {
            let checkpoint = Checkpoint::open(&file).map_err(text)?;
            for name in checkpoint.names() {
                checkpoint.data(name).map_err(text)?;
            }
            let record = checkpoint.module_record("").map_err(text)?;
            let module = LinearConfig::new(7, 5).init(&Device::default());
            module.try_load_record(record).map(|_| ()).map_err(text)
        },
    );
}

#[test]
fn records_of_burn() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.bpk");
    let module = || LinearConfig::new(7, 5).init(&Device::default());
    module().into_record().save(&path).unwrap();
    survive(
        &path,
        |_| (),
        || {
            let record = load_record(&path).map_err(text)?;
            module().try_load_record(record).map(|_| ()).map_err(text)
        },
    );
}

#[test]
fn state_dicts_of_pytorch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.pt");
    let original = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/state_dict/weights.pt");
    std::fs::copy(original, &path).unwrap();
    survive(
        &path,
        |_| (),
        || {
            let weights = StateDict::open(&path).map_err(text)?;
            let weights = weights
                .with_unused()
                .with_names(|path| Some(format!("model.attention.out_proj.{path}").into()));
            let loaded = Launcher::local(1).run(|world| {
                let model: Linear = world.init(|device| LinearConfig::new(4, 4).init(device))?;
                weights.load(&world, model).map(drop)
            });
            loaded.map_err(text)
        },
    );
}

/// Creates a folder with a field file, its metadata and its statistics.
fn fields() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    let grid = Grid::with_poles(5, 8).unwrap();
    let mut writer = FieldWriter::create(&path, &grid, &["u", "v"], &WriterConfig::new()).unwrap();
    for step in 0..3 {
        writer
            .append(
                f64::from(step) * 3600.0,
                Array3::from_elem((2, 5, 8), step as f32).view(),
            )
            .unwrap();
    }
    writer.finish().unwrap();
    let file = FieldFile::open(&path).unwrap();
    Statistics::compute(&[file], 1)
        .unwrap()
        .save(folder.path())
        .unwrap();
    (folder, path)
}

#[test]
fn metadata_of_field_files() {
    let (folder, _) = fields();
    let read = || Metadata::load(folder.path()).map(|_| ()).map_err(text);
    survive(&folder.path().join("data.json"), |_| (), read);
}

#[test]
fn statistics() {
    let (folder, _) = fields();
    let read = || Statistics::load(folder.path()).map(|_| ()).map_err(text);
    survive(&folder.path().join("global_stds.npy"), |_| (), read);
}

/// A header that made the library panic: no cells, but extents whose product overflows.
#[test]
fn statistics_without_cells() {
    let (folder, _) = fields();
    let path = folder.path().join("global_stds.npy");
    let mut header = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, ".to_vec();
    header.extend(b"'shape': (0, 4611686018427387904, 4611686018427387904, 1), }");
    header.resize(127, b' ');
    header.push(b'\n');
    std::fs::write(&path, header).unwrap();
    assert!(Statistics::load(folder.path()).is_err());
}

#[test]
fn field_files() {
    let (_folder, path) = fields();
    survive(
        &path,
        |_| (),
        || {
            let file = FieldFile::open(&path).map_err(text)?;
            let shape = file.shape();
            file.read(shape.map(|size| 0..size.min(8)))
                .map(|_| ())
                .map_err(text)
        },
    );
}
