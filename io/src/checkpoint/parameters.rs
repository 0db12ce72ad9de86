use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, DType, Int, Tensor};

/// Tensor of a module, trained or not.
pub(super) struct Parameter {
    pub path: String,
    /// Value of burn's `ParamId`, which differs from run to run.
    pub id: u64,
    pub dims: usize,
    pub dtype: DType,
}

/// Lists all tensors of a module.
pub(super) fn parameters<M: Module>(module: &M) -> Vec<Parameter> {
    let mut list = List::default();
    module.visit(&mut list);
    list.found
}

#[derive(Default)]
struct List {
    path: Vec<String>,
    found: Vec<Parameter>,
}

impl List {
    fn add(&mut self, id: u64, dims: usize, dtype: DType) {
        self.found.push(Parameter {
            path: self.path.join("."),
            id,
            dims,
            dtype,
        });
    }
}

impl ModuleVisitor for List {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(param.id.val(), D, param.val().dtype());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param.id.val(), D, param.val().dtype());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param.id.val(), D, param.val().dtype());
    }
}
