//! The backward pass with our own kernels. Gradients of boxes of other ranks are in flight while
//! those of this rank's own keys and queries are computed.

use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::DType;
use halocline_core::ops::{BackwardPass, Boxes, Exchange, add_box, cut};
use halocline_core::plan::Transfer;
use halocline_core::trace::span;
use halocline_core::{IndexBox, Result};

use super::heads::in_heads;
use super::places::{
    Placed, alone, of_owner, own_copies, places, spatial, three_ranges, with_width,
};
use super::run::{NeighborhoodRun, Saved};
use super::shapes::Shapes;
use crate::attention::attended::{products, unpacked};
use crate::attention::engine::rows::{Piece, Rows};
use crate::attention::engine::windows::{Backward, Results, Windows};
use crate::kernel::buffer::{Buffer, filled};
use crate::kernel::flex::{self, Float};
use crate::kernel::memory::Shared;
use crate::kernel::simd::Isa;

impl NeighborhoodRun {
    pub(super) fn backward_as<E: Float>(
        &self,
        mut pass: BackwardPass<'_, Saved>,
        dtype: DType,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let isa = Isa::chosen()?;
        let [q, key, v] = [0, 1, 2].map(|input| pass.take_input(input));
        let wanted = pass.wanted;
        let cotangents = unpacked(pass.cotangent, self.with_lse);
        let operands = Operands::<E>::new(self, [q, key.clone(), v], cotangents, pass.saved)?;
        let reversed = self.exchange.clone().map(Exchange::reversed);
        let keys = wanted[1] || wanted[2];
        let mut sums = None;
        let (mut on_their_way, mut meanwhile) = (None, None);
        if keys {
            let mut gradients = KeyGradients::new(&operands);
            // Other ranks wait for these gradients, so they come first.
            gradients.run(isa, Whose::Others);
            if let Some(reversed) = &reversed {
                let mut cells = gradients.boxes_of_others().into_iter();
                let boxes = reversed.send(&key, |transfer| {
                    let cells = cells.next().expect("a box for each transfer");
                    flex::result(cells, &transfer.src.shape(), dtype)
                })?;
                boxes.in_background();
                on_their_way = Some(boxes);
                meanwhile = Some(span("attention meanwhile (backward)"));
            }
            gradients.run(isa, Whose::Own);
            sums = Some(gradients.finish());
        }
        let query = wanted[0].then(|| operands.query_gradient(isa, dtype));
        drop(meanwhile);
        for (transfer, cells) in on_their_way.map_or(Ok(Vec::new()), Boxes::finish)? {
            let cells = flex::in_dtype(cells, E::dtype());
            sums = sums.map(|sums| self.added(sums, transfer, &cells));
        }
        let narrowed = |sum| Some(flex::in_dtype(sum, dtype));
        let [key, value] = sums.map_or([None, None], |sums| sums.map(narrowed));
        Ok(vec![query, key, value])
    }

    /// Adds the gradient of a box of keys and values to those of the cells that the box is a copy
    /// of.
    fn added(
        &self,
        [key, value]: [DispatchTensor; 2],
        transfer: &Transfer,
        gradient: &DispatchTensor,
    ) -> [DispatchTensor; 2] {
        let whole = IndexBox::whole(&gradient.shape()[..]);
        let part = |sum, skip: usize, width: usize| {
            let cells = cut(gradient, &with_width(&whole, skip..skip + width));
            let transfer = Transfer {
                src: with_width(&transfer.src, 0..width),
                dst: with_width(&transfer.dst, 0..width),
                flip: transfer.flip.clone(),
            };
            add_box(sum, (&transfer, cells))
        };
        let [key_width, value_width] = self.widths;
        [part(key, 0, key_width), part(value, key_width, value_width)]
    }
}

/// Inputs of a backward pass.
struct Operands<'r, E> {
    run: &'r NeighborhoodRun,
    shapes: Shapes,
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    boxes: Vec<FlexTensor>,
    places: Vec<[u32; 2]>,
    cotangent: FlexTensor,
    lse: FlexTensor,
    /// Products of output and cotangent, less the gradients of the logarithms.
    products: Vec<E>,
}

impl<'r, E: Float> Operands<'r, E> {
    fn new(
        run: &'r NeighborhoodRun,
        inputs: [DispatchTensor; 3],
        (cotangent, of_lse): (DispatchTensor, Option<DispatchTensor>),
        saved: &Saved,
    ) -> Result<Self> {
        let [q, k, v] = inputs.map(in_heads::<E>);
        let (q, k, v, cotangent) = (q?, k?, v?, flex::operand::<E>(cotangent)?);
        let output = flex::operand::<E>(saved.output.clone())?;
        let boxes = saved.received.iter().cloned().map(flex::operand::<E>);
        let (output, width) = (flex::elements(&output), run.widths[1]);
        Ok(Self {
            shapes: Shapes::new(run, &q, &k),
            boxes: boxes.collect::<Result<_>>()?,
            places: run.places(spatial(&k.shape())),
            products: products(output, flex::elements(&cotangent), width, of_lse)?,
            lse: flex::operand::<E>(saved.lse.clone())?,
            run,
            q,
            k,
            v,
            cotangent,
        })
    }

