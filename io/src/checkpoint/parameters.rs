use std::collections::BTreeMap;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Bool, DType, Int, Shape, Tensor};
use halocline_core::ParamShard;
use halocline_core::paths::{PathVisitor, visit_paths};

/// Tensor of a module, trained or not.
pub(super) struct Parameter {
    pub path: String,
    /// Value of burn's `ParamId`, which differs from run to run.
    pub id: u64,
    /// Shape of this rank's values.
    pub shape: Vec<usize>,
    pub dtype: DType,
}

/// Lists all tensors of a module.
pub(super) fn parameters<M: Module>(module: &M) -> Vec<Parameter> {
    let mut list = List::default();
    visit_paths(module, &mut list);
    list.found
}

/// Describes the first parameter of a module that differs from its tensor in a checkpoint, or the
/// first tensor without a parameter. Sharded parameters are compared by their global shapes.
pub(super) fn difference(
    parameters: &[Parameter],
    shards: &BTreeMap<String, ParamShard>,
    tensors: &BTreeMap<String, (DType, Vec<usize>)>,
) -> Option<String> {
    for parameter in parameters {
        let Parameter { path, dtype, .. } = parameter;
        let shard = shards.get(path);
        let shape = shard.map_or(&parameter.shape[..], |shard| shard.layout().shape());
        match tensors.get(path) {
            None => return Some(format!("no tensor of parameter {path}")),
            Some((found, _)) if !same_type(*dtype, *found) => {
                return Some(format!("{path} is of {found:?}, expected {dtype:?}"));
            }
            Some((_, found)) if *found != shape => {
                return Some(format!(
                    "{path}: shape mismatch, {found:?} in the checkpoint, expected {shape:?}"
                ));
            }
            Some(_) => {}
        }
    }
    let is_unused = |name: &&String| parameters.iter().all(|parameter| parameter.path != **name);
    let unused = tensors.keys().find(is_unused)?;
    Some(format!("no parameter of tensor {unused}"))
}

fn same_type(a: DType, b: DType) -> bool {
    a == b || (a.is_bool() && b.is_bool())
}

#[derive(Default)]
struct List {
    found: Vec<Parameter>,
}

impl List {
    fn add(&mut self, path: &[String], id: ParamId, shape: Shape, dtype: DType) {
        self.found.push(Parameter {
            path: path.join("."),
            id: id.val(),
            shape: shape.to_vec(),
            dtype,
        });
    }
}

impl PathVisitor for List {
    fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        self.add(path, param.id, param.lazy_shape(), param.val().dtype());
    }

    fn visit_int<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D, Int>>) {
        self.add(path, param.id, param.lazy_shape(), param.val().dtype());
    }

    fn visit_bool<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D, Bool>>) {
        self.add(path, param.id, param.lazy_shape(), param.val().dtype());
    }
}
