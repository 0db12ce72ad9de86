//! Layouts of queries, keys, values and results, which differ in their last dim.

use halocline_core::Layout;

/// Layout of a tensor with another width, which is whole.
pub(super) fn with_width(layout: &Layout, width: usize) -> Layout {
    let mut extents = layout.all_extents().to_vec();
    *extents.last_mut().expect("a width") = vec![width];
    layout.derive(layout.placements().to_vec(), extents)
}
