//! Suggestions for mistyped names.

/// Returns the `count` names nearest to an unknown one, nearest first, for error messages. The
/// distance is the number of characters to insert, remove, replace, or swap with the next one.
///
/// # Example
/// ```
/// use halocline_core::support::nearest_names;
///
/// assert_eq!(nearest_names("lta", ["lon", "lat", "data"], 2), ["lat", "lon"]);
/// ```
pub fn nearest_names<'a>(
    unknown: &str,
    names: impl IntoIterator<Item = &'a str>,
    count: usize,
) -> Vec<&'a str> {
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_by_cached_key(|name| strsim::osa_distance(unknown, name));
    names.truncate(count);
    names
}
