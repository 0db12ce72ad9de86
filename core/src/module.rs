//! Modules with equal parameters on all ranks.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::kind::Autodiff;
use burn::tensor::{Bool, Device, Int, Tensor};
use foldhash::quality::FixedState;

use crate::comm::{Communicator, Expected, Operation, Payload, Traffic, collectives};
use crate::lock::lock;
use crate::param::{ParamShard, param_shards};
use crate::paths::{PathVisitor, visit_paths};
use crate::scoped::with_value;
use crate::tensor::on_device;
use crate::{DeviceMesh, Error, Result};

/// Lock on the process-wide generator from which burn's initialisers draw.
static GENERATOR: Mutex<()> = Mutex::new(());

thread_local! {
    /// Whether this rank holds the generator.
    static DRAWS: Cell<bool> = const { Cell::new(false) };
}

/// Makes a module or part of one whose parameters depend only on the seed. burn draws parameters on
/// first use, so `make` must use them before another rank takes the generator.
///
/// # Errors
/// A nested call within `make`, which would deadlock.
pub(crate) fn seeded<T>(device: &Device, seed: u64, make: impl FnOnce(&Device) -> T) -> Result<T> {
    if DRAWS.get() {
        let message = "called while another module is made; make both of one device";
        return Err(Error::operator("init", message));
    }
    with_value(&DRAWS, true, || {
        let _guard = lock(&GENERATOR);
        device.seed(seed);
        Ok(make(device))
    })
}

/// Draws the parameters of a module.
pub(crate) fn draw<M: Module>(module: &M) {
    visit_paths(module, &mut Checksums::default());
}

/// Broadcasts every parameter of one rank to the others.
pub(crate) fn sync<M: Module>(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    source: usize,
    device: &Device,
    module: M,
) -> Result<M> {
    let shards = param_shards(&module);
    if let Some((path, _)) = shards.iter().find(|(_, shard)| shard.is_divided()) {
        let message = format!("parameter {path} is sharded: ranks hold different parts of it");
        return Err(Error::operator("sync_module", message));
    }
    // Each rank must own its leaves, even if the program cloned one module into all ranks: shared
    // leaves deadlock.
    let module = module.fork(device);
    let mut held = Held::default();
    visit_paths(&module, &mut held);
    // Not while parameters are mapped: a batch norm shared between ranks locks its statistics
    // during that.
    let received = held.0.into_iter().map(|(path, tensor)| {
        let operation = Operation::new("sync_module", Traffic::Scatter, None);
        let expected = Expected::Tensors {
            shapes: vec![tensor.shape()],
            dtype: tensor.dtype(),
            device: tensor.device(),
        };
        let (shape, payload) = (tensor.shape(), Payload::Tensors(vec![tensor]));
        let received = collectives::broadcast(comm, group, source, &operation, &payload, expected);
        let received = received.map_err(|error| match error {
            Error::Diverged {
                peer,
                peer_operation,
                ..
            } => Error::Replicas(format!(
                "parameter {path} is {:?} on rank {}, but rank {peer} is in {peer_operation}; \
                 the ranks must make the same module together",
                shape.to_vec(),
                comm.rank(),
            )),
            other => other,
        })?;
        Ok(collectives::only_tensor(received))
    });
    let received: Vec<Option<DispatchTensor>> = received.collect::<Result<_>>()?;
    Ok(module.map(&mut Received(received.into_iter())))
}

/// The paths and values of the parameters of a module, in module order.
#[derive(Default)]
struct Held(Vec<(String, DispatchTensor)>);

impl Held {
    fn add<const D: usize, K: Autodiff>(&mut self, path: &[String], tensor: Tensor<D, K>) {
        let plain = tensor.inner();
        self.0.push((path.join("."), plain.into_dispatch()));
    }
}

impl PathVisitor for Held {
    fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        self.add(path, param.val());
    }

    fn visit_int<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D, Int>>) {
        self.add(path, param.val());
    }

    fn visit_bool<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D, Bool>>) {
        self.add(path, param.val());
    }
}

/// Replaces parameters, in module order, by the received values, where there are any.
struct Received(std::vec::IntoIter<Option<DispatchTensor>>);

impl Received {
    fn value<const D: usize, K: Autodiff>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        let received = self.0.next().expect("a value for each parameter");
        let plain = tensor.clone().inner();
        let value = match received {
            // A copy, so that ranks that are threads do not share memory that one of them updates.
            Some(received) => {
                let data = Tensor::<D, K>::from_dispatch(received).into_data();
                Tensor::from_data(data, (&plain.device(), plain.dtype()))
            }
            None => plain,
        };
        if tensor.is_autodiff() {
            on_device(value, &tensor.device())
        } else {
            value
        }
    }
}

impl ModuleMapper for Received {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let tracked = tensor.is_require_grad();
        let value = self.value(tensor).set_require_grad(tracked);
        Param::from_mapped_value(id, value, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, self.value(tensor), mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, self.value(tensor), mapper)
    }
}

