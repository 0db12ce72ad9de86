//! Bounds on the decoded size that compressed chunks claim, checked before memory is allocated for
//! them.

use zstd::bulk::Decompressor;

/// Bytes that compressed data may claim in excess of the chunk.
const SLACK: u64 = 1 << 18;
/// Bytes of a CRC-32C checksum after compressed data.
const CHECKSUM: usize = 4;

/// Returns the largest acceptable claim in a file or store whose largest chunk has `largest` bytes.
pub(crate) fn limit(largest: u64) -> u64 {
    largest.saturating_mul(2).saturating_add(SLACK)
}

/// Returns an upper bound on the decoded size of Zstandard data, which a checksum may follow, or
/// `None` if the data is damaged.
pub(crate) fn zstandard_bound(bytes: &[u8]) -> Option<u64> {
    let before_checksum = || {
        let end = bytes.len().checked_sub(CHECKSUM)?;
        Decompressor::upper_bound(&bytes[..end])
    };
    let bound = Decompressor::upper_bound(bytes).or_else(before_checksum);
    bound.map(|bound| bound as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zstandard_data_is_bounded_with_a_checksum_and_without() {
        let mut data = zstd::bulk::compress(&[7; 5000], 3).unwrap();
        assert_eq!(zstandard_bound(&data), Some(5000));
        data.extend([1, 2, 3, 4]);
        assert_eq!(zstandard_bound(&data), Some(5000));
        data.push(5);
        assert_eq!(zstandard_bound(&data), None);
    }
}
