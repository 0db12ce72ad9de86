//! Structure of the source: dependencies point one way, files stay short.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const CRATES: [&str; 5] = ["core/src", "ops/src", "io/src", "models/src", "src"];

/// No file depends on itself through other files, and no folder of a crate on itself through other
/// folders.
#[test]
fn dependencies_point_one_way() {
    for root in CRATES {
        let uses = uses(Path::new(root));
        assert_eq!(circle(&uses), None, "files of {root}");
        let folder = |module: &String| module.split("::").next().unwrap_or("").to_string();
        let mut folders: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (module, used) in &uses {
            let others = used.iter().map(folder);
            let others = others.filter(|other| *other != folder(module));
            folders.entry(folder(module)).or_default().extend(others);
        }
        assert_eq!(circle(&folders), None, "folders of {root}");
    }
}

#[test]
fn no_file_is_longer_than_500_lines() {
    let roots = [
        "core", "ops", "io", "models", "src", "examples", "tests", "benches",
    ];
    for file in roots.iter().flat_map(|root| sources(Path::new(root))) {
        let lines = std::fs::read_to_string(&file).unwrap().lines().count();
        assert!(lines <= 500, "{}: {lines} lines", file.display());
    }
}

/// Returns the Rust files below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() && path.file_name() != Some("target".as_ref()) {
            found.extend(sources(&path));
        } else if path.extension() == Some("rs".as_ref()) {
            found.push(path);
        }
    }
    found
}

/// Returns the modules that each file of a crate uses outside tests; the root of the crate, which
/// lists all, is left out.
fn uses(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let files: BTreeMap<String, String> = sources(root)
        .iter()
        .map(|file| (module(root, file), source(file)))
        .collect();
    // Names that the root re-exports, with the module of each.
    let exports: BTreeMap<String, Vec<String>> = paths(&files["lib"], "lib")
        .into_iter()
        .filter_map(|mut path| Some((path.pop()?, path)))
        .collect();
    let find = |path: &[String]| {
        let exported = path.first().and_then(|name| exports.get(name));
        let known = path.first().is_some_and(|name| files.contains_key(name));
        let path = exported.filter(|_| !known).map_or(path, |path| &path[..]);
        let prefixes = (1..=path.len())
            .rev()
            .map(|length| path[..length].join("::"));
        prefixes
            .into_iter()
            .find(|prefix| files.contains_key(prefix))
    };
    let mut uses = BTreeMap::new();
    for (module, text) in files.iter().filter(|(module, _)| *module != "lib") {
        let used = paths(text, module);
        let used = used.iter().filter_map(|path| find(path));
        uses.insert(module.clone(), used.filter(|used| used != module).collect());
    }
    uses
}

/// Returns the name of a file's module, below the crate.
fn module(root: &Path, file: &Path) -> String {
    let path = file.strip_prefix(root).unwrap().with_extension("");
    let parts = path.iter().map(|part| part.to_str().unwrap());
    let parts: Vec<&str> = parts.filter(|part| *part != "mod").collect();
    parts.join("::")
}

/// Returns the text of a file without comments and tests.
fn source(file: &Path) -> String {
    let text = std::fs::read_to_string(file).unwrap();
    let is_test = ["tests.rs", "testing.rs"]
        .iter()
        .any(|name| file.ends_with(name));
    let code = text.split("#[cfg(test)]\nmod ").enumerate();
    // After `mod name;` the file goes on; `mod name { .. }` ends it.
    let code = code.take_while(|(part, text)| {
        *part == 0 || text.lines().next().is_some_and(|l| l.ends_with(';'))
    });
    let code: String = code.map(|(_, text)| text).collect();
    let lines = code
        .lines()
        .map(|line| line.split("//").next().unwrap_or(""));
    if is_test {
        String::new()
    } else {
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// Returns the paths below the crate in a text, in `use` and in expressions.
fn paths(text: &str, module: &str) -> Vec<Vec<String>> {
    let compact: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let compact = compact
        .replace(" :: ", "::")
        .replace("{ ", "{")
        .replace(" }", "}")
        .replace(", ", ",");
    let mut found = Vec::new();
    let mut start = |marker: &str, base: Vec<String>| {
        for (at, _) in compact.match_indices(marker) {
            let before = compact[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            tree(&compact[at + marker.len()..], base.clone(), &mut found);
        }
    };
    let parts: Vec<String> = module.split("::").map(String::from).collect();
    if module == "lib" {
        start("pub use ", Vec::new());
        return found;
    }
    start("crate::", Vec::new());
    let parent = &parts[..parts.len() - 1];
    start("super::", parent.to_vec());
    start(
        "super::super::",
        parent[..parent.len().saturating_sub(1)].to_vec(),
    );
    found
}

/// Reads a path with its braces, and returns the rest of the text.
fn tree<'a>(text: &'a str, base: Vec<String>, found: &mut Vec<Vec<String>>) -> &'a str {
    let mut path = base;
    let mut text = text;
    loop {
        if let Some(mut list) = text.strip_prefix('{') {
            loop {
                list = tree(list, path.clone(), found);
                match list.strip_prefix(',') {
                    Some(rest) if !rest.starts_with('}') => list = rest,
                    rest => return rest.unwrap_or(list).strip_prefix('}').unwrap_or(list),
                }
            }
        }
        let end = text
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        if !["self", ""].contains(&name) {
            path.push(name.into());
        }
        text = rest;
        match text.strip_prefix("::") {
            Some(rest) => text = rest,
            None => {
                found.push(path);
                let renamed = text
                    .strip_prefix(" as ")
                    .map(|rest| rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_'));
                return renamed.unwrap_or(text);
            }
        }
    }
}

/// Finds a cycle in a graph, and returns its nodes in order.
fn circle(graph: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    fn visit<'a>(
        node: &'a str,
        graph: &'a BTreeMap<String, BTreeSet<String>>,
        path: &mut Vec<&'a str>,
        done: &mut BTreeSet<&'a str>,
    ) -> Option<Vec<String>> {
        if let Some(start) = path.iter().position(|other| *other == node) {
            return Some(path[start..].iter().map(|name| name.to_string()).collect());
        }
        if !done.insert(node) {
            return None;
        }
        path.push(node);
        let found = graph.get(node).into_iter().flatten();
        let found = found
            .filter_map(|next| visit(next, graph, path, done))
            .next();
        path.pop();
        found
    }
    let mut done = BTreeSet::new();
    graph
        .keys()
        .find_map(|node| visit(node, graph, &mut Vec::new(), &mut done))
}

#[test]
fn circles_and_paths_are_found() {
    let text = "use crate::comm::{Batch, local::Hub as H, raw::{self, Call}};\nlet x = super::mesh::ravel(1);";
    let found = paths(text, "exchange::boxes");
    let found: Vec<String> = found.iter().map(|path| path.join("::")).collect();
    let expected = [
        "comm::Batch",
        "comm::local::Hub",
        "comm::raw",
        "comm::raw::Call",
        "exchange::mesh::ravel",
    ];
    assert_eq!(found, expected);
    let graph = |edges: &[(&str, &str)]| {
        let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (from, to) in edges {
            graph
                .entry(from.to_string())
                .or_default()
                .insert(to.to_string());
        }
        circle(&graph)
    };
    assert_eq!(graph(&[("a", "b"), ("b", "c"), ("a", "c")]), None);
    let found = graph(&[("a", "b"), ("b", "c"), ("c", "b")]);
    assert_eq!(found, Some(vec!["b".to_string(), "c".to_string()]));
}
