use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::{Device, Tensor};
use halocline_ops::prelude::*;

/// Configuration of [`DiscoConv`], which has an example.
#[derive(Config, Debug)]
pub struct DiscoConvConfig {
    /// Input and output channels.
    pub channels: [usize; 2],
    /// Groups of channels that are convolved separately.
    #[config(default = "1")]
    pub groups: usize,
    /// Whether to add a bias.
    #[config(default = "true")]
    pub bias: bool,
}

/// Discrete-continuous (DISCO) convolution on the sphere, within one grid or from one grid to
/// another. Follows torch-harmonics' `DiscreteContinuousConvS2`.
///
/// # Shapes
/// `[batch, channels_in, lat, lon]` on the input grid → `[batch, channels_out, lat, lon]` on the
/// output grid.
///
/// # Communication
/// Same as [`disco_conv`](halocline_ops::geodesic::disco_conv()).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::DiscoConvConfig;
/// use halocline_ops::{Apply, Disco, SphereGrid};
///
/// let kernels = Disco::new([8, 16], [8, 16], [3, 4], SphereGrid::LegendreGauss, None)?;
/// let device = Device::default();
/// let conv = DiscoConvConfig::new([3, 6]).init(&kernels, &device);
/// let y = Tensor::<4>::ones([1, 3, 8, 16], &device).apply(&conv);
/// assert_eq!(y.dims(), [1, 6, 8, 16]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct DiscoConv {
    /// `[channels_out, channels_in/groups, functions]`.
    pub weight: Param<Tensor<3>>,
    /// `[channels_out]`.
    pub bias: Option<Param<Tensor<1>>>,
    groups: usize,
    #[module(skip)]
    kernels: Disco,
}

impl DiscoConvConfig {
    /// Initializes the layer; weights are normal with variance
    /// `1/(channels_in/groups · functions)`.
    ///
    /// # Panics
    /// Panics if `groups` does not divide the channels.
    pub fn init(&self, kernels: &Disco, device: &Device) -> DiscoConv {
        let [inputs, outputs] = self.channels;
        let divides = |channels: usize| self.groups > 0 && channels.is_multiple_of(self.groups);
        assert!(
            divides(inputs) && divides(outputs),
            "DiscoConv: {} groups of channels {:?}",
            self.groups,
            self.channels
        );
        let terms = inputs / self.groups * kernels.functions();
        let std = (terms.max(1) as f64).sqrt().recip();
        let shape = [outputs, inputs / self.groups, kernels.functions()];
        DiscoConv {
            weight: Initializer::Normal { mean: 0.0, std }.init(shape, device),
            bias: self
                .bias
                .then(|| Initializer::Zeros.init([outputs], device)),
            groups: self.groups,
            kernels: kernels.clone(),
        }
    }
}

impl<X: Field<4>> Layer<X> for DiscoConv {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let bias = self.bias.as_ref().map(Operand::from);
        x.disco_conv(&self.weight, bias, self.groups, &self.kernels)
    }
}

/// Configuration of [`SphereAttention`], which has an example.
#[derive(Config, Debug)]
pub struct SphereAttentionConfig {
    /// Channels of queries, keys and values.
    pub channels: usize,
    /// Number of heads; must divide `channels`.
    pub heads: usize,
}

/// Neighborhood attention on the sphere, with linear projections of queries, keys, values and the
/// result. Follows torch-harmonics' `NeighborhoodAttentionS2`.
///
/// # Shapes
/// `[batch, channels, lat, lon]` → the same. Queries, and the result, may lie on another grid than
/// keys.
///
/// # Communication
/// Same as [`sphere_attention`](halocline_ops::geodesic::sphere_attention()).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::SphereAttentionConfig;
/// use halocline_ops::{Apply, GeodesicNeighborhood, SphereGrid};
///
/// let near = GeodesicNeighborhood::new([6, 12], SphereGrid::LegendreGauss, Some(0.6))?;
/// let device = Device::default();
/// let attention = SphereAttentionConfig::new(8, 2).init(&near, &device);
/// let y = Tensor::<4>::ones([1, 8, 6, 12], &device).apply(&attention);
/// assert_eq!(y.dims(), [1, 8, 6, 12]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct SphereAttention {
    query: Conv2d,
    key: Conv2d,
    value: Conv2d,
    output: Conv2d,
    heads: usize,
    #[module(skip)]
    neighborhood: GeodesicNeighborhood,
}

