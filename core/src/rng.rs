//! Random numbers by global index: Philox4x32-10.
//!
//! Salmon, Moraes, Dror, Shaw: *Parallel random numbers: as easy as 1, 2, 3*, SC 2011. A value is a
//! pure function of the seed, the stream and the element's index in the whole field, no matter
//! which rank computes it.

use std::hash::{Hash, Hasher};

use burn::tensor::Distribution::{self, Bernoulli, Normal, Uniform};
use siphasher::sip::SipHasher13;

use crate::mesh::{ravel, unravel};
use crate::{Error, IndexBox, Result, tasks};

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Computes four random words from a counter and a key.
///
/// # Example
/// ```
/// // The first of the published test vectors.
/// let words = halocline_core::support::philox4x32_10([0; 4], [0; 2]);
/// assert_eq!(words, [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
/// ```
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let product = |i: usize, word: u32| u64::from(MULTIPLIERS[i]) * u64::from(word);
        let (p0, p1) = (product(0, counter[0]), product(1, counter[2]));
        counter = [
            (p1 >> 32) as u32 ^ counter[1] ^ key[0],
            p1 as u32,
            (p0 >> 32) as u32 ^ counter[3] ^ key[1],
            p0 as u32,
        ];
    }
    counter
}

/// Checks the parameters of a distribution.
pub(crate) fn check(distribution: Distribution) -> Result<()> {
    let (fits, expected) = match distribution {
        Distribution::Default => (true, ""),
        Uniform(low, high) => (
            low <= high && low.is_finite() && high.is_finite(),
            "finite numbers, low not above high",
        ),
        Normal(mean, std) => (
            mean.is_finite() && std.is_finite() && std >= 0.0,
            "a finite mean, and a finite standard deviation from zero on",
        ),
        Bernoulli(probability) => (
            (0.0..=1.0).contains(&probability),
            "a probability from zero to one",
        ),
    };
    if fits {
        Ok(())
    } else {
        Err(Error::other(format!(
            "random: {distribution:?}; expected {expected}"
        )))
    }
}

/// Maps four random words to four values.
fn values(distribution: Distribution, words: [u32; 4]) -> [f32; 4] {
    // 24 bits, so that the value is exact in f32.
    let unit = |word: u32| f64::from(word >> 8) / f64::from(1 << 24);
    match distribution {
        Distribution::Default => values(Uniform(0.0, 1.0), words),
        Uniform(low, high) => words.map(|word| {
            let value = (low + (high - low) * unit(word)) as f32;
            // Rounding must not reach the upper end.
            value.min((high as f32).next_down()).max(low as f32)
        }),
        Bernoulli(probability) => {
            words.map(|word| if unit(word) < probability { 1.0 } else { 0.0 })
        }
        Normal(mean, std) => {
            let mut values = [0.0; 4];
            for pair in 0..2 {
                // Box-Muller; the radius takes a uniform value in (0, 1].
                let radius = (-2.0 * (1.0 - unit(words[2 * pair])).ln()).sqrt();
                let (sin, cos) = (std::f64::consts::TAU * unit(words[2 * pair + 1])).sin_cos();
                values[2 * pair] = (mean + std * radius * cos) as f32;
                values[2 * pair + 1] = (mean + std * radius * sin) as f32;
            }
            values
        }
    }
}

/// Key of a random field: a seed, and a stream within it.
///
/// # Example
/// ```
/// use halocline_core::{Distribution, IndexBox, RandomKey};
///
/// let key = RandomKey::new(7, ("dropout", 3));
/// let coin = Distribution::Bernoulli(0.5);
/// let field = key.fill(coin, &[4, 6], &IndexBox::whole(&[4, 6]));
/// let row = key.fill(coin, &[4, 6], &IndexBox::new(vec![2..3, 0..6]));
/// assert_eq!(row, field[12..18]);
/// assert_ne!(key.number(), RandomKey::new(7, ("dropout", 4)).number());
/// let mut order = key.permutation(5);
/// order.sort();
/// assert_eq!(order, [0, 1, 2, 3, 4]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RandomKey {
    seed: u64,
    stream: u64,
}

