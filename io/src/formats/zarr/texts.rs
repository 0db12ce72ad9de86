//! Texts of NumPy, which are stored as bytes of a fixed number.

use serde_json::Value;

/// Most bytes of a text that is read.
const LONGEST: usize = 1 << 12;

/// Replaces the type of texts of a fixed length in the metadata of an array by that of their bytes.
pub(super) fn as_bytes(metadata: &mut Value) {
    let data_type = &metadata["data_type"];
    let (key, length) = match metadata["dtype"].as_str() {
        Some(name) => ("dtype", version_2(name)),
        None => {
            let is_text = ["fixed_length_utf32", "null_terminated_bytes"]
                .iter()
                .any(|name| data_type["name"] == *name);
            let length = data_type["configuration"]["length_bytes"].as_u64();
            let length = length.and_then(|length| usize::try_from(length).ok());
            ("data_type", length.filter(|_| is_text))
        }
    };
    let Some(length) = length.filter(|length| (1..=LONGEST).contains(length)) else {
        return;
    };
    let bytes = match key {
        "dtype" => format!("|V{length}"),
        _ => format!("r{}", 8 * length),
    };
    metadata[key] = Value::from(bytes);
    metadata["fill_value"] = Value::from(vec![0_u8; length]);
}

/// Returns the number of bytes of a text, by its type in version 2.
fn version_2(name: &str) -> Option<usize> {
    let (width, characters) = match name.split_at_checked(2)? {
        ("<U" | ">U", characters) => (4, characters),
        ("|S", characters) => (1, characters),
        _ => return None,
    };
    characters.parse::<usize>().ok()?.checked_mul(width)
}

/// Splits bytes into `count` texts of equal length. Bytes of zero are left out: they pad texts, and
/// the characters of ASCII in UTF-32.
pub(super) fn of_bytes(bytes: &[u8], count: usize) -> Vec<String> {
    let length = (bytes.len() / count.max(1)).max(1);
    let text = |bytes: &[u8]| {
        let characters: Vec<u8> = bytes.iter().copied().filter(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&characters).into_owned()
    };
    bytes.chunks_exact(length).map(text).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn texts_of_both_versions_are_bytes() {
        let configuration = json!({ "length_bytes": 8 });
        let version_3 =
            |name: &str| json!({ "data_type": { "name": name, "configuration": configuration } });
        for (mut metadata, key, expected) in [
            (json!({ "dtype": "<U2" }), "dtype", "|V8"),
            (json!({ "dtype": "|S8" }), "dtype", "|V8"),
            (version_3("fixed_length_utf32"), "data_type", "r64"),
            (version_3("null_terminated_bytes"), "data_type", "r64"),
        ] {
            as_bytes(&mut metadata);
            assert_eq!(metadata[key], expected);
            assert_eq!(metadata["fill_value"], json!([0, 0, 0, 0, 0, 0, 0, 0]));
        }
        for name in ["<U99999", "<f8", "|O", "|S0", "<"] {
            let mut metadata = json!({ "dtype": name });
            as_bytes(&mut metadata);
            assert_eq!(metadata, json!({ "dtype": name }));
        }
        assert_eq!(of_bytes(b"a\0\0\0b\0\0\0c\0\0\0\0\0\0\0", 2), ["ab", "c"]);
    }
}
