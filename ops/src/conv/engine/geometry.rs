//! Convolutions and their input gradients as correlations of a field with taps.

use std::ops::Range;

use crate::driver::windows_within;

/// Sizes, offsets or counts of three spatial dims; fields with fewer dims have leading dims of one
/// cell.
pub(crate) type Dims = [usize; 3];

/// Sizes of up to three dims as three, with leading dims of one cell, which do not change a
/// convolution.
pub(crate) fn three(sizes: &[usize]) -> Dims {
    let mut dims = [1; 3];
    dims[3 - sizes.len()..].copy_from_slice(sizes);
    dims
}

/// Position of an element in three dims of these sizes, from its index in row-major order.
pub(crate) fn unravel(index: usize, [_, rows, columns]: Dims) -> Dims {
    [
        index / (rows * columns),
        index / columns % rows,
        index % columns,
    ]
}

/// Parameters of a convolution on a field with every cell that its windows reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conv {
    /// Groups of channels that do not mix.
    pub groups: usize,
    /// Channels of the input, per group.
    pub inputs: usize,
    /// Channels of the output, per group.
    pub outputs: usize,
    /// Elements of the kernel.
    pub kernel: Dims,
    /// Distance between windows, in cells.
    pub stride: Dims,
    /// Distance between elements of the kernel, in cells.
    pub dilation: Dims,
}

/// A sum over channels and taps, for every cell of a lattice of results:
/// `result[o, start + out_step·m] = Σ_{c, t} weight[o, c, t] · source[c, step·m + offset[t]]`.
///
/// A convolution is one correlation. The gradient of its input is one correlation of step one for
/// every residue modulo the stride.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Correlation {
    /// Distance between adjacent lattice points, in source cells.
    pub step: Dims,
    /// Distance between adjacent lattice points, in result cells.
    pub out_step: Dims,
    /// First result cell.
    pub start: Dims,
    /// Extents of the lattice.
    pub count: Dims,
    /// The taps.
    pub taps: Vec<Tap>,
    /// Offsets of all taps in every dim, before any taps were dropped; they determine the order of
    /// sums.
    pub offsets: [Vec<isize>; 3],
}

/// One element of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tap {
    /// Source cell that the tap meets at the lattice's origin.
    pub offset: [isize; 3],
    /// Index in the kernel.
    pub element: usize,
}

impl Conv {
    /// Number of elements of a kernel, per pair of channels.
    pub(crate) fn elements(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Number of cells from the first to the last element of the kernel, in a dim.
    pub(crate) fn span(&self, dim: usize) -> usize {
        (self.kernel[dim] - 1) * self.dilation[dim] + 1
    }

    /// The convolution as a correlation with `count` results, the first of which is that of the
    /// window that begins at cell zero.
    pub(crate) fn forward(&self, count: Dims) -> Correlation {
        let taps = self.taps(|dim| {
            let cells = (0..self.kernel[dim]).map(|k| (k * self.dilation[dim]) as isize);
            cells.enumerate().collect()
        });
        Correlation {
            step: self.stride,
            out_step: [1; 3],
            start: [0; 3],
            count,
            offsets: offsets(&taps),
            taps,
        }
    }

    /// Results whose windows lie in a box of cells, as a range per dim; the ranges are empty if
    /// there are none.
    pub(crate) fn results_within(
        &self,
        cells: &[Range<usize>; 3],
        count: Dims,
    ) -> [Range<usize>; 3] {
        std::array::from_fn(|dim| {
            windows_within(&cells[dim], self.stride[dim], self.span(dim), count[dim])
        })
    }

    /// Gradient of a box of input cells: one correlation for each residue modulo the stride.
    /// Together they produce every cell of the box once.
    pub(crate) fn input_gradient(&self, cells: &[Range<usize>; 3]) -> Vec<Correlation> {
        let residues: usize = self.stride.iter().product();
        let mut parts = Vec::new();
        for index in 0..residues {
            let residue = unravel(index, self.stride);
            // Cells of the box with `cell ≡ residue`: `first + stride·m`.
            let first: Dims = std::array::from_fn(|dim| {
                let (from, stride) = (cells[dim].start, self.stride[dim]);
                from + (residue[dim] + stride - from % stride) % stride
            });
            let count: Dims = std::array::from_fn(|dim| {
                let left = cells[dim].end.saturating_sub(first[dim]);
                left.div_ceil(self.stride[dim])
            });
            if count.contains(&0) {
                continue;
            }
            let taps = self.taps(|dim| {
                let stride = self.stride[dim] as isize;
                let taps = (0..self.kernel[dim]).map(|k| {
                    let distance = first[dim] as isize - (k * self.dilation[dim]) as isize;
                    (k, distance)
                });
                taps.filter(|(_, distance)| distance.rem_euclid(stride) == 0)
                    .map(|(k, distance)| (k, distance.div_euclid(stride)))
                    .collect()
            });
            parts.push(Correlation {
                step: [1; 3],
                out_step: self.stride,
                start: std::array::from_fn(|dim| first[dim] - cells[dim].start),
                count,
                offsets: offsets(&taps),
                taps,
            });
        }
        parts
    }

    /// Product of the taps of each dim, which `in_dim` returns as (index in the kernel, offset).
    fn taps(&self, in_dim: impl Fn(usize) -> Vec<(usize, isize)>) -> Vec<Tap> {
        let [depth, rows, columns] = [in_dim(0), in_dim(1), in_dim(2)];
        let mut taps = Vec::new();
        for &(kd, d) in &depth {
            for &(kh, h) in &rows {
                for &(kw, w) in &columns {
                    taps.push(Tap {
                        offset: [d, h, w],
                        element: (kd * self.kernel[1] + kh) * self.kernel[2] + kw,
                    });
                }
            }
        }
        taps
    }
}

impl Correlation {
    /// Restricts the correlation to a box of its lattice.
    pub(crate) fn within(&self, lattice: &[Range<usize>]) -> Self {
        let first: Dims = std::array::from_fn(|dim| lattice[dim].start);
        let taps = self.taps.iter().map(|tap| Tap {
            offset: std::array::from_fn(|dim| {
                tap.offset[dim] + (self.step[dim] * first[dim]) as isize
            }),
            ..*tap
        });
        Self {
            step: self.step,
            out_step: self.out_step,
            start: std::array::from_fn(|dim| self.start[dim] + self.out_step[dim] * first[dim]),
            count: std::array::from_fn(|dim| lattice[dim].len()),
            taps: taps.collect(),
            offsets: self.offsets.clone(),
        }
    }

