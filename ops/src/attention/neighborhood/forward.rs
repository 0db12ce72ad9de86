//! The forward pass with our own kernels.

use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::DType;
use halocline_core::ops::cut;
use halocline_core::trace::span;
use halocline_core::{IndexBox, Result};

use super::heads::in_heads;
use super::places::{spatial, with_width};
use super::run::{NeighborhoodRun, Saved};
use super::shapes::Shapes;
use crate::attention::attended::packed;
use crate::attention::engine::windows::Results;
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float};
use crate::kernel::memory::Shared;
use crate::kernel::simd::Isa;

impl NeighborhoodRun {
    pub(super) fn forward_as<E: Float>(
        &self,
        inputs: Vec<DispatchTensor>,
        dtype: DType,
    ) -> Result<(DispatchTensor, Saved)> {
        let isa = Isa::chosen()?;
        let [key, value] = [1, 2].map(|input: usize| inputs[input].clone());
        let operands = inputs.into_iter().map(in_heads::<E>);
        let operands: Vec<FlexTensor> = operands.collect::<Result<_>>()?;
        let [q, k, v] = operands.try_into().expect("queries, keys and values");
        let job = Shapes::new(self, &q, &k);
        let places = self.places(spatial(&k.shape()));
        let mut received = Vec::new();
        let mut result = Ok(());
        let mut lse = None;
        let fill = |output: Shared<E>| {
            let numbers = |numbers: Shared<E>| {
                let compute = |boxes: &[FlexTensor], parts: &[[Range<usize>; 3]]| {
                    // SAFETY: every query is computed once.
                    let results = unsafe {
                        Results::Forward {
                            output: job.writing(output, self.widths[1]),
                            lse: job.writing(numbers, 1),
                        }
                    };
                    let keys = self.rows(&k, boxes, 0, &places);
                    let values = self.rows(&v, boxes, self.widths[0], &places);
                    let windows = job.windows(self, &q, keys, values, results);
                    parts.iter().for_each(|part| windows.run(isa, part));
                };
                result = self.in_stages::<E>(&key, &value, compute, &mut received);
            };
            // SAFETY: stages compute all queries, or fail.
            lse = Some(unsafe { Buffer::filled(job.rows(), numbers) });
        };
        // SAFETY: as above.
        let output = unsafe { Buffer::filled(job.rows() * self.widths[1], fill) };
        result?;
        let output = flex::result(output, &job.shape(self.widths[1]), dtype);
        let lse = flex::result(lse.expect("filled"), &job.shape(1), E::dtype());
        let result = packed(&output, &lse, self.with_lse);
        let saved = Saved {
            received,
            output,
            lse,
        };
        Ok((result, saved))
    }

    /// Sends keys and values to the ranks that need them, meanwhile computes the queries that need
    /// none of other ranks, and computes the others when keys and values have arrived.
    fn in_stages<E: Float>(
        &self,
        key: &DispatchTensor,
        value: &DispatchTensor,
        compute: impl Fn(&[FlexTensor], &[[Range<usize>; 3]]),
        received: &mut Vec<DispatchTensor>,
    ) -> Result<()> {
        let whole = self.dims.each_ref().map(|dim| 0..dim.queries.len());
        let Some(exchange) = &self.exchange else {
            compute(&[], &[whole]);
            return Ok(());
        };
        let [key_width, value_width] = self.widths;
        let boxes = exchange.send(key, |transfer| {
            let key = cut(key, &with_width(&transfer.src, 0..key_width));
            let value = cut(value, &with_width(&transfer.src, 0..value_width));
            let last = transfer.src.ranges().len() - 1;
            Dispatch::float_cat(vec![key, value], last)
        })?;
        let late = match self.early(&boxes) {
            None => vec![whole],
            Some(early) => {
                let meanwhile = span("attention meanwhile");
                compute(&[], std::slice::from_ref(&early));
                drop(meanwhile);
                let whole = IndexBox::new(whole.to_vec());
                let around = whole.around(&IndexBox::new(early.to_vec()));
                let ranges = around.iter().map(|part| part.ranges().to_vec());
                ranges
                    .map(|ranges| ranges.try_into().expect("three dims"))
                    .collect()
            }
        };
        *received = boxes
            .finish()?
            .into_iter()
            .map(|(_, cells)| cells)
            .collect();
        let cells = received.iter().cloned().map(flex::operand::<E>);
        compute(&cells.collect::<Result<Vec<_>>>()?, &late);
        Ok(())
    }
}
