//! A rank's view of the job: its number, its device, and its connection to the other ranks.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::Module;
use burn::tensor::Device;

use crate::comm::{
    Batch, CommStats, Communicator, Expected, ModuleStats, Operation, Payload, Traffic, collectives,
};
use crate::device_mesh::DeviceMesh;
use crate::mesh::MeshShape;
use crate::{Error, RandomKey, Result, module, trace};

/// A rank's view of the job: its number, its device, its meshes, and collective calls over all
/// ranks.
///
/// Only one thread of a rank may communicate at a time, over all its meshes: messages of two
/// threads would be confused.
///
/// # Example
/// ```
/// use halocline_core::Launcher;
///
/// Launcher::local(2).seed(5).run(|world| {
///     assert_eq!((world.size(), world.seed()), (2, 5));
///     assert_eq!(world.is_root(), world.rank() == 0);
///     let mesh = world.mesh([("lat", 2)])?;
///     assert_eq!(mesh.position(), world.rank());
///     world.barrier()?;
///     assert_eq!(world.comm_stats().of(halocline_core::Traffic::Control).messages, 1);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct World {
    comm: Arc<dyn Communicator>,
    device: Device,
    seed: u64,
    /// Number of modules made so far; equal on all ranks, because they make modules together.
    modules: Arc<AtomicU64>,
}

impl World {
    /// Makes the world of a rank from its communicator and device.
    pub(crate) fn new(comm: Arc<dyn Communicator>, device: Device, seed: u64) -> Self {
        Self {
            comm,
            device,
            seed,
            modules: Arc::default(),
        }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.comm.size()
    }

    /// Whether this is rank 0, which reads, prints and writes.
    pub fn is_root(&self) -> bool {
        self.rank() == 0
    }

    /// This rank's device, with autodiff.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The seed of the job.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Makes a mesh over all ranks.
    ///
    /// # Errors
    /// The product of the sizes is not the number of ranks; an axis name occurs twice.
    pub fn mesh<const N: usize>(&self, axes: [(&str, usize); N]) -> Result<DeviceMesh> {
        self.mesh_of(&axes)
    }

    /// Like [`mesh`](Self::mesh), for a number of axes that is known only at run time.
    ///
    /// # Errors
    /// The errors of [`mesh`](Self::mesh).
    pub fn mesh_of(&self, axes: &[(&str, usize)]) -> Result<DeviceMesh> {
        let shape = MeshShape::new(axes, (0..self.size()).collect())?;
        DeviceMesh::new(shape, self.comm.clone(), self.device.clone())
    }

