//! Number types of training.

use burn::tensor::{Device, FloatDType};
use halocline_core::Result;
use serde::{Deserialize, Serialize};

use super::device::device_name;
use super::errors::invalid;

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

    /// Requires a device that computes in this type.
    ///
    /// # Errors
    /// A device that does not.
    pub(super) fn check(self, device: &Device) -> Result<()> {
        self.check_on(&device_name(device), |dtype| device.supports_dtype(dtype))
    }

    fn check_on(self, device: &str, supports: impl Fn(FloatDType) -> bool) -> Result<()> {
        let is_supported = |precision: &Self| precision.half().is_none_or(&supports);
        if is_supported(&self) {
            return Ok(());
        }
        let name = |precision: Self| format!("{precision:?}").to_lowercase();
        let all = [Self::F32, Self::Bf16, Self::F16];
        let others: Vec<String> = all.into_iter().filter(is_supported).map(name).collect();
        Err(invalid(
            "training.precision",
            format!("{} on {device}, which does not compute in it", name(self)),
            format!(
                "{}, or another device, such as the CPU by BURN_DEVICE=flex",
                others.join(" or ")
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_that_the_device_lacks_is_refused() {
        let has_f16 = |dtype: FloatDType| dtype == FloatDType::F16;
        assert!(Precision::F16.check_on("a GPU", has_f16).is_ok());
        assert!(Precision::F32.check_on("a GPU", |_| false).is_ok());
        let error = Precision::Bf16.check_on("a GPU", has_f16).unwrap_err();
        let error = error.to_string();
        for part in [
            "training.precision: got bf16 on a GPU",
            "expected f32 or f16",
            "BURN_DEVICE",
        ] {
            assert!(error.contains(part), "{part} in {error}");
        }
        assert!(Precision::Bf16.check(&Device::flex()).is_ok());
    }
}
