//! Modules of a model that a plan can refer to.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use halocline_core::paths::is_running_state;
use halocline_ops::Reshard;

/// Module with parameters of its own, or a [`Reshard`].
#[derive(Clone, Debug)]
pub(super) struct Site {
    pub(super) path: String,
    /// Name of its type.
    pub(super) kind: String,
    /// Names and shapes.
    pub(super) parameters: Vec<(String, Vec<usize>)>,
}

impl Site {
    pub(super) fn is_reshard(&self) -> bool {
        self.kind == "Reshard"
    }

    /// Returns the shape of a parameter.
    pub(super) fn shape_of(&self, name: &str) -> Option<&[usize]> {
        let found = self.parameters.iter().find(|(held, _)| held == name);
        found.map(|(_, shape)| &shape[..])
    }
}

/// Joins the path of a module and a name within it.
pub(super) fn within(module: &str, name: &str) -> String {
    match module {
        "" => name.into(),
        module => format!("{module}.{name}"),
    }
}

/// Returns the path of the module that a path lies in.
pub(super) fn parent(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(module, _)| module)
}

/// Visitor that collects all modules of a model by path, and those that are sites.
#[derive(Debug, Default)]
pub(super) struct Sites {
    stack: Vec<(String, String)>,
    pub(super) sites: Vec<Site>,
    /// Types of all modules but [`Reshard`]s, by path.
    pub(super) modules: BTreeMap<String, String>,
}

impl Sites {
    pub(super) fn of<M: Module>(module: &M) -> Self {
        let mut sites = Self::default();
        module.visit(&mut sites);
        sites
    }

    fn path(&self, parts: usize) -> String {
        let parts: Vec<&str> = self.stack[..parts]
            .iter()
            .map(|(name, _)| &name[..])
            .collect();
        parts.join(".")
    }
}

impl ModuleVisitor for Sites {
    fn enter_module(&mut self, name: &str, container: &str) {
        let path = self.path(self.stack.len());
        if container == Reshard::CONTAINER {
            self.sites.push(Site {
                path,
                kind: "Reshard".into(),
                parameters: Vec::new(),
            });
        } else {
            self.modules.insert(path, kind_of(container).into());
        }
        self.stack.push((name.into(), container.into()));
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.stack.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // A module that is itself a parameter has no name for it.
        let Some((name, container)) = self.stack.last() else {
            return;
        };
        if is_running_state(name, container) {
            return;
        }
        let parameter = (name.clone(), param.lazy_shape().to_vec());
        let path = self.path(self.stack.len() - 1);
        match self.sites.iter_mut().find(|site| site.path == path) {
            Some(site) => site.parameters.push(parameter),
            None => self.sites.push(Site {
                path,
                kind: kind_of(container).into(),
                parameters: vec![parameter],
            }),
        }
    }
}

/// Returns the name of a module's type.
fn kind_of(container: &str) -> &str {
    container.strip_prefix("Struct:").unwrap_or(container)
}
