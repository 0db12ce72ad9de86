//! Optimizers and learning-rate schedules in checkpoints.

use std::collections::BTreeMap;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, DType, Device, TensorData};
use burn_pack::{Reader, Writer};
use halocline_core::{ParamShard, World, param_shards};

use super::file::Role;
use super::load::pack;
use super::parameters::{Parameter, parameters};
use super::{Checkpoint, Snapshot};
use crate::{Error, Result};

/// Suffix of the tensor that holds the scalars of an optimizer, in burn's encoding.
const SCALARS: &str = "scalars";

/// Returns the parameters that are divided among ranks.
fn divided<M: Module>(module: &M) -> BTreeMap<String, ParamShard> {
    let mut shards = param_shards(module);
    shards.retain(|_, shard| shard.is_divided());
    shards
}

/// Whether a state belongs to the parameter with this path.
fn is_of(state: &str, parameter: &str) -> bool {
    let field = state.strip_prefix(parameter);
    field.is_some_and(|field| field.starts_with('.'))
}

impl Snapshot {
    /// Adds the state of an optimizer of `module`'s parameters, as `name.path.of.parameter.moment`.
    /// The states of a sharded parameter are sharded like the parameter.
    ///
    /// # Errors
    /// Errors of [`module`](Self::module); a state whose type is not the default of the device, to
    /// which burn would convert it on loading; a state of a divided parameter that differs from its
    /// shard in shape.
    pub fn optimizer<M: Module>(
        &mut self,
        name: &str,
        optimizer: &ModuleOptimizer,
        module: &M,
    ) -> Result<()> {
        let other = |error: String| Error::argument("optimizer", name, error);
        let bytes = optimizer
            .to_record()
            .into_bytes()
            .map_err(|e| other(e.to_string()))?;
        let reader = Reader::from_bytes(bytes).map_err(|e| other(e.to_string()))?;
        // burn names states by the `ParamId` of their parameter, which differs from run to run.
        let paths = reader.metadata().clone();
        let portable = |key: &str| {
            let (id, field) = key.split_once('.')?;
            Some(format!("{}.{field}", paths.get(id)?))
        };
        let unknown = |key: &str| other(format!("state {key:?} of a parameter that has no path"));
        let mut scalars = Writer::new(Vec::new());
        for (key, value) in reader.scalars() {
            scalars = scalars.with_scalar(&portable(key).ok_or_else(|| unknown(key))?, *value);
        }
        let scalars = scalars.into_bytes().map_err(|e| other(e.to_string()))?;
        self.bytes(&format!("{name}.{SCALARS}"), &scalars)?;
        let tensors = reader.into_tensors().map_err(|e| other(e.to_string()))?;
        let mut states = BTreeMap::new();
        let restored = DType::from(Device::default().settings().float_dtype);
        for tensor in tensors {
            let parts = tensor.into_parts().map_err(|e| other(e.to_string()))?;
            let (key, dtype, shape, _, bytes) = parts;
            if dtype.is_float() && dtype != restored {
                return Err(other(format!(
                    "state {key:?} is {dtype:?}, and burn restores states as {restored:?}, the default of the device; \
                     set that to the type of the parameters by Device::configure, before anything else uses the device"
                )));
            }
            let data = TensorData::from_bytes(bytes, shape, dtype);
            states.insert(portable(&key).ok_or_else(|| unknown(&key))?, data);
        }
        let shards = divided(module);
        states.iter().try_for_each(|(path, data)| {
            let (full, role) = (format!("{name}.{path}"), Role::State);
            let Some((_, shard)) = shards.iter().find(|(parameter, _)| is_of(path, parameter))
            else {
                return self.add_data((&full, role), data);
            };
            let held = shard.layout().local_box(shard.mesh().position());
            if data.shape()[..] != held.shape() {
                let got = format!("{path} {:?} of a shard {:?}", data.shape(), held.shape());
                let expected = "states of the shape of their parameter, element by element";
                return Err(Error::argument("optimizer", got, expected));
            }
            self.add_cells((&full, role), data, shard.layout(), &held)
        })
    }

