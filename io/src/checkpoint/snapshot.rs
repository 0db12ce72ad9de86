use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, BoolStore, DType, Int, Tensor, TensorData};
use halocline_core::paths::{PathVisitor, visit_paths};
use halocline_core::{
    DeviceMesh, IndexBox, Layout, MeshShape, ParamShard, ShardTensor, World, param_shards,
};
use serde::Serialize;

use super::file::{Cells, Role};
use super::index::{Index, PieceEntry, TensorEntry, file_of};
use super::{dtype, pieces};
use crate::{Error, Result};

/// State of a program at one moment, to be [saved](super::Checkpoints::save) as a checkpoint.
///
/// All ranks add the same names in the same order. Each rank copies to host memory only the cells
/// that it will write; ranks that hold the same cells divide them. The program may continue as soon
/// as they are copied.
///
/// A state with NaN or infinite values is saved, but never replaces a finite one (see
/// [`CheckpointConfig`](super::CheckpointConfig)). Tensors added by [`data`](Self::data) are
/// exempt: losses, scores and masks may hold such values in a valid state.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Tensor, TensorData};
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_io::Snapshot;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let model = world.init(|device| LinearConfig::new(3, 2).init(device))?;
///     let mut snapshot = Snapshot::new(&world);
///     snapshot.module("model", &model)?;
///     snapshot.sharded("depth", &ShardTensor::<2>::ones([5, 4], &mesh, &[Shard(0)])?)?;
///     snapshot.tensor("weights", &Tensor::<1>::ones([5], world.device()))?;
///     snapshot.data("losses", &TensorData::from([0.5, 0.25]))?;
///     snapshot.value("epoch", &2)?;
///     assert!(snapshot.value("epoch", &3).is_err()); // the name is taken
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Snapshot {
    rank: usize,
    /// Mesh of all ranks, which divide replicated tensors.
    mesh: Arc<MeshShape>,
    /// Pieces of all ranks; their byte ranges in the files are not known yet.
    pub(super) index: Index,
    /// Pieces of this rank.
    pub(super) cells: Vec<Cells>,
}

impl Snapshot {
    /// Creates an empty state.
    pub fn new(world: &World) -> Self {
        let ranks = world.size();
        let mesh = MeshShape::new(&[("rank", ranks)], (0..ranks).collect());
        Self {
            rank: world.rank(),
            mesh: Arc::new(mesh.expect("a world has a rank")),
            index: Index::new(0, ranks),
            cells: Vec::new(),
        }
    }

    /// Adds a value as JSON, such as a step count, a configuration or scores. Only rank 0's value
    /// is saved. NaN and infinities, which JSON lacks, become `null`.
    ///
    /// # Errors
    /// A name that is taken; a value that JSON cannot represent, such as a map whose keys are not
    /// strings.
    pub fn value(&mut self, name: &str, value: &impl Serialize) -> Result<()> {
        let value = serde_json::to_value(value)
            .map_err(|error| Error::argument("value", name, error.to_string()))?;
        match self.index.values.insert(name.into(), value) {
            None => Ok(()),
            Some(_) => Err(taken(name)),
        }
    }

    /// Adds a tensor that is equal on all ranks.
    ///
    /// # Errors
    /// A name that is taken; a quantised tensor.
    pub fn tensor<const D: usize, K: Basic>(
        &mut self,
        name: &str,
        tensor: &Tensor<D, K>,
    ) -> Result<()> {
        let layout = Layout::replicated(&self.mesh, &tensor.dims());
        self.add((name, Role::State), &layout, tensor.dtype(), |cells| {
            cut(tensor, cells, &[0; D])
        })
    }

    /// Adds a sharded tensor, whose mesh must contain all ranks.
    ///
    /// # Errors
    /// Errors of [`tensor`](Self::tensor); a `Partial` tensor; a mesh of fewer ranks.
    pub fn sharded<const D: usize, K: Basic>(
        &mut self,
        name: &str,
        tensor: &ShardTensor<D, K>,
    ) -> Result<()> {
        self.shard(name, tensor.local(), tensor.layout(), tensor.mesh())
    }

    /// Adds this rank's shard of a tensor.
    fn shard<const D: usize, K: Basic>(
        &mut self,
        name: &str,
        local: &Tensor<D, K>,
        layout: &Layout,
        mesh: &DeviceMesh,
    ) -> Result<()> {
        if let Some((axis, _)) = layout.partial_axis() {
            let axis = &layout.mesh().names()[axis];
            let expected = "Shard and Replicate; resolve() it first";
            let got = format!("{name:?}, Partial on axis {axis:?}");
            return Err(Error::argument("tensor", got, expected));
        }
        if layout.mesh().size() != self.mesh.size() {
            let got = format!("{name:?} on {} ranks", layout.mesh().size());
            let expected = format!("a mesh of all {} ranks", self.mesh.size());
            return Err(Error::argument("tensor", got, expected));
        }
        let shard = layout.local_box(mesh.position());
        let origin = std::array::from_fn(|dim| shard.ranges()[dim].start);
        self.add((name, Role::State), layout, local.dtype(), |cells| {
            cut(local, cells, &origin)
        })
    }

    /// Adds data that is equal on all ranks and may contain NaN or infinities.
    ///
    /// # Errors
    /// Errors of [`tensor`](Self::tensor).
    pub fn data(&mut self, name: &str, data: &TensorData) -> Result<()> {
        self.add_data((name, Role::Record), data)
    }

