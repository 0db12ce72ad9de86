//! Grids: coordinates, order and areas of their cells.

mod boundary;
mod cell_areas;
pub(crate) mod cells;
mod curvilinear;
pub(crate) mod degrees;
pub(crate) mod description;
pub(crate) mod healpix;
pub(crate) mod order;
pub(crate) mod repeated;
mod row_weights;
pub(crate) mod unplaced;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};
use cells::{Cells, columns};
use degrees::{TOLERANCE, is_equal, meridian};
use description::Description;
use repeated::longitudes_repeated;
use row_weights::row_weights;

/// Latitude-longitude grid: the coordinates of its rows and columns in degrees. Cells that form no
/// rows and columns are an [unstructured](Self::unstructured) grid of a single row; rows and columns
/// that do not follow latitudes and longitudes are a [curvilinear](Self::curvilinear) grid.
///
/// # Example
/// ```
/// use halocline_io::Grid;
///
/// let grid = Grid::with_poles(5, 8)?;
/// assert_eq!(grid.shape(), [5, 8]);
/// assert_eq!(grid.lat(), [90.0, 45.0, 0.0, -45.0, -90.0]);
/// assert_eq!(grid.lon()[1], 45.0);
/// assert_eq!(Grid::cell_centered(4, 8)?.lat(), [67.5, 22.5, -22.5, -67.5]);
/// // A grid that starts at the date line is the same in either notation.
/// let lat = vec![60.0, -60.0];
/// let from_west = Grid::new(lat.clone(), vec![-180.0, -90.0, 0.0, 90.0])?;
/// assert_eq!(from_west.lon(), [180.0, 270.0, 0.0, 90.0]);
/// assert_eq!(from_west, Grid::new(lat, vec![180.0, 270.0, 360.0, 450.0])?);
/// // Pole rows have an area; the cosine of their latitude would be zero.
/// assert!(grid.latitude_weights()[0] > 0.0);
/// # Ok::<(), halocline_io::Error>(())
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "Coordinates", into = "Coordinates")]
pub struct Grid {
    lat: Vec<f64>,
    lon: Vec<f64>,
    /// Positions of the cells of an unstructured grid, if they are known, or of a curvilinear one.
    cells: Option<Cells>,
    /// Areas of these cells, if they are known.
    pub(crate) areas: Option<Vec<f64>>,
    /// Description in files, which does not make grids differ.
    pub(crate) description: Description,
}

/// Serialized form of a [`Grid`], checked when it is read. The row and the columns of cells with
/// positions are left out; earlier versions wrote them.
#[derive(Serialize, Deserialize)]
struct Coordinates {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    lat: Vec<f64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    lon: Vec<f64>,
    /// Number of rows of a curvilinear grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rows: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cells: Option<Cells>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    areas: Option<Vec<f64>>,
    #[serde(default, skip_serializing_if = "Description::is_empty")]
    description: Description,
}

impl From<Grid> for Coordinates {
    fn from(grid: Grid) -> Self {
        let rows = grid.is_curvilinear().then_some(grid.lat.len());
        let (lat, lon) = match grid.cells {
            None => (grid.lat, grid.lon),
            Some(_) => Default::default(),
        };
        let (cells, areas) = (grid.cells, grid.areas);
        Self {
            lat,
            lon,
            rows,
            cells,
            areas,
            description: grid.description,
        }
    }
}

impl TryFrom<Coordinates> for Grid {
    type Error = Error;

    fn try_from(mut coordinates: Coordinates) -> Result<Self> {
        let description = std::mem::take(&mut coordinates.description);
        let grid = coordinates.grid()?;
        Ok(Self {
            description,
            ..grid
        })
    }
}

impl Coordinates {
    /// Returns the grid without its description.
    fn grid(self) -> Result<Grid> {
        let Self { lat, lon, rows, .. } = self;
        let Some(cells) = self.cells else {
            return Grid::new(lat, lon);
        };
        let shape = [lat.len(), lon.len()];
        if shape == [0, 0] || shape == [1, cells.len()] {
            let grid = Grid::of_cells(cells, rows.unwrap_or(1))?;
            return match self.areas {
                Some(areas) => grid.with_cell_areas(areas),
                None => Ok(grid),
            };
        }
        let [rows, columns] = shape;
        let expected = format!("those of one row, on a grid of {rows} x {columns}");
        Err(Error::argument("cells", cells.len(), expected))
    }
}

