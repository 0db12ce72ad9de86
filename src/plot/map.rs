//! Maps of fields: single, stacked, and animated.

use std::path::Path;
use std::time::Duration;

use halocline_core::{Error, Result};
use halocline_io::ndarray::Array2;
use halocline_io::{Grid, save_whole};
use plotters::prelude::*;

use super::{Area, FONT, Raster, coastlines, failed, label, load_font, span};

/// Width and height of a map with its legend, in pixels.
const SIZE: (u32, u32) = (880, 470);
const LEGEND: u32 = 110;
/// Colour of missing values.
const MISSING: RGBColor = RGBColor(190, 190, 190);

/// Map of a field, north up, with coastlines and a legend.
///
/// # Example
/// ```
/// use halocline::io::Grid;
/// use halocline::io::ndarray::Array2;
/// use halocline::plot::{Map, animate, save_maps};
/// use std::time::Duration;
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let grid = Grid::cell_centered(18, 36)?;
/// let truth = Array2::from_shape_fn((18, 36), |(row, _)| 300.0 - row as f32);
/// let forecast = truth.mapv(|t| t + 0.5);
/// let maps = [
///     Map::new("temperature in 24 h", &grid, forecast.clone())?.with_unit("K"),
///     Map::difference("error", &grid, &forecast, &truth)?.with_unit("K"),
/// ];
/// save_maps(folder.join("forecast.png"), &maps)?;
/// let frames = maps.map(|map| vec![map]);
/// animate(folder.join("forecast.gif"), &frames, Duration::from_millis(500))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Map {
    title: String,
    unit: String,
    field: Array2<f32>,
    /// Bounds of columns from west to east, and of rows in order, in degrees.
    edges: [Vec<f64>; 2],
    range: Option<[f64; 2]>,
    /// Whether the colours diverge around zero.
    is_difference: bool,
    has_coastlines: bool,
}

impl Map {
    /// Makes a map of a field `[lat, lon]`. NaN is drawn in grey. On an
    /// [unstructured](Grid::unstructured) or [curvilinear](Grid::curvilinear) grid, each place has the
    /// value of the nearest cell.
    ///
    /// # Errors
    /// The shapes of the field and the grid differ; the grid has no
    /// [positions](Grid::has_positions).
    pub fn new(title: &str, grid: &Grid, field: Array2<f32>) -> Result<Self> {
        check_shape(title, grid, &field)?;
        if !grid.has_positions() {
            return Err(Error::other(format!(
                "map {title:?}: a row of {} cells without positions; expected rows and columns, or \
                 cells with positions",
                grid.lon().len()
            )));
        }
        if let Some(cells) = grid.cells() {
            let raster = Raster::new(cells)?;
            return Self::new(title, raster.grid(), raster.values(&field));
        }
        Ok(Self {
            title: title.into(),
            unit: String::new(),
            field,
            edges: [columns_of(grid.lon()), rows_of(grid.lat())],
            range: None,
            is_difference: false,
            has_coastlines: true,
        })
    }

    /// Makes a map of `field − reference`, blue below zero and red above.
    ///
    /// # Errors
    /// The shapes of a field and the grid differ; errors of [`new`](Self::new).
    pub fn difference(
        title: &str,
        grid: &Grid,
        field: &Array2<f32>,
        reference: &Array2<f32>,
    ) -> Result<Self> {
        check_shape(title, grid, field)?;
        check_shape(title, grid, reference)?;
        let map = Self::new(title, grid, field - reference)?;
        Ok(Self {
            is_difference: true,
            ..map
        })
    }

    /// Sets the unit in the title.
    #[must_use]
    pub fn with_unit(mut self, unit: &str) -> Self {
        self.unit = unit.into();
        self
    }

    /// Sets the values at the ends of the colour scale. Default: the smallest and the largest
    /// value; for a difference, the largest absolute value with both signs.
    ///
    /// # Panics
    /// Panics if `low` is not below `high`.
    #[must_use]
    pub fn with_range(mut self, low: f64, high: f64) -> Self {
        assert!(low < high, "with_range({low}, {high}): expected low < high");
        self.range = Some([low, high]);
        self
    }

    /// Leaves out the coastlines, for other planets.
    #[must_use]
    pub fn without_coastlines(mut self) -> Self {
        self.has_coastlines = false;
        self
    }

    fn range(&self) -> [f64; 2] {
        self.range.unwrap_or_else(|| range_of(&[self]))
    }

    fn colour(&self, value: f64, [low, high]: [f64; 2]) -> RGBColor {
        if value.is_nan() {
            return MISSING;
        }
        let part = ((value - low) / (high - low)).clamp(0.0, 1.0);
        if self.is_difference {
            diverging(2.0 * part - 1.0)
        } else {
            ViridisRGB::get_color(part)
        }
    }