    pub(super) fn add_data(&mut self, (name, role): (&str, Role), data: &TensorData) -> Result<()> {
        let layout = Layout::replicated(&self.mesh, data.shape());
        let whole = IndexBox::whole(data.shape());
        self.add_cells((name, role), data, &layout, &whole)
    }

    /// Adds this rank's cells of a tensor: `data` covers the box `held`, its local box in `layout`.
    pub(super) fn add_cells(
        &mut self,
        (name, role): (&str, Role),
        data: &TensorData,
        layout: &Layout,
        held: &IndexBox,
    ) -> Result<()> {
        let element = data.dtype().size();
        self.add((name, role), layout, data.dtype(), |cells| {
            let mut bytes = vec![0; cells.volume() * element];
            pieces::copy((data.as_bytes(), held), (&mut bytes, cells), cells, element);
            TensorData::from_bytes_vec(bytes, cells.shape(), data.dtype())
        })
    }

    /// Adds all tensors of a module, trained or not, as `name.path.of.parameter`. They must be
    /// equal on all ranks or sharded ([`ParamShard`]), in which case each rank adds its shards.
    ///
    /// # Errors
    /// Errors of [`tensor`](Self::tensor) and [`sharded`](Self::sharded).
    pub fn module<M: Module>(&mut self, name: &str, module: &M) -> Result<()> {
        // Makes burn's layers merge the pending update of their running statistics.
        drop(module.valid());
        let mut visitor = Parameters {
            snapshot: self,
            shards: param_shards(module),
            name,
            result: Ok(()),
        };
        visit_paths(module, &mut visitor);
        visitor.result
    }

    fn add(
        &mut self,
        (name, role): (&str, Role),
        layout: &Layout,
        dtype: DType,
        cut: impl Fn(&IndexBox) -> TensorData,
    ) -> Result<()> {
        let stored = match dtype {
            DType::Bool(_) => DType::Bool(BoolStore::Native),
            DType::Flex32 => DType::F32,
            other => other,
        };
        let Some(dtype_name) = dtype::name(stored) else {
            let expected = "numbers or booleans";
            return Err(Error::argument(
                "tensor",
                format!("{name:?} of {dtype:?}"),
                expected,
            ));
        };
        let turn = self.index.tensors.len();
        let boxes = pieces::pieces(layout, stored.size(), turn);
        let mut entry = TensorEntry {
            dtype: dtype_name.into(),
            shape: layout.shape().to_vec(),
            pieces: Vec::new(),
        };
        for (rank, cells) in &boxes {
            let start: Vec<usize> = cells.ranges().iter().map(|range| range.start).collect();
            let key = match boxes.len() {
                1 => name.to_string(),
                _ => format!(
                    "{name}@{}",
                    start
                        .iter()
                        .map(ToString::to_string)
                        .collect::<Vec<_>>()
                        .join(",")
                ),
            };
            if *rank == self.rank {
                let (bytes, ..) = cut(cells).convert_dtype(stored).into_parts();
                self.cells.push(Cells {
                    key: key.clone(),
                    dtype: dtype::in_files(dtype_name).expect("a type that files have"),
                    shape: cells.shape(),
                    bytes,
                    role,
                });
            }
            entry.pieces.push(PieceEntry {
                file: file_of(*rank),
                key,
                start,
                shape: cells.shape(),
                bytes: 0..0,
                crc32: None,
            });
        }
        match self.index.tensors.insert(name.into(), entry) {
            None => Ok(()),
            Some(_) => Err(taken(name)),
        }
    }
}

fn taken(name: &str) -> Error {
    Error::argument("name", format!("{name:?}"), "a name that is not taken yet")
}

/// Copies a box of cells from a tensor whose first cell has the global index `origin`.
fn cut<const D: usize, K: Basic>(
    tensor: &Tensor<D, K>,
    cells: &IndexBox,
    origin: &[usize; D],
) -> TensorData {
    if cells.shape() == tensor.dims() {
        return tensor.clone().into_data();
    }
    let range = |dim: usize| {
        let range = &cells.ranges()[dim];
        range.start - origin[dim]..range.end - origin[dim]
    };
    let ranges: [_; D] = std::array::from_fn(range);
    tensor.clone().slice(ranges).into_data()
}

/// Visitor that adds the tensors of a module.
struct Parameters<'a> {
    snapshot: &'a mut Snapshot,
    shards: BTreeMap<String, ParamShard>,
    /// Name of the module.
    name: &'a str,
    result: Result<()>,
}

impl Parameters<'_> {
    fn name_of(&self, path: &[String]) -> String {
        let names = std::iter::once(self.name).chain(path.iter().map(String::as_str));
        names.collect::<Vec<_>>().join(".")
    }

    fn add<const D: usize, K: Basic>(&mut self, path: &[String], tensor: &Tensor<D, K>) {
        if self.result.is_ok() {
            self.result = self.snapshot.tensor(&self.name_of(path), tensor);
        }
    }
}

impl PathVisitor for Parameters<'_> {
    fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        let tensor = param.transform_for_save().val().without_autodiff();
        let Some(shard) = self.shards.get(&path.join(".")) else {
            return self.add(path, &tensor);
        };
        if self.result.is_ok() {
            let name = self.name_of(path);
            let (layout, mesh) = (shard.layout(), shard.mesh());
            self.result = self.snapshot.shard(&name, &tensor, layout, mesh);
        }
    }

    fn visit_int<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D, Int>>) {
        self.add(path, &param.transform_for_save().val());
    }

    fn visit_bool<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D, Bool>>) {
        self.add(path, &param.transform_for_save().val());
    }
}
