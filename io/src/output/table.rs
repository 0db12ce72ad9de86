//! Labelled arrays, such as scores, written as a Zarr store.

use std::fs;
use std::path::Path;

use halocline_core::World;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::staged_folder::StagedFolder;
use crate::ranks::agreement::{all_ranks, on_first};
use crate::{Error, Existing, Result};

/// Table of records with labels, such as scores by channel, lead and region, stored as arrays with
/// one dim per label.
///
/// A record is a struct. The fields named as labels hold text or numbers; every other field that is
/// a number or `null` becomes an array. `null` and missing records become NaN. The labels along a
/// dim are in the order of their first appearance.
///
/// # Example
/// ```
/// use halocline_core::Launcher;
/// use halocline_io::Table;
///
/// #[derive(serde::Serialize)]
/// struct Score {
///     channel: &'static str,
///     lead: f64,
///     rmse: f64,
/// }
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("scores.zarr");
/// let score = |channel, lead, rmse| Score { channel, lead, rmse };
/// let scores = [score("t2m", 6.0, 1.2), score("t2m", 12.0, 1.9), score("msl", 6.0, 90.0)];
/// let table = Table::new(&scores, &["channel", "lead"])?.with_unit("lead", "hours");
/// assert_eq!(table.array("rmse").unwrap()[..3], [1.2, 1.9, 90.0]); // [channel, lead]
/// Launcher::local(2).run(|world| table.save(&world, &path))?;
/// // In Python: xarray.open_zarr("scores.zarr").rmse.sel(channel="t2m")
/// assert!(path.join(".zmetadata").is_file());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    dims: Vec<Dim>,
    /// Names and values, in row-major order of the dims.
    arrays: Vec<(String, Vec<f64>)>,
}

#[derive(Clone, Debug, PartialEq)]
struct Dim {
    name: String,
    unit: String,
    labels: Vec<Value>,
}

impl Table {
    /// Arranges records by the fields named in `labels`.
    ///
    /// # Errors
    /// No records or labels; a record that is not a struct, lacks a label, or has a label that is
    /// neither text nor a number; two records with the same labels; labels along a dim that mix
    /// text and numbers.
    pub fn new(records: &[impl Serialize], labels: &[&str]) -> Result<Self> {
        let refused = |found: String, expected: &str| Error::argument("records", found, expected);
        if records.is_empty() || labels.is_empty() {
            return Err(refused("none".into(), "at least one record and label"));
        }
        let mut rows = Vec::with_capacity(records.len());
        for record in records {
            match serde_json::to_value(record) {
                Ok(Value::Object(row)) => rows.push(row),
                Ok(other) => return Err(refused(other.to_string(), "structs")),
                Err(error) => return Err(refused(error.to_string(), "what JSON can hold")),
            }
        }
        let dims = labels.iter().map(|name| Dim::new(name, &rows));
        let dims = dims.collect::<Result<Vec<Dim>>>()?;
        let mut arrays: Vec<(String, Vec<f64>)> = Vec::new();
        let cells = dims.iter().map(|dim| dim.labels.len()).product();
        let mut taken = vec![false; cells];
        for row in &rows {
            let place = dims.iter().fold(0, |place, dim| {
                let label = dim.labels.iter().position(|label| *label == row[&dim.name]);
                place * dim.labels.len() + label.expect("the labels are those of all rows")
            });
            if std::mem::replace(&mut taken[place], true) {
                let labels: Vec<&Value> = dims.iter().map(|dim| &row[&dim.name]).collect();
                return Err(refused(format!("two of {labels:?}"), "one of each labels"));
            }
            for (name, value) in row {
                let is_label = labels.contains(&name.as_str());
                let value = match value {
                    Value::Number(number) => number.as_f64().unwrap_or(f64::NAN),
                    Value::Null => f64::NAN,
                    _ => continue,
                };
                if is_label {
                    continue;
                }
                let known = arrays.iter().position(|(known, _)| known == name);
                let index = known.unwrap_or_else(|| {
                    arrays.push((name.clone(), vec![f64::NAN; cells]));
                    arrays.len() - 1
                });
                arrays[index].1[place] = value;
            }
        }
        Ok(Self { dims, arrays })
    }

