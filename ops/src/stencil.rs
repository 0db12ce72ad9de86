//! The driver of all stencil operators: plan, exchange, kernel.
//!
//! An operator gives a [`Window`] per spatial dim. From it follow the global output size, the extents of the output,
//! what each rank needs, and whether anything must travel at all.

use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::ops::{fan_out, paste};
use halocline_core::{
    Error, Exchange, ExchangePlan, IndexBox, Layout, Need, Operation, Result, ShardTensor, Source,
    Traffic, segments, trace,
};

use crate::empty::drop_empty;
use crate::window::{Padding, Rounding, Window, windows_within};

/// What a stencil operator does on a layout: the same on every rank but for the boxes.
#[derive(Clone, Debug)]
pub struct StencilPlan {
    /// The layout of the result.
    pub output: Layout,
    /// What each rank assembles before its kernel runs; `None` if every rank has what it needs.
    pub exchange: Option<Arc<ExchangePlan>>,
}

/// A stencil operator on `[batch, channels, *spatial]`: a window per spatial dim, and what lies beyond the field.
///
/// # Placement
/// All dims may be sharded, with any extents; channels must be whole if the operator mixes them.
///
/// # Adjoint
/// That of the exchange and of the local kernel, in turn: gradients of halo cells travel back and add up.
///
/// # Example
/// ```
/// use halocline_core::{Boundary, Launcher, LocalGradient, Shard, ShardTensor};
/// use halocline_ops::{Padding, Stencil, Window};
///
/// // The difference to the next cell on a ring.
/// let forward = Padding { low: 0, high: 1, boundary: [Boundary::Periodic; 2] };
/// let stencil = Stencil::new("difference", vec![Window::new(2).with_padding(forward)]);
/// Launcher::local(3).run(|world| {
///     let mesh = world.mesh([("x", 3)])?;
///     let x = ShardTensor::<3>::ones([1, 1, 7], &mesh, &[Shard(2)])?;
///     let y = stencil.run(x, |x, _| {
///         let cells = x.dims()[2] - 1;
///         x.clone().narrow(2, 1, cells) - x.narrow(2, 0, cells)
///     })?;
///     assert_eq!(y.full_tensor(LocalGradient::Replicated).sum().into_scalar::<f32>(), 0.0);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Stencil {
    operator: &'static str,
    windows: Vec<Window>,
    channels: Option<usize>,
    /// The bits of the fill value, so that stencils can be compared and hashed.
    fill: u64,
}

impl Stencil {
    /// An operator with a window per spatial dim, whose kernel treats channels alike and does not pad.
    pub fn new(operator: &'static str, windows: Vec<Window>) -> Self {
        Self {
            operator,
            windows,
            channels: None,
            fill: 0.0_f64.to_bits(),
        }
    }

    /// An operator that mixes channels and gives `channels` of them.
    #[must_use]
    pub fn with_channels(self, channels: usize) -> Self {
        Self {
            channels: Some(channels),
            ..self
        }
    }

    /// An operator for which cells beyond a [`Boundary::Zeros`](halocline_core::Boundary::Zeros) are `fill`.
    #[must_use]
    pub fn with_fill(self, fill: f64) -> Self {
        Self {
            fill: fill.to_bits(),
            ..self
        }
    }

