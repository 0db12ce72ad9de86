use std::borrow::Cow;
use std::cell::RefCell;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::kind::Basic;
use burn::tensor::{Bytes, DType, Tensor, TensorData};
use halocline_core::{DeviceMesh, IndexBox, Layout, LocalGradient, Placement, ShardTensor, World};
use safetensors::Dtype;
use safetensors::tensor::View;
use serde::de::DeserializeOwned;

use super::fetch::{Wanted, fetch};
use super::index::{self, Index, PieceEntry, TensorEntry};
use super::parameters::parameters;
use super::{dtype, file, pieces};
use crate::staged::Staged;
use crate::{Error, Result};

/// A saved state: the folder of a checkpoint, or a single safetensors file.
///
/// # Example
/// ```
/// use halocline_core::Launcher;
/// use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
///
/// Launcher::local(3).run(|world| {
///     let mut checkpoints = Checkpoints::open(&world, folder, &CheckpointConfig::new())?;
///     let mut snapshot = Snapshot::new(&world);
///     snapshot.value("epoch", &2)?;
///     checkpoints.save(40, snapshot, None)?;
///     checkpoints.wait()
/// })?;
/// // Later, on other ranks or none.
/// let checkpoint = Checkpoint::open(folder.join("step_000000040"))?;
/// assert_eq!(checkpoint.value::<u32>("epoch")?, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The folder of the files.
    folder: PathBuf,
    /// What errors name.
    path: PathBuf,
    pub(super) index: Index,
}

