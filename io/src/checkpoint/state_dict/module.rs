//! Tensors of a module: their paths and layouts, and the assignment of new values.

use std::collections::{BTreeMap, HashMap};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::kind::Autodiff;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use halocline_core::{IndexBox, ParamShard, param_shards};

/// Lists the tensors of a module in visiting order.
pub(super) fn parameters<M: Module>(module: &M) -> Vec<Parameter> {
    let mut parameters = Parameters {
        shards: param_shards(module),
        ..Parameters::default()
    };
    module.visit(&mut parameters);
    parameters.found
}

/// Assigns values to the tensors of a module, by path.
pub(super) fn filled<M: Module>(module: M, values: HashMap<String, TensorData>) -> M {
    module.map(&mut Fill {
        path: Vec::new(),
        values,
    })
}

/// Tensor of a module.
pub(super) struct Parameter {
    pub(super) path: String,
    /// The path, with PyTorch's names for the parameters of norms.
    pub(super) name: String,
    pub(super) dtype: DType,
    /// Global shape.
    pub(super) shape: Vec<usize>,
    pub(super) is_linear: bool,
    pub(super) shard: Option<ParamShard>,
}

impl Parameter {
    /// Returns the cells that a rank holds.
    pub(super) fn cells(&self, rank: usize) -> IndexBox {
        let shard = self.shard.as_ref();
        let held = shard.and_then(|shard| shard.cells_of(rank));
        held.unwrap_or_else(|| IndexBox::whole(&self.shape))
    }
}

#[derive(Default)]
struct Parameters {
    shards: BTreeMap<String, ParamShard>,
    path: Vec<String>,
    /// Types of the modules along the path.
    containers: Vec<String>,
    found: Vec<Parameter>,
}

impl Parameters {
    fn add(&mut self, dims: &[usize], dtype: DType) {
        let path = self.path.join(".");
        let mut types = self.containers.iter().rev();
        let layer = types.find_map(|container| container.strip_prefix("Struct:"));
        let is_norm = layer.is_some_and(|layer| layer.ends_with("Norm"));
        let mut named = self.path.clone();
        if let Some(last) = named.last_mut().filter(|_| is_norm) {
            match &last[..] {
                "gamma" => *last = "weight".into(),
                "beta" => *last = "bias".into(),
                _ => {}
            }
        }
        let shard = self.shards.get(&path).cloned();
        let shape = match &shard {
            Some(shard) => shard.layout().shape().to_vec(),
            None => dims.to_vec(),
        };
        self.found.push(Parameter {
            path,
            name: named.join("."),
            dtype,
            shape,
            is_linear: layer == Some("Linear"),
            shard,
        });
    }
}

impl ModuleVisitor for Parameters {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.into());
        self.containers.push(container.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(&param.dims(), param.val().dtype());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(&param.val().dims(), param.val().dtype());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(&param.val().dims(), param.val().dtype());
    }
}

/// Mapper that assigns values to parameters by path.
struct Fill {
    path: Vec<String>,
    values: HashMap<String, TensorData>,
}

impl Fill {
    fn value<const D: usize, K: Autodiff>(&mut self, before: Tensor<D, K>) -> Tensor<D, K> {
        match self.values.remove(&self.path.join(".")) {
            None => before,
            Some(data) => Tensor::from_data(data, (&before.device(), before.dtype())),
        }
    }
}

impl ModuleMapper for Fill {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, before, mapper) = param.consume();
        let tracked = before.is_require_grad();
        let value = self.value(before).set_require_grad(tracked);
        Param::from_mapped_value(id, value, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let (id, before, mapper) = param.consume();
        Param::from_mapped_value(id, self.value(before), mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let (id, before, mapper) = param.consume();
        Param::from_mapped_value(id, self.value(before), mapper)
    }
}
