//! The models that can be trained, behind one type.

use burn::module::Module;
use burn::tensor::Device;
use clap::ValueEnum;
use halocline::models::{
    FieldTransformer, FieldTransformerConfig, SurrogateCnn, SurrogateCnnConfig, UNet, UNetConfig,
};
use halocline::prelude::*;
use serde::{Deserialize, Serialize};

/// The kind of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// A residual convolutional network.
    Cnn,
    /// Encoder and decoder with skip connections.
    Unet,
    /// Neighborhood attention between patches.
    Transformer,
}

/// The size of a model, in its own terms.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Size {
    pub(crate) variables: usize,
    /// Constant channels after the variables.
    pub(crate) constants: usize,
    /// Channels of the hidden fields.
    pub(crate) width: usize,
    /// Residual blocks, levels of the `UNet`, or blocks of the transformer.
    pub(crate) blocks: usize,
}

/// A model that maps a state with constants to the next state.
#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a program holds one model, whichever it is"
)]
pub(crate) enum Surrogate {
    Cnn(SurrogateCnn),
    Unet(UNet),
    Transformer(FieldTransformer),
}

impl Kind {
    /// Channels and blocks that train well in a few minutes.
    pub(crate) fn defaults(self) -> [usize; 2] {
        match self {
            Self::Cnn => [24, 4],
            Self::Unet => [16, 2],
            Self::Transformer => [64, 4],
        }
    }

    pub(crate) fn init(self, size: Size, device: &Device) -> Surrogate {
        let Size {
            variables,
            constants,
            width,
            blocks,
        } = size;
        match self {
            Self::Cnn => {
                let config = SurrogateCnnConfig::new(variables).with_constants(constants);
                let config = config.with_width(width).with_blocks(blocks);
                Surrogate::Cnn(config.init(device))
            }
            Self::Unet => {
                let config = UNetConfig::new(variables + constants, variables);
                let config = config.with_width(width).with_levels(blocks);
                Surrogate::Unet(config.init(device))
            }
            Self::Transformer => {
                let config = FieldTransformerConfig::new(variables).with_constants(constants);
                let config = config.with_d_model(width).with_blocks(blocks);
                Surrogate::Transformer(config.init(device))
            }
        }
    }
}

impl<X: Field<4>> Layer<X> for Surrogate {
    type Output = X;

    fn forward(&self, x: X) -> X {
        match self {
            Self::Cnn(model) => model.forward(x),
            Self::Transformer(model) => model.forward(x),
            // The others add an increment to the state themselves.
            Self::Unet(model) => {
                let increment = model.forward(x.clone());
                x.narrow(1, 0, increment.global_dims()[1]) + increment * 0.1
            }
        }
    }
}
