//! PyTorch state dicts, loaded directly into the shards of a module.

mod module;
mod name;
mod source;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::{DType, TensorData};
use halocline_core::{DeviceMesh, Traffic, World};
use module::{Parameter, filled, parameters};
use name::{Strided, concatenated};
use source::{Stored, Tensors};

use super::file;
use crate::ranks::agreement::{self, Fallible, agree, agree_at, all_ranks};
use crate::{Error, Result};

pub use name::StateName;

const NAME: &str = "state dict";
/// Largest number of names that an error lists.
const LISTED: usize = 5;

/// Weights of a PyTorch model, from a file of `torch.save` (`.pt`, `.pth`) or a safetensors file.
/// Tensors have the names that they have in PyTorch. Complex tensors of a safetensors file have
/// real and imaginary parts in a last dim, like `torch.view_as_real`.
///
/// # Example
/// ```
/// use burn::nn::{LayerNormConfig, LinearConfig};
/// use burn::module::Module;
/// use halocline_core::Launcher;
/// use halocline_io::StateDict;
/// # use burn::nn::{LayerNorm, Linear};
/// # use safetensors::tensor::{Dtype, TensorView};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
/// # let (weight, ones, zeros) = (bytes(&[1., 2., 3., 4., 5., 6.]), bytes(&[1.; 2]), bytes(&[0.; 2]));
/// # let view = |shape: &[usize], data| TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap();
/// # let tensors = [("net.0.weight", view(&[2, 3], &weight)), ("net.0.bias", view(&[2], &zeros)),
/// #     ("net.1.weight", view(&[2], &ones)), ("net.1.bias", view(&[2], &zeros))];
/// # safetensors::serialize_to_file(tensors, None, &path)?;
///
/// #[derive(Module, Debug)]
/// struct Model {
///     linear: Linear,
///     norm: LayerNorm,
/// }
///
/// // In PyTorch: self.net = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
/// let weights = StateDict::open(&path)?
///     .with_names(|path| Some(path.replace("linear.", "net.0.").replace("norm.", "net.1.").into()));
/// Launcher::local(2).run(|world| {
///     let model = world.init(|device| Model {
///         linear: LinearConfig::new(3, 2).init(device),
///         norm: LayerNormConfig::new(2).init(device),
///     })?;
///     let model = weights.load(&world, model)?;
///     // PyTorch's [out, in] is burn's [in, out].
///     assert_eq!(model.linear.weight.val().into_data().try_to_vec::<f32>().unwrap(), [1., 4., 2., 5., 3., 6.]);
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct StateDict {
    path: PathBuf,
    tensors: BTreeMap<String, Stored>,
    /// Tensors of types that burn lacks, and these types.
    unknown: BTreeMap<String, String>,
    names: Box<Names>,
    allow_unused: bool,
}

/// Map from the path of a parameter to its name in the file.
type Names = dyn Fn(&str) -> Option<StateName> + Send + Sync;