    fn from(&self) -> Backward<'_, E> {
        let width = self.run.widths[1];
        Backward {
            cotangent: self.shapes.reading(flex::elements(&self.cotangent), width),
            lse: self.shapes.reading(flex::elements(&self.lse), 1),
            products: self.shapes.reading(&self.products, 1),
        }
    }

    fn windows<'a>(&'a self, results: Results<'a, E>) -> Windows<'a, E> {
        let run = self.run;
        let keys = run.rows(&self.k, &self.boxes, 0, &self.places);
        let values = run.rows(&self.v, &self.boxes, run.widths[0], &self.places);
        self.shapes.windows(run, &self.q, keys, values, results)
    }

    fn query_gradient(&self, isa: Isa, dtype: DType) -> DispatchTensor {
        let width = self.run.widths[0];
        let fill = |gradient: Shared<E>| {
            // SAFETY: every query is computed once.
            let gradient = unsafe { self.shapes.writing(gradient, width) };
            let from = self.from();
            let windows = self.windows(Results::Queries { from, gradient });
            windows.run(
                isa,
                &self.run.dims.each_ref().map(|dim| 0..dim.queries.len()),
            );
        };
        // SAFETY: all queries are computed.
        let gradient = unsafe { Buffer::filled(self.shapes.rows() * width, fill) };
        flex::result(gradient, &self.shapes.shape(width), dtype)
    }
}

/// The owner of keys.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    Own,
    Others,
}

/// Gradients of keys and values, of this rank's own cells and of boxes, which hold the two
/// concatenated.
struct KeyGradients<'r, E> {
    operands: &'r Operands<'r, E>,
    own: [Buffer<E>; 2],
    /// Other copies of this rank's cells, then boxes of other ranks.
    apart: Vec<(&'r Transfer, Buffer<E>)>,
    /// Number of copies among these.
    copies: usize,
    /// Largest copy of this rank's own cells.
    first: Option<&'r Transfer>,
    places: Vec<[u32; 2]>,
}

impl<'r, E: Float> KeyGradients<'r, E> {
    fn new(operands: &'r Operands<'r, E>) -> Self {
        let run = operands.run;
        let (first, copies) = run.plan().map_or((None, Vec::new()), own_copies);
        let whole = spatial(&operands.k.shape());
        let transfers = copies.iter().copied().chain(run.received());
        let apart: Vec<(&Transfer, Buffer<E>)> = transfers
            .map(|transfer| (transfer, filled(transfer.src.volume(), 0.0)))
            .collect();
        let boxes = apart.iter().zip(1..);
        let mut boxes: Vec<Placed> = boxes
            .map(|((transfer, _), piece)| alone(piece, transfer, [false; 3]))
            .collect();
        boxes.extend(first.map(|copy| of_owner(0, copy, whole)));
        let elements = |tensor: &FlexTensor| tensor.shape().iter().product();
        Self {
            places: run.plan().map_or(Vec::new(), |plan| {
                places(spatial(&plan.output_shape), &boxes)
            }),
            own: [&operands.k, &operands.v].map(|tensor| filled(elements(tensor), 0.0)),
            copies: copies.len(),
            apart,
            first,
            operands,
        }
    }

    /// Computes the gradients of boxes of other ranks, or of this rank's own cells.
    fn run(&mut self, isa: Isa, whose: Whose) {
        let run = self.operands.run;
        let (shape, both) = (self.operands.k.shape(), run.widths[0] + run.widths[1]);
        let (whole, heads) = (spatial(&shape), shape[shape.len() - 2]);
        let assembled = run.plan().map_or(whole, |plan| spatial(&plan.output_shape));
        let (copies, others) = self.apart.split_at(self.copies);
        let parts: Vec<[Range<usize>; 3]> = match (whose, run.plan()) {
            (Whose::Own, None) => vec![whole.map(|size| 0..size)],
            (Whose::Own, Some(_)) => {
                let copies = copies.iter().map(|(transfer, _)| *transfer);
                let copies = copies.chain(self.first);
                copies.map(|transfer| three_ranges(&transfer.dst)).collect()
            }
            (Whose::Others, _) => {
                let others = others.iter().map(|(transfer, _)| *transfer);
                others.map(|transfer| three_ranges(&transfer.dst)).collect()
            }
        };
        let places = &self.places;
        let apart = &mut self.apart;
        let mut rows = |own: &mut Buffer<E>, width: usize, skip: usize| {
            let piece = |buffer: &mut Buffer<E>, cells: usize, pitch: usize, skip: usize| {
                // SAFETY: buffers outlive the pass, in which every key is computed once.
                unsafe { Piece::writing(buffer.shared(), [cells, heads, pitch], skip) }
            };
            let mut pieces = vec![piece(own, whole.iter().product(), width, 0)];
            pieces.extend(apart.iter_mut().map(|(transfer, buffer)| {
                let cells = three_ranges(&transfer.src).iter().map(Range::len).product();
                piece(buffer, cells, both, skip)
            }));
            match run.plan() {
                Some(_) => Rows::scattered(assembled, pieces, places),
                None => Rows::whole(assembled, pieces.remove(0)),
            }
        };
        let [key, value] = &mut self.own;
        let results = Results::Keys {
            from: self.operands.from(),
            key: rows(key, run.widths[0], 0),
            value: rows(value, run.widths[1], run.widths[0]),
        };
        let windows = self.operands.windows(results);
        parts.iter().for_each(|part| windows.run(isa, part));
    }

    /// Takes the computed gradients of the boxes of other ranks.
    fn boxes_of_others(&mut self) -> Vec<Buffer<E>> {
        let others = self.apart.drain(self.copies..);
        others.map(|(_, cells)| cells).collect()
    }

    /// Returns the gradients of this rank's own cells, rounded to half precision only after all are
    /// added.
    fn finish(self) -> [DispatchTensor; 2] {
        let Operands { run, k, v, .. } = self.operands;
        let [key, value] = self.own;
        let mut sums = [
            flex::result(key, &k.shape(), E::dtype()),
            flex::result(value, &v.shape(), E::dtype()),
        ];
        for (transfer, cells) in self.apart {
            let cells = flex::result(cells, &transfer.src.shape(), E::dtype());
            sums = run.added(sums, transfer, &cells);
        }
        sums
    }
}
