//! Resolution of a plan for a model and a mesh, by arithmetic alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::module::Module;
use halocline_core::{
    Error, Gather, LayerPlacements, Layout, MeshShape, Placement, PlanPlacement, Replicate, Result,
    Shard,
};

use super::pattern::Pattern;
use super::plan::{Entry, Plan, Store};
use super::sites::{Site, Sites, parent, within};
use super::style::{Axes, LayerSharding, Style, is_spectral};

/// Layout of one parameter under a plan; [`resolve`](fn@resolve) has an example.
#[derive(Clone, Debug)]
pub struct ResolvedParam {
    /// Path of the parameter.
    pub path: String,
    /// Type of its layer, such as `Linear`.
    pub kind: String,
    /// Layout of the shards.
    pub layout: Layout,
    /// Axes over which it is stored in shards.
    pub stored: Vec<usize>,
    /// Whether it is gathered once or again.
    pub gather: Gather,
    /// Axes over which the plan asks to store it but cannot: every dim is already sharded by a
    /// later mesh axis.
    pub unstored: Vec<usize>,
    /// Placements of the layer's input and result; set on the layer's first parameter only.
    pub layer_placements: LayerPlacements,
}

impl ResolvedParam {
    /// Returns the path of its layer.
    pub fn layer(&self) -> &str {
        parent(&self.path)
    }

    /// Returns which dims of a layer's weight are features.
    pub(super) fn features(&self) -> Option<Features> {
        let name = self.path.rsplit('.').next();
        let (inputs, outputs) = match &self.kind[..] {
            _ if name != Some("weight") => return None,
            "Linear" | "Embedding" => (0, 1),
            "Conv1d" | "Conv2d" | "Conv3d" => (1, 0),
            kind if is_spectral(kind) => (0, 1),
            _ => return None,
        };
        Some(Features {
            inputs,
            outputs,
            multiplies: self.kind != "Embedding",
        })
    }

    /// Returns the number of elements that a position receives when the parameter is gathered.
    pub fn elements_gathered(&self, position: usize) -> usize {
        self.elements_used(position) - self.elements_held(position)
    }

    /// Returns the number of elements that a position holds.
    pub fn elements_held(&self, position: usize) -> usize {
        elements(&self.layout.local_shape(position))
    }

    /// Returns the number of elements that a position computes with: those it holds, and those it
    /// gathers.
    pub fn elements_used(&self, position: usize) -> usize {
        let used = self.layout.gathered(&self.stored, Replicate);
        elements(&used.local_shape(position))
    }
}

/// Returns the number of elements of a tensor of this shape, or the largest number if it is larger.
fn elements(shape: &[usize]) -> usize {
    shape.iter().copied().fold(1, usize::saturating_mul)
}

/// Feature dims of a weight.
pub(super) struct Features {
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// Whether rows are multiplied by the weight.
    pub(super) multiplies: bool,
}

/// Layouts of a model's parameters under a plan on a mesh. Prints as a table.
/// [`resolve`](fn@resolve) has an example.
#[derive(Clone, Debug)]
pub struct ResolvedPlan {
    /// Mesh.
    pub mesh: Arc<MeshShape>,
    /// Parameters, in the order of the model.
    pub parameters: Vec<ResolvedParam>,
    /// Placements set by each [`Reshard`](halocline_ops::Reshard), by path.
    pub reshards: BTreeMap<String, Vec<(usize, PlanPlacement)>>,
    /// Types of all modules, by path.
    pub(super) modules: BTreeMap<String, String>,
}

