//! Position embeddings: vectors that encode where a cell is.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor, TensorData};
use halocline_ops::prelude::*;

use super::rotary::constant;

/// Configuration of [`LearnedPosition2d`], which has an example.
#[derive(Config, Debug)]
pub struct LearnedPosition2dConfig {
    /// Number of cells in both dims.
    pub size: [usize; 2],
    /// Channels of a cell.
    pub d_model: usize,
}

/// Learned position embedding: one vector per cell, added to the field.
///
/// # Shapes
/// `[batch, lat, lon, d_model]` → the same, of the configured size.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::LearnedPosition2dConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let position = LearnedPosition2dConfig::new([4, 6], 8).init(&device);
/// let y = Tensor::<4>::ones([2, 4, 6, 8], &device).apply(&position);
/// assert_eq!(y.dims(), [2, 4, 6, 8]);
/// ```
#[derive(Module, Debug)]
pub struct LearnedPosition2d {
    /// `[1, lat, lon, d_model]`.
    pub vectors: Param<Tensor<4>>,
}

impl LearnedPosition2dConfig {
    /// Initializes the layer.
    pub fn init(&self, device: &Device) -> LearnedPosition2d {
        let [lat, lon] = self.size;
        let normal = Initializer::Normal {
            mean: 0.0,
            std: 0.02,
        };
        LearnedPosition2d {
            vectors: normal.init([1, lat, lon, self.d_model], device),
        }
    }
}

impl<X: Field<4>> Layer<X> for LearnedPosition2d {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let vectors = x.distribute_operand(&self.vectors);
        x + vectors
    }
}

/// Sinusoidal position embedding (A. Vaswani et al., 2017), added to the field. Half of the
/// channels encode the position in the first dim, half in the second, with angles per cell that
/// decrease from 1 towards `1 / base`.
///
/// # Shapes
/// `[batch, lat, lon, d_model]` → the same; `d_model` is a multiple of 4.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_models::SinusoidalPosition2d;
/// use halocline_ops::Apply;
///
/// let x = Tensor::<4>::zeros([1, 4, 6, 8], &Default::default());
/// let y = x.apply(&SinusoidalPosition2d { base: 100.0 }).square().sum_dim(3).into_data();
/// assert!(y.iter::<f32>().all(|length| (length - 4.0).abs() < 1e-5));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SinusoidalPosition2d {
    /// Inverse of the limit of the smallest angles.
    pub base: f64,
}

impl<X: Field<4>> Layer<X> for SinusoidalPosition2d {
    type Output = X;

    /// # Panics
    /// Panics if the channels are not a multiple of 4.
    fn forward(&self, x: X) -> X {
        let [_, lat, lon, channels] = x.dims();
        assert!(
            channels.is_multiple_of(4),
            "SinusoidalPosition2d: {channels} channels, expected a multiple of 4"
        );
        let quarter = channels / 4;
        let waves = |size: usize, first: usize| {
            let values = (0..size).flat_map(move |cell| {
                let mut row = vec![0.0; channels];
                for pair in 0..quarter {
                    let angle = cell as f64 * self.base.powf(-(pair as f64) / quarter as f64);
                    row[first + pair] = angle.sin();
                    row[first + quarter + pair] = angle.cos();
                }
                row
            });
            values.collect::<Vec<f64>>()
        };
        let rows = constant(&x, TensorData::new(waves(lat, 0), [1, lat, 1, channels]));
        let columns = waves(lon, 2 * quarter);
        let columns = constant(&x, TensorData::new(columns, [1, 1, lon, channels]));
        x + rows + columns
    }
}

/// Configuration of [`SphericalPosition`], which has an example.
#[derive(Config, Debug)]
pub struct SphericalPositionConfig {
    /// Channels of a cell.
    pub d_model: usize,
    /// Number of harmonics in each direction.
    #[config(default = "8")]
    pub harmonics: usize,
}

/// Position embedding on the sphere, projected and added to the field: cosines of multiples of the
/// colatitude, and sines and cosines of multiples of the longitude that fade towards the poles,
/// where longitude is undefined.
///
/// Rows are evenly spaced from pole to pole, each at the centre of its band; columns go once around
/// the sphere.
///
/// # Shapes
/// `[batch, lat, lon, d_model]` → the same.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::SphericalPositionConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let position = SphericalPositionConfig::new(8).init(&device);
/// let y = Tensor::<4>::zeros([1, 6, 12, 8], &device).apply(&position);
/// assert_eq!(y.dims(), [1, 6, 12, 8]);
/// ```
#[derive(Module, Debug)]
pub struct SphericalPosition {
    /// Weights of the colatitude, `[harmonics, d_model]`.
    pub(super) by_latitude: Param<Tensor<2>>,
    /// Weights of the longitude, `[2 · harmonics, d_model]`.
    by_longitude: Param<Tensor<2>>,
}

impl SphericalPositionConfig {
    /// Initializes the layer.
    pub fn init(&self, device: &Device) -> SphericalPosition {
        let normal = Initializer::Normal {
            mean: 0.0,
            std: 0.1,
        };
        let weights = |harmonics| normal.init([harmonics, self.d_model], device);
        SphericalPosition {
            by_latitude: weights(self.harmonics),
            by_longitude: weights(2 * self.harmonics),
        }
    }
}

impl<X: Field<4>> Layer<X> for SphericalPosition {
    type Output = X;

    fn forward(&self, x: X) -> X {
        use std::f64::consts::{PI, TAU};
        let [_, lat, lon, _] = x.dims();
        let [harmonics, _] = self.by_latitude.dims();
        let colatitude = |row: usize| PI * (row as f64 + 0.5) / lat as f64;
        let rows = (0..lat).flat_map(|row| {
            (1..=harmonics).map(move |order| (order as f64 * colatitude(row)).cos())
        });
        let columns = (0..lon).flat_map(|column| {
            let angle = TAU * column as f64 / lon as f64;
            (1..=harmonics).flat_map(move |order| {
                let (sin, cos) = (order as f64 * angle).sin_cos();
                [sin, cos]
            })
        });
        let rows: Vec<f64> = rows.collect();
        let columns: Vec<f64> = columns.collect();
        let rows = constant(&x, TensorData::new(rows, [1, lat, 1, harmonics]));
        let columns = constant(&x, TensorData::new(columns, [1, 1, lon, 2 * harmonics]));
        let fade: Vec<f64> = (0..lat).map(|row| colatitude(row).sin()).collect();
        let fade = x.profile(1, &fade);
        let rows = rows.linear(&self.by_latitude, None);
        let columns = columns.linear(&self.by_longitude, None);
        x + rows + columns * fade
    }
}