impl RandomKey {
    /// Returns the key of the stream `name` of a seed. A name is anything hashable: a parameter's
    /// path, an epoch, a step.
    pub fn new(seed: u64, name: impl Hash) -> Self {
        // A hasher whose result is the same in all versions of Rust.
        let mut hasher = SipHasher13::new();
        name.hash(&mut hasher);
        Self {
            seed,
            stream: hasher.finish(),
        }
    }

    /// Returns the key of a stream within this one.
    pub(crate) fn within(self, name: impl Hash) -> Self {
        Self::new(self.seed, (self.stream, name))
    }

    /// Returns a number specific to this stream, to seed another generator.
    pub fn number(self) -> u64 {
        self.double_word(0)
    }

    /// Returns the first two of the [`words`](Self::words) of a group as one number.
    fn double_word(self, block: u64) -> u64 {
        let [low, high, ..] = self.words(block).map(u64::from);
        low | high << 32
    }

    /// Returns the random words of the `block`-th group of four consecutive elements.
    fn words(self, block: u64) -> [u32; 4] {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let ([b0, b1], [s0, s1]) = (halves(block), halves(self.stream));
        philox4x32_10([b0, b1, s0, s1], halves(self.seed))
    }

    /// Returns the values of the four elements starting at `4 · block`, in row-major order, of a
    /// field of any shape.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Distribution, IndexBox, RandomKey};
    ///
    /// let key = RandomKey::new(7, "dropout");
    /// let coin = Distribution::Bernoulli(0.5);
    /// let field = key.fill(coin, &[4, 6], &IndexBox::whole(&[4, 6]));
    /// assert_eq!(key.four(coin, 2), field[8..12]);
    /// ```
    pub fn four(self, distribution: Distribution, block: u64) -> [f32; 4] {
        values(distribution, self.words(block))
    }

    /// Returns the values of a box of cells of a field of the given shape, in row-major order.
    ///
    /// # Panics
    /// Panics if the field has no dims.
    pub fn fill(self, distribution: Distribution, shape: &[usize], cells: &IndexBox) -> Vec<f32> {
        const TASK: usize = 1 << 12;
        let ranges = cells.ranges();
        assert!(!ranges.is_empty(), "a field without dims");
        // Trailing dims that the box covers completely are merged with the dim before them.
        let is_whole = |dim: &usize| ranges[*dim] == (0..shape[*dim]);
        let dim = (1..shape.len())
            .rev()
            .find(|dim| !is_whole(dim))
            .unwrap_or(0);
        let inner: usize = shape[dim + 1..].iter().product();
        let (last, outer) = (
            ranges[dim].start * inner..ranges[dim].end * inner,
            &ranges[..dim],
        );
        let sizes: Vec<usize> = outer.iter().map(|range| range.len()).collect();
        let mut values = vec![0.0; cells.volume()];
        tasks::for_each_part(&mut values, TASK, 1, |part, mut values| {
            let mut place = part * TASK;
            while !values.is_empty() {
                let (row, column) = (place / last.len(), place % last.len());
                let mut place_of_row = unravel(row, &sizes);
                for (cell, range) in place_of_row.iter_mut().zip(outer) {
                    *cell += range.start;
                }
                let start = ravel(&place_of_row, &shape[..dim]) * shape[dim] * inner;
                let (run, rest) = values.split_at_mut(values.len().min(last.len() - column));
                self.fill_run(distribution, start + last.start + column, run);
                place += run.len();
                values = rest;
            }
        });
        values
    }

    /// Fills `values` for consecutive elements, the first of which has the index `first`.
    fn fill_run(self, distribution: Distribution, first: usize, values: &mut [f32]) {
        let four = |index: usize| self.four(distribution, (index / 4) as u64);
        let begun = (first.next_multiple_of(4) - first).min(values.len());
        let (begin, blocks) = values.split_at_mut(begun);
        if begun > 0 {
            begin.copy_from_slice(&four(first)[first % 4..][..begun]);
        }
        for (block, values) in blocks.chunks_mut(4).enumerate() {
            values.copy_from_slice(&four(first + begun + 4 * block)[..values.len()]);
        }
    }