/// Computes the effects of a plan on a model and a mesh, without ranks and without touching the
/// model's parameters.
///
/// # Errors
/// A pattern matches nothing (the error suggests similar names); two entries for one axis match one
/// layer; the mesh lacks an axis; a layer lacks a parameter; a unit does not divide a size.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use halocline_core::MeshShape;
/// use halocline_models::parallel::{Plan, Store, resolve};
///
/// let model = LinearConfig::new(6, 4).init(&Default::default());
/// let mesh = MeshShape::new(&[("data", 3)], vec![0, 1, 2])?;
/// let plan = Plan::default().with_store(Store::new("weight", "data"));
/// let resolved = resolve(&model, &mesh.into(), &plan)?;
/// assert_eq!(resolved.parameters[0].elements_held(0), 2 * 4);
/// assert_eq!(resolved.parameters[0].elements_used(0), 6 * 4);
/// println!("{resolved}");
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn resolve<M: Module>(module: &M, mesh: &Arc<MeshShape>, plan: &Plan) -> Result<ResolvedPlan> {
    let mut sites = Sites::of(module);
    for site in &mut sites.sites {
        if let Some(kind) = plan.kinds.get(&site.kind) {
            site.kind.clone_from(kind);
        }
    }
    let resolver = Resolver {
        plan,
        mesh,
        sites: &sites,
    };
    let mut styles: BTreeMap<&str, Vec<(&Entry, LayerSharding)>> = BTreeMap::new();
    for entry in &plan.layers {
        let pattern = Pattern::new(&entry.path)?;
        for site in resolver.matched(&pattern)? {
            let placed = entry.style.placed(&site.kind, &site.path)?;
            let entries = styles.entry(&site.path).or_default();
            let axes = entry.style.axes();
            for (other, _) in &*entries {
                if let Some(axis) = other.style.axes().iter().find(|axis| axes.contains(axis)) {
                    return Err(Error::Plan(format!(
                        "{:?} and {:?} both match {} over axis {axis:?}; one entry for each axis of a layer",
                        other.path, entry.path, site.path
                    )));
                }
            }
            entries.push((entry, placed));
        }
    }
    let mut resolved = ResolvedPlan {
        mesh: mesh.clone(),
        parameters: Vec::new(),
        reshards: BTreeMap::new(),
        modules: sites.modules.clone(),
    };
    for site in &sites.sites {
        let entries = styles.get(site.path.as_str());
        let entries = entries.map_or(&[][..], Vec::as_slice);
        let mut layer_placements = LayerPlacements::default();
        let LayerPlacements { input, output } = &mut layer_placements;
        for (_, placed) in entries {
            input.extend(resolver.axes(&placed.input, &site.path)?);
            output.extend(resolver.axes(&placed.output, &site.path)?);
        }
        for placements in [input, output] {
            placements.sort_unstable_by_key(|(axis, _)| *axis);
        }
        if !has_layer_placements(&site.kind) && layer_placements != LayerPlacements::default() {
            return Err(Error::Plan(format!(
                "input or output of {}, a {}, which does not change layouts; give the model a field of type Reshard \
                 beside it",
                site.path, site.kind
            )));
        }
        check_names(site, entries)?;
        if site.is_reshard() {
            if let Some(to) = reshard(site, layer_placements)? {
                resolved.reshards.insert(site.path.clone(), to);
            }
            continue;
        }
        for (index, (name, shape)) in site.parameters.iter().enumerate() {
            let layout = resolver.layout(site, name, shape, entries)?;
            resolved.parameters.push(ResolvedParam {
                path: within(&site.path, name),
                kind: site.kind.clone(),
                layout,
                stored: Vec::new(),
                gather: Gather::default(),
                unstored: Vec::new(),
                layer_placements: if index == 0 {
                    layer_placements.clone()
                } else {
                    LayerPlacements::default()
                },
            });
        }
    }
    // From the outermost axis inward, as shards of an inner axis lie within those of an outer one.
    let mut stores: Vec<&Store> = plan.stores.iter().collect();
    stores.sort_by_key(|store| mesh.names().iter().position(|name| *name == store.axis));
    for store in stores {
        resolver.store(store, &mut resolved.parameters)?;
    }
    Ok(resolved)
}

/// Returns the paths of the layers that a plan matches.
pub(super) fn matched_layers(
    sites: &Sites,
    mesh: &Arc<MeshShape>,
    plan: &Plan,
) -> Result<BTreeSet<String>> {
    let resolver = Resolver { plan, mesh, sites };
    let mut paths = BTreeSet::new();
    for entry in &plan.layers {
        let matched = resolver.matched(&Pattern::new(&entry.path)?)?;
        paths.extend(matched.into_iter().map(|site| site.path.clone()));
    }
    Ok(paths)
}

/// Whether layers of a kind can change the layouts of their input and result.
///
/// `Plan::kind` maps user-defined types to these.
fn has_layer_placements(kind: &str) -> bool {
    let crosses = matches!(
        kind,
        "Reshard"
            | "Linear"
            | "Embedding"
            | "Conv1d"
            | "Conv2d"
            | "Conv3d"
            | "BatchNorm"
            | "LayerNorm"
            | "RmsNorm"
            | "GroupNorm"
            | "InstanceNorm"
    );
    crosses || is_spectral(kind)
}

