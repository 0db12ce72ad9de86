//! Lists of names in error messages.

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
    let mut nearest: Vec<&str> = names.iter().map(String::as_str).collect();
    nearest.sort_by_cached_key(|name| distance(unknown, name));
    nearest.truncate(NEAREST);
    let others = names.len() - NEAREST;
    format!("{} and {others} others", nearest.join(", "))
}

/// Returns the number of characters to insert, remove or replace in one text to get the other
/// (Levenshtein distance).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    // Distances of the part of `one` so far to each beginning of `other`.
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (length, letter) in one.chars().enumerate() {
        let mut corner = row[0];
        row[0] = length + 1;
        for (column, character) in other.iter().enumerate() {
            let replaced = corner + usize::from(letter != *character);
            corner = row[column + 1];
            row[column + 1] = replaced.min(corner + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_names_are_listed_by_their_likeness() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "t2m"), 3);
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
