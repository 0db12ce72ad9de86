//! The passes of neighborhood attention by kernels of our own, which read boxes of keys and values where they lie.

use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::DType;
use halocline_core::ops::{BackwardPass, Boxes, add_box, cut};
use halocline_core::{Exchange, ExchangePlan, IndexBox, Result, Transfer};

use super::engine::rows::{Piece, Rows};
use super::engine::windows::{Backward, Results, Windows};
use super::node::{NeighborhoodRun, Saved};
use crate::kernel::buffer::{Buffer, filled};
use crate::kernel::flex::{self, Float};
use crate::kernel::lanes::CHUNK;
use crate::kernel::memory::Shared;
use crate::kernel::simd::Isa;

/// Where a box of what is assembled lies: in a piece of this shape, from a cell on, with some dims in reverse order.
struct Placed {
    piece: u32,
    dst: [Range<usize>; 3],
    start: [usize; 3],
    flip: [bool; 3],
    shape: [usize; 3],
}

impl Placed {
    /// The places in the piece, in one dim, of the cells of the box.
    fn cells(&self, dim: usize) -> impl Iterator<Item = usize> + Clone {
        let (count, first, flip) = (self.dst[dim].len(), self.start[dim], self.flip[dim]);
        (0..count).map(move |cell| first + if flip { count - 1 - cell } else { cell })
    }
}

/// The spatial extents of `[batch, *spatial, heads, width]`, as three.
fn spatial(shape: &[usize]) -> [usize; 3] {
    let mut dims = [1; 3];
    let count = shape.len() - 3;
    dims[3 - count..].copy_from_slice(&shape[1..=count]);
    dims
}

/// The spatial ranges of a box, as three.
fn three_ranges(cells: &IndexBox) -> [Range<usize>; 3] {
    let mut ranges = [const { 0..1 }; 3];
    let count = cells.ranges().len() - 3;
    ranges[3 - count..].clone_from_slice(&cells.ranges()[1..=count]);
    ranges
}

/// A box whose last dim is another range.
fn with_width(cells: &IndexBox, width: Range<usize>) -> IndexBox {
    let mut ranges = cells.ranges().to_vec();
    *ranges.last_mut().expect("a width") = width;
    IndexBox::new(ranges)
}

/// For every cell of what is assembled the piece that it lies in, and its number there.
fn places(shape: [usize; 3], boxes: &[Placed]) -> Vec<[u32; 2]> {
    let mut places = vec![[0; 2]; shape.iter().product()];
    for placed in boxes {
        let (dst, from) = (&placed.dst, placed.shape);
        for (to_plane, plane) in dst[0].clone().zip(placed.cells(0)) {
            for (to_row, row) in dst[1].clone().zip(placed.cells(1)) {
                let to = (to_plane * shape[1] + to_row) * shape[2] + dst[2].start;
                let first = (plane * from[1] + row) * from[2];
                for (place, column) in places[to..].iter_mut().zip(placed.cells(2)) {
                    *place = [placed.piece, (first + column) as u32];
                }
            }
        }
    }
    places
}

/// The largest of the boxes that stay on this rank, and the others.
fn own_copies(plan: &ExchangePlan) -> (Option<&Transfer>, Vec<&Transfer>) {
    let mut copies: Vec<&Transfer> = plan.copies.iter().collect();
    copies.sort_by_key(|copy| std::cmp::Reverse(copy.src.volume()));
    match copies.split_first() {
        Some((first, rest)) => (Some(first), rest.to_vec()),
        None => (None, Vec::new()),
    }
}

/// The spatial dims that a transfer reverses, as three.
fn flips(transfer: &Transfer) -> [bool; 3] {
    let mut flips = [false; 3];
    let count = transfer.flip.len() - 3;
    flips[3 - count..].copy_from_slice(&transfer.flip[1..=count]);
    flips
}

/// A box as it lies on its owner, in a tensor of this shape.
fn of_owner(piece: usize, transfer: &Transfer, shape: [usize; 3]) -> Placed {
    Placed {
        piece: piece as u32,
        dst: three_ranges(&transfer.dst),
        start: three_ranges(&transfer.src).map(|range| range.start),
        flip: flips(transfer),
        shape,
    }
}