/// Checks that a layer has the parameters that the plan names.
fn check_names(site: &Site, entries: &[(&Entry, LayerSharding)]) -> Result<()> {
    let placed = entries
        .iter()
        .filter(|(entry, _)| matches!(entry.style, Style::Placed(_)));
    let mut names = placed.flat_map(|(_, placed)| placed.parameters.keys());
    let Some(name) = names.find(|name| site.shape_of(name).is_none()) else {
        return Ok(());
    };
    let held: Vec<&str> = site.parameters.iter().map(|(held, _)| &held[..]).collect();
    let what = if site.is_reshard() {
        "is a Reshard".into()
    } else {
        format!("has {}", held.join(", "))
    };
    let message = format!("{} has no parameter {name}; it {what}", site.path);
    Err(Error::Plan(message))
}

/// Returns the placements that a [`Reshard`](halocline_ops::Reshard) sets.
fn reshard(
    site: &Site,
    layer_placements: LayerPlacements,
) -> Result<Option<Vec<(usize, PlanPlacement)>>> {
    let LayerPlacements { input, output } = layer_placements;
    match (input.is_empty(), output.is_empty()) {
        (true, true) => Ok(None),
        (false, true) => Ok(Some(input)),
        (true, false) => Ok(Some(output)),
        (false, false) => Err(Error::Plan(format!(
            "input and output of {}, a Reshard, which has one place; use prepare_input",
            site.path
        ))),
    }
}

struct Resolver<'a> {
    plan: &'a Plan,
    mesh: &'a Arc<MeshShape>,
    sites: &'a Sites,
}

