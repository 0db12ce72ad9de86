//! Pooling as one node of the graph that combines exchange and kernel: boxes of other ranks, and
//! padding, are read in place.

use std::fmt::Debug;

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{DType, Element as _, Tensor};
use halocline_core::ops::{
    self, BackwardPass, Exchange, Operator, Recompute, add_box, blank, cut, flipped, to_dispatch,
};
use halocline_core::plan::Transfer;
use halocline_core::{IndexBox, Result};

use super::field::{Piece, Planes, Section};
use super::slide::{Slides, pooled};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::local::planes;
use crate::kernel::simd::Isa;

/// Reduction over windows of rows and columns.
pub(super) trait Windows: Copy + Debug + Send + Sync + 'static {
    /// Names of the two passes on timelines.
    const NAMES: [&'static str; 2];

    /// Returns whether the gradient depends on the input's elements, not only on its shape and on
    /// [places](Self::with_places). `is_local` says whether all windows lie within one rank's
    /// cells.
    fn keeps_input(self, slides: Slides, is_local: bool) -> bool;

    /// Reduces all windows.
    fn forward<E: Float>(self, isa: Isa, x: &Planes<'_, E>, slides: Slides) -> Buffer<E>;

    /// Reduces all windows; also returns the places of the cells that were taken, if the gradient
    /// needs them.
    fn with_places<E: Float>(
        self,
        isa: Isa,
        x: &Planes<'_, E>,
        slides: Slides,
    ) -> (Buffer<E>, Option<Buffer<E>>) {
        (self.forward(isa, x, slides), None)
    }

    /// Computes values, once, that the gradients of all sections read instead of the cotangent;
    /// `None` if they read the cotangent.
    fn pulled<E: Float>(
        self,
        _isa: Isa,
        _x: &Planes<'_, E>,
        _cotangent: &[E],
        _slides: Slides,
    ) -> Option<Buffer<E>> {
        None
    }

    /// Computes the gradient of a section with these cells from places, if there are any, and the
    /// cotangent. Neither `x` nor the section has cells if the input is not
    /// [kept](Self::keeps_input).
    fn backward<E: Float>(
        self,
        isa: Isa,
        x: &Planes<'_, E>,
        sides: [&[E]; 2],
        section: (&Section, &[E]),
        slides: Slides,
    ) -> Buffer<E>;

    /// Computes the result by burn's operators, for devices without our kernels.
    fn composed<const D: usize>(self, x: Tensor<D>, slides: Slides) -> Tensor<D>;
}

/// Reduces the windows of this rank's shard and of the boxes that the exchange receives around it.
/// On a device without our kernels there must be no exchange.
pub(super) fn run<const D: usize>(
    windows: impl Windows,
    slides: Slides,
    x: Tensor<D>,
    exchange: Option<Exchange>,
) -> Tensor<D> {
    if !flex::runs_on(&x.device()) {
        assert!(exchange.is_none(), "cells that are not assembled");
        return windows.composed(x, slides);
    }
    let pool = Pool {
        has_gradient: x.is_tracked(),
        windows,
        slides,
        exchange,
    };
    Tensor::from_dispatch(ops::apply(pool, [x.into_dispatch()]))
}

#[derive(Debug)]
struct Pool<W> {
    windows: W,
    slides: Slides,
    exchange: Option<Exchange>,
    has_gradient: bool,
}

/// Saved state of the backward pass, apart from the input.
#[derive(Debug)]
pub(super) struct Saved {
    /// Shape of the input.
    shape: Vec<usize>,
    /// Boxes received from other ranks.
    received: Vec<DispatchTensor>,
    /// Places of the cells that were taken.
    places: Option<DispatchTensor>,
}

impl<W: Windows> Operator for Pool<W> {
    type Saved = Saved;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(W::NAMES)
    }

    fn keeps(&self, _: usize) -> bool {
        self.keeps_input()
    }

    fn recompute(&self) -> Recompute {
        match &self.exchange {
            None => Recompute::WithCheckpointing,
            Some(_) => Recompute::Never,
        }
    }

    fn again(&self, inputs: Vec<DispatchTensor>) -> Result<DispatchTensor> {
        let without_places = Self {
            windows: self.windows,
            slides: self.slides,
            exchange: self.exchange.clone(),
            has_gradient: false,
        };
        Ok(without_places.forward(inputs)?.0)
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Self::Saved)> {
        let x = inputs.remove(0);
        let received = match &self.exchange {
            None => Vec::new(),
            Some(exchange) => {
                let boxes = exchange.send_all(&x)?.finish()?;
                boxes.into_iter().map(|(_, cells)| cells).collect()
            }
        };
        let (dtype, shape) = (x.dtype(), x.shape().to_vec());
        let (y, places) = with_float!(dtype, E => {
            let (isa, pieces) = (Isa::chosen()?, self.pieces::<E>(x, &received)?);
            let x = self.planes::<E>(&shape, &pieces);
            let (y, places) = if self.has_gradient {
                self.windows.with_places(isa, &x, self.slides)
            } else {
                (self.windows.forward(isa, &x, self.slides), None)
            };
            let pooled = self.pooled(&shape);
            let places = places.map(|places| flex::result(places, &pooled, E::dtype()));
            (flex::result(y, &pooled, dtype), places)
        });
        let received = if self.keeps_input() {
            received
        } else {
            Vec::new()
        };
        let saved = Saved {
            shape,
            received,
            places,
        };
        Ok((y, saved))
    }

    fn backward(
        &self,
        mut pass: BackwardPass<'_, Self::Saved>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let x = self.keeps_input().then(|| pass.take_input(0));
        let Saved {
            shape,
            received,
            places,
        } = pass.saved;
        let dtype = pass.cotangent.dtype();
        let gradient = with_float!(dtype, E => {
            let pieces = match x {
                Some(x) => self.pieces::<E>(x, received)?,
                None => Vec::new(),
            };
            let places = places.clone().map(flex::operand::<E>).transpose()?;
            let cotangent = flex::operand::<E>(pass.cotangent)?;
            self.gradient::<E>(shape, &pieces, (places.as_ref(), &cotangent), dtype)?
        });
        Ok(vec![Some(gradient)])
    }
}