/// A box that is a tensor by itself: as it lies on its owner, or as it lies where it is needed.
fn alone(piece: usize, transfer: &Transfer, flip: [bool; 3]) -> Placed {
    Placed {
        piece: piece as u32,
        dst: three_ranges(&transfer.dst),
        start: [0; 3],
        flip,
        shape: three_ranges(&transfer.src).map(|range| range.len()),
    }
}

impl NeighborhoodRun {
    fn plan(&self) -> Option<&ExchangePlan> {
        self.exchange.as_ref().map(|exchange| &*exchange.forward.plan)
    }

    fn received(&self) -> impl Iterator<Item = &Transfer> {
        let plan = self.plan().into_iter();
        plan.flat_map(|plan| &plan.receives).flat_map(|(_, transfers)| transfers)
    }

    /// The keys, or values, that queries reach, where they lie: `skip` elements into each head of a box.
    fn rows<'a, E: Float>(
        &self,
        own: &'a FlexTensor,
        boxes: &'a [FlexTensor],
        skip: usize,
        places: &'a [[u32; 2]],
    ) -> Rows<'a, E> {
        let shape = own.shape();
        let [heads, width] = [shape[shape.len() - 2], shape[shape.len() - 1]];
        let cells = spatial(&shape);
        let own = Piece::reading(flex::elements(own), [cells.iter().product(), heads, width], 0);
        let Some(plan) = self.plan() else {
            return Rows::whole(cells, own);
        };
        let both = self.widths[0] + self.widths[1];
        let pieces = boxes.iter().map(|cells| {
            let count = spatial(&cells.shape()).iter().product();
            Piece::reading(flex::elements(cells), [count, heads, both], skip)
        });
        let pieces = std::iter::once(own).chain(pieces).collect();
        Rows::scattered(spatial(&plan.output_shape), pieces, places)
    }

    /// Where keys lie in the forward pass: in this rank's own, and in boxes that came.
    fn places(&self, own: [usize; 3]) -> Vec<[u32; 2]> {
        let Some(plan) = self.plan() else {
            return Vec::new();
        };
        let copies = plan.copies.iter().map(|copy| of_owner(0, copy, own));
        let boxes = self.received().zip(1..);
        let boxes = boxes.map(|(transfer, piece)| alone(piece, transfer, flips(transfer)));
        places(spatial(&plan.output_shape), &copies.chain(boxes).collect::<Vec<_>>())
    }

    /// The queries that reach no key of another rank, if it is worth while to compute them before those come.
    fn early(&self, boxes: &Boxes<'_>) -> Option<[Range<usize>; 3]> {
        let interior = three_ranges(&self.plan()?.interior()?);
        let ranges = [0, 1, 2].map(|dim| {
            let inside = &interior[dim];
            let dim = &self.dims[dim];
            let reach = |query: usize| {
                let cell = dim.queries.start + query;
                let keys = dim.neighborhood.input_range(&(cell..cell + 1), dim.size);
                [keys.start - dim.first_key, keys.end - dim.first_key]
            };
            let all = 0..dim.queries.len();
            let low = all.clone().rev().find(|query| reach(*query)[0] < inside.start as isize);
            let high = all.clone().find(|query| reach(*query)[1] > inside.end as isize);
            let start = low.map_or(0, |query| query + 1);
            start..high.unwrap_or(all.end).max(start)
        });
        let early: usize = ranges.iter().map(Range::len).product();
        let all: usize = self.dims.iter().map(|dim| dim.queries.len()).product();
        (early > 0 && boxes.overlap(early as f64 / all as f64)).then_some(ranges)
    }

    pub(super) fn forward_as<E: Float>(
        &self,
        inputs: Vec<DispatchTensor>,
        dtype: DType,
    ) -> Result<(DispatchTensor, Saved)> {
        let isa = Isa::chosen()?;
        let [key, value] = [1, 2].map(|input: usize| inputs[input].clone());
        let operands = inputs.into_iter().map(flex::operand::<E>);
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
        let saved = Saved {
            received,
            output: output.clone(),
            lse,
        };
        Ok((output, saved))
    }

    /// Sends keys and values to ranks that need them, has queries that need none of theirs computed meanwhile, and the others
    /// when theirs have come.
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
                compute(&[], std::slice::from_ref(&early));
                let whole = IndexBox::new(whole.to_vec());
                let around = whole.around(&IndexBox::new(early.to_vec()));
                let ranges = around.iter().map(|part| part.ranges().to_vec());
                ranges.map(|ranges| ranges.try_into().expect("three dims")).collect()
            }
        };
        *received = boxes.finish()?.into_iter().map(|(_, cells)| cells).collect();
        let cells = received.iter().cloned().map(flex::operand::<E>);
        compute(&cells.collect::<Result<Vec<_>>>()?, &late);
        Ok(())
    }

    pub(super) fn backward_as<E: Float>(
        &self,
        mut pass: BackwardPass<'_, Saved>,
        dtype: DType,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let isa = Isa::chosen()?;
        let [q, key, v] = [0, 1, 2].map(|input| pass.take_input(input));
        let wanted = pass.wanted;
        let operands = Operands::<E>::new(self, [q, key.clone(), v], pass.cotangent, pass.saved)?;
        let reversed = self.exchange.clone().map(Exchange::reversed);
        let keys = wanted[1] || wanted[2];
        let mut sums = None;
        let mut on_their_way = None;
        if keys {
            let mut gradients = KeyGradients::new(&operands);
            // What other ranks wait for goes first.
            gradients.run(isa, Whose::Others);
            if let Some(reversed) = &reversed {
                let mut cells = gradients.boxes_of_others().into_iter();
                let boxes = reversed.send(&key, |transfer| {
                    let cells = cells.next().expect("a box for each transfer");
                    flex::result(cells, &transfer.src.shape(), dtype)
                })?;
                boxes.in_background();
                on_their_way = Some(boxes);
            }
            gradients.run(isa, Whose::Own);
            sums = Some(gradients.finish(dtype));
        }
        let query = wanted[0].then(|| operands.query_gradient(isa, dtype));
        for (transfer, cells) in on_their_way.map_or(Ok(Vec::new()), Boxes::finish)? {
            sums = sums.map(|sums| self.added(sums, transfer, &cells));
        }
        let [key, value] = sums.map_or([None, None], |sums| sums.map(Some));
        Ok(vec![query, key, value])
    }

    /// Adds the gradient of a box of keys and values to those of the cells that it is a copy of.
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

