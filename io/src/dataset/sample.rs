//! Samples and their parts.

use ndarray::{Array3, ArrayViewMut3};
use rayon::prelude::*;

/// Input, forcings, and the targets to be predicted from them.
///
/// See [`FieldDataset`](crate::FieldDataset) for an example.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Input, [history · inputs, lat, lon], the earliest time first.
    pub input: Array3<f32>,
    /// Forcings at the start of each step, [steps · forcings, lat, lon].
    pub forcing: Array3<f32>,
    /// Targets, [steps · targets, lat, lon]. Missing values are NaN, even with
    /// [`Missing::Fill`](crate::Missing::Fill).
    pub target: Array3<f32>,
    /// Time of the present, the last time of the input, in seconds since 1970-01-01 UTC.
    pub time: f64,
    /// Time from the present to the first target, in hours.
    pub lead: f64,
}

/// Part of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Input,
    Forcing,
    Target,
}

impl Part {
    pub(crate) const ALL: [Self; 3] = [Self::Input, Self::Forcing, Self::Target];
}

/// Subtracts the mean of each channel and divides by its standard deviation.
pub(crate) fn normalize(mut values: ArrayViewMut3<'_, f32>, scale: &[(f64, f64)]) {
    let channels: Vec<_> = values.outer_iter_mut().zip(scale).collect();
    channels
        .into_par_iter()
        .for_each(|(mut field, (mean, std))| {
            // In f64, because geopotential differs from its mean only in the last digits of f32.
            field.mapv_inplace(|value| ((f64::from(value) - mean) / std) as f32);
        });
}
