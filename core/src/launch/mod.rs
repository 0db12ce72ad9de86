//! Launching a program on ranks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;

#[cfg(feature = "cube")]
use crate::comm::handle;
use crate::comm::tcp::{Rendezvous, Tcp};
use crate::comm::{Communicator, Overlap, Settings};
use crate::settings::{started_tasks, switch};
use crate::world::World;
use crate::{Error, Result, trace};
use ranks::{run_process, run_threads};

mod agreement;
mod panics;
mod ranks;

/// Engine that starts and connects ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Local,
    Mpi,
    Tcp,
}

impl Engine {
    /// Returns the engine that the environment selects.
    ///
    /// MPI launchers set `OMPI_COMM_WORLD_SIZE` (Open MPI), `MPI_LOCALRANKID` (`mpirun` of MPICH
    /// and Intel MPI), `PMI_SIZE` (these, and `srun --mpi=pmi2`), `PMIX_RANK` (`srun --mpi=pmix`
    /// and others), or `SLURM_STEP_NUM_TASKS` (`srun`; counts only if greater than one, because
    /// interactive shells set it too). `RANK` with `MASTER_ADDR` takes precedence over all of
    /// these; `MASTER_ADDR` with `SLURM_PROCID` takes precedence over `srun`, but not over
    /// `mpirun`.
    fn of(get: impl Fn(&str) -> Option<String>) -> Self {
        let is_set = |name: &&str| get(name).is_some();
        let all = |names: &[&str]| names.iter().all(is_set);
        let in_mpi_job = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"]
            .iter()
            .any(&is_set)
            || started_tasks(&get) > 1;
        if all(&["RANK", "MASTER_ADDR"]) {
            Self::Tcp
        } else if ["OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID"]
            .iter()
            .any(is_set)
        {
            Self::Mpi
        } else if all(&["MASTER_ADDR", "SLURM_PROCID"]) {
            Self::Tcp
        } else if in_mpi_job {
            Self::Mpi
        } else if ["RANK", "MASTER_ADDR", "WORLD_SIZE"].iter().any(is_set) {
            // The error of this engine names the missing variables.
            Self::Tcp
        } else {
            Self::Local
        }
    }
}

/// Launches a program on ranks: threads of this process, or the processes of a job.
///
/// # Example
/// ```
/// use std::time::Duration;
/// use halocline_core::Launcher;
///
/// let launcher = Launcher::local(1).ranks(3).seed(7).timeout(Duration::from_secs(5));
/// assert!(!launcher.is_job());
/// launcher.clone().run(|world| world.barrier())?;
/// let ranks = launcher.collect(|world| Ok(world.rank()))?;
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Launcher {
    engine: Engine,
    ranks: usize,
    settings: Settings,
    seed: u64,
    device: Option<Device>,
    trace: Option<PathBuf>,
}

impl Launcher {
    /// Makes a launcher whose ranks are threads of this process.
    pub fn local(ranks: usize) -> Self {
        Self {
            engine: Engine::Local,
            ranks,
            settings: Settings::default(),
            seed: 0,
            device: None,
            trace: None,
        }
    }

