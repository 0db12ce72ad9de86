//! Scores and spectra of forecasts that are dealt out among ranks.

use std::collections::BTreeSet;

use halocline_core::comm::Operation;
use halocline_core::{DeviceMesh, Error, Result, Traffic, ops};

use crate::metrics::Evaluation;
use crate::spectra::{FieldPower, Spectra};
use crate::sums::SUMS;
use crate::verification::{Verification, hours};

impl Verification {
    /// Adds scores of forecasts that are dealt out among the ranks of a mesh: the `part` of each
    /// rank, in the order of the ranks. All ranks call it together, and get the same sums.
    ///
    /// # Errors
    /// Parts of another number of channels or regions; a failure of communication.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::Launcher;
    /// use halocline_models::{Region, Verification};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let ranks = world.mesh([("data", 2)])?;
    ///     let regions = Region::standard();
    ///     let mut scores = Verification::new(&["t2m"], &[1.0], &[60.0], &[0.0, 180.0], regions)?;
    ///     let mut part = scores.clone();
    ///     // Rank 0 has a forecast with the bias -3, and rank 1 one with -2.
    ///     let field = |value: f64| Tensor::<4>::full([1, 1, 1, 2], value, world.device());
    ///     part.add(6.0, field(world.rank() as f64), field(3.0), None, None)?;
    ///     scores.add_dealt(&part, &ranks)?;
    ///     let found = scores.metrics("t2m", 6.0, "globe").expect("was added");
    ///     assert_eq!((found.forecasts, found.bias), (2, -2.5));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn add_dealt(&mut self, part: &Self, ranks: &DeviceMesh) -> Result<()> {
        let counts = [self.regions.len(), self.channels.len()];
        let of_region = SUMS * self.channels.len();
        let width = 1 + self.regions.len() * of_region;
        let mut numbers: Vec<f64> = Vec::new();
        for (lead, evaluations) in &part.leads {
            numbers.push(*lead as f64);
            numbers.extend(evaluations.iter().flat_map(Evaluation::numbers));
        }
        for numbers in gathered("Verification", ranks, counts, numbers)? {
            for row in numbers.chunks(width) {
                let empty = self.regions.iter().map(|(_, empty)| empty.clone());
                let evaluations = self.leads.entry(row[0] as i64);
                let evaluations = evaluations.or_insert_with(|| empty.collect());
                let sums = row[1..].chunks(of_region.max(1));
                for (evaluation, sums) in evaluations.iter_mut().zip(sums) {
                    evaluation.add_numbers(sums);
                }
            }
        }
        Ok(())
    }
}

impl Spectra {
    /// Adds spectra of forecasts that are dealt out among the ranks of a mesh: the `part` of each
    /// rank, in the order of the ranks. All ranks call it together, and get the same sums.
    ///
    /// # Errors
    /// Parts of another number of channels, regions or columns; a failure of communication.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::Launcher;
    /// use halocline_models::{Region, Spectra};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let ranks = world.mesh([("data", 2)])?;
    ///     let mut spectra = Spectra::new(&["t2m"], &[1.0], &[45.0], Region::standard())?;
    ///     let mut part = spectra.clone();
    ///     let field = Tensor::<4>::full([1, 1, 1, 4], world.rank() as f64, world.device());
    ///     part.add(24.0, field.clone(), field)?;
    ///     spectra.add_dealt(&part, &ranks)?;
    ///     let [forecast, _] = spectra.of("t2m", 24.0, "globe").expect("was added");
    ///     assert_eq!(forecast[0], 0.5); // the mean of 0² and 1²
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn add_dealt(&mut self, part: &Self, ranks: &DeviceMesh) -> Result<()> {
        let (regions, channels) = (self.regions.len(), self.channels.len());
        let gather = |numbers| gathered("Spectra", ranks, [regions, channels], numbers);
        let leads = part.leads.keys().map(|lead| *lead as f64).collect();
        let leads = gather(leads)?.into_iter().flatten();
        let leads: BTreeSet<i64> = leads.map(|lead| lead as i64).collect();
        // One message per lead: those of all leads and ranks may need more memory than the fields.
        for lead in leads {
            let mut numbers: Vec<f64> = Vec::new();
            if let Some(sums) = part.leads.get(&lead) {
                numbers.extend([sums.fields as f64, sums.columns as f64]);
                numbers.extend(sums.power.iter().flatten().flatten().flatten());
            }
            for numbers in gather(numbers)? {
                let [batch, columns, powers @ ..] = &numbers[..] else {
                    continue; // a rank without forecasts that reach the lead
                };
                let (batch, columns) = (*batch as usize, *columns as usize);
                let (forecast, truth) = powers.split_at(powers.len() / 2);
                let [forecast, truth] = [forecast, truth].map(|power| FieldPower {
                    batch,
                    columns,
                    power: by_region(power, channels, columns / 2 + 1),
                });
                self.add_power(hours(lead), &forecast, &truth)?;
            }
        }
        Ok(())
    }
}

/// Gathers the numbers of the ranks of a mesh, in the order of the ranks.
///
/// # Errors
/// Parts with other `counts` of regions and channels; a failure of communication.
fn gathered(
    operator: &'static str,
    ranks: &DeviceMesh,
    counts: [usize; 2],
    mut numbers: Vec<f64>,
) -> Result<Vec<Vec<f64>>> {
    numbers.extend(counts.map(|count| count as f64));
    let operation = Operation::new(operator, Traffic::Reduce, None);
    let group = ranks.shape().ranks();
    let mut parts = ops::all_gather_numbers(ranks.comm(), group, &operation, &numbers)?;
    for part in &mut parts {
        let found = part.split_off(part.len().saturating_sub(counts.len()));
        let found: Vec<usize> = found.into_iter().map(|count| count as usize).collect();
        if found != counts {
            let message = format!(
                "a part of {found:?} regions and channels; expected {counts:?}, as on this rank"
            );
            return Err(Error::operator(operator, message));
        }
    }
    Ok(parts)
}

/// Splits powers by region, channel and wavenumber.
fn by_region(power: &[f64], channels: usize, waves: usize) -> Vec<Vec<Vec<f64>>> {
    let by_channel = |power: &[f64]| -> Vec<Vec<f64>> {
        let channels = power.chunks(waves);
        channels.map(<[f64]>::to_vec).collect()
    };
    let regions = power.chunks((channels * waves).max(1));
    regions.map(by_channel).collect()
}

#[cfg(test)]
mod tests {
    use halocline_core::Launcher;

    use super::*;
    use crate::Region;

    #[test]
    fn parts_of_other_channels_are_refused() {
        let run = Launcher::local(2).run(|world| {
            let ranks = world.mesh([("data", 2)])?;
            let all = ["z", "t"];
            let names = &all[..1 + world.rank()];
            let regions = Region::standard();
            let mut scores = Verification::new(names, &[1.0], &[0.0], &[0.0; 4], regions.clone())?;
            let mut spectra = Spectra::new(names, &[1.0], &[0.0], regions)?;
            let (score_part, power_part) = (scores.clone(), spectra.clone());
            let refused = [
                scores.add_dealt(&score_part, &ranks).unwrap_err(),
                spectra.add_dealt(&power_part, &ranks).unwrap_err(),
            ];
            for refused in refused.map(|error| error.to_string()) {
                let told = "regions and channels; expected [4, ";
                assert!(refused.contains(told), "{refused}");
            }
            Ok(())
        });
        run.unwrap();
    }
}
