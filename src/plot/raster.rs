//! Cells of unstructured and curvilinear grids as rows and columns along latitudes, for maps.

use burn::tensor::{DType, Device, Tensor, TensorData};
use halocline_core::sphere::sphere_point;
use halocline_core::{Result, ShardTensor};
use halocline_io::Grid;
use halocline_io::ndarray::Array2;
use halocline_ops::graph::nearest_neighbours;

/// Rows and columns, about as many as a map has pixels.
const SHAPE: (usize, usize) = (360, 720);

/// Rows and columns over the area of cells with positions, with the nearest cell at each place.
#[derive(Clone, Debug)]
pub(crate) struct Raster {
    grid: Grid,
    nearest: Vec<usize>,
}

impl Raster {
    /// Finds the nearest of the cells with these latitudes and longitudes, in degrees, for each
    /// place.
    ///
    /// # Errors
    /// Errors of [`nearest_neighbours`].
    pub(crate) fn new([lat, lon]: [&[f64]; 2]) -> Result<Self> {
        let [[south, north], [west, east]] = area(lat, lon);
        let line = |count: usize, first: f64, last: f64| -> Vec<f64> {
            let middle = |index: usize| (index as f64 + 0.5) / count as f64;
            let middles = (0..count).map(middle);
            middles.map(|part| first + part * (last - first)).collect()
        };
        let (rows, columns) = SHAPE;
        let grid = Grid::new(line(rows, north, south), line(columns, west, east))?;
        let row = |&lat: &f64| grid.lon().iter().map(move |lon| sphere_point([lat, *lon]));
        let places: Vec<[f64; 3]> = grid.lat().iter().flat_map(row).collect();
        let cells = lat
            .iter()
            .zip(lon)
            .map(|(lat, lon)| sphere_point([*lat, *lon]));
        let cells: Vec<[f64; 3]> = cells.collect();
        let pairs = nearest_neighbours(&tensor(&cells), &tensor(&places), 1)?;
        let nearest = pairs.edges().iter().map(|pair| pair[0]).collect();
        Ok(Self { grid, nearest })
    }

    /// Returns the rows and columns.
    pub(crate) fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Returns the values at all places of a field `[1, cell]`, or of rows and columns whose cells
    /// are counted row by row.
    pub(crate) fn values(&self, field: &Array2<f32>) -> Array2<f32> {
        let (_, columns) = field.dim();
        Array2::from_shape_fn(SHAPE, |(row, column)| {
            let cell = self.nearest[row * SHAPE.1 + column];
            field[[cell / columns, cell % columns]]
        })
    }
}

/// Returns the bounds of the area of cells, with a margin of about half a cell: from south to
/// north, and eastward from west.
fn area(lat: &[f64], lon: &[f64]) -> [[f64; 2]; 2] {
    let low = lat.iter().copied().fold(f64::INFINITY, f64::min);
    let high = lat.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut meridians = lon.to_vec();
    meridians.sort_by(f64::total_cmp);
    // The area lies east of the widest gap between meridians.
    let gap = |index: usize| match index {
        0 => meridians[0] + 360.0 - meridians[meridians.len() - 1],
        _ => meridians[index] - meridians[index - 1],
    };
    let gaps = (0..meridians.len()).map(|index| (gap(index), meridians[index]));
    let widest = gaps.max_by(|one, other| one.0.total_cmp(&other.0));
    let (gap, west) = widest.expect("a grid has cells");
    let width = 360.0 - gap;
    let margin = 0.5 * width.max(high - low) / (lat.len() as f64).sqrt();
    let margin = margin.max(0.01);
    let rows = [(low - margin).max(-90.0), (high + margin).min(90.0)];
    if width + 2.0 * margin >= 360.0 {
        return [rows, [0.0, 360.0]];
    }
    [rows, [west - margin, west + width + margin]]
}

fn tensor(points: &[[f64; 3]]) -> ShardTensor<2> {
    let data = TensorData::new(points.as_flattened().to_vec(), [points.len(), 3]);
    ShardTensor::solo(Tensor::from_data(data, (&Device::flex(), DType::F64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_has_the_value_of_the_nearest_cell() {
        let (lat, lon) = ([60.0, 60.0, -60.0], [90.0, 270.0, 350.0]);
        let raster = Raster::new([&lat, &lon]).unwrap();
        let values = raster.values(&Array2::from_shape_fn((1, 3), |(_, cell)| cell as f32));
        let rows = Array2::from_shape_fn((3, 1), |(cell, _)| cell as f32);
        assert_eq!(raster.values(&rows), values);
        for (cell, (lat, lon)) in lat.into_iter().zip(lon).enumerate() {
            let near = |line: &[f64], value: f64| {
                let distance = |index: &usize| (line[*index] - value).abs();
                let all = 0..line.len();
                all.min_by(|one, other| distance(one).total_cmp(&distance(other)))
            };
            let row = near(raster.grid().lat(), lat).unwrap();
            let column = near(raster.grid().lon(), lon).unwrap();
            assert_eq!(values[[row, column]], cell as f32);
        }
    }

    #[test]
    fn areas_are_regions_or_the_whole_globe() {
        // Across the prime meridian; the margin is half of 20 degrees over the root of 4.
        let found = area(&[40.0, 42.0, 48.0, 50.0], &[350.0, 355.0, 5.0, 10.0]);
        assert_eq!(found, [[35.0, 55.0], [345.0, 375.0]]);
        let lon: Vec<f64> = (0..48).map(|cell| 7.5 * f64::from(cell)).collect();
        let found = area(&[-80.0, 80.0].repeat(24), &lon);
        assert_eq!(found, [[-90.0, 90.0], [0.0, 360.0]]);
        assert!(Raster::new([&[10.0], &[359.999]]).is_ok());
    }
}
