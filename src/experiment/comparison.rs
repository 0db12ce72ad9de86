//! Comparison of meshes of one number of ranks.

use std::fmt;

use halocline_core::{Result, World};
use halocline_models::parallel::Machine;

use super::config::ExperimentConfig;
use super::errors::invalid;
use super::meshes::{Sizes, meshes};
use super::network::no_network;
use super::outlook::{Outlook, opened};

/// Mesh with its estimates; [`MeshComparison`] has an example.
#[derive(Debug)]
pub struct ComparedMesh {
    /// Sizes of the axes, by name.
    pub mesh: Sizes,
    /// Estimates on the mesh, or the reason why it cannot be used.
    pub outlook: Result<Outlook>,
    /// Whether it is the mesh of the configuration, or its default.
    pub is_configured: bool,
}

/// Estimates on several meshes of one number of ranks: those within the memory budget come first,
/// the fastest of them at the front. Its `Display` form is a table.
///
/// # Example
/// ```no_run
/// use halocline::experiment::{ExperimentConfig, MeshComparison};
/// use halocline::models::parallel::{Link, Machine};
/// use halocline::prelude::*;
///
/// let mut config = ExperimentConfig::load("weather.toml")?;
/// let machine = Machine::new(2e13, Link { latency: 5e-6, bandwidth: 1e10 });
/// let mut compared = Launcher::local(1).collect(|world| {
///     MeshComparison::new(&world, &config, 8, &machine, Some(16_000_000_000)) // on 8 ranks
/// })?;
/// let compared = compared.remove(0);
/// println!("{compared}");
/// config.mesh = compared.fastest()?.mesh.clone();
/// # Ok::<(), halocline::Error>(())
/// ```
#[derive(Debug)]
pub struct MeshComparison {
    /// Meshes in their order.
    pub meshes: Vec<ComparedMesh>,
    /// Memory of a rank in bytes, if it is limited.
    pub budget: Option<usize>,
}

impl MeshComparison {
    /// Computes the first rank's share of a batch, like [`Outlook::new`], on several meshes of
    /// `ranks` ranks, of which each has `budget` bytes of memory. They divide the ranks in different
    /// ways over the axes `data`, `lat` and `lon`: for each size of `data` those three with the
    /// shortest halos, and the configured mesh. Other axes keep their sizes.
    ///
    /// # Errors
    /// No mesh on which each rank has a sample and a cell; data that cannot be read; a budget where
    /// the system does not report the memory of a process. Other errors of [`Outlook::new`] belong
    /// to a mesh; if all have one, that of the first.
    pub fn new(
        world: &World,
        config: &ExperimentConfig,
        ranks: usize,
        machine: &Machine,
        budget: Option<usize>,
    ) -> Result<Self> {
        let data = opened(world, config)?;
        let (batch, shape) = (config.training.batch, data.grid.shape());
        let mut candidates = meshes(ranks, batch, shape, &config.mesh);
        if candidates.is_empty() {
            let [rows, columns] = shape;
            let expected = format!(
                "a number that divides into at most {batch} along data, {rows} along lat and {columns} along lon, beside \
                 the other axes of the mesh"
            );
            return Err(invalid("ranks", ranks, expected));
        }
        let axes = config.axes(ranks, &data.grid).into_iter();
        let configured: Sizes = axes.map(|(name, size)| (name.to_string(), size)).collect();
        let is_configured = |mesh: &Sizes| long_axes(mesh) == long_axes(&configured);
        if configured.values().product::<usize>() == ranks && !candidates.iter().any(is_configured)
        {
            candidates.push(configured.clone());
        }
        let mut compared = Vec::new();
        for mesh in candidates {
            let config = ExperimentConfig {
                mesh: mesh.clone(),
                ..config.clone()
            };
            let outlook = Outlook::on(world, &config, &data, ranks, machine, no_network);
            if let (Some(budget), Ok(Outlook { grown: None, .. })) = (budget, &outlook) {
                let expected =
                    "no budget, because this system does not report the memory of a process";
                return Err(invalid("memory", budget, expected));
            }
            compared.push(ComparedMesh {
                is_configured: is_configured(&mesh),
                mesh,
                outlook,
            });
        }
        if compared.iter().all(|found| found.outlook.is_err())
            && let Err(error) = compared.swap_remove(0).outlook
        {
            return Err(error);
        }
        Ok(Self::ordered(compared, budget))
    }

    /// Puts meshes into their order.
    fn ordered(meshes: Vec<ComparedMesh>, budget: Option<usize>) -> Self {
        let mut compared = Self { meshes, budget };
        let key = |found: &ComparedMesh| (!fits(found, budget), seconds(found));
        compared.meshes.sort_by(|one, other| {
            let ((one, first), (other, second)) = (key(one), key(other));
            one.cmp(&other).then(first.total_cmp(&second))
        });
        compared
    }

    /// Returns the fastest mesh within the budget.
    ///
    /// # Errors
    /// No mesh within the budget. The error states the least memory of any mesh.
    pub fn fastest(&self) -> Result<&ComparedMesh> {
        let fitting = self.meshes.iter().find(|found| fits(found, self.budget));
        fitting.ok_or_else(|| {
            let memory = self.meshes.iter().filter_map(memory);
            let least = memory.min().unwrap_or(0);
            invalid(
                "memory",
                format!("{} bytes", self.budget.unwrap_or(0)),
                format!("at least {least} bytes, or more ranks"),
            )
        })
    }

