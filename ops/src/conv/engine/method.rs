//! Choice between direct sums, Winograd's method and matrices for a convolution.

use std::sync::OnceLock;

use halocline_core::{Error, Result};

use crate::kernel::lanes::WIDEST;

/// Environment variable that selects the method.
const VARIABLE: &str = "HALOCLINE_CONV";

/// Method of computing a convolution's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// [`Winograd`](Self::Winograd) or [`Matrices`](Self::Matrices) where that is faster.
    Fastest,
    /// Term by term.
    Direct,
    /// With fewer multiplications, for kernels of three rows with stride and dilation one; with
    /// fewer still if they are squares.
    Winograd,
    /// Term by term, with each number as the sum of three bf16 numbers, on processors that multiply
    /// matrices of these (AMX).
    Matrices,
}

impl Method {
    /// Returns the method that `HALOCLINE_CONV` names: `direct`, `winograd` or `matrices`; the
    /// fastest if it is not set.
    ///
    /// # Errors
    /// The variable has another value.
    pub(crate) fn chosen() -> Result<Self> {
        static CHOSEN: OnceLock<Method> = OnceLock::new();
        if let Some(method) = CHOSEN.get() {
            return Ok(*method);
        }
        let method = Self::named(std::env::var(VARIABLE).ok().as_deref())?;
        Ok(*CHOSEN.get_or_init(|| method))
    }

    fn named(name: Option<&str>) -> Result<Self> {
        match name {
            None => Ok(Self::Fastest),
            Some("direct") => Ok(Self::Direct),
            Some("winograd") => Ok(Self::Winograd),
            Some("matrices") => Ok(Self::Matrices),
            Some(name) => {
                let message =
                    format!("no method {name:?}; set direct, winograd or matrices, or nothing");
                Err(Error::operator(VARIABLE, message))
            }
        }
    }

    /// Whether rows are transformed, given input and output channels of a group and rows of
    /// results: the cost of a transform is shared by the channels of the other side.
    pub(crate) fn transforms(self, [inputs, outputs, rows]: [usize; 3]) -> bool {
        match self {
            Self::Fastest => inputs >= 8 && outputs >= 8 && rows >= 6,
            Self::Direct | Self::Matrices => false,
            Self::Winograd => true,
        }
    }

    /// Whether squares are transformed, given input and output channels of a group, and the number,
    /// rows and columns of fields of results, which must have at least `least` cells together.
    pub(crate) fn transforms_squares(
        self,
        [inputs, outputs]: [usize; 2],
        [fields, rows, columns]: [usize; 3],
        least: usize,
    ) -> bool {
        match self {
            Self::Fastest => {
                let many = fields * rows * columns >= least;
                many && inputs >= 16 && outputs >= 16 && rows >= 6 && columns >= 6
            }
            Self::Direct | Self::Matrices => false,
            Self::Winograd => true,
        }
    }

    /// Whether this number of channels fills vectors well enough to be the lanes of squares'
    /// results.
    pub(crate) fn fills_lanes(self, channels: usize) -> bool {
        self != Self::Fastest || 4 * channels >= 3 * channels.next_multiple_of(WIDEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_are_transformed_where_that_pays() {
        let of = |channels, sizes| Method::Fastest.transforms_squares(channels, sizes, 256);
        assert!(of([20, 32], [1, 181, 360]) && of([256, 256], [1, 23, 45]));
        assert!(of([512, 512], [4, 8, 8]) && !of([512, 512], [1, 8, 8]));
        assert!(!of([8, 32], [1, 181, 360]) && !of([32, 8], [1, 181, 360]));
        assert!(Method::Winograd.transforms_squares([1, 1], [1, 1, 1], 256));
        assert!(Method::Fastest.fills_lanes(24) && !Method::Fastest.fills_lanes(20));
    }

    #[test]
    fn a_method_is_chosen_by_its_name() {
        assert_eq!(Method::named(None).unwrap(), Method::Fastest);
        assert_eq!(Method::named(Some("direct")).unwrap(), Method::Direct);
        assert_eq!(Method::named(Some("winograd")).unwrap(), Method::Winograd);
        assert_eq!(Method::named(Some("matrices")).unwrap(), Method::Matrices);
        let error = Method::named(Some("fft")).unwrap_err().to_string();
        assert!(error.contains("no method \"fft\"; set direct"), "{error}");
    }
}
