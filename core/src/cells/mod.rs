//! Boxes of cells of CPU tensors, written into a result in one pass by all threads.

mod line;
mod slabs;
#[cfg(test)]
mod tests;
mod transpose;
mod walk;

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape};

use crate::IndexBox;
use crate::dispatch::{blank, here, of_cpu, paste};
use crate::memory::Block;
use crate::tasks;
use line::{write_line, write_runs};
use slabs::{Cells, Elements, in_slabs, share_rows};
use walk::{Blocks, Dim, TASK, Walk, merged};

/// Maximum number of parts that are compared pairwise.
const FEW: usize = 64;

/// Makes a tensor from boxes, with the given shape and the element type and device of `like`. Boxes
/// may be empty and must not overlap; cells that no box covers are `fill`, or unspecified.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_core::{IndexBox, ops};
///
/// let part = Tensor::<1>::from_floats([1.0, 2.0], &Device::default()).into_dispatch();
/// let place = IndexBox::new(Vec::from([1..3]));
/// let whole = ops::of_boxes(&part, &[4], Some(0.0), &[(place, part.clone())]);
/// let whole = Tensor::<1>::from_dispatch(whole);
/// whole.into_data().assert_eq(&[0.0_f32, 1.0, 2.0, 0.0].into(), true);
/// ```
pub fn of_boxes(
    like: &DispatchTensor,
    shape: &[usize],
    fill: Option<f64>,
    boxes: &[(IndexBox, DispatchTensor)],
) -> DispatchTensor {
    let covered: usize = boxes.iter().map(|(place, _)| place.volume()).sum();
    let fill = fill.filter(|_| covered < shape.iter().product());
    assembled(like, shape, fill, boxes).unwrap_or_else(|| {
        let boxes = boxes.iter().filter(|(place, _)| place.volume() > 0);
        let empty = blank(like, shape, fill);
        boxes
            .cloned()
            .fold(empty, |whole, (place, cells)| paste(whole, &place, cells))
    })
}

/// Returns the tensor in row-major order. On the CPU, all threads copy its cells unless they are
/// contiguous already.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_core::ops::in_order;
///
/// let x = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &Device::default()).transpose();
/// let x = Tensor::<2>::from_dispatch(in_order(x.into_dispatch()));
/// x.into_data().assert_eq(&[[1.0_f32, 3.0], [2.0, 4.0]].into(), true);
/// ```
pub fn in_order(tensor: DispatchTensor) -> DispatchTensor {
    if here(&tensor).is_some_and(FlexTensor::is_contiguous) {
        return tensor;
    }
    copied(&tensor)
}

/// Returns a copy in row-major order that owns its memory.
pub(crate) fn copied(tensor: &DispatchTensor) -> DispatchTensor {
    let shape = tensor.shape().to_vec();
    let whole = [(IndexBox::whole(&shape), tensor.clone())];
    of_boxes(tensor, &shape, None, &whole)
}

/// Implements [`of_boxes`] on the CPU; returns `None` if a tensor is not on the CPU.
fn assembled(
    like: &DispatchTensor,
    shape: &[usize],
    fill: Option<f64>,
    boxes: &[(IndexBox, DispatchTensor)],
) -> Option<DispatchTensor> {
    let dtype = here(like)?.dtype();
    let parts = on_cpu(boxes)?;
    let fill = fill.map(|value| blank(like, &[1], Some(value)));
    let fill = fill
        .as_ref()
        .map(|fill| here(fill).expect("on the device of `like`").bytes());
    // Numbers are copied as bits.
    Some(match dtype.size() {
        1 => stored::<u8>(dtype, shape, fill, &parts),
        2 => stored::<u16>(dtype, shape, fill, &parts),
        4 => stored::<u32>(dtype, shape, fill, &parts),
        8 => stored::<u64>(dtype, shape, fill, &parts),
        _ => return None,
    })
}

/// Adds boxes, one after another, to a new tensor of zeros with the given shape and the element
/// type of `like`. Returns `None` if a tensor is not on the CPU, or for element types other than
/// f32 and f64.
pub(crate) fn summed(
    like: &DispatchTensor,
    shape: &[usize],
    boxes: &[(IndexBox, DispatchTensor)],
) -> Option<DispatchTensor> {
    let dtype = here(like)?.dtype();
    let parts = on_cpu(boxes)?;
    let zero = &[0; size_of::<f64>()][..dtype.size()];
    let apart = is_partition(shape, &parts);
    Some(match (dtype, apart) {
        (DType::F32, true) => stored::<f32>(dtype, shape, None, &parts),
        (DType::F64, true) => stored::<f64>(dtype, shape, None, &parts),
        (DType::F32, false) => {
            written::<f32>(dtype, shape, Some(zero), &parts, Some(|old, new| old + new))
        }
        (DType::F64, false) => {
            written::<f64>(dtype, shape, Some(zero), &parts, Some(|old, new| old + new))
        }
        _ => return None,
    })
}

