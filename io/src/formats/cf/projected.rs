//! Grids in a map projection or of a rotated pole (CF 1.11, appendix F): the positions of cells,
//! computed from the coordinates of rows and columns in files that lack them.

use proj4rs::Proj;
use proj4rs::transform::transform;
use rayon::prelude::*;

use super::coordinates::{Coordinates, MAX_VALUES};
use super::variable::{Kind, Variable};
use crate::{Error, Grid, Result};

/// Rows and columns of a variable in a projection.
pub(super) struct Projected<'a> {
    /// Coordinates of rows and of columns.
    pub(super) lines: [&'a Variable; 2],
    projection: Projection,
}

/// Map from coordinates of rows and columns to latitudes and longitudes.
enum Projection {
    Rotated(Pole),
    /// From a projection to latitudes and longitudes on the same figure of the Earth, with the
    /// metres of a unit of the coordinates.
    Plane {
        from: Box<Proj>,
        to: Box<Proj>,
        metres: f64,
    },
}

/// North pole of a rotated sphere, in degrees.
#[derive(Clone, Copy, Debug)]
struct Pole {
    lat: f64,
    lon: f64,
    /// Longitude of the true north pole on the rotated sphere.
    origin: f64,
}

/// Names by which coordinates of rows and of columns are recognised: standard names, then names of
/// those without one.
type Names = [(&'static [&'static str], &'static [&'static str]); 2];

const ROTATED: Names = [
    (&["grid_latitude"], &["rlat", "grid_latitude"]),
    (&["grid_longitude"], &["rlon", "grid_longitude"]),
];
const PLANE: Names = [
    (
        &["projection_y_coordinate", "projection_y_angular_coordinate"],
        &["y"],
    ),
    (
        &["projection_x_coordinate", "projection_x_angular_coordinate"],
        &["x"],
    ),
];

impl<'a> Coordinates<'a> {
    /// Finds the rows and columns of a variable whose grid mapping, or that of another variable on
    /// the same dims, gives the positions of its cells.
    pub(super) fn projected(&self, variable: &Variable) -> Option<Projected<'a>> {
        let shares = |other: &&Variable| {
            let dims = other.dims.iter();
            dims.filter(|dim| variable.dims.contains(dim)).count() > 1
        };
        let beside = self.container.variables().iter().filter(shares);
        let mapping = std::iter::once(variable)
            .chain(beside)
            .find_map(|variable| self.grid_mapping(variable))?;
        let is_rotated = mapping.text("grid_mapping_name") == Some("rotated_latitude_longitude");
        let line = |(standard, common): (&[&str], &[&str])| {
            let mut variables = self.container.variables().iter();
            variables.find(|line| {
                let is_named = match line.text("standard_name") {
                    Some(name) => standard.contains(&name),
                    None => common.contains(&line.name.as_str()),
                };
                let on_dim = matches!(&line.dims[..], [dim] if variable.dims.contains(dim));
                is_named && on_dim && line.kind != Kind::Other
            })
        };
        let [rows, columns] = if is_rotated { ROTATED } else { PLANE }.map(line);
        let lines = [rows?, columns?];
        let projection = if is_rotated {
            Projection::Rotated(Pole {
                lat: mapping.number("grid_north_pole_latitude")?,
                lon: mapping.number("grid_north_pole_longitude")?,
                origin: mapping.number("north_pole_grid_longitude").unwrap_or(0.0),
            })
        } else {
            let [metres, others] = lines.map(|line| metres(mapping, line));
            plane(mapping, metres.filter(|_| metres == others)?)?
        };
        Some(Projected { lines, projection })
    }

    /// Creates the grid of rows and columns in a projection: a regular one if the poles are the
    /// true ones, else a curvilinear one, in which cells beside the Earth have no position.
    ///
    /// # Errors
    /// Coordinates that cannot be read, too many cells, and errors of the grid.
    pub(super) fn projected_grid(&self, projected: &Projected<'_>) -> Result<Grid> {
        let [rows, columns] = projected.lines.map(|line| self.values(line));
        let (rows, columns) = (rows?, columns?);
        let shape = [rows.len(), columns.len()];
        if shape[0].saturating_mul(shape[1]) > MAX_VALUES {
            let expected = format!("at most {MAX_VALUES} cells");
            let (path, name) = (self.container.path(), &projected.lines[1].name);
            return Err(Error::shape(path, name, format!("{shape:?}"), expected));
        }
        let projection = &projected.projection;
        if let Projection::Rotated(Pole { lat, lon, origin }) = projection
            && *lat == 90.0
        {
            let lon = columns.iter().map(|column| column - origin + lon + 180.0);
            return Grid::new(rows, lon.collect());
        }
        let cells = rows.par_iter().flat_map_iter(|row| {
            let columns = columns.iter();
            columns.map(|column| projection.position(*row, *column))
        });
        let (lat, lon) = cells.map(|[lat, lon]| (lat, lon)).unzip();
        Grid::curvilinear(shape, lat, lon)
    }
}

