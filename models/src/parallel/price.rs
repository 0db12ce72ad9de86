//! Cost model of plans: time and memory of a training step.
//!
//! - A layer takes two operations per row and weight in the forward pass and four in the backward
//!   pass, for the weights that a rank computes with.
//! - Inputs that fan out into a layer are summed in the backward pass; partial results of a layer
//!   are summed in the forward pass. Layers of attention, and those behind a `Reshard`, share one
//!   input. A sum costs as much as a gather and a scatter together, so sequences that are sharded
//!   between layers cost the same.
//! - A stored parameter is gathered once or twice, and its gradient is scattered once. Gradients of
//!   parameters that are whole along a row axis are summed.
//! - Optimizer time is proportional to the elements that a rank holds, and grows with the number of
//!   states.
//! - A rank holds its parameters, gradients and optimizer states, the largest gathered layer (or
//!   all, if they are kept), and the input of each layer.
//!
//! Not modelled: halos, elementwise operators, norms, overlap, recomputed blocks, and inputs that
//! arrive in a placement the layer does not take, except for those that fan out.

use std::collections::BTreeMap;
use std::fmt;

use halocline_core::{Error, Gather, PlanPlacement, Replicate, Result, Shard};

use super::machine::{Link, Machine};
use super::pattern::Pattern;
use super::resolve::{Features, ResolvedParam, ResolvedPlan};
use super::sites::parent;

/// Rows, element size and memory budget of a training step.
///
/// # Example
/// ```
/// use halocline_models::parallel::Workload;
///
/// // Eight samples of 64 tokens over the data axis; a bottleneck processes a quarter of them.
/// let workload = Workload::new(8 * 64, &["data"]).with_rows("bottom.**", 8 * 16).with_budget(1 << 30);
/// assert_eq!(workload.rows, 512);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Rows (samples × tokens or cells) per step, over all ranks.
    pub rows: usize,
    /// Rows of layers that have another number of them, by path pattern.
    pub rows_of: Vec<(String, usize)>,
    /// Axes over which rows are sharded: data and domain. All must be axes of the mesh.
    pub axes: Vec<String>,
    /// Bytes per element.
    pub bytes: usize,
    /// Optimizer states per parameter element.
    pub states: usize,
    /// Memory limit of a rank, in bytes.
    pub budget: Option<u64>,
}

impl Workload {
    /// Makes a workload whose rows are sharded over `axes`, in `f32`, with two optimizer states per
    /// element, as in Adam, and unlimited memory.
    pub fn new(rows: usize, axes: &[&str]) -> Self {
        Self {
            rows,
            rows_of: Vec::new(),
            axes: axes.iter().map(ToString::to_string).collect(),
            bytes: 4,
            states: 2,
            budget: None,
        }
    }

    /// Sets another number of rows for layers whose paths match a pattern.
    #[must_use]
    pub fn with_rows(mut self, pattern: &str, rows: usize) -> Self {
        self.rows_of.push((pattern.into(), rows));
        self
    }

    /// Sets the number of optimizer states per element.
    #[must_use]
    pub fn with_states(self, states: usize) -> Self {
        Self { states, ..self }
    }

    /// Limits the bytes of parameters, gradients, optimizer states and activations on a rank.
    #[must_use]
    pub fn with_budget(self, bytes: u64) -> Self {
        let budget = Some(bytes);
        Self { budget, ..self }
    }
}

/// Time and memory of a training step on the most loaded rank; [`ResolvedPlan::price`] has an
/// example.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Price {
    /// Seconds of computation.
    pub compute: f64,
    /// Seconds of communication.
    pub communication: f64,
    /// Bytes of parameters, gradients and optimizer states.
    pub held: f64,
    /// Bytes of gathered parameters and of activations.
    pub used: f64,
}

impl Price {
    /// Returns the seconds of a step.
    pub fn seconds(&self) -> f64 {
        self.compute + self.communication
    }

