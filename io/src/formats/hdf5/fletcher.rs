//! Vectorised Fletcher-32 checksum of HDF5, which a file has for every chunk.

/// Words between two reductions modulo 65535.
const BATCH: usize = 360;
/// Words that are added in parallel.
const LANES: usize = 8;

/// Splits off the checksum and returns the data before it, or `None` if the checksum does not
/// match.
pub(crate) fn checked(stored: &[u8]) -> Option<&[u8]> {
    let (data, sum) = stored.split_last_chunk()?;
    (checksum(data) == u32::from_le_bytes(*sum)).then_some(data)
}

/// Computes the checksum of data, which consists of big-endian words. Modulo 65535, swapping the
/// bytes of a word multiplies it by 256, and the same holds for sums of words. Therefore words are
/// added in little-endian order, and only the bytes of the sums are swapped.
fn checksum(data: &[u8]) -> u32 {
    let [mut sum, mut sums] = [0_u32; 2];
    let fold = |sum: u32| (sum & 0xffff) + (sum >> 16);
    for batch in data.chunks(2 * BATCH) {
        let (parts, rest) = batch.as_chunks::<{ 2 * LANES }>();
        // Sum of each lane, and sum of its partial sums.
        let [mut lanes, mut of_lanes] = [[0_u32; LANES]; 2];
        for part in parts {
            let (words, _) = part.as_chunks::<2>();
            for ((word, lane), of_lane) in words.iter().zip(&mut lanes).zip(&mut of_lanes) {
                *lane += u32::from(u16::from_le_bytes(*word));
                *of_lane += *lane;
            }
        }
        let count = (LANES * parts.len()) as u32;
        let ahead: u32 = (0..).zip(lanes).map(|(lane, sum)| lane * sum).sum();
        let all: u32 = of_lanes.iter().fold(0, |all, sum| all.wrapping_add(*sum));
        sums = sums
            .wrapping_add(count * sum)
            .wrapping_add((LANES as u32).wrapping_mul(all))
            .wrapping_sub(ahead);
        sum += lanes.iter().sum::<u32>();
        for word in rest.chunks(2) {
            // An odd last byte is the first byte of a word.
            let second = word.get(1).copied().unwrap_or(0);
            sum += u32::from(u16::from_le_bytes([word[0], second]));
            sums = sums.wrapping_add(sum);
        }
        (sum, sums) = (fold(sum), fold(sums));
    }
    let [sum, sums] = [sum, sums].map(|sum| u32::from((fold(sum) as u16).swap_bytes()));
    (sums << 16) | sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Definition in the HDF5 manual, word by word.
    fn by_words(data: &[u8]) -> u32 {
        let [mut sum, mut sums] = [0_u64; 2];
        for word in data.chunks(2) {
            sum += u64::from(word[0]) << 8 | u64::from(*word.get(1).unwrap_or(&0));
            sum %= 65535;
            sums = (sums + sum) % 65535;
        }
        (sums << 16 | sum) as u32
    }

    #[test]
    fn vectors_and_words_agree() {
        let bytes = |count: usize| (0..count).map(|byte| (byte * byte * 7 + byte / 3) as u8);
        for count in [0, 1, 2, 3, 15, 16, 17, 719, 720, 721, 1439, 5000, 70_001] {
            let data: Vec<u8> = bytes(count).collect();
            // 65535 represents zero too.
            let reduced =
                |checksum: u32| [checksum >> 16, checksum & 0xffff].map(|half| half % 65535);
            assert_eq!(
                reduced(checksum(&data)),
                reduced(by_words(&data)),
                "{count}"
            );
        }
        assert_eq!(checksum(&[0x01, 0x02, 0x03]), 0x0504_0402);
        assert_eq!(checksum(&[0xff; 1440]), 0xffff_ffff);
    }

    #[test]
    fn a_wrong_checksum_is_refused() {
        let mut stored = vec![1, 2, 3, 4];
        stored.extend(checksum(&stored).to_le_bytes());
        assert_eq!(checked(&stored), Some(&[1, 2, 3, 4][..]));
        stored[1] = 9;
        assert_eq!(checked(&stored), None);
        assert_eq!(checked(&[1, 2, 3]), None);
    }
}