/// Returns the metres of a unit of a coordinate; those of an angle from a satellite are the
/// satellite's height.
fn metres(mapping: &Variable, line: &Variable) -> Option<f64> {
    match line.text("units").unwrap_or("m") {
        "m" | "metre" | "metres" | "meter" | "meters" => Some(1.0),
        "km" | "kilometre" | "kilometres" | "kilometer" | "kilometers" => Some(1000.0),
        "rad" | "radian" | "radians" => mapping.number("perspective_point_height"),
        _ => None,
    }
}

/// Returns the projection of a grid mapping, if it is supported and complete.
fn plane(mapping: &Variable, metres: f64) -> Option<Projection> {
    let number = |name: &str| mapping.number(name);
    let first = |names: &[&str]| names.iter().find_map(|name| number(name));
    let parallels = mapping.numbers("standard_parallel").unwrap_or_default();
    let origin = number("latitude_of_projection_origin");
    let meridian = first(&[
        "longitude_of_central_meridian",
        "straight_vertical_longitude_from_pole",
        "longitude_of_projection_origin",
    ]);
    let scale = first(&[
        "scale_factor_at_projection_origin",
        "scale_factor_at_central_meridian",
    ]);
    let mut terms = vec![("lon_0", meridian?.to_string())];
    let mut add = |name, value: Option<f64>| {
        terms.extend(value.map(|value| (name, value.to_string())));
    };
    add("x_0", number("false_easting"));
    add("y_0", number("false_northing"));
    let kind = match mapping.text("grid_mapping_name")? {
        name @ ("lambert_conformal_conic" | "albers_conical_equal_area") => {
            add("lat_0", Some(origin?));
            add("lat_1", Some(*parallels.first()?));
            add("lat_2", Some(*parallels.last()?));
            if name == "lambert_conformal_conic" {
                "lcc"
            } else {
                "aea"
            }
        }
        "polar_stereographic" | "stereographic" => {
            add("lat_0", Some(origin?));
            add("lat_ts", parallels.first().copied());
            add("k", scale);
            "stere"
        }
        "lambert_azimuthal_equal_area" => {
            add("lat_0", Some(origin?));
            "laea"
        }
        "mercator" => {
            add("lat_ts", parallels.first().copied());
            add("k", scale);
            "merc"
        }
        "transverse_mercator" => {
            add("lat_0", Some(origin?));
            add("k", scale);
            "tmerc"
        }
        "sinusoidal" => "sinu",
        "geostationary" => {
            add("h", Some(number("perspective_point_height")?));
            // The axis that turns first; the other one is fixed.
            let sweep = match mapping.text("sweep_angle_axis") {
                Some(axis) => axis,
                None if mapping.text("fixed_angle_axis") == Some("y") => "x",
                None => "y",
            };
            terms.push(("sweep", sweep.into()));
            "geos"
        }
        _ => return None,
    };
    let globe = globe(mapping);
    let terms: String = terms
        .iter()
        .map(|(name, value)| format!(" +{name}={value}"))
        .collect();
    let proj = |text: String| Proj::from_proj_string(&text).ok().map(Box::new);
    Some(Projection::Plane {
        from: proj(format!("+proj={kind}{terms} {globe}"))?,
        to: proj(format!("+proj=longlat {globe}"))?,
        metres,
    })
}

/// Returns the figure of the Earth of a grid mapping, that of WGS 84 by default.
fn globe(mapping: &Variable) -> String {
    let number = |name: &str| mapping.number(name);
    let flattening = number("inverse_flattening");
    match (
        number("semi_major_axis"),
        number("semi_minor_axis"),
        flattening,
    ) {
        (Some(major), Some(minor), _) => format!("+a={major} +b={minor}"),
        (Some(major), None, Some(flattening)) if flattening > 0.0 => {
            format!("+a={major} +rf={flattening}")
        }
        (major, ..) => match number("earth_radius").or(major) {
            Some(radius) => format!("+a={radius} +b={radius}"),
            None => "+ellps=WGS84".into(),
        },
    }
}