    /// Returns the bytes on a rank.
    pub fn bytes(&self) -> f64 {
        self.held + self.used
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = |seconds| seconds * 1e3;
        let megabytes = |bytes| bytes / 1e6;
        write!(
            f,
            "{:.3} ms a step ({:.3} computing, {:.3} communicating), {:.2} MB a rank ({:.2} of parameters and states)",
            milliseconds(self.seconds()),
            milliseconds(self.compute),
            milliseconds(self.communication),
            megabytes(self.bytes()),
            megabytes(self.held),
        )
    }
}

impl ResolvedPlan {
    /// Estimates time and memory of a training step by a [cost model](self). A model of any size
    /// can be priced without materializing its parameters.
    ///
    /// # Errors
    /// A row pattern is invalid or matches no layer; the mesh lacks a row axis.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LinearConfig;
    /// use halocline_core::MeshShape;
    /// use halocline_models::parallel::{Link, Machine, Plan, Store, Workload, resolve};
    ///
    /// let model = LinearConfig::new(1 << 20, 1 << 20).init(&Default::default()); // lazy 4 TiB
    /// let mesh = MeshShape::new(&[("data", 1024)], (0..1024).collect())?;
    /// let plan = Plan::default().with_store(Store::new("**", "data"));
    /// let machine = Machine::new(1e14, Link { latency: 5e-6, bandwidth: 1e10 });
    /// let price = resolve(&model, &mesh.into(), &plan)?.price(&Workload::new(4096, &["data"]), &machine)?;
    /// assert!(price.held < 17.2e9); // a 1024th, with its gradient and states
    /// println!("{price}");
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn price(&self, workload: &Workload, machine: &Machine) -> Result<Price> {
        let names = self.mesh.names();
        if let Some(axis) = workload.axes.iter().find(|axis| !names.contains(axis)) {
            let message = format!("rows over an axis {axis:?}; expected axes among {names:?}");
            return Err(Error::Plan(message));
        }
        let pricing = Pricing {
            plan: self,
            workload,
            machine,
            rows_of: workload
                .rows_of
                .iter()
                .map(|(text, rows)| {
                    let (pattern, layers) = (Pattern::new(text)?, || self.layers());
                    if layers().any(|layer| pattern.matches(layer)) {
                        Ok((pattern, *rows))
                    } else {
                        Err(pattern.unmatched("layer", layers()))
                    }
                })
                .collect::<Result<_>>()?,
        };
        Ok(pricing.price())
    }
}

struct Pricing<'a> {
    plan: &'a ResolvedPlan,
    workload: &'a Workload,
    machine: &'a Machine,
    rows_of: Vec<(Pattern, usize)>,
}

/// Most loaded rank: remainders of units go to the first ranks.
const FIRST: usize = 0;

