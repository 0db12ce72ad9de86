//! Speed of ranks and of the links between them.

use std::collections::BTreeMap;
use std::time::Instant;

use burn::module::Param;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Distribution, Tensor};
use halocline_core::comm::Operation;
use halocline_core::{DeviceMesh, Error, ReduceOp, Result, Traffic, ops};
use serde::{Deserialize, Serialize};

/// Link along a mesh axis: a message takes `latency + bytes / bandwidth`. [`Machine`] has an
/// example.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Latency in seconds.
    pub latency: f64,
    /// Bandwidth in bytes per second, in each direction.
    pub bandwidth: f64,
}

impl Link {
    /// Seconds of an all-gather, or of a reduce-scatter, of `bytes` over `ranks` ranks.
    pub fn gather(self, ranks: usize, bytes: f64) -> f64 {
        let others = ranks.saturating_sub(1) as f64;
        others * self.latency + bytes * others / ranks.max(1) as f64 / self.bandwidth
    }

    /// Seconds of an all-reduce of `bytes` over `ranks` ranks: a reduce-scatter and an all-gather.
    pub fn all_reduce(self, ranks: usize, bytes: f64) -> f64 {
        2.0 * self.gather(ranks, bytes)
    }
}

/// Speed of a rank and of its links. Can be read from TOML or JSON.
///
/// # Example
/// ```
/// use halocline_models::parallel::{Link, Machine};
///
/// let network = Link { latency: 5e-6, bandwidth: 1e10 };
/// let node = Link { latency: 2e-6, bandwidth: 1e11 };
/// let machine = Machine::new(2e13, network).with_link("tensor", node);
/// assert_eq!(machine.link("tensor"), node);
/// assert_eq!(machine.link("data"), network);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Operations per second of a rank, in matrix products.
    pub flops: f64,
    /// Fixed cost of an operator in seconds, independent of its size.
    #[serde(default)]
    pub overhead: f64,
    /// Seconds that the optimizer takes per parameter element, with two states.
    #[serde(default)]
    pub update: f64,
    /// Link along axes that have no link of their own.
    pub network: Link,
    /// Links by axis.
    #[serde(default)]
    pub links: BTreeMap<String, Link>,
}

impl Machine {
    /// Makes a machine that has the same link along every axis.
    pub fn new(flops: f64, network: Link) -> Self {
        Self {
            flops,
            overhead: 0.0,
            update: 0.0,
            network,
            links: BTreeMap::new(),
        }
    }

    /// Sets the link along an axis.
    #[must_use]
    pub fn with_link(mut self, axis: &str, link: Link) -> Self {
        self.links.insert(axis.into(), link);
        self
    }

    /// Returns the link along an axis.
    pub fn link(&self, axis: &str) -> Link {
        *self.links.get(axis).unwrap_or(&self.network)
    }

    /// Measures matrix products and AdamW steps on all ranks at once, and sums along every axis, in
    /// about 0.2 seconds. All ranks return the figures of the slowest. Repeated measurements on one
    /// machine with the same libraries differ by a few per cent.
    ///
    /// # Errors
    /// Communication fails.
    ///
    /// # Example
    /// ```
    /// use halocline_core::Launcher;
    /// use halocline_models::parallel::Machine;
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("tensor", 2)])?;
    ///     let machine = Machine::measure(&mesh)?;
    ///     assert!(machine.flops > 1e8 && machine.link("tensor").bandwidth > 1e6);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn measure(mesh: &DeviceMesh) -> Result<Self> {
        let device = mesh.device().clone().inner();
        let matrix = |size: usize| {
            Tensor::<2>::random([size, size], Distribution::Uniform(-1.0, 1.0), &device)
        };
        let product = |size: usize| {
            let [a, b] = [matrix(size), matrix(size)];
            fastest(mesh, || {
                let y = a.clone().matmul(b.clone());
                y.narrow(0, 0, 1).into_data(); // waits for a GPU to finish
                Ok(())
            })
        };
        let overhead = product(8)?;
        let size = 384;
        let seconds = product(size)? - overhead;
        let flops = 2.0 * (size as f64).powi(3) / seconds.max(1e-9);
        let mut links = BTreeMap::new();
        for (axis, name) in mesh.shape().names().iter().enumerate() {
            if mesh.shape().sizes()[axis] > 1 {
                links.insert(name.clone(), measured_link(mesh, axis)?);
            }
        }
        let local = Link {
            latency: overhead,
            bandwidth: 1e10,
        };
        Ok(Self {
            flops,
            overhead,
            update: update(mesh)?,
            network: links.values().next().copied().unwrap_or(local),
            links,
        })
    }
}

/// Measures sums over the ranks along an axis, of few numbers and of many.
fn measured_link(mesh: &DeviceMesh, axis: usize) -> Result<Link> {
    let device = mesh.device().clone().inner();
    let sum = |elements: usize| {
        let values = Tensor::<1>::ones([elements], &device);
        fastest(mesh, || {
            let operation = Operation::new("measure", Traffic::Control, None);
            Error::catch(|| {
                let sum = ops::all_reduce(values.clone(), mesh, &[axis], ReduceOp::Sum, operation);
                sum.narrow(0, 0, 1).into_data(); // waits for a GPU to finish
            })
        })
    };
    let [small, large] = [1 << 10, 1 << 20];
    let [first, second] = [sum(small)?, sum(large)?];
    let ranks = mesh.shape().sizes()[axis];
    let others = (ranks - 1) as f64;
    let moved = 2.0 * 4.0 * (large - small) as f64 * others / ranks as f64;
    Ok(Link {
        latency: first / (2.0 * others),
        bandwidth: moved / (second - first).max(1e-9),
    })
}

/// Measures the seconds that a step of AdamW takes per parameter element.
fn update(mesh: &DeviceMesh) -> Result<f64> {
    const NUMBERS: usize = 1 << 20;
    let device = mesh.device().clone().autodiff();
    let value = || Tensor::<1>::ones([NUMBERS], &device);
    let mut parameter = Some(Param::from_tensor(value()));
    let gradient = value().inner();
    let mut optimizer = AdamWConfig::new().init();
    let seconds = fastest(mesh, || {
        let before = parameter.take().expect("a step gives it back");
        let mut gradients = GradientsParams::new();
        gradients.register(before.id, gradient.clone());
        let after = optimizer.step(1e-3, before, gradients);
        after.val().inner().narrow(0, 0, 1).into_data(); // waits for a GPU to finish
        parameter = Some(after);
        Ok(())
    })?;
    Ok(seconds / NUMBERS as f64)
}

/// Returns the seconds of the fastest of several runs, each started on all ranks together and timed
/// by the slowest rank.
fn fastest(mesh: &DeviceMesh, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    const RUNS: usize = 7;
    let operation = Operation::new("measure", Traffic::Control, None);
    let ranks = mesh.shape().ranks();
    let agreed = |seconds: f64| -> Result<f64> {
        let all = ops::all_gather_numbers(mesh.comm(), ranks, &operation, &[seconds])?;
        Ok(all.iter().map(|numbers| numbers[0]).fold(0.0, f64::max))
    };
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        agreed(0.0)?;
        let start = Instant::now();
        run()?;
        best = best.min(agreed(start.elapsed().as_secs_f64())?);
    }
    Ok(best)
}
