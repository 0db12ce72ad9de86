//! Compressed chunks of Zarr stores and NetCDF files.

use std::path::Path;
use std::sync::Arc;

use halocline_io::{Gaps, OpenConfig, open};
use hdf5_metno::types::FixedAscii;
use hdf5_metno::{File, FileBuilder};
use ndarray::Array2;
use serde_json::{Value, json};
use zarrs::array::Array;
use zarrs::metadata::ArrayMetadata;
use zarrs::storage::ReadableStorageTraits;
use zarrs::storage::store::MemoryStore;

use crate::formats::copy;

#[test]
fn zstandard_with_a_checksum_is_read() {
    let codecs = json!([
        { "name": "bytes", "configuration": { "endian": "little" } },
        { "name": "zstd", "configuration": { "level": 3, "checksum": false } },
        { "name": "crc32c" },
    ]);
    for sharded in [false, true] {
        let (_folder, path) = copy("v3.zarr");
        let file = path.join("t2m/zarr.json");
        let mut metadata: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        if sharded {
            metadata["codecs"][0]["configuration"]["codecs"] = codecs.clone();
        } else {
            metadata["codecs"] = codecs.clone();
        }
        std::fs::write(&file, metadata.to_string()).unwrap();
        let metadata: ArrayMetadata = serde_json::from_value(metadata).unwrap();
        let store = Arc::new(MemoryStore::new());
        let array = Array::new_with_metadata(store.clone(), "/t2m", metadata).unwrap();
        for time in 0..2 {
            let chunk = [time, 0, 0];
            // [time, lat, lon] of the chunk, which has one row more than the field.
            let values: Vec<f32> = (0..2 * 6 * 8).map(|cell| cell as f32).collect();
            array.store_chunk(&chunk, values).unwrap();
            let key = array.chunk_key(&chunk);
            let bytes = store.get(&key).unwrap().unwrap();
            std::fs::write(path.join(key.as_str()), bytes).unwrap();
        }
        let config = OpenConfig::of_channels(&["t2m"]).with_gaps(Gaps::Allow);
        let fields = config.open(&path).unwrap();
        let found = fields.read([0..4, 0..1, 0..5, 0..8]).unwrap();
        for ((time, _, row, column), value) in found.indexed_iter() {
            let expected = (time % 2 * 48 + row * 8 + column) as f32;
            assert_eq!(*value, expected, "{sharded}: [{time}, {row}, {column}]");
        }
    }
}

/// Writes a field [5, 8] in one chunk with the deflate filter, uncompressed.
fn write_deflated(path: &Path, field: &Array2<f32>) {
    let file = FileBuilder::new()
        .with_fapl(|access| access.libver_earliest())
        .create(path)
        .unwrap();
    for (name, first, step, count, units) in [
        ("latitude", 90.0, -45.0, 5, "degrees_north"),
        ("longitude", 0.0, 45.0, 8, "degrees_east"),
    ] {
        let degrees: Vec<f64> = (0..count).map(|i| first + step * f64::from(i)).collect();
        let scale = file.new_dataset_builder().with_data(&degrees);
        let scale = scale.create(name).unwrap();
        let attribute = scale.new_attr::<FixedAscii<16>>().create("units").unwrap();
        let units = FixedAscii::<16>::from_ascii(units).unwrap();
        attribute.write_scalar(&units).unwrap();
    }
    let builder = file.new_dataset_builder().with_data(field);
    builder.chunk([5, 8]).deflate(0).create("t2m").unwrap();
    file.close().unwrap();
}

/// Replaces the filter ID of the field and the data of its chunk.
fn set_filter(path: &Path, number: u16, mut data: Vec<u8>) {
    let chunk = File::open(path).unwrap().dataset("t2m").unwrap();
    let chunk = chunk.chunk_info(0).unwrap();
    let [start, size] = [chunk.addr, chunk.size].map(|bytes| bytes as usize);
    // Zstandard skips frames of this kind, and LZ4 all data after its last block.
    let rest = size - data.len() - 8;
    data.extend(0x184d_2a50_u32.to_le_bytes());
    data.extend((rest as u32).to_le_bytes());
    data.resize(size, 0);
    let mut bytes = std::fs::read(path).unwrap();
    bytes[start..start + size].copy_from_slice(&data);
    // The ID is eight bytes before the name.
    let name = bytes.windows(8).position(|text| text == b"deflate\0");
    let place = name.unwrap() - 8;
    assert_eq!(bytes[place..place + 2], 1_u16.to_le_bytes());
    bytes[place..place + 2].copy_from_slice(&number.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn chunks_of_netcdf_4_are_read_by_zstandard() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t2m.nc");
    let field = Array2::from_shape_fn((5, 8), |(row, _)| row as f32);
    write_deflated(&path, &field);
    let bytes: Vec<u8> = field.iter().flat_map(|value| value.to_le_bytes()).collect();
    let data = zstd::bulk::compress(&bytes, 3).unwrap();
    set_filter(&path, 32015, data);
    let found = open(&path).unwrap().read([0..1, 0..1, 0..5, 0..8]).unwrap();
    assert!(found.iter().eq(&field), "{found}");
}

/// The block of the LZ4 format has the first value, a match of 148 bytes with it, and the last two.
#[test]
fn chunks_of_netcdf_4_are_read_by_lz4() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t2m.nc");
    let field = Array2::from_elem((5, 8), 1.5_f32);
    write_deflated(&path, &field);
    let value = 1.5_f32.to_le_bytes();
    let mut block = vec![0x4f];
    block.extend(value);
    block.extend([4, 0, 148 - 4 - 15, 0x80]);
    block.extend([value, value].concat());
    let mut data = 160_u64.to_be_bytes().to_vec();
    data.extend(160_u32.to_be_bytes());
    data.extend((block.len() as u32).to_be_bytes());
    data.extend(block);
    set_filter(&path, 32004, data);
    let found = open(&path).unwrap().read([0..1, 0..1, 0..5, 0..8]).unwrap();
    assert!(found.iter().eq(&field), "{found}");
}

#[test]
fn other_filters_of_netcdf_4_are_named_when_the_file_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t2m.nc");
    write_deflated(&path, &Array2::zeros((5, 8)));
    assert_eq!(open(&path).unwrap().channels(), ["t2m"]);
    set_filter(&path, 32001, Vec::new());
    let error = open(&path).unwrap_err().to_string();
    for part in ["\"t2m\"", "32001 (Blosc)", "rewrite it with zlib"] {
        assert!(error.contains(part), "{part} in {error}");
    }
}
