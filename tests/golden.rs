//! Golden cases of all operators on local ranks.

use clap::Parser;
use halocline::ops::golden::{Arguments, Attributes};
use halocline::ops::operators;
use halocline::prelude::*;

#[path = "../examples/golden/main.rs"]
#[allow(dead_code, reason = "the example's main is not the test's")]
mod golden;

/// Runs the cases of this repository, and returns the number that failed.
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
    for dtype in ["bf16", "f16"] {
        let arguments = format!("--ranks 1,2 --dtype {dtype}");
        assert_eq!(failed(&arguments).unwrap(), 0, "{dtype}");
    }
}

#[test]
fn an_operator_that_has_no_case_is_an_error() {
    assert!(failed("--op no_such_operator --ranks 1").is_err());
}

#[test]
fn an_attribute_that_is_not_honoured_is_an_error() {
    let told = |numbers: &[(&str, &[f64])], texts: &[(&str, &str)]| {
        let numbers = numbers
            .iter()
            .map(|(key, list)| (key.to_string(), list.to_vec()));
        let texts = texts
            .iter()
            .map(|(key, text)| (key.to_string(), text.to_string()));
        let arguments = Arguments {
            attributes: Attributes {
                numbers: numbers.collect(),
                texts: texts.collect(),
            },
            inputs: vec![("x".into(), TensorData::ones::<f32, _>([2, 1, 5, 5]))],
            ..Arguments::default()
        };
        let pad = operators()
            .find(|golden| golden.name == "pad2d")
            .expect("pad2d");
        let whole = &pad.shardings(&arguments, &[1])[0];
        let found = Launcher::local(1).run(|world| {
            let ones = |shape: &[usize]| TensorData::ones::<f32, _>(shape.to_vec());
            pad.run_on(&world.mesh([("x", 1)])?, whole, &arguments, ones)
                .map(drop)
        });
        found.map_err(|error| error.to_string())
    };
    let width = ("pad_w", &[1.0, 1.0][..]);
    assert_eq!(told(&[width], &[("mode", "circular")]), Ok(()));
    for (numbers, texts, expected) in [
        (
            &[width, ("keepdim", &[0.0])][..],
            ("mode", "constant"),
            "attribute \"keepdim\"",
        ),
        (
            &[width],
            ("mode", "wrap"),
            "attribute \"mode\" is \"wrap\"; expected",
        ),
        (
            &[("pad_w", &[-1.0, 1.0])],
            ("mode", "constant"),
            "expected \"whole numbers from zero on\"",
        ),
    ] {
        let error = told(numbers, &[texts]).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}