/// Contiguous cells, and their place among those that the windows cover.
struct Cells {
    place: IndexBox,
    cells: FlexTensor,
}

impl<W: Windows> Pool<W> {
    fn keeps_input(&self) -> bool {
        self.windows
            .keeps_input(self.slides, self.exchange.is_none())
    }

    /// Shape of the cells that the windows cover, for an input's shape.
    fn reached(&self, shape: &[usize]) -> Vec<usize> {
        match &self.exchange {
            None => shape.to_vec(),
            Some(exchange) => exchange.forward.plan.output_shape.clone(),
        }
    }

    fn pooled(&self, shape: &[usize]) -> Vec<usize> {
        let mut reached = self.reached(shape);
        let [_, rows, columns] = pooled(of_planes(&reached), self.slides);
        let last = reached.len() - 1;
        reached[last] = columns;
        if last > 2 {
            reached[last - 1] = rows;
        }
        reached
    }

    /// Pieces of the cells that the windows cover.
    fn pieces<E: Float>(
        &self,
        x: DispatchTensor,
        received: &[DispatchTensor],
    ) -> Result<Vec<Cells>> {
        let Some(exchange) = &self.exchange else {
            let place = IndexBox::whole(&x.shape());
            let cells = flex::operand::<E>(x)?;
            return Ok(vec![Cells { place, cells }]);
        };
        let plan = &exchange.forward.plan;
        let turned = |transfer: &Transfer, cells: DispatchTensor| {
            Ok(Cells {
                place: transfer.dst.clone(),
                cells: flex::operand::<E>(flipped(cells, &transfer.flip))?,
            })
        };
        let copies = plan.copies.iter().map(|copy| {
            let whole = copy.src.shape() == plan.source_shape;
            turned(copy, if whole { x.clone() } else { cut(&x, &copy.src) })
        });
        let transfers = plan.receives.iter().flat_map(|(_, transfers)| transfers);
        let others = transfers.zip(received);
        copies
            .chain(others.map(|(transfer, cells)| turned(transfer, cells.clone())))
            .collect()
    }

