//! Geometry of grids, as models need it.

use halocline_core::{Boundary, Error, Result};
use halocline_io::Grid;
use halocline_ops::{Sht, SphereGrid};

/// Returns whether longitudes go around the globe.
pub(super) fn around(grid: &Grid) -> bool {
    grid.boundary()[1] == Boundary::Periodic
}

/// Returns the boundaries of a grid that is halved `levels` times. Cells beyond a pole are those
/// across it only if every level has opposite meridians. Halving merges two rows into one, so no
/// row lies on a pole, except a last row that is halved alone.
pub(super) fn halved(grid: &Grid, levels: usize) -> [Boundary; 2] {
    let [lat, lon] = grid.boundary();
    let has_opposite = grid.shape()[1].trailing_zeros() as usize > levels;
    match lat {
        Boundary::PoleRow | Boundary::PoleEdge if has_opposite => [Boundary::PoleEdge, lon],
        _ => [Boundary::Replicate, lon],
    }
}

/// Returns the spherical harmonic transform of a grid with rows in either order.
pub(super) fn harmonics(grid: &Grid) -> Result<Sht> {
    let sines: Vec<f64> = grid
        .lat()
        .iter()
        .map(|lat| lat.to_radians().sin())
        .collect();
    let sign = if sines.first() < sines.last() {
        -1.0
    } else {
        1.0
    };
    let grids = [
        SphereGrid::Equiangular,
        SphereGrid::LegendreGauss,
        SphereGrid::Lobatto,
    ];
    // A single row, such as that of unstructured cells, does not reach the poles.
    let is_global = around(grid) && sines.len() > 1;
    for kind in grids.into_iter().filter(|_| is_global) {
        let sht = Sht::new(grid.shape(), kind)?;
        let mut pairs = sht.cosines().iter().zip(&sines);
        // A hundredth of the distance between rows.
        let near = 0.01 * std::f64::consts::PI / sines.len() as f64;
        if pairs.all(|(cosine, sine)| (cosine.acos() - (sign * sine).acos()).abs() < near) {
            return Ok(sht);
        }
    }
    Err(Error::other(format!(
        "model.kind sfno: {grid}; expected a globe whose latitudes are equidistant from pole to pole, or those of a \
         Gaussian grid; model.kind graph takes other grids with positions, and cnn, unet and transformer other rows and \
         columns"
    )))
}

/// Returns the latitude and the longitude of each cell in degrees, row by row.
pub(super) fn positions(grid: &Grid) -> Result<Vec<[f64; 2]>> {
    if let Some([lat, lon]) = grid.cells() {
        return Ok(lat.iter().zip(lon).map(|(lat, lon)| [*lat, *lon]).collect());
    }
    if !grid.has_positions() {
        return Err(Error::other(format!(
            "model.kind graph: one row of {} cells without positions; expected several rows, or a file with the latitude \
             and the longitude of each cell",
            grid.lon().len()
        )));
    }
    let row = |&lat: &f64| grid.lon().iter().map(move |lon| [lat, *lon]);
    Ok(grid.lat().iter().flat_map(row).collect())
}