    /// Makes a mesh over some of the ranks; returns `None` on the others. Nothing is communicated,
    /// and operators on the mesh involve only its ranks.
    ///
    /// # Errors
    /// On all ranks: the product of the sizes is not the number of ranks of the mesh; an axis name
    /// or a rank occurs twice; a rank is not in the world.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(3).run(|world| {
    ///     // Ranks 1 and 2 compute, rank 0 has other work.
    ///     let mesh = world.mesh_over([("lat", 2)], &[1, 2])?;
    ///     assert_eq!(mesh.is_none(), world.is_root());
    ///     if let Some(mesh) = mesh {
    ///         let x = ShardTensor::<2>::zeros([5, 3], &mesh, &[Shard(0)])?;
    ///         assert_eq!(x.local_dims(), [[3, 3], [2, 3]][mesh.position()]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn mesh_over<const N: usize>(
        &self,
        axes: [(&str, usize); N],
        ranks: &[usize],
    ) -> Result<Option<DeviceMesh>> {
        let shape = MeshShape::new(&axes, ranks.to_vec())?;
        DeviceMesh::over(shape, self.comm.clone(), self.device.clone())
    }

    /// The connection to the other ranks.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// Counters of the messages that this rank has sent so far; the total of a job is the sum over
    /// its ranks.
    pub fn comm_stats(&self) -> CommStats {
        self.comm.counters().snapshot()
    }

    /// Counters of the messages that this rank has sent so far, by the
    /// [module](crate::module_scope()) of the model that sent them.
    pub fn comm_stats_by_module(&self) -> ModuleStats {
        self.comm.counters().by_module()
    }

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// A rank does not call it within the timeout, or has ended.
    pub fn barrier(&self) -> Result<()> {
        collectives::barrier(&self.comm, &self.everyone())
    }

    /// Sends bytes from rank `source` to all ranks. Bytes given on other ranks are ignored.
    ///
    /// # Errors
    /// The source is not in the world; communication fails.
    ///
    /// # Example
    /// ```
    /// halocline_core::Launcher::local(2).run(|world| {
    ///     let name = world.is_root().then(|| b"storm".to_vec());
    ///     assert_eq!(world.broadcast_bytes(0, name)?, b"storm");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn broadcast_bytes(&self, source: usize, bytes: Option<Vec<u8>>) -> Result<Vec<u8>> {
        let operation = Operation::new("broadcast_bytes", Traffic::Control, None);
        collectives::broadcast_bytes(&self.comm, &self.everyone(), source, &operation, bytes)
    }

    /// Makes a module with the same parameters on all ranks.
    ///
    /// Parameters are drawn from the job's seed and the number of modules made before, then those
    /// of rank 0 are broadcast; each rank owns its leaves.
    ///
    /// # Errors
    /// `init` or `init_sharded` is called within `make`; communication fails.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LinearConfig;
    ///
    /// halocline_core::Launcher::local(2).run(|world| {
    ///     let linear = world.init(|device| LinearConfig::new(3, 2).init(device))?;
    ///     assert_eq!(linear.weight.dims(), [3, 2]);
    ///     world.check_replicas(&linear) // equal on both ranks
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn init<M: Module>(&self, make: impl FnOnce(&Device) -> M) -> Result<M> {
        let made = module::seeded(&self.device, self.next_seed(), |device| {
            let made = make(device);
            module::draw(&made);
            made
        })?;
        self.sync_module(made, 0)
    }

    /// Makes a module whose parameters are sharded one by one, with the same values as
    /// [`init`](Self::init): no rank ever holds more than its shards and one whole parameter.
    /// Nothing is sent.
    ///
    /// `plan` receives a module whose parameters are not drawn yet, and may communicate. `shard`
    /// receives such a module and the plan, and must not communicate; it must draw the parameters
    /// in the module's order, as [`shard_parameters`](crate::shard_parameters) does.
    ///
    /// # Errors
    /// `init` or `init_sharded` is called within `make`; any error of `plan` or `shard`.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LinearConfig;
    /// use halocline_core::{Launcher, Layout, ParamShard, Shard, shard_parameters};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("tensor", 2)])?;
    ///     let config = LinearConfig::new(3, 8);
    ///     let linear = world.init_sharded(
    ///         |device| config.init(device),
    ///         |_| Ok(()),
    ///         |linear, ()| shard_parameters(linear, |_, shape| {
    ///             let last = Layout::new(mesh.shape(), shape, &[Shard(shape.len() - 1)])?;
    ///             Ok(Some(ParamShard::new(last, &mesh)))
    ///         }),
    ///     )?;
    ///     assert_eq!(linear.weight.dims(), [3, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn init_sharded<M: Module, P>(
        &self,
        make: impl Fn(&Device) -> M,
        plan: impl FnOnce(&M) -> Result<P>,
        shard: impl FnOnce(M, P) -> Result<M>,
    ) -> Result<M> {
        let seed = self.next_seed();
        // Ranks that are threads share the generator, so no rank may communicate while it holds it.
        let sketch = module::seeded(&self.device, seed, &make)?;
        let plan = plan(&sketch)?;
        drop(sketch);
        module::seeded(&self.device, seed, |device| shard(make(device), plan))?
    }

    /// Returns the key for the [initial values](crate::InitialValues) of the parameters of one
    /// module, the same on all ranks. Each call counts as a module that is made, so all ranks must
    /// call it in the same order with [`init`](Self::init) and
    /// [`init_sharded`](Self::init_sharded). Nothing is sent.
    ///
    /// # Example
    /// ```
    /// halocline_core::Launcher::local(2).seed(5).run(|world| {
    ///     let [first, second] = [world.module_key(), world.module_key()];
    ///     assert_ne!(first, second);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn module_key(&self) -> RandomKey {
        let module = self.modules.fetch_add(1, Ordering::Relaxed);
        RandomKey::new(self.seed, ("module", module))
    }

    /// Broadcasts the parameters of rank `source`, which become leaves owned by each rank.
    ///
    /// All ranks of the world call it; [`DeviceMesh::sync_module`] is for those of a mesh.
    ///
    /// Also for modules made outside the ranks' program: ranks that are threads must not share
    /// leaves. Integers and booleans are sent, too. Running statistics, such as those of a batch
    /// norm, stay shared between clones of one module; make such a module with
    /// [`init`](Self::init).
    ///
    /// # Errors
    /// The module's structure differs between this rank and the source; communication fails.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LinearConfig;
    ///
    /// let shared = LinearConfig::new(3, 2).init(&burn::tensor::Device::default().autodiff());
    /// halocline_core::Launcher::local(2).run(|world| {
    ///     let linear = world.sync_module(shared.clone(), 0)?;
    ///     assert_eq!(linear.weight.val().into_data(), shared.weight.val().into_data());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn sync_module<M: Module>(&self, module: M, source: usize) -> Result<M> {
        module::sync(&self.comm, &self.everyone(), source, &self.device, module)
    }

    /// Checks that the parameters of all ranks, also those of integers and booleans, are equal, bit
    /// for bit.
    ///
    /// # Errors
    /// [`Error::Replicas`] with the first parameter that differs and the ranks; communication
    /// fails.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LinearConfig;
    ///
    /// halocline_core::Launcher::local(2).run(|world| {
    ///     let size = 3 + world.rank(); // a mistake
    ///     let linear = LinearConfig::new(size, 2).init(world.device());
    ///     let error = world.check_replicas(&linear).unwrap_err();
    ///     assert!(error.to_string().contains("parameter weight differs"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn check_replicas<M: Module>(&self, module: &M) -> Result<()> {
        module::compare_replicas(&self.comm, &self.everyone(), module)
    }

    /// Starts recording. Rank 0 creates the file first, so that an unwritable path fails at once.
    pub(crate) fn begin_trace(&self, file: &Path) -> Result<()> {
        if self.is_root() {
            std::fs::File::create(file)
                .map_err(|error| Error::other(format!("{}: {error}", file.display())))?;
        }
        trace::begin(self.rank());
        Ok(())
    }

    /// Collects the records of all ranks on rank 0 and writes them.
    pub(crate) fn write_trace(&self, file: &Path) -> Result<()> {
        let events = trace::end().unwrap_or_default();
        let mut batch = Batch {
            operation: Operation::new("trace", Traffic::Control, None),
            sends: Vec::new(),
            receives: Vec::new(),
        };
        if !self.is_root() {
            batch.sends.push((0, Payload::Bytes(events.into_bytes())));
            self.comm.clone().start(batch)?.finish()?;
            return Ok(());
        }
        batch.receives = (1..self.size())
            .map(|rank| (rank, Expected::Bytes))
            .collect();
        let others = self.comm.clone().start(batch)?.finish()?;
        let others = others.into_iter().map(|payload| match payload {
            Payload::Bytes(events) => String::from_utf8_lossy(&events).into_owned(),
            Payload::Tensors(_) => unreachable!("the engine gives what was expected, or an error"),
        });
        let ranks: Vec<String> = std::iter::once(events).chain(others).collect();
        std::fs::write(file, trace::document(&ranks))
            .map_err(|error| Error::other(format!("{}: {error}", file.display())))
    }

    /// Returns the seed of the next module.
    fn next_seed(&self) -> u64 {
        self.module_key().number()
    }

    fn everyone(&self) -> Vec<usize> {
        (0..self.size()).collect()
    }
}