/// What a backward pass reads.
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
    /// The products of output and cotangent.
    products: Vec<E>,
}

impl<'r, E: Float> Operands<'r, E> {
    fn new(
        run: &'r NeighborhoodRun,
        inputs: [DispatchTensor; 3],
        cotangent: DispatchTensor,
        saved: &Saved,
    ) -> Result<Self> {
        let [q, k, v] = inputs.map(flex::operand::<E>);
        let (q, k, v, cotangent) = (q?, k?, v?, flex::operand::<E>(cotangent)?);
        let output = flex::operand::<E>(saved.output.clone())?;
        let boxes = saved.received.iter().cloned().map(flex::operand::<E>);
        let (output, width) = (flex::elements(&output), run.widths[1]);
        Ok(Self {
            shapes: Shapes::new(run, &q, &k),
            boxes: boxes.collect::<Result<_>>()?,
            places: run.places(spatial(&k.shape())),
            products: row_products(output, flex::elements(&cotangent), width),
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
            windows.run(isa, &self.run.dims.each_ref().map(|dim| 0..dim.queries.len()));
        };
        // SAFETY: all queries are computed.
        let gradient = unsafe { Buffer::filled(self.shapes.rows() * width, fill) };
        flex::result(gradient, &self.shapes.shape(width), dtype)
    }
}

/// Whose keys.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    Own,
    Others,
}

