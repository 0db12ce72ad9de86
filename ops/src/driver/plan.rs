//! Plans of operators that need cells of other ranks, derived from the maps of their dims.

use std::sync::Arc;

use halocline_core::comm::Operation;
use halocline_core::ops::Exchange;
use halocline_core::plan::{ExchangePlan, Need, Sides, Source, check_poles};
use halocline_core::{DeviceMesh, Layout, Result, Traffic};

use super::reach::Reach;

/// Plan of a stencil operator for a layout; the same on every rank except for the boxes.
#[derive(Clone, Debug)]
pub(crate) struct StencilPlan {
    /// Layout of the result.
    pub output: Layout,
    /// Exchange that assembles each rank's input of the kernel; `None` if every rank already holds
    /// it.
    pub exchange: Option<Arc<ExchangePlan>>,
}

/// Maps from the outputs of an operator to its inputs, for dims from `first` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reaches<'a> {
    pub operator: &'a str,
    pub first: usize,
    pub dims: &'a [Reach],
}

impl StencilPlan {
    /// Exchange for a tensor of this layout, for operators that run it themselves.
    pub(crate) fn exchange(
        &self,
        operator: &'static str,
        layout: &Layout,
        mesh: &DeviceMesh,
    ) -> Option<Exchange> {
        self.exchange.as_ref().map(|plan| {
            let operation = Operation::new(operator, Traffic::Exchange, Some(layout));
            exchange_of(plan.clone(), operation, mesh)
        })
    }
}

/// Exchange of a plan with its adjoint, among the ranks of a mesh.
pub(crate) fn exchange_of(
    plan: Arc<ExchangePlan>,
    operation: Operation,
    mesh: &DeviceMesh,
) -> Exchange {
    let ranks = mesh.shape().ranks().into();
    Exchange::with_adjoint(operation, mesh.comm().clone(), ranks, plan)
}

impl Reaches<'_> {
    /// Map of a dim; `None` if outputs need only the cells at their own positions.
    fn of(&self, dim: usize) -> Option<&Reach> {
        self.dims.get(dim.checked_sub(self.first)?)
    }

    /// Plans the operator for an input of layout `layout`. The output has the placements of `like`,
    /// and in dims without a map its extents.
    ///
    /// # Errors
    /// A window that does not fit; a pole boundary of a field without opposite meridians.
    pub(crate) fn plan(
        &self,
        layout: &Layout,
        mesh: &DeviceMesh,
        like: &Layout,
        fill: f64,
    ) -> Result<StencilPlan> {
        let mut extents = like.all_extents().to_vec();
        for (reach, dim) in self.dims.iter().zip(self.first..) {
            extents[dim] = reach.output_extents(self.operator, dim, layout.extents(dim))?;
        }
        let sides = |dim: usize| self.of(dim).map_or_else(Default::default, Reach::sides);
        let sides: Vec<Sides> = (0..layout.shape().len()).map(sides).collect();
        check_poles(self.operator, layout.shape(), &sides)?;
        let output = like.derive(like.placements().to_vec(), extents);

        let exchange = self.between(layout, &output, mesh, fill);
        Ok(StencilPlan { output, exchange })
    }

    /// Exchange that assembles an input of layout `layout` for an output of layout `output`; `None`
    /// if every rank already holds what it needs.
    pub(crate) fn between(
        &self,
        layout: &Layout,
        output: &Layout,
        mesh: &DeviceMesh,
        fill: f64,
    ) -> Option<Arc<ExchangePlan>> {
        // Dims in which the exchange supplies all cells that the windows reach; the same on every
        // rank.
        let supplied = |dim: usize| {
            let whole = layout.extents(dim).len() == 1;
            self.of(dim)
                .filter(|reach| !(whole && reach.stays_inside()))
        };
        let supplied: Vec<Option<&Reach>> = (0..layout.shape().len()).map(supplied).collect();
        let need_of = |position| need(layout, output, &supplied, position);
        let all_local = (0..mesh.size()).all(|position| {
            let cells = layout.local_box(position);
            let need = need_of(position);
            need.shape == cells.shape() && need == Need::of(cells)
        });
        (!all_local).then(|| {
            Arc::new(
                mesh.exchange_plan(Source::Layout(layout), need_of)
                    .with_fill(fill),
            )
        })
    }
}

/// Cells that a position needs. A position without outputs gets fill, so that its kernel has an
/// input and the graph is the same on all ranks.
fn need(layout: &Layout, output: &Layout, supplied: &[Option<&Reach>], position: usize) -> Need {
    let (inputs, outputs) = (layout.local_box(position), output.local_box(position));
    let mut shape = Vec::new();
    let mut ranges = Vec::new();
    let mut boundaries = Vec::new();
    for (dim, reach) in supplied.iter().enumerate() {
        let size = layout.shape()[dim];
        let Some(reach) = reach else {
            let own = &inputs.ranges()[dim];
            shape.push(own.len().max(1));
            ranges.push(own.start as isize..own.end as isize);
            boundaries.push(Default::default());
            continue;
        };
        let range = reach.input_range(&outputs.ranges()[dim], size);
        // The last window may reach beyond the padding; cells there are fill, whatever the
        // boundary.
        ranges.push(range.start..range.end.min(reach.padded_end(size)));
        boundaries.push(reach.boundary());
        shape.push(if range.is_empty() {
            reach.least()
        } else {
            range.len()
        });
    }
    Need {
        shape,
        ..Need::within(layout.shape(), &ranges, &boundaries)
    }
}
