//! Layers: functions of a tensor, with or without parameters, on one device and on shards.

use burn::nn::{PaddingConfig1d, PaddingConfig2d, PaddingConfig3d};
use burn::tensor::Tensor;
use burn::tensor::kind::Basic;
use halocline_core::{PlannedMessages, Result, ShardTensor, module_scope};

use crate::driver::Padding;

/// A function of a tensor, with or without parameters.
///
/// burn's modules implement it for plain and sharded tensors, and therefore for every
/// [`X: Field<D>`](crate::Field). Models implement it for that generic `X`.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::prelude::*;
///
/// struct Double;
///
/// impl<X: Field<2>> Layer<X> for Double {
///     type Output = X;
///
///     fn forward(&self, x: X) -> X {
///         x * 2.0
///     }
/// }
///
/// let y = Tensor::<2>::from([[1.0, 2.0]]).apply(&Double);
/// y.into_data().assert_eq(&[[2.0_f32, 4.0]].into(), true);
/// ```
pub trait Layer<X> {
    /// The type of the result.
    type Output;

    /// Applies the layer.
    fn forward(&self, x: X) -> Self::Output;
}

/// Application of a [`Layer`] as a method: `x.apply(&layer)`.
///
/// Messages count for a [module scope](halocline_core::module_scope()) named after the layer's
/// type.
///
/// # Example
/// ```
/// use burn::nn::Relu;
/// use burn::tensor::Tensor;
/// use halocline_ops::Apply;
///
/// let y = Tensor::<1>::from([-1.0, 2.0]).apply(&Relu::new());
/// y.into_data().assert_eq(&[0.0_f32, 2.0].into(), true);
/// ```
pub trait Apply: Sized {
    /// Applies a layer to this tensor.
    fn apply<L: Layer<Self>>(self, layer: &L) -> L::Output {
        let _module = module_scope(short_name::<L>());
        layer.forward(self)
    }
}

/// The name of a type without its path and parameters.
fn short_name<L>() -> &'static str {
    let name = std::any::type_name::<L>();
    let name = name.split('<').next().unwrap_or(name);
    name.rsplit("::").next().unwrap_or(name)
}

impl<const D: usize, K: Basic> Apply for Tensor<D, K> {}
impl<const D: usize, K: Basic> Apply for ShardTensor<D, K> {}

/// Communication plan of a [`Layer`] as a method: `x.plan_of(&layer)`.
///
/// # Example
/// ```
/// use burn::nn::conv::Conv1dConfig;
/// use halocline_core::{Launcher, Shard, ShardTensor, Traffic};
/// use halocline_ops::PlanOf;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let conv = world.init(|device| Conv1dConfig::new(1, 1, 3).init(device))?;
///     let x = ShardTensor::<3>::ones([1, 1, 8], &mesh, &[Shard(2)])?;
///     let plan = x.plan_of(&conv)?;
///     assert_eq!(plan.bytes_sent_for(Traffic::Exchange), 4); // a halo of one cell
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub trait PlanOf: Sized {
    /// Lists the messages that this rank would send and receive in `layer`, which may be a whole
    /// model. Nothing is sent: the layer computes on blank cells in place of those of other ranks,
    /// in the time and memory of a forward pass.
    ///
    /// # Errors
    /// The errors of the layer.
    fn plan_of<L: Layer<Self>>(&self, layer: &L) -> Result<PlannedMessages>;
}

impl<const D: usize> PlanOf for ShardTensor<D> {
    fn plan_of<L: Layer<Self>>(&self, layer: &L) -> Result<PlannedMessages> {
        self.dry_run(|x| Ok(layer.forward(x)))
    }
}

/// Padding of burn's `Same`: one output for each window that starts in the field. A stride of zero
/// is rejected later.
fn same_padding(size: usize, kernel: usize, stride: usize) -> Padding {
    let outputs = size.div_ceil(stride.max(1));
    let total = match outputs {
        0 => 0,
        _ => ((outputs - 1) * stride + kernel).saturating_sub(size),
    };
    Padding::zeros(total / 2, total - total / 2)
}

/// Converts burn's padding configurations to [`Padding`] per spatial dim.
pub(crate) trait PaddingOf<const N: usize> {
    fn padding(&self, spatial: &[usize], kernel: [usize; N], stride: [usize; N]) -> [Padding; N];
}

