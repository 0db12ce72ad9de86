//! Regions of scores that contain cells of a grid.

use halocline_core::Result;
use halocline_io::Grid;
use halocline_models::Region;

use super::errors::invalid;
use super::forecast_config::ForecastConfig;

/// Returns the standard regions that contain cells of the grid; without positions, the globe.
pub(super) fn standard_regions(grid: &Grid) -> Vec<Region> {
    let is_held = |region: &Region| holds_cells(region, grid) || region.name == "globe";
    Region::standard().into_iter().filter(is_held).collect()
}

/// Returns the standard regions, and those of a configuration.
///
/// # Errors
/// A region of the configuration without a cell of the grid.
pub(super) fn regions(grid: &Grid, config: &ForecastConfig) -> Result<Vec<Region>> {
    let mut regions = standard_regions(grid);
    for (name, bounds) in &config.regions {
        let region = Region::new(name, bounds.lat, bounds.lon);
        if !holds_cells(&region, grid) {
            let expected = format!("a region with cells of the grid, which is {grid}");
            return Err(invalid("forecast.regions", name, expected));
        }
        regions.push(region);
    }
    Ok(regions)
}

/// Returns whether a region contains a cell of the grid; without positions there is none.
fn holds_cells(region: &Region, grid: &Grid) -> bool {
    let is_inside = |inside: &f64| *inside > 0.0;
    match grid.cells() {
        _ if !grid.has_positions() => false,
        Some([lat, lon]) => {
            let (rows, columns) = (region.rows(lat), region.columns(lon));
            rows.iter()
                .zip(&columns)
                .any(|(row, column)| row * column > 0.0)
        }
        None => {
            let (rows, columns) = (region.rows(grid.lat()), region.columns(grid.lon()));
            rows.iter().any(is_inside) && columns.iter().any(is_inside)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::RegionConfig;

    #[test]
    fn regions_hold_cells_by_their_positions() {
        let names = |grid: Grid| -> Vec<String> {
            let regions = standard_regions(&grid).into_iter();
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
        let found = regions(&cells, &config([-10.0, 10.0], [-12.5, 42.5])).unwrap();
        assert_eq!(found.last().unwrap().name, "europe");
        // One cell has such a latitude, and another such a longitude.
        let error = regions(&cells, &config([35.0, 75.0], [-12.5, 42.5]));
        let error = error.unwrap_err().to_string();
        let told = "forecast.regions: got europe, expected a region with cells";
        assert!(error.starts_with(told), "{error}");
        let grid = Grid::new(vec![50.0, 40.0], vec![0.0, 10.0]).unwrap();
        assert!(regions(&grid, &config([35.0, 75.0], [-12.5, 42.5])).is_ok());
        assert!(regions(&grid, &config([35.0, 75.0], [20.0, 42.5])).is_err());
    }
}