type Part<'a> = (&'a IndexBox, &'a FlexTensor);

fn on_cpu(boxes: &[(IndexBox, DispatchTensor)]) -> Option<Vec<Part<'_>>> {
    boxes
        .iter()
        .map(|(place, cells)| Some((place, here(cells)?)))
        .collect()
}

/// Whether every cell is in exactly one part.
fn is_partition(shape: &[usize], parts: &[Part<'_>]) -> bool {
    let volume: usize = parts.iter().map(|(place, _)| place.volume()).sum();
    volume == shape.iter().product::<usize>() && are_apart(parts)
}

/// Whether no cell is in two parts; `false` if there are too many parts to compare.
fn are_apart(parts: &[Part<'_>]) -> bool {
    let meets = |(i, (place, _)): (usize, &Part<'_>)| {
        let mut others = parts[..i].iter();
        others.any(|(other, _)| other.meets(place))
    };
    parts.len() <= FEW && !parts.iter().enumerate().any(meets)
}

/// Like [`written`], with parts that replace existing elements.
fn stored<T: bytemuck::Pod + Send + Sync>(
    dtype: DType,
    shape: &[usize],
    fill: Option<&[u8]>,
    parts: &[Part<'_>],
) -> DispatchTensor {
    written::<T>(dtype, shape, fill, parts, None::<fn(T, T) -> T>)
}

/// Makes a tensor of `fill`, or of unspecified elements, and writes parts into it in order:
/// `combine` computes an element from the old and the new one; without it, the new element replaces
/// the old.
fn written<T: bytemuck::Pod + Send + Sync>(
    dtype: DType,
    shape: &[usize],
    fill: Option<&[u8]>,
    parts: &[Part<'_>],
    combine: Option<impl Fn(T, T) -> T + Sync>,
) -> DispatchTensor {
    let len: usize = shape.iter().product();
    let bytes = len * size_of::<T>();
    let block = Block::new(bytes);
    let elements = Elements(block.start().as_ptr().cast::<T>());
    if let Some(fill) = fill {
        let value: T = bytemuck::pod_read_unaligned(&fill[..size_of::<T>()]);
        tasks::for_each(len.div_ceil(TASK), 1, |task| {
            let start = task * TASK;
            for index in start..len.min(start + TASK) {
                // SAFETY: within the block, and written only by this task.
                unsafe { elements.at(index).write(value) };
            }
        });
    }
    let copies: Vec<Placed<'_, T>> = parts
        .iter()
        .filter_map(|(place, cells)| Placed::new(shape, place, cells))
        .collect();
    match combine {
        None if are_apart(parts) => {
            let boxes: Vec<_> = copies.iter().map(|copy| copy.from).collect();
            match share_rows(shape, &boxes) {
                // SAFETY: checked here and, for every copy, when it was made: its box lies in the
                // result, which nothing else uses, and the same number of cells lies in its
                // storage.
                true => unsafe { in_slabs(shape, &boxes, elements) },
                false => in_one_loop(&copies, elements),
            }
        }
        combine => {
            for copy in &copies {
                // SAFETY: the box lies in the result, which nothing else uses.
                tasks::for_each(copy.tasks, copy.blocks.together(), |task| unsafe {
                    copy.run(task, elements, combine.as_ref());
                });
            }
        }
    }
    let layout = Layout::contiguous(Shape::from(shape.to_vec()));
    of_cpu(FlexTensor::new(block.into_bytes(bytes), layout, dtype))
}

/// Writes disjoint boxes, all in one loop over their tasks.
fn in_one_loop<T: bytemuck::Pod + Send + Sync>(copies: &[Placed<'_, T>], elements: Elements<T>) {
    let mut ends = Vec::with_capacity(copies.len());
    let mut end = 0;
    for copy in copies {
        end += copy.tasks.div_ceil(copy.blocks.together());
        ends.push(end);
    }
    let cells: usize = copies.iter().map(|copy| copy.cells).sum();
    let together = if cells <= 2 * TASK { end } else { 1 };
    tasks::for_each(end, together, |group| {
        let number = ends.partition_point(|end| *end <= group);
        let copy = &copies[number];
        let first = number.checked_sub(1).map_or(0, |before| ends[before]);
        let together = copy.blocks.together();
        let tasks = (group - first) * together..copy.tasks.min((group - first + 1) * together);
        for task in tasks {
            // SAFETY: the boxes are disjoint and lie in the result, which nothing else uses.
            unsafe { copy.run(task, elements, None::<&fn(T, T) -> T>) };
        }
    });
}

/// Box to be written into a result, divided into tasks.
struct Placed<'a, T> {
    from: Cells<'a, T>,
    cells: usize,
    /// The offset of the first element of the box, in the result and in the storage.
    first: [isize; 2],
    walk: Walk,
    blocks: Blocks,
    tasks: usize,
}

impl<'a, T: bytemuck::Pod + Send + Sync> Placed<'a, T> {
    /// Makes a box of a result of this shape; returns `None` if the box is empty.
    fn new(shape: &[usize], place: &'a IndexBox, cells: &'a FlexTensor) -> Option<Self> {
        let layout = cells.layout();
        assert_eq!(place.ranges().len(), shape.len(), "{place} of {shape:?}");
        assert_eq!(
            place.shape(),
            layout.shape()[..],
            "cells of another shape than their box"
        );
        if place.volume() == 0 {
            return None;
        }
        let ends = place.ranges().iter().map(|range| range.end);
        assert!(
            ends.zip(shape).all(|(end, size)| end <= *size),
            "{place} of {shape:?} cells"
        );
        let storage: &[T] = bytemuck::cast_slice(cells.bytes());
        let (mut dims, mut first, mut stride) = (Vec::new(), 0, 1);
        for (dim, range) in place.ranges().iter().enumerate().rev() {
            first += range.start * stride;
            let (size, from) = (range.len(), layout.strides()[dim]);
            dims.push(Dim {
                size,
                to: stride as isize,
                from,
            });
            stride *= shape[dim];
        }
        let walk = Walk::through(merged(dims));
        assert_within(storage.len(), layout);
        let blocks = Blocks::of(&walk);
        let rows: usize = walk.outer.iter().map(|dim| dim.size).product();
        let from = Cells {
            place,
            storage,
            layout,
        };
        Some(Self {
            from,
            cells: place.volume(),
            first: [first as isize, layout.start_offset() as isize],
            tasks: rows * blocks.count(),
            walk,
            blocks,
        })
    }

    /// Writes the cells of a task.
    ///
    /// # Safety
    /// The result must have the shape given to [`new`](Self::new), and nothing else may use the
    /// cells of the box meanwhile.
    unsafe fn run(
        &self,
        task: usize,
        elements: Elements<T>,
        combine: Option<&(impl Fn(T, T) -> T + Sync)>,
    ) {
        let Walk {
            unit,
            outer,
            slow,
            fast,
        } = &self.walk;
        let per_row = self.blocks.count();
        let (mut row, block) = (task / per_row, task % per_row);
        let [slow_cells, fast_cells] = self.blocks.ranges(block);
        let [mut to, mut from] = self.first;
        for dim in outer {
            let index = (row % dim.size) as isize;
            row /= dim.size;
            (to, from) = (to + index * dim.to, from + index * dim.from);
        }
        for (dim, cells) in [(slow, &slow_cells), (fast, &fast_cells)] {
            let start = cells.start as isize;
            (to, from) = (to + start * dim.to, from + start * dim.from);
        }
        let count = fast_cells.len();
        let block = match combine {
            None if transpose::is_supported::<T>() => {
                self.walk.transpose([slow_cells.len(), count])
            }
            _ => None,
        };
        if let Some(block) = block {
            // SAFETY: cells of the view, which lies in the storage, and the same number of cells of
            // the box, used only by this task.
            unsafe {
                let cell = self.from.storage.as_ptr().offset(from);
                return block.write(elements.at(to as usize), cell);
            }
        }
        for line in 0..slow_cells.len() as isize {
            let (to, from) = (to + line * slow.to, from + line * slow.from);
            // SAFETY: `count` cells or runs of the view, which lies in the storage, and the same
            // number of the box, used only by this task.
            unsafe {
                let place = elements.at(to as usize);
                let cell = self.from.storage.as_ptr().offset(from);
                match (combine, *unit) {
                    (Some(combine), unit) => (0..unit).for_each(|offset| {
                        let (place, cell) = (place.add(offset), cell.add(offset));
                        write_line(place, cell, *fast, count, combine);
                    }),
                    (None, 1) if fast.in_one_piece() => {
                        place.copy_from_nonoverlapping(cell, count);
                    }
                    (None, 1) => write_line(place, cell, *fast, count, |_, cell| cell),
                    (None, 2) => write_runs::<T, 2>(place, cell, *fast, count),
                    (None, 4) => write_runs::<T, 4>(place, cell, *fast, count),
                    (None, 8) => write_runs::<T, 8>(place, cell, *fast, count),
                    (None, unit) => unreachable!("runs of {unit} cells"),
                }
            }
        }
    }
}

/// Checks that a view lies in its storage.
fn assert_within(len: usize, layout: &Layout) {
    let reaches = layout.shape().iter().zip(layout.strides());
    let start = layout.start_offset() as isize;
    let (low, high) = reaches.fold((start, start), |(low, high), (size, stride)| {
        let reach = (*size as isize - 1) * stride;
        (low + reach.min(0), high + reach.max(0))
    });
    assert!(low >= 0 && high < len as isize, "{layout:?} of {len} cells");
}