    /// Sets the unit of a label, such as "hours" for a lead, which xarray decodes to a duration.
    ///
    /// # Panics
    /// Panics if there is no such label.
    #[must_use]
    pub fn with_unit(mut self, label: &str, unit: &str) -> Self {
        let dim = self.dims.iter_mut().find(|dim| dim.name == label);
        dim.unwrap_or_else(|| panic!("with_unit({label:?}): no such label"))
            .unit = unit.into();
        self
    }

    /// Returns the values of an array in row-major order of the dims, or `None` if there is no such
    /// array.
    pub fn array(&self, name: &str) -> Option<&[f64]> {
        let found = self.arrays.iter().find(|(known, _)| known == name);
        found.map(|(_, values)| &values[..])
    }

    /// Writes a Zarr store (version 2, consolidated) on rank 0. All ranks must call this together.
    /// The store appears under its name only when it is complete; an existing store is replaced.
    ///
    /// # Errors
    /// On all ranks: a path that cannot be written, or is taken by something other than a store; a
    /// failure of communication.
    pub fn save(&self, world: &World, path: impl AsRef<Path>) -> halocline_core::Result<()> {
        on_first(&all_ranks(world)?, "table", || self.write(path.as_ref()))
    }

    fn write(&self, path: &Path) -> Result<()> {
        let folder = StagedFolder::open(path, Existing::Replace)?;
        folder.clear()?;
        let written = self
            .write_into(folder.path())
            .and_then(|()| folder.sync_files());
        if written.is_err() {
            folder.discard();
        }
        written.and_then(|()| folder.commit(None))
    }

    fn write_into(&self, root: &Path) -> Result<()> {
        let mut files = Map::new();
        files.insert(".zgroup".into(), json!({ "zarr_format": 2 }));
        let conventions = json!({ "Conventions": "CF-1.11" });
        files.insert(".zattrs".into(), conventions);
        for dim in &self.dims {
            let (dtype, bytes) = dim.encode();
            let mut attributes = json!({ "_ARRAY_DIMENSIONS": [dim.name] });
            if !dim.unit.is_empty() {
                attributes["units"] = dim.unit.clone().into();
            }
            let array = (dtype, vec![dim.labels.len()], bytes);
            write_array(root, &mut files, &dim.name, array, attributes)?;
        }
        let names: Vec<&str> = self.dims.iter().map(|dim| &*dim.name).collect();
        for (name, values) in &self.arrays {
            let shape = self.dims.iter().map(|dim| dim.labels.len()).collect();
            let bytes = values.iter().flat_map(|value| value.to_le_bytes());
            let array = ("<f8".into(), shape, bytes.collect());
            let attributes = json!({ "_ARRAY_DIMENSIONS": names });
            write_array(root, &mut files, name, array, attributes)?;
        }
        for (name, value) in &files {
            write_json(&root.join(name), value)?;
        }
        let consolidated = json!({ "zarr_consolidated_format": 1, "metadata": files });
        write_json(&root.join(".zmetadata"), &consolidated)
    }
}

impl Dim {
    fn new(name: &str, rows: &[Map<String, Value>]) -> Result<Self> {
        let mut labels: Vec<Value> = Vec::new();
        for row in rows {
            let label = match row.get(name) {
                Some(label @ (Value::String(_) | Value::Number(_))) => label,
                other => {
                    let found = format!("{name} {}", other.unwrap_or(&Value::Null));
                    return Err(Error::argument("records", found, "a text or a number"));
                }
            };
            if !labels.contains(label) {
                labels.push(label.clone());
            }
        }
        let texts = labels.iter().filter(|label| label.is_string()).count();
        if texts != 0 && texts != labels.len() {
            let expected = "either texts or numbers";
            return Err(Error::argument(
                "records",
                format!("{name} {labels:?}"),
                expected,
            ));
        }
        Ok(Self {
            name: name.into(),
            unit: String::new(),
            labels,
        })
    }

