//! Zarr stores and NetCDF files, with one file mutated at a time.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use halocline_io::{Fields, Gaps, Missing, OpenConfig, open};

use crate::{memory, survive, text};

/// Copies a store or file of the format tests.
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

/// Opens the fields of a store of the format tests.
pub(crate) fn source() -> Box<dyn Fields> {
    let stores = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/io/stores");
    open(stores.join("v2.zarr")).unwrap()
}

/// Opens a store and reads a box of all its channels.
pub(crate) fn read(path: &Path) -> Result<(), String> {
    let config = OpenConfig::new()
        .with_missing(Missing::Allow)
        .with_gaps(Gaps::Allow);
    let fields = config.open(path).map_err(text)?;
    let cells = fields.shape().map(|size| 0..size.min(8));
    fields.read(cells).map_err(text)?;
    fields.fingerprint().map(|_| ()).map_err(text)
}

/// Defines a test for each mutated file of a store.
macro_rules! mutations {
    ($($test:ident: $store:literal, $file:literal;)*) => {
        $(#[test]
        fn $test() {
            let (_folder, path) = copy($store);
            survive(&path.join($file), |_| (), || read(&path));
        })*
    };
}

mutations! {
    zarr_3_shards: "v3.zarr", "t2m/zarr.json";
    zarr_3_chunks: "v3.zarr", "z/zarr.json";
    zarr_3_latitude: "v3.zarr", "latitude/zarr.json";
    zarr_3_time: "v3.zarr", "time/zarr.json";
    zarr_2_chunks: "v2.zarr", "t2m/.zarray";
    zarr_2_levels: "v2.zarr", "z/.zarray";
    zarr_2_longitude: "v2.zarr", "longitude/.zarray";
    zarr_2_time: "v2.zarr", "time/.zattrs";
    zarr_2_attributes: "v2.zarr", "t2m/.zattrs";
    zstandard_in_a_shard: "v3.zarr", "t2m/c/0/0/0";
    gzip: "v3.zarr", "z/c/0/0/0/0";
    blosc_with_lz4: "v2.zarr", "t2m/0.0.0";
    blosc_with_zstandard: "v2.zarr", "z/0.0.0.0";
}

#[test]
fn netcdf_3() {
    let (_folder, path) = copy("classic.nc");
    survive(&path, |_| (), || read(&path));
}

#[test]
fn netcdf_4() {
    let (_folder, path) = copy("packed.nc");
    survive(&path, |_| (), || read(&path));
}

/// Hostile sizes that random mutations hardly reach.
#[test]
fn stores_that_were_made_to_do_harm() {
    let claims = [
        // Only fill values, in a coordinate and in a field.
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

#[test]
fn shards_of_too_many_chunks_are_refused() {
    let opened = |change: &dyn Fn(&mut Value)| {
        let (_folder, path) = copy("v3.zarr");
        let file = path.join("t2m/zarr.json");
        let mut metadata = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        change(&mut metadata);
        std::fs::write(&file, metadata.to_string()).unwrap();
        read(&path).unwrap_err()
    };
    let shard = |extents: [u64; 3]| {
        move |metadata: &mut Value| {
            metadata["chunk_grid"]["configuration"]["chunk_shape"] = json!(extents);
        }
    };
    let inner = |metadata: &mut Value, chunk: [u64; 3]| {
        metadata["codecs"][0]["configuration"]["chunk_shape"] = json!(chunk);
    };
    let error = opened(&|metadata| {
        shard([1 << 20, 1 << 10, 1 << 20])(metadata);
        inner(metadata, [1, 1, 1]);
    });
    assert!(
        error.contains("shards of [1048576, 1024, 1048576]"),
        "{error}"
    );
    let error = opened(&|metadata| {
        shard([1 << 10, 1 << 10, 1 << 10])(metadata);
        inner(metadata, [1, 1, 1]);
    });
    assert!(
        error.contains("at most 4194304 chunks in a shard"),
        "{error}"
    );
    let error = opened(&|metadata| {
        let codecs = metadata["codecs"].clone();
        metadata["codecs"][0]["configuration"]["codecs"] = codecs;
    });
    assert!(error.contains("shards in shards"), "{error}");
}
