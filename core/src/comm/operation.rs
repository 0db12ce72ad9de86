//! Operations to which messages belong, by which ranks detect that they diverge.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use burn::tensor::{DType, Shape};
use foldhash::fast::FixedState;

use crate::layout::{Layout, ReduceOp};

/// Purpose of a communication, by which it is counted; [`Operation`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Traffic {
    /// Halos and other boxes that an operator needs.
    Exchange,
    /// A change of placement.
    Redistribute,
    /// A sum or another reduction over ranks.
    Reduce,
    /// A field or parameters sent out from one rank, or collected on one.
    Scatter,
    /// Parameters that are stored in shards, gathered for use, and their gradients.
    Gather,
    /// Checks and metadata.
    Control,
}

impl Traffic {
    /// All kinds, in the order of [`CommStats`](crate::CommStats).
    pub const ALL: [Self; 6] = [
        Self::Exchange,
        Self::Redistribute,
        Self::Reduce,
        Self::Scatter,
        Self::Gather,
        Self::Control,
    ];
}

/// Operation to which messages belong; equal on all ranks that take part in it.
///
/// # Example
/// ```
/// use halocline_core::{Operation, Traffic};
///
/// let halo = Operation::new("halo", Traffic::Exchange, None);
/// assert_eq!(halo.backward().to_string(), "halo (backward)");
/// assert_ne!(halo.fingerprint(), halo.backward().fingerprint());
/// ```
#[derive(Clone, Debug)]
pub struct Operation {
    name: &'static str,
    backward: bool,
    traffic: Traffic,
    layout: Option<Layout>,
    /// The reduction, and the number and type of the reduced elements.
    elements: Option<(ReduceOp, usize, DType)>,
    /// The shapes of its tensors, if there are several.
    parts: Option<Arc<[Shape]>>,
}

impl Operation {
    /// Makes the operation called `name` on a field of the given layout.
    pub fn new(name: &'static str, traffic: Traffic, layout: Option<&Layout>) -> Self {
        Self {
            name,
            backward: false,
            traffic,
            layout: layout.cloned(),
            elements: None,
            parts: None,
        }
    }

    /// The operation as a reduction of a number of elements of a type.
    #[must_use]
    pub(crate) fn of(&self, op: ReduceOp, elements: usize, dtype: DType) -> Self {
        Self {
            elements: Some((op, elements, dtype)),
            ..self.clone()
        }
    }

    /// The operation on tensors of these shapes, one after the other.
    #[must_use]
    pub(crate) fn of_parts(self, shapes: impl Iterator<Item = Shape>) -> Self {
        Self {
            parts: Some(shapes.collect()),
            ..self
        }
    }

    /// The same operation in the backward pass; of one that is in it, in the forward pass.
    pub fn backward(&self) -> Self {
        Self {
            backward: !self.backward,
            ..self.clone()
        }
    }

    /// The name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The purpose of the communication, by which it is counted.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Whether it belongs to the backward pass.
    pub fn is_backward(&self) -> bool {
        self.backward
    }

    /// The layout of its field, if it has one.
    pub fn layout(&self) -> Option<&Layout> {
        self.layout.as_ref()
    }

    /// A hash by which two ranks detect that they are in different operations.
    pub fn fingerprint(&self) -> u64 {
        // A fast hash: every message needs one.
        let identity = (
            self.name,
            self.backward,
            &self.layout,
            self.elements,
            &self.parts,
        );
        FixedState::default().hash_one(identity)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        if self.backward {
            f.write_str(" (backward)")?;
        }
        if let Some(layout) = &self.layout {
            write!(f, " on {layout}")?;
        }
        if let Some((op, elements, dtype)) = self.elements {
            write!(f, ", {op:?} of {elements} {dtype:?}")?;
        }
        let Some(parts) = &self.parts else {
            return Ok(());
        };
        let shapes: Vec<&[usize]> = parts.iter().map(|shape| &shape[..]).collect();
        write!(f, " of {shapes:?}")
    }
}
