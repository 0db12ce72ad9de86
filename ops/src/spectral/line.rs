//! One-dimensional transforms of lines of cells, described as data.

use std::f64::consts::PI;

/// Transform of a line of cells. Complex numbers are pairs of reals, and `θ = 2π/size`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Line {
    /// `y_k = s_k Σ_j x_j e^{−iθjk}` of real `x`, for `k < modes ≤ size/2 + 1`.
    ToModes {
        size: usize,
        modes: usize,
        scale: Scale,
    },
    /// `x_j = Re Σ_{k<modes} s_k y_k e^{iθjk}`.
    FromModes {
        size: usize,
        modes: usize,
        scale: Scale,
    },
    /// `y_k = s Σ_j x_j e^{∓iθjk}`, for the first `low` and the last `high` k.
    ToFrequencies(Frequencies),
    /// The same sum over only these `j`, for all k.
    FromFrequencies(Frequencies),
    /// `y_k = s_k Σ_j x_j cos(πk(2j + 1)/2size)`.
    ToCosines { size: usize, scale: Scale },
    /// `x_j = Σ_k s_k y_k cos(πk(2j + 1)/2size)`.
    FromCosines { size: usize, scale: Scale },
}

/// Scale factors of modes: `edge` for modes that are their own conjugate (`k = 0`, and `k = size/2`
/// of an even size), `interior` for all others. In cosine transforms `edge` applies to `k = 0`
/// only.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale {
    pub(crate) edge: f64,
    pub(crate) interior: f64,
}

/// Frequencies kept by a complex transform, and its sign and scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Frequencies {
    pub(crate) size: usize,
    pub(crate) low: usize,
    pub(crate) high: usize,
    pub(crate) sign: Sign,
    pub(crate) scale: f64,
}

/// Sign of the exponent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sign {
    Minus,
    Plus,
}

impl Sign {
    fn opposite(self) -> Self {
        match self {
            Self::Minus => Self::Plus,
            Self::Plus => Self::Minus,
        }
    }
}

impl Scale {
    pub(crate) fn uniform(value: f64) -> Self {
        Self {
            edge: value,
            interior: value,
        }
    }

    /// Doubles interior modes, which stand for their conjugates, too.
    pub(crate) fn with_conjugates(value: f64) -> Self {
        Self {
            edge: value,
            interior: 2.0 * value,
        }
    }
}

impl Frequencies {
    fn kept(self) -> usize {
        self.low + self.high
    }

    /// Returns whether all frequencies are kept, hence in their natural order.
    pub(crate) fn is_all(self) -> bool {
        self.kept() == self.size
    }

    fn conjugate(self) -> Self {
        Self {
            sign: self.sign.opposite(),
            ..self
        }
    }

    /// Index of a kept frequency among all frequencies.
    pub(crate) fn place(self, kept: usize) -> usize {
        if kept < self.low {
            kept
        } else {
            self.size - self.kept() + kept
        }
    }
}

impl Line {
    /// Returns the transpose of the transform, seen as a real matrix.
    pub(crate) fn adjoint(self) -> Self {
        match self {
            Self::ToModes { size, modes, scale } => Self::FromModes { size, modes, scale },
            Self::FromModes { size, modes, scale } => Self::ToModes { size, modes, scale },
            Self::ToFrequencies(kept) => Self::FromFrequencies(kept.conjugate()),
            Self::FromFrequencies(kept) => Self::ToFrequencies(kept.conjugate()),
            Self::ToCosines { size, scale } => Self::FromCosines { size, scale },
            Self::FromCosines { size, scale } => Self::ToCosines { size, scale },
        }
    }

    /// Returns the number of cells of a line, before and after.
    pub(crate) fn cells(self) -> [usize; 2] {
        match self {
            Self::ToModes { size, modes, .. } => [size, modes],
            Self::FromModes { size, modes, .. } => [modes, size],
            Self::ToFrequencies(kept) => [kept.size, kept.kept()],
            Self::FromFrequencies(kept) => [kept.kept(), kept.size],
            Self::ToCosines { size, .. } | Self::FromCosines { size, .. } => [size; 2],
        }
    }

    /// Returns how many real numbers a cell has, before and after: 2 if complex.
    pub(crate) fn parts(self) -> [usize; 2] {
        match self {
            Self::ToModes { .. } => [1, 2],
            Self::FromModes { .. } => [2, 1],
            Self::ToFrequencies(_) | Self::FromFrequencies(_) => [2, 2],
            Self::ToCosines { .. } | Self::FromCosines { .. } => [1, 1],
        }
    }

    /// Returns the matrix of the transform, by definition: rows are input numbers, columns output
    /// numbers.
    pub(crate) fn matrix(self) -> Vec<Vec<f64>> {
        let (cells, parts) = (self.cells(), self.parts());
        let [before, after] = [0, 1].map(|side| cells[side] * parts[side]);
        let entry = |row: usize, column: usize| {
            let (j, p) = (row / parts[0], row % parts[0]);
            let (k, q) = (column / parts[1], column % parts[1]);
            self.entry([j, p], [k, q])
        };
        let row = |row| (0..after).map(|column| entry(row, column)).collect();
        (0..before).map(row).collect()
    }

    fn entry(self, from @ [j, p]: [usize; 2], to @ [k, q]: [usize; 2]) -> f64 {
        match self {
            Self::ToModes { size, scale, .. } => {
                let (sin, cos) = angle(j, k, size).sin_cos();
                let edge = k == 0 || 2 * k == size;
                // The imaginary parts of modes at the edges are zero.
                let sin = if edge { 0.0 } else { sin };
                let scale = if edge { scale.edge } else { scale.interior };
                scale * [cos, -sin][q]
            }
            Self::ToFrequencies(kept) => {
                let (sin, cos) = angle(j, kept.place(k), kept.size).sin_cos();
                let sin = match kept.sign {
                    Sign::Minus => -sin,
                    Sign::Plus => sin,
                };
                // (a + ib)(cos + i sin)
                kept.scale * [[cos, sin], [-sin, cos]][p][q]
            }
            Self::ToCosines { size, scale } => {
                let scale = if k == 0 { scale.edge } else { scale.interior };
                scale * (PI * (k * (2 * j + 1) % (4 * size)) as f64 / (2 * size) as f64).cos()
            }
            transposed => transposed.adjoint().entry(to, from),
        }
    }
}

fn angle(j: usize, k: usize, size: usize) -> f64 {
    2.0 * PI * (j * k % size) as f64 / size as f64
}
