//! Background reading of batches.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use burn::tensor::TensorData;
use halocline_core::IndexBox;
use ndarray::Array3;
use rayon::prelude::*;

use crate::dataset::sample::Part;
use crate::{Error, FieldDataset, Result};

/// Data of each part of a batch that a rank reads, and the mask of its values if missing ones are
/// filled.
pub(crate) type HostBatch = [(TensorData, Option<TensorData>); 3];

/// Samples of a batch, and the boxes of its parts to read.
pub(crate) type Job = (Vec<usize>, [IndexBox; 3]);

/// Receiver of batches read by a background thread.
#[derive(Debug)]
pub(crate) struct ReadAhead(Receiver<Result<HostBatch>>);

impl ReadAhead {
    /// Starts a thread that keeps up to `depth` batches ready, in addition to the one being read.
    ///
    /// The thread ends after the last batch, at the first error, or when the receiver is dropped.
    pub(crate) fn start(dataset: Arc<FieldDataset>, jobs: Vec<Job>, depth: usize) -> Self {
        let (sender, receiver) = sync_channel(depth.min(jobs.len()));
        std::thread::spawn(move || {
            for (samples, cells) in jobs {
                let read = read_batch(&dataset, &samples, &cells);
                let failed = read.is_err();
                if sender.send(read).is_err() || failed {
                    return;
                }
            }
        });
        Self(receiver)
    }

    /// Waits for the next batch.
    pub(crate) fn next(&self) -> Result<HostBatch> {
        let ended = || Error::argument("reader", "a thread that has ended", "a batch");
        self.0.recv().unwrap_or_else(|_| Err(ended()))
    }
}

pub(crate) fn read_batch(
    dataset: &FieldDataset,
    samples: &[usize],
    boxes: &[IndexBox; 3],
) -> Result<HostBatch> {
    let fills = dataset.fills()?;
    let read = |part: Part| {
        let cells = &boxes[part as usize];
        let read = |sample, cells| dataset.read(sample, part, cells);
        let mut values = read_box(samples, cells, read)?;
        // Forcings are filled as they are read.
        let mask = (fills && part != Part::Forcing)
            .then(|| TensorData::new(fill(&mut values), cells.shape()));
        Ok::<_, Error>((TensorData::new(values, cells.shape()), mask))
    };
    let [input, forcing, target] = Part::ALL.map(read);
    Ok([input?, forcing?, target?])
}

/// Replaces NaN by zero and returns the mask of the other values, in one pass.
fn fill(values: &mut [f32]) -> Vec<f32> {
    let fill = |value: &mut f32| {
        if value.is_nan() {
            *value = 0.0;
            0.0
        } else {
            1.0
        }
    };
    values.par_iter_mut().map(fill).collect()
}

/// Reads a box of [batch, channel, lat, lon].
fn read_box(
    samples: &[usize],
    cells: &IndexBox,
    read: impl Fn(usize, [Range<usize>; 3]) -> Result<Array3<f32>>,
) -> Result<Vec<f32>> {
    let [batch, channels, rows, columns] = cells.ranges() else {
        unreachable!("a batch has 4 dims");
    };
    let mut values = Vec::new();
    for &sample in &samples[batch.clone()] {
        let field = read(sample, [channels.clone(), rows.clone(), columns.clone()])?;
        if batch.len() == 1 && field.is_standard_layout() {
            let (mut values, offset) = field.into_raw_vec_and_offset();
            values.drain(..offset.unwrap_or(0));
            values.truncate(cells.volume());
            return Ok(values);
        }
        values.reserve_exact(cells.volume() - values.len());
        match field.as_slice() {
            Some(field) => values.extend_from_slice(field),
            None => values.extend(field.iter()),
        }
    }
    Ok(values)
}
