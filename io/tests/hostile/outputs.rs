//! Damaged output of the store writer, and damaged journals of conversions.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use halocline_io::{ConvertConfig, Fields, OpenConfig, convert};

use crate::mutation::Mutations;
use crate::stores::{read, source};
use crate::{count, survive};

fn bits(fields: &dyn Fields) -> Vec<u32> {
    let values = fields.read(fields.shape().map(|size| 0..size)).unwrap();
    values.iter().map(|value| value.to_bits()).collect()
}

/// Converts a store to chunks for 2 × 2 ranks.
fn converted() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("converted.zarr");
    let config = ConvertConfig::new().with_ranks([2, 2]);
    convert(&source(), &path, &config, |_| ()).unwrap();
    (folder, path)
}

#[test]
fn blosc_with_a_checksum() {
    let (_folder, path) = converted();
    // The checksum of version 3 is in the last four bytes and must be renewed.
    let seal = |bytes: &mut Vec<u8>| {
        if let Some(end) = bytes.len().checked_sub(4) {
            let sum = crc32c(&bytes[..end]).to_le_bytes();
            bytes[end..].copy_from_slice(&sum);
        }
    };
    let chunk = path.join("t2m/c/0/0/0");
    let mut sealed = std::fs::read(&chunk).unwrap();
    let original = sealed.clone();
    seal(&mut sealed);
    assert_eq!(sealed, original, "it is the checksum of the format");
    survive(&chunk, seal, || read(&path));
}

#[test]
fn metadata_of_a_written_store() {
    let (_folder, path) = converted();
    survive(&path.join("z/zarr.json"), |_| (), || read(&path));
}

/// The list of variables only determines their order.
#[test]
fn a_list_of_variables_hides_none() {
    let (_folder, path) = converted();
    let list = path.join("zarr.json");
    let original = std::fs::read(&list).unwrap();
    let names = |path: &Path| {
        let mut names = OpenConfig::new().open(path).unwrap().channels().to_vec();
        names.sort();
        names
    };
    let expected = names(&path);
    for (seed, mutation) in Mutations::of(&original).take(count()) {
        std::fs::write(&list, mutation).unwrap();
        assert_eq!(names(&path), expected, "mutation {seed}");
    }
}

/// A conversion with a damaged journal starts over or resumes, and writes the right values.
#[test]
fn records_of_conversions() {
    let source = source();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("converted.zarr");
    let config = ConvertConfig::new().with_memory(40 * 24);
    let stop = || {
        convert(&source, &path, &config, |state| {
            assert!(state.done < 2, "stop")
        })
    };
    catch_unwind(AssertUnwindSafe(stop)).unwrap_err();
    let partial = folder.path().join(".halocline-converted.zarr.partial");
    let original = std::fs::read(partial.join(".journal")).unwrap();
    let expected = bits(&source);
    // Each run converts a store, with about 40 ms of file operations.
    for (seed, mutation) in Mutations::of(&original).take(count() / 30) {
        std::fs::create_dir_all(&partial).unwrap();
        std::fs::write(partial.join(".journal"), mutation).unwrap();
        let done = convert(&source, &path, &config, |_| ()).unwrap();
        let channels = source.channels().to_vec();
        let config = OpenConfig::new().with_channels(Some(channels));
        // The files of the first blocks are missing, so the values are right only if the journal
        // was not trusted.
        if done.resumed == 0 {
            assert_eq!(
                bits(&config.open(&path).unwrap()),
                expected,
                "mutation {seed}"
            );
        } else {
            assert_eq!(
                std::str::from_utf8(&original)
                    .unwrap()
                    .matches("\"done\":1")
                    .count(),
                1
            );
            assert_eq!(done.resumed, 1, "mutation {seed}");
        }
        std::fs::remove_dir_all(&path).unwrap();
    }
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |sum: u32, byte: &u8| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            (sum >> 1) ^ (0x82f6_3b78 & (sum & 1).wrapping_neg())
        })
    };
    !bytes.iter().fold(!0, step)
}
