use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::kind::Basic;
use burn::tensor::{Bytes, DType, Tensor, TensorData};
use halocline_core::{
    DeviceMesh, IndexBox, IntoLayout, Layout, MeshShape, ShardTensor, World, param_shards,
};
use safetensors::Dtype;
use serde::de::DeserializeOwned;

use super::fetch::{Wanted, fetch};
use super::index::{self, Index, TensorEntry};
use super::parameters::{Parameter, difference, parameters};
use super::{file, pieces};
use crate::ranks::agreement::all_ranks;
use crate::{Error, Result};

/// Saved state: the folder of a checkpoint, or a single safetensors file.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
///
/// Launcher::local(3).run(|world| {
///     let mesh = world.mesh([("lat", 3)])?;
///     let mut checkpoints = Checkpoints::open(&world, folder, &CheckpointConfig::new())?;
///     let mut snapshot = Snapshot::new(&world);
///     snapshot.sharded("depth", &ShardTensor::<2>::ones([7, 4], &mesh, &[Shard(0)])?)?;
///     snapshot.value("epoch", &2)?;
///     checkpoints.save(40, snapshot, Some(0.5))?;
///     checkpoints.wait()
/// })?;
/// // Later, on another mesh,
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let checkpoint = Checkpoint::latest(&world, folder)?.expect("one was saved");
///     let depth: ShardTensor<2> = checkpoint.sharded(&mesh, "depth", &[Shard(1)])?;
///     assert_eq!(depth.local_dims(), [7, 2]);
///     assert_eq!(checkpoint.tensor::<2, burn::tensor::Float>(&world, "depth")?.dims(), [7, 4]);
///     Ok(())
/// })?;
/// // or on no mesh.
/// let checkpoint = Checkpoint::open(folder.join("step_000000040"))?;
/// assert_eq!((checkpoint.step(), checkpoint.ranks()), (40, 3));
/// assert_eq!(checkpoint.metric(), Some(0.5));
/// assert_eq!(checkpoint.not_finite(), None);
/// assert_eq!(checkpoint.value::<u32>("epoch")?, 2);
/// assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["depth"]);
/// assert_eq!(checkpoint.shape("depth")?, [7, 4]);
/// assert_eq!(checkpoint.data("depth")?.iter::<f32>().sum::<f32>(), 28.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Folder of the files.
    folder: PathBuf,
    /// Path that errors name.
    path: PathBuf,
    pub(super) index: Index,
    /// Tensors of a file of another program that cannot be read, and their types.
    pub(super) unknown: BTreeMap<String, Dtype>,
}

