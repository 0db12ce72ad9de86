//! Coordinates in degrees: notation of longitudes, and comparison.

/// Largest difference between coordinates of equal grids in two files, in degrees.
pub(crate) const TOLERANCE: f64 = 1e-4;

/// Returns the distance of two coordinates in degrees, the shorter way around the globe.
pub(crate) fn apart(one: f64, other: f64) -> f64 {
    let distance = (one - other).abs();
    distance.min(360.0 - distance)
}

/// Whether coordinates of two files are equal, up to rounding and to the notation of longitudes.
pub(crate) fn is_equal(one: f64, other: f64) -> bool {
    apart(one, other) < TOLERANCE
}

/// Returns the longitude of the same meridian in [0, 360).
pub(crate) fn meridian(lon: f64) -> f64 {
    let lon = lon.rem_euclid(360.0);
    // The remainder of a value just below zero is rounded up to 360.
    if lon < 360.0 { lon.abs() } else { 0.0 }
}
