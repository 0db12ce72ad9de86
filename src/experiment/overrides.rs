//! Settings that replace keys of a configuration, such as `training.epochs=5`.

use halocline_core::{Error, Result};
use toml::{Table, Value};

/// Replaces keys of a configuration in TOML by settings `KEY=VALUE`, and returns the new text. A
/// key is a dotted path, and its value is TOML; tables on the way are made.
///
/// # Errors
/// Text that is not TOML; a setting that is not a key and a value; a key within a value that is not
/// a table. Errors of a setting begin with the option of the program.
pub(super) fn overridden(text: &str, settings: &[String]) -> Result<String> {
    let mut table: Table = toml::from_str(text).map_err(Error::other)?;
    for setting in settings {
        let fault = |fault: &str| Error::other(format!("--set {setting}: {fault}"));
        let (tables, key, value) = parsed(setting).ok_or_else(|| {
            fault(
                "expected KEY=VALUE, with a dotted key and a value as in the configuration, such as training.epochs=5 \
                 or 'model.kind=\"unet\"', with its quotes",
            )
        })?;
        let mut inner = &mut table;
        for (depth, name) in tables.iter().enumerate() {
            let entry = inner.entry(name.clone());
            let found = entry.or_insert_with(|| Value::Table(Table::new()));
            inner = found.as_table_mut().ok_or_else(|| {
                let path = tables[..=depth].join(".");
                fault(&format!(
                    "{path} is a value; expected a table, or the name of the value"
                ))
            })?;
        }
        inner.insert(key, value);
    }
    toml::to_string(&table).map_err(Error::other)
}

/// Splits a setting into the tables on the way to its key, the key and its value.
fn parsed(setting: &str) -> Option<(Vec<String>, String, Value)> {
    let (key, value) = setting.split_once('=')?;
    // Both are parsed as TOML, so that names may have quotes.
    let mut assigned: Table = toml::from_str(&format!("value = {value}")).ok()?;
    if assigned.len() > 1 {
        return None; // another setting on a further line
    }
    let mut named = Value::Table(toml::from_str(&format!("{key} = 0")).ok()?);
    let mut path = Vec::new();
    while let Value::Table(table) = named {
        let (name, inner) = table.into_iter().next()?;
        path.push(name);
        named = inner;
    }
    let key = path.pop()?;
    Some((path, key, assigned.remove("value")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(settings: &[&str]) -> Result<String, String> {
        let text = "folder = \"a\"\n[training]\nepochs = 2\nweights = { z = 2.0 }\n";
        let settings: Vec<String> = settings.iter().map(|setting| setting.to_string()).collect();
        overridden(text, &settings).map_err(|error| error.to_string())
    }

    #[test]
    fn settings_replace_keys_by_their_paths() {
        let text = set(&[
            "training.epochs=5",
            "model.kind = \"unet\"",
            "data.train.until=2018-01-01",
            "training.weights.\"t@850\"=0.5",
            "mesh={ lat = 2 }",
        ]);
        let found: Table = toml::from_str(&text.unwrap()).unwrap();
        let expected = "folder = \"a\"\nmodel.kind = \"unet\"\nmesh.lat = 2\n\
                        data.train.until = 2018-01-01\n[training]\nepochs = 5\n\
                        weights = { z = 2.0, \"t@850\" = 0.5 }\n";
        assert_eq!(found, toml::from_str::<Table>(expected).unwrap());
    }

    #[test]
    fn settings_that_are_no_key_and_value_are_refused() {
        for (setting, told) in [
            ("training.epochs", "expected KEY=VALUE"),
            ("model.kind=unet", "expected KEY=VALUE"),
            ("=3", "expected KEY=VALUE"),
            ("training.epochs=1\nbatch=3", "expected KEY=VALUE"),
            ("training.epochs.a=3", "training.epochs is a value"),
        ] {
            let error = set(&[setting]).unwrap_err();
            let begin = format!("--set {setting}: {told}");
            assert!(error.starts_with(&begin), "{error}");
        }
    }
}
