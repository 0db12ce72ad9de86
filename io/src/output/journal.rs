//! Journal of a conversion, from which it is resumed: the number of blocks that are on disk.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::staged_folder::StagedFolder;
use crate::files::durable;
use crate::files::staged::remove_if_there;
use crate::{Error, Result};

const NAME: &str = ".journal";
/// Maximum size of a journal, in bytes.
const MOST: u64 = 1 << 24;

/// Journal in a staged folder: what is converted, and how many of the blocks are on disk.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    entry: Entry,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    plan: String,
    done: usize,
    /// Checksum of the other fields.
    crc32: u32,
}

impl Entry {
    fn new(plan: String, done: usize) -> Self {
        let crc32 = crc32fast::hash(format!("{done} {plan}").as_bytes());
        Self { plan, done, crc32 }
    }
}

impl Journal {
    /// Reads the journal of an earlier run of the same plan, which has `blocks` blocks. Without
    /// one, empties the folder.
    pub(crate) fn open(folder: &StagedFolder, plan: String, blocks: usize) -> Result<Self> {
        let path = folder.path().join(NAME);
        let is_intact = |entry: &Entry| {
            entry.done <= blocks && entry.crc32 == Entry::new(plan.clone(), entry.done).crc32
        };
        let entry = match read(&path).filter(is_intact) {
            Some(entry) => entry,
            None => {
                folder.clear()?;
                Entry::new(plan, 0)
            }
        };
        Ok(Self { path, entry })
    }

    pub(crate) fn done(&self) -> usize {
        self.entry.done
    }

    /// Records that `done` blocks are on disk. Their files and names must be synced before.
    pub(crate) fn record(&mut self, done: usize) -> Result<()> {
        self.entry = Entry::new(std::mem::take(&mut self.entry.plan), done);
        let new = self.path.with_extension("new");
        durable::write(
            &new,
            &serde_json::to_vec(&self.entry).expect("text and a number"),
        )?;
        fs::rename(&new, &self.path).map_err(|error| Error::io(&self.path, error))?;
        durable::sync_folder(durable::parent(&self.path))
    }

    /// Removes the journal from a folder that is complete.
    pub(crate) fn remove(self) -> Result<()> {
        remove_if_there(&self.path).map_err(|error| Error::io(&self.path, error))
    }
}

/// Reads the entry of a journal. An unreadable journal counts as none.
fn read(path: &Path) -> Option<Entry> {
    let mut bytes = Vec::new();
    let file = File::open(path).ok()?;
    file.take(MOST).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}