    /// The operator's name.
    pub fn operator(&self) -> &'static str {
        self.operator
    }

    /// The windows, one per spatial dim.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// A parameter that all ranks hold alike, for use in the kernel on `x`: its gradient is summed over the ranks
    /// between which `x` is sharded.
    ///
    /// # Errors
    /// Those of [`plan`](Self::plan), before anything is sent.
    pub fn parameter<const D: usize, const E: usize>(
        &self,
        x: &ShardTensor<D>,
        parameter: Tensor<E>,
    ) -> Result<Tensor<E>> {
        self.plan(x)?;
        Ok(fan_out(
            parameter,
            x.mesh(),
            &crate::sharded_axes(x),
            self.operator,
        ))
    }

    /// What the operator would do on a tensor: nothing is sent.
    ///
    /// # Errors
    /// A placement without a rule, a window that fits nowhere.
    pub fn plan<const D: usize>(&self, x: &ShardTensor<D>) -> Result<Arc<StencilPlan>> {
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
                let whole = layout.extents(dim).len() == 1;
                let inside = window.padding.low == 0 && window.padding.high == 0;
                !(whole && inside && window.rounding == Rounding::Floor)
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
        Ok(StencilPlan { output, exchange })
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
            // A last window may reach beyond the padding; what lies there is fill, whatever the boundary.
            let size = layout.shape()[dim];
            let padding =
                spatial.map_or_else(Padding::default, |spatial| self.windows[spatial].padding);
            let padded = range.start..range.end.min((size + padding.high) as isize);
            runs.push(segments(padded, size, boundary[0], boundary[1]));
            shape.push(match spatial {
                Some(spatial) if range.is_empty() => self.windows[spatial].span(),
                _ => range.len().max(1),
            });
        }
        Need::product(shape, &runs)
    }

    /// Runs the operator. The kernel computes a box of outputs, given by its global indices, from the cells that its
    /// windows reach; on a rank without outputs it gets one window of fill, and what it gives is dropped.
    ///
    /// Parameters that the kernel captures must come from [`parameter`](Self::parameter): of others each rank finds its own
    /// part of the gradient only, and that is not noticed.
    ///
    /// An output may depend on the cells of its window only: for results without autodiff, while large boxes travel between
    /// processes, the kernel computes all outputs with anything in the place of these boxes, and then again those that
    /// depend on them.
    ///
    /// # Errors
    /// Those of [`plan`](Self::plan); a kernel that gives another number of outputs; a failure of communication.
    pub fn run<const D: usize>(
        &self,
        x: ShardTensor<D>,
        kernel: impl Fn(Tensor<D>, &IndexBox) -> Tensor<D>,
    ) -> Result<ShardTensor<D>> {
        let plan = self.plan(&x)?;
        let kernel = |cells, outputs: &IndexBox| {
            let _span = trace::span(self.operator);
            kernel(cells, outputs)
        };
        let outputs = plan.output.local_box(x.mesh().position());
        let local = match &plan.exchange {
            None => kernel(x.local().clone(), &outputs),
            // The same graph on all ranks and engines.
            Some(exchange) if x.local().device().is_autodiff() => {
                kernel(x.run_plan(self.operator, exchange)?, &outputs)
            }
            Some(exchange) => self.run_in_parts(&x, exchange, &outputs, kernel)?,
        };
        let mut dims = outputs.ranges().iter().zip(local.dims());
        if !dims.all(|(outputs, size)| outputs.is_empty() || outputs.len() == size) {
            let message = format!(
                "the kernel gave {:?} for outputs of shape {:?}",
                local.dims(),
                outputs.shape()
            );
            return Err(Error::operator(self.operator, message));
        }
        let (_, _, mesh) = x.into_parts();
        let local = drop_empty(local, &plan.output, mesh.position(), self.operator)?;
        Ok(ShardTensor::from_parts(local, plan.output.clone(), mesh))
    }

    /// This rank's outputs, those that need no other rank's cells while these travel.
    fn run_in_parts<const D: usize>(
        &self,
        x: &ShardTensor<D>,
        plan: &Arc<ExchangePlan>,
        outputs: &IndexBox,
        kernel: impl Fn(Tensor<D>, &IndexBox) -> Tensor<D>,
    ) -> Result<Tensor<D>> {
        let mesh = x.mesh();
        let exchange = Exchange::with_adjoint(
            Operation::new(self.operator, Traffic::Exchange, Some(x.layout())),
            mesh.comm().clone(),
            mesh.shape().ranks().into(),
            plan.clone(),
        );
        let shard = x.local().clone().into_dispatch();
        let boxes = exchange.send_all(&shard)?;
        let interior = plan.interior();
        let early = interior.map(|cells| self.outputs_within(&cells, outputs));
        let early = early
            .filter(|early| boxes.overlap(early.volume() as f64 / outputs.volume().max(1) as f64));
        let Some(early) = early else {
            let cells = exchange.assemble(shard, boxes.finish()?);
            return Ok(kernel(Tensor::from_dispatch(cells), outputs));
        };
        let compute = |received: &[_], cells: &IndexBox, part: &IndexBox| {
            let cells = exchange.assemble_part(&shard, received, cells);
            kernel(Tensor::from_dispatch(cells), part)
        };
        // All at once, and then again what depends on other ranks' cells: parts put together would be copied.
        let first = compute(&[], &IndexBox::whole(&plan.output_shape), outputs);
        let received = boxes.finish()?;
        if first.device().is_autodiff() {
            // By a parameter: the same graph on all ranks, and nothing in it of cells that had not come.
            let cells = exchange.assemble(shard, received);
            return Ok(kernel(Tensor::from_dispatch(cells), outputs));
        }
        let mut local = first.into_dispatch();
        for part in outputs.around(&early) {
            let at = part.seen_from(outputs);
            let cells = self.cells_of(&at, &plan.output_shape);
            let again = compute(&received, &cells, &part);
            local = paste(local, &at, again.into_dispatch());
        }
        Ok(Tensor::from_dispatch(local))
    }

    /// The outputs whose windows lie in a box of what a rank assembles.
    fn outputs_within(&self, cells: &IndexBox, outputs: &IndexBox) -> IndexBox {
        let mut ranges = outputs.ranges().to_vec();
        for (dim, window) in self.windows.iter().enumerate() {
            let (cells, range) = (&cells.ranges()[dim + 2], &mut ranges[dim + 2]);
            let own = windows_within(cells, window.stride, window.span(), range.len());
            *range = range.start + own.start..range.start + own.end;
        }
        IndexBox::new(ranges)
    }

    /// The cells, of those of this shape that a rank assembles, that a box of its outputs needs.
    fn cells_of(&self, outputs: &IndexBox, assembled: &[usize]) -> IndexBox {
        let mut ranges = IndexBox::whole(assembled).ranges().to_vec();
        for (dim, window) in self.windows.iter().enumerate() {
            let outputs = &outputs.ranges()[dim + 2];
            let last = (outputs.end - 1) * window.stride;
            ranges[dim + 2] = outputs.start * window.stride..last + window.span();
        }
        IndexBox::new(ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halocline_core::{Boundary, Distribution, Launcher, Overlap, RandomKey, Shard};

    /// A parameter that the kernel brings is differentiated as on ranks that wait for halos first.
    #[test]
    fn parameters_have_the_same_gradient_while_halos_travel() {
        let gradients = |overlap| {
            let launcher = Launcher::local(3).overlap(overlap);
            let found = launcher.collect(|world| {
                let mesh = world.mesh([("x", 3)])?;
                let normal = Distribution::Normal {
                    mean: 0.0,
                    std: 1.0,
                };
                let key = RandomKey::new(3, "x");
                let x = ShardTensor::random([2, 1, 17], normal, key, &mesh, &[Shard(2)])?.inner();
                let ring = Padding {
                    low: 1,
                    high: 1,
                    boundary: [Boundary::Periodic; 2],
                };
                let stencil = Stencil::new("mean", vec![Window::new(3).with_padding(ring)]);
                let autodiff = world.device().clone().inner().autodiff();
                let scale = Tensor::<1>::from_floats([0.3], &autodiff).require_grad();
                let parameter = stencil.parameter(&x, scale.clone())?;
                let y = stencil.run(x, |x, _| {
                    let cells = x.dims()[2] - 2;
                    // Not finite where a cell is zero, as those may be that have not come.
                    let x = x.recip();
                    let sides = x.clone().narrow(2, 0, cells) + x.narrow(2, 2, cells);
                    sides * parameter.clone().reshape([1, 1, 1])
                })?;
                let gradients = y.into_parts().0.sum().backward();
                let gradient = scale.grad(&gradients).expect("a gradient");
                Ok(gradient.into_data())
            });
            let found = found.unwrap();
            assert!(
                found
                    .iter()
                    .all(|data| data.iter::<f32>().all(f32::is_finite))
            );
            found
        };
        let (early, late) = (gradients(Overlap::On), gradients(Overlap::Off));
        for (early, late) in early.iter().zip(&late) {
            early.assert_eq(late, true);
        }
    }

    #[test]
    fn a_kernel_that_gives_other_outputs_is_refused() {
        let x = ShardTensor::solo(Tensor::<3>::zeros([1, 1, 6], &Default::default()));
        let window = Window::new(3).with_padding(Padding::zeros(1, 1));
        let same = Stencil::new("same", vec![window]).run(x, |x, _| x * 2.0);
        let error = same.unwrap_err().to_string();
        assert!(
            error.contains("[1, 1, 8] for outputs of shape [1, 1, 6]"),
            "{error}"
        );
    }
}
