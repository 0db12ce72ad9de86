//! Normalization by mean and variance.
//!
//! Fields are `[batch, channels, cells]`. Channels are normalized in groups: one for LayerNorm of a
//! whole sample, as many as channels for InstanceNorm. Computation and use of the statistics are
//! separate, so that ranks can combine those of their shards in between:
//!
//! ```text
//! forward:  moments → (combine) → statistics → normalize
//! backward: sums → parameter gradients (add up), and → group sums → (add up) → input gradient
//! ```

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::moments::{BLOCK, Moments, Statistic};
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{CHUNK, Function, map, sums};
use crate::kernel::simd::{Element, Isa};

/// Sums over cells of the cotangent, and of its product with the normalized input.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sums {
    pub cotangent: f64,
    pub product: f64,
}

/// Extents of a field, and the number of groups of its channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extents {
    pub batch: usize,
    pub channels: usize,
    pub cells: usize,
    pub groups: usize,
}

impl Sums {
    /// Adds the sums of another part.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            cotangent: self.cotangent + other.cotangent,
            product: self.product + other.product,
        }
    }
}

impl Extents {
    /// Number of elements of a group of a sample; zero if there are no groups.
    pub(crate) fn group(&self) -> usize {
        self.channels / self.groups.max(1) * self.cells
    }

    /// Index of the (sample, group), and channel, of every (sample, channel).
    fn rows(&self) -> impl Iterator<Item = [usize; 2]> {
        let Self {
            batch,
            channels,
            groups,
            ..
        } = *self;
        let group = move |channel| channel / (channels / groups);
        (0..batch).flat_map(move |sample| {
            (0..channels).map(move |channel| [sample * groups + group(channel), channel])
        })
    }

    fn len(&self) -> usize {
        self.batch * self.channels * self.cells
    }
}

/// Computes the moments of every (sample, group).
pub(crate) fn moments<E: Element>(isa: Isa, x: &[E], extents: Extents) -> Vec<Moments> {
    assert_eq!(x.len(), extents.len());
    struct Task<'a, E>(&'a [E]);
    impl<E: Element> WithSimd for Task<'_, E> {
        type Output = Moments;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Moments {
            Moments::of(simd, self.0)
        }
    }
    let groups = extents.batch * extents.groups;
    reduced(
        groups,
        extents.group(),
        |range| isa.run(Task(&x[range])),
        Moments::combine,
    )
}

/// Computes the sums of every (sample, channel).
pub(crate) fn channel_sums<E: Element>(
    isa: Isa,
    x: &[E],
    cotangent: &[E],
    extents: Extents,
    statistics: &[Statistic],
) -> Vec<Sums> {
    assert_eq!([x.len(), cotangent.len()], [extents.len(); 2]);
    struct Task<'a, E> {
        x: &'a [E],
        cotangent: &'a [E],
        statistic: Statistic,
    }
    impl<E: Element> WithSimd for Task<'_, E> {
        type Output = Sums;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Sums {
            let Statistic { mean, scale } = self.statistic;
            let center = E::from_f64(mean);
            let [zero, middle] = [E::splat(simd, E::default()), E::splat(simd, center)];
            let mut total = Sums::default();
            for (x, cotangent) in self.x.chunks(BLOCK).zip(self.cotangent.chunks(BLOCK)) {
                let [sum, product] = sums(
                    simd,
                    [x, cotangent],
                    [middle, zero],
                    #[inline(always)]
                    |[sum, product], [x, cotangent]| {
                        let away = E::minus(simd, x, middle);
                        let product = E::mul_add(simd, cotangent, away, product);
                        [E::plus(simd, sum, cotangent), product]
                    },
                );
                let [cotangent, product] = [sum, product].map(E::to_f64);
                // The centre is the mean rounded to `E`; this corrects for the rounding.
                let product = scale * (product + cotangent * (center.to_f64() - mean));
                total = total.plus(Sums { cotangent, product });
            }
            total
        }
    }
    let groups: Vec<usize> = extents.rows().map(|[group, _]| group).collect();
    let run = |range: std::ops::Range<usize>| {
        let statistic = statistics[groups[range.start / extents.cells]];
        isa.run(Task {
            x: &x[range.clone()],
            cotangent: &cotangent[range],
            statistic,
        })
    };
    reduced(groups.len(), extents.cells, run, Sums::plus)
}

