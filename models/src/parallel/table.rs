//! Tables of resolved plans.

use std::fmt;

use halocline_core::{Gather, Replicate, Shard};

use super::resolve::{ResolvedParam, ResolvedPlan};

impl ResolvedPlan {
    /// Returns the paths of the layers that have parameters.
    pub(super) fn layers(&self) -> impl Iterator<Item = &str> {
        self.parameters.iter().map(ResolvedParam::layer)
    }

    /// Returns the table that the plan prints as, with the box of another mesh position than the
    /// first.
    pub fn on(&self, position: usize) -> impl fmt::Display {
        fmt::from_fn(move |f| self.write(position, f))
    }

    fn write(&self, position: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self
            .parameters
            .iter()
            .map(|parameter| parameter.path.len())
            .max()
            .unwrap_or(0);
        let names = self.mesh.names();
        let (mut held, mut gathered, mut all) = (0, 0, 0);
        for parameter in &self.parameters {
            let layout = &parameter.layout;
            write!(f, "{:width$}  {:?}", parameter.path, layout.shape())?;
            for (axis, placement) in layout.placements().iter().enumerate() {
                let stored = if parameter.stored.contains(&axis) {
                    " stored"
                } else {
                    ""
                };
                if let Shard(dim) = placement {
                    write!(
                        f,
                        "  {}:{stored} {placement} {:?}",
                        names[axis],
                        layout.extents(*dim)
                    )?;
                }
            }
            let sharded = layout.axes_where(|placement| placement != Replicate);
            if !sharded.is_empty() {
                write!(f, "  holds {:?}", layout.local_box(position).ranges())?;
            }
            if !parameter.stored.is_empty() {
                let gathered = 4 * parameter.elements_gathered(position);
                let again = match parameter.gather {
                    Gather::EachPass => gathered,
                    Gather::Once => 0,
                };
                write!(
                    f,
                    "  receives {gathered} B forward, {} B backward",
                    again + gathered
                )?;
            }
            for axis in &parameter.unstored {
                write!(f, "  {}: not stored", names[*axis])?;
            }
            let layer_placements = &parameter.layer_placements;
            for (side, along) in [
                ("input", &layer_placements.input),
                ("output", &layer_placements.output),
            ] {
                for (axis, along) in along {
                    write!(f, "  {side} {}: {along}", names[*axis])?;
                }
            }
            writeln!(f)?;
            held += parameter.elements_held(position);
            gathered += parameter.elements_gathered(position);
            all += layout.shape().iter().product::<usize>();
        }
        for (path, to) in &self.reshards {
            write!(f, "{path:width$}  reshard")?;
            for (axis, along) in to {
                write!(f, "  {}: {along}", names[*axis])?;
            }
            writeln!(f)?;
        }
        write!(
            f,
            "{held} of {all} elements at position {position} of the mesh, {gathered} more gathered for use, layer by layer (bytes are of f32)"
        )
    }
}

impl fmt::Display for ResolvedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(0, f)
    }
}
