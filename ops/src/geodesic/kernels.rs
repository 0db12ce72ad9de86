//! Kernels of a discrete-continuous convolution and of its transpose, which share their checks and
//! the way of a field through them.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::{Error, Layout, Result, ShardTensor};

use super::basis::DiscoKernel;
use super::filter::{Grids, entries, transposed, transposed_entries};
use super::node::Entries;
use super::reach::{Reach, Toward};
use crate::conv::check_channels;
use crate::driver::empty::{drop_empty, fill};
use crate::kernel::flex;
use crate::operand::Operand;
use crate::rearrange::{permute, reshape as reshape_shards};
use crate::reshape;
use crate::sphere::SphereGrid;

/// Kernels between two grids: of a convolution toward the coarser one, of a transposed convolution
/// toward the finer one. Clones share the data.
#[derive(Clone)]
pub(super) struct Kernels {
    operator: &'static str,
    toward: Toward,
    pub(super) reach: Reach,
    pub(super) entries: Arc<Entries>,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, {} functions", self.reach, self.functions())
    }
}

impl Kernels {
    /// Kernels of an operator. `sizes` and `grids` list input first, then output.
    ///
    /// # Errors
    /// Fails for a basis without functions; errors of [`Reach::new`].
    pub(super) fn new(
        operator: &'static str,
        sizes @ [input, output]: [[usize; 2]; 2],
        grids: [SphereGrid; 2],
        DiscoKernel { basis, norm }: DiscoKernel,
        radius: Option<f64>,
        toward: Toward,
    ) -> Result<Self> {
        let functions = basis.functions().map_err(|expected| {
            Error::operator(operator, format!("{basis:?}; expected {expected}"))
        })?;
        let reach = Reach::new(operator, sizes, grids, radius, toward)?;
        let (inputs, weights) = grids[0].quadrature(input[0])?;
        let (outputs, _) = grids[1].quadrature(output[0])?;
        // The filter runs in the direction of a convolution, from the finer grid.
        let ((cosines, finer), (outputs, coarser)) = match toward {
            Toward::Coarser => ((inputs, input[1]), (outputs, output[1])),
            Toward::Finer => ((outputs, output[1]), (inputs, input[1])),
        };
        let grids = Grids {
            cosines: &cosines,
            longitudes: finer,
            outputs: &outputs,
            radius: reach.radius,
            cutoff: reach.cutoff,
        };
        let [by_output, by_input] = match toward {
            Toward::Coarser => {
                let by_output = entries(&functions, norm, &grids, &weights);
                let by_input = transposed(&by_output, input[0]);
                [by_output, by_input]
            }
            Toward::Finer => {
                let by_input = transposed_entries(&functions, norm, &grids, &weights, coarser);
                [transposed(&by_input, input[0]), by_input]
            }
        };
        Ok(Self {
            operator,
            toward,
            reach,
            entries: Arc::new(Entries {
                by_output,
                by_input,
                functions: functions.len(),
                longitudes: [finer, coarser],
            }),
        })
    }

    /// Number of basis functions.
    pub(super) fn functions(&self) -> usize {
        self.entries.functions
    }

