//! Golden cases as files, and their shardings.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::DType;
use halocline::ops::golden::{Arguments, Attributes, Golden};
use halocline::ops::operators;
use halocline::ops::testing::{Sharding, shardings};
use halocline::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Case: arguments and expected results.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) op: String,
    /// Operator in the registry; `None` if it is not there.
    pub(crate) golden: Option<&'static Golden>,
    pub(crate) arguments: Arguments,
    /// Result, its cotangent, and gradients.
    pub(crate) expected: HashMap<String, TensorData>,
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
            // A scalar has no dims in the file, and one cell here.
            let shape = if view.shape().is_empty() {
                vec![1]
            } else {
                view.shape().to_vec()
            };
            let data = numbers(view.dtype(), view.data(), shape)
                .ok_or_else(|| bad(format!("{name} is of type {:?}", view.dtype())))?;
            tensors.insert(name, data);
        }
        let names = |key: &str| {
            serde_json::from_value::<Vec<String>>(json(key)?)
                .map_err(|e| bad(format!("{key}: {e}")))
        };
        let mut take = |name: String| {
            let data = tensors.remove(&name);
            let data = data.ok_or_else(|| bad(format!("no tensor {name}")))?;
            Ok::<_, Error>((name, data))
        };
        let arguments = Arguments {
            attributes: attributes(&json("attrs")?),
            inputs: names("inputs")?
                .into_iter()
                .map(&mut take)
                .collect::<Result<_>>()?,
            parameters: names("params")?
                .into_iter()
                .map(take)
                .collect::<Result<_>>()?,
        };
        let op = text("op")?;
        Ok(Self {
            golden: operators().find(|golden| golden.name == op),
            op,
            arguments,
            rtol: number("rtol")?,
            atol: number("atol")?,
            name,
            expected: tensors,
        })
    }

    /// Returns all shardings of the dims that may be sharded. A case of an unknown operator has
    /// one, in which it fails.
    pub(crate) fn shardings(&self, ranks: &[usize]) -> Vec<Sharding> {
        match self.golden {
            Some(golden) => golden.shardings(&self.arguments, ranks),
            None => shardings(&[1], &[0], 1),
        }
    }

    /// Returns the operator in the registry.
    pub(crate) fn operator(&self) -> Result<&'static Golden> {
        self.golden
            .ok_or_else(|| Error::other(format!("unknown operator {}", self.op)))
    }

    /// Casts the floats of this case to another dtype. In half precision, the expected results are
    /// those that one rank computes in f64 on the CPU from the rounded arguments, within 2 %.
    pub(crate) fn cast(mut self, dtype: DType) -> Result<Self> {
        self.arguments = self.arguments.cast(dtype);
        let cotangent = self.expected["gy"].clone().convert_dtype(dtype);
        if let (DType::F16 | DType::BF16, Some(golden)) = (dtype, self.golden) {
            let exact = self.arguments.clone().cast(DType::F64);
            let (y, gradients) = Launcher::local(1)
                .device(Device::flex())
                .collect(|world| {
                    let mesh = world.mesh([("x", 1)])?;
                    let whole = &self.shardings(&[1])[0];
                    let cotangent = cotangent.clone().convert_dtype(DType::F64);
                    golden.run_on(&mesh, whole, &exact, |_| cotangent)
                })?
                .remove(0);
            self.expected.insert("y".into(), y);
            for (name, gradient) in gradients {
                self.expected
                    .extend(gradient.map(|gradient| (format!("grad_{name}"), gradient)));
            }
            self.rtol = 2e-2;
        }
        if dtype == DType::F64 {
            // Values in the files are rounded to single precision.
            (self.rtol, self.atol) = (1e-6, 1e-9);
        }
        self.expected.insert("gy".into(), cotangent);
        Ok(self)
    }
}

pub(crate) fn attributes(values: &Value) -> Attributes {
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

/// Reads the numbers of a tensor: floats in single precision, and integers.
fn numbers(dtype: Dtype, bytes: &[u8], shape: Vec<usize>) -> Option<TensorData> {
    let words = bytes.as_chunks::<4>().0.iter();
    let long = bytes.as_chunks::<8>().0.iter();
    let floats = |values: Vec<f32>| TensorData::new(values, shape.clone());
    let integers = |values: Vec<i64>| TensorData::new(values, shape.clone());
    Some(match dtype {
        Dtype::F32 => floats(words.map(|b| f32::from_le_bytes(*b)).collect()),
        Dtype::F64 => floats(long.map(|b| f64::from_le_bytes(*b) as f32).collect()),
        Dtype::I32 => integers(words.map(|b| i64::from(i32::from_le_bytes(*b))).collect()),
        Dtype::I64 => integers(long.map(|b| i64::from_le_bytes(*b)).collect()),
        Dtype::U8 | Dtype::BOOL => integers(bytes.iter().map(|b| i64::from(*b)).collect()),
        _ => return None,
    })
}
