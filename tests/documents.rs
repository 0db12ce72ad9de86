//! Pages that are written from the source.

use std::collections::BTreeMap;
use std::fmt::Write;

use halocline::ops::operators;

const PAGE: &str = "docs/operators.md";

/// The page on operators is the registry; `HALOCLINE_WRITE_DOCS=1 cargo test --test documents` writes it.
#[test]
fn the_page_on_operators_is_the_registry() {
    let mut cases: BTreeMap<String, usize> = BTreeMap::new();
    for entry in std::fs::read_dir("tests/golden").unwrap() {
        let file = entry.unwrap().file_name().into_string().unwrap();
        if let Some((name, _)) = file
            .strip_suffix(".safetensors")
            .and_then(|f| f.rsplit_once('_'))
        {
            *cases.entry(name.into()).or_default() += 1;
        }
    }
    let mut page = String::from(
        "# Operators\n\n\
         Each gives the values and gradients that PyTorch's function gives on one device, whatever the sharding: on one to four\n\
         ranks, in even, uneven and empty shards, alone, nested and on meshes of two axes. Golden cases hold that; they were\n\
         computed by PyTorch in f64. This page is written from the registry of operators (`halocline::ops::operators`).\n\n\
         | operator | PyTorch | dims that may be sharded | travels forward | travels backward | golden cases | burn modules |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for operator in operators() {
        let [forward, backward] = operator.travels;
        let count = cases.remove(operator.name).unwrap_or(0);
        assert!(count > 0, "no golden case of {}", operator.name);
        let (name, pytorch, sharded) = (operator.name, operator.pytorch, operator.sharded);
        let modules = operator.modules;
        writeln!(
            page,
            "| `{name}` | `{pytorch}` | {sharded} | {forward} | {backward} | {count} | {modules} |"
        )
        .unwrap();
    }
    assert!(cases.is_empty(), "golden cases of no operator: {cases:?}");
    if std::env::var("HALOCLINE_WRITE_DOCS").is_ok() {
        std::fs::write(PAGE, &page).unwrap();
    }
    let held = std::fs::read_to_string(PAGE).unwrap();
    assert_eq!(
        held, page,
        "{PAGE} is stale: HALOCLINE_WRITE_DOCS=1 cargo test --test documents"
    );
}
