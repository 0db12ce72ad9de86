//! The setting `model.mask`: cells without a value that reach no other cell, such as land.

use halocline_core::{Error, Result};

use super::signature::Signature;

/// Returns the place, among the received channels, of the mask of a channel.
///
/// # Errors
/// A mask that is not among the forcings; one together with `model.recompute`, which has no effect
/// on masked convolutions.
pub(super) fn place(name: &str, recompute: bool, signature: &Signature) -> Result<usize> {
    if recompute {
        let message = "model.recompute: true with model.mask; expected one of them";
        return Err(Error::other(message));
    }
    let (forcing, forcings) = (format!("mask:{name}"), &signature.channels.forcings);
    let found = forcings.iter().position(|name| *name == forcing);
    let inputs = signature.channels_in() - signature.constants();
    found.map(|place| inputs + place).ok_or_else(|| {
        Error::other(format!(
            "model.mask: {name}, and the forcings are {forcings:?}; expected {forcing:?} among data.forcings"
        ))
    })
}
