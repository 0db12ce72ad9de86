use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Initializer, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Tensor};
use halocline_ops::prelude::*;

use crate::parallel::{Plan, Style};

/// Configuration of [`DiscoConv`] and [`DiscoConvTranspose`], which have examples.
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
        let (weight, bias) = self.parameters("DiscoConv", kernels.functions(), device);
        DiscoConv {
            weight,
            bias,
            groups: self.groups,
            kernels: kernels.clone(),
        }
    }

    /// Initializes the transposed layer, with the same options and weights.
    ///
    /// # Panics
    /// Panics if `groups` does not divide the channels.
    pub fn init_transpose(&self, kernels: &DiscoTranspose, device: &Device) -> DiscoConvTranspose {
        let (weight, bias) = self.parameters("DiscoConvTranspose", kernels.functions(), device);
        DiscoConvTranspose {
            weight,
            bias,
            groups: self.groups,
            kernels: kernels.clone(),
        }
    }

    fn parameters(&self, layer: &str, functions: usize, device: &Device) -> Parameters {
        let [inputs, outputs] = self.channels;
        let divides = |channels: usize| self.groups > 0 && channels.is_multiple_of(self.groups);
        assert!(
            divides(inputs) && divides(outputs),
            "{layer}: {} groups of channels {:?}",
            self.groups,
            self.channels
        );
        let terms = inputs / self.groups * functions;
        let std = (terms.max(1) as f64).sqrt().recip();
        let shape = [outputs, inputs / self.groups, functions];
        let bias = || Initializer::Zeros.init([outputs], device);
        let weight = Initializer::Normal { mean: 0.0, std }.init(shape, device);
        (weight, self.bias.then(bias))
    }
}

/// Weight and bias.
type Parameters = (Param<Tensor<3>>, Option<Param<Tensor<1>>>);

impl<X: Field<4>> Layer<X> for DiscoConv {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let bias = self.bias.as_ref().map(Operand::from);
        x.disco_conv(&self.weight, bias, self.groups, &self.kernels)
    }
}

/// Transposed discrete-continuous (DISCO) convolution on the sphere, from a coarse grid to a finer
/// one, such as in a decoder. Follows torch-harmonics' `DiscreteContinuousConvTransposeS2`.
///
/// # Shapes
/// `[batch, channels_in, lat, lon]` on the input grid → `[batch, channels_out, lat, lon]` on the
/// output grid.
///
/// # Communication
/// Same as [`disco_conv_transpose`](halocline_ops::geodesic::disco_conv_transpose()).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::DiscoConvConfig;
/// use halocline_ops::{Apply, DiscoTranspose, SphereGrid};
///
/// let kernels = DiscoTranspose::new([8, 16], [16, 32], [3, 4], SphereGrid::LegendreGauss, None)?;
/// let device = Device::default();
/// let conv = DiscoConvConfig::new([6, 3]).init_transpose(&kernels, &device);
/// let y = Tensor::<4>::ones([1, 6, 8, 16], &device).apply(&conv);
/// assert_eq!(y.dims(), [1, 3, 16, 32]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct DiscoConvTranspose {
    /// `[channels_out, channels_in/groups, functions]`.
    pub weight: Param<Tensor<3>>,
    /// `[channels_out]`.
    pub bias: Option<Param<Tensor<1>>>,
    groups: usize,
    #[module(skip)]
    kernels: DiscoTranspose,
}

impl<X: Field<4>> Layer<X> for DiscoConvTranspose {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let bias = self.bias.as_ref().map(Operand::from);
        x.disco_conv_transpose(&self.weight, bias, self.groups, &self.kernels)
    }
}

/// Configuration of [`SphereAttention`], which has an example.
#[derive(Config, Debug)]
pub struct SphereAttentionConfig {
    /// Channels of the input.
    pub channels: usize,
    /// Number of heads; must divide the channels of keys and values.
    pub heads: usize,
    /// Channels of queries and keys. Default `channels`.
    pub key_channels: Option<usize>,
    /// Channels of values and of the result. Default `channels`.
    pub value_channels: Option<usize>,
    /// Factor of the products of queries and keys. Default `1/√width`, where `width` is the number
    /// of key channels per head.
    pub scale: Option<f64>,
    /// Whether the projections add biases.
    #[config(default = "true")]
    pub bias: bool,
    /// Whether queries and keys are divided by their root mean square per head, times a learned
    /// factor per channel, as by torch-harmonics' `use_qknorm`.
    #[config(default = "false")]
    pub qk_norm: bool,
}

