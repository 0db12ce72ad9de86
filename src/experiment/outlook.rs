//! Estimates of memory, traffic and time of an experiment on a mesh, before it runs.

use std::fmt;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::Device;
use halocline_core::memory::release_memory;
use halocline_core::{DryMesh, Error, PlannedMessages, Result, Shard, ShardTensor, Traffic, World};
use halocline_io::{Progress, amplification};
use halocline_models::parallel::{Machine, Plan, PricedPlan, Workload, init_parallel, resolve};
use halocline_models::rollout;
use halocline_ops::backward;
use halocline_ops::prelude::*;

use super::capacity::{BYTES, memory};
use super::checks::{check_data, warn};
use super::config::ExperimentConfig;
use super::data::{Data, Samples};
use super::loss::apply_step;
use super::network::{FieldModel, Maker, OwnNetwork, no_network};
use super::optimizer::OptimizerKind;
use super::setup::placements;
use crate::trainer::precision::rounded;

/// Estimated memory, traffic and time of the first rank for a batch, and time of the whole
/// training. Its `Display` form is a list.
///
/// # Example
/// ```no_run
/// use halocline::experiment::{ExperimentConfig, Outlook};
/// use halocline::models::parallel::{Link, Machine};
/// use halocline::prelude::*;
///
/// let config = ExperimentConfig::load("weather.toml")?;
/// let machine = Machine::new(2e13, Link { latency: 5e-6, bandwidth: 1e10 });
/// Launcher::local(1).run(|world| {
///     println!("{}", Outlook::new(&world, &config, 8, &machine)?); // on 8 ranks
///     Ok(())
/// })?;
/// # Ok::<(), halocline::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Outlook {
    /// Axes of the mesh, with their sizes.
    pub mesh: Vec<(String, usize)>,
    /// Number of parameters of the model.
    pub parameters: usize,
    /// Bytes of the rank's parameters, gradients and optimizer states, and of the average and
    /// half-precision copy of the parameters where training uses them.
    pub held: usize,
    /// Peak growth of this process's memory in a batch, in bytes: activations, gradients, messages.
    /// `None` where the system does not report it.
    pub grown: Option<usize>,
    /// Seconds that this machine took for the rank's share of a batch, forward and backward.
    pub compute: f64,
    /// Messages of the rank in a batch.
    pub messages: PlannedMessages,
    /// Seconds for these messages, by the latency and bandwidth of the network.
    pub communication: f64,
    /// Bytes that the rank needs from the files for a batch, and bytes decoded per byte needed.
    pub read: (usize, f64),
    /// Batches per epoch, and number of epochs.
    pub batches: (usize, usize),
    /// Autoregressive steps of a sample: of the batch above, and the mean of all epochs.
    pub steps: (usize, f64),
    /// Fastest plans for the parameters by the cost model, if the mesh has an axis `tensor` or
    /// `data`.
    pub plans: Vec<PricedPlan>,
}

impl Outlook {
    /// Computes the first rank's share of a batch of zeros, without the other ranks and without
    /// messages, with the largest number of autoregressive steps of an epoch.
    ///
    /// # Errors
    /// Data that cannot be read; a model, loss, plan or mesh that does not fit; a precision that
    /// the device lacks; a share larger than the memory of this machine; more samples per batch,
    /// batches per step, or autoregressive steps than the training period has.
    pub fn new(
        world: &World,
        config: &ExperimentConfig,
        ranks: usize,
        machine: &Machine,
    ) -> Result<Self> {
        Self::with_network(world, config, ranks, machine, no_network)
    }

    /// Computes the share like [`new`](Self::new) with a network of your own, as
    /// [`Experiment::with_network`](super::Experiment::with_network) runs it.
    ///
    /// # Errors
    /// Those of [`new`](Self::new) and of `maker`.
    pub fn with_network<N: OwnNetwork>(
        world: &World,
        config: &ExperimentConfig,
        ranks: usize,
        machine: &Machine,
        maker: Maker<N>,
    ) -> Result<Self> {
        let data = opened(world, config)?;
        Self::on(world, config, &data, ranks, machine, maker)
    }