/// Combines, in order, the results of `run` for the chunks of each of `rows` rows. Chunks follow
/// from `len` alone, so the bits do not depend on the number of threads.
fn reduced<T: Copy + Default + Send>(
    rows: usize,
    len: usize,
    run: impl Fn(std::ops::Range<usize>) -> T + Sync,
    combine: impl Fn(T, T) -> T,
) -> Vec<T> {
    if len == 0 {
        return vec![T::default(); rows];
    }
    let pieces = len.div_ceil(CHUNK);
    let piece = |task: usize| {
        let (row, start) = (task / pieces, task % pieces * CHUNK);
        run(row * len + start..row * len + (start + CHUNK).min(len))
    };
    let together = (CHUNK / len).max(1);
    let parts = tasks::map(rows * pieces, together, piece);
    let whole = parts.chunks(pieces);
    whole
        .map(|parts| {
            parts[1..]
                .iter()
                .fold(parts[0], |sum, part| combine(sum, *part))
        })
        .collect()
}

/// `slope · (x - center) + offset`. The distance from a centre keeps digits that a product with `x`
/// would lose if the mean is large.
#[derive(Clone, Copy, Debug)]
struct Line<E> {
    center: E,
    slope: E,
    offset: E,
}

/// Computes `(x - mean) · scale · weight + bias`, with the statistic of the (sample, group), and
/// weight and bias of the channel.
pub(crate) fn normalize<E: Element>(
    isa: Isa,
    x: &[E],
    extents: Extents,
    statistics: &[Statistic],
    weight: &[E],
    bias: &[E],
) -> Buffer<E> {
    assert_eq!(x.len(), extents.len());
    let line = |[group, channel]: [usize; 2]| {
        let Statistic { mean, scale } = statistics[group];
        let (center, slope) = (E::from_f64(mean), scale * weight[channel].to_f64());
        Line {
            center,
            slope: E::from_f64(slope),
            // Corrects for the rounding of the centre to `E`.
            offset: E::from_f64(bias[channel].to_f64() + (center.to_f64() - mean) * slope),
        }
    };
    let lines: Vec<Line<E>> = extents.rows().map(line).collect();
    map(isa, [x], lines.len(), &Normalize(&lines))
}

struct Normalize<'a, E>(&'a [Line<E>]);

impl<E: Element> Function<E, 1> for Normalize<'_, E> {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, row: usize, [x]: [E::Vector<S>; 1]) -> E::Vector<S> {
        let Line {
            center,
            slope,
            offset,
        } = self.0[row];
        let away = E::minus(simd, x, E::splat(simd, center));
        E::mul_add(simd, away, E::splat(simd, slope), E::splat(simd, offset))
    }
}

/// Computes the gradients of weight and bias from the sums of every (sample, channel).
pub(crate) fn parameter_gradients<E: Element>(extents: Extents, sums: &[Sums]) -> [Vec<E>; 2] {
    let mut totals = vec![Sums::default(); extents.channels];
    for ([_, channel], sums) in extents.rows().zip(sums) {
        totals[channel] = totals[channel].plus(*sums);
    }
    let weight = totals.iter().map(|sums| E::from_f64(sums.product));
    let bias = totals.iter().map(|sums| E::from_f64(sums.cotangent));
    [weight.collect(), bias.collect()]
}

