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
    /// Neighborhood in every spatial dim.
    pub dims: [Neighborhood; N],
    /// Scale of the scores; default `width^-1/2`.
    pub scale: Option<f64>,
}

impl<const N: usize> NeighborhoodOptions<N> {
    /// Neighborhoods of `kernel` adjacent keys in every dim.
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

    /// Sets the distance between keys, in cells.
    #[must_use]
    pub fn with_dilation(self, dilation: [usize; N]) -> Self {
        self.with(dilation, |dim, value| dim.dilation = value)
    }

    /// Sets the number of adjacent queries that share a window.
    #[must_use]
    pub fn with_stride(self, stride: [usize; N]) -> Self {
        self.with(stride, |dim, value| dim.stride = value)
    }

    /// Sets the dims in which a query attends only to keys up to its own position.
    #[must_use]
    pub fn with_causal(self, causal: [bool; N]) -> Self {
        self.with(causal, |dim, value| dim.causal = value)
    }

    /// Sets the dims that wrap around.
    #[must_use]
    pub fn with_periodic(self, periodic: [bool; N]) -> Self {
        self.with(periodic, |dim, value| dim.periodic = value)
    }

    /// Sets the scale of the scores.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self {
            scale: Some(scale),
            ..self
        }
    }
}