    fn draw(&self, area: &Area<'_>) -> Result<()> {
        let range = self.range();
        let (width, _) = area.dim_in_pixel();
        let (area, legend) = area.split_horizontally(width - LEGEND);
        let [columns, rows] = &self.edges;
        let ends = |edges: &[f64]| {
            let (first, last) = (edges[0], edges[edges.len() - 1]);
            [first.min(last), first.max(last)]
        };
        let ([west, east], [south, north]) = (ends(columns), ends(rows));
        let caption = match &*self.unit {
            "" => self.title.clone(),
            unit => format!("{} in {unit}", self.title),
        };
        let mut chart = ChartBuilder::on(&area)
            .caption(caption, (FONT, 22))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(48)
            .build_cartesian_2d(west..east, south..north)
            .map_err(failed)?;

        // Each pixel has the colour of its cell.
        let (across, down) = chart.plotting_area().get_pixel_range();
        let place = |pixel: i32, pixels: &std::ops::Range<i32>| {
            (f64::from(pixel - pixels.start) + 0.5) / f64::from(pixels.end - pixels.start)
        };
        let plot = chart.plotting_area().strip_coord_spec();
        let column_of: Vec<usize> = across
            .clone()
            .map(|x| cell(columns, west + place(x, &across) * (east - west)))
            .collect();
        for y in down.clone() {
            let row = cell(rows, north - place(y, &down) * (north - south));
            for (x, column) in column_of.iter().enumerate() {
                let colour = self.colour(self.field[[row, *column]].into(), range);
                plot.draw_pixel((x as i32, y - down.start), &colour)
                    .map_err(failed)?;
            }
        }

        let coasts = self
            .has_coastlines
            .then(|| coastlines::within([west, east], [south, north]));
        let coasts = coasts
            .into_iter()
            .flatten()
            .map(|line| PathElement::new(line, BLACK.stroke_width(1)));
        chart.draw_series(coasts).map_err(failed)?;
        chart
            .configure_mesh()
            .disable_mesh()
            .x_desc("longitude in degrees east")
            .y_desc("latitude in degrees north")
            .x_label_formatter(&|lon| format!("{}", lon.rem_euclid(360.0)))
            .draw()
            .map_err(failed)?;
        self.draw_legend(&legend, range)
    }

    fn draw_legend(&self, area: &Area<'_>, [low, high]: [f64; 2]) -> Result<()> {
        let mut legend = ChartBuilder::on(area)
            .margin(12)
            .margin_top(48)
            .margin_bottom(48)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..1.0, low..high)
            .map_err(failed)?;
        legend
            .configure_mesh()
            .disable_mesh()
            .disable_x_axis()
            .y_label_style((FONT, 14))
            .y_label_formatter(&|value| label(*value, [low, high]))
            .draw()
            .map_err(failed)?;
        let bands = (0..100).map(|band| {
            let value = |edge: f64| low + (high - low) * (f64::from(band) + edge) / 100.0;
            let colour = self.colour(value(0.5), [low, high]);
            Rectangle::new([(0.0, value(0.0)), (1.0, value(1.0))], colour.filled())
        });
        legend.draw_series(bands).map_err(failed)?;
        Ok(())
    }
}

/// Writes maps to a PNG file, one below the other.
///
/// # Errors
/// There are no maps; the file cannot be written.
pub fn save_maps(path: impl AsRef<Path>, maps: &[Map]) -> Result<()> {
    load_font()?;
    let size = size(maps)?;
    save_whole(path, |path| {
        let area = BitMapBackend::new(path, size).into_drawing_area();
        draw_all(&area, maps)
    })
}

/// Writes an endlessly looping animated GIF that shows each frame for `delay`. All frames must have
/// the same number of maps, drawn one below the other. Unless a [range](Map::with_range) is set,
/// the colour scale is shared by all frames.
///
/// # Errors
/// There are no frames; they have different numbers of maps; the file cannot be written.
pub fn animate(path: impl AsRef<Path>, frames: &[Vec<Map>], delay: Duration) -> Result<()> {
    load_font()?;
    let first = frames.first().map_or(&[][..], |maps| maps);
    let size = size(first)?;
    if let Some(other) = frames.iter().find(|maps| maps.len() != first.len()) {
        let (found, expected) = (other.len(), first.len());
        let text = format!("a frame has {found} maps, and the first one {expected}");
        return Err(failed(text));
    }
    let ranges: Vec<[f64; 2]> = (0..first.len())
        .map(|map| range_of(&frames.iter().map(|maps| &maps[map]).collect::<Vec<_>>()))
        .collect();
    let delay = u32::try_from(delay.as_millis()).map_err(failed)?;
    save_whole(path, |path| {
        let backend = BitMapBackend::gif(path, size, delay).map_err(failed)?;
        let area = backend.into_drawing_area();
        for maps in frames {
            let with_range = |(map, [low, high]): (&Map, &[f64; 2])| match map.range {
                Some(_) => map.clone(),
                None => map.clone().with_range(*low, *high),
            };
            let maps: Vec<Map> = maps.iter().zip(&ranges).map(with_range).collect();
            draw_all(&area, &maps)?;
        }
        Ok(())
    })
}

