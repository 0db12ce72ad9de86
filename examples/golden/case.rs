//! Golden cases as files, and how they are sharded.

use std::collections::HashMap;
use std::path::Path;

use halocline::ops::golden::{Attributes, Golden};
use halocline::ops::operators;
use halocline::ops::testing::{Sharding, shardings};
use halocline::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// A case: what goes in, and what must come out.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) op: String,
    /// The operator in the registry; none if it is not there.
    pub(crate) golden: Option<&'static Golden>,
    pub(crate) attributes: Attributes,
    pub(crate) inputs: Vec<String>,
    pub(crate) tensors: HashMap<String, TensorData>,
    pub(crate) rtol: f64,
    pub(crate) atol: f64,
}

impl Case {
    /// Reads a file of the golden format.
    pub(crate) fn read(file: &Path) -> Result<Self> {
        let name = file
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let bad = |what: String| Error::other(format!("{}: {what}", file.display()));
        let bytes = std::fs::read(file)?;
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| bad(e.to_string()))?;
        let metadata = metadata.metadata().clone().unwrap_or_default();
        let text = |key: &str| {
            metadata
                .get(key)
                .cloned()
                .ok_or_else(|| bad(format!("no metadata {key}")))
        };
        let number = |key: &str| {
            text(key)?
                .parse::<f64>()
                .map_err(|e| bad(format!("{key}: {e}")))
        };
        let json = |key: &str| {
            serde_json::from_str::<Value>(&text(key)?).map_err(|e| bad(format!("{key}: {e}")))
        };
        let views = SafeTensors::deserialize(&bytes).map_err(|e| bad(e.to_string()))?;
        let mut tensors = HashMap::new();
        for (name, view) in views.tensors() {
            let values = numbers(view.dtype(), view.data())
                .ok_or_else(|| bad(format!("{name} is of type {:?}", view.dtype())))?;
            // A scalar has no dims there and one cell here.
            let shape = if view.shape().is_empty() {
                vec![1]
            } else {
                view.shape().to_vec()
            };
            tensors.insert(name, TensorData::new(values, shape));
        }
        let inputs =
            serde_json::from_value(json("inputs")?).map_err(|e| bad(format!("inputs: {e}")))?;
        let op = text("op")?;
        Ok(Self {
            golden: operators().find(|golden| golden.name == op),
            op,
            attributes: attributes(&json("attrs")?),
            inputs,
            rtol: number("rtol")?,
            atol: number("atol")?,
            name,
            tensors,
        })
    }

    fn shapes(&self) -> Vec<Vec<usize>> {
        let shape = |name: &String| self.tensors[name].shape().to_vec();
        self.inputs.iter().map(shape).collect()
    }

    /// All shardings of the dims that may be sharded. A case of an unknown operator has one, in which it fails.
    pub(crate) fn shardings(&self, ranks: &[usize]) -> Vec<Sharding> {
        let Some(golden) = self.golden else {
            return shardings(&[1], &[0], 1);
        };
        let (shape, dims) = golden.sharded.of(&self.shapes());
        let most = ranks.iter().copied().max().unwrap_or(1);
        let all = shardings(&shape, &dims, most);
        all.into_iter()
            .filter(|sharding| ranks.contains(&sharding.ranks()))
            .collect()
    }

    /// The inputs, each with its sharding.
    pub(crate) fn sharded_inputs(
        &self,
        golden: &Golden,
        sharding: &Sharding,
    ) -> Vec<(String, TensorData, Sharding)> {
        let inputs = self.inputs.iter().enumerate();
        inputs
            .map(|(input, name)| {
                let data = self.tensors[name].clone();
                let own = golden.sharded.input(input, data.shape().len(), sharding);
                (name.clone(), data, own)
            })
            .collect()
    }
}

fn attributes(values: &Value) -> Attributes {
    let mut attributes = Attributes::default();
    for (key, value) in values.as_object().into_iter().flatten() {
        let number = |value: &Value| match value {
            Value::Bool(is) => Some(f64::from(u8::from(*is))),
            other => other.as_f64(),
        };
        match value {
            Value::String(text) => {
                attributes.texts.insert(key.clone(), text.clone());
            }
            Value::Null => {}
            Value::Array(list) => {
                let numbers = list.iter().filter_map(number).collect();
                attributes.numbers.insert(key.clone(), numbers);
            }
            other => {
                let numbers = number(other).into_iter().collect();
                attributes.numbers.insert(key.clone(), numbers);
            }
        }
    }
    attributes
}

/// The numbers of a tensor; indices and classes become floats as well.
fn numbers(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    let words = bytes.as_chunks::<4>().0.iter();
    let long = bytes.as_chunks::<8>().0.iter();
    Some(match dtype {
        Dtype::F32 => words.map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::I32 => words.map(|b| i32::from_le_bytes(*b) as f32).collect(),
        Dtype::F64 => long.map(|b| f64::from_le_bytes(*b) as f32).collect(),
        Dtype::I64 => long.map(|b| i64::from_le_bytes(*b) as f32).collect(),
        Dtype::U8 | Dtype::BOOL => bytes.iter().map(|b| f32::from(*b)).collect(),
        _ => return None,
    })
}
