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
//! Maxima travel with the positions of their cells, for ties, if a sharded dim comes after another
//! spatial dim that becomes smaller.
//!
//! # Adjoint
//! The gradient of an average is spread equally over the cells of the area; that of a maximum goes
//! to the first cell, in row-major order, that holds it (the last one, if several are NaN), on any
//! mesh.

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
    Golden::new("adaptive_max_pool1d", maximum::<3, 1>).with_travels(TRAVELS_OF_MAXIMA),
    Golden::new("adaptive_max_pool2d", maximum::<4, 2>).with_travels(TRAVELS_OF_MAXIMA),
    Golden::new("adaptive_max_pool3d", maximum::<5, 3>).with_travels(TRAVELS_OF_MAXIMA),
];

/// Communication, forward and backward.
const TRAVELS: [&str; 2] = ["a cell of each area that ranks share", "the same back"];
const TRAVELS_OF_MAXIMA: [&str; 2] = [
    "a cell of each area that ranks share, with its position where ties need it",
    "the cells back",
];

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
    use burn::tensor::{Tensor, TensorData};
    use halocline_core::{Launcher, Placement, Shard, Traffic};

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

    /// Axes with their sizes, and the placements of a field.
    type Mesh<'a> = (&'a [(&'a str, usize)], &'a [Placement]);

    /// Gradient of maxima of few values, some of them NaN, for a cotangent that differs by output.
    fn gradient_of_maxima(outputs: [usize; 2], (axes, placements): Mesh<'_>) -> Vec<f32> {
        let shape = [1, 2, 5, 7];
        let value = |cell: usize| match cell * 7919 % 23 {
            0 => f32::NAN,
            value => (value / 9) as f32,
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
        let ranks = axes.iter().map(|(_, size)| size).product();
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let device = world.device().clone().inner();
            let x = Tensor::<4>::from_data(TensorData::new(values.clone(), shape), &device);
            let x = ShardTensor::distribute(x, &mesh, placements)?.require_grad();
            let y = adaptive_max_pool(x.clone(), outputs)?;
            let weights: Vec<f32> = (1..=2 * outputs[0] * outputs[1])
                .map(|i| i as f32)
                .collect();
            let weights = TensorData::new(weights, [1, 2, outputs[0], outputs[1]]);
            let weights = Tensor::<4>::from_data(weights, &device);
            let weights = ShardTensor::distribute(weights, &mesh, y.layout())?;
            let gradients = (y * weights).into_local().sum().backward();
            let gradient = x.grad(&gradients).expect("a gradient").full_tensor();
            Ok(gradient.into_data().iter::<f32>().collect::<Vec<_>>())
        });
        found.unwrap().remove(0)
    }

    #[test]
    fn of_equal_cells_the_first_receives_the_gradient_on_any_mesh() {
        const MESHES: [Mesh<'_>; 4] = [
            (&[("x", 2)], &[Shard(2)]),
            (&[("x", 2)], &[Shard(3)]),
            (&[("x", 4)], &[Shard(3)]),
            (&[("x", 2), ("y", 2)], &[Shard(2), Shard(3)]),
        ];
        for outputs in [[1, 1], [2, 2], [3, 2], [2, 9], [7, 3]] {
            let expected = gradient_of_maxima(outputs, (&[("x", 1)], &[Shard(2)]));
            for mesh in MESHES {
                let found = gradient_of_maxima(outputs, mesh);
                assert_eq!(found, expected, "{outputs:?} on {mesh:?}");
            }
        }
    }

    /// PyTorch's choice for a window of two rows: the first 3, and the last NaN.
    #[test]
    fn ties_are_broken_as_in_pytorch() {
        let device = burn::tensor::Device::default().autodiff();
        for (value, place) in [(3.0, 1), (f32::NAN, 6)] {
            let rows = [[1.0, value, 0.0, 2.0], [value, 1.0, value, 0.0]];
            let x = Tensor::<4>::from_data([[rows]], &device).require_grad();
            let gradients = x.clone().adaptive_max_pool([1, 1]).sum().backward();
            let gradient = x.grad(&gradients).expect("a gradient").into_data();
            let mut expected = [0.0; 8];
            expected[place] = 1.0;
            assert_eq!(gradient.iter::<f32>().collect::<Vec<_>>(), expected);
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