/// Requires a field with the shape of the grid.
fn check_shape(title: &str, grid: &Grid, field: &Array2<f32>) -> Result<()> {
    let (rows, columns) = field.dim();
    if [rows, columns] == grid.shape() {
        return Ok(());
    }
    Err(Error::other(format!(
        "map {title:?}: the field has {rows} x {columns} cells, and the grid is a {grid}"
    )))
}

fn size(maps: &[Map]) -> Result<(u32, u32)> {
    match maps.len() {
        0 => Err(failed("expected at least one map")),
        count => Ok((SIZE.0, SIZE.1 * count as u32)),
    }
}

fn draw_all(area: &Area<'_>, maps: &[Map]) -> Result<()> {
    area.fill(&WHITE).map_err(failed)?;
    for (panel, map) in area.split_evenly((maps.len(), 1)).iter().zip(maps) {
        map.draw(panel)?;
    }
    area.present().map_err(failed)
}

/// Returns the range of the values of maps; symmetric around zero for differences.
fn range_of(maps: &[&Map]) -> [f64; 2] {
    let values = maps.iter().flat_map(|map| map.field.iter());
    let [low, high] = span(values.map(|value| f64::from(*value)));
    if maps.iter().any(|map| map.is_difference) {
        let largest = low.abs().max(high.abs());
        return [-largest, largest];
    }
    [low, high]
}

/// Maps −1 to 1 to a colour from blue through white to red.
fn diverging(value: f64) -> RGBColor {
    let end = if value < 0.0 {
        [33.0, 102.0, 172.0]
    } else {
        [178.0, 24.0, 43.0]
    };
    let [red, green, blue] = end.map(|end| (255.0 + (end - 255.0) * value.abs()).round() as u8);
    RGBColor(red, green, blue)
}

/// Returns the cell between two bounds; bounds rise or fall.
fn cell(edges: &[f64], at: f64) -> usize {
    let rises = edges[0] < edges[edges.len() - 1];
    let before = edges.partition_point(|edge| if rises { *edge <= at } else { *edge >= at });
    before.clamp(1, edges.len() - 1) - 1
}

/// Returns the bounds of columns, beyond 360 degrees where columns cross the prime meridian.
fn columns_of(lon: &[f64]) -> Vec<f64> {
    let eastward = |lon: &f64, first: f64| lon + if *lon < first { 360.0 } else { 0.0 };
    let lon: Vec<f64> = lon.iter().map(|centre| eastward(centre, lon[0])).collect();
    edges(&lon, 360.0)
}

/// Returns the bounds of rows, none of them beyond a pole.
fn rows_of(lat: &[f64]) -> Vec<f64> {
    let edges = edges(lat, 180.0);
    edges
        .into_iter()
        .map(|edge| edge.clamp(-90.0, 90.0))
        .collect()
}

