//! Settings that determine the batches of an interrupted epoch.

use burn::module::Module;
use halocline_core::Result;

use super::data_config::DataConfig;
use super::errors::invalid;
use crate::trainer::Trainer;

/// Notes the number of samples in a batch and in an epoch, and the settings of their hours, which
/// determine the batches of an interrupted epoch.
///
/// # Errors
/// Others than those of the interrupted epoch.
pub(super) fn check_order<M: Module>(
    trainer: &mut Trainer<M>,
    order: [usize; 2],
    data: &DataConfig,
) -> Result<()> {
    const NOTE: &str = "training.batch";
    let every: Vec<usize> = data.every_hours.into_iter().collect();
    for (setting, hours) in [
        ("data.every_hours", &every),
        ("data.at_hours", &data.at_hours),
    ] {
        let noted: Option<Vec<usize>> = trainer.noted(setting)?;
        match noted {
            Some(noted) if noted == *hours => {}
            Some(noted) if trainer.batch() > 0 => {
                let expected = format!("{noted:?}, as in the epoch that was interrupted");
                return Err(invalid(setting, format!("{hours:?}"), expected));
            }
            // Folders of earlier versions have no note.
            _ => trainer.note(setting, hours)?,
        }
    }
    let before: Option<[usize; 2]> = trainer.noted(NOTE)?;
    match before.filter(|before| trainer.batch() > 0 && *before != order) {
        Some([batch, samples]) => Err(invalid(
            NOTE,
            format!("{} of {} samples", order[0], order[1]),
            format!(
                "{batch} of {samples}, as in the epoch that was interrupted after {} batches; change training.batch, \
                 training.curriculum, data.every_hours or at_hours when it has ended",
                trainer.batch()
            ),
        )),
        None if before == Some(order) => Ok(()),
        None => trainer.note(NOTE, &order),
    }
}
