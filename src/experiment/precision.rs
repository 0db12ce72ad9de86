//! Number types of training.

use burn::tensor::FloatDType;
use serde::{Deserialize, Serialize};

/// Number type in which a model computes in training.
///
/// See [`TrainingConfig`](super::TrainingConfig).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Single precision.
    F32,
    /// Half precision with the range of f32.
    Bf16,
    /// Half precision with more digits and a smaller range than bf16; losses are
    /// [scaled](crate::LossScale).
    F16,
}

impl Precision {
    /// Returns the half-precision type, or `None` for f32.
    pub(super) fn half(self) -> Option<FloatDType> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(FloatDType::BF16),
            Self::F16 => Some(FloatDType::F16),
        }
    }
}