impl Checkpoint {
    /// Opens the folder of a checkpoint, or a safetensors file, whose tensors keep their names. The path may be a link.
    ///
    /// # Errors
    /// What is not there, is no checkpoint, or is damaged. The tensors' own checksums are compared when they are read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            let opened = Self::parse(path, &file::read_whole(&path.join(index::NAME))?)?;
            opened.check_files()?;
            return Ok(opened);
        }
        let followed = file::followed(path)?;
        let file::Contents { size, tensors, .. } = file::contents(&followed)?;
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
        })
    }

    /// The checkpoint in a folder whose index has this text.
    pub(super) fn parse(folder: &Path, text: &[u8]) -> Result<Self> {
        let path = folder.join(index::NAME);
        let index = Index::parse(text).map_err(|cause| Error::checkpoint(&path, cause))?;
        Ok(Self {
            folder: folder.into(),
            path,
            index,
        })
    }

    /// Checks that all files are there in their size.
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

    /// The step that it was saved at.
    pub fn step(&self) -> u64 {
        self.index.step
    }

    /// The number of ranks that saved it.
    pub fn ranks(&self) -> usize {
        self.index.ranks
    }

    /// The metric that it was saved with.
    pub fn metric(&self) -> Option<f64> {
        self.index.metric
    }

    /// The first tensor of the state (all but [`Snapshot::data`](super::Snapshot::data)) with a value that is NaN or
    /// infinite; `None` if all are finite, or it is not known: of a file of another program, or an older version.
    pub fn not_finite(&self) -> Option<&str> {
        self.index.not_finite.as_deref()
    }

    /// [`not_finite`](Self::not_finite), for a line on stderr.
    pub(super) fn what_is_not_finite(&self) -> String {
        let name = self.not_finite().unwrap_or_default();
        format!(
            "{}: {name:?} has values that are not finite",
            self.folder.display()
        )
    }

    /// The names of the tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor.
    ///
    /// # Errors
    /// No tensor of that name.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.entry(name)?.shape)
    }

    /// A value.
    ///
    /// # Errors
    /// No value of that name, or one of another form.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let value = self.index.values.get(name);
        let value = value.ok_or_else(|| {
            let names: Vec<&String> = self.index.values.keys().collect();
            self.broken(format!("no value {name:?}; it has {names:?}"))
        })?;
        let parsed = serde_json::from_value(value.clone());
        parsed.map_err(|e| self.broken(format!("value {name:?}: {e}")))
    }

    /// A whole tensor, read by the calling rank alone.
    ///
    /// # Errors
    /// No tensor of that name; files that cannot be read, or are damaged.
    pub fn data(&self, name: &str) -> Result<TensorData> {
        let entry = self.entry(name)?;
        let dtype = dtype_of(entry);
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

    /// The tensors of a module as burn's record, read by the calling rank alone: to save as a single file.
    ///
    /// # Errors
    /// No module of that name; files that cannot be read, or are damaged.
    pub fn module_record(&self, name: &str) -> Result<ModuleRecord> {
        let names = self.names_in(name)?;
        let tensors = names
            .into_iter()
            .map(|(whole, short)| Ok((short, self.data(&whole)?)));
        self.record(tensors.collect::<Result<_>>()?)
    }

    /// Writes the tensors of a module into one safetensors file, called as in the module; all tensors, if `name` is
    /// empty. One tensor at a time is in memory.
    ///
    /// # Errors
    /// Those of [`module_record`](Self::module_record); a file that cannot be written.
    pub fn export(&self, name: &str, path: impl AsRef<Path>) -> Result<()> {
        let names = self.names_in(name)?;
        let failure = RefCell::new(None);
        let views = names.iter().map(|(whole, short)| {
            let view = Whole {
                checkpoint: self,
                name: whole,
                entry: &self.index.tensors[whole],
                failure: &failure,
            };
            (short, view)
        });
        let staged = Staged::new(path.as_ref())?;
        let written = file::serialize(views, None, staged.path());
        if let Some(error) = failure.take() {
            return Err(error);
        }
        written?;
        staged.commit()
    }

    /// A tensor, whole on all ranks. Each rank reads a share, and sends it to the others.
    ///
    /// # Errors
    /// On all ranks: no tensor of that name, of other dims; ranks that load different tensors; files that cannot be read,
    /// or are damaged.
    pub fn tensor<const D: usize, K: Basic>(
        &self,
        world: &World,
        name: &str,
    ) -> halocline_core::Result<Tensor<D, K>> {
        let mesh = all_ranks(world)?;
        let layout = Layout::replicated(mesh.shape(), &self.entry(name)?.shape);
        self.place(name, &mesh, &layout)
    }

    /// [`tensor`](Self::tensor), left in host memory.
    ///
    /// # Errors
    /// Those of [`tensor`](Self::tensor).
    pub fn tensor_data(&self, world: &World, name: &str) -> halocline_core::Result<TensorData> {
        let names = vec![(name.to_string(), String::new())];
        Ok(self.fetch_whole(world, names)?.remove(0).1)
    }

    /// A sharded tensor: each rank gets its shard, also where it was saved on another mesh.
    ///
    /// # Errors
    /// Those of [`tensor`](Self::tensor), and placements that do not fit or are `Partial`.
    pub fn sharded<const D: usize, K: Basic>(
        &self,
        name: &str,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> halocline_core::Result<ShardTensor<D, K>> {
        let layout = Layout::new(mesh.shape(), &self.entry(name)?.shape, placements)?;
        self.sharded_to(name, mesh, &layout)
    }

    /// [`sharded`](Self::sharded), with explicit extents.
    ///
    /// # Errors
    /// Those of [`sharded`](Self::sharded), and a layout of another shape.
    pub fn sharded_to<const D: usize, K: Basic>(
        &self,
        name: &str,
        mesh: &DeviceMesh,
        layout: &Layout,
    ) -> halocline_core::Result<ShardTensor<D, K>> {
        let shape = &self.entry(name)?.shape;
        if layout.shape() != shape || layout.partial_axis().is_some() {
            let expected = format!("{shape:?} on Shard and Replicate, as {name:?} was saved");
            return Err(Error::argument("layout", layout, expected).into());
        }
        let local = self.place(name, mesh, layout)?;
        ShardTensor::from_local(local, layout, mesh, LocalGradient::Replicated)
    }

    /// This rank's cells of a tensor.
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
        let dtype = dtype_of(entry);
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
            // Devices store them in their own way.
            DType::Bool(_) => Tensor::from_data(data, device),
            _ => Tensor::from_data(data, (device, dtype)),
        })
    }

    /// Gives a module the tensors that it was saved with, on all ranks.
    ///
    /// # Errors
    /// On all ranks: a tensor that one of both does not have, or has of another shape or type; files that cannot be read,
    /// or are damaged.
    pub fn module<M: Module>(
        &self,
        world: &World,
        name: &str,
        module: M,
    ) -> halocline_core::Result<M> {
        let names = self.names_in(name)?;
        let parameters = parameters(&module);
        for (whole, short) in &names {
            let found = dtype_of(self.entry(whole)?);
            if let Some(parameter) = parameters.iter().find(|parameter| parameter.path == *short)
                && !same_type(parameter.dtype, found)
            {
                let expected = parameter.dtype;
                let cause = format!("tensor {whole:?} is of {found:?}, expected {expected:?}");
                return Err(self.broken(cause).into());
            }
        }
        let tensors = self.fetch_whole(world, names)?;
        let loaded = module.try_load_record(self.record(tensors)?);
        Ok(loaded.map_err(|error| self.broken(format!("{name:?}: {error}")))?)
    }

    /// Tensors, whole on all ranks, under their short names.
    pub(super) fn fetch_whole(
        &self,
        world: &World,
        names: Vec<(String, String)>,
    ) -> halocline_core::Result<Vec<(String, TensorData)>> {
        let mesh = all_ranks(world)?;
        let wanted = names.iter().map(|(whole, _)| {
            let entry = self.entry(whole)?;
            let layout = Layout::replicated(mesh.shape(), &entry.shape);
            Ok(Wanted {
                name: whole,
                entry,
                layout,
            })
        });
        let data = fetch(&self.folder, &mesh, &wanted.collect::<Result<Vec<_>>>()?)?;
        Ok(names
            .into_iter()
            .map(|(_, short)| short)
            .zip(data)
            .collect())
    }

    /// The tensors of a module: their names, and what the module calls them.
    pub(super) fn names_in(&self, name: &str) -> Result<Vec<(String, String)>> {
        let prefix = if name.is_empty() {
            String::new()
        } else {
            format!("{name}.")
        };
        let names = self.names().filter_map(|whole| {
            Some((whole.to_string(), whole.strip_prefix(&prefix)?.to_string()))
        });
        let names: Vec<_> = names.collect();
        if names.is_empty() {
            return Err(self.broken(format!("no tensors of {name:?}")));
        }
        Ok(names)
    }

    fn entry(&self, name: &str) -> Result<&TensorEntry> {
        let entry = self.index.tensors.get(name);
        entry.ok_or_else(|| self.broken(format!("no tensor {name:?}")))
    }

    fn record(&self, tensors: Vec<(String, TensorData)>) -> Result<ModuleRecord> {
        let tensors = tensors
            .into_iter()
            .map(|(name, data)| pack(name, data, None));
        let bytes = burn_pack::Writer::new(tensors.collect()).into_bytes();
        let bytes = bytes.map_err(|error| self.broken(error.to_string()))?;
        ModuleRecord::from_bytes(bytes).map_err(|error| self.broken(error.to_string()))
    }

    pub(super) fn broken(&self, cause: impl Into<String>) -> Error {
        Error::checkpoint(&self.path, cause)
    }
}

