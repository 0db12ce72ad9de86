//! Zarr stores and NetCDF files, of which one file is mutated at a time.

use std::path::{Path, PathBuf};

use halocline_io::{Gaps, Missing, OpenConfig};

use crate::{memory, survive, text};

/// A copy of a store or file of the tests of formats.
fn copy(name: &str) -> (tempfile::TempDir, PathBuf) {
    fn copy_all(from: &Path, to: &Path) {
        if !from.is_dir() {
            std::fs::copy(from, to).unwrap();
            return;
        }
        std::fs::create_dir(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            copy_all(&entry.path(), &to.join(entry.file_name()));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    let stores = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/io/stores");
    copy_all(&stores.join(name), &path);
    (folder, path)
}

/// Opens a store and reads a box of all its channels.
fn read(path: &Path) -> Result<(), String> {
    let config = OpenConfig::new()
        .with_missing(Missing::Allow)
        .with_gaps(Gaps::Allow);
    let fields = config.open(path).map_err(text)?;
    let cells = fields.shape().map(|size| 0..size.min(8));
    fields.read(cells).map_err(text)?;
    fields.fingerprint().map(|_| ()).map_err(text)
}

fn mutate(name: &str, files: &[&str]) {
    let (_folder, path) = copy(name);
    for file in files {
        survive(&path.join(file), |_| (), || read(&path));
    }
}

#[test]
fn metadata_of_zarr_version_3() {
    mutate(
        "v3.zarr",
        &[
            "t2m/zarr.json",
            "z/zarr.json",
            "latitude/zarr.json",
            "time/zarr.json",
        ],
    );
}

#[test]
fn metadata_of_zarr_version_2() {
    mutate(
        "v2.zarr",
        &[
            "t2m/.zarray",
            "z/.zarray",
            "longitude/.zarray",
            "time/.zattrs",
        ],
    );
}

#[test]
fn chunks_of_zarr_stores() {
    // Zstandard in a shard, gzip, Blosc.
    mutate("v3.zarr", &["t2m/c/0/0/0", "z/c/0/0/0/0"]);
    mutate("v2.zarr", &["t2m/0.0.0", "z/0.0.0.0"]);
}

#[test]
fn netcdf_files() {
    for name in ["classic.nc", "packed.nc"] {
        let (_folder, path) = copy(name);
        survive(&path, |_| (), || read(&path));
    }
}

/// Sizes that random mutations hardly reach.
#[test]
fn stores_that_were_made_to_do_harm() {
    let claims = [
        // Nothing but fill values, in a coordinate and in a field.
        (
            "time/.zarray",
            "\"shape\": [\n    4",
            "\"shape\": [\n    99999999999",
        ),
        (
            "t2m/.zarray",
            "\"shape\": [\n    4",
            "\"shape\": [\n    99999999999999999",
        ),
        (
            "t2m/.zarray",
            "\"chunks\": [\n    1",
            "\"chunks\": [\n    13421772",
        ),
        (
            "z/.zarray",
            "\"chunks\": [\n    2",
            "\"chunks\": [\n    13421772",
        ),
    ];
    for (file, from, to) in claims {
        let (_folder, path) = copy("v2.zarr");
        let metadata = std::fs::read_to_string(path.join(file)).unwrap();
        assert!(metadata.contains(from), "{metadata}");
        std::fs::write(path.join(file), metadata.replacen(from, to, 1)).unwrap();
        let (result, taken) = memory::taken(|| read(&path));
        assert!(taken < 4 << 20, "{file}, {to}: {taken} bytes, {result:?}");
    }
}
