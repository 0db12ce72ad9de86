//! Parameters that are equal on all ranks.

use std::hash::BuildHasher;
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor, TensorData};
use foldhash::quality::FixedState;

use crate::comm::{Communicator, Expected, Operation, Payload, Traffic, collectives};
use crate::param::param_shards;
use crate::tensor::on_device;
use crate::{DeviceMesh, Error, Result};

/// Lock on the generator of the process, from which burn's initialisers draw.
static GENERATOR: Mutex<()> = Mutex::new(());

/// Makes something whose parameters depend on the seed alone. They are drawn on first use, so `make`
/// uses them, before another rank takes the generator.
pub(crate) fn seeded<T>(device: &Device, seed: u64, make: impl FnOnce(&Device) -> T) -> T {
    let _guard = GENERATOR.lock().unwrap_or_else(|e| e.into_inner());
    device.seed(seed);
    make(device)
}

/// Draws the parameters of a module.
pub(crate) fn draw<M: Module>(module: &M) {
    module.visit(&mut Checksums::default());
}

/// Sends every parameter of one rank to the others.
pub(crate) fn sync<M: Module>(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    source: usize,
    device: &Device,
    module: M,
) -> Result<M> {
    if let Some((path, _)) = param_shards(&module).first_key_value() {
        let message = format!("parameter {path} is sharded: ranks hold different parts of it");
        return Err(Error::operator("sync_module", message));
    }
    // Each rank owns its leaves, even if the program cloned one module into all ranks: shared
    // leaves deadlock.
    let module = module.fork(device);
    let mut sync = Sync {
        comm,
        group,
        source,
        path: Vec::new(),
        error: None,
    };
    let module = module.map(&mut sync);
    match sync.error {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

struct Sync<'a> {
    comm: &'a Arc<dyn Communicator>,
    group: &'a [usize],
    source: usize,
    path: Vec<String>,
    error: Option<Error>,
}

impl Sync<'_> {
    fn broadcast<const D: usize>(&self, tensor: Tensor<D>) -> Result<Tensor<D>> {
        let operation = Operation::new("sync_module", Traffic::Scatter, None);
        let plain = tensor.clone().inner();
        let payload = Payload::Tensors(vec![plain.clone().into_dispatch()]);
        let expected = Expected::Tensors {
            shapes: vec![tensor.shape()],
            dtype: tensor.dtype(),
            device: plain.device().as_dispatch().clone(),
        };
        let (comm, group, source) = (self.comm, self.group, self.source);
        let received = collectives::broadcast(comm, group, source, &operation, &payload, expected);
        let received = received.map_err(|error| match error {
            Error::Diverged { peer_operation, .. } => Error::Replicas(format!(
                "parameter {} is {:?} on rank {}, but rank {source} is in {peer_operation}; \
                 the ranks must make the same module together",
                self.path.join("."),
                tensor.dims(),
                comm.rank(),
            )),
            other => other,
        })?;
        Ok(match received {
            // A copy, so that ranks that are threads share no memory that one of them updates.
            Some(Payload::Tensors(mut tensors)) => {
                let received = tensors.pop().map(Tensor::<D>::from_dispatch);
                let data = received.map(|tensor| tensor.into_data());
                data.map_or(plain, |data| {
                    Tensor::from_data(data, (&tensor.device().inner(), tensor.dtype()))
                })
            }
            _ => plain,
        })
    }
}

impl ModuleMapper for Sync<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let tensor = match self.broadcast(tensor.clone()) {
            Ok(value) if tensor.is_autodiff() => {
                on_device(value, &tensor.device()).set_require_grad(tensor.is_require_grad())
            }
            Ok(value) => value,
            Err(error) => {
                self.error = Some(error);
                tensor
            }
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Checks that the ranks of a mesh have equal parameters, bit for bit;
/// [`World::check_replicas`](crate::World::check_replicas) has an example.
///
/// # Errors
/// [`Error::Replicas`] with the first parameter that differs, and the ranks; a failure of communication.
pub fn check_replicas<M: Module>(mesh: &DeviceMesh, module: &M) -> Result<()> {
    compare_replicas(mesh.comm(), mesh.shape().ranks(), module)
}

/// Compares checksums of all parameters, between ranks that hold the same cells of them.
pub(crate) fn compare_replicas<M: Module>(
    comm: &Arc<dyn Communicator>,
    group: &[usize],
    module: &M,
) -> Result<()> {
    let mut checksums = Checksums::default();
    module.visit(&mut checksums);
    let bytes: Vec<u8> = checksums
        .sums
        .iter()
        .flat_map(|(_, sum)| sum.to_le_bytes())
        .collect();
    let operation = Operation::new("check_replicas", Traffic::Control, None);
    let all = collectives::all_gather_bytes(comm, group, &operation, &bytes)?;
    let shards = param_shards(module);
    for (index, (rank, theirs)) in group.iter().zip(&all).enumerate() {
        if *theirs == all[0] && shards.is_empty() {
            continue;
        }
        // The first rank that holds the same cells of a parameter.
        let reference = |path: &str| match shards.get(path) {
            None => 0,
            Some(shard) => {
                // A rank of another mesh than this rank's shards is compared by its own.
                let held = shard.cells_of(*rank);
                let same = |other: &usize| shard.cells_of(group[*other]) == held;
                let other = held.is_some().then(|| (0..index).find(same)).flatten();
                other.unwrap_or(index)
            }
        };
        let sum = |bytes: &[u8], i: usize| bytes.get(8 * i..8 * i + 8).map(<[u8]>::to_vec);
        let differs = |i: &usize| {
            let (path, _) = &checksums.sums[*i];
            sum(theirs, *i) != sum(&all[reference(path)], *i)
        };
        let found = (0..checksums.sums.len()).find(differs);
        if found.is_none() && theirs.len() == all[0].len() {
            continue;
        }
        let path = found.map(|i| checksums.sums[i].0.as_str());
        return Err(Error::Replicas(format!(
            "parameter {} differs between rank {} and rank {rank}: make the model with World::init or, if it is not sharded, call sync_module; if it \
             was, a gradient was not summed over the ranks (of a parameter that a closure captures) or a rank took other steps",
            path.unwrap_or("count"),
            path.map_or(group[0], |path| group[reference(path)]),
        )));
    }
    Ok(())
}

#[derive(Default)]
struct Checksums {
    path: Vec<String>,
    sums: Vec<(String, u64)>,
}

impl ModuleVisitor for Checksums {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let data: TensorData = param.val().inner().into_data();
        let sum = FixedState::default().hash_one((&data.shape()[..], data.as_bytes()));
        self.sums.push((self.path.join("."), sum));
    }
}
