//! Models at the poles.

use burn::tensor::{Device, Tensor, TensorData};
use halocline::core::param_shards;
use halocline::experiment::ModelConfig;
use halocline::io::{Channels, Grid};
use halocline::models::parallel::init_parallel;
use halocline::ops::testing::difference;
use halocline::prelude::*;

const ROWS: usize = 9;
const COLUMNS: usize = 12;

/// Returns channels that are inputs and targets.
fn channels(names: &[&str]) -> Channels {
    let names: Vec<String> = names.iter().map(|name| (*name).into()).collect();
    Channels {
        inputs: names.clone(),
        forcings: Vec::new(),
        targets: names,
    }
}

/// Returns the prediction, by row, of a model of a temperature and a wind, with the same parameters
/// each time.
fn predict(config: &ModelConfig, grid: &Grid, odd: &[&str]) -> Vec<Vec<f32>> {
    let channels = channels(&["t2m", "u10"]);
    let odd: Vec<String> = odd.iter().map(|name| (*name).into()).collect();
    let found = Launcher::local(1).seed(3).collect(|world| {
        let make = |device: &Device| config.init(&channels, 1, grid, &odd, device);
        let model = world.init(|device| make(device).expect("it fits"))?;
        let cell = |index: usize| (index * index % 17) as f32 / 17.0;
        let values: Vec<f32> = (0..2 * ROWS * COLUMNS).map(cell).collect();
        let x = TensorData::new(values, [1, 2, ROWS, COLUMNS]);
        let y = Tensor::<4>::from_data(x, world.device()).apply(&model);
        let rows = (0..ROWS).map(|row| y.clone().narrow(2, row, 1).into_data());
        Ok(rows
            .map(|row| row.iter::<f32>().collect())
            .collect::<Vec<_>>())
    });
    found.unwrap().remove(0)
}

