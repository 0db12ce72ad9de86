//! Runs golden cases on shards:
//! `cargo run --release --example golden -- FOLDER [--op NAME] [--except NAME,…] [--ranks 1,2,3,4]
//! [--dtype f32] [--rtol 0]`
//!
//! A case holds inputs, parameters, a cotangent, and the result and gradients that one device
//! computed in f64. Every case runs on every mesh and sharding, and each operator prints one line.
//! Under `mpirun`, the shardings are those for the size of its world. The last line is a hash of
//! the bits of all results and gradients: engines with the same bits print the same hash.

mod case;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::ExitCode;

use burn::tensor::DType;
use clap::{Parser, ValueEnum};
use halocline::ops::testing::{Sharding, difference};
use halocline::prelude::*;

use case::Case;

/// Runs golden cases on shards.
#[derive(Parser)]
pub(crate) struct Arguments {
    /// Folder of cases, `<op>_<nn>.safetensors`.
    folder: PathBuf,
    /// Only this operator.
    #[arg(long)]
    op: Option<String>,
    /// All but these operators.
    #[arg(long, value_delimiter = ',')]
    except: Vec<String>,
    /// Numbers of ranks to run on.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4")]
    ranks: Vec<usize>,
    /// Dtype of the computation.
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Float,
    /// Least tolerance, relative to the largest magnitude, for devices that round operands.
    #[arg(long, default_value = "0")]
    rtol: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Float {
    F32,
    F64,
    F16,
    Bf16,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("golden: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs all cases of a folder and returns how many failed.
pub(crate) fn run(arguments: &Arguments) -> Result<usize> {
    let Arguments {
        folder,
        op,
        except,
        ranks,
        dtype,
        rtol,
    } = arguments;
    let dtype = match dtype {
        Float::F32 => DType::F32,
        Float::F64 => DType::F64,
        Float::F16 => DType::F16,
        Float::Bf16 => DType::BF16,
    };
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(|e| Error::other(format!("{}: {e}", folder.display())))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    let mut cases = Vec::new();
    for file in files {
        let mut case = Case::read(&file)?;
        if op.as_ref().is_none_or(|op| case.op == *op) && !except.contains(&case.op) {
            case = case.cast(dtype)?;
            case.rtol = case.rtol.max(*rtol);
            cases.push(case);
        }
    }
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

/// Outcomes of cases.
#[derive(Default)]
struct Report {
    /// Number of passes, and reasons of failures.
    by_operator: BTreeMap<String, (usize, Vec<String>)>,
    /// Hash of the bits of passed cases, in order.
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
    /// Applies the operator on shards, and compares result and gradients. Returns a hash of all
    /// their bits.
    fn run(&self, world: &World, sharding: &Sharding) -> Result<u64> {
        let mesh = world.mesh_of(&sharding.axes)?;
        let cotangent = |_: &[usize]| self.expected["gy"].clone();
        let operator = self.operator()?;
        let (found, gradients) = operator.run_on(&mesh, sharding, &self.arguments, cotangent)?;
        let expected = &self.expected["y"];
        let mut bits = DefaultHasher::new();
        found.as_bytes().hash(&mut bits);
        let mut failures = vec![self.off("y", &found, expected)];
        for (name, gradient) in gradients {
            let Some(expected) = self.expected.get(&format!("grad_{name}")) else {
                continue;
            };
            failures.push(match gradient {
                Some(found) => {
                    found.as_bytes().hash(&mut bits);
                    self.off(&name, &found, expected)
                }
                None => Some(format!("{name} has no gradient")),
            });
        }
        let failures = failures.into_iter().flatten();
        match failures.reduce(|a, b| format!("{a}; {b}")) {
            Some(failures) => Err(Error::other(failures)),
            None => Ok(bits.finish()),
        }
    }

    /// Describes an error in a result unless `|a − b| ≤ atol + rtol·max|b|` holds.
    fn off(&self, name: &str, found: &TensorData, expected: &TensorData) -> Option<String> {
        let found = found.clone().convert_dtype(DType::F32);
        let largest = expected
            .iter::<f64>()
            .fold(0.0, |max: f64, value| max.max(value.abs()));
        let allowed = self.rtol + self.atol / largest.max(f64::MIN_POSITIVE);
        let off = difference(&found, expected);
        (off > allowed).then(|| format!("{name} is off by {off:.1e} of its largest magnitude"))
    }
}
