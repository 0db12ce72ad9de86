//! Search for the fastest plan for a model, a mesh and a machine, by the cost model.

use std::collections::BTreeSet;
use std::sync::Arc;

use burn::module::Module;
use halocline_core::{Error, Gather, MeshShape, Result};

use super::machine::Machine;
use super::plan::{Plan, Store};
use super::price::{Price, Workload};
use super::resolve::{matched_layers, resolve};
use super::sites::{Site, Sites, parent};
use super::style::Style;

/// Maximum number of partial plans to combine.
const MOST_PARTS: usize = 12;
/// Minimum number of elements of a parameter that is stored in shards.
const AT_LEAST: usize = 1 << 14;

/// Plan with its price; [`Plan::automatic`] has an example.
#[derive(Clone, Debug)]
pub struct PricedPlan {
    /// Plan.
    pub plan: Plan,
    /// Time and memory of a training step with the plan.
    pub price: Price,
}

impl Plan {
    /// Returns the plan with the fastest training step, by a [cost
    /// model](super::ResolvedPlan::price), among those within the workload's memory budget.
    /// [`candidates`](Self::candidates) lists all of them.
    ///
    /// `parts` are optional plans for parts of the model: those of configurations
    /// ([`FieldTransformerConfig::tensor_parallel`](crate::FieldTransformerConfig::tensor_parallel)),
    /// [of burn's transformer](super::transformer_encoder), [pairs of linear
    /// layers](super::linear_pairs), or your own. The search also considers storing parameters in
    /// shards over the axes of the workload.
    ///
    /// # Errors
    /// [`resolve`](fn@resolve) fails for a part, or [`price`](super::ResolvedPlan::price) fails;
    /// there are more than 12 parts; no plan fits the budget (the error states the least memory of
    /// any plan).
    ///
    /// # Example
    /// ```
    /// use burn::nn::transformer::TransformerEncoderConfig;
    /// use halocline_core::MeshShape;
    /// use halocline_models::parallel::{Link, Machine, Plan, Workload, transformer_encoder};
    ///
    /// let config = TransformerEncoderConfig::new(1024, 4096, 16, 8);
    /// let model = config.init(&Default::default());
    /// let mesh = MeshShape::new(&[("data", 4), ("tensor", 2)], (0..8).collect())?;
    /// let machine = Machine::new(2e13, Link { latency: 5e-6, bandwidth: 1e10 })
    ///     .with_link("tensor", Link { latency: 2e-6, bandwidth: 2e11 });
    /// let workload = Workload::new(16 * 512, &["data"]).with_budget(1 << 30);
    /// let parts = transformer_encoder(&config, "", "tensor");
    /// let chosen = Plan::automatic(&model, &mesh.into(), &parts, &workload, &machine)?;
    /// println!("{}\n{}", chosen.price, chosen.plan.to_toml());
    /// assert!(chosen.price.bytes() < 1.1e9);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn automatic<M: Module>(
        module: &M,
        mesh: &Arc<MeshShape>,
        parts: &[Self],
        workload: &Workload,
        machine: &Machine,
    ) -> Result<PricedPlan> {
        let found = Self::candidates(module, mesh, parts, workload, machine)?;
        let least = found
            .iter()
            .map(|priced| priced.price.bytes())
            .fold(f64::INFINITY, f64::min);
        let budget = workload.budget.map_or(f64::INFINITY, |bytes| bytes as f64);
        let mut fitting = found
            .into_iter()
            .filter(|priced| priced.price.bytes() <= budget);
        fitting.next().ok_or_else(|| {
            Error::Plan(format!(
                "no plan holds a rank within {budget} bytes; the least is {least:.0}: use more ranks, or \
                 give parts that shard more layers; recomputed blocks (with_recompute) hold less than \
                 the price"
            ))
        })
    }

    /// Returns all plans that [`automatic`](Self::automatic) chooses from, the fastest first,
    /// whatever their memory.
    ///
    /// # Errors
    /// Same as [`automatic`](Self::automatic), except for the budget.
    pub fn candidates<M: Module>(
        module: &M,
        mesh: &Arc<MeshShape>,
        parts: &[Self],
        workload: &Workload,
        machine: &Machine,
    ) -> Result<Vec<PricedPlan>> {
        if parts.len() > MOST_PARTS {
            return Err(Error::Plan(format!(
                "{} parts to combine; expected at most {MOST_PARTS}",
                parts.len()
            )));
        }
        let sites = Sites::of(module);
        let parts = parts.iter().map(|part| {
            let layers = matched_layers(&sites, mesh, part)?;
            Ok((part, layers))
        });
        let parts = parts.collect::<Result<Vec<(&Self, BTreeSet<String>)>>>()?;
        let mut found = Vec::new();
        for bits in 0..1_usize << parts.len() {
            let chosen = || subset(&parts, bits);
            let touched: usize = chosen().map(|(_, layers)| layers.len()).sum();
            let distinct: BTreeSet<&String> = chosen().flat_map(|(_, layers)| layers).collect();
            // Parts that match the same layer are alternatives.
            if distinct.len() < touched {
                continue;
            }
            let combined = chosen().fold(Self::default(), |plan, (part, _)| plan.merge(part));
            for stores in storages(mesh, workload) {
                let plan = Self {
                    stores: [&combined.stores[..], &stores].concat(),
                    ..combined.clone()
                };
                let resolved = match resolve(module, mesh, &plan) {
                    // Parts may store parameters themselves, or shard layers over the axis.
                    Err(_) if !stores.is_empty() => continue,
                    resolved => resolved?,
                };
                let price = resolved.price(workload, machine)?;
                found.push(PricedPlan { plan, price });
            }
        }
        found.sort_by(|a, b| a.price.seconds().total_cmp(&b.price.seconds()));
        Ok(found)
    }

    /// Adds the entries of another plan, which should match other layers.
    #[must_use]
    pub fn merge(mut self, other: &Self) -> Self {
        self.layers.extend_from_slice(&other.layers);
        self.stores.extend_from_slice(&other.stores);
        self.kinds.extend(other.kinds.clone());
        for axis in &other.optional_axes {
            if !self.optional_axes.contains(axis) {
                self.optional_axes.push(axis.clone());
            }
        }
        self
    }
}

