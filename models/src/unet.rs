use burn::config::Config;
use burn::module::Module;
use burn::tensor::Device;
use halocline_core::{Boundary, OrRaise, module_scope};
use halocline_ops::Rounding;
use halocline_ops::masked::masked_avg_pool;
use halocline_ops::prelude::*;

use crate::conv::{FieldConv2d, FieldConv2dConfig};
use crate::parallel::{Plan, Style};
use crate::recompute::{apply_block, apply_block_with};

/// Configuration of [`UNet`], which has an example.
#[derive(Config, Debug)]
pub struct UNetConfig {
    /// Input channels.
    pub channels_in: usize,
    /// Output channels.
    pub channels_out: usize,
    /// Channels of the finest hidden fields; they double with every level.
    #[config(default = "16")]
    pub width: usize,
    /// Number of times the field is halved.
    #[config(default = "2")]
    pub levels: usize,
    /// Boundary conditions in latitude and longitude.
    #[config(default = "[Boundary::Replicate, Boundary::Periodic]")]
    pub boundary: [Boundary; 2],
    /// Boundary conditions of the halved fields. Default [`boundary`](Self::boundary).
    pub boundary_halved: Option<[Boundary; 2]>,
    /// Input channels that change sign across a [pole](Boundary::PoleRow), such as wind components.
    /// Hidden fields do not change sign.
    #[config(default = "Vec::new()")]
    pub odd: Vec<usize>,
    /// Whether the backward pass recomputes the convolutions of each level instead of storing their
    /// activations: less memory, more time, the same gradients. Halos are kept.
    #[config(default = "false")]
    pub recompute: bool,
}

/// U-Net (Ronneberger et al. 2015): an encoder and decoder with skip connections, average pooling
/// down, nearest-neighbour interpolation up, and two convolutions at every level.
///
/// # Shapes
/// `[batch, channels_in, lat, lon]` → `[batch, channels_out, lat, lon]`, of any size: where the
/// number of cells is odd, the last cell is pooled alone, and the second of the two cells
/// interpolated from it is cropped. Shards may have any extents.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::UNetConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let model = UNetConfig::new(3, 2).with_width(4).init(&device);
/// let y = Tensor::<4>::ones([1, 3, 13, 24], &device).apply(&model);
/// assert_eq!(y.dims(), [1, 2, 13, 24]);
/// ```
#[derive(Module, Debug)]
pub struct UNet {
    down: Vec<DoubleConv>,
    bottom: DoubleConv,
    up: Vec<DoubleConv>,
    head: FieldConv2d,
    recompute: bool,
}

#[derive(Module, Debug)]
struct DoubleConv {
    first: FieldConv2d,
    second: FieldConv2d,
}

impl UNetConfig {
    /// Initializes the model.
    pub fn init(&self, device: &Device) -> UNet {
        let conv = |channels, kernel, level| {
            let boundary = match level {
                0 => self.boundary,
                _ => self.boundary_halved.unwrap_or(self.boundary),
            };
            FieldConv2dConfig::new(channels, [kernel; 2]).with_boundary(boundary)
        };
        let double = |channels_in, channels_out, level, odd: &[usize]| DoubleConv {
            first: conv([channels_in, channels_out], 3, level)
                .with_odd(odd.to_vec())
                .init(device),
            second: conv([channels_out, channels_out], 3, level).init(device),
        };
        let width = |level: usize| self.width << level;
        let below = |level: usize| {
            if level == 0 {
                self.channels_in
            } else {
                width(level - 1)
            }
        };
        // Only the first layer sees the input channels.
        let down = |level: usize| {
            let odd = if level == 0 { &self.odd[..] } else { &[] };
            double(below(level), width(level), level, odd)
        };
        UNet {
            down: (0..self.levels).map(down).collect(),
            bottom: down(self.levels),
            up: (0..self.levels)
                .map(|level| double(width(level + 1) + width(level), width(level), level, &[]))
                .collect(),
            head: conv([self.width, self.channels_out], 1, 0).init(device),
            recompute: self.recompute,
        }
    }

