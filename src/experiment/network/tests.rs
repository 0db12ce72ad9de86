//! Tests of models by their configurations.

use burn::tensor::{Device, Tensor};
use halocline_io::{Channels, Grid};
use halocline_ops::prelude::*;

use super::ModelConfig;

#[test]
fn the_ends_of_a_row_of_unstructured_cells_are_no_neighbours() {
    let device = Device::default();
    let names = vec!["t2m".to_string()];
    let channels = Channels {
        inputs: names.clone(),
        forcings: vec![],
        targets: names,
    };
    let positions: Vec<f64> = (0..40).map(f64::from).collect();
    let even = positions.iter().map(|cell| 9.0 * cell).collect();
    let grids = [
        Grid::unstructured(positions.clone(), positions),
        Grid::new(vec![0.0], even), // cells without positions
    ];
    let cnn = ModelConfig::Cnn {
        width: 4,
        blocks: 1,
        kernel: 3,
        recompute: false,
        mask: None,
    };
    let unet = ModelConfig::Unet {
        width: 4,
        levels: 0,
        recompute: false,
        mask: None,
    };
    for grid in grids {
        let grid = grid.unwrap();
        for config in [&cnn, &unet] {
            let model = config.init(&channels, 1, &grid, &[], &device).unwrap();
            let first = |last: f64| {
                let ones = Tensor::<4>::ones([1, 1, 1, 39], &device);
                let last = Tensor::full([1, 1, 1, 1], last, &device);
                let y = Tensor::cat(vec![ones, last], 3).apply(&model);
                y.narrow(3, 0, 1).into_data()
            };
            first(9.0).assert_eq(&first(1.0), true);
        }
    }
}

#[test]
fn cells_beside_the_mask_reach_no_other_cell() {
    let device = Device::default();
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_string()).collect();
    let channels = Channels {
        inputs: names(&["sst", "u"]),
        forcings: names(&["depth", "mask:sst"]),
        targets: names(&["sst", "u"]),
    };
    let mask = || Some("sst".to_string());
    let cnn = ModelConfig::Cnn {
        width: 4,
        blocks: 1,
        kernel: 3,
        recompute: false,
        mask: mask(),
    };
    let unet = ModelConfig::Unet {
        width: 4,
        levels: 2,
        recompute: false,
        mask: mask(),
    };
    let grid = Grid::with_poles(9, 8).unwrap();
    for config in [cnn, unet] {
        let model = config.init(&channels, 2, &grid, &[], &device).unwrap();
        let sea = |land: f64| {
            let field = |channels: usize, columns: usize, value: f64| {
                Tensor::<4>::full([1, channels, 9, columns], value, &device)
            };
            // Two times of two inputs, a forcing, and the mask.
            let fields = Tensor::cat(vec![field(5, 6, 0.7), field(5, 2, land)], 3);
            let mask = Tensor::cat(vec![field(1, 6, 1.0), field(1, 2, 0.0)], 3);
            let y = Tensor::cat(vec![fields, mask], 1).apply(&model);
            y.narrow(3, 0, 6)
        };
        sea(9.0).into_data().assert_eq(&sea(0.0).into_data(), true);
        assert!((sea(0.0) - 0.7).abs().max().into_scalar::<f32>() > 0.0);
        let without = Channels {
            forcings: Vec::new(),
            ..channels.clone()
        };
        let error = config.init(&without, 2, &grid, &[], &device).unwrap_err();
        let told =
            "model.mask: sst, and the forcings are []; expected \"mask:sst\" among data.forcings";
        assert_eq!(error.to_string(), told);
    }
}

#[test]
fn masks_are_settings_of_convolutions() {
    let read = |text: &str| serde_json::from_str::<ModelConfig>(text);
    let found = read(r#"{ "kind": "unet", "mask": "sst" }"#).unwrap();
    assert!(matches!(&found, ModelConfig::Unet { mask: Some(name), .. } if name == "sst"));
    assert!(read(r#"{ "kind": "fno", "modes": [2, 2], "mask": "sst" }"#).is_err());
    let plain = read(r#"{ "kind": "cnn" }"#).unwrap();
    assert!(!serde_json::to_string(&plain).unwrap().contains("mask"));
    let both = read(r#"{ "kind": "unet", "mask": "sst", "recompute": true }"#).unwrap();
    let channels = Channels {
        inputs: vec!["sst".into()],
        forcings: vec!["mask:sst".into()],
        targets: vec!["sst".into()],
    };
    let grid = Grid::with_poles(9, 8).unwrap();
    let error = both.init(&channels, 1, &grid, &[], &Device::default());
    let error = error.unwrap_err().to_string();
    assert_eq!(
        error,
        "model.recompute: true with model.mask; expected one of them"
    );
}
