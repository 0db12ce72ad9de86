//! Meshes of ranks with their communicator and device.

use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, OnceLock};

use burn::tensor::Device;

use crate::cache::PlanCache;
use crate::comm::local::Hub;
use crate::comm::{Communicator, Operation, Settings, Traffic, collectives};
use crate::exchange::{ExchangePlan, Need, Source};
use crate::layout::Layout;
use crate::mesh::MeshShape;
use crate::settings::loopback;
use crate::{Error, Result};

/// Maximum number of one-rank meshes that a thread keeps.
const MOST_SOLO_MESHES: usize = 16;

thread_local! {
    /// One-rank meshes, the most recently used last.
    static SOLO_MESHES: RefCell<Vec<DeviceMesh>> = const { RefCell::new(Vec::new()) };
    /// Meshes of the scopes entered on this thread, the innermost last.
    static CURRENT: RefCell<Vec<DeviceMesh>> = const { RefCell::new(Vec::new()) };
}

/// Mesh of ranks as seen from one of them: its shape, this rank's position and device, and the
/// communicator. All meshes of a rank share one communicator, which only one thread [at a
/// time](crate::World) may use.
///
/// # Example
/// ```
/// use halocline_core::Launcher;
///
/// Launcher::local(4).run(|world| {
///     let mesh = world.mesh([("data", 2), ("lat", 2)])?;
///     let row = mesh.submesh(&["lat"])?;
///     assert_eq!((mesh.size(), row.size()), (4, 2));
///     assert_eq!(row.coords(), [mesh.coords()[1]]);
///     assert_eq!(mesh.ranks_along(&[0, 1])[..], [0, 1, 2, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DeviceMesh(Arc<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    shape: Arc<MeshShape>,
    position: usize,
    comm: Arc<dyn Communicator>,
    device: Device,
    cache: Arc<PlanCache>,
    /// The ranks along each axis through this rank.
    lines: Vec<OnceLock<Arc<[usize]>>>,
}

impl DeviceMesh {
    /// Makes a mesh over ranks of a communicator; [`World::mesh`](crate::World::mesh) makes one
    /// over all ranks.
    ///
    /// # Errors
    /// The mesh does not contain this rank, or contains a rank that is not in the world.
    pub fn new(shape: MeshShape, comm: Arc<dyn Communicator>, device: Device) -> Result<Self> {
        let rank = comm.rank();
        if !shape.ranks().contains(&rank) {
            return Err(Error::Mesh(format!(
                "rank {rank} is not part of the {shape}"
            )));
        }
        let mesh = Self::over(shape, comm, device)?;
        Ok(mesh.expect("this rank is part of the mesh"))
    }

    /// Makes a mesh over some ranks of a communicator; returns `None` on the others.
    pub(crate) fn over(
        shape: MeshShape,
        comm: Arc<dyn Communicator>,
        device: Device,
    ) -> Result<Option<Self>> {
        let (rank, size) = (comm.rank(), comm.size());
        if let Some(other) = shape.ranks().iter().find(|&&other| other >= size) {
            return Err(Error::Mesh(format!(
                "rank {other} of the {shape} is not in a world of {size} ranks"
            )));
        }
        Ok(shape.position_of(rank).map(|position| {
            Self(Arc::new(Inner {
                lines: shape.sizes().iter().map(|_| OnceLock::new()).collect(),
                shape: Arc::new(shape),
                position,
                comm,
                device,
                cache: Arc::default(),
            }))
        }))
    }

    /// Returns this mesh with another engine for the same ranks. The two share their plans, which
    /// do not depend on the engine.
    pub(crate) fn with_comm(&self, comm: Arc<dyn Communicator>) -> Self {
        Self(Arc::new(Inner {
            comm,
            ..(*self.0).clone()
        }))
    }

    /// Runs a function with this mesh as the [current](Self::current) mesh of the thread. Scopes
    /// may be nested; a panic leaves its scope too.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{DeviceMesh, Distribution, Launcher, RandomKey, Result, Shard, ShardTensor};
    ///
    /// fn noise() -> Result<ShardTensor<2>> {
    ///     let mesh = DeviceMesh::current()?;
    ///     let uniform = Distribution::Uniform(0.0, 1.0);
    ///     ShardTensor::random([5, 3], uniform, RandomKey::new(7, "noise"), &mesh, &[Shard(0)])
    /// }
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     assert_eq!(mesh.scope(noise)?.local_dims(), [[3, 3], [2, 3]][world.rank()]);
    ///     assert!(noise().is_err());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn scope<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Leave;

        impl Drop for Leave {
            fn drop(&mut self) {
                drop(CURRENT.with_borrow_mut(Vec::pop));
            }
        }

