//! Runs golden cases on shards: `cargo run --release --example golden -- FOLDER [--op NAME] [--ranks 1,2,3,4]`.
//!
//! A case holds inputs, parameters, a cotangent, and the result and gradients that one device computed in f64. Every
//! case runs on every mesh and sharding; a line is printed per operator. Under `mpirun` the shardings are those of the
//! world that it started.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::tensor::{DType, Gradients};
use clap::Parser;
use halocline::ops::testing::{Sharding, difference, shardings};
use halocline::ops::{PaddingCount, Rounding};
use halocline::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Runs golden cases on shards.
#[derive(Parser)]
struct Arguments {
    /// A folder of cases, `<op>_<nn>.safetensors`.
    folder: PathBuf,
    /// Only this operator.
    #[arg(long)]
    op: Option<String>,
    /// Numbers of ranks to run on.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4")]
    ranks: Vec<usize>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments.folder, arguments.op.as_deref(), &arguments.ranks) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("golden: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs all cases of a folder and returns how many failed.
pub(crate) fn run(folder: &Path, op: Option<&str>, ranks: &[usize]) -> Result<usize> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(|e| Error::other(format!("{}: {e}", folder.display())))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    let cases = files
        .iter()
        .map(|file| Case::read(file))
        .collect::<Result<Vec<_>>>()?;
    let cases: Vec<Case> = cases
        .into_iter()
        .filter(|case| op.is_none_or(|op| case.op == op))
        .collect();
    if cases.is_empty() {
        return Err(Error::other(format!(
            "no case in {} for {op:?}",
            folder.display()
        )));
    }

    let report = if Launcher::from_env().is_mpi() {
        let reports = Launcher::from_env().collect(|world| {
            let mut report = Report::default();
            for case in &cases {
                for sharding in case.shardings(&[world.size()]) {
                    report.add(case, &sharding, case.run(&world, &sharding));
                }
            }
            if world.is_root() {
                report.print()
            }
            Ok(report)
        })?;
        reports.into_iter().next().unwrap_or_default()
    } else {
        let mut report = Report::default();
        for case in &cases {
            for sharding in case.shardings(ranks) {
                let outcomes =
                    Launcher::local(sharding.ranks()).collect(|world| case.run(&world, &sharding));
                report.add(case, &sharding, outcomes.map(|_| ()));
            }
        }
        report.print();
        report
    };
    Ok(report.failed())
}

/// Cases that passed and failed, by operator.
#[derive(Default)]
struct Report(BTreeMap<String, (usize, Vec<String>)>);

impl Report {
    fn add(&mut self, case: &Case, sharding: &Sharding, outcome: Result<()>) {
        let (passed, failures) = self.0.entry(case.op.clone()).or_default();
        match outcome {
            Ok(()) => *passed += 1,
            Err(error) => failures.push(format!("{} {sharding:?}: {error}", case.name)),
        }
    }

    fn failed(&self) -> usize {
        self.0.values().map(|(_, failures)| failures.len()).sum()
    }

    fn print(&self) {
        for (op, (passed, failures)) in &self.0 {
            println!("{op:<28} {passed} passed, {} failed", failures.len());
            for failure in failures.iter().take(3) {
                let line: Vec<&str> = failure.split_whitespace().collect();
                eprintln!("    {}", line.join(" "));
            }
        }
        let passed: usize = self.0.values().map(|(passed, _)| passed).sum();
        println!("{passed} passed, {} failed", self.failed());
    }
}

/// The operators that [`Run::check`] knows.
const OPERATORS: [&str; 18] = [
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
    "mse_loss",
    "l1_loss",
    "huber_loss",
];

struct Case {
    name: String,
    op: String,
    attrs: Value,
    inputs: Vec<String>,
    tensors: HashMap<String, TensorData>,
    rtol: f64,
    atol: f64,
}

