//! Runs golden cases on shards: `cargo run --release --example golden -- FOLDER [--op NAME] [--ranks 1,2,3,4]`.
//!
//! A case holds inputs, parameters, a cotangent, and the result and gradients that one device computed in f64. Every
//! case runs on every mesh and sharding; a line is printed per operator. Under `mpirun` the shardings are those of the
//! world that it started. The last line has a number made of the bits of all results and gradients: engines that give the
//! same bits print the same one.

mod case;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::tensor::{DType, Gradients};
use clap::Parser;
use halocline::ops::testing::{Sharding, difference};
use halocline::ops::{PaddingCount, Rounding};
use halocline::prelude::*;

use case::{Case, OPERATORS};

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

    let report = if Launcher::from_env().is_job() {
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
                report.add(case, &sharding, outcomes.map(|ranks| ranks[0]));
            }
        }
        report.print();
        report
    };
    if report.by_operator.is_empty() {
        let message = format!("nothing was run on {ranks:?} ranks");
        return Err(Error::other(message));
    }
    Ok(report.failed())
}

/// What became of cases.
#[derive(Default)]
struct Report {
    /// How many passed, and why others failed.
    by_operator: BTreeMap<String, (usize, Vec<String>)>,
    /// The bits of those that passed, in their order.
    bits: DefaultHasher,
}

impl Report {
    fn add(&mut self, case: &Case, sharding: &Sharding, outcome: Result<u64>) {
        let (passed, failures) = self.by_operator.entry(case.op.clone()).or_default();
        match outcome {
            Ok(bits) => {
                *passed += 1;
                bits.hash(&mut self.bits);
            }
            Err(error) => failures.push(format!("{} {sharding:?}: {error}", case.name)),
        }
    }

    fn failed(&self) -> usize {
        let failures = self.by_operator.values().map(|(_, failures)| failures);
        failures.map(Vec::len).sum()
    }

    fn print(&self) {
        for (op, (passed, failures)) in &self.by_operator {
            println!("{op:<28} {passed} passed, {} failed", failures.len());
            for failure in failures.iter().take(3) {
                let line: Vec<&str> = failure.split_whitespace().collect();
                eprintln!("    {}", line.join(" "));
            }
        }
        let passed: usize = self.by_operator.values().map(|(passed, _)| passed).sum();
        let bits = self.bits.finish();
        println!(
            "{passed} passed, {} failed, bits {bits:016x}",
            self.failed()
        );
    }
}

impl Case {
    /// The bits of the results.
    fn run(&self, world: &World, sharding: &Sharding) -> Result<u64> {
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
            let leaf = ShardTensor::distribute(whole, &mesh, &layout)?.require_grad();
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
    fn check(&self) -> Result<u64> {
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
            "group_norm" => self.group_norm(x, case.attrs["num_groups"].as_u64()),
            "instance_norm" => self.group_norm(x, None),
            "layer_norm" if case.attrs["normalized_shape"].as_array().map(Vec::len) == Some(1) => {
                let (weight, bias) = (self.parameter("weight"), self.parameter("bias"));
                self.compare(x.layer_norm(weight, bias, self.epsilon()))
            }
            "interpolate2d" => self.interpolate(x),
            "mse_loss" => self.compare(mse_loss(x, target(), reduction)),
            "l1_loss" => self.compare(l1_loss(x, target(), reduction)),
            "huber_loss" => {
                let delta = case.attrs["delta"].as_f64().unwrap_or(1.0);
                self.compare(huber_loss(x, target(), delta, reduction))
            }
            op => Err(Error::other(format!("no {op} of this kind yet"))),
        }
    }

    fn epsilon(&self) -> f64 {
        self.case.attrs["eps"].as_f64().unwrap_or(1e-5)
    }

    /// As many groups as channels, if not told.
    fn group_norm(&self, x: ShardTensor<D>, groups: Option<u64>) -> Result<u64> {
        let groups = groups.map_or(x.dims()[1], |groups| groups as usize);
        let (weight, bias) = (self.parameter("weight"), self.parameter("bias"));
        self.compare(x.group_norm(groups, weight, bias, self.epsilon()))
    }

    fn interpolate(&self, x: ShardTensor<D>) -> Result<u64> {
        let from = x.dims();
        let twice = self.case.list::<2>("output_size") == [2 * from[2], 2 * from[3]];
        let aligned = self.case.flag("align_corners");
        match self.case.attrs["mode"].as_str() {
            Some("nearest") if twice => self.compare(x.upsample_nearest(2)),
            Some("bilinear") if twice && !aligned => {
                self.compare(x.upsample_bilinear([Boundary::Replicate; 2]))
            }
            _ => Err(Error::other("no interpolation of this kind yet")),
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

    fn conv<const N: usize>(&self, x: ShardTensor<D>) -> Result<u64> {
        let options = ConvOptions {
            stride: self.case.list("stride"),
            dilation: self.case.list("dilation"),
            padding: self.padding::<N>(),
            groups: self.case.attrs["groups"].as_u64().unwrap_or(1) as usize,
            activation: None,
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
    fn compare<const E: usize>(&self, y: ShardTensor<E>) -> Result<u64> {
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
        let cotangent = ShardTensor::distribute(cotangent, &self.mesh, resolved.layout())?;
        let gradients = (resolved.clone() * cotangent).sum().backward();

        let found = resolved.full_tensor(LocalGradient::Replicated).into_data();
        let mut bits = DefaultHasher::new();
        found.as_bytes().hash(&mut bits);
        let mut failures = vec![self.off("y", &found, expected)];
        for (name, gradient) in &*self.leaves.borrow() {
            let Some(expected) = self.case.tensors.get(&format!("grad_{name}")) else {
                continue;
            };
            failures.push(match gradient(&gradients) {
                Some(found) => {
                    found.as_bytes().hash(&mut bits);
                    self.off(name, &found, expected)
                }
                None => Some(format!("{name} has no gradient")),
            });
        }
        match failures
            .into_iter()
            .flatten()
            .reduce(|a, b| format!("{a}; {b}"))
        {
            Some(failures) => Err(Error::other(failures)),
            None => Ok(bits.finish()),
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