/// A tensor as burn's files have it.
pub(super) fn pack(name: String, data: TensorData, id: Option<u64>) -> burn_pack::Tensor {
    let (bytes, shape, dtype): (Bytes, _, _) = data.into_parts();
    burn_pack::Tensor::new(name, dtype, shape, id, bytes)
}

/// A tensor that is read when safetensors writes it.
struct Whole<'a> {
    checkpoint: &'a Checkpoint,
    name: &'a str,
    entry: &'a TensorEntry,
    /// Why it could not be read: `data` cannot say so.
    failure: &'a RefCell<Option<Error>>,
}

impl View for Whole<'_> {
    fn dtype(&self) -> Dtype {
        dtype::in_files(&self.entry.dtype).expect("the index was checked")
    }

    fn shape(&self) -> &[usize] {
        &self.entry.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = match self.checkpoint.data(self.name) {
            Ok(data) => data.as_bytes().to_vec(),
            Err(error) => {
                self.failure.borrow_mut().get_or_insert(error);
                vec![0; self.data_len()]
            }
        };
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.entry.pieces.iter().map(PieceEntry::len).sum()
    }
}

fn same_type(a: DType, b: DType) -> bool {
    a == b || (a.is_bool() && b.is_bool())
}

pub(super) fn dtype_of(entry: &TensorEntry) -> DType {
    dtype::named(&entry.dtype).expect("the index was checked")
}

fn all_ranks(world: &World) -> halocline_core::Result<DeviceMesh> {
    world.mesh([("rank", world.size())])
}
