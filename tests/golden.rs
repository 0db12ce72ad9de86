//! The golden cases of all operators, on every mesh of up to four local ranks.

#[path = "../examples/golden/main.rs"]
#[allow(dead_code, reason = "the example's main is not the test's")]
mod golden;

#[test]
fn all_cases_pass_on_every_mesh() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    assert_eq!(golden::run(&folder, None, &[1, 2, 3, 4]).unwrap(), 0);
}

#[test]
fn an_operator_that_has_no_case_is_an_error() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    assert!(golden::run(&folder, Some("no_such_operator"), &[1]).is_err());
}
