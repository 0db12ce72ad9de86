//! Plots of fields and scores: maps with coastlines, difference maps, animations, and curves.
//!
//! Feature `plot`, on by default. All functions take plain arrays, such as those that rank 0
//! obtains from [`gather_tensor`](halocline_core::ShardTensor::gather_tensor), and write PNG and
//! GIF files without system libraries or fonts.

mod coastlines;
mod curves;
mod map;
mod raster;

use halocline_core::{Error, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

pub use curves::{Chart, Curve, save_charts};
pub use map::{Map, animate, save_maps};
pub(crate) use raster::Raster;

/// Drawing area of a picture.
type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;

const FONT: &str = "sans-serif";

fn failed(error: impl std::fmt::Display) -> Error {
    Error::other(format!("picture: {error}"))
}

/// Registers the embedded font, as the machine may have none.
fn load_font() -> Result<()> {
    let font = epaint_default_fonts::UBUNTU_LIGHT;
    let registered = register_font(FONT, FontStyle::Normal, font);
    registered.map_err(|_| failed("the font cannot be read"))
}

/// Returns the range of the finite values. It is never empty, even for a forecast that has
/// diverged.
fn span(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let finite = values.filter(|value| value.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    match (low <= high, low < high) {
        (false, _) => [0.0, 1.0],
        (true, false) => [low - 0.5, low + 0.5],
        _ => [low, high],
    }
}

/// Formats an axis label for an axis that spans `range`, with enough digits to distinguish ticks.
fn label(value: f64, [low, high]: [f64; 2]) -> String {
    let magnitude = (high - low).abs().log10().floor();
    match magnitude {
        -3.0..6.0 => format!("{value:.*}", (1.0 - magnitude).max(0.0) as usize),
        _ => format!("{value:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_never_empty() {
        assert_eq!(span([f64::NAN].into_iter()), [0.0, 1.0]);
        assert_eq!(span([2.0, f64::INFINITY].into_iter()), [1.5, 2.5]);
        assert_eq!(span([2.0, -1.0, f64::NAN].into_iter()), [-1.0, 2.0]);
    }

    #[test]
    fn labels_have_the_digits_of_their_range() {
        assert_eq!(label(273.15, [250.0, 310.0]), "273");
        assert_eq!(label(0.25, [0.0, 0.5]), "0.25");
        assert_eq!(label(2e-7, [0.0, 1e-6]), "2.0e-7");
    }
}
