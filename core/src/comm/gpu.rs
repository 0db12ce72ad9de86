//! Choice of the GPU of each process of a job.

use crate::{Error, Result};

/// Environment variable that lets processes share GPUs.
pub(crate) const SHARE: &str = "HALOCLINE_SHARE_GPUS";

/// The number of this process among those of its host, as set by its launcher: `torchrun`, Open
/// MPI, MPICH and Intel MPI, Slurm.
pub(crate) fn local_rank(get: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let launchers = [
        "LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "SLURM_LOCALID",
    ];
    let number = launchers.into_iter().find_map(get);
    number.and_then(|number| number.trim().parse().ok())
}

/// Chooses the GPU for the process with this local rank.
///
/// # Errors
/// There is no GPU, or there are more processes than GPUs and they may not share.
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

/// The default device of this process: burn's default or, in a job, its own GPU.
///
/// # Errors
/// The errors of [`choose`].
#[cfg(feature = "cuda")]
pub(crate) fn device(in_job: bool) -> Result<burn::tensor::Device> {
    use burn::tensor::{Device, DeviceType};
    let variable = |name: &str| std::env::var(name).ok();
    if variable("BURN_DEVICE").is_some_and(|device| !device.eq_ignore_ascii_case("cuda")) {
        return Ok(Device::default());
    }
    // Zero without a driver.
    let gpus = Device::enumerate(DeviceType::Cuda).into_iter().count();
    let share = may_share();
    // A single visible GPU, as with `srun --gpus-per-task=1`, is assumed to be this process's own;
    // NCCL verifies this when it starts.
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
        let rank =
            |name: &'static str| local_rank(move |asked| (asked == name).then(|| "3".to_string()));
        for name in ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"] {
            assert_eq!(rank(name), Some(3));
        }
        assert_eq!(rank("RANK"), None);
    }
}
