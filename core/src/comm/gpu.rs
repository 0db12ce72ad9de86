//! Which GPU a process of a job computes on.

use crate::{Error, Result};

/// The variable that lets processes share GPUs.
pub(crate) const SHARE: &str = "HALOCLINE_SHARE_GPUS";

/// The number of this process among those of its host, as its launcher says: `torchrun`, Open MPI, MPICH and Intel MPI,
/// Slurm.
pub(crate) fn local_rank(get: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let launchers = [
        "LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "SLURM_LOCALID",
    ];
    let said = launchers.into_iter().find_map(get);
    said.and_then(|number| number.trim().parse().ok())
}

/// The GPU, of so many that this host has, for the process with this number.
///
/// # Errors
/// No GPU; more processes than GPUs, unless they may share.
pub(crate) fn choose(local_rank: usize, gpus: usize, share: bool) -> Result<usize> {
    if gpus == 0 {
        return Err(Error::Engine(
            "no CUDA device was found; install the NVIDIA driver, or set BURN_DEVICE=flex to compute on the CPU".into(),
        ));
    }
    if local_rank >= gpus && !share {
        return Err(Error::Engine(format!(
            "process {local_rank} of this host has no GPU of its own: there are {gpus}; start at most {gpus} processes \
             on a host, or set {SHARE}=1 to let them share"
        )));
    }
    Ok(local_rank % gpus)
}

/// The device of this process, for which the program chose none: burn's default, or in a job a GPU of its own.
///
/// # Errors
/// Those of [`choose`].
#[cfg(feature = "cuda")]
pub(crate) fn device(in_job: bool) -> Result<burn::tensor::Device> {
    use burn::tensor::{Device, DeviceType};
    let variable = |name: &str| std::env::var(name).ok();
    if variable("BURN_DEVICE").is_some_and(|device| !device.eq_ignore_ascii_case("cuda")) {
        return Ok(Device::default());
    }
    // None without a driver.
    let gpus = Device::enumerate(DeviceType::Cuda).into_iter().count();
    let share = may_share();
    // A launcher that shows each process a GPU of its own, as `srun --gpus-per-task=1`; that it does is seen later.
    let visible = variable("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let is_shown_one = gpus == 1 && !visible.is_empty() && !visible.contains(',');
    if !in_job || is_shown_one {
        return Ok(Device::cuda(choose(0, gpus, share)?));
    }
    let local_rank = local_rank(variable).or(share.then_some(0)).ok_or_else(|| {
        Error::Engine(
            "which GPU is this process's? Set LOCAL_RANK to its number among the processes of its host, from 0".into(),
        )
    })?;
    Ok(Device::cuda(choose(local_rank, gpus, share)?))
}

/// Whether processes of a host may share GPUs.
#[cfg(feature = "cuda")]
pub(crate) fn may_share() -> bool {
    crate::settings::switch(SHARE) == Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_process_has_a_gpu_or_is_told_why_not() {
        assert_eq!(choose(1, 4, false).ok(), Some(1));
        let error = choose(2, 2, false).unwrap_err().to_string();
        assert!(error.contains("there are 2; start at most 2") && error.contains(SHARE));
        assert_eq!(choose(5, 2, true).ok(), Some(1));
        let error = choose(0, 0, true).unwrap_err().to_string();
        assert!(error.contains("no CUDA device was found"), "{error}");
    }

    #[test]
    fn launchers_number_the_processes_of_a_host() {
        let of =
            |name: &'static str| local_rank(move |asked| (asked == name).then(|| "3".to_string()));
        for name in ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"] {
            assert_eq!(of(name), Some(3));
        }
        assert_eq!(of("RANK"), None);
    }
}
