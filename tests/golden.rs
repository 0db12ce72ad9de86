//! The golden cases of all operators on local ranks.

use clap::Parser;

#[path = "../examples/golden/main.rs"]
#[allow(dead_code, reason = "the example's main is not the test's")]
mod golden;

/// Runs the cases of this repository, and gives the number of those that failed.
fn failed(arguments: &str) -> halocline::Result<usize> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    let arguments = arguments.split_whitespace();
    let arguments = ["golden", folder].into_iter().chain(arguments);
    golden::run(&golden::Arguments::parse_from(arguments))
}

#[test]
fn all_cases_pass_on_every_mesh() {
    assert_eq!(failed("--ranks 1,2,3,4").unwrap(), 0);
}

#[test]
fn all_cases_pass_on_three_axes() {
    assert_eq!(failed("--ranks 8").unwrap(), 0);
}

#[test]
fn all_cases_pass_in_double_precision() {
    assert_eq!(failed("--ranks 1,3 --dtype f64").unwrap(), 0);
}

#[test]
fn all_cases_pass_in_half_precision() {
    assert_eq!(failed("--ranks 1,2 --dtype bf16").unwrap(), 0);
}

#[test]
fn an_operator_that_has_no_case_is_an_error() {
    assert!(failed("--op no_such_operator --ranks 1").is_err());
}
