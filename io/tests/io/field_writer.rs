use halocline_io::{FieldFile, FieldWriter, Grid, WriterConfig};
use hdf5_metno::types::FixedAscii;
use hdf5_metno::{ObjectReference1, ReferencedObject, types::VarLenArray};

use crate::{edit, grid, listing, numbered, numbered_file, write, zeros};

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let mut writer = FieldWriter::create(&path, &grid(3, 4), &["a"], &WriterConfig::new()).unwrap();
    writer.append(0.0, zeros([1, 3, 4]).view()).unwrap();
    assert_eq!(listing(folder.path()).len(), 1, "the temporary file");
    assert!(!path.exists());
    drop(writer);
    assert!(listing(folder.path()).is_empty());
}

#[test]
fn a_writer_that_fails_leaves_the_old_file() {
    let (folder, path) = numbered_file([2, 1, 3, 4]);
    let before = std::fs::read(&path).unwrap();
    let mut writer = FieldWriter::create(&path, &grid(3, 4), &["a"], &WriterConfig::new()).unwrap();
    writer.append(5.0, zeros([1, 3, 4]).view()).unwrap();
    let shape = writer
        .append(6.0, zeros([1, 4, 3]).view())
        .unwrap_err()
        .to_string();
    assert_eq!(
        shape,
        format!(
            "{}: dataset \"fields\": found a field of [1, 4, 3] at time index 1, expected [1, 3, 4] [channel, lat, lon]",
            path.display()
        )
    );
    let time = writer
        .append(5.0, zeros([1, 3, 4]).view())
        .unwrap_err()
        .to_string();
    assert_eq!(
        time,
        format!(
            "{}: dataset \"timestamp\"[1]: found 5, expected a time after 5, in seconds",
            path.display()
        )
    );
    drop(writer);
    assert_eq!(listing(folder.path()), ["2018.h5"]);
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn finishing_replaces_the_old_file() {
    let (folder, path) = numbered_file([2, 1, 3, 4]);
    write(&path, &numbered([1, 1, 3, 4], 5.0), &WriterConfig::new());
    assert_eq!(listing(folder.path()), ["2018.h5"]);
    assert_eq!(FieldFile::open(&path).unwrap().shape(), [1, 1, 3, 4]);
}

#[cfg(unix)]
#[test]
fn the_file_is_as_readable_as_any_other() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, path) = numbered_file([1, 1, 3, 4]);
    let other = folder.path().join("other");
    std::fs::write(&other, "").unwrap();
    let mode = |path| std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&path), mode(&other));
}

#[test]
fn a_file_needs_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let writer = FieldWriter::create(&path, &grid(3, 4), &["a"], &WriterConfig::new()).unwrap();
    let error = writer.finish().unwrap_err().to_string();
    assert!(
        error.ends_with("found no time, expected at least one append() before finish()"),
        "{error}"
    );
    assert!(listing(folder.path()).is_empty());
}

#[test]
fn arguments_are_checked_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let create = |channels: &[&str], config: WriterConfig| {
        FieldWriter::create(&path, &grid(3, 4), channels, &config)
            .unwrap_err()
            .to_string()
    };
    let config = WriterConfig::new();
    assert_eq!(
        create(&["a", "b", "a"], config.clone()),
        "channels: got [\"a\", \"b\", \"a\"], expected at least one name, and no name twice or empty"
    );
    assert!(create(&[], config.clone()).starts_with("channels: got []"));
    assert_eq!(
        create(&["a"], config.clone().with_deflate(10)),
        "deflate: got 10, expected a level from 0 to 9"
    );
    assert!(
        create(&["a"], config.with_chunk(Some([1, 0, 2, 2])))
            .starts_with("chunk: got [1, 0, 2, 2]")
    );
    assert!(listing(folder.path()).is_empty());
    let nowhere = folder.path().join("no/run.h5");
    let error = FieldWriter::create(&nowhere, &grid(3, 4), &["a"], &WriterConfig::new());
    let error = error.unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("{}: ", nowhere.display())),
        "{error}"
    );
    assert!(error.contains("No such file"), "{error}");
}

#[test]
fn positions_and_areas_of_cells_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cells.h5");
    let cells = Grid::unstructured(vec![60.0, 0.0, -30.0], vec![10.0, 350.0, 90.0]).unwrap();
    let cells = cells.with_cell_areas(vec![1.0, 3.0, 2.0]).unwrap();
    let mut writer = FieldWriter::create(&path, &cells, &["a"], &WriterConfig::new()).unwrap();
    writer.append(0.0, zeros([1, 1, 3]).view()).unwrap();
    writer.finish().unwrap();
    assert_eq!(FieldFile::open(&path).unwrap().grid(), &cells);
    // All lie along the dim of the columns, as fields do.
    edit(&path, |file| {
        let columns = file.dataset("lon").unwrap();
        assert_eq!(columns.attr("REFERENCE_LIST").unwrap().size(), 4);
        let lat = file.dataset("cell_latitude").unwrap();
        lat.write(&[60.0_f64, 95.0, -30.0]).unwrap();
    });
    let error = FieldFile::open(&path).unwrap_err().to_string();
    assert!(
        error.contains("latitude 95, longitude 350 of cell 1"),
        "{error}"
    );
}

#[test]
fn fields_and_scales_refer_to_each_other() {
    #[derive(hdf5_metno::H5Type, Clone, Copy)]
    #[repr(C)]
    struct Back {
        dataset: ObjectReference1,
        dimension: i32,
    }
    let (_folder, path) = numbered_file([2, 3, 4, 5]);
    let file = hdf5_metno::File::open(&path).unwrap();
    let name_of = |reference: &ObjectReference1| match file.dereference(reference).unwrap() {
        ReferencedObject::Dataset(dataset) => dataset.name(),
        other => panic!("{other:?}"),
    };
    let fields = file.dataset("fields").unwrap();
    let list: Vec<VarLenArray<ObjectReference1>> =
        fields.attr("DIMENSION_LIST").unwrap().read_raw().unwrap();
    let scales: Vec<String> = list
        .iter()
        .flat_map(|scales| scales.iter().map(name_of))
        .collect();
    assert_eq!(scales, ["/timestamp", "/channel", "/lat", "/lon"]);
    for (dim, scale) in scales.iter().enumerate() {
        let scale = file.dataset(scale).unwrap();
        let text = |name: &str| {
            let text: FixedAscii<16> = scale.attr(name).unwrap().read_scalar().unwrap();
            text.to_string()
        };
        assert_eq!(text("CLASS"), "DIMENSION_SCALE");
        assert_eq!(text("NAME"), scale.name()[1..]);
        let back: Vec<Back> = scale.attr("REFERENCE_LIST").unwrap().read_raw().unwrap();
        assert_eq!(back.len(), 1);
        assert_eq!(
            (name_of(&back[0].dataset).as_str(), back[0].dimension),
            ("/fields", dim as i32)
        );
    }
}
