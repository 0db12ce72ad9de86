//! Modules of a model that a plan can refer to.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use halocline_core::is_running_state;
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

    /// Returns the path of a parameter.
    pub(super) fn path_of(&self, name: &str) -> String {
        match self.path.as_str() {
            "" => name.into(),
            path => format!("{path}.{name}"),
        }
    }
}

/// Visitor that collects all modules of a model by path, and those that are sites.
#[derive(Debug, Default)]
pub(super) struct Sites {
    stack: Vec<(String, String)>,
    pub(super) sites: Vec<Site>,
    /// Paths of modules that have parameters only in submodules.
    pub(super) composites: Vec<String>,
    /// Paths and types of all modules.
    pub(super) modules: BTreeMap<String, String>,
}

impl Sites {
    pub(super) fn of<M: Module>(module: &M) -> Self {
        let mut sites = Self::default();
        module.visit(&mut sites);
        let held: Vec<String> = sites.sites.iter().map(|site| site.path.clone()).collect();
        sites.composites.retain(|path| !held.contains(path));
        sites.composites.dedup();
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
            let kind = container.strip_prefix("Struct:").unwrap_or(container);
            self.modules.insert(path.clone(), kind.into());
            self.composites.push(path);
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
        let kind = container.strip_prefix("Struct:").unwrap_or(container);
        let (parameter, path) = (
            (name.clone(), param.lazy_shape().to_vec()),
            self.path(self.stack.len() - 1),
        );
        match self.sites.iter_mut().find(|site| site.path == path) {
            Some(site) => site.parameters.push(parameter),
            None => self.sites.push(Site {
                kind: kind.into(),
                path,
                parameters: vec![parameter],
            }),
        }
    }
}
