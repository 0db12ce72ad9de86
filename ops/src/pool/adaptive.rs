//! Adaptive pooling: averages and maxima over a given number of areas.
//!
//! Output `i` of `m` in a dim of `n` cells covers the cells `⌊i·n/m⌋..⌈(i+1)·n/m⌉`. Semantics
//! follow PyTorch's `adaptive_avg_pool{1,2,3}d` and `adaptive_max_pool{1,2,3}d`.
//!
//! # Placement
//! All dims may be sharded; values must be resolved. An output belongs to the rank that holds the
//! middle cell of its area.
//!
//! # Communication
//! One cell per area for each rank that shares the area with its owner, however large the area is.
//!
//! # Adjoint
//! The gradient of an average is spread equally over the cells of the area; that of a maximum goes
//! to one cell that holds it, and among several such cells the choice may depend on the layout.

use burn::nn::pool::{AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d};
use halocline_core::{Error, Result, ShardTensor};

use crate::driver::sampling::{Combine, DimMap, Maximum, Weighted, areas, sampled};
use crate::field::{Field, run};
use crate::golden::{Case, Golden, Output, output};
use crate::layer::Layer;

/// Averages over `output_size` areas in each spatial dim. See the [module](self).
///
/// # Errors
/// A number of dims other than that of `[batch, channels, *spatial]`; an empty spatial dim or an
/// output size of zero; partial values; a failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::pool::adaptive_avg_pool;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 1, 7, 4], &mesh, &[Shard(2)])?;
///     let y = adaptive_avg_pool(x, [3, 2])?.full_tensor();
///     y.into_data().assert_eq(&[[[[1.0_f32; 2]; 3]]].into(), false);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn adaptive_avg_pool<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    output_size: [usize; N],
) -> Result<ShardTensor<D>> {
    adaptive::<D, N, Weighted>(x, "adaptive_avg_pool", output_size)
}

/// Computes the maxima over `output_size` areas in each spatial dim. See the [module](self).
///
/// # Errors
/// The errors of [`adaptive_avg_pool`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::pool::adaptive_max_pool;
///
/// let x = ShardTensor::solo(Tensor::<3>::from([[[1.0, 3.0, 5.0, 2.0]]]));
/// let y = adaptive_max_pool(x, [2])?;
/// y.local().to_data().assert_eq(&[[[3.0_f32, 5.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn adaptive_max_pool<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    output_size: [usize; N],
) -> Result<ShardTensor<D>> {
    adaptive::<D, N, Maximum>(x, "adaptive_max_pool", output_size)
}

fn adaptive<const D: usize, const N: usize, S: Combine>(
    x: ShardTensor<D>,
    operator: &'static str,
    output_size: [usize; N],
) -> Result<ShardTensor<D>> {
    let dims = x.dims();
    if D != N + 2 || output_size.contains(&0) || dims[2..].contains(&0) {
        let message = format!(
            "{output_size:?} outputs of {dims:?}; expected a size for every spatial dim of [batch, channels, *spatial]"
        );
        return Err(Error::operator(operator, message));
    }
    sampled::<D, S, _>(x, operator, output_size, || {
        let sizes = output_size.iter().enumerate();
        let sizes = sizes.map(|(spatial, outputs)| (spatial + 2, *outputs));
        let maps = sizes.map(|(dim, outputs)| DimMap::new(dim, areas(dims[dim], outputs)));
        maps.collect()
    })
}

macro_rules! layer {
    ($module:ident, $d:literal, $array:expr) => {
        impl<X: Field<$d>> Layer<X> for $module {
            type Output = X;

            #[track_caller]
            fn forward(&self, x: X) -> X {
                run(x, |x| adaptive_avg_pool(x, $array(self.output_size)))
            }
        }
    };
}

layer!(AdaptiveAvgPool1d, 3, |x| [x]);
layer!(AdaptiveAvgPool2d, 4, |x| x);
layer!(AdaptiveAvgPool3d, 5, |x| x);

/// Registry entries of adaptive pooling.
pub(super) const GOLDEN: [Golden; 6] = [
    Golden::new("adaptive_avg_pool1d", average::<3, 1>)
        .with_travels(TRAVELS)
        .with_modules("`AdaptiveAvgPool1d`"),
    Golden::new("adaptive_avg_pool2d", average::<4, 2>)
        .with_travels(TRAVELS)
        .with_modules("`AdaptiveAvgPool2d`"),
    Golden::new("adaptive_avg_pool3d", average::<5, 3>)
        .with_travels(TRAVELS)
        .with_modules("`AdaptiveAvgPool3d`"),
    Golden::new("adaptive_max_pool1d", maximum::<3, 1>).with_travels(TRAVELS),
    Golden::new("adaptive_max_pool2d", maximum::<4, 2>).with_travels(TRAVELS),
    Golden::new("adaptive_max_pool3d", maximum::<5, 3>).with_travels(TRAVELS),
];

/// Communication, forward and backward.
const TRAVELS: [&str; 2] = ["a cell of each area that ranks share", "the same back"];

fn average<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let sizes = case.attributes.array::<N>("output_size", 1);
    output(adaptive_avg_pool(case.input::<D>(0)?, sizes))
}

fn maximum<const D: usize, const N: usize>(case: &Case) -> Result<Box<dyn Output>> {
    let sizes = case.attributes.array::<N>("output_size", 1);
    output(adaptive_max_pool(case.input::<D>(0)?, sizes))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Shard, Traffic};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Areas([usize; 2], bool);

    impl Operator<4, 4> for Areas {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            if self.1 {
                inputs.remove(0).adaptive_max_pool(self.0)
            } else {
                inputs.remove(0).adaptive_avg_pool(self.0)
            }
        }
    }

    #[test]
    fn areas_may_be_shared_by_many_ranks() {
        for outputs in [[1, 1], [3, 2], [7, 9]] {
            for maximum in [true, false] {
                check_op(
                    &Areas(outputs, maximum),
                    &[[1, 2, 5, 7]],
                    &[],
                    &[0, 2, 3],
                    1e-5,
                );
            }
        }
    }

    #[test]
    fn an_average_of_all_cells_sends_one() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("x", 2)])?;
                let x = ShardTensor::<3>::ones([1, 1, 1000], &mesh, &[Shard(2)])?;
                let plan = x.dry_run(|x| adaptive_avg_pool(x, [1]))?;
                // The first rank owns the middle cell.
                assert_eq!(plan.bytes_sent_for(Traffic::Exchange), world.rank() * 4);
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<3>::ones([1, 1, 4], &Default::default()));
        let error = adaptive_max_pool(x, [2, 2]).unwrap_err().to_string();
        assert!(error.contains("[2, 2] outputs of [1, 1, 4]"), "{error}");
    }
}