        CURRENT.with_borrow_mut(|meshes| meshes.push(self.clone()));
        let _leave = Leave;
        f()
    }

    /// Returns the mesh of the innermost [`scope`](Self::scope) entered on this thread.
    ///
    /// # Errors
    /// The thread is not in a scope.
    pub fn current() -> Result<Self> {
        let mesh = CURRENT.with_borrow(|meshes| meshes.last().cloned());
        mesh.ok_or_else(|| {
            let message = "no mesh is current on this thread; call this in mesh.scope(|| …)";
            Error::Mesh(message.into())
        })
    }

    /// Returns the one-rank mesh of a device: one per device and thread, so that its plans are
    /// kept. Each thread keeps the meshes of the most recently used devices.
    pub(crate) fn solo(device: &Device) -> Self {
        SOLO_MESHES.with_borrow_mut(|meshes| {
            // Devices compare by hardware, regardless of their autodiff setting.
            let strategy = Device::gradient_checkpointing_strategy;
            let same = |mesh: &Self| {
                mesh.device() == device && strategy(mesh.device()) == strategy(device)
            };
            if let Some(place) = meshes.iter().position(same) {
                meshes[place..].rotate_left(1);
            } else {
                let comm = Arc::new(Hub::new(1).communicator(0, Settings::default()));
                let mesh = Self::new(MeshShape::solo(0), comm, device.clone());
                if meshes.len() == MOST_SOLO_MESHES {
                    meshes.remove(0);
                }
                meshes.push(mesh.expect("rank 0 is in its own mesh"));
            }
            meshes[meshes.len() - 1].clone()
        })
    }

    /// The shape of the mesh, equal on all ranks.
    pub fn shape(&self) -> &Arc<MeshShape> {
        &self.0.shape
    }

    /// This rank's position in the mesh.
    pub fn position(&self) -> usize {
        self.0.position
    }

    /// This rank's coordinates, one per axis.
    pub fn coords(&self) -> Vec<usize> {
        self.0.shape.coords(self.0.position)
    }

    /// The number of ranks in the mesh.
    pub fn size(&self) -> usize {
        self.0.shape.size()
    }

    /// The device of this rank.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The communicator that connects the ranks.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.0.comm
    }

    /// The cache of the plans made for this mesh.
    pub fn cache(&self) -> &PlanCache {
        &self.0.cache
    }

    /// Plans this rank's part of the exchange that supplies every position with the cells that it
    /// needs.
    ///
    /// `need_of` must be the same function on all ranks.
    ///
    /// # Example
    /// ```
    /// use halocline_core::plan::{Need, Source};
    /// use halocline_core::{IndexBox, Launcher, Layout, Shard};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let layout = Layout::new(mesh.shape(), &[4, 3], &[Shard(0)])?;
    ///     let whole = |_| Need::of(IndexBox::whole(&[4, 3]));
    ///     let plan = mesh.exchange_plan(Source::Layout(&layout), whole);
    ///     assert_eq!((plan.elements_sent(), plan.elements_received()), (6, 6));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn exchange_plan(
        &self,
        source: Source<'_>,
        need_of: impl Fn(usize) -> Need,
    ) -> ExchangePlan {
        let plan = ExchangePlan::new(source, self.position(), self.size(), need_of);
        if loopback() {
            plan.through_loopback(self.position())
        } else {
            plan
        }
    }

    /// Returns the cached plan by which every rank receives its box of `target` from the owners in
    /// `source`.
    pub(crate) fn plan_between(&self, source: &Layout, target: &Layout) -> Arc<ExchangePlan> {
        let key = ("layouts", source.clone(), target.clone());
        let plan = self.cache().get_or_make(key, |_| {
            let need_of = |position| Need::of(target.local_box(position));
            Ok(self.exchange_plan(Source::Layout(source), need_of))
        });
        plan.expect("making this plan cannot fail")
    }

    /// Sends bytes from rank `source` of the world to all ranks of the mesh. Errors name the
    /// operation `operator`.
    ///
    /// # Errors
    /// The source is not in the mesh; communication fails.
    ///
    /// # Example
    /// ```
    /// halocline_core::Launcher::local(3).run(|world| {
    ///     let Some(mesh) = world.mesh_over([("lat", 2)], &[0, 2])? else { return Ok(()) };
    ///     let header = (world.rank() == 2).then(|| vec![7]);
    ///     assert_eq!(mesh.broadcast_bytes("header", 2, header)?, [7]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn broadcast_bytes(
        &self,
        operator: &'static str,
        source: usize,
        bytes: Option<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let operation = Operation::new(operator, Traffic::Control, None);
        let ranks = self.0.shape.ranks();
        collectives::broadcast_bytes(&self.0.comm, ranks, source, &operation, bytes)
    }

    /// Returns the sub-mesh of the named axes that contains this rank.
    ///
    /// # Errors
    /// A name is not an axis of the mesh, or occurs twice.
    pub fn submesh(&self, names: &[&str]) -> Result<Self> {
        let shape = self.0.shape.submesh(self.0.position, names)?;
        Self::new(shape, self.0.comm.clone(), self.0.device.clone())
    }

    /// The ranks of the world that differ from this one in the given axes only.
    pub fn ranks_along(&self, axes: &[usize]) -> Arc<[usize]> {
        let shape = &self.0.shape;
        let ranks = || {
            let positions = shape.positions_along(self.0.position, axes).into_iter();
            positions.map(|position| shape.ranks()[position]).collect()
        };
        match axes {
            [axis] => self.0.lines[*axis].get_or_init(ranks).clone(),
            _ => ranks(),
        }
    }
}

impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.shape.fmt(f)
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use burn::tensor::DeviceKind;

    use super::*;

    #[test]
    fn meshes_of_one_rank_are_kept_for_the_devices_used_last() {
        let gpu = |index: usize| Device::wgpu(DeviceKind::DiscreteGpu(index));
        let kept = || SOLO_MESHES.with_borrow(Vec::len);
        let cpu = DeviceMesh::solo(&Device::flex());
        for index in 0..2 * MOST_SOLO_MESHES {
            DeviceMesh::solo(&gpu(index));
            // Keeps the CPU's mesh recently used.
            let same = DeviceMesh::solo(&Device::flex());
            assert!(std::ptr::eq(same.cache(), cpu.cache()));
        }
        assert_eq!(kept(), MOST_SOLO_MESHES);
    }
}
