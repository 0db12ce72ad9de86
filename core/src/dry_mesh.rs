//! Meshes without the other ranks.

use std::sync::Arc;

use burn::tensor::Device;

use crate::comm::PlannedMessages;
use crate::comm::dry_run::DryRun;
use crate::device_mesh::DeviceMesh;
use crate::mesh::MeshShape;
use crate::settings::Settings;
use crate::{Error, Result};

/// A mesh of any size as its first rank sees it, without the others: a program computes this rank's
/// share, with zeros for the cells of other ranks, and its messages are recorded and not sent. It
/// shows time, memory and traffic of a job before it is started.
///
/// # Example
/// ```
/// use halocline_core::{Boundary, DryMesh, Halo, MeshShape, Shard, ShardTensor};
///
/// let shape = MeshShape::new(&[("lat", 512)], (0..512).collect())?;
/// let dry = DryMesh::new(shape, Default::default())?;
/// let x = ShardTensor::<2>::ones([1024, 5], dry.mesh(), &[Shard(0)])?; // two rows of it
/// x.with_halo(&[Halo::new(0, 1, Boundary::Periodic)])?;
/// assert_eq!(dry.take().bytes_sent(), 2 * 5 * 4); // a row for each neighbour
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Debug)]
pub struct DryMesh {
    mesh: DeviceMesh,
    engine: Arc<DryRun>,
}

impl DryMesh {
    /// Makes a mesh of a shape on one device.
    ///
    /// # Errors
    /// A shape without ranks.
    pub fn new(shape: MeshShape, device: Device) -> Result<Self> {
        let size = shape.ranks().iter().max().map_or(0, |rank| rank + 1);
        let first = shape.ranks().first();
        let first = *first.ok_or_else(|| Error::Mesh("a mesh without ranks".into()))?;
        let engine = Arc::new(DryRun::new(first, size, Settings::default()));
        let mesh = DeviceMesh::new(shape, engine.clone(), device)?;
        Ok(Self { mesh, engine })
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Takes the messages that were recorded so far.
    pub fn take(&self) -> PlannedMessages {
        self.engine.take()
    }
}
