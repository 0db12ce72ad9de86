//! Batches of a loader on a mesh, for burn's training loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;
use halocline_io::{Batch, FieldLoader};

/// Adapter of a [`FieldLoader`] to burn's [`DataLoader`]: each iteration is the loader's next
/// epoch. [`LaunchOn`](super::LaunchOn) has an example.
#[derive(Debug)]
pub struct FieldBatches {
    loader: FieldLoader,
    /// Epoch of the next iteration.
    epoch: AtomicUsize,
}

impl FieldBatches {
    /// Makes batches from epoch 0 on.
    pub fn new(loader: FieldLoader) -> Arc<Self> {
        Self::from_epoch(loader, 0)
    }

    /// Makes batches from a later epoch on, to resume training. Pass the epoch given to
    /// [`SupervisedTraining::checkpoint`](burn_train::SupervisedTraining::checkpoint), which is the
    /// number of epochs already trained.
    pub fn from_epoch(loader: FieldLoader, epoch: usize) -> Arc<Self> {
        Arc::new(Self {
            loader,
            epoch: AtomicUsize::new(epoch),
        })
    }
}

/// Panics, as batches are already on the mesh's devices, split by its placements.
fn fixed(method: &str) -> ! {
    panic!(
        "FieldBatches::{method}: the batches of a FieldLoader are fixed to its mesh; train by launch_on"
    )
}

impl DataLoader<Batch> for FieldBatches {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed);
        Box::new(Batches {
            batches: self.loader.epoch(epoch),
            taken: 0,
            total: self.loader.batches(),
        })
    }

    fn num_items(&self) -> usize {
        self.loader.batches()
    }

    fn to_device(&self, _: &Device) -> Arc<dyn DataLoader<Batch>> {
        fixed("to_device")
    }

    fn slice(&self, _: usize, _: usize) -> Arc<dyn DataLoader<Batch>> {
        fixed("slice")
    }
}

struct Batches<I> {
    batches: I,
    taken: usize,
    total: usize,
}

impl<I: Iterator<Item = halocline_core::Result<Batch>>> Iterator for Batches<I> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        self.taken += 1;
        Some(batch.map_err(DatasetError::new))
    }
}

impl<I: Iterator<Item = halocline_core::Result<Batch>>> DataLoaderIterator<Batch> for Batches<I> {
    fn progress(&self) -> Progress {
        Progress::new(self.taken, self.total, Some("batches".into()))
    }
}
