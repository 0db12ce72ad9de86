//! Visits of the tensors of a module by path.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor};

/// Visitor of the tensors of a module with their paths, the names of the fields that lead to them.
///
/// # Example
/// ```
/// use burn::module::Param;
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use halocline_core::paths::{PathVisitor, visit_paths};
///
/// struct Shapes(Vec<(String, Vec<usize>)>);
///
/// impl PathVisitor for Shapes {
///     fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
///         self.0.push((path.join("."), param.val().dims().to_vec()));
///     }
/// }
///
/// let mut shapes = Shapes(Vec::new());
/// visit_paths(&LinearConfig::new(4, 6).init(&Device::default()), &mut shapes);
/// assert_eq!(shapes.0[0], (String::from("weight"), vec![4, 6]));
/// ```
pub trait PathVisitor {
    /// Visits a tensor of floats.
    fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>);

    /// Visits a tensor of integers. By default nothing is done.
    fn visit_int<const D: usize>(&mut self, _: &[String], _: &Param<Tensor<D, Int>>) {}

    /// Visits a tensor of booleans. By default nothing is done.
    fn visit_bool<const D: usize>(&mut self, _: &[String], _: &Param<Tensor<D, Bool>>) {}
}

/// Visits the tensors of a module in its order; see the example of [`PathVisitor`].
pub fn visit_paths<M: Module>(module: &M, visitor: &mut impl PathVisitor) {
    module.visit(&mut Walk {
        path: Vec::new(),
        visitor,
    });
}

/// Whether a field of a module is a running statistic of burn's `BatchNorm`. Visitors and mappers
/// see it like a parameter, but clones of the module share it, and every rank holds it whole.
/// `name` and `container` are the arguments of [`ModuleVisitor::enter_module`].
///
/// # Example
/// ```
/// use halocline_core::paths::is_running_state;
///
/// assert!(is_running_state("running_mean", "Struct:BatchNorm"));
/// assert!(!is_running_state("gamma", "Struct:BatchNorm"));
/// ```
pub fn is_running_state(name: &str, container: &str) -> bool {
    container == "Struct:BatchNorm" && matches!(name, "running_mean" | "running_var")
}

struct Walk<'a, V> {
    path: Vec<String>,
    visitor: &'a mut V,
}

impl<V: PathVisitor> ModuleVisitor for Walk<'_, V> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visitor.visit_float(&self.path, param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.visitor.visit_int(&self.path, param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.visitor.visit_bool(&self.path, param);
    }
}