    /// Returns a random permutation of `0..count` (Fisher-Yates), the same on every rank.
    pub fn permutation(self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            let word = self.double_word(last as u64);
            // The high half of a 128-bit product: uniform up to a bias below 2⁻⁶⁴·count.
            let pick = (u128::from(word) * (last as u128 + 1)) >> 64;
            order.swap(last, pick as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn published_test_vectors() {
        // kat_vectors of the Random123 distribution, philox4x32 with 10 rounds.
        let ones = u32::MAX;
        assert_eq!(
            philox4x32_10([ones; 4], [ones; 2]),
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
        );
        assert_eq!(
            philox4x32_10(
                [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
                [0xa4093822, 0x299f31d0]
            ),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let shape = [100_000];
        let moments = |distribution| {
            let values =
                RandomKey::new(3, "x").fill(distribution, &shape, &IndexBox::whole(&shape));
            let count = values.len() as f64;
            let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
            let square = |v: &f32| (f64::from(*v) - mean).powi(2);
            (mean, values.iter().map(square).sum::<f64>() / count)
        };
        let close = |(mean, var): (f64, f64), m: f64, v: f64| {
            assert!(
                (mean - m).abs() < 0.02 && (var - v).abs() < 0.05 * v.max(0.1),
                "{mean} {var}"
            );
        };
        close(moments(Distribution::Uniform(-1.0, 1.0)), 0.0, 1.0 / 3.0);
        close(moments(Distribution::Normal(2.0, 1.5)), 2.0, 2.25);
        close(moments(Distribution::Bernoulli(0.3)), 0.3, 0.21);
    }

    #[test]
    fn parts_of_rows_have_the_values_of_their_blocks() {
        let (key, shape) = (RandomKey::new(3, "x"), [9, 70, 37]);
        let coin = Distribution::Bernoulli(0.5);
        let cells = IndexBox::new(vec![1..9, 3..70, 2..35]);
        let values = key.fill(coin, &shape, &cells);
        let expected = cells.ranges()[0].clone().flat_map(|plane| {
            cells.ranges()[1].clone().flat_map(move |row| {
                let first = (plane * 70 + row) * 37;
                (first + 2..first + 35)
                    .map(move |index| key.four(coin, index as u64 / 4)[index % 4])
            })
        });
        assert!(values.into_iter().eq(expected));
    }

    #[test]
    fn streams_and_seeds_differ() {
        let words = |seed, name: &str| RandomKey::new(seed, name).words(0);
        assert_ne!(words(1, "a"), words(1, "b"));
        assert_ne!(words(1, "a"), words(2, "a"));
    }

    #[test]
    fn a_permutation_has_every_index_once() {
        let mut order = RandomKey::new(1, "epoch").permutation(1000);
        assert_ne!(order[..5], [0, 1, 2, 3, 4]);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
    }

    proptest! {
        #[test]
        fn a_box_has_the_values_that_the_whole_field_has_there(
            shape in prop::collection::vec(1..7_usize, 1..4), cuts in prop::collection::vec((0..7_usize, 0..7_usize), 3),
        ) {
            let cells = IndexBox::new(shape.iter().zip(cuts).map(|(&size, (a, b))| {
                let (a, b) = (a.min(size), b.min(size));
                a.min(b)..a.max(b)
            }).collect());
            let key = RandomKey::new(11, "field");
            let normal = Distribution::Normal(0.0, 1.0);
            let whole = key.fill(normal, &shape, &IndexBox::whole(&shape));
            let part = key.fill(normal, &shape, &cells);
            let expected: Vec<f32> = (0..cells.volume()).map(|index| {
                let place: Vec<usize> = unravel(index, &cells.shape())
                    .iter().zip(cells.ranges()).map(|(o, r)| o + r.start).collect();
                whole[ravel(&place, &shape)]
            }).collect();
            prop_assert_eq!(part, expected);
        }
    }
}