impl Projection {
    /// Latitude and longitude of a place in rows and columns, in degrees; NaN beside the Earth.
    fn position(&self, row: f64, column: f64) -> [f64; 2] {
        match self {
            Self::Rotated(pole) => pole.position(row, column),
            Self::Plane { from, to, metres } => {
                let mut point = (column * metres, row * metres, 0.0);
                match transform(from, to, &mut point) {
                    Ok(()) if point.0.is_finite() && point.1.is_finite() => {
                        [point.1.to_degrees(), point.0.to_degrees()]
                    }
                    _ => [f64::NAN; 2],
                }
            }
        }
    }
}

impl Pole {
    /// Latitude and longitude of a position on the rotated sphere, all in degrees.
    fn position(self, lat: f64, lon: f64) -> [f64; 2] {
        let (sin_pole, cos_pole) = self.lat.to_radians().sin_cos();
        let (sin_lat, cos_lat) = lat.to_radians().sin_cos();
        let (sin_lon, cos_lon) = (lon - self.origin).to_radians().sin_cos();
        let up = cos_pole * cos_lat * cos_lon + sin_pole * sin_lat;
        let north = cos_pole * sin_lat - sin_pole * cos_lat * cos_lon;
        let east = (-cos_lat * sin_lon).atan2(north).to_degrees();
        [up.clamp(-1.0, 1.0).asin().to_degrees(), self.lon + east]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attributes::Numbers;
    use crate::formats::cf::variable::Attribute;
    use crate::grid::degrees::apart;

    /// Grid mapping with these numbers.
    fn mapping(name: &str, numbers: &[(&str, &[f64])], texts: &[(&str, &str)]) -> Variable {
        let numbers = numbers.iter().map(|(name, values)| {
            let values = values.to_vec();
            let single = false;
            (
                (*name).to_string(),
                Attribute::Numbers(Numbers { values, single }),
            )
        });
        let named = [("grid_mapping_name", name)];
        let texts = texts.iter().chain(&named);
        let texts = texts.map(|(name, text)| {
            let text = Attribute::Text((*text).into());
            ((*name).to_string(), text)
        });
        Variable {
            name: "crs".into(),
            dims: Vec::new(),
            shape: Vec::new(),
            kind: Kind::Signed,
            dtype: "int32".into(),
            width: 4,
            attributes: numbers.chain(texts).collect(),
            chunk: None,
        }
    }

    #[track_caller]
    fn require_near([lat, lon]: [f64; 2], expected: [f64; 2]) {
        let near = (lat - expected[1]).abs() < 1e-7 && apart(lon, expected[0]) < 1e-7;
        assert!(near, "{lat} {lon}, not {expected:?}");
    }

    /// Positions are those of pyproj 3.7 (`CRS.from_cf`), as longitude and latitude.
    #[test]
    fn planes_have_the_positions_of_proj() {
        type Case<'a> = (&'a str, &'a [(&'a str, &'a [f64])], [f64; 2], [f64; 2]);
        let sphere: &[f64] = &[6_371_229.0];
        let cases: [Case<'_>; 8] = [
            (
                "lambert_conformal_conic",
                &[
                    ("standard_parallel", &[38.5]),
                    ("latitude_of_projection_origin", &[38.5]),
                    ("longitude_of_central_meridian", &[-97.5]),
                    ("earth_radius", sphere),
                ],
                [-2_697_520.142_521_930_4, -1_587_306.152_556_665],
                [-122.719_528, 21.138_123],
            ),
            (
                "lambert_conformal_conic",
                &[
                    ("standard_parallel", &[63.3, 60.0]),
                    ("latitude_of_projection_origin", &[63.3]),
                    ("longitude_of_central_meridian", &[15.0]),
                    ("earth_radius", &[6_371_000.0]),
                    ("false_easting", &[1000.0]),
                ],
                [500_000.0, -250_000.0],
                [24.212_652_274_7, 60.732_808_928_5],
            ),
            (
                "polar_stereographic",
                &[
                    ("standard_parallel", &[70.0]),
                    ("latitude_of_projection_origin", &[90.0]),
                    ("straight_vertical_longitude_from_pole", &[-45.0]),
                    ("semi_major_axis", &[6_378_273.0]),
                    ("inverse_flattening", &[298.279_411_123_064]),
                ],
                [-3_850_000.0, 5_850_000.0],
                [168.349_700_562_5, 30.980_564_051_4],
            ),
            (
                "polar_stereographic",
                &[
                    ("standard_parallel", &[-71.0]),
                    ("latitude_of_projection_origin", &[-90.0]),
                    ("straight_vertical_longitude_from_pole", &[0.0]),
                ],
                [1_000_000.0, -2_000_000.0],
                [153.434_948_822_9, -69.628_669_385_8],
            ),
            (
                "lambert_azimuthal_equal_area",
                &[
                    ("latitude_of_projection_origin", &[90.0]),
                    ("longitude_of_projection_origin", &[0.0]),
                ],
                [-2_500_000.0, 1_200_000.0],
                [-115.641_005_824_3, 64.958_410_545_2],
            ),
            (
                "mercator",
                &[
                    ("standard_parallel", &[45.0]),
                    ("longitude_of_projection_origin", &[10.0]),
                    ("earth_radius", sphere),
                ],
                [1_000_000.0, 3_000_000.0],
                [22.717_870_987_6, 35.611_102_404_3],
            ),
            (
                "transverse_mercator",
                &[
                    ("latitude_of_projection_origin", &[49.0]),
                    ("longitude_of_central_meridian", &[-2.0]),
                    ("scale_factor_at_central_meridian", &[0.999_601_271_7]),
                    ("false_easting", &[400_000.0]),
                    ("false_northing", &[-100_000.0]),
                    ("semi_major_axis", &[6_377_563.396]),
                    ("semi_minor_axis", &[6_356_256.909]),
                ],
                [500_000.0, 700_000.0],
                [-0.388_785_148_2, 56.182_190_907_6],
            ),
            (
                "albers_conical_equal_area",
                &[
                    ("standard_parallel", &[29.5, 45.5]),
                    ("latitude_of_projection_origin", &[23.0]),
                    ("longitude_of_central_meridian", &[-96.0]),
                    ("semi_major_axis", &[6_378_137.0]),
                    ("inverse_flattening", &[298.257_222_101]),
                ],
                [-1_200_000.0, 1_500_000.0],
                [-109.439_252_467_3, 35.788_083_932_7],
            ),
        ];
        for (name, numbers, [x, y], expected) in cases {
            let found = plane(&mapping(name, numbers, &[]), 1.0).expect(name);
            require_near(found.position(y, x), expected);
        }
        assert!(plane(&mapping("mercator", &[], &[]), 1.0).is_none());
        assert!(plane(&mapping("azimuthal_unknown", cases[0].1, &[]), 1.0).is_none());
    }

    #[test]
    fn satellites_see_half_of_the_earth() {
        let height = 35_786_023.0;
        let numbers: &[(&str, &[f64])] = &[
            ("perspective_point_height", &[height]),
            ("longitude_of_projection_origin", &[-75.0]),
            ("semi_major_axis", &[6_378_137.0]),
            ("semi_minor_axis", &[6_356_752.314_14]),
        ];
        for texts in [("sweep_angle_axis", "x"), ("fixed_angle_axis", "y")] {
            let found = plane(&mapping("geostationary", numbers, &[texts]), height).unwrap();
            let position = found.position(0.095_340, -0.024_052);
            require_near(position, [-84.690_932_118_8, 33.846_162_290_6]);
            assert!(
                found
                    .position(0.15, 0.15)
                    .iter()
                    .all(|number| number.is_nan())
            );
        }
        let other: &[(&str, &[f64])] = &[
            ("perspective_point_height", &[35_785_831.0]),
            ("longitude_of_projection_origin", &[0.0]),
            ("semi_major_axis", &[6_378_169.0]),
            ("semi_minor_axis", &[6_356_583.8]),
        ];
        let found = plane(
            &mapping("geostationary", other, &[("sweep_angle_axis", "y")]),
            1.0,
        );
        let position = found.unwrap().position(4_000_000.0, 1_500_000.0);
        require_near(position, [19.393_488_670_6, 41.844_275_854_5]);
    }

    /// Positions are those of pyproj 3.7, too.
    #[test]
    fn poles_may_be_rotated() {
        let cordex = Pole {
            lat: 39.25,
            lon: -162.0,
            origin: 0.0,
        };
        require_near(cordex.position(0.0, 0.0), [18.0, 50.75]);
        let position = cordex.position(21.835, -28.375);
        require_near(position, [-44.593_863_891_9, 60.203_763_369_1]);
        let turned = Pole {
            lat: 37.5,
            lon: 177.5,
            origin: 20.0,
        };
        let position = turned.position(-2.0, 3.0);
        require_near(position, [-28.113_209_244_2, 47.474_783_691_5]);
    }
}
