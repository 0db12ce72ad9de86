//! Operators that rearrange cells: concatenation, slicing, padding, indexing, flip, roll,
//! permutation and reshaping of dims, and alignment to the shards of another tensor.
//!
//! Most functions also take sharded integers and booleans: `cat`, `stack`, `narrow`,
//! `slice_dim`, `select_dim`, `index_select`, `gather`, `pad`, `shift`, `roll`, `flip`,
//! `repeat_all`, `permute`, and the changes of shape. The methods of fields take floats.

mod align;
pub mod cat;
mod distribute_operand;
mod flatten;
mod flip;
mod fold;
pub mod gather;
mod golden;
pub mod map_chunks;
mod narrow;
mod pad;
mod permute;
pub mod pixel;
mod poles;
mod profile;
mod rearrange_field;
mod repeat;
mod roll;
pub mod select;
mod shape;
mod shape_field;
pub mod shift;
mod slice;
mod split;
#[cfg(test)]
mod tests;
pub mod triangle;

pub use align::align_to;
pub(crate) use cat::joined;
pub use cat::{cat, stack};
pub use distribute_operand::distribute_operand;
pub(crate) use distribute_operand::placements_beside;
pub use flatten::{flatten, unflatten};
pub use flip::flip;
pub use fold::pad_fold;
pub use gather::{gather, scatter, scatter_add};
pub(crate) use golden::OPERATORS;
pub use map_chunks::map_chunks;
pub use narrow::narrow;
pub use pad::pad;
pub use permute::permute;
pub use pixel::{pixel_shuffle, pixel_unshuffle};
pub use poles::pad_poles;
pub use profile::profile;
pub use rearrange_field::RearrangeField;
pub use repeat::repeat_all;
pub use roll::roll;
pub use select::{index_select, select_dim};
pub use shape::{expand, reshape, squeeze_dim, unsqueeze_dim};
pub use shape_field::ShapeField;
pub use shift::shift;
pub use slice::slice_dim;
pub use split::{chunk, split_with_sizes};
pub use triangle::{tril, triu};