    fn planes<'a, E: Float>(&self, shape: &[usize], pieces: &'a [Cells]) -> Planes<'a, E> {
        let shape = of_planes(&self.reached(shape));
        if let ([piece], None) = (pieces, &self.exchange) {
            return Planes::whole(flex::elements(&piece.cells), shape);
        }
        let pieces = pieces.iter().map(|piece| {
            let Section { rows, columns } = section(&piece.place);
            let whole = IndexBox::whole(&piece.place.shape());
            Piece {
                rows,
                columns,
                cells: flex::field_box(&piece.cells, &whole, &[]),
            }
        });
        Planes::new(shape, pieces.collect())
    }

    /// Computes the gradient of this rank's shard from places and the cotangent, and sends the
    /// gradients of other ranks' boxes to them.
    fn gradient<E: Float>(
        &self,
        shape: &[usize],
        pieces: &[Cells],
        (places, cotangent): (Option<&FlexTensor>, &FlexTensor),
        dtype: DType,
    ) -> Result<DispatchTensor> {
        let (isa, x) = (Isa::chosen()?, self.planes::<E>(shape, pieces));
        let cells = flex::elements::<E>(cotangent);
        let pulled = self.windows.pulled(isa, &x, cells, self.slides);
        let places = places.map_or(&[][..], flex::elements::<E>);
        let sides = [places, pulled.as_deref().unwrap_or(cells)];
        let gradient = |place: &IndexBox| {
            let cells = pieces.iter().find(|piece| piece.place == *place);
            let cells = cells.map_or(&[][..], |piece| flex::elements::<E>(&piece.cells));
            let section = (&section(place), cells);
            let gradient = (self.windows).backward(isa, &x, sides, section, self.slides);
            flex::result(gradient, &place.shape(), E::dtype())
        };
        let Some(exchange) = &self.exchange else {
            return Ok(flex::in_dtype(gradient(&IndexBox::whole(shape)), dtype));
        };
        let plan = &exchange.forward.plan;
        let reversed = exchange.clone().reversed();
        let like = to_dispatch::<Flex>(cotangent.clone());
        let like = flex::in_dtype(like, dtype);
        let boxes = reversed.send(&like, |transfer| {
            flex::in_dtype(gradient(&transfer.dst), dtype)
        })?;
        boxes.in_background();
        let whole =
            |copy: &Transfer| copy.src.shape() == plan.source_shape && !copy.flip.contains(&true);
        let first = plan.copies.iter().position(whole);
        let sum = match first {
            Some(first) => gradient(&plan.copies[first].dst),
            None => flex::in_dtype(blank(&like, &plan.source_shape, Some(0.0)), E::dtype()),
        };
        let rest = plan.copies.iter().enumerate();
        let rest = rest.filter(|(number, _)| Some(*number) != first);
        let sum = rest.fold(sum, |sum, (_, copy)| {
            add_box(sum, (copy, gradient(&copy.dst)))
        });
        let received = boxes.finish()?.into_iter();
        let sum = received.fold(sum, |sum, (place, cells)| {
            add_box(sum, (place, flex::in_dtype(cells, E::dtype())))
        });
        Ok(flex::in_dtype(sum, dtype))
    }
}

/// Shape `[planes, rows, columns]` of `[batch, channels, columns]` or
/// `[batch, channels, rows, columns]`.
fn of_planes(shape: &[usize]) -> [usize; 3] {
    match *shape {
        [batch, channels, columns] => [batch * channels, 1, columns],
        _ => planes(shape),
    }
}

/// Rows and columns of a box.
fn section(place: &IndexBox) -> Section {
    match place.ranges() {
        [_, _, columns] => Section {
            rows: 0..1,
            columns: columns.clone(),
        },
        [.., rows, columns] => Section {
            rows: rows.clone(),
            columns: columns.clone(),
        },
        _ => unreachable!("a field has batch and channels"),
    }
}