#[test]
fn sizes_that_do_not_fit_the_grid_are_errors() {
    let grid = Grid::with_poles(ROWS, COLUMNS).unwrap();
    let channels = channels(&["t2m"]);
    let make = |text: &str| {
        let config: ModelConfig = serde_json::from_str(text).unwrap();
        config.init(&channels, 1, &grid, &[], &Device::default())
    };
    for (text, told) in [
        (
            r#"{ "kind": "transformer" }"#,
            "model.kernel: [7, 7] on 5 x 6 patches; expected from 2 to 5 along latitude",
        ),
        (
            r#"{ "kind": "transformer", "kernel": [5, 7] }"#,
            "from 2 to 6 along longitude",
        ),
        (
            r#"{ "kind": "transformer", "kernel": [1, 3] }"#,
            "along latitude",
        ),
        (r#"{ "kind": "unet", "levels": 5 }"#, "model.levels: 5"),
        (r#"{ "kind": "fno", "modes": [10, 3] }"#, "model.modes"),
        (r#"{ "kind": "fno", "modes": [3, 8] }"#, "model.modes"),
        (r#"{ "kind": "cnn", "kernel": 19 }"#, "model.kernel: 19"),
        (
            r#"{ "kind": "graph", "mesh_level": 10 }"#,
            "model.mesh_level: got 10, expected a level from 1 to 9",
        ),
        (
            r#"{ "kind": "graph", "mesh_level": 4 }"#,
            "cells for a grid of 108 cells, expected at most 1, because",
        ),
        (
            r#"{ "kind": "graph", "mesh_level": 1, "layers": 0 }"#,
            "model.layers: got 0, expected at least 1",
        ),
        (
            r#"{ "kind": "cnn", "width": 0 }"#,
            "model.width: got 0, expected at least 1 channel",
        ),
        (
            r#"{ "kind": "sfno", "blocks": 1000000000000 }"#,
            "model.blocks: got 1000000000000, expected at most 1024",
        ),
        (
            r#"{ "kind": "sfno", "scale_factor": 0 }"#,
            "model.scale_factor: got 0, expected 1 to 4",
        ),
        (
            r#"{ "kind": "sfno", "scale_factor": 5 }"#,
            "model.scale_factor: got 5, expected 1 to 4",
        ),
    ] {
        let error = make(text).unwrap_err().to_string();
        assert!(error.contains(told), "{told} in {error}");
    }
    // Without neighborhoods there is no kernel.
    let dense = r#"{ "kind": "transformer", "blocks": 1, "dense_blocks": 1 }"#;
    assert!(make(dense).is_ok());
}

#[test]
fn kinds_for_a_row_of_cells_are_named() {
    let grid = Grid::new(
        vec![10.0],
        (0..12).map(|cell| 30.0 * f64::from(cell)).collect(),
    )
    .unwrap();
    let channels = channels(&["t2m"]);
    let device = Device::default();
    let make = |text: &str| {
        let config: ModelConfig = serde_json::from_str(text).unwrap();
        config.init(&channels, 1, &grid, &[], &device)
    };
    let error = make(r#"{ "kind": "transformer" }"#)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("a grid of 1 x 12; expected at least 2 cells along latitude"),
        "{error}"
    );
    for text in [
        r#"{ "kind": "sfno" }"#,
        r#"{ "kind": "unet", "levels": 1 }"#,
    ] {
        let error = make(text).unwrap_err().to_string();
        assert!(error.contains("model.kind graph"), "{error}");
    }
    for text in [
        r#"{ "kind": "cnn" }"#,
        r#"{ "kind": "fno", "modes": [1, 3] }"#,
        r#"{ "kind": "unet", "levels": 0 }"#,
    ] {
        let model = make(text).unwrap();
        let x = Tensor::<4>::ones([1, 1, 1, 12], &device);
        assert_eq!(x.apply(&model).dims(), [1, 1, 1, 12], "{text}");
    }
}

/// Before training, a target is close to its input, or to zero without one.
#[test]
fn targets_need_not_be_inputs() {
    let grid = Grid::with_poles(ROWS, COLUMNS).unwrap();
    let names = |names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_string());
        names.collect::<Vec<_>>()
    };
    let channels = Channels {
        inputs: names(&["t2m", "u10"]),
        forcings: Vec::new(),
        targets: names(&["tp", "u10", "t2m"]),
    };
    let device = Device::default();
    for text in [
        r#"{ "kind": "cnn", "width": 4, "blocks": 1 }"#,
        r#"{ "kind": "transformer", "d_model": 8, "heads": 1, "blocks": 1, "kernel": [3, 3] }"#,
    ] {
        let config: ModelConfig = serde_json::from_str(text).unwrap();
        let model = config.init(&channels, 1, &grid, &[], &device).unwrap();
        let ones = Tensor::<4>::ones([1, 1, ROWS, COLUMNS], &device);
        let y = Tensor::cat(vec![ones.clone() * 8.0, ones * -8.0], 1).apply(&model);
        assert_eq!(y.dims(), [1, 3, ROWS, COLUMNS], "{text}");
        for (channel, expected) in [0.0, -8.0, 8.0].into_iter().enumerate() {
            let found = y.clone().narrow(1, channel, 1).mean().into_scalar::<f32>();
            assert!((found - expected).abs() < 4.0, "{text}: {found}");
        }
    }
}

#[test]
fn winds_change_their_sign_across_a_pole() {
    let grid = Grid::with_poles(ROWS, COLUMNS).unwrap();
    for config in [
        ModelConfig::Cnn {
            width: 4,
            blocks: 0,
            kernel: 3,
            recompute: false,
            mask: None,
        },
        ModelConfig::Unet {
            width: 4,
            levels: 0,
            recompute: false,
            mask: None,
        },
    ] {
        let [even, odd] = [&[][..], &["u10"]].map(|odd| predict(&config, &grid, odd));
        // The poles are two convolutions away.
        for row in 0..ROWS {
            let is_near = row < 2 || row + 2 >= ROWS;
            assert_eq!(even[row] != odd[row], is_near, "{config:?}, row {row}");
        }
    }
}

#[test]
fn plans_of_all_kinds_give_what_one_rank_gives() {
    let grid = Grid::with_poles(ROWS, COLUMNS).unwrap();
    let channels = channels(&["t2m", "u10"]);
    for text in [
        r#"{ "kind": "cnn", "width": 4, "blocks": 1 }"#,
        r#"{ "kind": "unet", "width": 4, "levels": 1 }"#,
        r#"{ "kind": "transformer", "d_model": 8, "heads": 2, "blocks": 2, "dense_blocks": 1, "kernel": [3, 3] }"#,
        r#"{ "kind": "fno", "width": 4, "blocks": 2, "modes": [3, 3] }"#,
        r#"{ "kind": "sfno", "width": 4, "blocks": 1 }"#,
        r#"{ "kind": "sfno", "width": 4, "blocks": 2, "scale_factor": 2 }"#,
        r#"{ "kind": "graph", "width": 4, "layers": 1, "mesh_level": 1 }"#,
    ] {
        let config: ModelConfig = serde_json::from_str(text).unwrap();
        let plan = config.tensor_parallel("tensor");
        let run = |ranks: usize| {
            let found = Launcher::local(ranks).seed(3).collect(|world| {
                let mesh = world.mesh([("tensor", ranks)])?;
                let make = |device: &Device| config.init(&channels, 1, &grid, &[], device);
                let model = init_parallel(&world, &mesh, &plan, |device| {
                    make(device).expect("it fits")
                })?;
                assert!(ranks == 1 || !param_shards(&model).is_empty(), "{text}");
                let (normal, key) = (Distribution::Normal(0.0, 1.0), RandomKey::new(3, "x"));
                let shape = [1, 2, ROWS, COLUMNS];
                let x = ShardTensor::<4>::random(shape, normal, key, &mesh, &[Replicate])?;
                Ok(x.apply(&model).full_tensor().into_data())
            });
            found.unwrap()
        };
        let expected = run(1).remove(0);
        for found in run(2) {
            let off = difference(&found, &expected);
            assert!(off < 1e-5, "{text}: {off:e}");
        }
    }
}

#[test]
fn the_finest_level_has_the_poles_of_its_grid() {
    let config = ModelConfig::Unet {
        width: 4,
        levels: 1,
        recompute: false,
        mask: None,
    };
    let grids = [Grid::with_poles, Grid::cell_centered];
    let [points, edges] = grids.map(|grid| predict(&config, &grid(ROWS, COLUMNS).unwrap(), &[]));
    assert_ne!(points[0], edges[0]);
}

#[test]
fn blocks_of_all_kinds_may_be_recomputed() {
    let grid = Grid::with_poles(ROWS, COLUMNS).unwrap();
    let channels = channels(&["t2m"]);
    for kind in [
        r#""cnn""#,
        r#""unet""#,
        r#""transformer", "kernel": [3, 3]"#,
        r#""fno", "modes": [3, 3]"#,
        r#""sfno""#,
        r#""graph", "mesh_level": 1"#,
    ] {
        for recompute in [false, true] {
            let text = format!(r#"{{ "kind": {kind}, "recompute": {recompute} }}"#);
            let config: ModelConfig = serde_json::from_str(&text).unwrap();
            let device = Device::default();
            let model = config.init(&channels, 1, &grid, &[], &device).unwrap();
            let expected = format!("recompute: {recompute}");
            assert!(format!("{model:?}").contains(&expected), "{text}");
        }
    }
}
