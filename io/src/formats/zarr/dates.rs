//! Dates of NumPy, which are stored as integers.

use serde_json::Value;

/// Units of `datetime64`, in seconds.
const UNITS: [(&str, f64); 7] = [
    ("D", 86400.0),
    ("h", 3600.0),
    ("m", 60.0),
    ("s", 1.0),
    ("ms", 1e-3),
    ("us", 1e-6),
    ("ns", 1e-9),
];

/// Replaces the type `datetime64` in the metadata of an array by that of its integers. Returns
/// their unit, in seconds.
///
/// # Errors
/// Another type, or a multiple of a unit.
pub(super) fn as_integers(metadata: &mut Value) -> Result<f64, String> {
    let data_type = &metadata["data_type"];
    let (key, integers, unit) = match metadata["dtype"].as_str() {
        Some(name) => {
            let integers = if name.starts_with('>') { ">i8" } else { "<i8" };
            let unit = name.split_once("M8[");
            let unit = unit.and_then(|(_, unit)| unit.strip_suffix(']'));
            ("dtype", integers, unit)
        }
        None => {
            let unit = &data_type["configuration"];
            let is_date = data_type["name"] == "numpy.datetime64" && unit["scale_factor"] == 1;
            let unit = unit["unit"].as_str().filter(|_| is_date);
            ("data_type", "int64", unit)
        }
    };
    let found = UNITS.iter().find(|(name, _)| unit == Some(*name));
    let Some((_, seconds)) = found else {
        let found = &metadata[key];
        return Err(format!("dates of the type {found}, expected datetime64[s]"));
    };
    metadata[key] = Value::from(integers);
    metadata["fill_value"] = Value::from(0);
    Ok(*seconds)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn dates_of_both_versions_are_integers_of_a_unit() {
        let version_3 = |scale: u32| {
            let configuration = json!({ "unit": "ms", "scale_factor": scale });
            json!({ "data_type": { "name": "numpy.datetime64", "configuration": configuration } })
        };
        for (mut metadata, unit, key, integers) in [
            (json!({ "dtype": "<M8[s]" }), 1.0, "dtype", "<i8"),
            (json!({ "dtype": ">M8[h]" }), 3600.0, "dtype", ">i8"),
            (version_3(1), 1e-3, "data_type", "int64"),
        ] {
            assert_eq!(as_integers(&mut metadata), Ok(unit));
            assert_eq!(metadata[key], integers);
        }
        for mut metadata in [
            json!({ "dtype": "<i8" }),
            json!({ "dtype": "<M8[6h]" }),
            version_3(6),
            json!({ "data_type": "float64" }),
        ] {
            let error = as_integers(&mut metadata).unwrap_err();
            assert!(error.contains("expected datetime64"), "{error}");
        }
    }
}
