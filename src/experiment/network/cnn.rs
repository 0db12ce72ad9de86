//! Kind `cnn`: a residual convolutional network.

use burn::tensor::Device;
use halocline_core::{Boundary, Error, Result};
use halocline_models::{SurrogateCnn, SurrogateCnnConfig};

use super::signature::Signature;

/// Initializes the network with the sizes of `config`, whose kernel must reach no further than the
/// rows across a pole.
pub(super) fn init(
    signature: &Signature,
    config: SurrogateCnnConfig,
    device: &Device,
) -> Result<SurrogateCnn> {
    let kernel = config.kernel;
    let (boundary, [rows, _]) = (signature.grid.boundary(), signature.grid.shape());
    // Cells beyond a pole come from rows on its other side, whose number limits the kernel.
    let most = match boundary[0] {
        Boundary::PoleRow => 2 * rows - 1,
        Boundary::PoleEdge => 2 * rows + 1,
        _ => usize::MAX,
    };
    if kernel.is_multiple_of(2) || kernel > most {
        let limit = if kernel > most {
            format!(" up to {most}")
        } else {
            String::new()
        };
        return Err(Error::other(format!(
            "model.kernel: {kernel} on {rows} rows; expected an odd number{limit}"
        )));
    }
    let config = config
        .with_history(signature.history)
        .with_constants(signature.constants())
        .with_diagnostics(signature.diagnostics())
        .with_boundary(boundary)
        .with_odd(signature.odd_places());
    Ok(config.init(device))
}