    /// Computes the share on opened data.
    pub(super) fn on<N: OwnNetwork>(
        world: &World,
        config: &ExperimentConfig,
        data: &Data,
        ranks: usize,
        machine: &Machine,
        maker: Maker<N>,
    ) -> Result<Self> {
        let (whole, samples) = config.check_fit(data, world.device(), ranks, maker)?;
        let mesh = config.mesh_shape(ranks, &data.grid)?;
        let axes = mesh.names().iter().cloned().zip(mesh.sizes().to_vec());
        let axes: Vec<(String, usize)> = axes.collect();
        let dry = DryMesh::new(mesh, world.device().clone())?;
        let resolved = resolve(&whole, dry.mesh().shape(), &config.plan)?;
        let make = |device: &Device| config.model_on(data, device, maker);
        // All parameters are drawn, and two batches computed.
        let progress = Progress::new(world.rank(), "plan", 3);
        progress.title("plan: parameters"); // draws the bar
        // Holds no more than the rank's share and one whole parameter.
        let model = init_parallel(world, dry.mesh(), &config.plan, |device| {
            make(device).expect("it was made before")
        })?;
        let half = config.training.precision.half();
        let model = match half {
            None => model,
            Some(dtype) => rounded(model, dtype),
        };
        dry.take();
        progress.advance();
        progress.title("plan: first batch");

        // Memory kept from other work would serve the batch, whose growth would seem smaller.
        release_memory();
        // Resets the peak memory, where the system permits.
        let counted = std::fs::write("/proc/self/clear_refs", "5").is_ok();
        let before = memory("VmRSS:");
        step(config, data, &dry, &model)?;
        let messages = dry.take();
        let grown = memory("VmHWM:")
            .filter(|_| counted)
            .zip(before)
            .map(|(after, before)| after.saturating_sub(before));
        progress.advance();
        progress.title("plan: timed batch");
        // Kernels and plans are cached by now, so this step is timed.
        let start = Instant::now();
        step(config, data, &dry, &model)?;
        let compute = start.elapsed().as_secs_f64();
        progress.advance();
        progress.finish();
        dry.take();

        let moved = messages.bytes_sent().max(messages.bytes_received()) as f64;
        let (latency, bandwidth) = (machine.network.latency, machine.network.bandwidth);
        let communication = messages.operations.len() as f64 * latency + moved / bandwidth;
        let states = match config.optimizer.kind {
            OptimizerKind::Sgd if config.optimizer.momentum == 0.0 => 0,
            OptimizerKind::Sgd => 1,
            OptimizerKind::Adam | OptimizerKind::AdamW => 2,
        };
        let held = resolved
            .parameters
            .iter()
            .map(|parameter| parameter.elements_held(0));
        let averages = usize::from(config.training.ema.is_some());
        let elements = held.sum::<usize>();
        // Plus a copy of the model in half precision.
        let copies = half.map_or(0, |_| elements * BYTES / 2);
        let held = elements * BYTES * (2 + states + averages) + copies;
        Ok(Self {
            read: read(config, data, &dry)?,
            batches: (samples / config.training.batch, config.training.epochs),
            steps: (
                steps(config),
                config.training.sum_of_steps() / config.training.epochs.max(1) as f64,
            ),
            plans: plans(config, data, &whole, (&dry, machine, states))?,
            mesh: axes,
            parameters: whole.num_params(),
            held,
            grown,
            compute,
            messages,
            communication,
        })
    }

    /// Returns the seconds for all batches of all epochs, each with its number of autoregressive
    /// steps. Validations are extra.
    pub fn seconds(&self) -> f64 {
        let ((batches, epochs), (steps, mean)) = (self.batches, self.steps);
        let step = (self.compute + self.communication) / steps as f64;
        step * mean * batches as f64 * epochs as f64
    }
}

/// Opens the data of a configuration, and warns of settings that do not suit them.
pub(super) fn opened(world: &World, config: &ExperimentConfig) -> Result<Data> {
    config.check()?;
    let data = Data::open(&config.data)?;
    check_data(config, &data)?;
    if world.is_root() {
        warn(config, &data, data.samples(config.training.most_steps())?);
    }
    Ok(data)
}

