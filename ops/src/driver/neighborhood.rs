//! Neighborhood of a query in one dim: windows are shifted at the ends of the field, never padded.
//!
//! With `g = i mod d` and `j = i div d`, query `i` of a dim of `N` cells attends to the keys
//! `g + d·u` of its residue class, where `u` runs over a range of length `k` (shorter at the
//! beginning of a causal dim). Semantics follow NATTEN 0.21 (A. Hassani and H. Shi, "Dilated
//! Neighborhood Attention Transformer", 2022; A. Hassani et al., "Generalized Neighborhood
//! Attention", 2025), with periodic dims in addition.

use std::ops::Range;

use halocline_core::{Error, Result};

/// Neighborhood of a query in one dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Neighborhood {
    /// Number of keys that a query attends to.
    pub kernel: usize,
    /// Distance from one key to the next, in cells.
    pub dilation: usize,
    /// Number of queries that share a window.
    pub stride: usize,
    /// Whether a query attends only to keys up to its own position.
    pub causal: bool,
    /// Whether the dim wraps around, as longitude does. Windows of such a dim are not shifted.
    pub periodic: bool,
}

impl Neighborhood {
    /// Neighborhood of `kernel` adjacent cells.
    pub fn new(kernel: usize) -> Self {
        Self {
            kernel,
            dilation: 1,
            stride: 1,
            causal: false,
            periodic: false,
        }
    }

    /// Checks that the neighborhood fits a dim of `size` cells.
    ///
    /// # Errors
    /// A kernel of fewer than two cells, or longer with its dilation than the field; a stride of
    /// zero or larger than the kernel; a periodic dim that is causal or not divisible by the
    /// dilation.
    pub(crate) fn check(&self, operator: &str, dim: usize, size: usize) -> Result<()> {
        let Self {
            kernel,
            dilation,
            stride,
            causal,
            periodic,
        } = *self;
        let fail = |what: String| Err(Error::operator(operator, format!("dim {dim}: {what}")));
        if kernel < 2 {
            return fail(format!("kernel {kernel}; expected at least 2"));
        }
        let reach = kernel as u128 * dilation as u128;
        if dilation == 0 || reach > size as u128 {
            return fail(format!(
                "kernel {kernel} × dilation {dilation} is {reach} cells; expected 1 to {size}, the size of the field"
            ));
        }
        if stride == 0 || stride > kernel {
            return fail(format!(
                "stride {stride}; expected 1 to {kernel}, the kernel"
            ));
        }
        if periodic && causal {
            return fail("periodic and causal; a ring has no first cell".into());
        }
        if periodic && !size.is_multiple_of(dilation) {
            return fail(format!(
                "dilation {dilation} does not divide the {size} cells of a periodic dim"
            ));
        }
        Ok(())
    }

    /// Keys that query `index` of a residue class of `cells` attends to, as indices within the
    /// class. In a periodic dim they may lie beyond its ends.
    pub(crate) fn keys(&self, index: usize, cells: usize) -> Range<isize> {
        let [kernel, stride, index, cells] =
            [self.kernel, self.stride, index, cells].map(|count| count as isize);
        let group = index / stride * stride;
        if self.causal {
            let leader = (group + stride - 1).min(cells - 1);
            return (leader - kernel + 1).max(0)..index + 1;
        }
        let leader = group + stride / 2;
        let start = if self.periodic {
            leader - kernel / 2
        } else {
            (leader.min(cells - 1) - kernel / 2).clamp(0, cells - kernel)
        };
        start..start + kernel
    }

    /// Number of cells in the residue class of `cell`, in a dim of `size`.
    pub(crate) fn class_size(&self, cell: usize, size: usize) -> usize {
        (size - cell % self.dilation).div_ceil(self.dilation)
    }

