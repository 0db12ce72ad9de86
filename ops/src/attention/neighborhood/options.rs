//! Options of neighborhood attention.

use crate::driver::Neighborhood;

/// Neighborhoods of `N` spatial dims, and the scale of scores.
///
/// # Example
/// ```
/// use halocline_ops::NeighborhoodOptions;
///
/// // A weather field: clamped at the poles, periodic in longitude.
/// let options = NeighborhoodOptions::new([7, 7]).with_periodic([false, true]);
/// assert_eq!(options.dims[1].kernel, 7);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NeighborhoodOptions<const N: usize> {
    /// The neighborhood in every spatial dim.
    pub dims: [Neighborhood; N],
    /// What scores are multiplied with: `width^-1/2` if it is not given.
    pub scale: Option<f64>,
}

impl<const N: usize> NeighborhoodOptions<N> {
    /// Neighborhoods of so many neighbouring keys in every dim.
    pub fn new(kernel: [usize; N]) -> Self {
        Self {
            dims: kernel.map(Neighborhood::new),
            scale: None,
        }
    }

    fn with<T: Copy>(mut self, values: [T; N], set: impl Fn(&mut Neighborhood, T)) -> Self {
        self.dims
            .iter_mut()
            .zip(values)
            .for_each(|(dim, value)| set(dim, value));
        self
    }

    /// These options with another distance from one key to the next.
    #[must_use]
    pub fn with_dilation(self, dilation: [usize; N]) -> Self {
        self.with(dilation, |dim, value| dim.dilation = value)
    }

    /// These options with so many neighbouring queries that share a window.
    #[must_use]
    pub fn with_stride(self, stride: [usize; N]) -> Self {
        self.with(stride, |dim, value| dim.stride = value)
    }

    /// These options with dims in which only keys up to the query's own place count.
    #[must_use]
    pub fn with_causal(self, causal: [bool; N]) -> Self {
        self.with(causal, |dim, value| dim.causal = value)
    }

    /// These options with dims that go on at their other end.
    #[must_use]
    pub fn with_periodic(self, periodic: [bool; N]) -> Self {
        self.with(periodic, |dim, value| dim.periodic = value)
    }

    /// These options with another scale of scores.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self {
            scale: Some(scale),
            ..self
        }
    }
}
