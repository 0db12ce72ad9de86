//! Printed form of a sharded tensor: its layout and this rank's box.

use std::fmt;

use burn::tensor::kind::Basic;

use super::ShardTensor;

impl<const D: usize, K: Basic> fmt::Display for ShardTensor<D, K> {
    /// Prints the global shape, one line per axis with its placement and extents, and this rank's
    /// box.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mesh = self.layout.mesh();
        writeln!(f, "ShardTensor {:?}", self.layout.shape())?;
        let axes = mesh.names().iter().zip(mesh.sizes());
        for ((name, size), placement) in axes.zip(self.placements()) {
            write!(f, "  {name:<8} {size:>4} × {placement}")?;
            match placement {
                crate::Shard(dim) => writeln!(f, "  extents {:?}", self.layout.extents(*dim))?,
                _ => writeln!(f)?,
            }
        }
        write!(
            f,
            "  rank {} holds {}",
            self.mesh.comm().rank(),
            self.layout.local_box(self.mesh.position())
        )
    }
}

impl<const D: usize, K: Basic> fmt::Debug for ShardTensor<D, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShardTensor({})", self.layout)
    }
}
