//! What all stencil operators share: the map from output to input ranges, and the driver that plans and exchanges.
//!
//! An operator gives a [`Window`] per spatial dim. From it follow the global output size, the extents of the output,
//! what each rank needs, and whether anything must travel at all.

use std::hash::Hash;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::{
    Boundary, Error, ExchangePlan, Layout, Need, Result, ShardTensor, Source, segments,
};

use crate::empty::drop_empty;

/// Padding of one dim: how many cells on each side, and what they hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Padding {
    /// Cells before the first.
    pub low: usize,
    /// Cells after the last.
    pub high: usize,
    /// What they hold, before and after.
    pub boundary: [Boundary; 2],
}

impl Padding {
    /// The same padding on both sides.
    pub fn new(width: usize, boundary: Boundary) -> Self {
        Self::zeros(width, width).with_boundary(boundary)
    }

    /// Zeros on both sides.
    pub fn zeros(low: usize, high: usize) -> Self {
        Self {
            low,
            high,
            boundary: [Boundary::Zeros; 2],
        }
    }

    /// This padding with other values.
    #[must_use]
    pub fn with_boundary(self, boundary: Boundary) -> Self {
        Self {
            boundary: [boundary; 2],
            ..self
        }
    }

    /// Whether a kernel that pads with zeros can do this padding itself.
    fn is_plain(&self) -> bool {
        let zeros = |width: usize, boundary| width == 0 || boundary == Boundary::Zeros;
        zeros(self.low, self.boundary[0]) && zeros(self.high, self.boundary[1])
    }
}

/// How a last window that does not fit is treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// It is left out.
    #[default]
    Floor,
    /// It counts if it begins in the field or its low padding.
    Ceil,
}

/// The window of an operator in one dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Cells in the window.
    pub kernel: usize,
    /// Cells from one window to the next.
    pub stride: usize,
    /// Cells from one cell of a window to the next.
    pub dilation: usize,
    /// Padding.
    pub padding: Padding,
    /// What happens to a last window that does not fit.
    pub rounding: Rounding,
}

impl Window {
    /// The cells from the window's first to its last.
    pub fn span(&self) -> usize {
        (self.kernel - 1) * self.dilation + 1
    }

    /// The global output size for an input of `size` cells; the one place with this arithmetic.
    ///
    /// # Errors
    /// A window of nothing, one that fits nowhere, or padding wider than its boundary can fill.
    pub fn output_size(&self, operator: &str, dim: usize, size: usize) -> Result<usize> {
        let fail = |what: String| Err(Error::operator(operator, format!("dim {dim}: {what}")));
        if self.kernel == 0 || self.stride == 0 || self.dilation == 0 {
            return fail(format!(
                "kernel, stride and dilation must not be zero, got {self:?}"
            ));
        }
        let Padding {
            low,
            high,
            boundary,
        } = self.padding;
        let padded = size + low + high;
        if padded < self.span() {
            return fail(format!(
                "a window of {} cells does not fit into {size} cells with padding {low} and {high}",
                self.span()
            ));
        }
        for (width, boundary) in [(low, boundary[0]), (high, boundary[1])] {
            if width > 0 && boundary == Boundary::Reflect && width >= size {
                return fail(format!(
                    "reflecting {width} cells needs more than {width} cells, got {size}"
                ));
            }
            if width > 0 && boundary != Boundary::Zeros && size == 0 {
                return fail(format!("{boundary:?} padding of a dim without cells"));
            }
        }
        let free = padded - self.span();
        Ok(match self.rounding {
            Rounding::Floor => free / self.stride + 1,
            Rounding::Ceil => {
                let outputs = free.div_ceil(self.stride) + 1;
                let begins_inside = (outputs - 1) * self.stride < size + low;
                outputs - usize::from(!begins_inside)
            }
        })
    }

    /// The input cells that a range of outputs is computed from, padding included.
    pub fn input_range(&self, outputs: &Range<usize>) -> Range<isize> {
        let first = |output: usize| (output * self.stride) as isize - self.padding.low as isize;
        if outputs.is_empty() {
            return 0..0;
        }
        first(outputs.start)..first(outputs.end - 1) + self.span() as isize
    }