    /// Range of cells that a range of queries attends to. Windows never move back, so the first
    /// query of each residue class determines where the range starts, and the last one where it
    /// ends.
    pub(crate) fn input_range(&self, queries: &Range<usize>, size: usize) -> Range<isize> {
        let dilation = self.dilation;
        let reach = |query: usize| {
            let keys = self.keys(query / dilation, self.class_size(query, size));
            let cell = |key: isize| (query % dilation) as isize + key * dilation as isize;
            cell(keys.start)..cell(keys.end - 1) + 1
        };
        let first = queries
            .clone()
            .take(dilation)
            .map(|query| reach(query).start);
        let last = queries
            .clone()
            .rev()
            .take(dilation)
            .map(|query| reach(query).end);
        match (first.min(), last.max()) {
            (Some(start), Some(end)) => start..end,
            _ => 0..0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn neighborhood() -> impl Strategy<Value = (Neighborhood, usize)> {
        let sizes = (2..9_usize, 1..4_usize, 0..3_usize, 0..12_usize);
        sizes.prop_flat_map(|(kernel, dilation, kind, more)| {
            (1..=kernel).prop_map(move |stride| {
                let periodic = kind == 2;
                let size = kernel * dilation + if periodic { more * dilation } else { more };
                let neighborhood = Neighborhood {
                    kernel,
                    dilation,
                    stride,
                    causal: kind == 1,
                    periodic,
                };
                (neighborhood, size)
            })
        })
    }

    proptest! {
        /// Cells outside the halo of the formula are never reached, and a range at least as long as
        /// the dilation reaches both ends of the halo.
        #[test]
        fn the_cells_reached_are_those_of_all_windows((neighborhood, size) in neighborhood(), part in (0..100_usize, 0..100_usize)) {
            neighborhood.check("test", 1, size).unwrap();
            let (start, len) = (part.0 % size, part.1 % size);
            let queries = start..(start + len + 1).min(size);
            let dilation = neighborhood.dilation;
            let mut cells = Vec::new();
            for query in queries.clone() {
                let keys = neighborhood.keys(query / dilation, neighborhood.class_size(query, size));
                prop_assert!(!keys.is_empty());
                for key in keys {
                    cells.push((query % dilation) as isize + key * dilation as isize);
                }
            }
            let ends = [cells.iter().min(), cells.iter().max()];
            let [Some(first), Some(last)] = ends else {
                unreachable!("a query reaches keys");
            };
            let reached = *first..*last + 1;
            prop_assert_eq!(&neighborhood.input_range(&queries, size), &reached);
            if neighborhood.periodic {
                return Ok(());
            }
            // The sufficient halo.
            let [s, e, n] = [queries.start, queries.end, size].map(|cell| cell as isize);
            let [k, d, t] = [neighborhood.kernel, dilation, neighborhood.stride].map(|count| count as isize);
            let [low, high] = if neighborhood.causal {
                [s.min((k - 1) * d), 0]
            } else {
                let (before, after) = (k / 2 + t - 1 - t / 2, (k - 1) / 2 + t / 2);
                [s.min((before * d).max(k * d - (n - s))), (n - e).min((after * d).max(k * d - e))]
            };
            prop_assert!(reached.start >= s - low && reached.end <= e + high, "{:?} beyond {}..{}", reached, s - low, e + high);
        }
    }

    #[test]
    fn windows_are_shifted_at_the_ends() {
        let neighborhood = Neighborhood::new(5);
        let windows: Vec<_> = (0..7).map(|query| neighborhood.keys(query, 7)).collect();
        assert_eq!(windows, [0..5, 0..5, 0..5, 1..6, 2..7, 2..7, 2..7]);
    }

    #[test]
    fn what_does_not_fit_is_an_error_with_its_numbers() {
        let message = |neighborhood: Neighborhood, size| {
            neighborhood.check("na1d", 1, size).unwrap_err().to_string()
        };
        let dilated = Neighborhood {
            dilation: 3,
            ..Neighborhood::new(4)
        };
        assert_eq!(
            message(dilated, 11),
            "na1d: dim 1: kernel 4 × dilation 3 is 12 cells; expected 1 to 11, the size of the field"
        );
        // Would wrap around to zero.
        let vast = Neighborhood {
            dilation: usize::MAX / 2 + 1,
            ..Neighborhood::new(2)
        };
        let found = message(vast, 11);
        assert!(found.contains("is 18446744073709551616 cells"), "{found}");
        let ring = Neighborhood {
            periodic: true,
            dilation: 2,
            ..Neighborhood::new(3)
        };
        assert!(message(ring, 7).contains("dilation 2 does not divide the 7 cells"));
        assert!(message(Neighborhood::new(1), 7).contains("expected at least 2"));
    }
}
