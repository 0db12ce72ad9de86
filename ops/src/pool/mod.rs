//! Maximum and average pooling in one to three spatial dims.
//!
//! `y[b, c, i] = max (or mean) over k of x[b, c, i·stride − low + k·dilation]`. Semantics follow PyTorch's
//! `max_pool{1,2,3}d` and `avg_pool{1,2,3}d`: a maximum never takes padding, an average counts it or not, and
//! [`Rounding::Ceil`] keeps a last window that begins in the field or its low padding.
//!
//! # Placement
//! All dims may be sharded. A window's output lies with the rank that holds the window's middle cell.
//!
//! # Adjoint
//! The gradient of a maximum goes to the first cell, in row-major order, that holds it; that of an average to all cells
//! of the window alike. Gradients of halo cells travel back and add up.

mod pairs;

use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};
use burn::tensor::{Tensor, TensorData, module};
use halocline_core::{Error, Result, ShardTensor};

use crate::local::LocalOperator;
use crate::retype;
use crate::stencil::Stencil;
use crate::window::{Padding, Rounding, Window};

/// Whether an average counts padded cells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PaddingCount {
    /// Padding counts as cells that are zero.
    #[default]
    Included,
    /// The average is over cells of the field only.
    Excluded,
}

/// Window, stride, dilation and padding of a pooling over `N` spatial dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolOptions<const N: usize> {
    /// Cells of a window.
    pub kernel: [usize; N],
    /// Cells from one window to the next.
    pub stride: [usize; N],
    /// Cells from one cell of a window to the next (maximum only).
    pub dilation: [usize; N],
    /// Padding of every dim.
    pub padding: [Padding; N],
    /// What happens to a last window that does not fit.
    pub rounding: Rounding,
    /// Whether an average counts padded cells.
    pub count: PaddingCount,
}

impl<const N: usize> PoolOptions<N> {
    /// Windows that do not overlap and leave no gap.
    pub fn new(kernel: [usize; N]) -> Self {
        Self {
            kernel,
            stride: kernel,
            dilation: [1; N],
            padding: [Padding::default(); N],
            rounding: Rounding::Floor,
            count: PaddingCount::Included,
        }
    }

    /// These options with another stride.
    #[must_use]
    pub fn with_stride(self, stride: [usize; N]) -> Self {
        Self { stride, ..self }
    }

    /// These options with another padding.
    #[must_use]
    pub fn with_padding(self, padding: [Padding; N]) -> Self {
        Self { padding, ..self }
    }

    /// These options with another dilation.
    #[must_use]
    pub fn with_dilation(self, dilation: [usize; N]) -> Self {
        Self { dilation, ..self }
    }

    /// These options with another rounding.
    #[must_use]
    pub fn with_rounding(self, rounding: Rounding) -> Self {
        Self { rounding, ..self }
    }

    /// These options with another way to count.
    #[must_use]
    pub fn with_count(self, count: PaddingCount) -> Self {
        Self { count, ..self }
    }

    pub(crate) fn stencil(&self, operator: &'static str, fill: f64) -> Stencil {
        let windows = (0..N).map(|dim| Window {
            kernel: self.kernel[dim],
            stride: self.stride[dim],
            dilation: self.dilation[dim],
            padding: self.padding[dim],
            rounding: self.rounding,
        });
        Stencil::new(operator, windows.collect()).with_fill(fill)
    }
}

/// The maximum over windows.
///
/// # Errors
/// A placement without a rule, a window that fits nowhere or lies in padding alone, a failure of communication.
pub fn max_pool<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    options: &PoolOptions<N>,
) -> Result<ShardTensor<D>> {
    let stencil = options.stencil(
        name::<D, N>(x.dims(), ["max_pool1d", "max_pool2d", "max_pool3d"])?,
        f64::NEG_INFINITY,
    );
    let plan = stencil.plan(&x)?;
    for (window, dim) in stencil.windows().iter().zip(2..) {
        let (size, outputs) = (x.dims()[dim], plan.output.shape()[dim]);
        if let Some(output) = (0..outputs).find(|&output| !window.meets_cells(output, size)) {
            let message = format!(
                "dim {dim}: window {output} of {outputs} lies in padding alone, which has no maximum: {window:?}"
            );
            return Err(Error::operator(stencil.operator(), message));
        }
    }
    stencil.run(x, |x, _| {
        by_planes(x, stencil.windows(), |x, windows| {
            if windows.into_iter().all(is_pair) {
                return pairs::Maximum.run(x);
            }
            let options = MaxPoolOptions::new(windows.map(|w| w.kernel))
                .with_stride(windows.map(|w| w.stride))
                .with_dilation(windows.map(|w| w.dilation));
            module::max_pool2d(x, options)
        })
    })
}