    /// Returns a tensor-parallel plan over a mesh axis. It shards the channels between the two
    /// convolutions of every level.
    ///
    /// # Example
    /// ```
    /// use halocline_models::UNetConfig;
    ///
    /// let plan = UNetConfig::new(3, 2).tensor_parallel("tensor");
    /// assert_eq!(plan.layers.len(), 2);
    /// ```
    pub fn tensor_parallel(&self, axis: &str) -> Plan {
        Plan::default()
            .with_layer("**.first.conv", Style::colwise(axis))
            .with_layer("**.second.conv", Style::rowwise(axis))
    }
}

impl DoubleConv {
    /// Applies both convolutions to a coarser field, interpolated to twice the size, and the skip
    /// connection.
    fn upward<X: Field<4>>(&self, coarse: X, skip: X) -> X {
        self.forward(vec![upsampled(coarse, &skip), skip])
    }

    /// Applies both convolutions to the concatenation of `fields` along channels.
    fn forward<X: Field<4>>(&self, fields: Vec<X>) -> X {
        let _module = module_scope("DoubleConv");
        let y = {
            let _module = module_scope("FieldConv2d");
            self.first.forward_cat(fields)
        };
        y.gelu().apply(&self.second).gelu()
    }

    /// Like [`forward`](Self::forward), over the cells that count.
    fn forward_masked<X: Field<4>>(&self, fields: Vec<X>, mask: &X) -> X {
        let _module = module_scope("DoubleConv");
        let y = self.first.forward_masked(fields, mask).gelu();
        self.second.forward_masked(vec![y], mask).gelu()
    }
}

/// Interpolates a coarser field to the cells of the skip connection.
fn upsampled<X: Field<4>>(coarse: X, skip: &X) -> X {
    let [_, _, lat, lon] = skip.dims();
    let fine = coarse.upsample_nearest(2);
    let fine = fine.narrow(2, 0, lat).narrow(3, 0, lon);
    // Odd extents change when halved and doubled, so use those of the skip connection.
    fine.align_to(skip)
}

/// Windows of the pooling between levels.
fn halved() -> PoolOptions<2> {
    PoolOptions::new([2, 2]).with_rounding(Rounding::Ceil)
}

impl UNet {
    /// Applies the model to a field with cells that do not count, such as land in the ocean:
    /// convolutions and pooling are those of [`masked`](halocline_ops::masked). A cell of a coarser
    /// level counts if one of its cells does. Whatever `x` holds in cells that do not count, NaN
    /// included, reaches no other cell and no gradient; the result is zero there. All activations
    /// are kept, whatever [`recompute`](UNetConfig::recompute) says.
    ///
    /// # Shapes
    /// `mask` is `[batch or 1, 1, lat, lon]`: one in the cells that count, else zero.
    ///
    /// # Panics
    /// Panics where [`masked_conv`](halocline_ops::masked::masked_conv) returns an error, such as
    /// for a mask in other shards than `x`.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use halocline_models::UNetConfig;
    /// use halocline_ops::masked::present;
    ///
    /// let device = Device::default();
    /// let model = UNetConfig::new(1, 1).with_width(4).init(&device);
    /// let sea = Tensor::<4>::ones([1, 1, 13, 20], &device);
    /// let land = Tensor::full([1, 1, 13, 4], f32::NAN, &device);
    /// let x = Tensor::cat(vec![sea, land], 3);
    /// let mask = present(&x)?;
    /// let y = model.forward_masked(x, mask);
    /// assert!(y.sum().into_scalar::<f32>().is_finite());
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn forward_masked<X: Field<4>>(&self, x: X, mask: X) -> X {
        let (mut y, mut coarse) = (x, mask.clone());
        let mut skips = Vec::new();
        for level in &self.down {
            let fine = coarse.clone();
            let skip = level.forward_masked(vec![y], &fine);
            y = masked_avg_pool(skip.clone(), fine.clone(), &halved()).or_raise();
            coarse = coarse.max_pool(&halved());
            skips.push((skip, fine));
        }
        y = self.bottom.forward_masked(vec![y], &coarse);
        for (level, (skip, fine)) in self.up.iter().zip(skips).rev() {
            y = level.forward_masked(vec![upsampled(y, &skip), skip], &fine);
        }
        self.head.forward_masked(vec![y], &mask)
    }
}