    /// Makes a launcher with the engine that the environment selects: MPI under `mpirun` or `srun`;
    /// TCP connections between processes if a launcher such as PyTorch's has set `RANK`,
    /// `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`; otherwise threads.
    ///
    /// Slurm's `SLURM_PROCID` and `SLURM_NTASKS` may replace `RANK` and `WORLD_SIZE`. Unless all
    /// processes are on one host, with `MASTER_ADDR=localhost`, they need a common
    /// `HALOCLINE_SECRET`: a random text, without which no process can join.
    ///
    /// `HALOCLINE_TIMEOUT` (seconds), `HALOCLINE_CHECK`, `HALOCLINE_OVERLAP` and
    /// `HALOCLINE_BUCKETS` (`0` or `1`) set [`timeout`](Self::timeout), [`check`](Self::check),
    /// [`overlap`](Self::overlap) and [`buckets`](Self::buckets); `HALOCLINE_LOG=comm` prints a
    /// line to stderr for every communication; `HALOCLINE_TRACE` names a file for a
    /// [`trace`](Self::trace).
    ///
    /// # Panics
    /// Panics if one of these variables has an invalid value.
    ///
    /// # Example
    /// ```
    /// use halocline_core::Launcher;
    ///
    /// // Two threads, or the processes of a job.
    /// let sizes = Launcher::from_env().ranks(2).collect(|world| Ok(world.size()))?;
    /// assert_eq!(sizes, [2, 2]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn from_env() -> Self {
        let mut launcher = Self::local(1);
        launcher.engine = Engine::of(|name| std::env::var(name).ok());
        if let Ok(value) = std::env::var("HALOCLINE_TIMEOUT") {
            let seconds = value.parse().ok();
            let timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            match timeout {
                Some(timeout) if !timeout.is_zero() => launcher = launcher.timeout(timeout),
                _ => panic!("HALOCLINE_TIMEOUT={value}: expected a positive number of seconds"),
            }
        }
        if let Some(on) = switch("HALOCLINE_OVERLAP") {
            launcher.settings.overlap = if on { Overlap::On } else { Overlap::Off };
        }
        if let Some(on) = switch("HALOCLINE_BUCKETS") {
            launcher.settings.buckets = on;
        }
        if let Ok(value) = std::env::var("HALOCLINE_LOG") {
            launcher.settings.log = match value.as_str() {
                "comm" => true,
                _ => panic!("HALOCLINE_LOG={value}: expected comm"),
            };
        }
        launcher.trace = std::env::var_os("HALOCLINE_TRACE").map(PathBuf::from);
        if let Some(on) = switch("HALOCLINE_CHECK") {
            launcher.settings.check = on;
        }
        launcher
    }

    /// Whether the ranks are processes of a job rather than threads of this process.
    pub fn is_job(&self) -> bool {
        self.engine != Engine::Local
    }

    /// Sets the number of ranks, unless the environment determines it: a job has the ranks with
    /// which it was started.
    #[must_use]
    pub fn ranks(mut self, ranks: usize) -> Self {
        self.ranks = ranks;
        self
    }

    /// Sets the time to wait for a message. Default 60 s.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        // A deadline, the time now plus the timeout, must not overflow.
        const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        self.settings.timeout = timeout.min(FOR_EVER);
        self
    }

    /// Sets whether ranks compare operation and layout before each communication. Default: in debug
    /// builds only.
    #[must_use]
    pub fn check(mut self, check: bool) -> Self {
        self.settings.check = check;
        self
    }

    /// Sets when operators compute while boxes travel. Default [`Overlap::Auto`].
    #[must_use]
    pub fn overlap(mut self, overlap: Overlap) -> Self {
        self.settings.overlap = overlap;
        self
    }

    /// Sets whether [`backward`](crate::ShardTensor::backward) sums gradients of parameters in
    /// buckets of several, while it continues. Default: yes; the gradients are the same either way,
    /// except those of a parameter with several uses: without buckets, each use is summed over the
    /// ranks by itself.
    #[must_use]
    pub fn buckets(mut self, buckets: bool) -> Self {
        self.settings.buckets = buckets;
        self
    }

    /// Writes a timeline of the operators and communications of all ranks, in Chrome's trace
    /// format, when the program has ended. The file is created at the start. At the end, rank 0
    /// waits for the events of each other rank, at most for the timeout.
    #[must_use]
    pub fn trace(mut self, file: impl Into<PathBuf>) -> Self {
        self.trace = Some(file.into());
        self
    }

    /// Sets the seed from which modules are initialised. Default 0. All processes of a job must use
    /// the same seed.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the device of the ranks. Default: burn's default device; with the feature `cuda`, each
    /// process of a job takes the GPU with its local number on the host. On a device with gradient
    /// checkpointing (`Device::default().autodiff().gradient_checkpointing()`), elementwise
    /// operators are recomputed in the backward pass, which takes time and saves memory;
    /// communication is never repeated.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Runs a program on every rank and waits for all of them.
    ///
    /// # Errors
    /// The error or panic of the rank that failed first, as [`Error::Rank`], or the error of the
    /// program if all ranks are local and return the same one. Other ranks stop at their next
    /// communication; if a rank has not stopped within three seconds, the process ends. Also: no
    /// ranks; a timeout of 0; no GPU, or one that the program has used in several streams before
    /// the first `Launcher`; processes of a job with different versions, seeds, or settings of
    /// [`check`](Self::check), [`overlap`](Self::overlap), [`buckets`](Self::buckets),
    /// [`trace`](Self::trace), `HALOCLINE_ISA` or `HALOCLINE_CONV`.
    pub fn run(self, program: impl Fn(World) -> Result<()> + Send + Sync) -> Result<()> {
        self.collect(program).map(drop)
    }

    /// Like [`run`](Self::run), and returns the results of the ranks of this process, in order.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run).
    pub fn collect<T: Send>(
        self,
        program: impl Fn(World) -> Result<T> + Send + Sync,
    ) -> Result<Vec<T>> {
        if self.ranks == 0 {
            return Err(Error::Engine("a job needs at least one rank".into()));
        }
        if self.settings.timeout.is_zero() {
            let message = "a timeout of 0 s; expected a longer one";
            return Err(Error::Engine(message.into()));
        }
        // Called after a rank is connected, so that a failure reaches the others.
        let device = || {
            let device = match &self.device {
                Some(device) => device.clone(),
                #[cfg(feature = "cuda")]
                None => crate::comm::gpu::device(self.is_job())?,
                #[cfg(not(feature = "cuda"))]
                None => Device::default(),
            };
            #[cfg(feature = "cube")]
            if crate::cube::is_on_gpu(&device)
                && !handle::one_stream()
                && (self.is_job() || self.ranks > 1)
            {
                return Err(Error::Engine(
                    "ranks use a GPU in one stream of CubeCL, and the program has used it with several before; start \
                     the first Launcher before using the GPU, or write `[streaming]` and `max_streams = 1` to cubecl.toml"
                        .into(),
                ));
            }
            Ok(device)
        };
        let shared = self.shared_settings(|name| std::env::var(name).ok());
        let watched = self.settings.log || self.trace.is_some();
        let world = |mut comm: Arc<dyn Communicator>, device: &Device| {
            if watched {
                comm = Arc::new(trace::Traced { engine: comm });
            }
            World::new(comm, device.clone().autodiff(), self.seed)
        };
        let program = |world: World| match &self.trace {
            None => program(world),
            Some(file) => {
                world.begin_trace(file)?;
                let value = program(world.clone());
                if value.is_ok() {
                    world.write_trace(file)?
                } else {
                    // The thread may run another job.
                    drop(trace::end())
                }
                value
            }
        };
        match self.engine {
            Engine::Local => {
                let device = device()?;
                let world = |comm| world(comm, &device);
                run_threads(self.ranks, self.settings, world, program)
            }
            #[cfg(not(feature = "mpi"))]
            Engine::Mpi => Err(Error::Engine(
                "this process was started by an MPI launcher, as its environment variables say, but its program was \
                 built without MPI; expected a program with the feature `mpi`: cargo build --release --features mpi. \
                 For threads of one process, start it without mpirun, or use Launcher::local; for one task of Slurm, \
                 srun --mpi=none"
                    .into(),
            )),
            #[cfg(feature = "mpi")]
            Engine::Mpi => {
                let comm = crate::comm::mpi::Mpi::start(self.settings)?;
                // After a failure, MPI ends all ranks, including this one.
                let shut_down = || comm.shut_down();
                run_process(comm.clone(), &shared, device, world, program, shut_down)
            }
            Engine::Tcp => {
                let rendezvous = Rendezvous::from_env(|name| std::env::var(name).ok())?;
                let comm = Tcp::start(&rendezvous, self.settings)?;
                let shut_down = || comm.shut_down();
                run_process(comm.clone(), &shared, device, world, program, shut_down)
            }
        }
    }

    /// The settings that all processes of a job must share, by name. Those of kernels change the
    /// rounding of results, so that replicas of a parameter would drift apart.
    fn shared_settings(
        &self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> [(&'static str, String); 8] {
        let value = |name| variable(name).unwrap_or_else(|| "unset".into());
        let Settings {
            check,
            overlap,
            buckets,
            ..
        } = self.settings;
        [
            ("Halocline", env!("CARGO_PKG_VERSION").into()),
            ("the seed", self.seed.to_string()),
            ("overlap (HALOCLINE_OVERLAP)", format!("{overlap:?}")),
            ("buckets (HALOCLINE_BUCKETS)", buckets.to_string()),
            ("check (HALOCLINE_CHECK)", check.to_string()),
            ("trace (HALOCLINE_TRACE)", self.trace.is_some().to_string()),
            ("kernels (HALOCLINE_ISA)", value("HALOCLINE_ISA")),
            ("kernels (HALOCLINE_CONV)", value("HALOCLINE_CONV")),
        ]
    }
}

/// Returns the engine for a device: with NCCL on top if cells travel between GPUs.
fn between_gpus(comm: Arc<dyn Communicator>, device: &Device) -> Result<Arc<dyn Communicator>> {
    #[cfg(feature = "cuda")]
    return crate::comm::nccl::over(comm, device);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        Ok(comm)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_panic_on_one_rank_ends_the_others_with_its_cause() {
        let start = Instant::now();
        let result = Launcher::local(3).run(|world| {
            if world.rank() == 1 {
                panic!("out of ocean");
            }
            world.barrier()
        });
        let error = result.unwrap_err().to_string();
        assert_eq!(error, "rank 1 failed: panicked: out of ocean");
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_timeout_of_nothing_is_refused() {
        let run = Launcher::local(1).timeout(Duration::ZERO).run(|_| Ok(()));
        assert!(run.unwrap_err().to_string().contains("a timeout of 0 s"));
    }

    #[cfg(not(feature = "mpi"))]
    #[test]
    fn a_process_of_mpi_without_mpi_names_the_command_that_adds_it() {
        let mut launcher = Launcher::local(1);
        launcher.engine = Engine::Mpi;
        let error = launcher.run(|_| Ok(())).unwrap_err().to_string();
        let told =
            "expected a program with the feature `mpi`: cargo build --release --features mpi";
        assert!(error.contains(told), "{error}");
    }

    #[test]
    fn local_ranks_share_the_threads_out() {
        let all = rayon::current_num_threads();
        for ranks in [1, 2, 3] {
            let launcher = Launcher::local(ranks);
            let threads = launcher.collect(|_| Ok(rayon::current_num_threads()));
            let threads = threads.unwrap();
            assert_eq!(threads.iter().sum::<usize>(), all.max(ranks), "{threads:?}");
            assert!(threads[0] - threads[ranks - 1] <= 1, "{threads:?}");
        }
    }

    #[test]
    fn the_rank_that_failed_is_named_though_another_tells_of_it_first() {
        let result = Launcher::local(3).run(|world| {
            if world.rank() == 2 {
                std::thread::sleep(Duration::from_millis(200));
                return Err(Error::other("no such file"));
            }
            // The result of a rank that was notified of another rank's error.
            Err(Error::Rank {
                rank: 2,
                cause: "no such file".into(),
            })
        });
        let error = result.unwrap_err().to_string();
        assert_eq!(error, "rank 2 failed: no such file");
    }

    #[test]
    fn the_environment_chooses_the_engine() {
        let kind = |set: &[&str]| Engine::of(|name| set.contains(&name).then(|| "2".to_string()));
        assert_eq!(kind(&[]), Engine::Local);
        assert_eq!(kind(&["OMPI_COMM_WORLD_SIZE", "MASTER_ADDR"]), Engine::Mpi);
        assert_eq!(kind(&["SLURM_STEP_NUM_TASKS", "SLURM_PROCID"]), Engine::Mpi);
        let slurm = [
            "SLURM_STEP_NUM_TASKS",
            "SLURM_PROCID",
            "PMIX_RANK",
            "MASTER_ADDR",
        ];
        assert_eq!(kind(&slurm), Engine::Tcp);
        // Started by `mpirun` of MPICH within a Slurm job.
        let mpirun = ["PMI_SIZE", "MPI_LOCALRANKID", "SLURM_PROCID", "MASTER_ADDR"];
        assert_eq!(kind(&mpirun), Engine::Mpi);
        let torchrun = ["RANK", "MASTER_ADDR", "SLURM_STEP_NUM_TASKS"];
        assert_eq!(kind(&torchrun), Engine::Tcp);
        assert_eq!(kind(&["RANK"]), Engine::Tcp);
        assert_eq!(kind(&["WORLD_SIZE"]), Engine::Tcp);
    }

    #[test]
    fn processes_compare_the_kernels_that_round_differently() {
        let settings = |set: &str| {
            let variable = |name: &str| (name == set).then(|| "direct".to_string());
            Launcher::local(1).shared_settings(variable)
        };
        for name in ["HALOCLINE_ISA", "HALOCLINE_CONV"] {
            assert_ne!(settings(name), settings(""), "{name}");
        }
    }

    #[test]
    fn an_error_of_all_ranks_is_the_result_of_the_run() {
        let result = Launcher::local(2).run(|world| {
            world.mesh([("lat", 3)])?;
            Ok(())
        });
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Mesh(_)), "{error}");
        assert!(error.to_string().contains("there are 2 ranks"));
    }

    #[test]
    fn a_rank_that_ends_early_is_noticed_by_one_that_waits() {
        let result = Launcher::local(2).run(|world| {
            if world.is_root() {
                world.barrier()
            } else {
                Ok(())
            }
        });
        let error = result.unwrap_err().to_string();
        assert!(error.contains("rank 1 has ended its program"), "{error}");
    }
}