impl Pricing<'_> {
    fn price(&self) -> Price {
        let bytes = self.workload.bytes as f64;
        let mut price = Price::default();
        // Inputs that fan out into several layers of a module, by module and axis.
        let mut entered: BTreeMap<(&str, usize), f64> = BTreeMap::new();
        let mut largest: f64 = 0.0;
        for parameter in &self.plan.parameters {
            let (held, used) = (
                parameter.elements_held(FIRST) as f64,
                parameter.elements_used(FIRST) as f64,
            );
            let numbers = (2 + self.workload.states) as f64;
            price.held += held * bytes * numbers;
            // The machine's figure is for two states.
            price.compute += held * self.machine.update * numbers / 4.0;
            price.communication +=
                self.gathering(parameter, used * bytes) + self.summing(parameter, held * bytes);
            if !parameter.stored.is_empty() {
                match parameter.gather {
                    Gather::EachPass => largest = largest.max(used * bytes),
                    Gather::Once => price.used += used * bytes,
                }
            }
            let Some(Features {
                inputs,
                outputs,
                multiplies,
            }) = parameter.features()
            else {
                continue;
            };
            let rows = self.rows(parameter.layer());
            let local = parameter.layout.gathered(&parameter.stored, Replicate);
            let local = local.local_shape(FIRST);
            if multiplies {
                price.compute +=
                    6.0 * used * rows / self.machine.flops + 3.0 * self.machine.overhead;
                price.used += rows * local[inputs] as f64 * bytes;
            }
            let module = parent(parameter.layer());
            let width = rows * bytes;
            for (axis, along) in &parameter.layer_placements.input {
                if *along == PlanPlacement::Fan {
                    let sum = self.sum(*axis, width * local[inputs] as f64);
                    if self.shares_input(module) {
                        let entry = entered.entry((module, *axis)).or_default();
                        *entry = entry.max(sum);
                    } else {
                        price.communication += sum;
                    }
                }
            }
            let result = width * local[outputs] as f64;
            let crossed = parameter.layer_placements.output.iter();
            for (axis, along) in crossed.filter(|(axis, _)| !parameter.stored.contains(axis)) {
                let ranks = self.size(*axis);
                price.communication += match parameter.layout.placements()[*axis] {
                    // Partial results, which are summed.
                    Shard(dim) if dim == inputs => self.sum(*axis, result),
                    Shard(_) if !matches!(along, PlanPlacement::Shard(_)) => {
                        self.link(*axis).gather(ranks, result * ranks as f64)
                    }
                    _ => 0.0,
                };
            }
        }
        price.communication += entered.values().sum::<f64>();
        price.used += largest;
        price
    }

    /// Returns the rows that a layer processes on one rank.
    fn rows(&self, layer: &str) -> f64 {
        let found = self
            .rows_of
            .iter()
            .find(|(pattern, _)| pattern.matches(layer));
        let rows = found.map_or(self.workload.rows, |(_, rows)| *rows);
        let shares: usize = self.row_axes().map(|axis| self.size(axis)).product();
        rows as f64 / shares as f64
    }

    fn row_axes(&self) -> impl Iterator<Item = usize> {
        let names = self.plan.mesh.names();
        (0..names.len()).filter(move |axis| self.workload.axes.contains(&names[*axis]))
    }

    fn sum(&self, axis: usize, bytes: f64) -> f64 {
        self.link(axis).all_reduce(self.size(axis), bytes)
    }

    fn size(&self, axis: usize) -> usize {
        self.plan.mesh.sizes()[axis]
    }

    fn link(&self, axis: usize) -> Link {
        self.machine.link(&self.plan.mesh.names()[axis])
    }

    /// Whether the layers of a module share the input that fans out: those of attention, and those
    /// behind a `Reshard`.
    fn shares_input(&self, module: &str) -> bool {
        let kind = self.plan.modules.get(module);
        kind.is_some_and(|kind| kind == "MultiHeadAttention")
            || self.plan.reshards.keys().any(|path| parent(path) == module)
    }

    /// Seconds to gather a stored parameter and to scatter its gradient.
    fn gathering(&self, parameter: &ResolvedParam, bytes: f64) -> f64 {
        let times = match parameter.gather {
            Gather::EachPass => 3.0,
            Gather::Once => 2.0,
        };
        // One exchange over all axes, bounded by the slowest link.
        let ranks: usize = parameter
            .stored
            .iter()
            .map(|axis| self.size(*axis))
            .product();
        let seconds = parameter
            .stored
            .iter()
            .map(|axis| self.link(*axis).gather(ranks, bytes));
        times * seconds.fold(0.0, f64::max)
    }

    /// Seconds to sum the gradient of a parameter over the row axes on which it is whole. Latency
    /// is not counted, as buckets hold many parameters.
    fn summing(&self, parameter: &ResolvedParam, bytes: f64) -> f64 {
        let whole = |axis: &usize| !matches!(parameter.layout.placements()[*axis], Shard(_));
        let sum = |axis: usize| self.sum(axis, bytes) - self.sum(axis, 0.0);
        self.row_axes().filter(whole).map(sum).sum()
    }
}