impl DeviceMesh {
    /// Broadcasts the parameters of one rank to the other ranks of a mesh, such as one from
    /// [`World::mesh_over`](crate::World::mesh_over), where
    /// [`World::init`](crate::World::init) and
    /// [`World::sync_module`](crate::World::sync_module) would wait for ranks outside it. `source`
    /// is the rank in the world.
    ///
    /// # Errors
    /// The errors of [`World::sync_module`](crate::World::sync_module); a source outside the mesh.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LinearConfig;
    /// use halocline_core::Launcher;
    ///
    /// Launcher::local(3).run(|world| {
    ///     // Rank 0 does something else.
    ///     if let Some(mesh) = world.mesh_over([("data", 2)], &[1, 2])? {
    ///         let linear = LinearConfig::new(3, 2).init(mesh.device());
    ///         let linear = mesh.sync_module(linear, 1)?;
    ///         mesh.check_replicas(&linear)?;
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn sync_module<M: Module>(&self, module: M, source: usize) -> Result<M> {
        let ranks = self.shape().ranks();
        sync(self.comm(), ranks, source, self.device(), module)
    }

    /// Checks that the parameters of all ranks of a mesh are equal, bit for bit; see the example of
    /// [`World::check_replicas`](crate::World::check_replicas).
    ///
    /// # Errors
    /// [`Error::Replicas`] with the first parameter that differs and the ranks; communication
    /// fails.
    pub fn check_replicas<M: Module>(&self, module: &M) -> Result<()> {
        compare_replicas(self.comm(), self.shape().ranks(), module)
    }
}

/// Compares checksums of all parameters between ranks that hold the same cells of them.
pub(crate) fn compare_replicas<M: Module>(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    module: &M,
) -> Result<()> {
    // Makes burn's layers merge the pending update of their running statistics, which is then
    // compared too.
    drop(module.valid());
    let mut checksums = Checksums::default();
    visit_paths(module, &mut checksums);
    let bytes: Vec<u8> = checksums
        .sums
        .iter()
        .flat_map(|(_, sum)| sum.to_le_bytes())
        .collect();
    let operation = Operation::new("check_replicas", Traffic::Control, None);
    let all = collectives::all_gather_bytes(comm, group, &operation, &bytes)?;
    let shards = param_shards(module);
    // For each sharded parameter and each rank, the first rank that holds the same cells. A rank
    // outside the mesh of this rank's shards is compared only with itself.
    let holders = |shard: &ParamShard| {
        let mut first = HashMap::new();
        let holder = |(index, rank): (usize, &usize)| match shard.cells_of(*rank) {
            None => index,
            Some(held) => *first.entry(held).or_insert(index),
        };
        group.iter().enumerate().map(holder).collect::<Vec<_>>()
    };
    let holders: BTreeMap<&String, Vec<usize>> = shards
        .iter()
        .map(|(path, shard)| (path, holders(shard)))
        .collect();
    for (index, (rank, theirs)) in group.iter().zip(&all).enumerate() {
        if *theirs == all[0] && shards.is_empty() {
            continue;
        }
        let reference = |path: &String| holders.get(path).map_or(0, |holders| holders[index]);
        let sum = |bytes: &[u8], i: usize| bytes.get(8 * i..8 * i + 8).map(<[u8]>::to_vec);
        let differs = |i: &usize| {
            let (path, _) = &checksums.sums[*i];
            sum(theirs, *i) != sum(&all[reference(path)], *i)
        };
        let found = (0..checksums.sums.len()).find(differs);
        if found.is_none() && theirs.len() == all[0].len() {
            continue;
        }
        let path = found.map(|i| &checksums.sums[i].0);
        return Err(Error::Replicas(format!(
            "parameter {} differs between rank {} and rank {rank}: make the model with World::init or, if it is not sharded, call sync_module; if it \
             was, a gradient was not summed over the ranks (of a parameter that a closure captures) or a rank took other steps",
            path.map_or("count", String::as_str),
            path.map_or(group[0], |path| group[reference(path)]),
        )));
    }
    Ok(())
}

#[derive(Default)]
struct Checksums {
    sums: Vec<(String, u64)>,
}

impl Checksums {
    fn add<const D: usize, K: Autodiff>(&mut self, path: &[String], tensor: Tensor<D, K>) {
        let data = tensor.inner().into_data();
        let sum = FixedState::default().hash_one((&data.shape()[..], data.as_bytes()));
        self.sums.push((path.join("."), sum));
    }
}

impl PathVisitor for Checksums {
    fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        self.add(path, param.val());
    }

    fn visit_int<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D, Int>>) {
        self.add(path, param.val());
    }

    fn visit_bool<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D, Bool>>) {
        self.add(path, param.val());
    }
}