impl StateDict {
    /// Opens a file. In a nested dict, such as `{"model": ..., "optimizer": ...}`, names are
    /// prefixed with the key: `model.net.0.weight`. Tensors are not read until they are loaded.
    ///
    /// # Errors
    /// A file that cannot be read, is of another format, or is damaged; sparse, quantized or, in a
    /// file of `torch.save`, complex tensors.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (opened, _) = file::open(&file::followed(path)?)?;
        let mut start = Vec::new();
        let read = opened.take(2).read_to_end(&mut start);
        read.map_err(|error| Error::io(path, error))?;
        let Tensors { tensors, unknown } = match start[..] {
            [b'P', b'K'] | [0x80, _] => source::pickled(path)?,
            _ => source::safetensors(path)?,
        };
        Ok(Self {
            path: path.into(),
            tensors,
            unknown,
            names: Box::new(|path| Some(path.into())),
            allow_unused: false,
        })
    }

    /// Iterates over the names and shapes of the tensors, without those of types that burn lacks.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        let tensors = self.tensors.iter();
        tensors.map(|(name, stored)| (&name[..], &stored.shape[..]))
    }

    /// Sets the map from the path of a parameter to its name in the file, or to `None` for a
    /// parameter that keeps its value. Paths use PyTorch's names of the parameters of norms:
    /// `weight` and `bias` instead of burn's `gamma` and `beta`.
    #[must_use]
    pub fn with_names(
        self,
        names: impl Fn(&str) -> Option<StateName> + Send + Sync + 'static,
    ) -> Self {
        let names = Box::new(names);
        Self { names, ..self }
    }

    /// Allows tensors in the file that no parameter uses.
    #[must_use]
    pub fn with_unused(self) -> Self {
        Self {
            allow_unused: true,
            ..self
        }
    }

    /// Loads the parameters of a module on all ranks. One rank reads each tensor and sends the
    /// others their cells; a rank holds one whole tensor at a time in memory. Values are converted
    /// to the element type of the parameter; weights of linear layers are transposed.
    ///
    /// # Errors
    /// On all ranks, before anything is read: parameters without a tensor; tensors without a
    /// parameter, unless [allowed](Self::with_unused) (`num_batches_tracked` of batch norms always
    /// is); a shape or kind that differs; a type that burn lacks. Later: files that cannot be read,
    /// or are damaged.
    pub fn load<M: Module>(&self, world: &World, module: M) -> halocline_core::Result<M> {
        let mesh = all_ranks(world)?;
        let slots = self.slots(&module);
        let description = slots
            .as_ref()
            .map_or(String::new(), |slots| described(slots));
        let slots = agree_at(&mesh, NAME, Fallible::All, ("tensors", &description), slots)?;
        let (sharded, whole): (Vec<_>, Vec<_>) = slots
            .into_iter()
            .partition(|slot| slot.parameter.shard.is_some());
        let mut values = HashMap::new();
        for round in sharded.chunks(mesh.size()) {
            exchange(&mesh, round, &mut values)?;
        }
        for (number, slot) in whole.iter().enumerate() {
            let reader = mesh.shape().ranks()[number % mesh.size()];
            let read = (world.rank() == reader).then(|| Ok(slot.cells(&slot.read()?, reader)));
            let read = agree(&mesh, NAME, Fallible::All, read.transpose())?;
            slot.put(
                mesh.broadcast_bytes(NAME, reader, read)?,
                reader,
                &mut values,
            )?;
        }
        Ok(filled(module, values))
    }

    /// Pairs the parameters to load with their tensors.
    fn slots<M: Module>(&self, module: &M) -> Result<Vec<Slot<'_>>> {
        let (mut slots, mut used, mut missing) = (Vec::new(), BTreeSet::new(), Vec::new());
        for parameter in parameters(module) {
            let Some(place) = (self.names)(&parameter.name) else {
                continue;
            };
            let mut sources = Vec::new();
            for name in &place.names {
                if let Some(dtype) = self.unknown.get(name) {
                    return Err(self.broken(format!(
                        "tensor {name:?} is of {dtype}, which burn lacks, expected {:?} for {}",
                        parameter.dtype, parameter.path
                    )));
                }
                match self.tensors.get_key_value(name) {
                    None => missing.push(format!("{name} of {}", parameter.path)),
                    Some((name, stored)) => {
                        used.insert(name);
                        sources.push(stored);
                    }
                }
            }
            if sources.len() == place.names.len() {
                slots.push(self.slot(parameter, &place, sources)?);
            }
        }
        let unused = self
            .tensors
            .keys()
            .chain(self.unknown.keys())
            .filter(|name| {
                !used.contains(name) && !self.allow_unused && !name.ends_with("num_batches_tracked")
            });
        let unused: Vec<String> = unused.cloned().collect();
        if missing.is_empty() && unused.is_empty() {
            return Ok(slots);
        }
        Err(self.broken(format!(
            "not found: {}; not used: {}; map paths to names by with_names",
            listed(&missing),
            listed(&unused)
        )))
    }

    fn slot<'a>(
        &self,
        parameter: Parameter,
        place: &StateName,
        sources: Vec<&'a Stored>,
    ) -> Result<Slot<'a>> {
        let broken = |cause| self.broken(cause);
        let (whole, dtype) = place.whole(&sources).map_err(broken)?;
        let Strided {
            mut shape,
            mut strides,
            first,
        } = place.view(whole.clone()).map_err(broken)?;
        if parameter.is_linear && shape.len() == 2 {
            shape.reverse();
            strides.reverse();
        }
        let kinds = [parameter.dtype, dtype].map(|dtype| (dtype.is_float(), dtype.is_bool()));
        if shape != parameter.shape || kinds[0] != kinds[1] {
            let transposed = if parameter.is_linear {
                ", transposed,"
            } else {
                ""
            };
            return Err(self.broken(format!(
                "tensor {:?} is {whole:?}{transposed} of {dtype:?}, expected {:?} of {:?} for {}",
                place.names.join(", "),
                parameter.shape,
                parameter.dtype,
                parameter.path
            )));
        }
        Ok(Slot {
            parameter,
            sources,
            rows: whole.iter().take(place.dim).product(),
            dtype,
            strides,
            first,
        })
    }

    fn broken(&self, cause: String) -> Error {
        Error::checkpoint(&self.path, cause)
    }
}

