//! Prices of plans, and the plans chosen by price.

use burn::module::Module;
use burn::nn::transformer::TransformerEncoderConfig;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;

use super::mesh;
use crate::parallel::{
    Link, Machine, Plan, Price, Store, Style, Workload, linear_pairs, resolve, transformer_encoder,
};

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct Model {
    enter: Linear,
    blocks: Vec<Mlp>,
}

fn linear(inputs: usize, outputs: usize) -> Linear {
    LinearConfig::new(inputs, outputs)
        .with_bias(false)
        .init(&Device::default())
}

fn mlp(width: usize, hidden: usize) -> Mlp {
    Mlp {
        up: linear(width, hidden),
        down: linear(hidden, width),
    }
}

const LINK: Link = Link {
    latency: 1e-6,
    bandwidth: 1e9,
};

fn machine() -> Machine {
    Machine::new(1e10, LINK)
}

fn columns_and_rows() -> Plan {
    Plan::default()
        .with_layer("up", Style::colwise("tensor"))
        .with_layer("down", Style::rowwise("tensor"))
}

fn price(axes: &[(&str, usize)], plan: &Plan, workload: &Workload) -> Price {
    let resolved = resolve(&mlp(100, 200), &mesh(axes), plan).unwrap();
    resolved.price(workload, &machine()).unwrap()
}

fn near(found: f64, expected: f64) {
    assert!(
        (found - expected).abs() < 1e-9 * expected,
        "{found} for {expected}"
    );
}

#[test]
fn prices_are_those_of_the_formulas() {
    let workload = Workload::new(10, &["data"]);
    let (elements, bytes) = (2.0 * 100.0 * 200.0, 4.0);
    let one = price(&[("data", 1)], &Plan::default(), &workload);
    near(one.compute, 6.0 * elements * 10.0 / 1e10);
    assert_eq!(one.communication, 0.0);
    near(one.held, 4.0 * elements * bytes); // with gradients and two states
    near(one.used, 10.0 * (100.0 + 200.0) * bytes); // inputs of both layers

    // Samples over two ranks: half the rows, and a sum of all gradients.
    let data = price(&[("data", 2)], &Plan::default(), &workload);
    near(data.compute, one.compute / 2.0);
    near(data.communication, elements * bytes / 1e9);
    near(data.held, one.held);

    // Features over two ranks: a sum of the result in the forward pass, and of the input in the
    // backward pass.
    let axes = [("data", 1), ("tensor", 2)];
    let tensor = price(&axes, &columns_and_rows(), &workload);
    near(tensor.compute, one.compute / 2.0);
    let sum = LINK.all_reduce(2, 10.0 * 100.0 * bytes);
    near(tensor.communication, 2.0 * sum);
    near(tensor.held, one.held / 2.0);
    near(tensor.used, 10.0 * (100.0 + 100.0) * bytes);

    // Stored over two ranks: gathered twice, with gradients scattered, separately for each
    // parameter.
    let stored = Plan::default().with_store(Store::new("**", "data"));
    let stored = price(&[("data", 2)], &stored, &workload);
    near(
        stored.communication,
        2.0 * 3.0 * LINK.gather(2, elements / 2.0 * bytes),
    );
    near(stored.held, one.held / 2.0);
    near(stored.used, 5.0 * 300.0 * bytes + elements / 2.0 * bytes); // one layer gathered
}

/// The optimizer updates the elements that a rank holds: each element read or written takes a
/// fourth of the time.
#[test]
fn updates_are_priced() {
    let machine = Machine {
        update: 4e-9,
        ..machine()
    };
    let (elements, mesh) = (2.0 * 100.0 * 200.0, mesh(&[("data", 2)]));
    let updates = |plan: &Plan, states: usize| {
        let resolved = resolve(&mlp(100, 200), &mesh, plan).unwrap();
        let workload = Workload::new(10, &["data"]).with_states(states);
        let compute = |machine| resolved.price(&workload, machine).unwrap().compute;
        compute(&machine)
            - compute(&Machine {
                update: 0.0,
                ..machine.clone()
            })
    };
    near(updates(&Plan::default(), 2), elements * 4e-9);
    near(updates(&Plan::default(), 0), elements * 2e-9);
    let stored = Plan::default().with_store(Store::new("**", "data"));
    near(updates(&stored, 2), elements / 2.0 * 4e-9);
}

/// One exchange over all storage axes, and three layers that share their input or not.
#[test]
fn storage_over_two_axes_is_one_gather() {
    let workload = Workload::new(10, &["data", "lat"]);
    let plan = Plan::default()
        .with_store(Store::new("up.*", "data"))
        .with_store(Store::new("up.*", "lat"));
    let found = price(&[("data", 2), ("lat", 2)], &plan, &workload);
    let bytes = 100.0 * 200.0 * 4.0;
    let down = 2.0 * bytes / 1e9; // a sum over each axis
    near(found.communication, 3.0 * LINK.gather(4, bytes) + down);
}

#[test]
fn plans_that_store_parameters_themselves_are_candidates() {
    let part = Plan::default().with_store(Store::new("up.*", "data"));
    let (model, mesh) = (mlp(200, 300), mesh(&[("data", 2)]));
    let workload = Workload::new(8, &["data"]);
    let found = Plan::candidates(&model, &mesh, &[part], &workload, &machine());
    // No storage, gathered once or again; and the part alone.
    assert_eq!(found.unwrap().len(), 3 + 1);
}