    /// Adds the state of a learning-rate schedule.
    ///
    /// # Errors
    /// Errors of [`tensor`](Self::tensor).
    pub fn schedule(&mut self, name: &str, schedule: &ModuleLrScheduler) -> Result<()> {
        let bytes = schedule
            .to_record()
            .into_bytes()
            .map_err(|error| Error::argument("schedule", name, error.to_string()))?;
        self.bytes(name, &bytes)
    }

    fn bytes(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.data(name, &TensorData::new(bytes.to_vec(), [bytes.len()]))
    }
}

impl Checkpoint {
    /// Loads the state of an optimizer of `module`'s parameters, on all ranks.
    ///
    /// # Errors
    /// On all ranks: a state of other parameters, or of an optimizer with a different kind of state
    /// (Adam and AdamW have the same); files that cannot be read, or are damaged.
    ///
    /// # Example
    /// ```
    /// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::{AdamWConfig, ModuleOptimizer};
    /// use halocline_core::Launcher;
    /// use halocline_io::{CheckpointConfig, Checkpoints, Snapshot};
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path();
    ///
    /// Launcher::local(2).run(|world| {
    ///     let model: Linear = world.init(|device| LinearConfig::new(3, 2).init(device))?;
    ///     let optimizer: ModuleOptimizer = AdamWConfig::new().init();
    ///     let schedule = ModuleLrScheduler::new(1e-3);
    ///     let mut snapshot = Snapshot::new(&world);
    ///     snapshot.module("model", &model)?;
    ///     snapshot.optimizer("optimizer", &optimizer, &model)?;
    ///     snapshot.schedule("schedule", &schedule)?;
    ///     let mut checkpoints = Checkpoints::open(&world, folder, &CheckpointConfig::new())?;
    ///     checkpoints.save(1, snapshot, None)?;
    ///
    ///     let checkpoint = checkpoints.latest()?.expect("one was saved");
    ///     let model = checkpoint.module(&world, "model", model)?;
    ///     let optimizer = checkpoint.optimizer(&world, "optimizer", optimizer, &model)?;
    ///     checkpoint.schedule(&world, "schedule", schedule)?;
    ///     assert!(checkpoint.optimizer(&world, "model", optimizer, &model).is_err());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn optimizer<M: Module>(
        &self,
        world: &World,
        name: &str,
        optimizer: ModuleOptimizer,
        module: &M,
    ) -> halocline_core::Result<ModuleOptimizer> {
        let shards = divided(module);
        let mesh = shards.values().next().map(|shard| shard.mesh().clone());
        let layout_of = |state: &str| {
            let mut owners = shards.iter();
            let (_, shard) = owners.find(|(parameter, _)| is_of(state, parameter))?;
            Some(shard.layout().clone())
        };
        let names = self.names_in(name)?;
        let tensors = self.fetch_laid(world, mesh, names, layout_of)?;
        let mut tensors: BTreeMap<String, TensorData> = tensors.into_iter().collect();
        let broken = |cause: String| self.broken(format!("{name:?}: {cause}"));
        let scalars = tensors
            .remove(SCALARS)
            .ok_or_else(|| broken("is not an optimizer".into()))?;
        let scalars = Reader::from_bytes(Bytes::from_bytes_vec(scalars.as_bytes().to_vec()))
            .map_err(|e| broken(e.to_string()))?;

        let parameters = parameters(module);
        // No path is a prefix of another, so the parameter of a state is unambiguous.
        let parameter = |key: &str| {
            let owns = |parameter: &&Parameter| is_of(key, &parameter.path);
            let lacking = || broken(format!("{key:?} is of a parameter that the module lacks"));
            parameters.iter().find(owns).ok_or_else(lacking)
        };
        let named = |key: &str, parameter: &Parameter| {
            format!("{}{}", parameter.id, &key[parameter.path.len()..])
        };
        let mut packed = Vec::new();
        for (key, data) in tensors {
            let parameter = parameter(&key)?;
            // burn panics if the rank differs.
            let dims = parameter.shape.len();
            if data.rank() != dims {
                let cause = format!("{key:?} has {} dims, {dims}", data.rank());
                return Err(broken(format!("{cause} expected")).into());
            }
            packed.push(pack(named(&key, parameter), data, Some(parameter.id)));
        }
        let summary = |state: &burn_pack::Tensor| (state.name.clone(), Some(state.dtype));
        let mut saved: Vec<(String, Option<DType>)> = packed.iter().map(summary).collect();
        let mut record = Writer::new(packed);
        for (key, value) in scalars.scalars() {
            let parameter = parameter(key)?;
            let (rank, expected) = (usize::try_from(*value).ok(), parameter.shape.len());
            if key.ends_with(".__rank") && rank != Some(expected) {
                return Err(broken(format!("{key:?} is {value:?}, {expected} expected")).into());
            }
            saved.push((named(key, parameter), None));
            record = record.with_scalar(&named(key, parameter), *value);
            record = record.with_metadata(&parameter.id.to_string(), &parameter.path);
        }
        let record = record.into_bytes().map_err(|e| broken(e.to_string()))?;
        let record = OptimizerRecord::from_bytes(record).map_err(|e| broken(e.to_string()))?;
        let optimizer = optimizer.load_record(record);
        // burn silently ignores states that it cannot use, and converts the others to the default
        // type of the device.
        let loaded = optimizer
            .to_record()
            .into_bytes()
            .map_err(|e| broken(e.to_string()))?;
        let loaded = Reader::from_bytes(loaded).map_err(|e| broken(e.to_string()))?;
        let mut used: Vec<(String, Option<DType>)> = loaded
            .scalars()
            .keys()
            .map(|key| (key.clone(), None))
            .collect();
        let tensors = loaded.into_tensors().map_err(|e| broken(e.to_string()))?;
        used.extend(tensors.iter().map(summary));
        for states in [&mut used, &mut saved] {
            states.sort_by(|(one, _), (other, _)| one.cmp(other));
        }
        if used != saved {
            // The checkpoint is not damaged, and earlier ones have the same states.
            let got = "an optimizer of another kind, or another default type of the device";
            let expected = format!(
                "those of the saved step {}; choose another folder for another optimizer",
                self.step()
            );
            return Err(Error::argument("optimizer", got, expected).into());
        }
        Ok(optimizer)
    }

    /// Loads the state of a learning-rate schedule, on all ranks.
    ///
    /// # Errors
    /// On all ranks: a state of another kind of schedule; files that cannot be read, or are
    /// damaged.
    pub fn schedule(
        &self,
        world: &World,
        name: &str,
        schedule: ModuleLrScheduler,
    ) -> halocline_core::Result<ModuleLrScheduler> {
        let data = self.tensor_data(world, name)?;
        let bytes = || Bytes::from_bytes_vec(data.as_bytes().to_vec());
        let broken = |cause: String| self.broken(format!("{name:?}: {cause}"));
        let record = LrSchedulerRecord::from_bytes(bytes()).map_err(|e| broken(e.to_string()))?;
        let schedule = schedule.load_record(record);
        let loaded = schedule
            .to_record()
            .into_bytes()
            .map_err(|e| broken(e.to_string()))?;
        let names = |bytes: Bytes| -> Result<Vec<String>> {
            let reader = Reader::from_bytes(bytes).map_err(|e| broken(e.to_string()))?;
            Ok(reader.scalars().keys().cloned().collect())
        };
        // burn silently ignores values that it cannot use.
        if names(bytes())? != names(loaded)? {
            return Err(broken("was saved by a schedule of another kind".into()).into());
        }
        Ok(schedule)
    }
}
