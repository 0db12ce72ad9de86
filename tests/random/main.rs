//! Random combinations of operator, options, extents, mesh and placements, compared with one
//! device.
//!
//! A case follows from its number: `HALOCLINE_CASE=17 cargo test --test random` runs the one that a
//! failure names, and `HALOCLINE_CASES=2000` that many. `HALOCLINE_WRITE_CASES=FOLDER` writes them
//! as golden cases without results; `tests/golden/generate.py fill FOLDER` adds the results, and
//! the example `golden` runs them.

mod bytes;
mod cases;
mod draw;
#[path = "../../examples/golden/case.rs"]
#[allow(dead_code, reason = "only its reading of options is used here")]
mod file;

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::DType;
use halocline::ops::golden::{Golden, NamedGradients};
use halocline::ops::operators;
use halocline::ops::testing::{Sharding, normal};
use halocline::prelude::*;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

use cases::{Case, draw_case};
use draw::Draw;

/// Output of an operator on one rank: the result, and gradients by name.
type Found = (TensorData, NamedGradients);

#[test]
fn random_combinations_give_what_one_device_gives() {
    let number = |name: &str| {
        let text = std::env::var(name).ok()?;
        Some(
            text.parse::<u64>()
                .unwrap_or_else(|_| panic!("{name}={text}: expected a number")),
        )
    };
    let cases = match number("HALOCLINE_CASE") {
        Some(case) => case..case + 1,
        None => 0..number("HALOCLINE_CASES").unwrap_or(200),
    };
    let folder = std::env::var("HALOCLINE_WRITE_CASES").ok();
    let operators: Vec<&Golden> = operators().collect();
    let (mut refused, mut failures) = (0, Vec::new());
    for number in cases.clone() {
        let golden = operators[number as usize % operators.len()];
        let mut draw = Draw::new(number);
        let case = draw_case(golden.name, &mut draw)
            .unwrap_or_else(|| panic!("no random arguments of {}", golden.name));
        let sharding = draw.sharding(golden, &case.arguments);
        if let Some(folder) = &folder {
            write(Path::new(folder), golden.name, number, &case);
        }
        match check(golden, &case, &sharding, draw.coin()) {
            Ok(()) => {}
            Err(why) if why.contains("no rule for") => refused += 1,
            Err(why) => {
                let shapes = case.arguments.shapes();
                let Golden { name, .. } = golden;
                failures.push(format!(
                    "HALOCLINE_CASE={number} cargo test --test random # {name} {} of {shapes:?} on {sharding:?}: {why}",
                    case.options
                ));
            }
        }
    }
    let count = cases.end - cases.start;
    println!("{count} cases, of which {refused} have no rule");
    assert!(
        failures.is_empty(),
        "{} failed:\n{}",
        failures.len(),
        failures.join("\n")
    );
    assert!(
        refused * 20 < count.max(20),
        "{refused} of {count} cases have no rule"
    );
}

/// Compares shards with one device, in single or double precision.
fn check(
    golden: &Golden,
    case: &Case,
    sharding: &Sharding,
    double: bool,
) -> std::result::Result<(), String> {
    let (dtype, tolerance) = if double {
        (DType::F64, 1e-9)
    } else {
        (DType::F32, 3e-5)
    };
    let arguments = case.arguments.clone().cast(dtype);
    let run = |sharding: &Sharding| -> Result<Vec<Found>> {
        Launcher::local(sharding.ranks()).collect(|world| {
            let mesh = world.mesh_of(&sharding.axes)?;
            let cotangent = |shape: &[usize]| normal(shape, "cotangent", 0).convert_dtype(dtype);
            golden.run_on(&mesh, sharding, &arguments, cotangent)
        })
    };
    let whole = Sharding {
        axes: vec![("a", 1)],
        placements: vec![Replicate],
        extents: Vec::new(),
    };
    let expected = run(&whole).map_err(|error| format!("on one device: {error}"))?;
    let (expected, expected_gradients) = &expected[0];
    for (found, gradients) in run(sharding).map_err(|error| error.to_string())? {
        compare("the result", Some(&found), Some(expected), tolerance)?;
        let [count, expected_count] = [gradients.len(), expected_gradients.len()];
        if count != expected_count {
            return Err(format!("{count} gradients, expected {expected_count}"));
        }
        for ((name, found), (_, expected)) in gradients.iter().zip(expected_gradients) {
            let name = format!("the gradient of {name}");
            compare(&name, found.as_ref(), expected.as_ref(), tolerance)?;
        }
    }
    Ok(())
}

/// `|a − b| ≤ tolerance · max(1, |b|)`, with the largest `|b|` of the tensor.
fn compare(
    name: &str,
    found: Option<&TensorData>,
    expected: Option<&TensorData>,
    tolerance: f64,
) -> std::result::Result<(), String> {
    let (Some(found), Some(expected)) = (found, expected) else {
        return if found.is_some() == expected.is_some() {
            Ok(())
        } else {
            Err(format!("{name} is there on one device or on shards only"))
        };
    };
    if found.shape() != expected.shape() {
        return Err(format!(
            "{name} has shape {:?}, expected {:?}",
            found.shape(),
            expected.shape()
        ));
    }
    let values = || found.iter::<f64>().zip(expected.iter::<f64>());
    let largest = values().fold(1.0, |largest: f64, (_, b)| largest.max(b.abs()));
    let alike = |(a, b): (f64, f64)| (a - b).abs() <= tolerance * largest || a == b;
    match values().position(|pair| !alike(pair)) {
        None => Ok(()),
        Some(cell) => {
            let (a, b) = values().nth(cell).expect("a cell");
            Err(format!("{name} is {a:e} in cell {cell}, expected {b:e}"))
        }
    }
}

/// Writes a case in the format of golden cases, without expected results.
fn write(folder: &Path, operator: &str, number: u64, case: &Case) {
    let arguments = &case.arguments;
    let inputs = arguments.inputs.iter().map(|(name, data)| (name, data));
    let all: Vec<_> = inputs.chain(&arguments.parameters).collect();
    let bytes = |data: &TensorData| {
        if data.dtype().is_float() {
            (Dtype::F32, data.clone().convert_dtype(DType::F32))
        } else {
            (Dtype::I64, data.clone().convert_dtype(DType::I64))
        }
    };
    let tensors: Vec<_> = all
        .iter()
        .map(|(name, data)| (*name, bytes(data)))
        .collect();
    let views = tensors.iter().map(|(name, (dtype, data))| {
        let view = TensorView::new(*dtype, data.shape().to_vec(), data.as_bytes());
        (name.as_str(), view.expect("bytes of this shape"))
    });
    let names: Vec<&String> = arguments.inputs.iter().map(|(name, _)| name).collect();
    let mut parameters: Vec<&String> = arguments.parameters.keys().collect();
    parameters.sort();
    let metadata = [
        ("op", operator.to_string()),
        ("attrs", case.options.to_string()),
        ("inputs", serde_json::json!(names).to_string()),
        ("params", serde_json::json!(parameters).to_string()),
        ("rtol", "0.0001".to_string()),
        ("atol", "1e-05".to_string()),
    ];
    let metadata: HashMap<String, String> = metadata.map(|(key, text)| (key.into(), text)).into();
    std::fs::create_dir_all(folder).expect("a folder for cases");
    let file = folder.join(format!("{operator}_{number:05}.safetensors"));
    serialize_to_file(views, Some(metadata), &file).expect("a file for a case");
}