    /// Returns the type of the labels in NumPy's notation, and their bytes.
    fn encode(&self) -> (String, Vec<u8>) {
        let text = |label: &Value| {
            label
                .as_str()
                .map(|text| text.chars().collect::<Vec<char>>())
        };
        let texts: Vec<Vec<char>> = self.labels.iter().filter_map(text).collect();
        if texts.is_empty() {
            let numbers = self.labels.iter().filter_map(Value::as_f64);
            return ("<f8".into(), numbers.flat_map(f64::to_le_bytes).collect());
        }
        let width = texts.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let padded = texts.iter().flat_map(|text| {
            let padding = std::iter::repeat_n('\0', width - text.len());
            text.iter().copied().chain(padding)
        });
        let bytes = padded.flat_map(|letter| u32::from(letter).to_le_bytes());
        (format!("<U{width}"), bytes.collect())
    }
}

/// Writes an array as a single chunk, and adds its metadata to `files`.
fn write_array(
    root: &Path,
    files: &mut Map<String, Value>,
    name: &str,
    (dtype, shape, bytes): (String, Vec<usize>, Vec<u8>),
    attributes: Value,
) -> Result<()> {
    let folder = root.join(name);
    fs::create_dir(&folder).map_err(|error| Error::io(&folder, error))?;
    let fill = match &*dtype {
        "<f8" => "NaN",
        _ => "",
    };
    let metadata = json!({
        "zarr_format": 2,
        "shape": shape,
        "chunks": shape,
        "dtype": dtype,
        "fill_value": fill,
        "order": "C",
        "filters": null,
        "compressor": null,
    });
    files.insert(format!("{name}/.zarray"), metadata);
    files.insert(format!("{name}/.zattrs"), attributes);
    let chunk = vec!["0"; shape.len()].join(".");
    write_file(&folder.join(chunk), &bytes)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let bytes = serde_json::to_vec_pretty(value).expect("JSON");
    write_file(path, &bytes)
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).map_err(|error| Error::io(path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(channel: Value, lead: f64, values: &[(&str, Value)]) -> Map<String, Value> {
        let labels = [("channel", channel), ("lead", lead.into())];
        let all = labels.into_iter().chain(values.iter().cloned());
        all.map(|(name, value)| (name.into(), value)).collect()
    }

    #[test]
    fn places_without_a_record_or_value_are_nan() {
        let rows = [
            record(
                "z@500".into(),
                12.0,
                &[("rmse", 1.5.into()), ("unit", "m".into())],
            ),
            record(
                "t".into(),
                6.0,
                &[("rmse", Value::Null), ("count", 3.into())],
            ),
        ];
        let table = Table::new(&rows, &["lead", "channel"]).unwrap();
        let rmse = table.array("rmse").unwrap();
        assert_eq!(rmse[0], 1.5);
        assert!(rmse[1..].iter().all(|value| value.is_nan()));
        assert_eq!(table.array("count").unwrap()[3], 3.0);
        assert_eq!(table.array("unit"), None);
        let (dtype, bytes) = table.dims[1].encode();
        assert_eq!((dtype.as_str(), bytes.len()), ("<U5", 2 * 5 * 4));
        assert_eq!(&bytes[20..28], [b't', 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn what_is_no_table_is_refused() {
        let refused = |rows: &[Map<String, Value>]| {
            Table::new(rows, &["channel", "lead"])
                .unwrap_err()
                .to_string()
        };
        let row = |channel: &str| record(channel.into(), 6.0, &[]);
        assert!(refused(&[]).contains("at least one record"));
        assert!(refused(&[row("t"), row("t")]).contains("two of"));
        assert!(
            refused(&[row("t"), record(1.into(), 6.0, &[])]).contains("either texts or numbers")
        );
        assert!(refused(&[record(Value::Null, 6.0, &[])]).contains("channel null"));
        assert!(Table::new(&[1.0], &["lead"]).is_err());
    }
}
