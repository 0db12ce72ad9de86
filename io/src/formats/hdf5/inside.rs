//! Refusal of links and datasets of an HDF5 file whose values lie in other files, which might be
//! any file that the process can read.

use std::path::Path;

use hdf5_metno::dataset::Layout;
use hdf5_metno::{Dataset, File, LinkType};

use crate::{Error, Result};

const EXPECTED: &str = "a dataset with its values in this file, as one with them elsewhere could read any file \
                        of this machine; copy them into it, or open the files that have them, \
                        of which a FieldDataset takes several";

/// Lists the members of the root group, by name.
pub(crate) fn members(path: &Path, file: &File) -> Result<Vec<(String, LinkType)>> {
    let mut members: Vec<(String, LinkType)> = Vec::new();
    let visited = file.iter_visit_default(|name, link| {
        members.push((name.into(), link.link_type));
        Ok(())
    });
    visited.map_err(|e| Error::data(path, "/", e))?;
    members.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(members)
}

/// Opens a dataset of the root group that stores its values in the file itself.
///
/// # Errors
/// A link that may lead to another file; a dataset with its values elsewhere.
pub(crate) fn open(
    path: &Path,
    file: &File,
    name: &'static str,
    link: LinkType,
) -> Result<Dataset> {
    let outside = |found: &str| Error::shape(path, name, found, EXPECTED);
    match link {
        LinkType::Hard => {}
        LinkType::External => return Err(outside("a link to another file")),
        // The target may lie behind an external link.
        LinkType::Soft => return Err(outside("a soft link")),
    }
    let error = |e| Error::data(path, name, e);
    let dataset = file.dataset(name).map_err(error)?;
    let created = dataset.create_plist().map_err(error)?;
    if created.get_layout().map_err(error)? == Layout::Virtual {
        return Err(outside("a virtual dataset"));
    }
    if !created.get_external().map_err(error)?.is_empty() {
        return Err(outside("values in external files"));
    }
    Ok(dataset)
}