impl PartialEq for Grid {
    /// Compares coordinates and areas, whatever the description in files.
    fn eq(&self, other: &Self) -> bool {
        let same_lines = self.lat == other.lat && self.lon == other.lon;
        same_lines && self.cells == other.cells && self.areas == other.areas
    }
}

impl Grid {
    /// Creates a grid from coordinates in degrees.
    ///
    /// Longitudes may start at −180 or exceed 360: each is mapped to the same meridian in [0, 360).
    /// Columns keep their order.
    ///
    /// # Errors
    /// Latitudes that are not strictly monotonic within ±90; longitudes that do not increase
    /// strictly eastward within one turn.
    pub fn new(lat: Vec<f64>, lon: Vec<f64>) -> Result<Self> {
        let falls = lat.windows(2).all(|pair| pair[0] > pair[1]);
        let rises = lat.windows(2).all(|pair| pair[0] < pair[1]);
        let in_range = lat.iter().all(|lat| lat.abs() <= 90.0);
        if lat.is_empty() || !in_range || !(falls || rises) {
            return Err(Error::argument(
                "lat",
                ends(&lat),
                "strictly falling (or rising) degrees from 90 to -90",
            ));
        }
        let meridians: Vec<f64> = lon.iter().map(|&lon| meridian(lon)).collect();
        let wraps = meridians.windows(2).filter(|pair| pair[0] >= pair[1]);
        let in_order = match (wraps.count(), &meridians[..]) {
            (_, []) => false,
            (0, _) => true,
            (1, [first, .., last]) => last < first,
            _ => false,
        };
        let repeats = longitudes_repeated(&meridians) > 0;
        if !in_order || repeats || !lon.iter().all(|lon| lon.is_finite()) {
            return Err(Error::argument(
                "lon",
                ends(&lon),
                "strictly rising degrees within one turn, such as from 0 to less than 360 or from -180 to less than 180",
            ));
        }
        Ok(Self {
            lat,
            lon: meridians,
            cells: None,
            areas: None,
            description: Description::default(),
        })
    }

    /// Creates a grid of cells that form no rows and columns, such as those of a reduced Gaussian
    /// grid, from the latitude and the longitude of each cell in degrees. The cells are the columns
    /// of a single row, whose own coordinates are not positions.
    ///
    /// # Errors
    /// No cell; numbers of latitudes and longitudes that differ; a latitude beyond ±90; a coordinate
    /// that is not finite.
    ///
    /// # Example
    /// ```
    /// use halocline_io::Grid;
    ///
    /// let grid = Grid::unstructured(vec![60.0, 0.0, 0.0], vec![10.0, -90.0, 90.0])?;
    /// assert_eq!(grid.shape(), [1, 3]);
    /// let Some([lat, lon]) = grid.cells() else { unreachable!() };
    /// assert_eq!((lat[1], lon[1]), (0.0, 270.0));
    /// let others = Grid::unstructured(vec![60.0, 0.0, 0.0], vec![10.0, 90.0, -90.0])?;
    /// assert!(!grid.agrees_with(&others)); // the same cells in another order
    /// # Ok::<(), halocline_io::Error>(())
    /// ```
    pub fn unstructured(lat: Vec<f64>, lon: Vec<f64>) -> Result<Self> {
        Self::of_cells(Cells::new(lat, lon)?, 1)
    }

    fn of_cells(cells: Cells, rows: usize) -> Result<Self> {
        let count = cells.len();
        if rows == 0 || !count.is_multiple_of(rows) {
            let expected = format!("a divisor of {count}, the number of cells");
            return Err(Error::argument("rows", rows, expected));
        }
        Ok(Self {
            lat: cells::rows(rows),
            lon: columns(count / rows),
            cells: Some(cells),
            areas: None,
            description: Description::default(),
        })
    }

