//! Memory of the process and of the machine, and the least that a model needs.

use std::sync::Arc;

use burn::tensor::Device;
use halocline_core::memory::is_cpu;
use halocline_core::{MeshShape, Result};
use halocline_models::parallel::resolve;

use super::config::ExperimentConfig;
use super::data::Data;
use super::errors::invalid;
use super::network::{FieldModel, OwnNetwork};

/// Bytes per number in single precision.
pub(super) const BYTES: usize = 4;

/// Use of a model, by which it needs memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Use {
    /// Forecasts: parameters.
    Forecast,
    /// Training: parameters, their gradients, and a hidden field of a batch.
    Training,
}

/// Refuses a model of which the first rank's share is larger than the memory of this machine. The
/// parameters of `model` are not made. Devices other than the CPU are not checked.
///
/// # Errors
/// A plan that does not fit the model or the mesh; a model that needs more memory.
pub(super) fn check_memory<N: OwnNetwork>(
    (config, data): (&ExperimentConfig, &Data),
    (model, mesh): (&FieldModel<N>, &Arc<MeshShape>),
    device: &Device,
    purpose: Use,
) -> Result<()> {
    let resolved = resolve(model, mesh, &config.plan)?;
    let held = resolved.parameters.iter();
    let held = held.map(|parameter| parameter.elements_held(0));
    let parameters = held.fold(0, usize::saturating_add);
    let (key, size, channels) = match config.model.hidden() {
        Some((key, channels)) => (key, channels.to_string(), channels),
        // Its fields have one channel or more.
        None => ("model.kind", "own".into(), 1),
    };
    let (least, parts) = match purpose {
        Use::Forecast => (parameters.saturating_mul(BYTES), "the parameters"),
        Use::Training => {
            let training = &config.training;
            let bytes = training.precision.half().map_or(BYTES, |_| BYTES / 2);
            let (rows, _) = config.model.rows(model, &data.grid, 1, 1);
            let samples = training.members.saturating_mul(training.batch);
            let field = samples.saturating_mul(rows).saturating_mul(channels) / mesh.size();
            let computed = parameters.saturating_add(field).saturating_mul(bytes);
            (
                parameters.saturating_mul(BYTES).saturating_add(computed),
                "parameters, gradients and a hidden field of a batch",
            )
        }
    };
    match machine_memory().filter(|_| is_cpu(device)) {
        Some(memory) if least > memory => Err(invalid(
            key,
            format!(
                "{size}, with which a rank needs {} or more for {parts}",
                gigabytes(least)
            ),
            format!(
                "at most {}, the memory of this machine: a smaller model, batch or ensemble, or more ranks that share them",
                gigabytes(memory)
            ),
        )),
        _ => Ok(()),
    }
}

fn gigabytes(bytes: usize) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

/// Returns the memory of this machine in bytes, swap included. `None` where the system does not
/// report it.
fn machine_memory() -> Option<usize> {
    let read = |name: &str| reported("/proc/meminfo", name);
    Some(read("MemTotal:")? + read("SwapTotal:").unwrap_or(0))
}

/// Returns the memory of this process in bytes, as the system reports it: `VmRSS:` now, or `VmHWM:`
/// at its peak.
pub(super) fn memory(name: &str) -> Option<usize> {
    reported("/proc/self/status", name)
}

/// Returns the bytes that a file of the system reports under a name.
fn reported(path: &str, name: &str) -> Option<usize> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::ModelConfig;
    use crate::experiment::fixture::{config_in, write_waves};
    use crate::experiment::network::no_network;

    #[test]
    fn a_model_larger_than_the_memory_is_refused_before_it_is_made() {
        if machine_memory().is_none() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let mut config = config_in(folder.path(), "", "");
        let data = Data::open(&config.data).unwrap();
        let mesh = Arc::new(MeshShape::solo(0));
        let device = Device::flex();
        let check = |config: &ExperimentConfig, purpose| {
            let model = config.model_on(&data, &device, no_network)?;
            check_memory((config, &data), (&model, &mesh), &device, purpose)
        };
        for purpose in [Use::Forecast, Use::Training] {
            check(&config, purpose).unwrap();
        }
        let unet = |width: usize| ModelConfig::Unet {
            width,
            levels: 1,
            recompute: false,
            mask: None,
        };
        config.model = unet(1 << 20);
        for purpose in [Use::Forecast, Use::Training] {
            let error = check(&config, purpose).unwrap_err().to_string();
            let told = "model.width: got 1048576, with which a rank needs ";
            assert!(error.starts_with(told), "{error}");
        }
        // Members need memory, too.
        config = config_in(folder.path(), "", "");
        config.training.members = usize::MAX;
        let error = check(&config, Use::Training).unwrap_err().to_string();
        assert!(error.contains("a hidden field of a batch"), "{error}");
        config.model = unet(usize::MAX);
        let error = check(&config, Use::Forecast).unwrap_err().to_string();
        assert!(error.contains("expected at most 1048576"), "{error}");
    }
}