/// Whether a dim is halved, as pooling mostly does.
fn is_pair(window: &Window) -> bool {
    (window.kernel, window.stride, window.dilation) == (2, 2, 1)
}

/// The average over windows.
///
/// # Errors
/// A placement without a rule, a window that fits nowhere, a failure of communication.
pub fn avg_pool<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    options: &PoolOptions<N>,
) -> Result<ShardTensor<D>> {
    let options = PoolOptions {
        dilation: [1; N],
        ..*options
    };
    let stencil = options.stencil(
        name::<D, N>(x.dims(), ["avg_pool1d", "avg_pool2d", "avg_pool3d"])?,
        0.0,
    );
    let size = x.dims();
    let plan = stencil.plan(&x)?;
    stencil.run(x, |x, outputs| {
        let mut y = by_planes(x, stencil.windows(), |x, windows| {
            if windows.into_iter().all(is_pair) {
                return pairs::Average.run(x);
            }
            let options = AvgPoolOptions::new(windows.map(|w| w.kernel))
                .with_stride(windows.map(|w| w.stride));
            module::avg_pool2d(x, options)
        });
        for (spatial, window) in stencil.windows().iter().enumerate() {
            let dim = spatial + 2;
            // As many factors as the kernel made outputs: one more than none, where this rank has none.
            let range = outputs.ranges()[dim].clone();
            let range = range.start..range.start + y.dims()[dim];
            if let Some(factors) = factors(
                window,
                options.count,
                size[dim],
                plan.output.shape()[dim],
                range,
            ) {
                let mut shape = [1; D];
                shape[dim] = factors.len();
                y = y.clone()
                    * Tensor::from_data(
                        TensorData::new(factors, shape),
                        (&y.device().inner(), y.dtype()),
                    );
            }
        }
        y
    })
}

/// The name of a pooling over `N` dims.
fn name<const D: usize, const N: usize>(
    dims: [usize; D],
    names: [&'static str; 3],
) -> Result<&'static str> {
    let name = N.checked_sub(1).and_then(|i| names.get(i));
    name.copied().filter(|_| D == N + 2).ok_or_else(|| {
        let message =
            format!("options of {N} dims for {dims:?}; expected [batch, channels, *spatial]");
        Error::operator("pool", message)
    })
}

/// Kernel size over the number of cells that count, for every output of a range; `None` if all are one, which is
/// decided from the whole field, so that every rank decides alike.
fn factors(
    window: &Window,
    count: PaddingCount,
    size: usize,
    outputs: usize,
    range: std::ops::Range<usize>,
) -> Option<Vec<f64>> {
    let Padding { low, high, .. } = window.padding;
    let padded = -(low as isize)..(size + high) as isize;
    let counts = |cell: &isize| {
        let boundary = window.padding.boundary[usize::from(*cell >= 0)];
        padded.contains(cell)
            && (count == PaddingCount::Included || boundary.source(*cell, size).is_some())
    };
    let counted = |output: usize| {
        let cells = window.input_range(&(output..output + 1));
        cells.filter(counts).count().max(1)
    };
    let factor = |output: usize| window.kernel as f64 / counted(output) as f64;
    (0..outputs)
        .any(|output| counted(output) != window.kernel)
        .then(|| {
            range
                .map(|output| factor(output.min(outputs - 1)))
                .collect()
        })
}

