//! Groups of members that a model computes at once, so that the hidden fields of one group are in
//! memory at a time.

use halocline_core::ShardTensor;
use halocline_ops::prelude::*;

use super::network::{FieldModel, OwnNetwork};

/// Applies the model to members stacked along the batch: on each rank at most `most` of them at
/// once, or all.
pub(super) fn apply_to_members<N: OwnNetwork>(
    model: &FieldModel<N>,
    x: ShardTensor<4>,
    most: Option<usize>,
) -> ShardTensor<4> {
    let held = x.layout().extents(0).to_vec();
    // All ranks apply the model equally often, because they exchange halos and parameters: those
    // with fewer members end with empty groups.
    let count = held.iter().copied().max().unwrap_or(0);
    let Some(most) = most.filter(|most| *most < count) else {
        return x.apply(model);
    };
    let (local, layout, mesh) = x.into_parts();
    let part = layout.part(0, mesh.position());
    let mut results = Vec::new();
    for first in (0..count).step_by(most) {
        let sizes = held.iter().map(|held| held.saturating_sub(first).min(most));
        let sizes: Vec<usize> = sizes.collect();
        let start = first.min(held[part]);
        let members = local.clone().slice(start..start + sizes[part]);
        let group = ShardTensor::from_parts(members, layout.resized(0, sizes), mesh.clone());
        results.push(group.apply(model));
    }
    let layout = results[0].layout().resized(0, held);
    let locals: Vec<_> = results.into_iter().map(ShardTensor::into_local).collect();
    let local = RearrangeField::cat(locals, 0);
    ShardTensor::from_parts(local, layout, mesh)
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use halocline_core::{Launcher, Traffic};
    use halocline_io::Period;

    use crate::experiment::Experiment;
    use crate::experiment::fixture::{config_in, write_waves};

    #[test]
    fn forecasts_and_scores_have_the_same_bits_for_groups_of_any_size() {
        for (data, noise, mesh, ranks) in [
            ("", "noise = 0.1", "", 1),
            ("noise_channels = 2", "", "", 1),
            ("noise_channels = 2", "noise = 0.1", "lat = 2", 2),
            // With groups of one, the second rank has one member and an empty group.
            ("noise_channels = 2", "noise = 0.1", "member = 2", 2),
        ] {
            let folder = tempfile::tempdir().unwrap();
            write_waves(folder.path());
            // Bits of a forecast, the number of its exchanges, and the scores of all forecasts.
            let computed = |setting: &str| {
                let forecast = format!("steps = 2\nmembers = 3\n{noise}\n{setting}");
                let tables = format!("[mesh]\n{mesh}\n[forecast]\n{forecast}");
                let config = config_in(folder.path(), data, &tables);
                let found = Launcher::local(ranks).collect(|world| {
                    let experiment = Experiment::new(&world, &config)?;
                    let model = experiment.model()?.valid();
                    let states = experiment.states(&Period::default())?;
                    let read = |state: usize| states.loader.load(&[state]);
                    let (batch, before) = (read(3)?, world.comm_stats());
                    let mut bits: Vec<u32> = Vec::new();
                    experiment.steps(&model, &states, batch, &config.forecast, read, |step| {
                        let field = step.fields.full_tensor().into_data();
                        bits.extend(field.iter::<f32>().map(f32::to_bits));
                        Ok(())
                    })?;
                    let sent = world.comm_stats().since(&before);
                    let exchanges = sent.of(Traffic::Exchange).messages;
                    let report =
                        experiment.score_states(&model, &states, &config.forecast, None)?;
                    Ok((bits, exchanges, format!("{report:?}")))
                });
                found.unwrap()
            };
            let expected = computed("");
            assert_eq!(expected[0].1 > 0, mesh == "lat = 2");
            for at_once in [1, 2, 3] {
                let found = computed(&format!("members_at_once = {at_once}"));
                for (found, expected) in found.iter().zip(&expected) {
                    assert!(found.0 == expected.0, "{mesh}, {at_once} at once");
                    assert_eq!(found.2, expected.2, "{mesh}, {at_once} at once");
                    // Each group has exchanges of its own.
                    assert_eq!(found.1, expected.1 * 3_u64.div_ceil(at_once));
                }
            }
        }
    }
}