/// Neighborhood attention on the sphere, with linear projections of queries, keys, values and the
/// result. Follows torch-harmonics' `NeighborhoodAttentionS2`.
///
/// # Shapes
/// `[batch, channels, lat, lon]` → `[batch, value_channels, lat, lon]`. Queries, and the result, may
/// lie on another grid than keys.
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
    /// Norm of each head of the queries; torch-harmonics stores its factors less one.
    query_norm: Option<RmsNorm>,
    /// Norm of each head of the keys.
    key_norm: Option<RmsNorm>,
    heads: usize,
    /// Factor of queries, beyond the scale of the operator.
    factor: f64,
    #[module(skip)]
    neighborhood: GeodesicNeighborhood,
}

impl SphereAttentionConfig {
    /// Initializes the layer.
    ///
    /// # Panics
    /// Panics if `heads` does not divide the channels of keys and values.
    pub fn init(&self, neighborhood: &GeodesicNeighborhood, device: &Device) -> SphereAttention {
        let (channels, heads) = (self.channels, self.heads);
        let [keys, values] =
            [self.key_channels, self.value_channels].map(|own| own.unwrap_or(channels));
        assert!(
            heads > 0 && keys.is_multiple_of(heads) && values.is_multiple_of(heads),
            "SphereAttention: {heads} heads of {keys} key channels and {values} value channels"
        );
        let linear = |channels| {
            let config = Conv2dConfig::new(channels, [1, 1]).with_bias(self.bias);
            config.init(device)
        };
        let width = keys / heads;
        let norm = || {
            let config = RmsNormConfig::new(width).with_epsilon(f32::EPSILON.into());
            self.qk_norm.then(|| config.init(device))
        };
        SphereAttention {
            query: linear([channels, keys]),
            key: linear([channels, keys]),
            value: linear([channels, values]),
            output: linear([values; 2]),
            query_norm: norm(),
            key_norm: norm(),
            heads,
            factor: self
                .scale
                .map_or(1.0, |scale| scale * (width as f64).sqrt()),
            neighborhood: neighborhood.clone(),
        }
    }

    /// Returns a tensor-parallel plan over a mesh axis, which shards the heads.
    ///
    /// # Example
    /// ```
    /// use halocline_models::SphereAttentionConfig;
    ///
    /// let plan = SphereAttentionConfig::new(8, 4).tensor_parallel("tensor");
    /// assert_eq!(plan.layers.len(), 4);
    /// ```
    pub fn tensor_parallel(&self, axis: &str) -> Plan {
        let width = |channels: Option<usize>| channels.unwrap_or(self.channels) / self.heads;
        let (keys, values) = (width(self.key_channels), width(self.value_channels));
        Plan::default()
            .with_layer("query", Style::colwise(axis).with_unit(keys))
            .with_layer("key", Style::colwise(axis).with_unit(keys))
            .with_layer("value", Style::colwise(axis).with_unit(values))
            .with_layer("output", Style::rowwise(axis).with_unit(values))
    }
}

impl SphereAttention {
    /// Computes attention from the cells of `queries` to the cells of `context`, which may lie on a
    /// finer or coarser grid.
    ///
    /// # Panics
    /// Panics where [`sphere_attention`](halocline_ops::geodesic::sphere_attention()) would return
    /// an error.
    pub fn forward_cross<X: Field<4>>(&self, queries: X, context: X) -> X {
        let linear = |x: X, layer: &Conv2d| -> X {
            x.apply_conv::<2>(&layer.weight, &layer.bias, &ConvOptions::default())
        };
        let keys = self.normalized(linear(context.clone(), &self.key), &self.key_norm);
        let values = linear(context, &self.value);
        let queries = self.normalized(linear(queries, &self.query), &self.query_norm);
        let queries = if self.factor == 1.0 {
            queries
        } else {
            queries * self.factor
        };
        let y = queries.sphere_attention(keys, values, self.heads, &self.neighborhood);
        linear(y, &self.output)
    }