/// Lists the storage options: none, and storage over every subset of the row axes, gathered once or
/// in each pass.
fn storages(mesh: &MeshShape, workload: &Workload) -> Vec<Vec<Store>> {
    let long = |axis: &&String| mesh.axis(axis).is_ok_and(|axis| mesh.sizes()[axis] > 1);
    let axes: Vec<&String> = workload.axes.iter().filter(long).collect();
    let mut found = vec![Vec::new()];
    for bits in 1..1_usize << axes.len() {
        for gather in [Gather::Once, Gather::EachPass] {
            let stores = subset(&axes, bits).map(|axis| {
                Store::new("**", axis)
                    .with_at_least(AT_LEAST)
                    .with_gather(gather)
            });
            found.push(stores.collect());
        }
    }
    found
}

/// Returns the items whose bits are set.
fn subset<T>(items: &[T], bits: usize) -> impl Iterator<Item = &T> {
    let items = items.iter().enumerate();
    let chosen = items.filter(move |(place, _)| bits >> place & 1 == 1);
    chosen.map(|(_, item)| item)
}

/// Returns plans for pairs of consecutive linear layers: the first is sharded by columns, the
/// second by rows. A pair is found in a module that directly contains exactly two linear layers,
/// where the second takes the output width of the first, and that width is at least the input width
/// of the first. Operations between the two must work on sharded features, as elementwise functions
/// do. All pairs in modules of the same type form one plan.
///
/// # Example
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use halocline_models::parallel::linear_pairs;
///
/// #[derive(Module, Debug)]
/// struct Mlp {
///     up: Linear,
///     down: Linear,
/// }
///
/// let device = Default::default();
/// let mlp = Mlp { up: LinearConfig::new(4, 8).init(&device), down: LinearConfig::new(8, 4).init(&device) };
/// let plans = linear_pairs(&mlp, "tensor");
/// assert_eq!(plans[0].layers[0].path, "up");
/// assert_eq!(plans[0].layers[1].path, "down");
/// ```
pub fn linear_pairs<M: Module>(module: &M, axis: &str) -> Vec<Plan> {
    let sites = Sites::of(module);
    let mut plans: Vec<(&str, Plan)> = Vec::new();
    for (path, kind) in &sites.modules {
        if kind == "Vec" {
            continue;
        }
        let direct = |site: &&Site| site.kind == "Linear" && parent(&site.path) == path;
        let linears: Vec<_> = sites.sites.iter().filter(direct).collect();
        let [first, second] = linears[..] else {
            continue;
        };
        let shapes = [first, second].map(|site| site.shape_of("weight"));
        let [Some(from), Some(to)] = shapes else {
            continue;
        };
        if from[1] != to[0] || from[1] < from[0] {
            continue;
        }
        let index = plans
            .iter()
            .position(|(known, _)| known == kind)
            .unwrap_or_else(|| {
                plans.push((kind, Plan::default()));
                plans.len() - 1
            });
        let plan = std::mem::take(&mut plans[index].1);
        plans[index].1 = plan
            .with_layer(&first.path, Style::colwise(axis))
            .with_layer(&second.path, Style::rowwise(axis));
    }
    plans.into_iter().map(|(_, plan)| plan).collect()
}
