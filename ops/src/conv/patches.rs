//! Kernels of unfold and fold, each the adjoint of the other: one gathers the cells of windows, the
//! other adds them up.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Slice};
use halocline_core::ops::{BackwardPass, Operator, blank, of_boxes};
use halocline_core::{IndexBox, Result};

use crate::driver::Window;
use crate::kernel::flex::in_dtype;
use crate::precision::wider;

/// Direction of a [`Patches`] operator.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    /// Gathers the cells of windows, as in `unfold`.
    Gather,
    /// Adds up windows at the positions of their cells, as in `fold`.
    AddUp,
}

/// Windows of a box of cells, as a node of the graph.
#[derive(Debug)]
pub(super) struct Patches {
    pub(super) way: Way,
    pub(super) windows: Vec<Window>,
    /// `[batch, channels, *cells]` of the box; the first window begins at its first cell.
    pub(super) shape: Vec<usize>,
}

impl Patches {
    /// Number of windows in every dim.
    fn held(&self) -> Vec<usize> {
        let dims = self.windows.iter().zip(&self.shape[2..]);
        dims.map(|(window, size)| (size - window.span()) / window.stride + 1)
            .collect()
    }

    /// Number of cells of a window.
    fn elements(&self) -> usize {
        self.windows.iter().map(|window| window.kernel).product()
    }

    /// Slices of the cells that one element meets in all windows.
    fn cells(&self, element: usize, held: &[usize]) -> Vec<Slice> {
        let mut rest = element;
        let whole = self.shape.iter().map(|&size| Slice::from(0..size));
        let mut slices: Vec<Slice> = whole.collect();
        for (dim, window) in self.windows.iter().enumerate().rev() {
            let first = rest % window.kernel * window.dilation;
            rest /= window.kernel;
            let end = first + (held[dim] - 1) * window.stride + 1;
            slices[dim + 2] =
                Slice::new(first as isize, Some(end as isize), window.stride as isize);
        }
        slices
    }

    /// Gathers the cells of the windows, `[batch, channels · elements, *windows]`.
    fn gather(&self, x: &DispatchTensor) -> DispatchTensor {
        let (elements, held) = (self.elements(), self.held());
        let [batch, channels] = [self.shape[0], self.shape[1]];
        let whole = [&[batch, channels, elements], &held[..]].concat();
        // A view gets the dim of elements in front; it belongs after the channels.
        let mut axes: Vec<usize> = (0..whole.len()).collect();
        axes[..3].copy_from_slice(&[1, 2, 0]);
        let boxes = (0..elements).map(|element| {
            let view = Dispatch::float_slice(x.clone(), &self.cells(element, &held));
            let mut shape = view.shape().to_vec();
            shape.insert(0, 1);
            let view = Dispatch::float_expand(view, Shape::from(shape));
            let place = IndexBox::whole(&whole).with_range(2, element..element + 1);
            (place, Dispatch::float_permute(view, &axes))
        });
        let gathered = of_boxes(x, &whole, None, &boxes.collect::<Vec<_>>());
        let shape = [&[batch, channels * elements], &held[..]].concat();
        Dispatch::float_reshape(gathered, Shape::from(shape))
    }

    /// Adds up the windows at the positions of their cells in the box.
    fn add_up(&self, x: DispatchTensor) -> DispatchTensor {
        let dtype = x.dtype();
        let x = in_dtype(x, wider(dtype));
        let (elements, held) = (self.elements(), self.held());
        let count: usize = held.iter().product();
        let planes = self.shape[0] * self.shape[1];
        let mut sum = blank(&x, &self.shape, Some(0.0));
        let x = Dispatch::float_reshape(x, Shape::from([planes, elements, count]));
        for element in 0..elements {
            let slices = [0..planes, element..element + 1, 0..count].map(Slice::from);
            let part = Dispatch::float_slice(x.clone(), &slices);
            let mut shape = self.shape.clone();
            shape[2..].copy_from_slice(&held);
            let part = Dispatch::float_reshape(part, Shape::from(shape));
            let cells = self.cells(element, &held);
            let part = Dispatch::float_add(Dispatch::float_slice(sum.clone(), &cells), part);
            sum = Dispatch::float_slice_assign(sum, &cells, part);
        }
        in_dtype(sum, dtype)
    }
}

impl Operator for Patches {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(match self.way {
            Way::Gather => ["unfold", "unfold (backward)"],
            Way::AddUp => ["fold", "fold (backward)"],
        })
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let x = inputs.remove(0);
        let y = match self.way {
            Way::Gather => self.gather(&x),
            Way::AddUp => self.add_up(x),
        };
        Ok((y, ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let gradient = match self.way {
            Way::Gather => self.add_up(pass.cotangent),
            Way::AddUp => self.gather(&pass.cotangent),
        };
        Ok(vec![Some(gradient)])
    }
}
