//! Registry entries of rearrangements.

use super::{
    cat, flatten, flip, gather, pad, permute, pixel, repeat, roll, select, shape, shift, slice,
    split, triangle,
};
use crate::golden::Golden;

/// Rearrangements.
pub(crate) const OPERATORS: &[Golden] = {
    let [cat, stack] = cat::GOLDEN;
    let [pad1d, pad2d, pad3d] = pad::GOLDEN;
    let [split, chunk] = split::GOLDEN;
    let [select, index_select] = select::GOLDEN;
    let [gather, scatter_add, scatter] = gather::GOLDEN;
    let [unsqueeze, squeeze, reshape, expand] = shape::GOLDEN;
    let [tril, triu] = triangle::GOLDEN;
    let [pixel_shuffle, pixel_unshuffle] = pixel::GOLDEN;
    &[
        flip::GOLDEN,
        roll::GOLDEN,
        shift::GOLDEN,
        permute::GOLDEN,
        flatten::GOLDEN,
        pad1d,
        pad2d,
        pad3d,
        slice::GOLDEN,
        cat,
        stack,
        split,
        chunk,
        select,
        index_select,
        gather,
        scatter_add,
        scatter,
        unsqueeze,
        squeeze,
        reshape,
        expand,
        repeat::GOLDEN,
        tril,
        triu,
        pixel_shuffle,
        pixel_unshuffle,
    ]
};