/// Pools over planes: a maximum or mean over a box is one over its last two dims and then one over the first.
fn by_planes<const D: usize>(
    x: Tensor<D>,
    windows: &[Window],
    pool: impl Fn(Tensor<4>, [&Window; 2]) -> Tensor<4>,
) -> Tensor<D> {
    let one = Window::new(1);
    let dims = x.dims();
    match windows {
        [width] => {
            let plane = x.reshape([dims[0], dims[1], 1, dims[2]]);
            let y = pool(plane, [&one, width]);
            let [batch, channels, _, width] = y.dims();
            retype(y.reshape([batch, channels, width]))
        }
        [height, width] => retype(pool(retype(x), [height, width])),
        [depth, height, width] => {
            let planes = x.reshape([dims[0], dims[1] * dims[2], dims[3], dims[4]]);
            let planes = pool(planes, [height, width]);
            let [_, _, rows, columns] = planes.dims();
            let lines = planes.reshape([dims[0], dims[1], dims[2], rows * columns]);
            let y = pool(lines, [depth, &one]);
            let layers = y.dims()[2];
            retype(y.reshape([dims[0], dims[1], layers, rows, columns]))
        }
        _ => unreachable!("a stencil of {} dims has been refused", windows.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Field;
    use crate::testing::{Operator, check_op, random};
    use burn::tensor::DType;
    use halocline_core::{Boundary, Distribution, Launcher, Layout, Overlap, RandomKey, Shard};

    struct Pool(PoolOptions<2>, Kind);

    enum Kind {
        Max,
        Average,
    }

    impl Operator<4, 4> for Pool {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X::Rank<4> {
            let x = inputs.remove(0);
            let y = match self.1 {
                Kind::Max => x.max_pool(&self.0),
                Kind::Average => x.avg_pool(&self.0),
            };
            X::from_shard(y.into_shard())
        }
    }

    #[test]
    fn windows_in_padding_alone_have_no_maximum() {
        let x = ShardTensor::solo(Tensor::<4>::zeros([1, 1, 5, 5], &Default::default()));
        let options = PoolOptions::new([2, 2]).with_padding([Padding::zeros(0, 2); 2]);
        let every = max_pool(x.clone(), &options.with_stride([1, 1]));
        let error = every.unwrap_err().to_string();
        assert!(
            error.contains("window 5 of 6 lies in padding alone"),
            "{error}"
        );
        // A stride may pass over such windows.
        assert_eq!(max_pool(x.clone(), &options).unwrap().dims(), [1, 1, 3, 3]);
        let nothing = PoolOptions::new([0, 2]);
        let error = max_pool(x.clone(), &nothing).unwrap_err().to_string();
        assert!(error.contains("must not be zero"), "{error}");
        assert!(avg_pool(x, &options).is_ok());
    }

    /// Windows beside the edge count fewer cells: their factor is no number of 24 bits.
    #[test]
    fn averages_of_f64_are_as_exact_as_that() {
        let device = burn::tensor::Device::default();
        let x = Tensor::<4>::ones([1, 1, 5, 5], (&device, DType::F64));
        let options = PoolOptions::new([5, 5]).with_padding([Padding::zeros(2, 2); 2]);
        let options = options.with_count(PaddingCount::Excluded);
        let y = avg_pool(ShardTensor::solo(x), &options).unwrap();
        for value in y.local().clone().into_data().iter::<f64>() {
            assert!((value - 1.0).abs() < 1e-15, "{value}");
        }
    }

    #[test]
    fn overlapping_periodic_windows() {
        let padding = [Padding::zeros(1, 0), Padding::new(1, Boundary::Periodic)];
        let options = PoolOptions::new([3, 3])
            .with_stride([2, 1])
            .with_padding(padding);
        for kind in [Kind::Max, Kind::Average] {
            check_op(
                &Pool(options, kind),
                &[[2, 2, 9, 7]],
                &[],
                &[0, 1, 2, 3],
                1e-6,
            );
        }
    }

    /// Whatever the mesh, the boundary and the windows: outputs that need no halo have the same bits when they are computed
    /// before it comes.
    #[test]
    fn halos_may_travel_while_the_interior_is_computed() {
        let boundaries = [Boundary::Zeros, Boundary::Periodic, Boundary::Reflect];
        let results = |overlap| {
            let found = Launcher::local(4).overlap(overlap).collect(|world| {
                let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
                let normal = Distribution::Normal {
                    mean: 0.0,
                    std: 1.0,
                };
                let mut found = Vec::new();
                let mut pool = |x: ShardTensor<4>, options: &PoolOptions<2>| -> Result<()> {
                    let x = x.inner();
                    let most = max_pool(x.clone(), options)?.into_parts().0;
                    let mean = avg_pool(x, options)?.into_parts().0;
                    found.push([most.into_data(), mean.into_data()]);
                    Ok(())
                };
                for (case, [low, high]) in [[0, 1], [1, 1], [1, 2], [2, 0]].into_iter().enumerate()
                {
                    // Windows that reach beyond a neighbour's cells, and mirrored boxes of several cells.
                    let width = 1 + case;
                    let options = PoolOptions::new([2 * width + 1, 2 + case % 2])
                        .with_stride([1 + case % 2, 2])
                        .with_dilation([1, 1 + case / 2])
                        .with_padding([
                            Padding::new(width, boundaries[low]),
                            Padding::new(1, boundaries[high]),
                        ])
                        .with_rounding([Rounding::Floor, Rounding::Ceil][case / 2])
                        .with_count(PaddingCount::Excluded);
                    let key = || RandomKey::new(5, "x");
                    for placements in [[Shard(2), Shard(3)], [Shard(0), Shard(2)]] {
                        let x =
                            ShardTensor::random([3, 2, 15, 22], normal, key(), &mesh, &placements)?;
                        pool(x, &options)?;
                    }
                    let placements = [Shard(2), Shard(3)];
                    let layout = Layout::new(mesh.shape(), &[1, 2, 15, 22], &placements)?;
                    for extents in [[15, 0], [4, 11]] {
                        let layout = layout.with_extents(2, &extents)?;
                        let whole = random([1, 2, 15, 22], "x", 0).inner();
                        pool(ShardTensor::distribute_to(whole, &mesh, &layout)?, &options)?;
                    }
                }
                Ok(found)
            });
            found.unwrap().concat().concat()
        };
        let (early, late) = (results(Overlap::On), results(Overlap::Off));
        for (early, late) in early.iter().zip(&late) {
            early.assert_eq(late, true);
        }
    }

    /// Where what lies beyond the field is the field itself, the average of ones is one.
    #[test]
    fn averages_count_what_a_boundary_supplies() {
        let ones = Tensor::<3>::ones([1, 1, 5], &Default::default());
        for boundary in [Boundary::Periodic, Boundary::Reflect, Boundary::Replicate] {
            for count in [PaddingCount::Included, PaddingCount::Excluded] {
                for rounding in [Rounding::Floor, Rounding::Ceil] {
                    let options = PoolOptions::new([2])
                        .with_padding([Padding::new(1, boundary)])
                        .with_rounding(rounding)
                        .with_count(count);
                    let y: Vec<f32> = ones.clone().avg_pool(&options).into_data().iter().collect();
                    assert!(y.iter().all(|&y| y == 1.0), "{options:?}: {y:?}");
                }
            }
        }
    }

    #[test]
    fn a_window_over_the_end_takes_nothing_from_the_other() {
        let x = Tensor::<3>::from_floats([[[1.0, 2.0, 3.0, 4.0, 5.0]]], &Default::default());
        let options = PoolOptions::new([2])
            .with_padding([Padding::new(0, Boundary::Periodic)])
            .with_rounding(Rounding::Ceil);
        let y: Vec<f32> = (x.clone() * -1.0)
            .max_pool(&options)
            .into_data()
            .iter()
            .collect();
        assert_eq!(y, [-1.0, -3.0, -5.0]);
        let y: Vec<f32> = x.avg_pool(&options).into_data().iter().collect();
        assert_eq!(y, [1.5, 3.5, 5.0]);
    }

    #[test]
    fn windows_that_count_field_cells_only() {
        let options = PoolOptions::new([4, 2])
            .with_stride([3, 2])
            .with_padding([Padding::zeros(2, 1), Padding::zeros(1, 1)])
            .with_rounding(Rounding::Ceil)
            .with_count(PaddingCount::Excluded);
        check_op(
            &Pool(options, Kind::Average),
            &[[1, 2, 11, 8]],
            &[],
            &[2, 3],
            1e-6,
        );
    }
}
