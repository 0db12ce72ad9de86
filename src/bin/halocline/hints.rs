//! Hints on stderr.

/// Prints a hint for a device that stands in for a GPU.
pub(crate) fn hint_at_device(device: &str) {
    if is_software(device) {
        eprintln!("halocline: this device is software; BURN_DEVICE=flex is several times faster");
    }
}

/// Returns whether the device of this name computes on the processor, through the interface of a
/// GPU.
fn is_software(device: &str) -> bool {
    let device = device.to_lowercase();
    let names = ["llvmpipe", "lavapipe", "swiftshader", "basic render"];
    names.iter().any(|name| device.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_software_are_known_by_their_names() {
        assert!(is_software("llvmpipe (LLVM 19.1.7, 256 bits)"));
        assert!(is_software("Microsoft Basic Render Driver"));
        assert!(!is_software("NVIDIA H200") && !is_software("Flex"));
    }
}
