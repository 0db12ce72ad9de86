//! Latitudes and longitudes of a source, and the cells around a coordinate with their weights.

use halocline_core::{Error, Result};

use crate::driver::sampling::{Taps, TapsAround};

/// Operator that the coordinates serve.
pub(super) const NAME: &str = "regrid";
/// Distance in degrees below which two coordinates are the same.
pub(super) const SAME: f64 = 1e-9;
/// Ratio to the widest other gap from which a gap in longitude, or between the last row and the
/// pole, lies outside the grid.
const WIDE: f64 = 2.0;

/// Linear interpolation between two cells; the second one is left out if it has no weight.
fn taps<C>(cells: [C; 2], [start, end]: [f64; 2], place: f64) -> Vec<(C, f64)> {
    let [first, second] = cells;
    if place - start <= SAME {
        return vec![(first, 1.0)];
    }
    let weight = (place - start) / (end - start);
    vec![(first, 1.0 - weight), (second, weight)]
}

/// Widest distance of adjacent coordinates; `None` for a single one.
fn widest(coordinates: &[f64]) -> Option<f64> {
    let gaps = coordinates.windows(2).map(|pair| pair[1] - pair[0]);
    gaps.reduce(f64::max)
}

/// Returns whether a gap is part of a grid with these coordinates.
fn is_inside(gap: f64, coordinates: &[f64]) -> bool {
    widest(coordinates).is_none_or(|widest| gap <= WIDE * widest + SAME)
}

/// Requires that the `places` of coordinates increase.
fn require_increasing(
    name: &str,
    coordinates: &[f64],
    places: &[f64],
    expected: &str,
) -> Result<()> {
    let mut pairs = coordinates.iter().zip(places.windows(2));
    match pairs.find(|(_, pair)| pair[1] - pair[0] <= SAME) {
        None => Ok(()),
        Some((coordinate, _)) => {
            let message = format!("{name} of the source after {coordinate}; expected {expected}");
            Err(Error::operator(NAME, message))
        }
    }
}

/// Latitudes of a source.
pub(super) struct Parallels {
    /// Latitudes, or their negatives, so that they increase.
    places: Vec<f64>,
    sign: f64,
    /// Whether values may be interpolated to the pole before the first and after the last row.
    reaches: [bool; 2],
}

impl Parallels {
    pub(super) fn new(latitudes: &[f64], closed: bool) -> Result<Self> {
        let sign = if latitudes[0] > latitudes[latitudes.len() - 1] {
            -1.0
        } else {
            1.0
        };
        let places: Vec<f64> = latitudes.iter().map(|latitude| sign * latitude).collect();
        let expected = "all from north to south or from south to north";
        require_increasing("latitudes", latitudes, &places, expected)?;
        let gaps = [90.0 + places[0], 90.0 - places[places.len() - 1]];
        Ok(Self {
            reaches: gaps.map(|gap| closed && is_inside(gap, &places)),
            places,
            sign,
        })
    }

    /// Rows with their weights, and the shares of the means of the first and the last row.
    pub(super) fn place(&self, latitude: f64) -> Result<(Taps, [f64; 2])> {
        let (place, last) = (self.sign * latitude, self.places.len() - 1);
        let [low, high] = [self.places[0], self.places[last]];
        let ends = [
            (0, low - place, 90.0 + low),
            (last, place - high, 90.0 - high),
        ];
        for (end, (row, beyond, gap)) in ends.into_iter().enumerate() {
            if beyond <= SAME {
                continue;
            }
            if !self.reaches[end] {
                let [first, last] = [self.sign * low, self.sign * high];
                let message = format!(
                    "latitude {latitude} of the target for {first} to {last} of a regional source; expected one inside"
                );
                return Err(Error::operator(NAME, message));
            }
            let share = (beyond / gap).min(1.0);
            let mut shares = [0.0; 2];
            shares[end] = share;
            return Ok((vec![(row, 1.0 - share)], shares));
        }
        let row = self.places.partition_point(|other| *other <= place + SAME);
        let row = row.saturating_sub(1);
        let next = last.min(row + 1);
        let around = [self.places[row], self.places[next]];
        Ok((taps([row, next], around, place), [0.0; 2]))
    }
}

/// Longitudes of a source.
pub(super) struct Meridians {
    first: f64,
    /// Distances from the first longitude, and 360 degrees.
    places: Vec<f64>,
    /// Whether the last longitude and the first one are neighbours.
    pub(super) closed: bool,
}

impl Meridians {
    pub(super) fn new(longitudes: &[f64]) -> Result<Self> {
        let first = longitudes[0];
        let mut places: Vec<f64> = longitudes
            .iter()
            .map(|longitude| longitude - first)
            .collect();
        let gap = 360.0 - places[places.len() - 1];
        let closed = is_inside(gap, &places);
        places.push(360.0);
        let expected = "an increase, by less than 360 degrees in all";
        require_increasing("longitudes", longitudes, &places, expected)?;
        Ok(Self {
            first,
            places,
            closed,
        })
    }

    /// Columns with their weights. Between the last column and the first one, columns are counted
    /// from before the first column if the value lies `early` in its row, so that they increase.
    pub(super) fn place(&self, longitude: f64, early: bool) -> Result<TapsAround> {
        let count = self.places.len() - 1;
        let place = (longitude - self.first).rem_euclid(360.0);
        let place = if 360.0 - place <= SAME { 0.0 } else { place };
        let column = self.places.partition_point(|other| *other <= place + SAME);
        let column = column.saturating_sub(1);
        let around = [self.places[column], self.places[column + 1]];
        let in_gap = column + 1 == count && place - around[0] > SAME;
        if in_gap && !self.closed {
            let [start, end] = [self.first, self.first + self.places[count - 1]];
            let message = format!(
                "longitude {longitude} of the target for {start} to {end} of a regional source; expected one inside"
            );
            return Err(Error::operator(NAME, message));
        }
        let turn = if in_gap && early { count } else { 0 };
        let column = column as isize - turn as isize;
        Ok(taps([column, column + 1], around, place))
    }
}