    /// Normalizes the channels of each head.
    fn normalized<X: Field<4>>(&self, x: X, norm: &Option<RmsNorm>) -> X {
        let Some(norm) = norm else {
            return x;
        };
        let width = x.dims()[1] / self.heads;
        let heads = x.unflatten::<5>(1, &[self.heads, width]);
        let y = heads.permute([0, 1, 3, 4, 2]).apply(norm); // [batch, heads, lat, lon, width]
        y.permute([0, 1, 4, 2, 3]).flatten::<4>(1, 2)
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
    use burn::tensor::{TensorData, Tolerance};
    use halocline_core::{Launcher, Shard, ShardTensor};
    use halocline_ops::testing::{compare, random};

    use super::*;

    /// With scores of zero, the result is the mean of the values within reach.
    #[test]
    fn options_of_attention_are_honoured() {
        let grid = SphereGrid::LegendreGauss;
        let near = GeodesicNeighborhood::new([4, 6], grid, Some(4.0)).unwrap();
        let device = Device::default();
        let config = SphereAttentionConfig::new(3, 2)
            .with_key_channels(Some(4))
            .with_value_channels(Some(2))
            .with_scale(Some(0.0))
            .with_bias(false);
        let attention = config.init(&near, &device);
        assert_eq!(attention.key.weight.dims(), [4, 3, 1, 1]);
        assert!(attention.output.bias.is_none());
        let y = random::<4>([1, 3, 4, 6], "x", 0).inner().apply(&attention);
        assert_eq!(y.dims(), [1, 2, 4, 6]);
        let first = y
            .clone()
            .slice([0..1, 0..2, 0..1, 0..1])
            .expand([1, 2, 4, 6]);
        let tolerance = Tolerance::absolute(1e-5);
        y.into_data()
            .assert_approx_eq::<f32>(&first.into_data(), tolerance);
    }

    fn sines<const D: usize>(shape: [usize; D]) -> Tensor<D> {
        let numbers = (0..shape.iter().product::<usize>()).map(|number| (number as f32).sin());
        let numbers: Vec<f32> = numbers.collect();
        Tensor::from_data(TensorData::new(numbers, shape), &Device::default())
    }

    /// Every eighth value of torch-harmonics' `NeighborhoodAttentionS2(use_qknorm=True)` with the
    /// same parameters, in f64.
    #[test]
    fn attention_with_norms_has_the_values_of_torch_harmonics() {
        let near = GeodesicNeighborhood::new([4, 6], SphereGrid::LegendreGauss, Some(0.9)).unwrap();
        let config = SphereAttentionConfig::new(3, 2)
            .with_key_channels(Some(4))
            .with_value_channels(Some(2))
            .with_qk_norm(true);
        let mut attention = config.init(&near, &Device::default());
        let set = |conv: &mut Conv2d, shift: f64, factor: f64| {
            let weight = sines(conv.weight.dims()) + shift;
            conv.bias = Some(Param::from_tensor(sines([weight.dims()[0]]) * factor));
            conv.weight = Param::from_tensor(weight);
        };
        set(&mut attention.query, 0.0, 1.0);
        set(&mut attention.key, 0.5, 2.0);
        set(&mut attention.value, 0.0, 1.0);
        set(&mut attention.output, 0.0, 1.0);
        for (norm, factors) in [
            (&mut attention.query_norm, [1.5, 0.75]),
            (&mut attention.key_norm, [2.0, 3.0]),
        ] {
            let norm = norm.as_mut().expect("a norm");
            norm.gamma = Param::from_tensor(Tensor::<1>::from(factors));
        }
        let y = sines([1, 3, 4, 6]).apply(&attention);
        let y: Vec<f32> = y.into_data().iter().step_by(8).collect();
        let expected = [
            1.785_39,
            0.982_94,
            -0.513_01,
            0.181_03,
            0.895_04,
            2.042_99_f32,
        ];
        TensorData::from(&y[..])
            .assert_approx_eq::<f32>(&TensorData::from(expected), Tolerance::absolute(1e-4));
    }

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
                let config = SphereAttentionConfig::new(4, 2).with_qk_norm(true);
                let attention = world.init(|device| config.init(&near, device))?;
                let kernels = DiscoTranspose::new([5, 4], [9, 8], [3, 1], grid, None)?;
                let config = DiscoConvConfig::new([4, 3]);
                let decoder = world.init(|device| config.init_transpose(&kernels, device))?;
                let x = random::<4>([2, 4, 9, 8], "x", 0).inner();
                let x = ShardTensor::distribute(x, &mesh, &[Shard(2)])?.require_grad();
                let y = attention.forward_cross(x.clone().apply(&conv), x.clone());
                let y = y.apply(&decoder);
                let gradients = ReduceField::sum(y.clone().square()).backward();
                let gradient = x.grad(&gradients).expect("a gradient");
                let norm = attention.query_norm.as_ref().expect("a norm");
                let weights = [
                    conv.weight.val().grad(&gradients).map(Tensor::into_data),
                    norm.gamma.val().grad(&gradients).map(Tensor::into_data),
                    decoder.weight.val().grad(&gradients).map(Tensor::into_data),
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
