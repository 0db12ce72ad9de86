//! Patterns of file names.

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
    let mut found: Vec<PathBuf> = Vec::new();
    for path in paths {
        for path in matching(path)? {
            if found.contains(&path) {
                let expected = "files that each match one entry";
                return Err(invalid("data.files", path.display(), expected));
            }
            found.push(path);
        }
    }
    Ok(found)
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
        let error = expand(&["a2.nc", "a*"]).unwrap_err();
        assert!(error.contains("a2.nc, expected files that each"), "{error}");
    }
}