/// Sums the cotangent of the normalized input, before weight and bias, over every (sample, group).
pub(crate) fn group_sums<E: Element>(extents: Extents, sums: &[Sums], weight: &[E]) -> Vec<Sums> {
    let mut totals = vec![Sums::default(); extents.batch * extents.groups];
    for ([group, channel], Sums { cotangent, product }) in extents.rows().zip(sums) {
        let weight = weight[channel].to_f64();
        totals[group] = totals[group].plus(Sums {
            cotangent: weight * cotangent,
            product: weight * product,
        });
    }
    totals
}

/// Computes the gradient of the input: `scale · (weight · cotangent - mean(g) - x̂ · mean(g ·
/// x̂))`, for the normalized input `x̂` and `g = weight · cotangent`, from the sums over every
/// (sample, group) of `count` elements.
#[allow(clippy::too_many_arguments, reason = "the operands of one formula")]
pub(crate) fn input_gradient<E: Element>(
    isa: Isa,
    x: &[E],
    cotangent: &[E],
    extents: Extents,
    statistics: &[Statistic],
    weight: &[E],
    sums: &[Sums],
    count: f64,
) -> Buffer<E> {
    assert_eq!([x.len(), cotangent.len()], [extents.len(); 2]);
    let plane = |[group, channel]: [usize; 2]| {
        let Statistic { mean, scale } = statistics[group];
        let center = E::from_f64(mean);
        let slope = -scale * scale * sums[group].product / count;
        let offset = (center.to_f64() - mean) * slope - scale * sums[group].cotangent / count;
        let line = Line {
            center,
            slope: E::from_f64(slope),
            offset: E::from_f64(offset),
        };
        (line, E::from_f64(scale * weight[channel].to_f64()))
    };
    let planes: Vec<(Line<E>, E)> = extents.rows().map(plane).collect();
    map(isa, [x, cotangent], planes.len(), &InputGradient(&planes))
}

struct InputGradient<'a, E>(&'a [(Line<E>, E)]);

