//! Operations to which messages belong; they let ranks detect divergence.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use burn::tensor::{DType, Shape};
use foldhash::fast::FixedState;

use crate::layout::{Layout, ReduceOp};

/// Purpose of a communication, by which it is counted; see the example of [`Operation`].
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
    /// Parameters stored in shards, gathered for use, and their gradients.
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
/// use halocline_core::Traffic;
/// use halocline_core::comm::Operation;
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
    /// The previous layout, for a change of layout.
    before: Option<Layout>,
    /// The element type of the boxes that travel.
    dtype: Option<DType>,
    /// The reduction, and the number and type of the reduced elements.
    elements: Option<(ReduceOp, usize, DType)>,
    /// The shapes of the tensors, if there are several.
    parts: Option<Arc<[Shape]>>,
    /// A hash of the arguments of the [plan](crate::plan::ExchangePlan), or of the places of
    /// gradients in the backward pass; zero if there are none.
    arguments: u64,
}

impl Operation {
    /// Makes the operation called `name` on a field of the given layout.
    pub fn new(name: &'static str, traffic: Traffic, layout: Option<&Layout>) -> Self {
        Self {
            name,
            backward: false,
            traffic,
            layout: layout.cloned(),
            before: None,
            dtype: None,
            elements: None,
            parts: None,
            arguments: 0,
        }
    }

    /// Returns the operation with another name.
    #[must_use]
    pub(crate) fn named(&self, name: &'static str) -> Self {
        Self {
            name,
            ..self.clone()
        }
    }

    /// Returns the operation as a change from another layout.
    #[must_use]
    pub(crate) fn leaving(self, before: &Layout) -> Self {
        Self {
            before: Some(before.clone()),
            ..self
        }
    }

    /// Returns the operation on boxes with this element type.
    #[must_use]
    pub(crate) fn of_type(&self, dtype: DType) -> Self {
        Self {
            dtype: Some(dtype),
            ..self.clone()
        }
    }

    /// Returns the operation as a reduction of a number of elements of a type.
    #[must_use]
    pub(crate) fn of(&self, op: ReduceOp, elements: usize, dtype: DType) -> Self {
        Self {
            elements: Some((op, elements, dtype)),
            ..self.clone()
        }
    }

    /// Returns the operation on several tensors, with these shapes.
    #[must_use]
    pub(crate) fn of_parts(self, shapes: impl Iterator<Item = Shape>) -> Self {
        Self {
            parts: Some(shapes.collect()),
            ..self
        }
    }

    /// Returns the operation with arguments that have this hash, such as those of its plan.
    #[must_use]
    pub(crate) fn of_arguments(self, arguments: u64) -> Self {
        Self { arguments, ..self }
    }

    /// Returns the same operation in the backward pass; for an operation in the backward pass, that
    /// in the forward pass.
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

    /// The name, followed by the pass if that is the backward pass.
    pub(crate) fn title(&self) -> String {
        let pass = if self.backward { " (backward)" } else { "" };
        format!("{}{pass}", self.name)
    }

    /// The purpose of the communication, by which it is counted.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Whether the operation is on several tensors.
    pub(crate) fn has_parts(&self) -> bool {
        self.parts.is_some()
    }

    /// Whether the operation belongs to the backward pass.
    pub fn is_backward(&self) -> bool {
        self.backward
    }

    /// The layout of the field, if there is one.
    pub fn layout(&self) -> Option<&Layout> {
        self.layout.as_ref()
    }

    /// A hash by which two ranks detect that they are in different operations.
    pub fn fingerprint(&self) -> u64 {
        // A fast hash, because every message needs one.
        let identity = (
            self.name,
            self.backward,
            (&self.layout, &self.before),
            self.dtype,
            self.elements,
            (&self.parts, self.arguments),
        );
        FixedState::default().hash_one(identity)
    }
}

impl fmt::Display for Operation {
    /// Prints name, pass, layouts and element types; with `#` also the hash of the arguments.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.title())?;
        if let Some(layout) = &self.layout {
            write!(f, " on {layout}")?;
        }
        if let Some(before) = &self.before {
            write!(f, ", before on {before}")?;
        }
        if let Some(dtype) = self.dtype {
            write!(f, ", in {dtype:?}")?;
        }
        if let Some((op, elements, dtype)) = self.elements {
            write!(f, ", {op:?} of {elements} {dtype:?}")?;
        }
        if let Some(parts) = &self.parts {
            let shapes: Vec<&[usize]> = parts.iter().map(|shape| &shape[..]).collect();
            write!(f, " of {shapes:?}")?;
        }
        if f.alternate() && self.arguments != 0 {
            write!(f, ", arguments {:016x}", self.arguments)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MeshShape, Shard};

    /// Boxes of the same size hold other cells if layouts differ, and other numbers if element
    /// types differ.
    #[test]
    fn layouts_before_and_types_of_numbers_tell_operations_apart() {
        let mesh = Arc::new(MeshShape::new(&[("x", 2)], vec![0, 1]).unwrap());
        let layout = |dim| Layout::new(&mesh, &[4, 4], &[Shard(dim)]).unwrap();
        let to = Layout::replicated(&mesh, &[4, 4]);
        let plain = Operation::new("redistribute", Traffic::Redistribute, Some(&to));
        let from = |dim| plain.clone().leaving(&layout(dim));
        let all = [
            plain.clone(),
            from(0),
            from(1),
            from(0).of_type(DType::F16),
            from(0).of_type(DType::BF16),
        ];
        for (index, one) in all.iter().enumerate() {
            for other in &all[..index] {
                assert_ne!(one.fingerprint(), other.fingerprint());
                assert_ne!(one.to_string(), other.to_string());
            }
        }
    }
}
