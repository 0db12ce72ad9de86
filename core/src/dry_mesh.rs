//! Dry runs: meshes of any size on a single rank.

use std::sync::Arc;

use burn::tensor::Device;

use crate::comm::PlannedMessages;
use crate::comm::dry_run::DryRun;
use crate::device_mesh::DeviceMesh;
use crate::mesh::MeshShape;
use crate::settings::Settings;
use crate::{Error, Result};

/// Mesh of any size as seen by its first rank, without the others: a program computes this rank's
/// share, with zeros for the cells of other ranks, and its messages are recorded instead of sent.
/// It shows the time, memory and traffic of a job before the job is started.
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
    /// Makes a mesh of the given shape on one device.
    ///
    /// # Errors
    /// The shape has no ranks.
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

    /// Returns the messages recorded so far, and clears the record.
    pub fn take(&self) -> PlannedMessages {
        self.engine.take()
    }
}
