//! Local response normalization: divides each channel by the size of those around it.
//!
//! `y = x / (k + alpha / size · Σ x²)^beta`, with the sum over a window of `size` channels, zero
//! beyond the first and the last one. The window is centred; of an even size, it has one channel
//! more after the centre than before. Semantics follow burn, and for odd sizes PyTorch.
//!
//! # Placement
//! All dims may be sharded; values must be resolved.
//!
//! # Communication
//! If channels are sharded, a halo of channels: `(size − 1) / 2` from below and `size / 2` from
//! above, rounded down.
//!
//! # Adjoint
//! That of the formula; gradients of the halo return to its owners.

use burn::nn::LocalResponseNormConfig;
use burn::tensor::Tensor;
use halocline_core::{Error, Result, ShardTensor};

use crate::driver::{Padding, Stencil, Window};
use crate::precision::in_f32;
use crate::rearrange::permute;

const NAME: &str = "local_response_norm";

/// Divides each channel by the size of those around it, in at least f32. See the [module](self).
///
/// # Shapes
/// `[batch, channels, *spatial]` → the same.
///
/// # Errors
/// A window without channels; fewer than three dims; a dim without cells; partial values; a failure
/// of communication.
///
/// # Example
/// ```
/// use burn::nn::LocalResponseNormConfig;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::norm::local_response_norm;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("channels", 2)])?;
///     let x = ShardTensor::<3>::ones([1, 4, 2], &mesh, &[Shard(1)])?;
///     let config = LocalResponseNormConfig::new(3).with_alpha(3.0).with_beta(1.0);
///     let y = local_response_norm(x, &config)?; // divided by one plus the channels of the window
///     let largest = y.full_tensor().max().into_scalar::<f32>(); // of the first and last channel
///     assert!((largest - 1.0 / 3.0).abs() < 1e-6);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn local_response_norm<const D: usize>(
    x: ShardTensor<D>,
    config: &LocalResponseNormConfig,
) -> Result<ShardTensor<D>> {
    let size = config.size;
    if size == 0 || D < 3 {
        let message = format!(
            "a window of {size} channels on {:?}; expected at least 1, on [batch, channels, *spatial]",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    // Channels last, since the second dim of a stencil has no window.
    let mut last: [usize; D] = std::array::from_fn(|dim| dim);
    let mut back = last;
    last[1..].rotate_left(1);
    back[1..].rotate_right(1);
    let mut windows = vec![Window::new(1); D - 3];
    windows.push(Window::new(size).with_padding(Padding::zeros((size - 1) / 2, size / 2)));
    let stencil = Stencil::new(NAME, windows);
    in_f32(x, |x| {
        let x = permute(x, last)?;
        let plan = stencil.plan(&x)?;
        let y = stencil.run_planned(x, &plan, |x, outputs| {
            normalized(x, outputs.ranges()[D - 1].len(), config)
        })?;
        permute(y, back)
    })
}

/// Normalizes `channels` of the last dim, in which `x` has all channels of their windows.
fn normalized<const D: usize>(
    x: Tensor<D>,
    channels: usize,
    config: &LocalResponseNormConfig,
) -> Tensor<D> {
    let squares = x.clone().square();
    let part = |start: usize| squares.clone().narrow(D - 1, start, channels);
    let sum = (1..config.size).fold(part(0), |sum, start| sum + part(start));
    let scale = sum * (config.alpha / config.size as f64) + config.k;
    x.narrow(D - 1, (config.size - 1) / 2, channels) / scale.powf_scalar(config.beta)
}

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, Shard, Traffic};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op, difference, random};

    struct Norm(LocalResponseNormConfig);

    impl<const D: usize> Operator<D, D> for Norm {
        fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<D>>) -> X {
            inputs.remove(0).local_response_norm(&self.0)
        }
    }

    fn config(size: usize) -> LocalResponseNormConfig {
        let config = LocalResponseNormConfig::new(size);
        config.with_alpha(0.7).with_beta(0.6).with_k(1.5)
    }

    #[test]
    fn the_module_gives_what_it_gives_in_burn() {
        let x = random::<4>([2, 6, 5, 3], "x", 0).inner();
        for size in [1, 2, 3, 4, 5, 9] {
            let norm = config(size).init();
            let burns = norm.forward(x.clone()).into_data();
            let off = difference(&x.clone().apply(&norm).into_data(), &burns);
            assert!(off < 1e-6, "size {size}: {off:e}");
        }
    }

    #[test]
    fn windows_may_span_shards_of_channels() {
        for size in [2, 3, 5] {
            let (norm, dims) = (Norm(config(size)), [0, 1, 2, 3]);
            check_op(&norm, &[[2, 6, 5, 3]], &[], &dims, 2e-5);
        }
        check_op(&Norm(config(7)), &[[2, 5, 3]], &[], &[0, 1, 2], 2e-5);
    }

    #[test]
    fn channels_travel_only_if_they_are_sharded() {
        let run = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let norm = config(4).init();
            let field = |dim| ShardTensor::<3>::ones([1, 6, 4], &mesh, &[Shard(dim)]);
            assert!(field(2)?.plan_of(&norm)?.is_empty());
            // The lower rank needs two channels of four cells, the upper one a single one.
            let sent = field(1)?.plan_of(&norm)?.bytes_sent_for(Traffic::Exchange);
            assert_eq!(sent, [16, 32][world.rank()]);
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn windows_without_channels_and_fields_without_cells_are_refused() {
        let refused = |size| {
            let x = ShardTensor::solo(Tensor::<2>::ones([2, 3], &Default::default()));
            let error = local_response_norm(x, &config(size)).unwrap_err();
            error.to_string()
        };
        for size in [0, 3] {
            let error = refused(size);
            let expected = format!("a window of {size} channels on [2, 3]");
            assert!(error.contains(&expected), "{error}");
        }
    }
}