/// Returns the largest number of autoregressive steps of an epoch.
fn steps(config: &ExperimentConfig) -> usize {
    config.training.most_steps_trained()
}

/// Computes loss and gradients of a batch of zeros.
fn step<N: OwnNetwork>(
    config: &ExperimentConfig,
    data: &Data,
    dry: &DryMesh,
    model: &FieldModel<N>,
) -> Result<()> {
    let steps = steps(config);
    let (channels, [rows, columns]) = (&data.channels, data.grid.shape());
    let mesh = dry.mesh();
    let mut placements = placements(mesh.shape(), Samples::Steps(steps));
    if config.training.members > 1
        && let Ok(axis) = mesh.shape().axis("member")
    {
        placements[axis] = Shard(0);
    }
    let field = |channels: usize| {
        let samples = config.training.members * config.training.batch;
        let shape = [samples, channels, rows, columns];
        ShardTensor::<4>::zeros(shape, mesh, &placements)
    };
    let input = field(config.data.history * channels.inputs.len())?;
    let forcing = match channels.forcings.len() {
        0 => None,
        forcings => Some(field(steps * forcings)?),
    };
    let noise = match config.data.noise_channels {
        0 => None,
        channels => Some(field(channels)?),
    };
    let feedback = data.feedback(steps)?;
    Error::catch(|| {
        let y = rollout(input, forcing, steps, &feedback, |step, x| {
            let x = match &noise {
                None => x,
                Some(noise) => ShardTensor::cat(vec![x, noise.clone()], 1),
            };
            Ok(apply_step(config, model, x, step + 1 == steps))
        })?;
        let loss = y.square().mean().resolve();
        let value = loss.local().clone().inner();
        let gradients = backward(loss);
        value.into_data();
        drop(gradients);
        Ok(())
    })?
}

/// Returns the bytes that a rank needs from the files for a batch, and the read amplification.
fn read(config: &ExperimentConfig, data: &Data, dry: &DryMesh) -> Result<(usize, f64)> {
    let mesh = dry.mesh().shape();
    let size = |axis: &str| mesh.axis(axis).map_or(1, |axis| mesh.sizes()[axis]);
    let channels = &data.channels;
    let is_read = |name: &&String| {
        let name = name.strip_prefix("mask:").unwrap_or(name);
        data.files.iter().any(|channel| channel.name == name)
    };
    let forcings = channels.forcings.iter().filter(is_read).count();
    let fields = config.data.history * channels.inputs.len()
        + steps(config) * (channels.targets.len() + forcings);
    let [rows, columns] = data.grid.shape();
    let cells = rows.div_ceil(size("lat")) * columns.div_ceil(size("lon"));
    let samples = config.training.batch.div_ceil(size("data"));
    let files = data.training_files()?;
    let amplification = files
        .first()
        .map_or(1.0, |file| amplification(file, [size("lat"), size("lon")]));
    Ok((samples * fields * cells * BYTES, amplification))
}

/// Returns the fastest plans by the cost model.
fn plans<N: OwnNetwork>(
    config: &ExperimentConfig,
    data: &Data,
    model: &FieldModel<N>,
    (dry, machine, states): (&DryMesh, &Machine, usize),
) -> Result<Vec<PricedPlan>> {
    let mesh = dry.mesh().shape();
    let has = |axis: &str| mesh.names().iter().any(|name| name == axis);
    if !has("tensor") && !has("data") {
        return Ok(Vec::new());
    }
    let training = &config.training;
    let samples = training.members * training.batch * steps(config);
    // Ranks with different samples run passes of their own.
    let sizes = mesh.names().iter().zip(mesh.sizes());
    let groups = sizes.filter(|(name, _)| matches!(&name[..], "data" | "member"));
    let passes = steps(config) * groups.map(|(_, size)| size).product::<usize>();
    let (rows, rows_of) = config.model.rows(model, &data.grid, samples, passes);
    let axes: &[&str] = match training.members {
        1 => &["data", "lat", "lon"],
        _ => &["data", "member", "lat", "lon"],
    };
    let axes: Vec<&str> = axes.iter().copied().filter(|&axis| has(axis)).collect();
    let workload = Workload {
        rows_of,
        ..Workload::new(rows, &axes).with_states(states)
    };
    let parts = has("tensor").then(|| config.model.tensor_parallel("tensor"));
    let parts = parts.into_iter();
    // A network of the user has no plan of its own.
    let parts: Vec<Plan> = parts.filter(|plan| !plan.layers.is_empty()).collect();
    let mut found = Plan::candidates(model, mesh, &parts, &workload, machine)?;
    found.truncate(3);
    Ok(found)
}