impl SphereAttentionConfig {
    /// Initializes the layer.
    ///
    /// # Panics
    /// Panics if `heads` does not divide `channels`.
    pub fn init(&self, neighborhood: &GeodesicNeighborhood, device: &Device) -> SphereAttention {
        let Self { channels, heads } = *self;
        assert!(
            heads > 0 && channels.is_multiple_of(heads),
            "SphereAttention: {heads} heads of {channels} channels"
        );
        let linear = || Conv2dConfig::new([channels; 2], [1, 1]).init(device);
        SphereAttention {
            query: linear(),
            key: linear(),
            value: linear(),
            output: linear(),
            heads,
            neighborhood: neighborhood.clone(),
        }
    }
}

impl SphereAttention {
    /// Computes attention from the cells of `queries` to the cells of `context`, which may lie on a
    /// finer grid.
    ///
    /// # Panics
    /// Panics where [`sphere_attention`](halocline_ops::geodesic::sphere_attention()) would return
    /// an error.
    pub fn forward_cross<X: Field<4>>(&self, queries: X, context: X) -> X {
        let linear = |x: X, layer: &Conv2d| -> X {
            x.apply_conv::<2>(&layer.weight, &layer.bias, &ConvOptions::default())
        };
        let keys = linear(context.clone(), &self.key);
        let values = linear(context, &self.value);
        let queries = linear(queries, &self.query);
        let y = queries.sphere_attention(keys, values, self.heads, &self.neighborhood);
        linear(y, &self.output)
    }
}

impl<X: Field<4>> Layer<X> for SphereAttention {
    type Output = X;

    fn forward(&self, x: X) -> X {
        self.forward_cross(x.clone(), x)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use halocline_core::{Launcher, Shard, ShardTensor};
    use halocline_ops::testing::{compare, random};

    use super::*;

    #[test]
    fn layers_on_ranks_give_what_one_device_gives() {
        let run = |ranks: usize| {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("lat", ranks)])?;
                let grid = SphereGrid::LegendreGauss;
                let kernels = Disco::new([9, 8], [5, 4], [3, 1], grid, Some(0.9))?;
                let near = GeodesicNeighborhood::between([[9, 8], [5, 4]], [grid; 2], Some(0.9))?;
                let config = DiscoConvConfig::new([4, 4]).with_groups(2);
                let conv = world.init(|device| config.init(&kernels, device))?;
                let config = SphereAttentionConfig::new(4, 2);
                let attention = world.init(|device| config.init(&near, device))?;
                let x = random::<4>([2, 4, 9, 8], "x", 0).inner();
                let x = ShardTensor::distribute(x, &mesh, &[Shard(2)])?.require_grad();
                let y = attention.forward_cross(x.clone().apply(&conv), x.clone());
                let gradients = ReduceField::sum(y.clone().square()).backward();
                let gradient = x.grad(&gradients).expect("a gradient");
                let weights = [
                    conv.weight.val().grad(&gradients).map(Tensor::into_data),
                    attention
                        .key
                        .weight
                        .val()
                        .grad(&gradients)
                        .map(Tensor::into_data),
                ];
                let mut found: Vec<TensorData> = vec![
                    y.full_tensor().into_data(),
                    gradient.full_tensor().into_data(),
                ];
                found.extend(weights.map(|weight| weight.expect("a gradient")));
                Ok(found)
            });
            found.unwrap()
        };
        let expected = run(1).remove(0);
        for ranks in [2, 3] {
            for found in run(ranks) {
                compare(&found, &expected, 1e-5, &format!("{ranks} ranks"));
            }
        }
    }
}