    /// Creates an equiangular grid whose first and last rows are the poles, such as the 721 × 1440
    /// grid of ERA5.
    ///
    /// # Errors
    /// Fewer than two rows, or no column.
    pub fn with_poles(rows: usize, columns: usize) -> Result<Self> {
        let step = 180.0 / (rows.max(2) - 1) as f64;
        Self::equiangular(rows, columns, step, 0.0)
    }

    /// Creates an equiangular grid whose first and last rows lie half a row from the poles, such as
    /// the 32 × 64 grid of WeatherBench.
    ///
    /// # Errors
    /// Fewer than two rows, or no column.
    pub fn cell_centered(rows: usize, columns: usize) -> Result<Self> {
        Self::equiangular(rows, columns, 180.0 / rows.max(1) as f64, 0.5)
    }

    fn equiangular(rows: usize, columns: usize, step: f64, offset: f64) -> Result<Self> {
        if rows < 2 || columns == 0 {
            let got = format!("{rows} x {columns}");
            return Err(Error::argument("grid", got, "at least 2 rows and 1 column"));
        }
        // Rows are counted from the equator, so that the two hemispheres are mirror images to the
        // last bit.
        let middle = (rows - 1) as f64 / 2.0;
        debug_assert!((middle + offset) * step <= 90.0 + 1e-9);
        let lat = (0..rows).map(|row| ((middle - row as f64) * step).clamp(-90.0, 90.0));
        let lon = (0..columns).map(|column| 360.0 * column as f64 / columns as f64);
        Self::new(lat.collect(), lon.collect())
    }

    /// Returns the latitudes and longitudes of the cells of an [unstructured](Self::unstructured) or,
    /// row by row, of a [curvilinear](Self::curvilinear) grid, in degrees north and degrees east in
    /// [0, 360), or `None` if rows and columns have the coordinates.
    pub fn cells(&self) -> Option<[&[f64]; 2]> {
        self.cells.as_ref().map(Cells::positions)
    }

    /// Whether rows and columns, or [cells](Self::cells), have positions. A single row at latitude
    /// zero, whose columns divide the globe evenly from longitude zero on, stands for cells whose
    /// positions are not known.
    ///
    /// # Example
    /// ```
    /// use halocline_io::Grid;
    ///
    /// let lon = vec![0.0, 120.0, 240.0];
    /// assert!(Grid::new(vec![45.0], lon.clone())?.has_positions());
    /// assert!(!Grid::new(vec![0.0], lon.clone())?.has_positions());
    /// assert!(Grid::unstructured(vec![0.0; 3], lon)?.has_positions());
    /// # Ok::<(), halocline_io::Error>(())
    /// ```
    pub fn has_positions(&self) -> bool {
        if self.cells.is_some() || self.lat != [0.0] {
            return true;
        }
        let mut pairs = self.lon.iter().zip(columns(self.lon.len()));
        !pairs.all(|(lon, column)| is_equal(*lon, column))
    }

    /// Whether the cells lie in rows along latitudes. Those of an unstructured grid are one row, and
    /// those of a [curvilinear](Self::curvilinear) grid lie in rows along no latitude.
    ///
    /// # Example
    /// ```
    /// use halocline_io::Grid;
    ///
    /// assert!(Grid::with_poles(3, 4)?.has_rows());
    /// assert!(!Grid::unstructured(vec![0.0; 2], vec![10.0, 20.0])?.has_rows());
    /// # Ok::<(), halocline_io::Error>(())
    /// ```
    pub fn has_rows(&self) -> bool {
        self.cells.is_none() && self.has_positions()
    }

    /// Iterates over all coordinates and areas, for checksums.
    pub(crate) fn coordinates(&self) -> impl Iterator<Item = f64> {
        let cells = self.cells().into_iter().flatten().flatten();
        let areas = self.areas.iter().flatten();
        let coordinates = self.lat.iter().chain(&self.lon).chain(cells);
        coordinates.chain(areas).copied()
    }

    /// Returns the latitude of each row in degrees north: no position if [cells](Self::cells) have it.
    pub fn lat(&self) -> &[f64] {
        &self.lat
    }

