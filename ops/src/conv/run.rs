//! A convolution on one rank: its cells, and the order of exchange and computation.

use std::ops::Range;

use burn::backend::{DispatchTensor, TensorMetadata};
use halocline_core::ops::{Boxes, Exchange, blank, cut, of_boxes};
use halocline_core::plan::Transfer;
use halocline_core::{IndexBox, Result};

use super::engine::geometry::{Conv, Dims, three};
use super::engine::winograd::whole_tiles;

/// A convolution on one rank.
#[derive(Clone, Debug)]
pub(crate) struct ConvRun {
    /// Convolution of the cells that this rank's windows reach.
    pub conv: Conv,
    /// Number of tensors whose concatenation along channels is the field.
    pub fields: usize,
    /// Exchange that delivers these cells; `None` if they are the shard.
    pub exchange: Option<Exchange>,
    /// Shape of this rank's result.
    pub output: Vec<usize>,
}

/// Boxes received from other ranks.
pub(super) type Received<'a> = [(&'a Transfer, DispatchTensor)];

impl ConvRun {
    /// Assembles the cells that the windows reach.
    pub(super) fn field(&self, x: DispatchTensor, received: &[DispatchTensor]) -> DispatchTensor {
        let Some(exchange) = &self.exchange else {
            return x;
        };
        let plan = &exchange.forward.plan;
        let transfers = plan.receives.iter().flat_map(|(_, transfers)| transfers);
        let received = transfers.zip(received.iter().cloned()).collect();
        exchange.assemble(x, received)
    }

    /// Sends boxes, computes the results that need no box of another rank while boxes are in
    /// flight, and the other results after the boxes have arrived. `compute` receives the arrived
    /// boxes and the results to compute.
    pub(super) fn in_stages(
        &self,
        fields: &[DispatchTensor],
        mut compute: impl FnMut(&Received<'_>, &[IndexBox]) -> Result<()>,
    ) -> Result<Vec<DispatchTensor>> {
        let whole = IndexBox::whole(&self.output);
        let Some(exchange) = &self.exchange else {
            compute(&[], &[whole])?;
            return Ok(Vec::new());
        };
        let boxes = exchange.send(&fields[0], |transfer| cut_out(fields, &transfer.src))?;
        let late = match self.early(&boxes) {
            None => vec![whole],
            Some(early) => {
                compute(&[], std::slice::from_ref(&early))?;
                whole.around(&early)
            }
        };
        let received = boxes.finish()?;
        compute(&received, &late)?;
        Ok(received.into_iter().map(|(_, cells)| cells).collect())
    }

    /// Results to compute while boxes are in flight; `None` if that does not pay.
    fn early(&self, boxes: &Boxes<'_>) -> Option<IndexBox> {
        let interior = self.exchange.as_ref()?.forward.plan.interior()?;
        let results = spatial(&self.output);
        let mut early = self.conv.results_within(&three_ranges(&interior), results);
        for dim in [1, 2] {
            if self.conv.kernel[dim] > 1 {
                // Winograd's method computes adjacent rows together, and columns, too.
                early[dim] = whole_tiles(&early[dim], results[dim]);
            }
        }
        let mut ranges = IndexBox::whole(&self.output).ranges().to_vec();
        ranges[2..].clone_from_slice(&early[5 - self.output.len()..]);
        let early = IndexBox::new(ranges);
        let all: usize = self.output.iter().product();
        boxes
            .overlap(early.volume() as f64 / all as f64)
            .then_some(early)
    }
}

/// Tensors that are concatenated along channels, each with its first channel.
pub(super) fn channels_of<T: TensorMetadata>(fields: &[T]) -> impl Iterator<Item = (usize, &T)> {
    fields.iter().scan(0, |next, field| {
        let first = *next;
        *next += field.shape()[1];
        Some((first, field))
    })
}

/// Shape of the concatenation of tensors along channels.
pub(super) fn joint_shape<T: TensorMetadata>(fields: &[T]) -> Vec<usize> {
    let mut shape = fields[0].shape().to_vec();
    shape[1] = fields.iter().map(|field| field.shape()[1]).sum();
    shape
}

/// Cuts a box, with all channels, out of the concatenation of tensors along channels.
pub(super) fn cut_out(fields: &[DispatchTensor], cells: &IndexBox) -> DispatchTensor {
    if let [field] = fields {
        return cut(field, cells);
    }
    let shape = cells.shape();
    let parts = channels_of(fields).filter_map(|(first, field)| {
        let channels = field.shape()[1];
        let place = IndexBox::whole(&shape).with_range(1, first..first + channels);
        (place.volume() > 0).then(|| (place, cut(field, &cells.with_range(1, 0..channels))))
    });
    let parts: Vec<_> = parts.collect();
    of_boxes(&fields[0], &shape, None, &parts)
}

/// Splits the gradient of a concatenation along channels into those of its tensors.
pub(super) fn split<T: TensorMetadata>(
    gradient: Option<DispatchTensor>,
    fields: &[T],
) -> Vec<Option<DispatchTensor>> {
    let parts = channels_of(fields).map(|(first, field)| {
        let gradient = gradient.clone()?;
        if fields.len() == 1 {
            return Some(gradient);
        }
        let channels = first..first + field.shape()[1];
        let cells = IndexBox::whole(&gradient.shape()).with_range(1, channels);
        Some(match cells.volume() {
            0 => blank(&gradient, &cells.shape(), None),
            _ => cut(&gradient, &cells),
        })
    });
    parts.collect()
}

/// Spatial extents of a shape, as three.
pub(super) fn spatial(shape: &[usize]) -> Dims {
    three(&shape[2..])
}

/// Spatial ranges of a box, as three.
pub(super) fn three_ranges(cells: &IndexBox) -> [Range<usize>; 3] {
    let mut ranges = [const { 0..1 }; 3];
    let missing = 5 - cells.ranges().len();
    ranges[missing..].clone_from_slice(&cells.ranges()[2..]);
    ranges
}
