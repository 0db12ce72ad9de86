//! Suggestions for unknown names, for error messages.

use super::network::ModelConfig;

/// Largest number of names that an error suggests.
const PROPOSED: usize = 3;

/// Returns the known keys nearest to the unknown one in a message such as "unknown field `a`,
/// expected one of `b`, `c`".
pub(super) fn near(message: &str) -> Option<String> {
    let names: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let [unknown, known @ ..] = &names[..] else {
        return None;
    };
    if !message.starts_with("unknown") || known.len() < 2 {
        return None;
    }
    Some(nearest(unknown, known))
}

/// Returns the key of the table `model` with a wrong value, which the error of the parser lacks.
pub(super) fn model_key(text: &str) -> Option<String> {
    let table: toml::Table = toml::from_str(text).ok()?;
    let model = table.get("model")?.as_table()?;
    let fault = |model: toml::Table| {
        let read: Result<ModelConfig, toml::de::Error> = model.try_into();
        read.err().map(|error| error.to_string())
    };
    let found = fault(model.clone())?;
    // Without the key there is no error, or another one.
    let is_wrong = |key: &&String| {
        let mut others = model.clone();
        others.remove(key.as_str());
        key.as_str() != "kind" && fault(others).as_ref() != Some(&found)
    };
    model.keys().find(is_wrong).cloned()
}

/// Returns the known names nearest to an unknown one, separated by commas.
pub(super) fn nearest(unknown: &str, known: &[&str]) -> String {
    halocline_core::support::nearest_names(unknown, known.iter().copied(), PROPOSED).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_proposed_by_their_likeness() {
        assert!(nearest("lta", &["member", "lat", "lon", "data"]).starts_with("lat, "));
        let message = "unknown field `widht`, expected one of `kind`, `width`";
        assert!(near(message).is_some_and(|near| near.starts_with("width")));
        assert_eq!(near("missing field `kind`"), None);
    }
}
