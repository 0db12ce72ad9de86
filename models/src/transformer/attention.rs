//! Neighborhood attention layers.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use halocline_ops::prelude::*;

use super::rotary::Rotary;

macro_rules! neighborhood_attention {
    ($n:literal, $d:literal, $e:literal, $module:ident, $config:ident, $shape:literal) => {
        #[doc = concat!("Configuration of [`", stringify!($module), "`].")]
        #[derive(Config, Debug)]
        pub struct $config {
            /// Channels of input and output.
            pub d_model: usize,
            /// Query heads; must divide `d_model`.
            pub heads: usize,
            /// Number of neighbouring keys that a query attends to, in each spatial dim.
            pub kernel: [usize; $n],
            /// Key and value heads; must divide the query heads. Default as many as these.
            pub key_heads: Option<usize>,
            /// Distance between neighbouring keys.
            #[config(default = "[1; _]")]
            pub dilation: [usize; $n],
            /// Number of neighbouring queries that share a window.
            #[config(default = "[1; _]")]
            pub stride: [usize; $n],
            /// Dims in which a query attends only to keys up to its own position.
            #[config(default = "[false; _]")]
            pub causal: [bool; $n],
            /// Periodic dims.
            #[config(default = "[false; _]")]
            pub periodic: [bool; $n],
            /// Learned tokens, as keys and values, that every query attends to in addition.
            #[config(default = "0")]
            pub tokens: usize,
            /// Base of the rotary position embedding; `None` for no embedding.
            pub rotary: Option<f64>,
            /// Whether the projections have a bias.
            #[config(default = "true")]
            pub bias: bool,
        }

        /// Multi-head neighborhood attention with its projections.
        ///
        /// # Shapes
        #[doc = concat!("`[batch, ", $shape, ", d_model]` → the same.")]
        ///
        /// # Example
        /// ```
        /// use burn::tensor::{Device, Tensor};
        #[doc = concat!("use halocline_models::", stringify!($config), ";")]
        /// use halocline_ops::Apply;
        ///
        /// let device = Device::default();
        #[doc = concat!("let config = ", stringify!($config), "::new(24, 2, [3; ", stringify!($n), "]).with_rotary(Some(100.0));")]
        /// let attention = config.init(&device);
        #[doc = concat!("let mut shape = [6; ", stringify!($d), "];")]
        #[doc = concat!("shape[", stringify!($d), " - 1] = 24;")]
        #[doc = concat!("let y = Tensor::<", stringify!($d), ">::ones(shape, &device).apply(&attention);")]
        /// assert_eq!(y.dims(), shape);
        /// ```
        #[derive(Module, Debug)]
        pub struct $module {
            /// Projection to queries, keys and values, grouped by key head: the columns of a head
            /// are contiguous, and can be sharded.
            pub query_key_value: Linear,
            /// Output projection of the heads.
            pub output: Linear,
            /// Keys and values of the tokens, `[1, tokens, key_heads, width]`; empty without
            /// tokens.
            pub tokens: Vec<Param<Tensor<4>>>,
            heads: [usize; 2],
            #[module(skip)]
            options: NeighborhoodOptions<$n>,
            #[module(skip)]
            rotary: Option<Rotary>,
        }

        impl $config {
            /// Initializes the layer.
            ///
            /// # Panics
            /// Panics if `heads` does not divide `d_model`, or `key_heads` does not divide `heads`.
            pub fn init(&self, device: &Device) -> $module {
                let heads = [self.heads, self.key_heads.unwrap_or(self.heads)];
                let fits = self.heads > 0
                    && self.d_model.is_multiple_of(self.heads)
                    && heads[1] > 0
                    && self.heads.is_multiple_of(heads[1]);
                assert!(
                    fits,
                    "{} heads of queries and {} of keys for {} channels; expected that each divides the one before",
                    heads[0], heads[1], self.d_model
                );
                let width = self.d_model / self.heads;
                let options = NeighborhoodOptions::new(self.kernel)
                    .with_dilation(self.dilation)
                    .with_stride(self.stride)
                    .with_causal(self.causal)
                    .with_periodic(self.periodic);
                let linear = |from, to| LinearConfig::new(from, to).with_bias(self.bias);
                $module {
                    query_key_value: linear(self.d_model, (heads[0] + 2 * heads[1]) * width)
                        .init(device),
                    output: linear(self.d_model, self.d_model).init(device),
                    tokens: match self.tokens {
                        0 => Vec::new(),
                        tokens => {
                            let normal = Initializer::Normal { mean: 0.0, std: 1.0 };
                            let make = || normal.init([1, tokens, heads[1], width], device);
                            vec![make(), make()]
                        }
                    },
                    heads,
                    options,
                    rotary: self.rotary.map(|base| Rotary::new(base, &self.periodic)),
                }
            }
        }

        impl $module {
            /// Computes attention from every cell to all cells, and to the tokens if there are any,
            /// with the same parameters.
            pub fn forward_dense<X: Field<$d>>(&self, x: X) -> X {
                let options = AttentionOptions::default();
                self.attend(x, |[q, k, v]| match self.tokens_beside(&q) {
                    Some(tokens) => q.cell_attention_with_tokens(k, v, tokens, &options),
                    None => q.cell_attention(k, v, &options),
                })
            }

            /// Returns the keys and values of the tokens, on the mesh of a field.
            fn tokens_beside<X: Field<$e>>(&self, field: &X) -> Option<[WithDims<X, 4>; 2]> {
                let tokens = self.tokens.first_chunk()?;
                Some(tokens.each_ref().map(|tokens| field.place_operand(tokens)))
            }

            fn attend<X: Field<$d>>(
                &self,
                x: X,
                attention: impl FnOnce([WithDims<X, $e>; 3]) -> WithDims<X, $e>,
            ) -> X {
                let [heads, key_heads] = self.heads;
                let (shared, mut y) = (heads / key_heads, x.apply(&self.query_key_value));
                // Queries, a key and a value.
                let group = shared + 2;
                let width = y.dims()[$d - 1] / (key_heads * group);
                if let Some(rotary) = &self.rotary {
                    // Before the split, in place.
                    let heads = y.unflatten::<$e>($d - 1, &[key_heads * group, width]);
                    let heads = rotary.rotate_in_groups(heads, [shared + 1, group]);
                    y = heads.flatten::<$d>($d - 1, $d);
                }
                let y = y.unflatten::<$e>($d - 1, &[key_heads, group * width]);
                let parts = y.split_with_sizes(&[shared * width, width, width], $d);
                let [mut q, k, v] = parts.try_into().ok().expect("three parts");
                if shared > 1 {
                    let columns = q.flatten::<$d>($d - 1, $d);
                    q = columns.unflatten::<$e>($d - 1, &[heads, width]);
                }
                let y = attention([q, k, v]);
                y.flatten::<$d>($d - 1, $d).apply(&self.output)
            }
        }

        impl<X: Field<$d>> Layer<X> for $module {
            type Output = X;

            fn forward(&self, x: X) -> X {
                self.attend(x, |[q, k, v]| match self.tokens_beside(&q) {
                    Some(tokens) => {
                        q.neighborhood_attention_with_tokens(k, v, tokens, &self.options)
                    }
                    None => q.neighborhood_attention(k, v, &self.options),
                })
            }
        }
    };
}

neighborhood_attention!(
    1,
    3,
    4,
    NeighborhoodAttention1d,
    NeighborhoodAttention1dConfig,
    "cells"
);
neighborhood_attention!(
    2,
    4,
    5,
    NeighborhoodAttention2d,
    NeighborhoodAttention2dConfig,
    "lat, lon"
);
neighborhood_attention!(
    3,
    5,
    6,
    NeighborhoodAttention3d,
    NeighborhoodAttention3dConfig,
    "level, lat, lon"
);
