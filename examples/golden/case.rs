//! Golden cases as files, and how they are sharded.

use std::collections::HashMap;
use std::path::Path;

use halocline::ops::testing::{Sharding, shardings};
use halocline::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// The operators that `Run::check` knows.
pub(crate) const OPERATORS: [&str; 22] = [
    "conv1d",
    "conv2d",
    "conv3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "sum",
    "mean",
    "max",
    "min",
    "matmul",
    "linear",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "interpolate2d",
    "mse_loss",
    "l1_loss",
    "huber_loss",
];

/// A case: what goes in, and what must come out.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) op: String,
    pub(crate) attrs: Value,
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
        Ok(Self {
            op: text("op")?,
            attrs: json("attrs")?,
            inputs,
            rtol: number("rtol")?,
            atol: number("atol")?,
            name,
            tensors,
        })
    }

    /// The shape of a tensor of the case.
    pub(crate) fn shape(&self, name: &str) -> Vec<usize> {
        self.tensors
            .get(name)
            .map_or(Vec::new(), |data| data.shape().to_vec())
    }

    /// An attribute that is a list, one number per spatial dim.
    pub(crate) fn list<const N: usize>(&self, key: &str) -> [usize; N] {
        let values = self.attrs[key].as_array();
        std::array::from_fn(|i| values.and_then(|v| v.get(i)?.as_u64()).unwrap_or(0) as usize)
    }

    /// An attribute that is true or false.
    pub(crate) fn flag(&self, key: &str) -> bool {
        self.attrs[key].as_bool().unwrap_or(false)
    }

    /// All shardings of the dims that may be sharded.
    pub(crate) fn shardings(&self, ranks: &[usize]) -> Vec<Sharding> {
        if !OPERATORS.contains(&self.op.as_str()) {
            // A failure, once.
            return shardings(&[1], &[0], 1);
        }
        let shape = self.shape(&self.inputs[0]);
        let (shape, dims): (Vec<usize>, Vec<usize>) = match self.op.as_str() {
            // Batch, rows, what is summed over, columns.
            "matmul" => {
                let columns = self.shape(&self.inputs[1])[shape.len() - 1];
                let shape = [&shape[..], &[columns]].concat();
                let dims = (0..shape.len()).collect();
                (shape, dims)
            }
            "linear" | "layer_norm" => (shape.clone(), (0..shape.len() - 1).collect()),
            op if ["conv", "pool", "group_norm", "instance_norm"]
                .iter()
                .any(|part| op.contains(part)) =>
            {
                let dims = (0..shape.len()).filter(|&dim| dim != 1).collect();
                (shape, dims)
            }
            _ => (shape.clone(), (0..shape.len()).collect()),
        };
        let most = ranks.iter().copied().max().unwrap_or(1);
        let all = shardings(&shape, &dims, most);
        all.into_iter()
            .filter(|sharding| ranks.contains(&sharding.ranks()))
            .collect()
    }

    /// The sharding of one input of the operator.
    pub(crate) fn sharding_of(&self, input: usize, sharding: &Sharding) -> Sharding {
        if self.op != "matmul" {
            return sharding.clone();
        }
        let dims = self.shape(&self.inputs[0]).len();
        let moved = |dim: usize| match (input, dim) {
            (_, dim) if dim < dims - 2 => Some(dim),
            (0, dim) => (dim < dims).then_some(dim),
            (_, dim) => (dim > dims - 2).then(|| dim - 1),
        };
        Sharding {
            axes: sharding.axes.clone(),
            placements: sharding
                .placements
                .iter()
                .map(|placement| match placement {
                    Shard(dim) => moved(*dim).map_or(Replicate, Shard),
                    other => *other,
                })
                .collect(),
            extents: sharding
                .extents
                .iter()
                .filter_map(|(dim, extents)| Some((moved(*dim)?, extents.clone())))
                .collect(),
        }
    }
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
