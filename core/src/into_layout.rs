//! Arguments that specify the layout of a tensor.

use crate::layout::{Layout, Placement};
use crate::{Error, Result};

mod sealed {
    use crate::layout::{Layout, Placement};

    /// Private supertrait, so that placements and layouts alone implement `IntoLayout`.
    pub trait Sealed {}

    impl Sealed for &[Placement] {}
    impl<const N: usize> Sealed for &[Placement; N] {}
    impl Sealed for &Vec<Placement> {}
    impl Sealed for &Layout {}
}

/// Argument that specifies the layout of a tensor: placements, one per mesh axis, or a [`Layout`]
/// with its own extents. Other types cannot implement it.
///
/// # Example
/// ```
/// use halocline_core::{IntoLayout, Layout, MeshShape, Replicate, Shard};
///
/// let mesh = MeshShape::new(&[("lat", 2)], vec![0, 1])?.into();
/// let whole = Layout::replicated(&mesh, &[5, 3]);
/// let even = (&[Shard(0)]).layout_like(&whole)?;
/// assert_eq!(even.extents(0), [3, 2]);
/// let uneven = even.with_extents(0, &[1, 4])?;
/// assert_eq!((&uneven).layout_like(&whole)?, uneven);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub trait IntoLayout: sealed::Sealed {
    /// Returns the new layout of a tensor whose layout is `from`. Given placements, dims that keep
    /// their axes keep their extents; the others are divided as evenly as possible.
    ///
    /// # Errors
    /// The placements do not fit the mesh and the shape of `from`, or the layout has another mesh
    /// or shape.
    fn layout_like(self, from: &Layout) -> Result<Layout>;
}

impl IntoLayout for &[Placement] {
    fn layout_like(self, from: &Layout) -> Result<Layout> {
        let mut layout = Layout::new(from.mesh(), from.shape(), self)?;
        for dim in 0..from.shape().len() {
            if layout.axes_of(dim) == from.axes_of(dim) {
                layout = layout.with_extents(dim, from.extents(dim))?;
            }
        }
        Ok(layout)
    }
}

impl<const N: usize> IntoLayout for &[Placement; N] {
    fn layout_like(self, from: &Layout) -> Result<Layout> {
        self.as_slice().layout_like(from)
    }
}

impl IntoLayout for &Vec<Placement> {
    fn layout_like(self, from: &Layout) -> Result<Layout> {
        self.as_slice().layout_like(from)
    }
}

impl IntoLayout for &Layout {
    fn layout_like(self, from: &Layout) -> Result<Layout> {
        if self.mesh() == from.mesh() && self.shape() == from.shape() {
            return Ok(self.clone());
        }
        Err(Error::Layout(format!(
            "{self} for a tensor that is {from}: mesh and shape must be the same; make the layout by Layout::new from the \
             tensor's"
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{MeshShape, Replicate, Shard};

    #[test]
    fn dims_that_keep_their_parts_keep_their_extents() {
        let mesh = Arc::new(MeshShape::new(&[("a", 2), ("b", 2)], (0..4).collect()).unwrap());
        let from = Layout::new(&mesh, &[7, 5], &[Shard(0), Shard(1)]).unwrap();
        let from = from.with_extents(0, &[6, 1]).unwrap();
        let from = from.with_extents(1, &[0, 5]).unwrap();
        let to = (&[Shard(0), Replicate]).layout_like(&from).unwrap();
        assert_eq!(to.all_extents(), [vec![6, 1], vec![5]]);
        let to = (&vec![Shard(1), Shard(0)]).layout_like(&from).unwrap();
        assert_eq!(to.all_extents(), [vec![4, 3], vec![3, 2]]);
    }

    #[test]
    fn layouts_of_another_mesh_or_shape_are_refused() {
        let mesh = |name| Arc::new(MeshShape::new(&[(name, 2)], vec![0, 1]).unwrap());
        let whole = Layout::replicated(&mesh("lat"), &[4]);
        for other in [
            Layout::replicated(&mesh("lon"), &[4]),
            Layout::replicated(&mesh("lat"), &[5]),
        ] {
            let error = (&other).layout_like(&whole).unwrap_err().to_string();
            assert!(error.contains("mesh and shape must be the same"), "{error}");
        }
    }
}
