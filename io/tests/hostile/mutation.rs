//! Mutations of a valid file.

use halocline_core::RandomKey;

/// Byte sequences that readers are prone to mishandle.
const WORDS: [&[u8]; 16] = [
    b"18446744073709551615",
    b"9223372036854775808",
    b"-1",
    b"0",
    b"1e999",
    b"null",
    b"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    b"{\"a\":{\"a\":{\"a\":{\"a\":",
    b"\"",
    b"../../etc/passwd",
    b"\\u0000",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x00\x00\x00\x00\x00\x00\x00\x80",
    b"\x01\x00\x00\x00\x00\x00\x00\x00",
    b"F64",
    b"999999999",
];

/// Mutations of a file, numbered.
pub(crate) struct Mutations<'a> {
    original: &'a [u8],
    seed: u64,
}

impl<'a> Mutations<'a> {
    pub(crate) fn of(original: &'a [u8]) -> Self {
        Self { original, seed: 0 }
    }
}

impl Iterator for Mutations<'_> {
    type Item = (u64, Vec<u8>);

    fn next(&mut self) -> Option<Self::Item> {
        let seed = self.seed;
        self.seed += 1;
        let mut draws = 0;
        let mut below = |limit: usize| {
            draws += 1;
            (RandomKey::new(seed, draws).number() % limit.max(1) as u64) as usize
        };
        let mut bytes = self.original.to_vec();
        for _ in 0..1 + below(4) {
            let at = below(bytes.len());
            let end = (at + 1 + below(64)).min(bytes.len());
            match below(7) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << below(8),
                1 if !bytes.is_empty() => bytes[at] = below(256) as u8,
                2 => bytes.truncate(at),
                3 => drop(bytes.drain(at..end)),
                4 => {
                    let copy = bytes[at..end].to_vec();
                    let to = below(bytes.len());
                    bytes.splice(to..to, copy);
                }
                word => {
                    // Overwrites a number, if there is one: a shape, a size or an offset.
                    let word_bytes = WORDS[below(WORDS.len())];
                    let digits = |byte: &u8| byte.is_ascii_digit();
                    let first = bytes[at..]
                        .iter()
                        .position(digits)
                        .map_or(at, |first| at + first);
                    let last = bytes[first..].iter().position(|byte| !digits(byte));
                    let last = first + last.unwrap_or(0);
                    let range = if word == 5 { first..last } else { at..at };
                    bytes.splice(range, word_bytes.iter().copied());
                }
            }
        }
        Some((seed, bytes))
    }
}
