//! Coastlines, clipped to a map.

use std::sync::OnceLock;

/// Position in degrees east and north.
type Place = (f64, f64);

/// Returns the coastlines of the world. A line that crosses 180 degrees of longitude continues
/// beyond it.
fn world() -> &'static [Vec<Place>] {
    static WORLD: OnceLock<Vec<Vec<Place>>> = OnceLock::new();
    WORLD.get_or_init(|| {
        let rows = include_str!("coastlines.txt").lines();
        let lines = rows.filter(|row| !row.starts_with('#')).map(|row| {
            let numbers = row.split(' ').map(|number| number.parse::<f64>());
            let degrees: Vec<f64> = numbers.map(|n| n.expect("a number") / 100.0).collect();
            let places = degrees.as_chunks().0.iter();
            let unwrapped = |last: &mut f64, [x, y]: &[f64; 2]| {
                *last += (x - *last + 180.0).rem_euclid(360.0) - 180.0;
                Some((*last, *y))
            };
            places.scan(degrees[0], unwrapped).collect()
        });
        lines.collect()
    })
}

/// Returns the coastlines on a map of the given latitudes and longitudes, which may exceed 360
/// degrees.
pub(super) fn within(lon: [f64; 2], lat: [f64; 2]) -> Vec<Vec<Place>> {
    let turns =
        ((lon[0] - 540.0) / 360.0).floor() as i32..=((lon[1] + 540.0) / 360.0).ceil() as i32;
    turns
        .flat_map(|turn| {
            let east = 360.0 * f64::from(turn);
            world().iter().flat_map(move |line| {
                let line: Vec<Place> = line.iter().map(|(x, y)| (x + east, *y)).collect();
                clipped(&line, lon, lat)
            })
        })
        .collect()
}

/// Clips a line to a box, into parts.
fn clipped(line: &[Place], lon: [f64; 2], lat: [f64; 2]) -> Vec<Vec<Place>> {
    let mut parts: Vec<Vec<Place>> = Vec::new();
    for pair in line.windows(2) {
        let Some((from, to)) = segment(pair[0], pair[1], lon, lat) else {
            continue;
        };
        match parts.last_mut() {
            Some(part) if part.last() == Some(&from) => part.push(to),
            _ => parts.push(vec![from, to]),
        }
    }
    parts
}

/// Clips a segment to a box (Liang and Barsky).
fn segment(from: Place, to: Place, lon: [f64; 2], lat: [f64; 2]) -> Option<(Place, Place)> {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let (mut first, mut last) = (0.0_f64, 1.0_f64);
    for (start, step, [low, high]) in [(from.0, dx, lon), (from.1, dy, lat)] {
        if step == 0.0 {
            if !(low..=high).contains(&start) {
                return None;
            }
            continue;
        }
        let (near, far) = ((low - start) / step, (high - start) / step);
        first = first.max(near.min(far));
        last = last.min(near.max(far));
    }
    let point = |part: f64| match part {
        0.0 => from,
        1.0 => to,
        _ => (from.0 + part * dx, from.1 + part * dy),
    };
    (first < last).then(|| (point(first), point(last)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_world_is_whole() {
        let places = || world().iter().flatten();
        assert_eq!(world().len(), 128);
        assert!(places().all(|(x, y)| x.abs() < 360.0 && y.abs() <= 90.0));
        // Cape Agulhas, the southern tip of Africa, and a cell of the Sahara far from any coast.
        let near = |x: f64, y: f64| places().any(|place| (place.0 - x).hypot(place.1 - y) < 1.5);
        assert!(near(20.0, -34.8));
        assert!(!near(5.0, 22.0));
    }

    #[test]
    fn lines_end_where_the_map_does() {
        let line = [
            (-2.0, 0.5),
            (0.5, 0.5),
            (0.5, 0.75),
            (3.0, 0.75),
            (0.5, 0.25),
        ];
        let found = clipped(&line, [0.0, 1.0], [0.0, 1.0]);
        let first = vec![(0.0, 0.5), (0.5, 0.5), (0.5, 0.75), (1.0, 0.75)];
        assert_eq!(found[0], first);
        assert_eq!(found[1].last(), Some(&(0.5, 0.25)));
        assert_eq!(found[1][0].0, 1.0);
    }

    #[test]
    fn maps_from_any_meridian_have_all_coasts() {
        let length = |lines: &[Vec<Place>]| {
            let parts = lines.iter().flat_map(|line| line.windows(2));
            let lengths = parts.map(|pair| (pair[1].0 - pair[0].0).hypot(pair[1].1 - pair[0].1));
            lengths.sum::<f64>()
        };
        let whole = length(world());
        for west in [-180.0, -0.5, 90.0, 180.0] {
            let found = length(&within([west, west + 360.0], [-90.0, 90.0]));
            assert!(
                (found - whole).abs() < 1e-6 * whole,
                "from {west}: {found} of {whole}"
            );
        }
        assert!(within([0.0, 20.0], [20.0, 24.0]).is_empty());
        // No line circles the world where it crosses a meridian.
        let steps = world().iter().flat_map(|line| line.windows(2));
        assert!(
            steps
                .map(|pair| (pair[1].0 - pair[0].0).abs())
                .all(|step| step < 30.0)
        );
    }
}
