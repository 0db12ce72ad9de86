//! What is said to people.

/// Any error, whose message is for people.
pub(crate) type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A report of `inspect` with the subcommands that have the options which it advises.
pub(crate) fn in_subcommands(report: &str) -> String {
    let names = [
        (
            "choose Gaps::Skip or Gaps::Allow",
            "choose --gaps skip or --gaps allow in `halocline stats`",
        ),
        (
            "choose Missing::Allow",
            "choose --missing allow in `halocline stats`; `convert` and `rechunk` write them as NaN",
        ),
    ];
    let replace = |text: String, (name, options): (&str, &str)| text.replace(name, options);
    in_options(&names.into_iter().fold(report.to_owned(), replace))
}

/// A message of the library with options of this program in place of the library's names.
pub(crate) fn in_options(message: &str) -> String {
    let names = [
        (
            "name them by OpenConfig::with_time_units",
            "name them by --time-units",
        ),
        ("Existing::Replace", "--replace"),
        ("Missing::Allow", "--missing allow"),
        ("Gaps::Skip", "--gaps skip"),
        ("Gaps::Allow", "--gaps allow"),
    ];
    let replace = |text: String, (name, option): (&str, &str)| text.replace(name, option);
    names.into_iter().fold(message.to_owned(), replace)
}