/// Returns a short text that is equal on ranks that load the same tensors into the same parameters.
fn described(slots: &[Slot<'_>]) -> String {
    let mut hasher = crc32fast::Hasher::new();
    for slot in slots {
        let Parameter { path, shape, .. } = &slot.parameter;
        let held: Vec<_> = slot.sources.iter().map(|stored| &stored.shape).collect();
        let text = format!(
            "{path} {shape:?} {:?} {held:?} {} {} {:?}",
            slot.dtype, slot.rows, slot.first, slot.strides
        );
        hasher.update(text.as_bytes());
    }
    format!("{} with checksum {:08x}", slots.len(), hasher.finalize())
}

/// Reads this rank's tensor of a round, sends other ranks their cells of it, and receives this
/// rank's cells of the other tensors.
fn exchange(
    mesh: &DeviceMesh,
    round: &[Slot<'_>],
    values: &mut HashMap<String, TensorData>,
) -> halocline_core::Result<()> {
    let (here, ranks) = (mesh.position(), mesh.shape().ranks());
    let own = round.get(here);
    let read = own.map(Slot::read).transpose();
    let read = agree(mesh, NAME, Fallible::All, read)?;
    let cells = |slot: &Slot<'_>, rank| slot.cells(read.as_deref().unwrap_or_default(), rank);
    let others = || (0..mesh.size()).filter(|position| *position != here);
    let send = |position: usize| Some((position, cells(own?, ranks[position])));
    let sends = others().filter_map(send);
    let readers = others().filter(|position| *position < round.len());
    let received = agreement::exchange(mesh, NAME, Traffic::Scatter, sends, readers)?;
    let slots = others()
        .filter_map(|position| round.get(position))
        .zip(received);
    let own = own.map(|slot| (slot, cells(slot, ranks[here])));
    for (slot, bytes) in slots.chain(own) {
        slot.put(bytes, ranks[here], values)?;
    }
    Ok(())
}

impl fmt::Debug for StateDict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StateDict")
            .field("path", &self.path)
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

/// Formats names for an error, or "nothing".
fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(LISTED);
    match names {
        [] => "nothing".into(),
        _ if more == 0 => names.join(", "),
        _ => format!("{} and {more} more", names[..LISTED].join(", ")),
    }
}

/// Parameter, and the tensors that hold its values.
struct Slot<'a> {
    parameter: Parameter,
    sources: Vec<&'a Stored>,
    /// Cells of the dims before that along which the tensors are concatenated.
    rows: usize,
    /// Type of the tensors.
    dtype: DType,
    /// Strides in the concatenation along each dim of the parameter, in elements.
    strides: Vec<usize>,
    first: usize,
}

impl Slot<'_> {
    /// Reads the tensor, or the concatenation of several.
    fn read(&self) -> Result<Vec<u8>> {
        let tensors = self.sources.iter().map(|stored| (stored.read)());
        let mut tensors = tensors.collect::<Result<Vec<_>>>()?;
        Ok(match tensors.len() {
            1 => tensors.remove(0),
            _ => concatenated(&tensors, self.rows),
        })
    }

    /// Extracts the cells that a rank holds from the bytes of the tensor.
    fn cells(&self, bytes: &[u8], rank: usize) -> Vec<u8> {
        let cells = self.parameter.cells(rank);
        let element = self.dtype.size();
        let mut found = Vec::with_capacity(cells.volume() * element);
        self.append(bytes, cells.ranges(), &self.strides, self.first, &mut found);
        found
    }

    /// Stores the cells that a rank holds as the value of the parameter.
    fn put(
        &self,
        bytes: Vec<u8>,
        rank: usize,
        values: &mut HashMap<String, TensorData>,
    ) -> Result<()> {
        let Parameter { path, dtype, .. } = &self.parameter;
        let cells = self.parameter.cells(rank);
        let expected = cells.volume() * self.dtype.size();
        if bytes.len() != expected {
            let got = format!("{} bytes of {path}", bytes.len());
            return Err(Error::argument(NAME, got, expected.to_string()));
        }
        let data = TensorData::from_bytes_vec(bytes, cells.shape(), self.dtype);
        values.insert(path.clone(), data.convert_dtype(*dtype));
        Ok(())
    }

    fn append(
        &self,
        bytes: &[u8],
        ranges: &[std::ops::Range<usize>],
        strides: &[usize],
        first: usize,
        found: &mut Vec<u8>,
    ) {
        let element = self.dtype.size();
        match (ranges, strides) {
            ([], _) => found.extend(&bytes[first * element..][..element]),
            ([range], [1]) => {
                found.extend(&bytes[(first + range.start) * element..][..range.len() * element]);
            }
            ([range, ranges @ ..], strides) => {
                for index in range.clone() {
                    let first = first + index * strides[0];
                    self.append(bytes, ranges, &strides[1..], first, found);
                }
            }
        }
    }
}
