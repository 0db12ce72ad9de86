//! Patterns of file names, and files that several names stand for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use halocline_core::Result;

use super::errors::{failed, invalid};

/// Replaces each path whose last part is a pattern by the files and stores that match it, sorted by
/// name. In a pattern, `*` stands for any characters and `?` for one; hidden names match only
/// patterns that begin with a dot.
///
/// # Errors
/// A pattern without a match; a folder that cannot be read; a file that several entries name.
pub(super) fn expanded(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let found: Result<Vec<_>> = paths.iter().map(|path| matching(path)).collect();
    let found = found?.concat();
    check_distinct("data.files", &found)?;
    Ok(found)
}

/// Refuses files of a setting of which two are the same, also by other paths or links.
pub(super) fn check_distinct(setting: &'static str, files: &[PathBuf]) -> Result<()> {
    let mut names: BTreeMap<PathBuf, &PathBuf> = BTreeMap::new();
    for file in files {
        // A file that is missing fails when it is opened.
        let place = std::fs::canonicalize(file).unwrap_or_else(|_| file.clone());
        if let Some(other) = names.insert(place, file) {
            let other = other.display();
            let expected = format!("files that are each named once; {other} is the same file");
            return Err(invalid(setting, file.display(), expected));
        }
    }
    Ok(())
}

/// Returns a path or, if its last part is a pattern, the sorted paths that match it.
fn matching(path: &Path) -> Result<Vec<PathBuf>> {
    let pattern: Vec<char> = match path.file_name().and_then(|name| name.to_str()) {
        Some(name) if name.contains(['*', '?']) && !path.exists() => name.chars().collect(),
        _ => return Ok(vec![path.into()]),
    };
    let parent = path.parent().unwrap_or(Path::new(""));
    let folder = if parent == Path::new("") {
        Path::new(".")
    } else {
        parent
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed(folder))? {
        let name = entry.map_err(failed(folder))?.file_name();
        let characters: Vec<char> = name.to_string_lossy().chars().collect();
        let is_hidden = characters.first() == Some(&'.') && pattern[0] != '.';
        if !is_hidden && matches(&pattern, &characters) {
            found.push(parent.join(name));
        }
    }
    if found.is_empty() {
        let expected = "a pattern that matches a file or a store, in its last part only";
        return Err(invalid("data.files", path.display(), expected));
    }
    found.sort();
    Ok(found)
}

fn matches(pattern: &[char], name: &[char]) -> bool {
    match (pattern, name) {
        ([], _) => name.is_empty(),
        (['*', pattern @ ..], _) => (0..=name.len()).any(|start| matches(pattern, &name[start..])),
        ([one, pattern @ ..], [other, name @ ..]) => {
            (*one == '?' || one == other) && matches(pattern, name)
        }
        (_, []) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_the_files_that_match_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["a2.nc", "a10.nc", "b1.nc", "c.zarr", ".a3.nc"];
        for name in names {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let expand = |names: &[&str]| {
            let paths: Vec<PathBuf> = names.iter().map(|name| folder.path().join(name)).collect();
            let found = expanded(&paths).map_err(|error| error.to_string())?;
            let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_string();
            Ok::<Vec<String>, String>(found.into_iter().map(name).collect())
        };
        assert_eq!(expand(&["*.nc"]).unwrap(), ["a10.nc", "a2.nc", "b1.nc"]);
        assert_eq!(expand(&["c*", "a?.nc"]).unwrap(), ["c.zarr", "a2.nc"]);
        assert_eq!(expand(&[".*.nc"]).unwrap(), [".a3.nc"]);
        // A path without a pattern need not exist.
        assert_eq!(expand(&["d.nc"]).unwrap(), ["d.nc"]);
        let error = expand(&["d*.nc"]).unwrap_err();
        assert!(error.contains("d*.nc, expected a pattern that"), "{error}");
        let name = folder.path().file_name().unwrap().to_str().unwrap();
        for other in ["a*", &format!("../{name}/a2.nc")] {
            let error = expand(&["a2.nc", other]).unwrap_err();
            let told = "a2.nc, expected files that are each named once";
            assert!(error.contains(told), "{error}");
        }
    }
}
