//! Names of the library in messages, as keys of a configuration.

/// Replaces the library's names in a message with keys of the configuration.
///
/// # Example
/// ```
/// use halocline::experiment::in_keys;
///
/// let message = "uneven time steps; choose Gaps::Skip";
/// assert_eq!(in_keys(message), "uneven time steps; choose data.gaps = \"skip\"");
/// ```
pub fn in_keys(message: &str) -> String {
    let names = [
        ("OpenConfig::with_time_units", "data.time_units"),
        (
            "Missing::Allow reads missing ones as NaN",
            "data.missing = \"fill\" takes the mean for missing ones",
        ),
        ("Missing::Reject", "data.missing = \"reject\""),
        ("Gaps::Skip", "data.gaps = \"skip\""),
        ("Gaps::Allow", "data.gaps = \"allow\""),
        ("a FieldDataset takes", "data.files names"),
        ("Series::Joined", "data.joined = true"),
        ("Launcher::seed", "seed"),
        (
            "Trainer::with_non_finite(NonFinite::Skip) leaves out such steps",
            "lower optimizer.learning_rate, or set training.clip_norm",
        ),
    ];
    let replace = |text: String, (name, key): &(&str, &str)| text.replace(name, key);
    names.iter().fold(message.to_owned(), replace)
}