    /// Returns the longitude of each column, in degrees east in [0, 360). They increase, except
    /// where columns cross the prime meridian. If [cells](Self::cells) have their own positions,
    /// these are none.
    pub fn lon(&self) -> &[f64] {
        &self.lon
    }

    /// Returns the numbers of rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.lat.len(), self.lon.len()]
    }

    /// Returns the area of a cell in each row, divided by the mean over the rows (WeatherBench 2).
    ///
    /// A row extends to the midpoints between it and its neighbours, the outermost rows to the
    /// poles; its area is the difference of the sines of its bounds. On a regional grid, the
    /// outermost rows are as wide as the distance to their neighbours. Rows of a
    /// [curvilinear](Self::curvilinear) grid have the same weight; its cells have
    /// [their own](Self::cell_weights).
    pub fn latitude_weights(&self) -> Vec<f64> {
        if self.is_curvilinear() {
            return vec![1.0; self.lat.len()];
        }
        row_weights(&self.lat)
    }

    /// Whether both grids have the same coordinates, up to rounding to single precision and to the
    /// notation of longitudes. Positions and areas of [cells](Self::cells) are compared if both
    /// grids have them; files written before they were kept have none.
    ///
    /// # Example
    /// ```
    /// use halocline_io::Grid;
    ///
    /// let west = Grid::new(vec![45.0, -45.0], vec![-180.0, -90.0, 0.0, 90.0])?;
    /// assert!(west.agrees_with(&Grid::new(vec![45.0, -45.0], vec![180.0, 270.0, 0.0, 90.0])?));
    /// assert!(!west.agrees_with(&Grid::cell_centered(2, 4)?));
    /// # Ok::<(), halocline_io::Error>(())
    /// ```
    pub fn agrees_with(&self, other: &Self) -> bool {
        let close = |one: &[f64], other: &[f64]| {
            let mut pairs = one.iter().zip(other);
            one.len() == other.len() && pairs.all(|(one, other)| is_equal(*one, *other))
        };
        self.is_curvilinear() == other.is_curvilinear()
            && close(&self.lat, &other.lat)
            && close(&self.lon, &other.lon)
            && self.other_cell(other).is_none()
            && self.other_area(other).is_none()
    }

    /// Returns the first cell whose position differs from that in another grid of as many cells, if
    /// both grids have the positions and an area of it that is not zero.
    pub(crate) fn other_cell(&self, other: &Self) -> Option<usize> {
        let (cells, others) = self.cells.as_ref().zip(other.cells.as_ref())?;
        cells.difference(others, |cell| self.counts(cell) && other.counts(cell))
    }

    /// Returns Makani's name of the kind of grid.
    pub(crate) fn kind(&self) -> &'static str {
        if self.is_curvilinear() {
            return "curvilinear";
        }
        if self.cells.is_some() {
            return "unstructured";
        }
        fn even(mut steps: impl Iterator<Item = f64>) -> bool {
            let first = steps.next().unwrap_or(0.0);
            steps.all(|step| (step - first).abs() < TOLERANCE)
        }
        let rows = self.lat.windows(2).map(|pair| pair[1] - pair[0]);
        // A step across the prime meridian is eastward too.
        let columns = self
            .lon
            .windows(2)
            .map(|pair| (pair[1] - pair[0]).rem_euclid(360.0));
        if even(rows) && even(columns) {
            "equiangular"
        } else {
            "rectilinear"
        }
    }
}

impl fmt::Display for Grid {
    /// Formats the numbers of rows and columns with their first and last coordinates, or the number
    /// of cells of an unstructured or curvilinear grid.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_curvilinear() {
            let [rows, columns] = self.shape();
            return write!(f, "curvilinear, {rows} x {columns} cells");
        }
        if self.cells.is_some() {
            return write!(f, "unstructured, {} cells", self.lon.len());
        }
        write!(f, "lat {}, lon {}", ends(&self.lat), ends(&self.lon))
    }
}

fn ends(coords: &[f64]) -> String {
    match coords {
        [first, .., last] => format!("{} values from {first} to {last}", coords.len()),
        _ => format!("{coords:?}"),
    }
}

#[cfg(test)]
mod tests;
