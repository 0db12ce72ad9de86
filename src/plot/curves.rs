//! Curves: scores against lead times, and spectra.

use std::path::Path;

use halocline_core::Result;
use halocline_io::save_whole;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::{Area, FONT, failed, load_font, span};

/// Width and height of a chart, in pixels.
const SIZE: (u32, u32) = (480, 420);
const COLOURS: [RGBColor; 6] = [
    BLUE,
    RED,
    BLACK,
    RGBColor(0, 140, 70),
    RGBColor(230, 130, 0),
    RGBColor(130, 60, 160),
];

/// Named line of a [`Chart`].
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Name in the legend.
    pub name: String,
    /// Points, in order. Points that are not finite, or not positive on logarithmic axes, are not
    /// drawn.
    pub points: Vec<(f64, f64)>,
}

/// Chart of curves.
///
/// # Example
/// ```
/// use halocline::plot::{Chart, save_charts};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let leads = [(6.0, 1.2), (12.0, 1.9), (18.0, 2.4)]; // hours, kelvin
/// let errors = Chart::new("t2m", "lead time in hours", "RMSE in K")
///     .with_curve("model", leads)
///     .with_curve("persistence", leads.map(|(lead, rmse)| (lead, 1.5 * rmse)));
/// // From `power_spectrum`, starting with the mean (wavenumber 0).
/// let spectra = Chart::spectra("t2m after 18 h", "K²")
///     .with_spectrum("model", &[80.0, 9.0, 2.0, 0.1])
///     .with_spectrum("truth", &[80.0, 9.5, 2.5, 0.4]);
/// save_charts(folder.join("scores.png"), &[errors, spectra])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    title: String,
    x: String,
    y: String,
    is_logarithmic: bool,
    curves: Vec<Curve>,
}

impl Chart {
    /// Makes a chart with axis labels. The vertical axis starts at zero, unless there are negative
    /// values.
    pub fn new(title: &str, x: &str, y: &str) -> Self {
        Self {
            title: title.into(),
            x: x.into(),
            y: y.into(),
            is_logarithmic: false,
            curves: Vec::new(),
        }
    }

    /// Makes a chart of power against wavenumber, on logarithmic axes.
    pub fn spectra(title: &str, unit: &str) -> Self {
        Self {
            is_logarithmic: true,
            ..Self::new(title, "zonal wavenumber", &format!("power in {unit}"))
        }
    }

    /// Adds a curve.
    #[must_use]
    pub fn with_curve(mut self, name: &str, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        self.curves.push(Curve {
            name: name.into(),
            points: points.into_iter().collect(),
        });
        self
    }

    /// Adds a spectrum: the power at each wavenumber from 0, such as that from
    /// [`power_spectrum`](halocline_ops::spectral::power_spectrum).
    #[must_use]
    pub fn with_spectrum(self, name: &str, power: &[f64]) -> Self {
        let points = power.iter().enumerate();
        self.with_curve(name, points.map(|(wave, power)| (wave as f64, *power)))
    }

    /// Returns the points to draw.
    fn drawn(&self, curve: &Curve) -> Vec<(f64, f64)> {
        let is_drawn = |value: f64| value.is_finite() && (!self.is_logarithmic || value > 0.0);
        let points = curve.points.iter().copied();
        points
            .filter(|(x, y)| is_drawn(*x) && is_drawn(*y))
            .collect()
    }

    fn draw(&self, area: &Area<'_>) -> Result<()> {
        let points: Vec<(f64, f64)> = self.curves.iter().flat_map(|c| self.drawn(c)).collect();
        let [left, right] = span(points.iter().map(|point| point.0));
        let [low, high] = span(points.iter().map(|point| point.1));
        if self.is_logarithmic {
            // Logarithmic axes need positive bounds, which `span` may not return for a single
            // value.
            let (x, y) = (left.max(0.5)..right, low.max(high * 1e-12)..high * 3.0);
            return self.draw_on(area, x.log_scale(), y.log_scale());
        }
        // Room for the legend above the curves.
        let low = low.min(0.0);
        self.draw_on(area, left..right, low..high + 0.35 * (high - low))
    }

    fn draw_on<X, Y>(&self, area: &Area<'_>, x: X, y: Y) -> Result<()>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, (FONT, 20))
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(x, y)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc(&self.x)
            .y_desc(&self.y)
            .draw()
            .map_err(failed)?;
        for (curve, colour) in self.curves.iter().zip(COLOURS.iter().cycle()) {
            let style = colour.stroke_width(2);
            chart
                .draw_series(LineSeries::new(self.drawn(curve), style))
                .map_err(failed)?
                .label(&curve.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .position(SeriesLabelPosition::UpperRight)
            .draw()
            .map_err(failed)
    }
}

/// Writes charts side by side to a PNG file.
///
/// # Errors
/// There are no charts; the file cannot be written.
pub fn save_charts(path: impl AsRef<Path>, charts: &[Chart]) -> Result<()> {
    load_font()?;
    let count = charts.len();
    if count == 0 {
        return Err(failed("expected at least one chart"));
    }
    let size = (SIZE.0 * count as u32, SIZE.1);
    save_whole(path, |path| {
        let area = BitMapBackend::new(path, size).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        for (panel, chart) in area.split_evenly((1, count)).iter().zip(charts) {
            chart.draw(panel)?;
        }
        area.present().map_err(failed)
    })
}