impl Case {
    fn read(file: &Path) -> Result<Self> {
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

    fn shape(&self, name: &str) -> Vec<usize> {
        self.tensors
            .get(name)
            .map_or(Vec::new(), |data| data.shape().to_vec())
    }

    fn list<const N: usize>(&self, key: &str) -> [usize; N] {
        let values = self.attrs[key].as_array();
        std::array::from_fn(|i| values.and_then(|v| v.get(i)?.as_u64()).unwrap_or(0) as usize)
    }

    fn flag(&self, key: &str) -> bool {
        self.attrs[key].as_bool().unwrap_or(false)
    }

    /// All shardings of the dims that may be sharded.
    fn shardings(&self, ranks: &[usize]) -> Vec<Sharding> {
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
            "linear" => (shape.clone(), (0..shape.len() - 1).collect()),
            op if op.contains("conv") || op.contains("pool") => {
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
    fn sharding_of(&self, input: usize, sharding: &Sharding) -> Sharding {
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

    fn run(&self, world: &World, sharding: &Sharding) -> Result<()> {
        if !OPERATORS.contains(&self.op.as_str()) {
            return Err(Error::other(format!("unknown operator {}", self.op)));
        }
        match self.shape(&self.inputs[0]).len() {
            1 => Run::<1>::new(self, world, sharding)?.check(),
            2 => Run::<2>::new(self, world, sharding)?.check(),
            3 => Run::<3>::new(self, world, sharding)?.check(),
            4 => Run::<4>::new(self, world, sharding)?.check(),
            5 => Run::<5>::new(self, world, sharding)?.check(),
            dims => Err(Error::other(format!("an input of {dims} dims"))),
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

type GradientOf<'a> = Box<dyn Fn(&Gradients) -> Option<TensorData> + 'a>;

/// One case on one rank.
struct Run<'a, const D: usize> {
    case: &'a Case,
    mesh: DeviceMesh,
    inputs: Vec<ShardTensor<D>>,
    /// How to find the gradient of every leaf.
    leaves: RefCell<Vec<(String, GradientOf<'a>)>>,
}

impl<'a, const D: usize> Run<'a, D> {
    fn new(case: &'a Case, world: &World, sharding: &Sharding) -> Result<Self> {
        let mesh = world.mesh_of(&sharding.axes)?;
        let mut inputs = Vec::new();
        let mut leaves: Vec<(String, GradientOf<'a>)> = Vec::new();
        for (i, name) in case.inputs.iter().enumerate() {
            let whole = Tensor::<D>::from_data(case.tensors[name].clone(), mesh.device());
            let layout = case.sharding_of(i, sharding).layout(&mesh, &whole.dims())?;
            let leaf = ShardTensor::distribute_to(whole, &mesh, &layout)?.require_grad();
            let input = leaf.clone();
            leaves.push((
                name.clone(),
                Box::new(move |gradients| {
                    let gradient = input.grad(gradients)?;
                    assert_eq!(gradient.layout(), input.layout(), "layout of a gradient");
                    Some(gradient.full_tensor(LocalGradient::Replicated).into_data())
                }),
            ));
            inputs.push(leaf);
        }
        Ok(Self {
            case,
            mesh,
            inputs,
            leaves: RefCell::new(leaves),
        })
    }

    /// A parameter, as a leaf of this rank.
    fn parameter<const E: usize>(&self, name: &str) -> Option<Tensor<E>> {
        let data = self.case.tensors.get(name)?.clone();
        let leaf = Tensor::<E>::from_data(data, self.mesh.device()).require_grad();
        let parameter = leaf.clone();
        let gradient = move |gradients: &Gradients| Some(parameter.grad(gradients)?.into_data());
        self.leaves
            .borrow_mut()
            .push((name.into(), Box::new(gradient)));
        Some(leaf)
    }

    fn needs<const E: usize>(&self, name: &str) -> Result<Tensor<E>> {
        self.parameter(name)
            .ok_or_else(|| Error::other(format!("no parameter {name}")))
    }

    /// Applies the operator and compares.
    fn check(&self) -> Result<()> {
        let case = self.case;
        let x = self.inputs[0].clone();
        let dims: Vec<usize> = case.attrs["dims"].as_array().map_or(Vec::new(), |dims| {
            dims.iter()
                .filter_map(|d| Some(d.as_u64()? as usize))
                .collect()
        });
        let reduction = match case.attrs["reduction"].as_str() {
            Some("sum") => Reduction::Sum,
            _ => Reduction::Mean,
        };
        let target = || self.inputs[1].clone();
        match case.op.as_str() {
            "conv1d" => self.conv::<1>(x),
            "conv2d" => self.conv::<2>(x),
            "conv3d" => self.conv::<3>(x),
            "max_pool1d" => self.compare(x.max_pool(&self.pool::<1>())),
            "max_pool2d" => self.compare(x.max_pool(&self.pool::<2>())),
            "max_pool3d" => self.compare(x.max_pool(&self.pool::<3>())),
            "avg_pool1d" => self.compare(x.avg_pool(&self.pool::<1>())),
            "avg_pool2d" => self.compare(x.avg_pool(&self.pool::<2>())),
            "avg_pool3d" => self.compare(x.avg_pool(&self.pool::<3>())),
            "sum" => self.compare(x.sum_over(&dims)),
            "mean" => self.compare(x.mean_over(&dims)),
            "max" => self.compare(x.max_over(&dims)),
            "min" => self.compare(x.min_over(&dims)),
            "matmul" => self.compare(x.matmul(target())),
            "linear" => {
                let weight = self.needs::<2>("weight")?.transpose(); // [in, out]
                self.compare(x.linear(weight, self.parameter("bias")))
            }
            "mse_loss" => self.compare(mse_loss(x, target(), reduction)),
            "l1_loss" => self.compare(l1_loss(x, target(), reduction)),
            "huber_loss" => {
                let delta = case.attrs["delta"].as_f64().unwrap_or(1.0);
                self.compare(huber_loss(x, target(), delta, reduction))
            }
            _ => unreachable!("unknown operators have been refused"),
        }
    }

    fn padding<const N: usize>(&self) -> [Padding; N] {
        let boundary = match self.case.attrs["padding_mode"].as_str() {
            Some("circular") => Boundary::Periodic,
            Some("reflect") => Boundary::Reflect,
            Some("replicate") => Boundary::Replicate,
            _ => Boundary::Zeros,
        };
        self.case
            .list("padding")
            .map(|width| Padding::new(width, boundary))
    }

    fn conv<const N: usize>(&self, x: ShardTensor<D>) -> Result<()> {
        let options = ConvOptions {
            stride: self.case.list("stride"),
            dilation: self.case.list("dilation"),
            padding: self.padding::<N>(),
            groups: self.case.attrs["groups"].as_u64().unwrap_or(1) as usize,
        };
        let weight = self.needs::<D>("weight")?;
        self.compare(x.conv(weight, self.parameter("bias"), &options))
    }

    fn pool<const N: usize>(&self) -> PoolOptions<N> {
        let case = self.case;
        let dilation = if case.attrs["dilation"].is_null() {
            [1; N]
        } else {
            case.list("dilation")
        };
        let rounding = if case.flag("ceil_mode") {
            Rounding::Ceil
        } else {
            Rounding::Floor
        };
        let count = if case.flag("count_include_pad") {
            PaddingCount::Included
        } else {
            PaddingCount::Excluded
        };
        PoolOptions::new(case.list("kernel_size"))
            .with_stride(case.list("stride"))
            .with_padding(self.padding())
            .with_dilation(dilation)
            .with_rounding(rounding)
            .with_count(count)
    }

    /// Compares the gathered result and, after a backward pass with the case's cotangent, every gradient.
    fn compare<const E: usize>(&self, y: ShardTensor<E>) -> Result<()> {
        let expected = &self.case.tensors["y"];
        if y.dims()[..] != expected.shape()[..] {
            return Err(Error::other(format!(
                "shape {:?}, expected {:?}",
                y.dims(),
                expected.shape()
            )));
        }
        let resolved = y.resolve();
        let local = resolved.layout().local_shape(self.mesh.position());
        assert_eq!(
            resolved.local_dims()[..],
            local[..],
            "a shard differs from its layout"
        );
        let cotangent = Tensor::<E>::from_data(
            self.case.tensors["gy"].clone(),
            &self.mesh.device().clone().inner(),
        );
        let cotangent = ShardTensor::distribute_to(cotangent, &self.mesh, resolved.layout())?;
        let gradients = (resolved.clone() * cotangent).sum().backward();

        let found = resolved.full_tensor(LocalGradient::Replicated).into_data();
        let mut failures = vec![self.off("y", &found, expected)];
        for (name, gradient) in &*self.leaves.borrow() {
            let Some(expected) = self.case.tensors.get(&format!("grad_{name}")) else {
                continue;
            };
            failures.push(match gradient(&gradients) {
                Some(found) => self.off(name, &found, expected),
                None => Some(format!("{name} has no gradient")),
            });
        }
        match failures
            .into_iter()
            .flatten()
            .reduce(|a, b| format!("{a}; {b}"))
        {
            Some(failures) => Err(Error::other(failures)),
            None => Ok(()),
        }
    }

    /// What is wrong with a result: `|a − b| ≤ atol + rtol·max|b|` must hold.
    fn off(&self, name: &str, found: &TensorData, expected: &TensorData) -> Option<String> {
        let found = found.clone().convert_dtype(DType::F32);
        let largest = expected
            .iter::<f64>()
            .fold(0.0, |max: f64, value| max.max(value.abs()));
        let allowed = self.case.rtol + self.case.atol / largest.max(f64::MIN_POSITIVE);
        let off = difference(&found, expected);
        (off > allowed).then(|| format!("{name} is off by {off:.1e} of its largest magnitude"))
    }
}
