//! Points on the unit sphere, and the cells of HEALPix grids.

pub use crate::healpix::{HealpixOrder, healpix_centers, healpix_numbers};

/// Computes the Cartesian coordinates of a place on the unit sphere from its latitude and longitude
/// in degrees. The axis x points to 0° N 0° E, y to 0° N 90° E, and z to the north pole.
///
/// # Example
/// ```
/// use halocline_core::sphere::sphere_point;
///
/// let [x, y, z] = sphere_point([0.0, 90.0]);
/// assert!(x.abs() < 1e-15 && (y - 1.0).abs() < 1e-15 && z == 0.0);
/// let [_, _, z] = sphere_point([-90.0, 45.0]);
/// assert_eq!(z, -1.0);
/// ```
pub fn sphere_point([latitude, longitude]: [f64; 2]) -> [f64; 3] {
    let (z, radius) = latitude.to_radians().sin_cos();
    let (sin, cos) = longitude.to_radians().sin_cos();
    [radius * cos, radius * sin, z]
}
