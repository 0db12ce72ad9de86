//! JSON metadata of Zarr.

use std::path::Path;

use serde_json::Value;

use crate::attributes::Numbers;
use crate::formats::cf::variable::Attribute;

/// Maximum size of a metadata file, in bytes.
const MAX_METADATA: u64 = 1 << 24;

/// Converts an error to text.
pub(super) fn text(error: impl ToString) -> String {
    error.to_string()
}

/// Reads a metadata file, if it exists.
pub(super) fn json(path: &Path) -> Result<Option<Value>, String> {
    let Ok(found) = path.metadata() else {
        return Ok(None);
    };
    if !found.is_file() || found.len() > MAX_METADATA {
        let name = path.file_name().unwrap_or_default().display();
        return Err(format!(
            "{name} is no file, or larger than {MAX_METADATA} bytes"
        ));
    }
    let bytes = std::fs::read(path).map_err(text)?;
    match serde_json::from_slice(&bytes) {
        Ok(value) => Ok(Some(value)),
        Err(error) => match serde_json::from_slice(&quoted(&bytes)) {
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(error.to_string()),
        },
    }
}

/// Converts Python's dialect of JSON to JSON by quoting the numbers that JSON lacks, `NaN` and
/// `Infinity`.
fn quoted(json: &[u8]) -> Vec<u8> {
    let (mut quoted, mut rest, mut in_text) = (Vec::with_capacity(json.len()), json, false);
    while let Some(&byte) = rest.first() {
        let words: [&[u8]; 3] = [b"NaN", b"-Infinity", b"Infinity"];
        let word = words
            .into_iter()
            .find(|word| !in_text && rest.starts_with(word));
        let taken = match (word, byte) {
            (Some(word), _) => {
                quoted.extend([b"\"", word, b"\""].concat());
                word.len()
            }
            // An escaped quote does not end a string.
            (None, b'\\') if in_text => {
                quoted.extend(&rest[..rest.len().min(2)]);
                2
            }
            (None, byte) => {
                in_text ^= byte == b'"';
                quoted.push(byte);
                1
            }
        };
        rest = &rest[taken.min(rest.len())..];
    }
    quoted
}

/// Converts the JSON value of an attribute.
pub(super) fn attribute(name: &str, value: &Value) -> Attribute {
    let number = |value: &Value| match value {
        Value::String(text) if text == "NaN" => Some(f64::NAN),
        Value::String(text) if text == "Infinity" => Some(f64::INFINITY),
        Value::String(text) if text == "-Infinity" => Some(f64::NEG_INFINITY),
        // Encoding of floats that xarray uses in version 3.
        Value::String(text) if name == "_FillValue" => base64_number(text),
        other => other.as_f64(),
    };
    let numbers = match value {
        Value::Array(values) => values.iter().map(number).collect(),
        Value::String(_) if name != "_FillValue" && name != "missing_value" => None,
        value => number(value).map(|value| vec![value]),
    };
    match (numbers, value) {
        (Some(values), _) => Attribute::Numbers(Numbers {
            values,
            single: false,
        }),
        (None, Value::String(text)) => Attribute::Text(text.clone()),
        _ => Attribute::Other,
    }
}

/// Decodes a number from the Base64 encoding of its eight bytes.
fn base64_number(text: &str) -> Option<f64> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = text.strip_suffix('=').filter(|digits| digits.len() == 11)?;
    let mut bits: u128 = 0;
    for digit in digits.bytes() {
        let value = DIGITS.iter().position(|&other| other == digit)?;
        bits = (bits << 6) | value as u128;
    }
    // 66 bits, of which the last two are padding.
    Some(f64::from_bits(((bits >> 2) as u64).swap_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_json_has_not_are_texts() {
        let text = br#"{"a": [NaN, -Infinity, 1], "NaN \" NaN": "Infinity", "b": Infinity}"#;
        let expected =
            br#"{"a": ["NaN", "-Infinity", 1], "NaN \" NaN": "Infinity", "b": "Infinity"}"#;
        assert_eq!(quoted(text), expected);
        assert_eq!(quoted(b"\"\\"), b"\"\\");
    }

    #[test]
    fn fill_values_may_be_base64() {
        // Encoded by base64.b64encode(struct.pack("<d", value)) in Python.
        assert!(base64_number("AAAAAAAA+H8=").unwrap().is_nan());
        assert_eq!(base64_number("mpmZmZn5WMA="), Some(-99.9));
        assert_eq!(base64_number("AAAA"), None);
        assert_eq!(base64_number("AAAAAAAA~H8="), None);
    }
}