    /// Drops the taps that meet no cell of a source of these extents.
    #[must_use]
    pub(crate) fn meeting(mut self, source: Dims) -> Self {
        let last: [isize; 3] =
            std::array::from_fn(|dim| ((self.count[dim] - 1) * self.step[dim]) as isize);
        let meets = |tap: &Tap| {
            (0..3).all(|dim| {
                tap.offset[dim] < source[dim] as isize && tap.offset[dim] + last[dim] >= 0
            })
        };
        self.taps.retain(meets);
        self
    }

    /// Number of taps before any were dropped.
    pub(crate) fn terms(&self) -> usize {
        self.offsets.iter().map(Vec::len).product()
    }

    /// Offsets of the taps in every dim, in the order of the taps, which are their product.
    pub(crate) fn places(&self) -> [Vec<isize>; 3] {
        offsets(&self.taps)
    }

    /// Range of the taps' offsets in a dim; empty without taps.
    pub(crate) fn reach(&self, dim: usize) -> Range<isize> {
        reach(&self.places()[dim])
    }
}

fn offsets(taps: &[Tap]) -> [Vec<isize>; 3] {
    let mut offsets: [Vec<isize>; 3] = Default::default();
    for tap in taps {
        for (offsets, offset) in offsets.iter_mut().zip(tap.offset) {
            if !offsets.contains(&offset) {
                offsets.push(offset);
            }
        }
    }
    offsets
}

/// Range of offsets in a dim; empty if there are none.
pub(crate) fn reach(offsets: &[isize]) -> Range<isize> {
    let low = offsets.iter().min().copied().unwrap_or(0);
    low..offsets.iter().max().map_or(low, |high| high + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taps_that_meet_no_cell_are_left_out() {
        let conv = Conv {
            groups: 1,
            inputs: 1,
            outputs: 1,
            kernel: [1, 3, 3],
            stride: [1; 3],
            dilation: [1; 3],
        };
        // Results of 4 × 6; the first row before the field has taps of one row only.
        let taps = |rows, columns| {
            let parts = conv.input_gradient(&[0..1, rows, columns]);
            parts[0].clone().meeting([1, 4, 6]).taps.len()
        };
        assert_eq!(taps(0..6, 0..8), 9);
        assert_eq!(taps(0..1, 0..8), 3);
        assert_eq!(taps(5..6, 0..2), 2);
    }

    #[test]
    fn results_within_are_those_whose_windows_are() {
        for (stride, dilation, kernel) in [(1, 1, 3), (2, 1, 3), (3, 2, 2), (2, 3, 1)] {
            let conv = Conv {
                groups: 1,
                inputs: 1,
                outputs: 1,
                kernel: [1, 1, kernel],
                stride: [1, 1, stride],
                dilation: [1, 1, dilation],
            };
            for (start, end) in [(0, 9), (1, 8), (2, 5), (4, 5), (3, 3)] {
                let found = &conv.results_within(&[0..1, 0..1, start..end], [1, 1, 4])[2];
                for result in 0..4 {
                    let first = result * stride;
                    let last = first + (kernel - 1) * dilation;
                    let within = start <= first && last < end;
                    assert_eq!(
                        found.contains(&result),
                        within,
                        "{result} of {start}..{end}"
                    );
                }
            }
        }
    }
}
