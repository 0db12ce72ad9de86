use std::path::{Path, PathBuf};

use tempfile::{Builder, TempPath};

use crate::{Error, Result};

/// A file that is written under a temporary name beside its place, and takes that place when it is whole.
///
/// Dropped before [`commit`](Staged::commit) it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Staged {
    temporary: TempPath,
    target: PathBuf,
}

impl Staged {
    /// An empty file in the folder of `target`.
    pub(crate) fn new(target: &Path) -> Result<Self> {
        let folder = match target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let mut builder = Builder::new();
        builder.prefix(".halocline-").suffix(".partial");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // Temporary files are private by default; this one becomes an ordinary file, as the umask says.
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        let file = builder
            .tempfile_in(folder)
            .map_err(|e| Error::io(target, e))?;
        Ok(Self {
            temporary: file.into_temp_path(),
            target: target.into(),
        })
    }

    /// Where to write.
    pub(crate) fn path(&self) -> &Path {
        &self.temporary
    }

    /// Where the file will be.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// Gives the file its name, once its bytes are on the disk.
    pub(crate) fn commit(self) -> Result<()> {
        let Self { temporary, target } = self;
        std::fs::File::open(&temporary)
            .and_then(|file| file.sync_all())
            .map_err(|e| Error::io(&target, e))?;
        temporary
            .persist(&target)
            .map_err(|e| Error::io(&target, e))
    }
}