impl Checkpoint {
    /// Opens the folder of a checkpoint, or a safetensors file, whose tensors keep their names. The
    /// path may be a symbolic link. Complex tensors of a file have real and imaginary parts in a
    /// last dim.
    ///
    /// # Errors
    /// A path that does not exist, is not a checkpoint, or is damaged. Checksums of tensors are
    /// only verified when they are read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            let opened = Self::parse(path, &file::read_whole(&path.join(index::NAME))?)?;
            opened.check_files()?;
            return Ok(opened);
        }
        let followed = file::followed(path)?;
        let file::Contents {
            size,
            tensors,
            unknown,
            ..
        } = file::contents(&followed)?;
        let name = followed.file_name().unwrap_or_default().to_string_lossy();
        let mut index = Index::new(0, 1);
        index.files.insert(name.into(), size);
        index.tensors = tensors.into_iter().collect();
        let broken = |cause| Error::checkpoint(path, cause);
        index.check_pieces().map_err(broken)?;
        Ok(Self {
            folder: followed.parent().map(PathBuf::from).unwrap_or_default(),
            path: path.into(),
            index,
            unknown,
        })
    }

    /// Parses the text of the index of the checkpoint in `folder`.
    pub(super) fn parse(folder: &Path, text: &[u8]) -> Result<Self> {
        let path = folder.join(index::NAME);
        let index = Index::parse(text).map_err(|cause| Error::checkpoint(&path, cause))?;
        Ok(Self {
            folder: folder.into(),
            path,
            index,
            unknown: BTreeMap::new(),
        })
    }

    /// Checks that all files exist and have the size recorded in the index.
    pub(super) fn check_files(&self) -> Result<()> {
        for (name, expected) in &self.index.files {
            let path = self.folder.join(name);
            let (_, size) = file::open(&path)?;
            if size != *expected {
                let cause = format!("{size} bytes, expected {expected}; was a copy interrupted?");
                return Err(Error::checkpoint(&path, cause));
            }
        }
        Ok(())
    }

    /// Step at which the checkpoint was saved.
    pub fn step(&self) -> u64 {
        self.index.step
    }

    /// Checksum that identifies the checkpoint: a CRC-32 of its index, which contains the checksums
    /// of its tensors unless another program wrote the file.
    pub fn fingerprint(&self) -> u32 {
        let index = serde_json::to_vec(&self.index).expect("numbers, texts and lists");
        crc32fast::hash(&index)
    }

    /// Number of ranks that saved the checkpoint.
    pub fn ranks(&self) -> usize {
        self.index.ranks
    }

    /// Metric of the save, if it had a finite one.
    pub fn metric(&self) -> Option<f64> {
        self.index.metric
    }

    /// First tensor of the state with a NaN or infinite value. The state is all tensors except
    /// those of [`Snapshot::data`](super::Snapshot::data). `None` if all are finite, or if this is
    /// unknown, as in files of other programs and of older versions.
    pub fn not_finite(&self) -> Option<&str> {
        self.index.not_finite.as_deref()
    }

    /// Returns the stderr message about a checkpoint that is [not finite](Self::not_finite).
    pub(super) fn not_finite_message(&self) -> String {
        let name = self.not_finite().unwrap_or_default();
        format!(
            "{}: {name:?} has values that are not finite",
            self.folder.display()
        )
    }

    /// Names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.tensors.keys().map(String::as_str)
    }

    /// Returns the global shape of a tensor.
    ///
    /// # Errors
    /// No tensor of that name.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.entry(name)?.shape)
    }

    /// Reads a value.
    ///
    /// # Errors
    /// No value of that name; a value that does not deserialize to `T`.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let value = self.index.values.get(name).ok_or_else(|| {
            let names: Vec<&String> = self.index.values.keys().collect();
            self.broken(format!("no value {name:?}; it has {names:?}"))
        })?;
        serde_json::from_value(value.clone())
            .map_err(|e| self.broken(format!("value {name:?}: {e}")))
    }

    /// Reads a whole tensor on the calling rank alone.
    ///
    /// # Errors
    /// No tensor of that name; files that cannot be read, or are damaged.
    pub fn data(&self, name: &str) -> Result<TensorData> {
        let entry = self.entry(name)?;
        let dtype = entry.element_type();
        let whole = IndexBox::whole(&entry.shape);
        let mut bytes = vec![0; whole.volume() * dtype.size()];
        for piece in &entry.pieces {
            let read = file::read(&self.folder, piece)?;
            let cells = piece.cells();
            pieces::copy((&read, &cells), (&mut bytes, &whole), &cells, dtype.size());
        }
        Ok(TensorData::from_bytes_vec(
            bytes,
            entry.shape.clone(),
            dtype,
        ))
    }

    /// Reads the tensors of a module as a burn record on the calling rank alone, for example to
    /// save it as a single file.
    ///
    /// # Errors
    /// No module of that name; files that cannot be read, or are damaged.
    pub fn module_record(&self, name: &str) -> Result<ModuleRecord> {
        let tensors = self
            .names_in(name)?
            .into_iter()
            .map(|(whole, short)| Ok((short, self.data(&whole)?)))
            .collect::<Result<_>>()?;
        self.record(tensors, &[])
    }

    /// Loads a whole tensor on all ranks. Each rank reads a share and sends it to the others.
    ///
    /// # Errors
    /// On all ranks: no tensor of that name; another number of dims or kind; ranks that load
    /// different tensors; files that cannot be read, or are damaged.
    pub fn tensor<const D: usize, K: Basic>(
        &self,
        world: &World,
        name: &str,
    ) -> halocline_core::Result<Tensor<D, K>> {
        let mesh = all_ranks(world)?;
        let layout = Layout::replicated(mesh.shape(), &self.entry(name)?.shape);
        self.place(name, &mesh, &layout)
    }

    /// Loads a whole tensor on all ranks like [`tensor`](Self::tensor), into host memory.
    ///
    /// # Errors
    /// Errors of [`tensor`](Self::tensor).
    pub fn tensor_data(&self, world: &World, name: &str) -> halocline_core::Result<TensorData> {
        let names = vec![(name.to_string(), String::new())];
        Ok(self.fetch_whole(world, names)?.remove(0).1)
    }

    /// Loads a sharded tensor. Each rank receives its shard, whatever mesh saved the tensor. The
    /// layout may be placements or a [`Layout`].
    ///
    /// # Errors
    /// Errors of [`tensor`](Self::tensor); placements that do not fit or are `Partial`; a layout of
    /// another mesh or shape.
    pub fn sharded<const D: usize, K: Basic>(
        &self,
        mesh: &DeviceMesh,
        name: &str,
        layout: impl IntoLayout,
    ) -> halocline_core::Result<ShardTensor<D, K>> {
        let shape = &self.entry(name)?.shape;
        let layout = layout.layout_like(&Layout::replicated(mesh.shape(), shape))?;
        if layout.partial_axis().is_some() {
            let expected = format!("{shape:?} on Shard and Replicate, as {name:?} was saved");
            return Err(Error::argument("layout", layout, expected).into());
        }
        let local = self.place(name, mesh, &layout)?;
        ShardTensor::from_local(local, mesh, &layout)
    }

    /// Loads this rank's cells of a tensor.
    fn place<const D: usize, K: Basic>(
        &self,
        name: &str,
        mesh: &DeviceMesh,
        layout: &Layout,
    ) -> halocline_core::Result<Tensor<D, K>> {
        if layout.shape().len() != D {
            let got = format!("{name:?}, {D} dims");
            let expected = format!("the {} of {:?}", layout.shape().len(), layout.shape());
            return Err(Error::argument("tensor", got, expected).into());
        }
        let entry = self.entry(name)?;
        let dtype = entry.element_type();
        let kind = match dtype {
            _ if dtype.is_float() => "Float",
            DType::Bool(_) => "Bool",
            _ => "Int",
        };
        if kind != K::name() {
            let got = format!("{name:?} as {}", K::name());
            return Err(
                Error::argument("tensor", got, format!("{kind}: it is of {dtype:?}")).into(),
            );
        }
        let layout = layout.clone();
        let wanted = Wanted {
            name,
            entry,
            layout,
        };
        let data = fetch(&self.folder, mesh, &[wanted])?.remove(0);
        let device = mesh.device();
        Ok(match dtype {
            // Devices choose the storage type of booleans.
            DType::Bool(_) => Tensor::from_data(data, device),
            _ => Tensor::from_data(data, (device, dtype)),
        })
    }

    /// Loads the tensors of a module on all ranks. Each rank receives its shard of sharded
    /// parameters, whatever mesh and layout saved them. Parameters keep the `ParamId`s that they
    /// have in `module`, which the parameter groups of an optimizer may refer to.
    ///
    /// # Errors
    /// On all ranks: a tensor that is missing in the checkpoint or the module, or differs in shape
    /// or type, of which the error names the first; files that cannot be read, or are damaged.
    pub fn module<M: Module>(
        &self,
        world: &World,
        name: &str,
        module: M,
    ) -> halocline_core::Result<M> {
        let names = self.names_in(name)?;
        let parameters = parameters(&module);
        let shards = param_shards(&module);
        let described = |(whole, short): &(String, String)| {
            let entry = self.entry(whole)?;
            Ok::<_, Error>((short.clone(), (entry.element_type(), entry.shape.clone())))
        };
        let described = names.iter().map(described);
        let described = described.collect::<Result<BTreeMap<_, _>>>()?;
        if let Some(difference) = difference(&parameters, &shards, &described) {
            return Err(self.broken(format!("{name:?}: {difference}")).into());
        }
        let mesh = shards.values().next().map(|shard| shard.mesh().clone());
        let layout_of = |short: &str| Some(shards.get(short)?.layout().clone());
        let tensors = self.fetch_laid(world, mesh, names, layout_of)?;
        Ok(module
            .try_load_record(self.record(tensors, &parameters)?)
            .map_err(|error| self.broken(format!("{name:?}: {error}")))?)
    }

    /// Loads whole tensors on all ranks; returns them with their short names.
    pub(super) fn fetch_whole(
        &self,
        world: &World,
        names: Vec<(String, String)>,
    ) -> halocline_core::Result<Vec<(String, TensorData)>> {
        self.fetch_laid(world, None, names, |_| None)
    }

    /// Loads this rank's cells of tensors; returns them with their short names. Tensors without a
    /// layout are loaded whole.
    pub(super) fn fetch_laid(
        &self,
        world: &World,
        mesh: Option<DeviceMesh>,
        names: Vec<(String, String)>,
        layout_of: impl Fn(&str) -> Option<Layout>,
    ) -> halocline_core::Result<Vec<(String, TensorData)>> {
        let mesh = match mesh {
            Some(mesh) => mesh,
            None => all_ranks(world)?,
        };
        let wanted = names
            .iter()
            .map(|(whole, short)| {
                let entry = self.entry(whole)?;
                let layout = match layout_of(short) {
                    None => Layout::replicated(mesh.shape(), &entry.shape),
                    Some(layout) if !have_same_ranks(layout.mesh(), mesh.shape()) => {
                        let [got, expected] =
                            [layout.mesh(), mesh.shape()].map(|mesh| mesh.ranks());
                        let cause =
                            format!("{whole:?} is of ranks {got:?}, others of {expected:?}");
                        return Err(self.broken(cause));
                    }
                    Some(layout) if layout.shape() == entry.shape => layout,
                    Some(layout) => {
                        let cause = format!(
                            "{whole:?} is {:?}, expected {:?}",
                            entry.shape,
                            layout.shape()
                        );
                        return Err(self.broken(cause));
                    }
                };
                Ok(Wanted {
                    name: whole,
                    entry,
                    layout,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let data = fetch(&self.folder, &mesh, &wanted)?;
        Ok(names
            .into_iter()
            .map(|(_, short)| short)
            .zip(data)
            .collect())
    }

    /// Lists the tensors of a module: their names in the checkpoint and within the module.
    pub(super) fn names_in(&self, name: &str) -> Result<Vec<(String, String)>> {
        let prefix = if name.is_empty() {
            String::new()
        } else {
            format!("{name}.")
        };
        let names: Vec<_> = self
            .names()
            .filter_map(|whole| Some((whole.to_string(), whole.strip_prefix(&prefix)?.to_string())))
            .collect();
        if names.is_empty() {
            return Err(self.broken(format!("no tensors of {name:?}")));
        }
        Ok(names)
    }

    fn entry(&self, name: &str) -> Result<&TensorEntry> {
        self.index.tensors.get(name).ok_or_else(|| {
            let unknown = self.unknown.get(name);
            self.broken(unknown.map_or_else(
                || format!("no tensor {name:?}"),
                |dtype| format!("tensor {name:?} is of type {dtype:?}, which burn lacks"),
            ))
        })
    }

    /// Builds a burn record of tensors. Each takes the `ParamId` of the one of `parameters` with
    /// the same path, else a new one.
    fn record(
        &self,
        tensors: Vec<(String, TensorData)>,
        parameters: &[Parameter],
    ) -> Result<ModuleRecord> {
        let ids = parameters
            .iter()
            .map(|parameter| (parameter.path.as_str(), parameter.id));
        let ids: BTreeMap<&str, u64> = ids.collect();
        let packed = tensors.into_iter().map(|(name, data)| {
            let id = ids.get(name.as_str()).copied();
            pack(name, data, id)
        });
        let tensors = packed.collect();
        let bytes = burn_pack::Writer::new(tensors)
            .into_bytes()
            .map_err(|error| self.broken(error.to_string()))?;
        ModuleRecord::from_bytes(bytes).map_err(|error| self.broken(error.to_string()))
    }

    pub(super) fn broken(&self, cause: impl Into<String>) -> Error {
        Error::checkpoint(&self.path, cause)
    }
}

/// Converts a tensor to the format of burn's files.
pub(super) fn pack(name: String, data: TensorData, id: Option<u64>) -> burn_pack::Tensor {
    let (bytes, shape, dtype): (Bytes, _, _) = data.into_parts();
    burn_pack::Tensor::new(name, dtype, shape, id, bytes)
}

/// Whether two meshes have the same ranks, in any order.
fn have_same_ranks(one: &MeshShape, other: &MeshShape) -> bool {
    let sorted = |mesh: &MeshShape| {
        let mut ranks = mesh.ranks().to_vec();
        ranks.sort_unstable();
        ranks
    };
    sorted(one) == sorted(other)
}
