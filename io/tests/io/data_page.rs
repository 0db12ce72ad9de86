//! Runs the Python programs in docs/data.md.

use std::path::{Path, PathBuf};
use std::process::Command;

use halocline_io::FieldFile;

/// Finds a Python with h5py: the one that `make test` installs, or the system's.
fn python() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?;
    let candidates = [target.join("python/bin/python"), "python3".into()];
    candidates.into_iter().find(|python| {
        let found = Command::new(python).args(["-c", "import h5py"]).output();
        found.is_ok_and(|output| output.status.success())
    })
}

#[test]
fn the_python_of_the_page_on_data_writes_a_field_file() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/data.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, program) = page.split_once("```python\n").unwrap();
    let (program, _) = program.split_once("```").unwrap();
    let Some(python) = python() else {
        println!("not run: there is no Python with h5py; `make test` makes one");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(python);
    let run = command.args(["-c", program]).current_dir(&folder);
    let output = run.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let file = FieldFile::open(folder.path().join("2018.h5")).unwrap();
    assert_eq!(file.shape(), [4, 2, 7, 12]);
    // 2018-01-01, by `date -u -d 2018-01-01 +%s`.
    assert_eq!(file.times()[0], 1_514_764_800.0);
    assert_eq!(file.time_step().unwrap(), 21600.0);
    assert_eq!(file.channels(), ["u10m", "v10m"]);
    assert_eq!(
        (file.grid().lat()[6], file.grid().lon()[11]),
        (-90.0, 330.0)
    );
    let field = file.read([3..4, 0..2, 0..7, 0..12]).unwrap();
    assert!(field.iter().all(|value| *value == 0.0));
}
