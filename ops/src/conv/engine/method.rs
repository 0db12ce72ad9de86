//! The choice between the direct sums of a convolution, Winograd's, and those by matrices.

use std::sync::OnceLock;

use halocline_core::{Error, Result};

/// The environment variable that chooses.
const VARIABLE: &str = "HALOCLINE_CONV";

/// How a convolution's sums are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// By [`Winograd`](Self::Winograd) or by [`Matrices`](Self::Matrices) where that is faster.
    Fastest,
    /// Term by term.
    Direct,
    /// With fewer multiplications, for kernels of three rows with stride and dilation one; with fewer still if they have three
    /// columns.
    Winograd,
    /// Term by term, each number as the sum of three bf16 numbers, where the processor multiplies matrices of these (AMX).
    Matrices,
}

impl Method {
    /// The method that `HALOCLINE_CONV` names: `direct`, `winograd` or `matrices`, or the fastest.
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

    /// Whether rows are transformed, for input and output channels of a group and rows of results:
    /// what transforms cost is shared by the channels of the other side.
    pub(crate) fn transforms(self, [inputs, outputs, rows]: [usize; 3]) -> bool {
        match self {
            Self::Fastest => inputs >= 8 && outputs >= 8 && rows >= 6,
            Self::Direct | Self::Matrices => false,
            Self::Winograd => true,
        }
    }

    /// Whether columns are transformed, too, where rows are: for input and output channels of a group, and columns of results in
    /// vectors of so many lanes.
    pub(crate) fn transforms_columns(
        self,
        [inputs, outputs, columns]: [usize; 3],
        lanes: usize,
    ) -> bool {
        let in_blocks = outputs.is_multiple_of(4);
        match self {
            Self::Fastest => {
                // Pairs fill nearly all lanes.
                let computed = columns.next_multiple_of(2 * lanes);
                in_blocks && inputs >= 32 && outputs >= 32 && 8 * columns >= 7 * computed
            }
            Self::Direct | Self::Matrices => false,
            Self::Winograd => in_blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_transformed_where_pairs_fill_lanes() {
        let of = |sizes| Method::Fastest.transforms_columns(sizes, 16);
        assert!(of([32, 32, 360]) && of([64, 64, 90]) && of([128, 128, 720]));
        assert!(!of([20, 32, 360]) && !of([32, 20, 360]) && !of([32, 34, 360]));
        assert!(!of([256, 256, 45]) && !of([64, 64, 33]));
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
