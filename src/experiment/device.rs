//! Names of devices.

use burn::tensor::Device;

/// Returns the name of a device for messages: that of the GPU, or burn's name.
///
/// # Example
/// ```
/// use burn::tensor::Device;
/// use halocline::experiment::device_name;
///
/// assert!(device_name(&Device::flex()).starts_with("Flex"));
/// ```
pub fn device_name(device: &Device) -> String {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    if let Some(identity) = device.identity() {
        return identity.name;
    }
    format!("{:?}", device.clone().inner().as_dispatch())
}