    /// Checks the arguments of a convolution of `x`, and returns its weight as that of a pointwise
    /// convolution: from `channels_in · functions` channels toward a coarser grid, to
    /// `channels_out · functions` channels toward a finer one.
    pub(super) fn pointwise(
        &self,
        x: &ShardTensor<4>,
        weight: Operand<3>,
        bias: Option<&Operand<1>>,
        groups: usize,
    ) -> Result<Operand<4>> {
        let [channels_out, channels_in, functions] = weight.dims();
        self.check_parameters(x, &weight, bias, groups)?;
        self.reach.check(self.operator, &x.dims())?;
        x.require_resolved(self.operator)?;
        let mesh = x.layout().mesh();
        let layout = weight.layout_on(mesh);
        layout.require_whole(self.operator, 2)?;
        let mut extents = layout.all_extents()[..2].to_vec();
        extents.extend([vec![1], vec![1]]);
        let matrix = layout.derive(layout.placements().to_vec(), extents);
        let offsets = bias.map(|bias| bias.layout_on(mesh));
        let with_functions = |layout: &Layout, dim: usize| {
            let channels = layout.extents(dim).iter();
            layout.resized(dim, channels.map(|count| count * functions).collect())
        };
        let (field, matrix, offsets, shape) = match self.toward {
            Toward::Coarser => (
                with_functions(x.layout(), 1),
                with_functions(&matrix, 1),
                offsets,
                [channels_out, channels_in * functions, 1, 1],
            ),
            Toward::Finer => (
                x.layout().clone(),
                with_functions(&matrix, 0),
                offsets.map(|layout| with_functions(&layout, 0)),
                [channels_out * functions, channels_in, 1, 1],
            ),
        };
        check_channels(self.operator, &field, &matrix, offsets.as_ref(), groups)?;
        Ok(match (weight, self.toward) {
            (Operand::Replicated(weight), Toward::Coarser) => {
                Operand::Replicated(reshape(weight, shape.to_vec()))
            }
            (Operand::Replicated(weight), Toward::Finer) => {
                Operand::Replicated(reshape(weight.permute([0, 2, 1]), shape.to_vec()))
            }
            (laid, Toward::Coarser) => Operand::Sharded(reshape_shards(laid.place_on(x)?, shape)?),
            (laid, Toward::Finer) => {
                let weight = permute(laid.place_on(x)?, [0, 2, 1])?;
                Operand::Sharded(reshape_shards(weight, shape)?)
            }
        })
    }

    /// Checks the shapes and number types of the parameters of a convolution of `x`.
    fn check_parameters(
        &self,
        x: &ShardTensor<4>,
        weight: &Operand<3>,
        bias: Option<&Operand<1>>,
        groups: usize,
    ) -> Result<()> {
        let (operator, functions) = (self.operator, self.functions());
        let ([channels_out, channels_in, last], channels) = (weight.dims(), x.dims()[1]);
        let divides = groups > 0 && channels_out.is_multiple_of(groups);
        let fits = divides && channels_in * groups == channels && channels_in * channels_out > 0;
        if last != functions || !fits {
            let message = format!(
                "weight {:?} with {groups} groups on {channels} channels; expected [groups·n, channels / groups, {functions}]",
                weight.dims()
            );
            return Err(Error::operator(operator, message));
        }
        if let Some(bias) = bias
            && bias.dims() != [channels_out]
        {
            let message = format!("bias {:?} for {channels_out} channels", bias.dims());
            return Err(Error::operator(operator, message));
        }
        let dtype = x.local().dtype();
        weight.require_dtype(operator, dtype)?;
        bias.map_or(Ok(()), |bias| bias.require_dtype(operator, dtype))
    }

    /// Runs local sums from the input rows within reach to a range of output rows, on a field whose
    /// longitude is whole. Toward a coarser grid, channels become `channels · functions`; toward a
    /// finer one, the reverse.
    pub(super) fn run(
        &self,
        x: &ShardTensor<4>,
        sums: impl FnOnce(Tensor<4>, Range<usize>) -> Tensor<4>,
    ) -> Result<ShardTensor<4>> {
        let (reach, functions) = (&self.reach, self.functions());
        let (layout, mesh) = (x.layout().clone(), x.mesh().clone());
        let outputs = reach.outputs(&layout, mesh.position())?;
        let local = reach.assemble(x, self.operator)?;
        let channels = layout.extents(1).iter().map(|count| match self.toward {
            Toward::Coarser => count * functions,
            Toward::Finer => count / functions,
        });
        let result = layout
            .resized(1, channels.collect())
            .resized(2, reach.output_rows(&layout)?)
            .resized(3, vec![reach.sizes[1][1]]);
        let filled: &[usize] = match self.toward {
            Toward::Coarser => &[0, 1, 2, 3],
            Toward::Finer => &[0, 2, 3],
        };
        let kernel = flex::runs_on(&local.device());
        let local = if kernel || (!result.has_empty_shard() && reach.reaches_all(&layout)?) {
            local
        } else {
            fill(1, local, filled, self.operator, 0.0)?
        };
        let mut y = sums(local, outputs);
        if !kernel {
            y = drop_empty(y, &result, mesh.position(), self.operator)?;
        }
        Ok(ShardTensor::from_parts(y, result, mesh))
    }
}
