//! Lists of names in error messages.

use halocline_core::support::nearest_names;

/// Largest number of names of which all are listed.
const ALL: usize = 24;
/// Number of names listed out of more.
const NEAREST: usize = 8;

/// Lists the names that could be meant by an unknown one: all of them or, out of many, the nearest
/// ones and the number of the others.
pub(crate) fn listed(unknown: &str, names: &[String]) -> String {
    if names.len() <= ALL {
        return names.join(", ");
    }
    let near = nearest_names(unknown, names.iter().map(String::as_str), NEAREST);
    let others = names.len() - NEAREST;
    format!("{} and {others} others", near.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_names_are_listed_by_their_likeness() {
        let names = |count: usize| -> Vec<String> {
            (0..count)
                .map(|level| format!("z@{}", 50 * level))
                .collect()
        };
        assert_eq!(listed("q", &names(3)), "z@0, z@50, z@100");
        let found = listed("z@505", &names(40));
        assert!(found.starts_with("z@50, z@500, "), "{found}");
        assert!(found.ends_with(" and 32 others"), "{found}");
    }
}