impl<E: Element> Function<E, 2> for InputGradient<'_, E> {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, row: usize, [x, cotangent]: [E::Vector<S>; 2]) -> E::Vector<S> {
        let (line, weight) = self.0[row];
        let direct = E::mul_add(
            simd,
            cotangent,
            E::splat(simd, weight),
            E::splat(simd, line.offset),
        );
        let away = E::minus(simd, x, E::splat(simd, line.center));
        E::mul_add(simd, away, E::splat(simd, line.slope), direct)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::testing::{assert_close, dot, random, rounded, same_for_all_pools};

    const CASES: [Extents; 6] = [
        extents([2, 6, 35], 3),
        extents([1, 4, 20_001], 2),
        extents([3, 5, 1], 1),
        extents([1, 3, 4_097], 3),
        extents([0, 2, 7], 2),
        extents([2, 2, 0], 1),
    ];
    const EPSILON: f64 = 1e-5;

    const fn extents([batch, channels, cells]: [usize; 3], groups: usize) -> Extents {
        Extents {
            batch,
            channels,
            cells,
            groups,
        }
    }

    /// Normalization by its definition, in double precision.
    fn naive(x: &[f64], extents: Extents, weight: &[f64], bias: &[f64]) -> Vec<f64> {
        let mut y = Vec::new();
        for (index, group) in x.chunks(extents.group().max(1)).enumerate() {
            let count = group.len() as f64;
            let mean = group.iter().sum::<f64>() / count;
            let variance = group.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
            let first = index % extents.groups * (extents.channels / extents.groups);
            y.extend(group.iter().enumerate().map(|(cell, x)| {
                let channel = first + cell / extents.cells;
                (x - mean) / (variance + EPSILON).sqrt() * weight[channel] + bias[channel]
            }));
        }
        y
    }

    fn forward<E: Element>(
        isa: Isa,
        x: &[E],
        extents: Extents,
        weight: &[E],
        bias: &[E],
    ) -> Vec<E> {
        let moments = moments(isa, x, extents);
        let statistics: Vec<Statistic> = moments.iter().map(|m| m.statistic(EPSILON)).collect();
        normalize(isa, x, extents, &statistics, weight, bias).to_vec()
    }

    fn backward<E: Element>(
        isa: Isa,
        x: &[E],
        cotangent: &[E],
        extents: Extents,
        weight: &[E],
    ) -> [Vec<E>; 3] {
        let moments = moments(isa, x, extents);
        let statistics: Vec<Statistic> = moments.iter().map(|m| m.statistic(EPSILON)).collect();
        let sums = channel_sums(isa, x, cotangent, extents, &statistics);
        let [weights, biases] = parameter_gradients(extents, &sums);
        let sums = group_sums(extents, &sums, weight);
        let count = extents.group() as f64;
        let input = input_gradient(
            isa,
            x,
            cotangent,
            extents,
            &statistics,
            weight,
            &sums,
            count,
        );
        [input.to_vec(), weights, biases]
    }

    fn check_forward<E: Element>(offset: f64, tolerance: f64) {
        for extents in CASES {
            let x: Vec<E> = rounded(
                &random(extents.len(), 1)
                    .iter()
                    .map(|x| x + offset)
                    .collect::<Vec<_>>(),
            );
            let [weight, bias] = [2, 3].map(|seed| random(extents.channels, seed));
            let exact: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
            let expected = naive(&exact, extents, &weight, &bias);
            let [weight, bias] = [weight, bias].map(|values| rounded::<E>(&values));
            for isa in Isa::available() {
                let y = same_for_all_pools(|| forward(isa, &x, extents, &weight, &bias));
                assert_close(&y, &expected, tolerance);
            }
        }
    }

    #[test]
    fn fields_are_normalised_also_far_from_zero() {
        for offset in [0.0, -100.0, 1e4] {
            check_forward::<f64>(offset, 1e-8);
            check_forward::<f32>(offset, 2e-6);
        }
    }

    #[test]
    fn gradients_are_limits_of_differences() {
        for extents in CASES {
            let [x, cotangent, other] = [1, 2, 3].map(|seed| random(extents.len(), seed));
            let [weight, bias, change] = [4, 5, 6].map(|seed| random(extents.channels, seed));
            for isa in Isa::available() {
                let loss = |x: &[f64], weight: &[f64], bias: &[f64]| {
                    dot(&forward(isa, x, extents, weight, bias), &cotangent)
                };
                let slope = |f: &dyn Fn(f64) -> f64| (f(1e-5) - f(-1e-5)) / 2e-5;
                let moved = |x: &[f64], by: &[f64], step: f64| -> Vec<f64> {
                    x.iter().zip(by).map(|(x, by)| x + step * by).collect()
                };
                let [input, weights, biases] =
                    same_for_all_pools(|| backward(isa, &x, &cotangent, extents, &weight));
                let expected = [
                    slope(&|step| loss(&moved(&x, &other, step), &weight, &bias)),
                    slope(&|step| loss(&x, &moved(&weight, &change, step), &bias)),
                    slope(&|step| loss(&x, &weight, &moved(&bias, &change, step))),
                ];
                let found = [
                    dot(&input, &other),
                    dot(&weights, &change),
                    dot(&biases, &change),
                ];
                for (found, expected) in found.iter().zip(expected) {
                    // With one cell per group the gradient of the input nearly cancels.
                    assert!(
                        (found - expected).abs() < 1e-5,
                        "{extents:?}: {found}, {expected}"
                    );
                }
                let single = |x: &[f64]| rounded::<f32>(x);
                let found = backward(
                    isa,
                    &single(&x),
                    &single(&cotangent),
                    extents,
                    &single(&weight),
                );
                if extents.group() > 10 {
                    assert_close(&found[0], &input, 2e-6);
                    assert_close(&found[1], &weights, 1e-3);
                }
            }
        }
    }
}
