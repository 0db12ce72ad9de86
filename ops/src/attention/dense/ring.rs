//! The ring of ranks that hold the parts of a dim.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use halocline_core::{Batch, Communicator, Expected, InFlight, Layout, Operation, Payload, Result};

/// The ranks that hold the parts of a dim, and who comes next.
#[derive(Clone, Debug)]
pub(super) struct Ring {
    /// The rank of every part.
    ranks: Vec<usize>,
    /// The cells of every part.
    pub parts: Vec<Range<usize>>,
    /// This rank's part.
    own: usize,
}

impl Ring {
    /// The ring of the ranks that hold the parts of a dim beside this rank's part of all other dims.
    pub(super) fn new(layout: &Layout, dim: usize, position: usize) -> Self {
        let mesh = layout.mesh();
        let axes = layout.axes_of(dim);
        let own = mesh.coords(position);
        let beside = |other: &usize| {
            let coords = mesh.coords(*other);
            (0..own.len()).all(|axis| axes.contains(&axis) || coords[axis] == own[axis])
        };
        let mut found: Vec<(usize, usize)> = (0..mesh.size())
            .filter(beside)
            .map(|other| (layout.part(dim, other), mesh.ranks()[other]))
            .collect();
        found.sort_unstable();
        let parts = 0..layout.extents(dim).len();
        Self {
            ranks: found.into_iter().map(|(_, rank)| rank).collect(),
            parts: parts.map(|part| layout.part_range(dim, part)).collect(),
            own: layout.part(dim, position),
        }
    }

    /// One rank, which holds everything.
    pub(super) fn alone(cells: usize) -> Self {
        Self {
            ranks: vec![0],
            parts: std::iter::once(0..cells).collect(),
            own: 0,
        }
    }

    /// The part that is here after so many steps.
    pub(super) fn part(&self, step: usize) -> usize {
        (self.own + step) % self.parts.len()
    }

    /// Sends tensors of the part of one step to the rank before this one, and receives such of the next part from the rank
    /// after it; nothing of parts without cells. `shape_of` gives the shapes of a part's tensors.
    pub(super) fn pass(
        &self,
        comm: &Arc<dyn Communicator>,
        operation: &Operation,
        step: usize,
        tensors: Vec<DispatchTensor>,
        like: (DType, &DispatchTensor),
        shapes_of: impl Fn(usize) -> Vec<Vec<usize>>,
    ) -> Result<Option<InFlight>> {
        let (before, after) = (self.part(self.parts.len() - 1), self.part(1));
        let (dtype, device) = (like.0, like.1.device());
        let next = self.parts[self.part(step + 1)].len();
        let mut batch = Batch {
            operation: operation.clone(),
            sends: Vec::new(),
            receives: Vec::new(),
        };
        if !self.parts[self.part(step)].is_empty() {
            batch
                .sends
                .push((self.ranks[before], Payload::Tensors(tensors)));
        }
        if next > 0 {
            let shapes = shapes_of(next).into_iter().map(Into::into).collect();
            batch.receives.push((
                self.ranks[after],
                Expected::Tensors {
                    shapes,
                    dtype,
                    device,
                },
            ));
        }
        if batch.sends.is_empty() && batch.receives.is_empty() {
            return Ok(None);
        }
        let in_flight = comm.clone().start(batch)?;
        in_flight.in_background();
        Ok(Some(in_flight))
    }
}

/// The tensors of a batch that has come; none if it had none.
pub(super) fn finish(in_flight: Option<InFlight>) -> Result<Vec<DispatchTensor>> {
    let payloads = in_flight.map_or(Ok(Vec::new()), InFlight::finish)?;
    let tensors = payloads.into_iter().flat_map(|payload| match payload {
        Payload::Tensors(tensors) => tensors,
        Payload::Bytes(_) => unreachable!("an engine gives what was expected"),
    });
    Ok(tensors.collect())
}