/// Returns bounds half-way between cells, and as far beyond the outermost; `width` apart for a
/// single cell.
fn edges(centres: &[f64], width: f64) -> Vec<f64> {
    let last = centres.len() - 1;
    let step = |cell: usize| match last {
        0 => width,
        _ => centres[cell.max(1)] - centres[cell.max(1) - 1],
    };
    let first = centres[0] - step(0) / 2.0;
    let inner = centres.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    let end = centres[last] + step(last) / 2.0;
    std::iter::once(first).chain(inner).chain([end]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_lie_between_cells() {
        assert_eq!(rows_of(&[90.0, 0.0, -90.0]), [90.0, 45.0, -45.0, -90.0]);
        assert_eq!(rows_of(&[-10.0, 20.0]), [-25.0, 5.0, 35.0]);
        assert_eq!(
            columns_of(&[300.0, 20.0, 100.0]),
            [260.0, 340.0, 420.0, 500.0]
        );
        assert_eq!(columns_of(&[7.0]), [-173.0, 187.0]);
    }

    #[test]
    fn places_are_in_their_cells() {
        for edges in [[-25.0, 5.0, 35.0], [35.0, 5.0, -25.0]] {
            let centre = |cell: usize| (edges[cell] + edges[cell + 1]) / 2.0;
            assert_eq!([0, 1].map(|index| cell(&edges, centre(index))), [0, 1]);
            assert_eq!([0, 2].map(|edge| cell(&edges, edges[edge])), [0, 1]);
        }
    }

    /// Returns the colours of a picture, by pixel.
    fn colours(map: &Map) -> Vec<[u8; 3]> {
        load_font().unwrap();
        let mut pixels = vec![0; 3 * (SIZE.0 * SIZE.1) as usize];
        {
            let area = BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area();
            draw_all(&area, std::slice::from_ref(map)).unwrap();
        }
        let pixels = pixels.chunks_exact(3);
        pixels.map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect()
    }

    #[test]
    fn cells_have_the_colour_of_their_value_at_their_place() {
        let grid = Grid::cell_centered(2, 4).unwrap();
        let mut field = Array2::zeros((2, 4));
        field[[0, 1]] = -2.0; // north, about 90 degrees east
        field[[1, 3]] = f32::NAN; // south, about 270 degrees east
        let zeros = Array2::zeros((2, 4));
        let map = Map::difference("difference", &grid, &field, &zeros).unwrap();
        assert_eq!(map.range(), [-2.0, 2.0]);
        let colours = colours(&map);
        let places = |colour: [u8; 3], columns: std::ops::Range<usize>| {
            let width = SIZE.0 as usize;
            let found = (0..colours.len()).filter(|pixel| colours[*pixel] == colour);
            let places = found.map(|pixel| (pixel % width, pixel / width));
            places
                .filter(|(x, _)| columns.contains(x))
                .collect::<Vec<_>>()
        };
        let map_width = (SIZE.0 - LEGEND) as usize;
        let mean = |places: &[(usize, usize)]| {
            let sum = places
                .iter()
                .fold((0, 0), |sum, place| (sum.0 + place.0, sum.1 + place.1));
            (sum.0 / places.len(), sum.1 / places.len())
        };
        let blue = places([33, 102, 172], 0..map_width);
        let grey = places([190, 190, 190], 0..map_width);
        // A quarter of the columns of about 710 pixels, and half of the rows of about 340.
        assert!(
            blue.len() > 25_000 && grey.len() > 25_000,
            "{} {}",
            blue.len(),
            grey.len()
        );
        let (blue, grey) = (mean(&blue), mean(&grey));
        assert!(
            blue.0 + 300 < grey.0 && blue.1 + 120 < grey.1,
            "{blue:?} {grey:?}"
        );
        // Coastlines, and the legend with both ends.
        assert!(places([0, 0, 0], 100..map_width - 100).len() > 1_000);
        let RGBColor(red, green, blue) = diverging(0.99); // its last band
        assert!(!places([red, green, blue], map_width..SIZE.0 as usize).is_empty());
    }

    #[test]
    fn frames_have_one_range_and_one_form() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rollout.gif");
        let grid = Grid::cell_centered(2, 4).unwrap();
        let map = |value: f32| Map::new("frame", &grid, Array2::from_elem((2, 4), value)).unwrap();
        let (low, high) = (map(1.0), map(3.0));
        assert_eq!(range_of(&[&low, &high]), [1.0, 3.0]);
        let second = Duration::from_secs(1);
        animate(&path, &[vec![low.clone()], vec![high.clone()]], second).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes.starts_with(b"GIF89a"));
        // A graphic control extension per frame, with a delay of 100 hundredths of a second.
        let frames = bytes
            .windows(6)
            .filter(|bytes| bytes.starts_with(&[0x21, 0xf9, 4]));
        assert_eq!(frames.filter(|bytes| bytes[4..] == [100, 0]).count(), 2);

        let error = animate(&path, &[vec![low.clone()], vec![low, high]], second).unwrap_err();
        assert!(
            error.to_string().contains("2 maps, and the first one 1"),
            "{error}"
        );
        assert!(animate(&path, &[], second).is_err() && save_maps(&path, &[]).is_err());
        let wrong = Map::new("map", &grid, Array2::zeros((4, 2))).unwrap_err();
        assert!(wrong.to_string().contains("4 x 2"), "{wrong}");
        let row = Grid::new(vec![0.0], vec![0.0, 180.0]).unwrap();
        let wrong = Map::new("map", &row, Array2::zeros((1, 2))).unwrap_err();
        assert!(wrong.to_string().contains("without positions"), "{wrong}");
        let cells = Grid::unstructured(vec![45.0, -45.0], vec![0.0, 180.0]).unwrap();
        let field = Array2::zeros((1, 2));
        Map::difference("map", &cells, &field, &field).unwrap();
    }
}