/// Formats a time with two digits, or more before the point, in the largest unit that it reaches.
fn duration(seconds: f64) -> String {
    let units = [
        ("days", 86400.0),
        ("hours", 3600.0),
        ("minutes", 60.0),
        ("seconds", 1.0),
    ];
    let reached = units.into_iter().find(|(_, length)| seconds >= *length);
    let (unit, length) = reached.unwrap_or(("ms", 1e-3));
    let value = seconds / length;
    let digits = usize::from(value < 9.95);
    format!("{value:.digits$} {unit}")
}

impl fmt::Display for Outlook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = |bytes: usize| bytes as f64 / 1e6;
        let mesh: Vec<String> = self
            .mesh
            .iter()
            .map(|(name, size)| format!("{name} {size}"))
            .collect();
        writeln!(f, "mesh: {}", mesh.join(" x "))?;
        writeln!(f, "model: {} parameters", self.parameters)?;
        writeln!(f, "memory of a rank:")?;
        writeln!(
            f,
            "  {:>10.2} MB of parameters, gradients and optimizer states",
            megabytes(self.held)
        )?;
        if let Some(grown) = self.grown {
            writeln!(
                f,
                "  {:>10.2} MB more at most in a batch: activations, gradients, messages",
                megabytes(grown)
            )?;
        }
        writeln!(f, "traffic of a rank for a batch:")?;
        for traffic in Traffic::ALL {
            let of_kind = |operation: &&halocline_core::PlannedOperation| {
                operation.operation.traffic() == traffic
            };
            let count = self.messages.operations.iter().filter(of_kind).count();
            if count > 0 {
                let bytes = megabytes(self.messages.bytes_sent_for(traffic));
                let name = format!("{traffic:?}").to_lowercase();
                writeln!(f, "  {bytes:>10.3} MB sent in {count} operations of {name}")?;
            }
        }
        let (bytes, amplification) = self.read;
        writeln!(
            f,
            "  {:>10.3} MB needed of the files, with a read amplification of {amplification:.2} if each rank is a \
             process",
            megabytes(bytes)
        )?;
        writeln!(f, "time of a batch:")?;
        writeln!(
            f,
            "  {:>10.2} ms computing, as this machine does with one rank alone",
            1e3 * self.compute
        )?;
        writeln!(
            f,
            "  {:>10.2} ms communicating, by latency and bandwidth, if nothing overlaps",
            1e3 * self.communication
        )?;
        let (batches, epochs) = self.batches;
        write!(
            f,
            "training: {epochs} epochs of {batches} batches, {}, without validations",
            duration(self.seconds())
        )?;
        for (place, priced) in self.plans.iter().enumerate() {
            let plan = priced.plan.to_toml();
            let plan = if plan.trim().is_empty() {
                "(whole parameters)\n".into()
            } else {
                plan
            };
            write!(
                f,
                "\n\nplan {} by the cost model: {}\n{}",
                place + 1,
                priced.price,
                plan.trim_end()
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_digits_in_a_suitable_unit() {
        for (seconds, expected) in [
            (0.0042, "4.2 ms"),
            (0.25, "250 ms"),
            (1.24, "1.2 seconds"),
            (9.96, "10 seconds"),
            (42.4, "42 seconds"),
            (150.0, "2.5 minutes"),
            (5400.0, "1.5 hours"),
            (36.0 * 3600.0, "1.5 days"),
            (123.0 * 86400.0, "123 days"),
        ] {
            assert_eq!(duration(seconds), expected);
        }
    }
}