#[test]
fn rows_of_layers_differ() {
    let few = Workload::new(10, &[]).with_rows("down", 1);
    let found = price(&[("data", 1)], &Plan::default(), &few);
    near(found.compute, 6.0 * 100.0 * 200.0 * 11.0 / 1e10);
    let resolved = resolve(&mlp(2, 2), &mesh(&[("data", 1)]), &Plan::default()).unwrap();
    for (pattern, part) in [("[", "pattern"), ("dwn", "near it: down")] {
        let workload = Workload::new(1, &[]).with_rows(pattern, 1);
        let error = resolved.price(&workload, &machine()).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn rows_over_an_axis_that_the_mesh_lacks_are_refused() {
    let (model, mesh) = (mlp(2, 2), mesh(&[("data", 2)]));
    let workload = Workload::new(8, &["date"]);
    let error = Plan::automatic(&model, &mesh, &[], &workload, &machine()).unwrap_err();
    let expected = "rows over an axis \"date\"; expected axes among [\"data\"]";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn the_fastest_plan_depends_on_the_work_and_on_memory() {
    let model = mlp(256, 512);
    let mesh = mesh(&[("data", 2), ("tensor", 2)]);
    let parts = linear_pairs(&model, "tensor");
    let chosen = |workload: &Workload, link: Link| {
        let machine = machine().with_link("tensor", link);
        Plan::automatic(&model, &mesh, &parts, workload, &machine)
    };
    let fast = Link {
        latency: 0.0,
        bandwidth: 1e12,
    };
    let slow = Link {
        latency: 1.0,
        bandwidth: 1e3,
    };
    let workload = Workload::new(64, &["data"]);
    assert_eq!(chosen(&workload, fast).unwrap().plan.layers.len(), 2);
    let whole = chosen(&workload, slow).unwrap();
    assert_eq!(whole.plan, Plan::default());
    // Everything fits, except a budget below what a rank holds.
    let held = whole.price.bytes() as u64;
    let stored = chosen(&workload.clone().with_budget(held - 1), slow).unwrap();
    assert_eq!(stored.plan.stores.len(), 1, "{:?}", stored.plan);
    let error = chosen(&workload.with_budget(1000), slow)
        .unwrap_err()
        .to_string();
    assert!(error.contains("1000 bytes; the least is"), "{error}");
}

#[test]
fn parts_that_speak_of_one_layer_are_alternatives() {
    let model = mlp(16, 32);
    let parts = [
        columns_and_rows(),
        Plan::default().with_layer("up", Style::colwise("tensor")),
    ];
    let workload = Workload::new(8, &["data"]);
    let mesh = mesh(&[("data", 1), ("tensor", 2)]);
    let found = Plan::candidates(&model, &mesh, &parts, &workload, &machine()).unwrap();
    assert_eq!(found.len(), 3); // neither part, and each
    assert!(found.is_sorted_by(|a, b| a.price.seconds() <= b.price.seconds()));
    let typo = [Plan::default().with_layer("upp", Style::colwise("tensor"))];
    let error = Plan::candidates(&model, &mesh, &typo, &workload, &machine());
    assert!(error.unwrap_err().to_string().contains("near it: up"));
}

#[test]
fn pairs_are_found_by_type() {
    let model = Model {
        enter: linear(4, 8),
        blocks: vec![mlp(8, 16), mlp(8, 16)],
    };
    let plans = linear_pairs(&model, "tensor");
    let paths = |plan: &Plan| {
        plan.layers
            .iter()
            .map(|entry| entry.path.clone())
            .collect::<Vec<_>>()
    };
    let expected = [
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.up",
        "blocks.1.down",
    ];
    assert_eq!(plans.len(), 1);
    assert_eq!(paths(&plans[0]), expected);
    // A narrowing second layer is no pair, nor are layers of mismatched widths.
    assert!(linear_pairs(&mlp(16, 8), "tensor").is_empty());
    let other = Mlp {
        up: linear(8, 16),
        down: linear(8, 16),
    };
    assert!(linear_pairs(&other, "tensor").is_empty());
}

#[test]
fn a_model_larger_than_memory_is_priced() {
    let config = TransformerEncoderConfig::new(1 << 17, 1 << 19, 64, 6);
    let model = config.init(&Device::default());
    let mesh = mesh(&[("tensor", 64), ("data", 64)]);
    let workload = Workload::new(64 * 4096, &["data"]).with_budget(80_000_000_000);
    let parts = transformer_encoder(&config, "", "tensor");
    let chosen = Plan::automatic(&model, &mesh, &parts, &workload, &machine()).unwrap();
    assert!(chosen.price.bytes() < 80e9, "{}", chosen.price);
    assert!(!chosen.plan.layers.is_empty());
}

#[test]
fn machines_are_files() {
    let machine = machine().with_link("tensor", LINK);
    let text = toml::to_string(&machine).unwrap();
    assert_eq!(toml::from_str::<Machine>(&text).unwrap(), machine);
}