/// Gradients of keys and values, of this rank's own cells and of boxes, which have them beside each other.
struct KeyGradients<'r, E> {
    operands: &'r Operands<'r, E>,
    own: [Buffer<E>; 2],
    /// Other copies of this rank's cells, then boxes of other ranks.
    apart: Vec<(&'r Transfer, Buffer<E>)>,
    /// The copies among these.
    copies: usize,
    /// The largest copy of this rank's own cells.
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

    /// The gradients of boxes of other ranks, which have been computed.
    fn boxes_of_others(&mut self) -> Vec<Buffer<E>> {
        let others = self.apart.drain(self.copies..);
        others.map(|(_, cells)| cells).collect()
    }

    /// The gradients of this rank's own cells.
    fn finish(self, dtype: DType) -> [DispatchTensor; 2] {
        let Operands { run, k, v, .. } = self.operands;
        let [key, value] = self.own;
        let mut sums = [
            flex::result(key, &k.shape(), dtype),
            flex::result(value, &v.shape(), dtype),
        ];
        for (transfer, cells) in self.apart {
            let cells = flex::result(cells, &transfer.src.shape(), dtype);
            sums = run.added(sums, transfer, &cells);
        }
        sums
    }
}

/// Sizes of queries, as kernels want them.
struct Shapes {
    batch: usize,
    cells: [usize; 3],
    heads: usize,
    shared: usize,
    shape: Vec<usize>,
}

impl Shapes {
    fn new(run: &NeighborhoodRun, q: &FlexTensor, k: &FlexTensor) -> Self {
        let shape = q.shape().to_vec();
        let heads = shape[shape.len() - 2];
        let key_heads = k.shape()[shape.len() - 2];
        debug_assert_eq!(spatial(&shape), run.dims.each_ref().map(|dim| dim.queries.len()));
        Self {
            batch: shape[0],
            cells: spatial(&shape),
            heads,
            shared: heads.checked_div(key_heads).unwrap_or(1),
            shape,
        }
    }

    /// Queries of all heads.
    fn rows(&self) -> usize {
        self.batch * self.cells.iter().product::<usize>() * self.heads
    }

    /// The shape of queries with another width.
    fn shape(&self, width: usize) -> Vec<usize> {
        let mut shape = self.shape.clone();
        *shape.last_mut().expect("a width") = width;
        shape
    }

    fn sizes(&self, width: usize) -> [usize; 3] {
        [self.cells.iter().product(), self.heads, width]
    }

    fn reading<'a, E>(&self, elements: &'a [E], width: usize) -> Rows<'a, E> {
        Rows::whole(self.cells, Piece::reading(elements, self.sizes(width), 0))
    }

    /// # Safety
    /// The elements must outlive the rows, and every task must write other queries.
    unsafe fn writing<'a, E>(&self, elements: Shared<E>, width: usize) -> Rows<'a, E> {
        // SAFETY: the caller's.
        Rows::whole(self.cells, unsafe { Piece::writing(elements, self.sizes(width), 0) })
    }

    fn windows<'a, E: Float>(
        &self,
        run: &NeighborhoodRun,
        q: &'a FlexTensor,
        keys: Rows<'a, E>,
        values: Rows<'a, E>,
        results: Results<'a, E>,
    ) -> Windows<'a, E> {
        Windows {
            dims: run.dims.clone(),
            batch: self.batch,
            heads: self.heads,
            shared: self.shared,
            widths: run.widths,
            scale: run.scale,
            queries: self.reading(flex::elements(q), run.widths[0]),
            keys,
            values,
            results,
        }
    }
}

/// The dot product of every row of `width` elements with that of another tensor.
pub(super) fn row_products<E: Float>(one: &[E], other: &[E], width: usize) -> Vec<E> {
    use rayon::prelude::*;

    let rows = one.par_chunks(width.max(1)).zip(other.par_chunks(width.max(1)));
    let product = |(one, other): (&[E], &[E])| {
        let mut sums = [E::default(); 8];
        for (one, other) in one.chunks(8).zip(other.chunks(8)) {
            for (sum, (a, b)) in sums.iter_mut().zip(one.iter().zip(other)) {
                *sum += *a * *b;
            }
        }
        sums.into_iter().fold(E::default(), |sum, part| sum + part)
    };
    rows.with_min_len(CHUNK / width.max(1)).map(product).collect()
}