impl<X: Field<4>> Layer<X> for UNet {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let forward = |level: &DoubleConv, y: X| level.forward(vec![y]);
        let mut y = x;
        let mut skips = Vec::new();
        for level in &self.down {
            let skip = apply_block(self.recompute, y, level, forward);
            y = skip.clone().avg_pool(&halved());
            skips.push(skip);
        }
        y = apply_block(self.recompute, y, &self.bottom, forward);
        for (level, skip) in self.up.iter().zip(skips).rev() {
            let upward = |level: &DoubleConv, coarse: X, skip: X| level.upward(coarse, skip);
            y = apply_block_with(self.recompute, [y, skip], level, upward);
        }
        y.apply(&self.head)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Tensor, TensorData};
    use halocline_core::{Launcher, Placement, Shard, ShardTensor};

    use super::*;

    const SHAPE: [usize; 4] = [2, 2, 9, 10];

    /// A continent as large as a cell of the coarsest level, and an island.
    fn is_land(cell: usize) -> bool {
        let [lat, lon] = [cell / SHAPE[3] % SHAPE[2], cell % SHAPE[3]];
        (lat < 5 && (2..8).contains(&lon)) || [lat, lon] == [7, 4]
    }

    fn field(shape: [usize; 4], value: impl Fn(usize) -> f32) -> TensorData {
        let cells = 0..shape.iter().product();
        TensorData::new(cells.map(value).collect::<Vec<f32>>(), shape)
    }

    /// Result, and gradient of the input, with this value on land.
    fn run(land: f32, axes: &[(&str, usize)], placements: &[Placement]) -> [TensorData; 2] {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let found = Launcher::local(ranks).seed(3).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let config = UNetConfig::new(2, 3).with_width(4);
            let model = world.init(|device| config.init(device))?;
            let device = world.device().clone().inner();
            let distributed = |data: TensorData| {
                let whole = Tensor::<4>::from_data(data, &device);
                ShardTensor::distribute(whole, &mesh, placements)
            };
            let value = |cell: usize| ((cell * 37) % 23) as f32 / 11.0 - 1.0;
            let x = field(SHAPE, |cell| if is_land(cell) { land } else { value(cell) });
            let mask = field([1, 1, SHAPE[2], SHAPE[3]], |cell| f32::from(!is_land(cell)));
            let (x, mask) = (distributed(x)?.require_grad(), distributed(mask)?);
            let y = model.forward_masked(x.clone(), mask);
            let gradients = (y.clone() * y.clone()).sum().backward();
            let gradient = x.grad(&gradients).expect("a gradient");
            Ok([y, gradient].map(|x| x.full_tensor().into_data()))
        });
        found.unwrap().remove(0)
    }

    #[test]
    fn land_reaches_no_cell_of_the_sea_on_any_mesh() {
        let one = run(0.0, &[("lat", 1)], &[Shard(2)]);
        type Sharding<'a> = (&'a [(&'a str, usize)], &'a [Placement]);
        let meshes: [Sharding<'_>; 3] = [
            (&[("lat", 1)], &[Shard(2)]),
            (&[("lat", 2)], &[Shard(2)]),
            (&[("lat", 2), ("lon", 2)], &[Shard(2), Shard(3)]),
        ];
        for (axes, placements) in meshes {
            for land in [7.0, f32::NAN] {
                let found = run(land, axes, placements);
                for (found, expected) in found.iter().zip(&one) {
                    let pairs = found.iter::<f32>().zip(expected.iter::<f32>());
                    for (cell, (found, expected)) in pairs.enumerate() {
                        let place = format!("{land} on {axes:?}, cell {cell}");
                        assert!(
                            (found - expected).abs() < 1e-4,
                            "{place}: {found}, {expected}"
                        );
                        assert!(!is_land(cell) || found == 0.0, "{place}: {found}");
                    }
                }
            }
        }
    }

    #[test]
    fn without_land_it_is_the_model_without_a_mask() {
        let device = Device::default();
        let model = UNetConfig::new(2, 3).with_width(4).init(&device);
        let x = Tensor::<4>::from_data(field(SHAPE, |cell| (cell % 7) as f32), &device);
        let ones = Tensor::ones([1, 1, SHAPE[2], SHAPE[3]], &device);
        let difference = model.forward_masked(x.clone(), ones) - x.apply(&model);
        assert!(difference.abs().max().into_scalar::<f32>() < 1e-4);
    }
}