impl PaddingOf<1> for PaddingConfig1d {
    fn padding(&self, spatial: &[usize], kernel: [usize; 1], stride: [usize; 1]) -> [Padding; 1] {
        match self {
            Self::Valid => [Padding::default()],
            Self::Same => [same_padding(spatial[0], kernel[0], stride[0])],
            Self::Explicit(low, high) => [Padding::zeros(*low, *high)],
        }
    }
}

impl PaddingOf<2> for PaddingConfig2d {
    fn padding(&self, spatial: &[usize], kernel: [usize; 2], stride: [usize; 2]) -> [Padding; 2] {
        match self {
            Self::Valid => [Padding::default(); 2],
            Self::Same => std::array::from_fn(|d| same_padding(spatial[d], kernel[d], stride[d])),
            Self::Explicit(top, left, bottom, right) => {
                [Padding::zeros(*top, *bottom), Padding::zeros(*left, *right)]
            }
        }
    }
}

impl PaddingOf<3> for PaddingConfig3d {
    fn padding(&self, spatial: &[usize], kernel: [usize; 3], stride: [usize; 3]) -> [Padding; 3] {
        match self {
            Self::Valid => [Padding::default(); 3],
            Self::Same => std::array::from_fn(|d| same_padding(spatial[d], kernel[d], stride[d])),
            Self::Explicit(depth, height, width) => {
                [depth, height, width].map(|&width| Padding::zeros(width, width))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use burn::nn::PaddingConfig1d;
    use burn::nn::conv::{Conv1d, Conv1dConfig};
    use halocline_core::{Halos, Launcher, Shard, ShardTensor, Traffic};

    use crate::prelude::*;

    #[derive(Module, Debug)]
    struct Block {
        conv: Conv1d,
    }

    impl<X: Field<3>> Layer<X> for Block {
        type Output = X;

        fn forward(&self, x: X) -> X {
            x.apply(&self.conv).tanh()
        }
    }

    /// Blocks that the backward pass recomputes.
    #[derive(Module, Debug)]
    struct Blocks {
        blocks: Vec<Block>,
    }

    impl<X: Field<3>> Layer<X> for Blocks {
        type Output = X;

        fn forward(&self, x: X) -> X {
            self.blocks.iter().fold(x, |x, block| {
                x.recompute(block, Halos::Resend, |block: &Block, x| x.apply(block))
            })
        }
    }

    #[test]
    fn equal_layers_of_a_module_are_numbered_alike_in_every_pass_and_step() {
        let run = Launcher::local(2).check(false).run(|world| {
            let mesh = world.mesh([("lon", 2)])?;
            let block = |device: &burn::tensor::Device| Block {
                conv: Conv1dConfig::new(1, 1, 3)
                    .with_padding(PaddingConfig1d::Same)
                    .init(device),
            };
            let model = world.init(|device| Blocks {
                blocks: vec![block(device), block(device)],
            })?;
            let x = ShardTensor::<3>::ones([1, 1, 8], &mesh, &[Shard(2)])?.require_grad();
            for _ in 0..2 {
                let before = world.comm_stats_by_module();
                x.clone().apply(&model).sum().resolve().backward();
                let step = world.comm_stats_by_module().since(&before);
                let found = step.iter().map(|(path, stats)| {
                    // Twice forward, once backward.
                    assert_eq!(stats.of(Traffic::Exchange).bytes, 12);
                    path.to_owned()
                });
                let found: Vec<String> = found.collect();
                assert_eq!(found, ["Blocks/Block/Conv1d", "Blocks/Block#2/Conv1d"]);
            }
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn messages_count_for_the_module_that_sends_them() {
        let run = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("lon", 2)])?;
            let block = world.init(|device| Block {
                conv: Conv1dConfig::new(1, 1, 3).init(device),
            })?;
            let x = ShardTensor::<3>::ones([1, 1, 8], &mesh, &[Shard(2)])?.require_grad();
            x.apply(&block).sum().resolve().backward();
            let stats = world.comm_stats_by_module();
            assert_eq!(
                stats.iter().map(|(path, _)| path).collect::<Vec<_>>(),
                ["Block/Conv1d"]
            );
            let conv = stats.of("Block/Conv1d").expect("halos");
            let halos = [
                conv.of(Traffic::Exchange),
                conv.of_backward(Traffic::Exchange),
            ];
            assert_eq!(halos.map(|count| count.bytes), [8, 4]);
            // Gradients of parameters are sent together.
            assert_eq!(conv.of_backward(Traffic::Reduce).messages, 0);
            assert!(stats.to_string().contains("Block/Conv1d"), "{stats}");
            Ok(())
        });
        run.unwrap();
    }
}
