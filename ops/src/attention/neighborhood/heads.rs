//! Queries, keys and values read in place, also as views of one projection.

use burn::backend::DispatchTensor;
use burn::backend::flex::{FlexTensor, Layout};
use halocline_core::Result;

use crate::attention::engine::rows::Piece;
use crate::kernel::flex::{self, Float};

/// Casts a tensor `[.., heads, width]` to the element type of a kernel. It is copied only if
/// [`piece`] cannot read it.
pub(super) fn in_heads<E: Float>(tensor: DispatchTensor) -> Result<FlexTensor> {
    let tensor = flex::cast::<E>(tensor)?;
    Ok(match pitch(tensor.layout()) {
        Some(_) => tensor,
        None => flex::contiguous(tensor),
    })
}

/// Distance between the heads of a tensor `[.., heads, width]`, if all are equally spaced and their
/// elements contiguous.
fn pitch(layout: &Layout) -> Option<usize> {
    let (shape, strides) = (layout.shape(), layout.strides());
    let last = shape.len() - 1;
    if layout.num_elements() == 0 {
        // Strides of a tensor without elements may be zero.
        return Some(shape[last]);
    }
    let (mut pitch, mut heads) = (None, 1);
    for dim in (0..last).rev().filter(|dim| shape[*dim] > 1) {
        let stride = usize::try_from(strides[dim]).ok()?;
        if stride != *pitch.get_or_insert(stride) * heads {
            return None;
        }
        heads *= shape[dim];
    }
    let pitch = pitch.unwrap_or(shape[last]);
    (pitch >= shape[last] && (strides[last] == 1 || shape[last] == 1)).then_some(pitch)
}

/// The elements of a tensor `[batch, *cells, heads, width]` that [`in_heads`] returned.
///
/// # Panics
/// Panics if heads are not equally spaced.
pub(super) fn piece<E: Float>(tensor: &FlexTensor) -> Piece<'_, E> {
    let layout = tensor.layout();
    let shape = layout.shape();
    let pitch = pitch(layout).expect("heads that are equally spaced");
    let (cells, heads) = (&shape[1..shape.len() - 2], shape[shape.len() - 2]);
    let elements = match layout.num_elements() {
        // An empty view may start outside the storage.
        0 => &[],
        _ => &tensor.storage()[layout.start_offset()..],
    };
    Piece::reading(elements, [cells.iter().product(), heads, pitch], 0)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Int, Tensor};

    use super::*;

    #[test]
    fn heads_are_read_in_place_where_they_are_equally_spaced() {
        type View = fn(Tensor<4>) -> Tensor<4>;

        let device = Device::flex();
        let numbers = Tensor::<1, Int>::arange(0..240, &device).float();
        let whole = numbers.reshape([2, 5, 3, 8]);
        let first = |x: &Tensor<4>| {
            let x = flex::cast::<f32>(x.clone().into_dispatch()).expect("a tensor of the CPU");
            x.storage::<f32>().as_ptr()
        };
        let views: [(View, bool); 8] = [
            (|x| x, true),
            (|x| x.narrow(3, 2, 4), true),
            (|x| x.narrow(2, 1, 1), true),
            (|x| x.narrow(0, 1, 1), true),
            (|x| x.narrow(2, 1, 2), false),
            (|x| x.narrow(1, 1, 3), false),
            (|x| x.swap_dims(2, 3), false),
            (|x| x.narrow(2, 0, 1).expand([2, 5, 3, 8]), false),
        ];
        for (index, (view, in_place)) in views.into_iter().enumerate() {
            let seen = view(whole.clone());
            let [batches, cells, heads, width] = seen.dims();
            let expected: Vec<f32> = seen.clone().into_data().iter::<f32>().collect();
            let tensor = in_heads::<f32>(seen.into_dispatch()).expect("a tensor of the CPU");
            let shares_memory = tensor.storage::<f32>().as_ptr() == first(&whole);
            assert_eq!(shares_memory, in_place, "view {index}");
            let piece = piece::<f32>(&tensor);
            let mut found = Vec::new();
            for number in 0..batches * cells * heads {
                let (cell, head) = (number / heads, number % heads);
                let row = piece.at(cell / cells, head, cell % cells).cast_const();
                // SAFETY: the head has this many elements.
                found.extend_from_slice(unsafe { std::slice::from_raw_parts(row, width) });
            }
            assert_eq!(found, expected, "view {index}");
        }
        // Burn's strides of the batch are zero here.
        let empty = Tensor::<4>::zeros([2, 0, 3, 8], &device);
        let empty = in_heads::<f32>(empty.into_dispatch()).expect("a tensor of the CPU");
        piece::<f32>(&empty);
    }
}
