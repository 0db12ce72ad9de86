//! Regions of scores that contain cells of a grid that count.

use halocline_core::Result;
use halocline_io::Grid;
use halocline_models::Region;

use super::errors::invalid;
use super::forecast_config::ForecastConfig;

/// Returns the standard regions that contain cells of the grid inside a rim of this width; without
/// positions, the globe.
pub(super) fn standard_regions(grid: &Grid, rim: usize) -> Vec<Region> {
    let areas = grid.cell_weights();
    let is_held = |region: &Region| {
        region.name == "globe" || holds_cells(region, grid, areas.as_deref(), rim)
    };
    Region::standard().into_iter().filter(is_held).collect()
}

/// Returns the standard regions, and those of a configuration, for scores of the cells inside a rim
/// of this width.
///
/// # Errors
/// A region of the configuration without a cell of the grid, or whose cells are all of the rim or
/// have an area of zero.
pub(super) fn regions(grid: &Grid, rim: usize, config: &ForecastConfig) -> Result<Vec<Region>> {
    let mut regions = standard_regions(grid, rim);
    if config.regions.is_empty() {
        return Ok(regions);
    }
    let areas = grid.cell_weights();
    for (name, bounds) in &config.regions {
        let region = Region::new(name, bounds.lat, bounds.lon);
        if !holds_cells(&region, grid, areas.as_deref(), rim) {
            let counted = match rim {
                0 if areas.is_none() => String::new(),
                0 => ", of an area above zero".into(),
                _ => format!(", apart from the rim of {rim} cells that data.boundary sets"),
            };
            let expected = format!("a region with cells of the grid, which is {grid}{counted}");
            return Err(invalid("forecast.regions", name, expected));
        }
        regions.push(region);
    }
    Ok(regions)
}

/// Returns whether a region contains a cell of the grid that counts in its scores: inside the rim,
/// and of an area above zero. Without positions there is none. `areas` holds those of the cells, if
/// they are known.
fn holds_cells(region: &Region, grid: &Grid, areas: Option<&[f64]>, rim: usize) -> bool {
    match grid.cells() {
        _ if !grid.has_positions() => false,
        Some([lat, lon]) => {
            let area = |cell: usize| areas.map_or(1.0, |areas| areas[cell]);
            let inside = region.rows(lat).into_iter().zip(region.columns(lon));
            let [rows, columns] = grid.shape();
            let is_counted = |cell: usize| {
                let places = [(cell / columns, rows), (cell % columns, columns)];
                let is_inner = |(place, count): (usize, usize)| place >= rim && place + rim < count;
                places.into_iter().all(is_inner)
            };
            let mut cells = inside.enumerate();
            cells.any(|(cell, (row, column))| area(cell) * row * column > 0.0 && is_counted(cell))
        }
        None => {
            let is_inside = |cells: Vec<f64>| {
                let end = cells.len().saturating_sub(rim);
                let inside = cells.get(rim..end).unwrap_or_default();
                inside.iter().any(|inside| *inside > 0.0)
            };
            is_inside(region.rows(grid.lat())) && is_inside(region.columns(grid.lon()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::RegionConfig;
    use crate::experiment::fixture::region;

    #[test]
    fn regions_hold_cells_by_their_positions() {
        let names = |grid: Grid| -> Vec<String> {
            let regions = standard_regions(&grid, 0).into_iter();
            regions.map(|region| region.name).collect()
        };
        let cells = Grid::unstructured(vec![60.0, 0.0, 30.0], vec![10.0, 20.0, 0.0]);
        let expected = ["globe", "northern extratropics", "tropics"];
        assert_eq!(names(cells.unwrap()), expected);
        let row = |lat: f64| Grid::new(vec![lat], vec![0.0, 120.0, 240.0]);
        assert_eq!(names(row(10.0).unwrap()), ["globe", "tropics"]);
        // Cells without positions.
        assert_eq!(names(row(0.0).unwrap()), ["globe"]);
    }

    #[test]
    fn regions_of_a_configuration_hold_cells_too() {
        let config = |lat: [f64; 2], lon: [f64; 2]| ForecastConfig {
            regions: [("europe".into(), RegionConfig { lat, lon })].into(),
            ..ForecastConfig::default()
        };
        let cells = Grid::unstructured(vec![60.0, 0.0], vec![100.0, 350.0]).unwrap();
        let found = regions(&cells, 0, &config([-10.0, 10.0], [-12.5, 42.5])).unwrap();
        assert_eq!(found.last().unwrap().name, "europe");
        // One cell has such a latitude, and another such a longitude.
        let error = regions(&cells, 0, &config([35.0, 75.0], [-12.5, 42.5]));
        let error = error.unwrap_err().to_string();
        let told = "forecast.regions: got europe, expected a region with cells";
        assert!(error.starts_with(told), "{error}");
        let grid = Grid::new(vec![50.0, 40.0], vec![0.0, 10.0]).unwrap();
        assert!(regions(&grid, 0, &config([35.0, 75.0], [-12.5, 42.5])).is_ok());
        assert!(regions(&grid, 0, &config([35.0, 75.0], [20.0, 42.5])).is_err());
    }

    #[test]
    fn regions_hold_cells_that_count() {
        let config = |lat: [f64; 2], lon: [f64; 2]| ForecastConfig {
            regions: [("box".into(), RegionConfig { lat, lon })].into(),
            ..ForecastConfig::default()
        };
        // Latitudes from 10 to 22, longitudes from 10 to 31.
        let grid = region();
        for (lat, lon) in [([9.0, 14.0], [9.0, 32.0]), ([9.0, 23.0], [9.0, 14.0])] {
            regions(&grid, 1, &config(lat, lon)).unwrap();
            let error = regions(&grid, 2, &config(lat, lon));
            let error = error.unwrap_err().to_string();
            let told = "apart from the rim of 2 cells that data.boundary sets";
            assert!(error.ends_with(told), "{error}");
        }
        let cells = Grid::unstructured(vec![60.0, 0.0], vec![100.0, 350.0]).unwrap();
        let cells = cells.with_cell_areas(vec![0.0, 1.0]).unwrap();
        let error = regions(&cells, 0, &config([50.0, 70.0], [0.0, 360.0]));
        let error = error.unwrap_err().to_string();
        assert!(error.ends_with("of an area above zero"), "{error}");
        let standard = standard_regions(&cells, 0).into_iter();
        let names: Vec<String> = standard.map(|region| region.name).collect();
        assert_eq!(names, ["globe", "tropics"]);
    }

    #[test]
    fn regions_of_a_curvilinear_grid_hold_cells_inside_its_rim() {
        let lat = vec![70.0, 70.0, 70.0, 60.0, 0.0, 60.0, 50.0, 50.0, 50.0];
        let lon = [0.0, 10.0, 20.0].repeat(3);
        let grid = Grid::curvilinear([3, 3], lat, lon).unwrap();
        let names = |rim: usize| -> Vec<String> {
            let regions = standard_regions(&grid, rim).into_iter();
            regions.map(|region| region.name).collect()
        };
        assert_eq!(names(0), ["globe", "northern extratropics", "tropics"]);
        assert_eq!(names(1), ["globe", "tropics"]);
    }
}
