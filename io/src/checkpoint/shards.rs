//! Sharded parameters in files.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData};
use halocline_core::{DeviceMesh, Layout, ParamShard, param_shards};

/// How a sharded parameter lies in files.
pub(super) struct Saved {
    /// The layout of the tensor as it is saved.
    pub(super) layout: Layout,
    pub(super) mesh: DeviceMesh,
}

/// The sharded parameters of a module, by path.
pub(super) fn shards<M: Module>(module: &M) -> BTreeMap<String, Saved> {
    let mut finder = Finder {
        shards: param_shards(module),
        path: Vec::new(),
        found: BTreeMap::new(),
    };
    if !finder.shards.is_empty() {
        module.visit(&mut finder);
    }
    finder.found
}

struct Finder {
    shards: BTreeMap<String, ParamShard>,
    path: Vec<String>,
    found: BTreeMap<String, Saved>,
}

impl ModuleVisitor for Finder {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let Some(shard) = self.shards.get(&path) else {
            return;
        };
        let (layout, mesh) = (shard.layout().clone(), shard.mesh().clone());
        let layout = match is_transposed(param) {
            false => layout,
            true => {
                let moved = |dim: usize| D - 1 - dim;
                let placements = layout.placements().iter().map(|placement| match placement {
                    halocline_core::Shard(dim) => halocline_core::Shard(moved(*dim)),
                    other => *other,
                });
                let extents = layout.all_extents().iter().rev().cloned();
                layout.derive(placements.collect(), extents.collect())
            }
        };
        self.found.insert(path, Saved { layout, mesh });
    }
}

/// Whether burn saves a parameter with its dims in reverse order, as it does for linear layers whose
/// weights are stored by columns.
fn is_transposed<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    let (id, value, mapper) = param.clone().consume();
    // Of different sizes, so that no other order looks alike.
    let shape: [usize; D] = std::array::from_fn(|dim| dim + 1);
    let count = shape.iter().product::<usize>() as i64;
    let data = TensorData::new((0..count).map(|i| i as f32).collect(), shape);
    let probe = Tensor::<D>::from_data(data, &value.device().inner());
    let saved = Param::from_mapped_value(id, probe, mapper).transform_for_save();
    D > 1 && saved.dims() != shape
}