    /// The extents of the output: a window belongs to the part that holds its middle cell.
    pub fn output_extents(&self, extents: &[usize], outputs: usize) -> Vec<usize> {
        let size: usize = extents.iter().sum();
        let middle = (self.span() - 1) / 2;
        // The first output whose middle lies at or after a cell.
        let bound = |cell: usize| {
            if cell == 0 {
                0
            } else if cell == size {
                outputs
            } else {
                let reach = (cell + self.padding.low).saturating_sub(middle);
                reach.div_ceil(self.stride).min(outputs)
            }
        };
        let mut start = 0;
        extents
            .iter()
            .map(|extent| {
                let range = start..start + extent;
                start = range.end;
                // Without cells there is nothing to own; if no part has any, the last one takes what padding yields.
                if range.is_empty() {
                    0
                } else {
                    bound(range.end) - bound(range.start)
                }
            })
            .collect()
    }
}

/// What a stencil operator does on a layout: the same on every rank but for the boxes.
#[derive(Clone, Debug)]
pub struct StencilPlan {
    /// The layout of the result.
    pub output: Layout,
    /// What each rank assembles before its kernel runs; `None` if every rank has what it needs.
    pub exchange: Option<Arc<ExchangePlan>>,
    /// Zeros that the kernel pads with itself, per spatial dim: nothing where the exchange supplies them.
    pub kernel_padding: Vec<(usize, usize)>,
}

/// Which padding a local kernel can do by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum KernelPadding {
    /// Any number of zeros on either side.
    AnySides,
    /// As many zeros on both sides.
    Symmetric,
    /// None.
    Nothing,
}

/// How an operator's stencil is to be run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stencil {
    pub(crate) operator: &'static str,
    /// A window per spatial dim, the first of which is dim 2.
    pub(crate) windows: Vec<Window>,
    pub(crate) kernel_padding: KernelPadding,
    /// Output channels, where they differ from the input's.
    pub(crate) channels: Option<usize>,
    /// The bits of the value beyond zero boundaries.
    pub(crate) fill: u64,
}

impl Stencil {
    /// Plans the stencil on a tensor's layout, or finds the plan.
    pub(crate) fn plan<const D: usize>(&self, x: &ShardTensor<D>) -> Result<Arc<StencilPlan>> {
        x.require_resolved(self.operator)?;
        if self.windows.len() + 2 != D {
            return Err(Error::operator(
                self.operator,
                format!("{} windows for a tensor of {D} dims", self.windows.len()),
            ));
        }
        if self.channels.is_some() {
            x.require_whole(self.operator, 1)?;
        }
        let mesh = x.mesh();
        let key = (self.clone(), x.layout().clone());
        mesh.cache().get_or_make(key, |(stencil, layout)| {
            stencil.make(layout, mesh.position(), mesh.size())
        })
    }

    /// The pure part: from a layout to the plan of one position.
    fn make(&self, layout: &Layout, position: usize, size: usize) -> Result<StencilPlan> {
        let mut extents = layout.all_extents().to_vec();
        if let Some(channels) = self.channels {
            extents[1] = vec![channels];
        }
        for (window, dim) in self.windows.iter().zip(2..) {
            let outputs = window.output_size(self.operator, dim, layout.shape()[dim])?;
            extents[dim] = window.output_extents(layout.extents(dim), outputs);
        }
        let output = layout.derive(layout.placements().to_vec(), extents);

        // Dims that the exchange supplies with all that the windows reach; the same on every rank.
        let supplied: Vec<bool> = self
            .windows
            .iter()
            .zip(2..)
            .map(|(window, dim)| {
                let Padding { low, high, .. } = window.padding;
                let kernel_pads = match self.kernel_padding {
                    KernelPadding::AnySides => true,
                    KernelPadding::Symmetric => low == high,
                    KernelPadding::Nothing => low == 0 && high == 0,
                };
                let whole = layout.extents(dim).len() == 1;
                let fits = window.rounding == Rounding::Floor
                    || self.kernel_padding != KernelPadding::Nothing;
                !(whole && window.padding.is_plain() && kernel_pads && fits)
            })
            .collect();
        let need_of = |position| self.need(layout, &output, &supplied, position);
        let all_local = (0..size).all(|position| {
            let cells = layout.local_box(position);
            let need = need_of(position);
            need.shape == cells.shape() && need == Need::of(cells)
        });
        let exchange = (!all_local).then(|| {
            let plan = ExchangePlan::new(Source::Layout(layout), position, size, need_of);
            Arc::new(plan.with_fill(f64::from_bits(self.fill)))
        });
        let kernel_padding = self
            .windows
            .iter()
            .zip(&supplied)
            .map(|(window, supplied)| {
                let Padding { low, high, .. } = window.padding;
                if *supplied { (0, 0) } else { (low, high) }
            });
        Ok(StencilPlan {
            exchange,
            kernel_padding: kernel_padding.collect(),
            output,
        })
    }

