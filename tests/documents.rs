//! Pages that are generated from the source.

use std::collections::BTreeMap;
use std::fmt::Write;

use halocline::ops::operators;

const PAGE: &str = "docs/operators.md";

/// Row of the page: consecutive operators of the registry that share a method and rules.
struct Row {
    method: &'static str,
    /// Dims that may be sharded, and traffic forward and backward.
    rules: [String; 3],
    pytorch: Vec<&'static str>,
    cases: usize,
    modules: Vec<&'static str>,
}

/// The page on operators is generated from the registry;
/// `HALOCLINE_WRITE_DOCS=1 cargo test --test documents` writes it.
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
         Each operator returns the values and gradients of PyTorch's function on one device, for any sharding: on one to\n\
         four ranks, with even, uneven and empty shards, alone, nested and on meshes of two axes. Golden cases, which PyTorch\n\
         computed in f64, check this. The page is generated from the registry (`halocline::ops::operators`).\n\n\
         | method or function | PyTorch | dims that may be sharded | travels forward | travels backward | golden cases | burn modules |\n\
         |---|---|---|---|---|---|---|\n",
    );
    let mut rows: Vec<Row> = Vec::new();
    for operator in operators() {
        let (method, pytorch) = (operator.method, operator.pytorch);
        let count = cases.remove(operator.name).unwrap_or(0);
        assert!(count > 0, "no golden case of {}", operator.name);
        if method.is_empty() {
            continue;
        }
        let [forward, backward] = operator.travels.map(String::from);
        let rules = [operator.sharded.to_string(), forward, backward];
        let last = rows.last();
        if last.is_none_or(|row| row.method != method || row.rules != rules) {
            rows.push(Row {
                method,
                rules,
                pytorch: Vec::new(),
                cases: 0,
                modules: Vec::new(),
            });
        }
        let row = rows.last_mut().expect("a row of this operator");
        row.cases += count;
        if !row.pytorch.contains(&pytorch) {
            row.pytorch.push(pytorch);
        }
        row.modules
            .extend(Some(operator.modules).filter(|modules| !modules.is_empty()));
    }
    assert!(cases.is_empty(), "golden cases of no operator: {cases:?}");
    for row in rows {
        let (method, rules, count) = (row.method, row.rules.join(" | "), row.cases);
        let (pytorch, modules) = (row.pytorch.join(", "), row.modules.join(", "));
        writeln!(
            page,
            "| `{method}` | `{pytorch}` | {rules} | {count} | {modules} |"
        )
        .unwrap();
    }
    if std::env::var("HALOCLINE_WRITE_DOCS").is_ok() {
        std::fs::write(PAGE, &page).unwrap();
    }
    let held = std::fs::read_to_string(PAGE).unwrap();
    assert_eq!(
        held, page,
        "{PAGE} is stale: HALOCLINE_WRITE_DOCS=1 cargo test --test documents"
    );
}