    /// Returns the reason why a mesh is or is not the one to take.
    fn note(&self, found: &ComparedMesh) -> String {
        let note = match (&found.outlook, self.budget, self.fastest()) {
            (Err(error), ..) => error.to_string(),
            (Ok(_), Some(budget), _) if !fits(found, self.budget) => {
                format!("needs more than {:.1} MB", budget as f64 / 1e6)
            }
            (Ok(_), _, Ok(fastest)) if !std::ptr::eq(found, fastest) => {
                let ratio = seconds(found) / seconds(fastest);
                format!("{:.0} % slower", 100.0 * (ratio - 1.0))
            }
            _ => "fastest".into(),
        };
        if found.is_configured {
            format!("{note}, configured")
        } else {
            note
        }
    }
}

/// Returns the axes of several ranks.
fn long_axes(mesh: &Sizes) -> Vec<(&String, &usize)> {
    mesh.iter().filter(|(_, size)| **size > 1).collect()
}

/// Returns the seconds of a batch.
fn seconds(found: &ComparedMesh) -> f64 {
    match &found.outlook {
        Ok(outlook) => outlook.compute + outlook.communication,
        Err(_) => f64::INFINITY,
    }
}

/// Returns the bytes that a rank needs.
fn memory(found: &ComparedMesh) -> Option<usize> {
    let outlook = found.outlook.as_ref().ok()?;
    Some(outlook.held + outlook.grown.unwrap_or(0))
}

/// Returns whether the mesh can be used within a budget.
fn fits(found: &ComparedMesh, budget: Option<usize>) -> bool {
    memory(found).is_some_and(|bytes| budget.is_none_or(|budget| bytes <= budget))
}

impl fmt::Display for MeshComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let titles = [
            "mesh",
            "memory of a rank",
            "sent for a batch",
            "messages",
            "time of a batch",
        ];
        let [mesh, held, sent, messages, time] = titles;
        write!(
            f,
            "{mesh:<24}  {held:>16}  {sent:>16}  {messages:>8}  {time:>16}"
        )?;
        for found in &self.meshes {
            let axes = found.mesh.iter();
            let axes = axes.map(|(name, size)| format!("{name} {size}"));
            let mesh = axes.collect::<Vec<_>>().join(" x ");
            write!(f, "\n{mesh:<24}  ")?;
            if let Ok(outlook) = &found.outlook {
                let operations = outlook.messages.operations.iter();
                write!(
                    f,
                    "{:>13.1} MB  {:>13.3} MB  {:>8}  {:>13.2} ms  ",
                    memory(found).unwrap_or(0) as f64 / 1e6,
                    outlook.messages.bytes_sent() as f64 / 1e6,
                    operations.map(|planned| planned.sends.len()).sum::<usize>(),
                    1e3 * seconds(found)
                )?;
            }
            write!(f, "{}", self.note(found))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use halocline_core::PlannedMessages;

    use super::*;

    /// Returns a mesh with these milliseconds of a batch and megabytes of a rank.
    fn found(lat: usize, milliseconds: f64, megabytes: usize) -> ComparedMesh {
        ComparedMesh {
            mesh: Sizes::from([("lat".into(), lat)]),
            outlook: Ok(Outlook {
                mesh: vec![("lat".into(), lat)],
                parameters: 1,
                held: 1_000_000 * megabytes,
                grown: Some(0),
                compute: 1e-3 * milliseconds,
                messages: PlannedMessages::default(),
                communication: 0.0,
                read: (0, 1.0),
                batches: (1, 1),
                steps: (1, 1.0),
                plans: Vec::new(),
            }),
            is_configured: lat == 1,
        }
    }

    fn compared(budget: Option<usize>) -> MeshComparison {
        let refused = ComparedMesh {
            outlook: Err(invalid("model.kernel", 4, "an odd number")),
            ..found(8, 0.0, 0)
        };
        let meshes = vec![
            refused,
            found(1, 3.0, 40),
            found(2, 2.0, 90),
            found(4, 4.0, 20),
        ];
        MeshComparison::ordered(meshes, budget)
    }

    fn order(compared: &MeshComparison) -> Vec<usize> {
        let meshes = compared.meshes.iter();
        meshes.map(|found| found.mesh["lat"]).collect()
    }

    #[test]
    fn meshes_within_the_budget_come_first_by_their_time() {
        let all = compared(None);
        assert_eq!(order(&all), [2, 1, 4, 8]);
        let table = all.to_string();
        let ends = [
            "time of a batch",
            "2.00 ms  fastest",
            "3.00 ms  50 % slower, configured",
            "4.00 ms  100 % slower",
            "model.kernel: got 4, expected an odd number",
        ];
        assert_eq!(table.lines().count(), ends.len(), "{table}");
        for (line, end) in table.lines().zip(ends) {
            assert!(line.ends_with(end), "{end} in\n{table}");
        }
        let some = compared(Some(50_000_000));
        assert_eq!(order(&some), [1, 4, 2, 8]);
        assert_eq!(some.fastest().unwrap().mesh["lat"], 1);
        let table = some.to_string();
        assert!(table.contains("ms  needs more than 50.0 MB"), "{table}");
    }

    #[test]
    fn a_budget_below_all_meshes_is_an_error_with_the_least_memory() {
        let error = compared(Some(10_000_000)).fastest().unwrap_err();
        let told = "memory: got 10000000 bytes, expected at least 20000000 bytes, or more ranks";
        assert_eq!(error.to_string(), told);
    }
}