    /// The cells that a position needs. One without outputs gets a single window of fill, so that its kernel has
    /// something to run on and the graph is the same on all ranks.
    fn need(&self, layout: &Layout, output: &Layout, supplied: &[bool], position: usize) -> Need {
        let (inputs, outputs) = (layout.local_box(position), output.local_box(position));
        let mut shape = Vec::new();
        let mut runs = Vec::new();
        for dim in 0..layout.shape().len() {
            let own = &inputs.ranges()[dim];
            let spatial = dim.checked_sub(2).filter(|&spatial| supplied[spatial]);
            let range = match spatial {
                Some(spatial) => self.windows[spatial].input_range(&outputs.ranges()[dim]),
                None => own.start as isize..own.end as isize,
            };
            let boundary = spatial.map_or_else(Default::default, |spatial| {
                self.windows[spatial].padding.boundary
            });
            runs.push(segments(
                range.clone(),
                layout.shape()[dim],
                boundary[0],
                boundary[1],
            ));
            shape.push(match spatial {
                Some(spatial) if range.is_empty() => self.windows[spatial].span(),
                _ => range.len().max(1),
            });
        }
        Need::product(shape, &runs)
    }

    /// Runs the stencil: plan, exchange, kernel.
    pub(crate) fn run<const D: usize>(
        &self,
        x: ShardTensor<D>,
        kernel: impl FnOnce(Tensor<D>, &StencilPlan) -> Tensor<D>,
    ) -> Result<ShardTensor<D>> {
        let plan = self.plan(&x)?;
        let haloed = match &plan.exchange {
            Some(exchange) => x.run_plan(self.operator, exchange)?,
            None => x.local().clone(),
        };
        let (_, _, mesh) = x.into_parts();
        let local = kernel(haloed, &plan);
        let local = drop_empty(local, &plan.output, mesh.position(), self.operator)?;
        Ok(ShardTensor::from_parts(local, plan.output.clone(), mesh))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn window() -> impl Strategy<Value = Window> {
        let sizes = (
            1..6_usize,
            1..5_usize,
            1..4_usize,
            0..6_usize,
            0..6_usize,
            any::<bool>(),
        );
        sizes.prop_map(|(kernel, stride, dilation, low, high, ceil)| Window {
            kernel,
            stride,
            dilation,
            padding: Padding::zeros(low, high),
            rounding: if ceil {
                Rounding::Ceil
            } else {
                Rounding::Floor
            },
        })
    }

    proptest! {
        #[test]
        fn output_extents_sum_to_the_output(window in window(), extents in prop::collection::vec(0..9_usize, 1..6)) {
            let size: usize = extents.iter().sum();
            prop_assume!(size > 0);
            if let Ok(outputs) = window.output_size("test", 2, size) {
                let parts = window.output_extents(&extents, outputs);
                prop_assert_eq!(parts.iter().sum::<usize>(), outputs, "{:?}", parts);
                let low = (window.span() - 1) / 2;
                if window.stride == 1 && window.padding == Padding::zeros(low, window.span() - 1 - low) {
                    prop_assert_eq!(parts, extents);
                }
            }
        }

        #[test]
        fn floor_windows_stay_within_the_padded_field(window in window(), size in 1..40_usize) {
            let window = Window { rounding: Rounding::Floor, ..window };
            if let Ok(outputs) = window.output_size("test", 2, size) {
                let reach = window.input_range(&(0..outputs));
                prop_assert_eq!(reach.start, -(window.padding.low as isize));
                prop_assert!(reach.end <= (size + window.padding.high) as isize);
                prop_assert!(reach.end + window.stride as isize > (size + window.padding.high) as isize);
            }
        }
    }

    #[test]
    fn a_window_that_fits_nowhere_is_an_error_with_its_numbers() {
        let window = Window {
            kernel: 5,
            stride: 1,
            dilation: 2,
            padding: Padding::zeros(1, 1),
            rounding: Rounding::Floor,
        };
        let error = window.output_size("conv2d", 3, 4).unwrap_err().to_string();
        assert_eq!(
            error,
            "conv2d: dim 3: a window of 9 cells does not fit into 4 cells with padding 1 and 1"
        );
    }
}
