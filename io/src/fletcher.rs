//! Fletcher's checksum of HDF5, in vectors: a file has one for every chunk.

/// Words between two reductions.
const BATCH: usize = 360;
/// Words that are added at a time.
const LANES: usize = 8;

/// The data before their checksum; none if it is another one.
pub(crate) fn checked(stored: &[u8]) -> Option<&[u8]> {
    let (data, sum) = stored.split_last_chunk()?;
    (checksum(data) == u32::from_le_bytes(*sum)).then_some(data)
}

/// The checksum of bytes, which are words in big-endian order. Modulo 65535 a word with its bytes swapped is 256 times the
/// word, and so are sums of such words: the words are added as they are, and the bytes of the sums swapped.
fn checksum(data: &[u8]) -> u32 {
    let [mut sum, mut sums] = [0_u32; 2];
    let fold = |sum: u32| (sum & 0xffff) + (sum >> 16);
    for batch in data.chunks(2 * BATCH) {
        let (parts, rest) = batch.as_chunks::<{ 2 * LANES }>();
        // The sums of every lane, and the sums of those so far.
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
            // A last byte without a second one is the first of a word.
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

    /// As HDF5's manual has it: a word after the other.
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
            // 65535 stands for zero, too.
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
