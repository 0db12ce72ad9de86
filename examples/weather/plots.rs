//! Pictures of forecasts.

use std::path::Path;

use halocline::io::ndarray::Array2;
use halocline::prelude::*;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::VARIABLES;
use crate::forecast::Score;

fn picture(error: impl std::fmt::Display) -> Error {
    Error::other(format!("picture: {error}"))
}

/// Loads the font that the program carries: a machine may have none.
fn load_font() -> Result<()> {
    register_font(
        "sans-serif",
        FontStyle::Normal,
        epaint_default_fonts::UBUNTU_LIGHT,
    )
    .map_err(|_| picture("the font cannot be read"))
}

/// The range of the finite values, which is never empty: a forecast may have diverged.
fn span(values: impl Iterator<Item = f32>) -> (f32, f32) {
    let finite = values.filter(|value| value.is_finite());
    let (low, high) = finite.fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    match (low <= high, low < high) {
        (false, _) => (0.0, 1.0),
        (true, false) => (low - 0.5, low + 0.5),
        _ => (low, high),
    }
}

/// A map of a field `[lat, lon]`, north up, in colours that span the values of `range`.
pub(crate) fn map(
    path: &Path,
    title: &str,
    field: &Array2<f32>,
    range: &Array2<f32>,
) -> Result<()> {
    load_font()?;
    let (rows, columns) = field.dim();
    let (low, high) = span(range.iter().copied());
    let colour = |value: f32| ViridisRGB::get_color(((value - low) / (high - low)).clamp(0.0, 1.0));

    let area = BitMapBackend::new(path, (900, 500)).into_drawing_area();
    area.fill(&WHITE).map_err(picture)?;
    let (area, legend) = area.split_horizontally(780);
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 24))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(48)
        .build_cartesian_2d(0.0..360.0, -90.0..90.0)
        .map_err(picture)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc("longitude in degrees east")
        .y_desc("latitude in degrees north")
        .draw()
        .map_err(picture)?;
    let (width, height) = (360.0 / columns as f64, 180.0 / rows as f64);
    let cells = field.indexed_iter().map(|((row, column), value)| {
        let (west, north) = (column as f64 * width, 90.0 - row as f64 * height);
        Rectangle::new(
            [(west, north), (west + width, north - height)],
            colour(*value).filled(),
        )
    });
    chart.draw_series(cells).map_err(picture)?;

    let mut legend = ChartBuilder::on(&legend)
        .margin(12)
        .margin_top(48)
        .margin_bottom(48)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..1.0, low..high)
        .map_err(picture)?;
    legend
        .configure_mesh()
        .disable_mesh()
        .disable_x_axis()
        .y_label_style(("sans-serif", 14))
        .y_label_formatter(&|value| format!("{value:.0}"))
        .draw()
        .map_err(picture)?;
    let bands = (0..100).map(|band| {
        let value = |edge: i32| low + (high - low) * edge as f32 / 100.0;
        Rectangle::new(
            [(0.0, value(band)), (1.0, value(band + 1))],
            colour(value(band)).filled(),
        )
    });
    legend.draw_series(bands).map_err(picture)?;
    area.present().map_err(picture)
}

/// Root-mean-square error against lead time, a panel per variable.
pub(crate) fn curves(path: &Path, scores: &[Score]) -> Result<()> {
    load_font()?;
    let area = BitMapBackend::new(path, (1200, 420)).into_drawing_area();
    area.fill(&WHITE).map_err(picture)?;
    for (panel, variable) in area
        .split_evenly((1, VARIABLES.len()))
        .iter()
        .zip(VARIABLES)
    {
        let panel_scores: Vec<&Score> = scores
            .iter()
            .filter(|score| score.variable == variable)
            .collect();
        let values = panel_scores
            .iter()
            .flat_map(|s| [s.rmse, s.rmse_persistence, s.rmse_climatology]);
        let highest = values
            .filter(|value| value.is_finite())
            .fold(1e-9, f64::max);
        let longest = panel_scores
            .iter()
            .map(|score| score.lead_hours)
            .fold(0.0, f64::max);
        let mut chart = ChartBuilder::on(panel)
            .caption(variable.replace('_', " "), ("sans-serif", 22))
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..longest, 0.0..highest * 1.35)
            .map_err(picture)?;
        chart
            .configure_mesh()
            .x_desc("lead time in hours")
            .y_desc("RMSE")
            .draw()
            .map_err(picture)?;
        type Curve = (&'static str, RGBColor, fn(&Score) -> f64);
        let curves: [Curve; 3] = [
            ("surrogate", BLUE, |score| score.rmse),
            ("persistence", RED, |score| score.rmse_persistence),
            ("climatology", BLACK, |score| score.rmse_climatology),
        ];
        for (name, colour, error) in curves {
            let points = panel_scores
                .iter()
                .map(|score| (score.lead_hours, error(score)));
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)))
                .map_err(picture)?
                .label(name)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2))
                });
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .position(SeriesLabelPosition::UpperLeft)
            .draw()
            .map_err(picture)?;
    }
    area.present().map_err(picture)
}
