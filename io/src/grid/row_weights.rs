//! Weights of latitude rows by area.

/// Returns the area of a cell in each row, divided by the mean over the rows, for the latitudes of
/// rows in either order.
pub(crate) fn row_weights(lat: &[f64]) -> Vec<f64> {
    let sign = if lat.len() > 1 && lat[0] < lat[1] {
        -1.0
    } else {
        1.0
    };
    let lat: Vec<f64> = lat.iter().map(|lat| sign * lat).collect();
    let rows = lat.len();
    // Bounds of the rows from north to south, one more than rows.
    let bounds = (0..=rows).map(|row| match row {
        0 if rows == 1 => 90.0,
        _ if rows == 1 => -90.0,
        0 => outer_bound(lat[0], lat[0] - lat[1], 90.0),
        row if row == rows => outer_bound(lat[rows - 1], lat[rows - 1] - lat[rows - 2], -90.0),
        row => (lat[row - 1] + lat[row]) / 2.0,
    });
    let sines: Vec<f64> = bounds.map(|bound: f64| bound.to_radians().sin()).collect();
    let areas: Vec<f64> = sines.windows(2).map(|pair| pair[0] - pair[1]).collect();
    let mean = areas.iter().sum::<f64>() / rows as f64;
    areas.iter().map(|area| area / mean).collect()
}

/// Returns the outer bound of an outermost row: the pole, if it is at most one row away, else half
/// a row outward.
fn outer_bound(lat: f64, outward: f64, pole: f64) -> f64 {
    if (pole - lat).abs() <= outward.abs() {
        pole
    } else {
        lat + outward / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_do_not_depend_on_the_direction_of_latitude() {
        let mut rows = [80.0, 30.0, -10.0, -85.0];
        let falling = row_weights(&rows);
        rows.reverse();
        let mut rising = row_weights(&rows);
        rising.reverse();
        assert_eq!(rising, falling);
        assert!((falling.iter().sum::<f64>() - 4.0).abs() < 1e-12);
    }

    #[test]
    fn regional_rows_do_not_reach_the_poles() {
        let rows = [51.0_f64, 50.0, 49.0];
        let (weights, cosines) = (row_weights(&rows), rows.map(|lat| lat.to_radians().cos()));
        let mean = cosines.iter().sum::<f64>() / 3.0;
        for (weight, cosine) in weights.iter().zip(cosines) {
            assert!((weight - cosine / mean).abs() < 1e-12, "{weights:?}");
        }
    }
}