impl<'a> Resolver<'a> {
    /// Returns the sites whose paths match.
    fn matched(&self, pattern: &Pattern) -> Result<Vec<&'a Site>> {
        let sites = &self.sites.sites;
        let matched: Vec<_> = sites
            .iter()
            .filter(|site| pattern.matches(&site.path))
            .collect();
        if !matched.is_empty() {
            return Ok(matched);
        }
        let mut modules = self.sites.modules.keys();
        match modules.find(|path| pattern.matches(path)) {
            Some(path) => Err(Error::Plan(format!(
                "{path} has no parameters of its own; name the layers in it, or give it a field of type Reshard \
                 where the layout is to change"
            ))),
            None => Err(pattern.unmatched("layer", sites.iter().map(|site| &site.path[..]))),
        }
    }

    /// Returns the index of an axis; `None` for an optional one that the mesh lacks.
    fn axis(&self, name: &str, path: &str) -> Result<Option<usize>> {
        let names = self.mesh.names();
        match names.iter().position(|held| held == name) {
            Some(axis) => Ok(Some(axis)),
            None if self.plan.optional_axes.iter().any(|axis| axis == name) => Ok(None),
            None => Err(Error::Plan(format!(
                "no axis {name:?} for {path} among {names:?}; list it under optional_axes if a mesh may lack it"
            ))),
        }
    }

    fn axes(&self, axes: &Axes, path: &str) -> Result<Vec<(usize, PlanPlacement)>> {
        let axes = axes.iter().map(|(name, along)| {
            let axis = self.axis(name, path)?;
            Ok(axis.map(|axis| (axis, *along)))
        });
        axes.filter_map(Result::transpose).collect()
    }

    /// Computes the layout of a parameter under the entries of its layer, each over its own axes.
    fn layout(
        &self,
        site: &Site,
        name: &str,
        shape: &[usize],
        entries: &[(&Entry, LayerSharding)],
    ) -> Result<Layout> {
        let path = within(&site.path, name);
        let mut placements = vec![Replicate; self.mesh.sizes().len()];
        // Cells of a dim that stay together, by the units of all entries that shard it.
        let mut units = vec![1_usize; shape.len()];
        for (_, placed) in entries {
            let axes = placed.parameters.get(name);
            for (axis, along) in self.axes(axes.unwrap_or(&Axes::new()), &path)? {
                placements[axis] = along.placement(shape.len())?;
                match placements[axis] {
                    Shard(dim) => units[dim] = common_multiple(units[dim], placed.unit),
                    Replicate => {}
                    _ => {
                        let message =
                            format!("{along} for parameter {path}; expected shard or replicate");
                        return Err(Error::Plan(message));
                    }
                }
            }
        }
        let layout = Layout::new(self.mesh, shape, &placements)?;
        let mut sharded = (0..shape.len()).filter(|dim| layout.is_sharded(*dim));
        sharded.try_fold(layout.clone(), |layout, dim| {
            let (size, unit) = (shape[dim], units[dim]);
            if unit == 0 || size % unit != 0 {
                let message = format!("{path} {shape:?} in units of {unit} along dim {dim}");
                return Err(Error::Plan(message));
            }
            let parts = layout.extents(dim).len();
            let units = size / unit;
            let extents =
                (0..parts).map(|part| unit * (units / parts + usize::from(part < units % parts)));
            layout.with_extents(dim, &extents.collect::<Vec<_>>())
        })
    }

    /// Stores the parameters that match in shards.
    fn store(&self, store: &Store, parameters: &mut [ResolvedParam]) -> Result<()> {
        let pattern = Pattern::new(&store.path)?;
        let Some(axis) = self.axis(&store.axis, &store.path)? else {
            return Ok(());
        };
        let mut found = false;
        for parameter in parameters
            .iter_mut()
            .filter(|parameter| pattern.matches(&parameter.path))
        {
            found = true;
            if parameter.stored.contains(&axis) {
                return Err(Error::Plan(format!(
                    "two entries store {} over {:?}",
                    parameter.path, store.axis
                )));
            }
            if parameter.layout.placements()[axis] != Replicate {
                return Err(Error::Plan(format!(
                    "{} is sharded over {:?} by its layer; store it over another axis",
                    parameter.path, store.axis
                )));
            }
            if elements(parameter.layout.shape()) < store.at_least {
                continue;
            }
            if !parameter.stored.is_empty() && parameter.gather != store.gather {
                return Err(Error::Plan(format!(
                    "{} is gathered in each pass over one axis and once over another; gather it alike",
                    parameter.path
                )));
            }
            match self.stored(parameter, axis)? {
                None => parameter.unstored.push(axis),
                Some(layout) => {
                    parameter.layout = layout;
                    parameter.stored.push(axis);
                    parameter.gather = store.gather;
                }
            }
        }
        if found {
            return Ok(());
        }
        let paths = parameters.iter().map(|parameter| &parameter.path[..]);
        Err(pattern.unmatched("parameter", paths))
    }

    /// Returns the layout sharded over one more axis: along the longest dim that no axis shards, or
    /// else the longest that only earlier axes shard.
    fn stored(&self, parameter: &ResolvedParam, axis: usize) -> Result<Option<Layout>> {
        let layout = &parameter.layout;
        let fits = |dim: &usize| layout.axes_of(*dim).iter().all(|other| *other < axis);
        let free = |dim: &usize| !layout.is_sharded(*dim);
        let longest = (0..layout.shape().len())
            .filter(fits)
            .max_by_key(|dim| (free(dim), layout.shape()[*dim], std::cmp::Reverse(*dim)));
        let Some(dim) = longest else {
            return Ok(None);
        };
        let mut placements: Vec<Placement> = layout.placements().to_vec();
        placements[axis] = Shard(dim);
        let parts = self.mesh.sizes()[axis];
        let split = |extent: &usize| {
            let extent = *extent;
            (0..parts).map(move |part| extent / parts + usize::from(part < extent % parts))
        };
        let mut extents = layout.all_extents().to_vec();
        extents[dim] = extents[dim].iter().flat_map(split).collect();
        Ok(Some(layout.derive(placements, extents)))
    }
}

/// Computes the least common multiple; zero if one number is.
fn common_multiple(one: usize, other: usize) -> usize {
    let (mut divisor, mut rest) = (one, other);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    one.checked_div(divisor).unwrap_or(0).saturating_mul(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_two_entries_are_kept_in_either_order() {
        for (one, other, expected) in [(1, 5, 5), (4, 8, 8), (8, 4, 8), (4, 6, 12), (1, 0, 0)] {
            assert_eq!(common_multiple(one, other), expected);
        }
        assert_eq!(common_multiple(0, 0), 0);
    }
}
