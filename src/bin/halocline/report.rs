//! Messages for users of the program.

/// Result with any error, whose message is shown to the user.
pub(crate) type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Replaces the library's names in a report of `inspect` with the options that it advises and their
/// subcommands.
pub(crate) fn in_subcommands(report: &str) -> String {
    let names = [
        (
            "choose Gaps::Skip or Gaps::Allow",
            "choose --gaps skip or --gaps allow in `halocline stats`",
        ),
        (
            ", or Series::Joined for files with one time each",
            "; give files with one time each to `halocline stats` with --joined",
        ),
        (
            "choose Missing::Allow",
            "choose --missing allow in `halocline stats` and data.missing of an experiment; `convert` \
             and `rechunk` write them as NaN",
        ),
    ];
    in_options(&replaced(report, &names))
}

/// Replaces the library's names in a message with options of this program.
pub(crate) fn in_options(message: &str) -> String {
    let names = [
        ("OpenConfig::with_time_units", "--time-units"),
        ("Existing::Replace", "--replace"),
        ("Missing::Allow", "--missing allow"),
        ("Missing::Reject", "--missing reject"),
        ("Gaps::Skip", "--gaps skip"),
        ("Gaps::Allow", "--gaps allow"),
        ("Series::Joined", "--joined"),
        ("a FieldDataset takes", "`stats` takes"),
    ];
    replaced(message, &names)
}

/// Replaces the library's names in a message with keys of an experiment's file, or else with
/// options of this program.
pub(crate) fn in_keys(message: &str) -> String {
    in_options(&halocline::experiment::in_keys(message))
}

fn replaced(message: &str, names: &[(&str, &str)]) -> String {
    let replace = |text: String, (name, words): &(&str, &str)| text.replace(name, words);
    names.iter().fold(message.to_owned(), replace)
}
