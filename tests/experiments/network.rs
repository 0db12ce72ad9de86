//! Models at the poles.

use burn::tensor::{Device, Tensor, TensorData};
use halocline::experiment::ModelConfig;
use halocline::io::{Channels, Grid};
use halocline::prelude::*;

const ROWS: usize = 9;
const COLUMNS: usize = 12;

/// Returns the prediction, by row, of a model of a temperature and a wind, with the same parameters
/// each time.
fn predict(config: &ModelConfig, grid: &Grid, odd: &[&str]) -> Vec<Vec<f32>> {
    let names: Vec<String> = ["t2m", "u10"].map(String::from).into();
    let channels = Channels {
        inputs: names.clone(),
        forcings: Vec::new(),
        targets: names,
    };
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
fn winds_change_their_sign_across_a_pole() {
    let grid = Grid::with_poles(ROWS, COLUMNS).unwrap();
    for config in [
        ModelConfig::Cnn {
            width: 4,
            blocks: 0,
            kernel: 3,
        },
        ModelConfig::Unet {
            width: 4,
            levels: 0,
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
fn the_finest_level_has_the_poles_of_its_grid() {
    let config = ModelConfig::Unet {
        width: 4,
        levels: 1,
    };
    let grids = [Grid::with_poles, Grid::cell_centered];
    let [points, edges] = grids.map(|grid| predict(&config, &grid(ROWS, COLUMNS).unwrap(), &[]));
    assert_ne!(points[0], edges[0]);
}
