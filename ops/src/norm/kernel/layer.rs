//! LayerNorm and RMSNorm over the last dim of `[rows, features]`, row by row in the L1 cache.

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::moments::{BLOCK, Moments, Statistic};
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{CHUNK, apply, filled_bands, load, store, sums};
use crate::kernel::memory::Shared;
use crate::kernel::simd::{Element, Isa};

/// Number of parts of the rows, each with its own sums for the gradients of weight and bias. Fixed,
/// so that the bits do not depend on the number of threads.
const PARTS: usize = 64;

/// Normalization of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowNorm {
    /// `(x - mean) / √(variance + epsilon)`.
    Layer { epsilon: f64 },
    /// `x / √(mean of squares + epsilon)`.
    Rms { epsilon: f64 },
}

impl RowNorm {
    fn statistic(self, row: Moments) -> Statistic {
        match self {
            Self::Layer { epsilon } => row.statistic(epsilon),
            Self::Rms { epsilon } => {
                let squares = row.squares / row.count + row.mean * row.mean;
                Statistic {
                    mean: 0.0,
                    scale: 1.0 / (squares + epsilon).sqrt(),
                }
            }
        }
    }

    /// Factor of the mean of the row's weighted cotangents in the gradient of an element.
    fn centred(self) -> f64 {
        match self {
            Self::Layer { .. } => 1.0,
            Self::Rms { .. } => 0.0,
        }
    }
}

/// Computes the normalized rows times `weight`, plus `bias`.
pub(crate) fn forward<E: Element>(
    isa: Isa,
    norm: RowNorm,
    x: &[E],
    weight: &[E],
    bias: &[E],
) -> Buffer<E> {
    let features = weight.len();
    assert_eq!(bias.len(), features);
    let rows = x.len() / features.max(1);
    let band = (CHUNK / features.max(1)).clamp(1, rows.max(1));
    let run = |[_, index]: [usize; 2], output: &mut [E]| {
        let x = &x[index * band * features..][..output.len()];
        isa.run(Forward {
            norm,
            x,
            weight,
            bias,
            output,
        });
    };
    // SAFETY: the task writes a result for every element of its rows.
    unsafe { filled_bands([1, rows, features], band, run) }
}

struct Forward<'a, E> {
    norm: RowNorm,
    x: &'a [E],
    weight: &'a [E],
    bias: &'a [E],
    output: &'a mut [E],
}

impl<E: Element> WithSimd for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            norm,
            x,
            weight,
            bias,
            output,
        } = self;
        let features = weight.len();
        for (x, output) in x.chunks(features).zip(output.chunks_mut(features)) {
            let normal = Normal::<E>::new(norm.statistic(Moments::of(simd, x)));
            apply(
                simd,
                [x, weight, bias],
                output,
                #[inline(always)]
                |[x, weight, bias]| E::mul_add(simd, normal.at(simd, x), weight, bias),
            );
        }
    }
}

/// Normalization of a row: `scale · (x - center) + offset`.
#[derive(Clone, Copy)]
struct Normal<E> {
    center: E,
    scale: E,
    offset: E,
}

impl<E: Element> Normal<E> {
    fn new(Statistic { mean, scale }: Statistic) -> Self {
        let center = E::from_f64(mean);
        Self {
            center,
            scale: E::from_f64(scale),
            // Corrects for the rounding of the centre to `E`.
            offset: E::from_f64((center.to_f64() - mean) * scale),
        }
    }

    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, x: E::Vector<S>) -> E::Vector<S> {
        let away = E::minus(simd, x, E::splat(simd, self.center));
        E::mul_add(
            simd,
            away,
            E::splat(simd, self.scale),
            E::splat(simd, self.offset),
        )
    }
}

/// Gradients of [`forward`].
#[derive(Debug)]
pub(crate) struct Gradient<E> {
    pub input: Buffer<E>,
    pub weight: Vec<E>,
    pub bias: Vec<E>,
}

/// Computes the gradients of input, weight and bias. Statistics are recomputed, because the input
/// is read anyway.
pub(crate) fn backward<E: Element>(
    isa: Isa,
    norm: RowNorm,
    x: &[E],
    cotangent: &[E],
    weight: &[E],
) -> Gradient<E> {
    let features = weight.len();
    let rows = x.len() / features.max(1);
    assert_eq!([x.len(), cotangent.len()], [rows * features; 2]);
    let part = rows.div_ceil(PARTS).max(1);
    let mut sums = vec![E::default(); rows.div_ceil(part) * 2 * features];
    let fill = |input: Shared<E>| {
        let run = |index: usize, sums: &mut [E]| {
            let range = index * part * features..((index + 1) * part).min(rows) * features;
            // SAFETY: the parts are disjoint.
            let input = unsafe { input.slice(range.clone()) };
            let (x, cotangent) = (&x[range.clone()], &cotangent[range]);
            isa.run(Backward {
                norm,
                x,
                cotangent,
                weight,
                input,
                sums,
            });
        };
        let together = (CHUNK / (part * features).max(1)).max(1);
        tasks::for_each_part(&mut sums, 2 * features, together, run);
    };
    // SAFETY: the parts cover all rows, and each task writes a result for every element of its
    // part.
    let input = unsafe { Buffer::filled(x.len(), fill) };
    let total = |feature: usize| {
        let parts = sums.chunks(2 * features).map(|part| part[feature].to_f64());
        E::from_f64(parts.sum())
    };
    Gradient {
        input,
        weight: (0..features).map(total).collect(),
        bias: (features..2 * features).map(total).collect(),
    }
}

struct Backward<'a, E> {
    norm: RowNorm,
    x: &'a [E],
    cotangent: &'a [E],
    weight: &'a [E],
    input: &'a mut [E],
    /// Sums for the gradients of weight and bias.
    sums: &'a mut [E],
}

impl<E: Element> WithSimd for Backward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            norm,
            x,
            cotangent,
            weight,
            input,
            sums,
        } = self;
        let features = weight.len();
        let (weights, biases) = sums.split_at_mut(features);
        let rows = x.chunks(features).zip(cotangent.chunks(features));
        for ((x, cotangent), input) in rows.zip(input.chunks_mut(features)) {
            let statistic = norm.statistic(Moments::of(simd, x));
            let normal = Normal::<E>::new(statistic);
            let [mean, product] = means(simd, [x, cotangent, weight], normal);
            let slope = |mean: f64| E::splat(simd, E::from_f64(-statistic.scale * mean));
            let (constant, slope) = (slope(norm.centred() * mean), slope(product));
            let scale = E::splat(simd, normal.scale);
            let lanes = E::lanes::<S>();
            for start in (0..features).step_by(lanes) {
                let part = start..features.min(start + lanes);
                let [x, cotangent, weight] = [
                    load(simd, &x[part.clone()]),
                    load(simd, &cotangent[part.clone()]),
                    load(simd, &weight[part.clone()]),
                ];
                let normal = normal.at(simd, x);
                let weighted = E::times(simd, cotangent, weight);
                let offset = E::mul_add(simd, normal, slope, constant);
                store(
                    simd,
                    &mut input[part.clone()],
                    E::mul_add(simd, weighted, scale, offset),
                );
                let sum = &mut weights[part.clone()];
                store(
                    simd,
                    sum,
                    E::mul_add(simd, cotangent, normal, load(simd, sum)),
                );
                let sum = &mut biases[part];
                store(simd, sum, E::plus(simd, cotangent, load(simd, sum)));
            }
        }
    }
}

/// Means over a row of `weight · cotangent`, and of its product with the normalized input.
#[inline(always)]
fn means<S: Simd, E: Element>(simd: S, row: [&[E]; 3], normal: Normal<E>) -> [f64; 2] {
    let zero = E::splat(simd, E::default());
    let mut totals = [0.0; 2];
    for start in (0..row[0].len()).step_by(BLOCK) {
        let end = row[0].len().min(start + BLOCK);
        let parts = sums(
            simd,
            [
                &row[0][start..end],
                &row[1][start..end],
                &row[2][start..end],
            ],
            [zero; 3],
            #[inline(always)]
            |[sum, product], [x, cotangent, weight]| {
                let weighted = E::times(simd, cotangent, weight);
                let product = E::mul_add(simd, weighted, normal.at(simd, x), product);
                [E::plus(simd, sum, weighted), product]
            },
        );
        for (total, part) in totals.iter_mut().zip(parts) {
            *total += part.to_f64();
        }
    }
    totals.map(|total| total / row[0].len() as f64)
}

#[cfg(test)]
mod tests {
    use super::super::group::{self as norm, Extents};
    use super::*;
    use crate::kernel::testing::{assert_close, random, rounded, same_for_all_pools};

    const EPSILON: f64 = 1e-5;
    const LAYER: RowNorm = RowNorm::Layer { epsilon: EPSILON };
    const CASES: [[usize; 2]; 7] = [
        [37, 5],
        [1_500, 96],
        [3, 4_099],
        [1, 1],
        [130, 33],
        [0, 4],
        [4, 0],
    ];

    /// Rows as samples of one group, features as channels of one cell.
    fn extents([batch, channels]: [usize; 2]) -> Extents {
        Extents {
            batch,
            channels,
            cells: 1,
            groups: 1,
        }
    }

    fn statistics(isa: Isa, x: &[f64], extents: Extents) -> Vec<Statistic> {
        let moments = norm::moments(isa, x, extents);
        moments
            .iter()
            .map(|moments| moments.statistic(EPSILON))
            .collect()
    }

    #[test]
    fn it_is_group_norm_with_one_group() {
        for case in CASES {
            let (extents, len) = (extents(case), case[0] * case[1]);
            let [x, cotangent] = [1, 2].map(|seed| random(len, seed));
            let [weight, bias] = [3, 4].map(|seed| random(case[1], seed));
            let single = |x: &[f64]| rounded::<f32>(x);
            for isa in Isa::available() {
                let statistics = statistics(isa, &x, extents);
                let expected = norm::normalize(isa, &x, extents, &statistics, &weight, &bias);
                let y = same_for_all_pools(|| forward(isa, LAYER, &x, &weight, &bias).to_vec());
                assert_close(&y, &expected, 1e-12);
                let y = forward(isa, LAYER, &single(&x), &single(&weight), &single(&bias));
                assert_close(&y, &expected, 3e-6);

                let sums = norm::channel_sums(isa, &x, &cotangent, extents, &statistics);
                let [weights, biases] = norm::parameter_gradients(extents, &sums);
                let sums = norm::group_sums(extents, &sums, &weight);
                let expected = norm::input_gradient(
                    isa,
                    &x,
                    &cotangent,
                    extents,
                    &statistics,
                    &weight,
                    &sums,
                    case[1] as f64,
                );
                let [input, weights_found, biases_found] = same_for_all_pools(|| {
                    let Gradient {
                        input,
                        weight,
                        bias,
                    } = backward(isa, LAYER, &x, &cotangent, &weight);
                    [input.to_vec(), weight, bias]
                });
                assert_close(&input, &expected, 1e-10);
                assert_close(&weights_found, &weights, 1e-11);
                assert_close(&biases_found, &biases, 1e-11);
                let found = backward(
                    isa,
                    LAYER,
                    &single(&x),
                    &single(&cotangent),
                    &single(&weight),
                );
                if case[1] > 10 {
                    assert_close(&found.input, &expected, 1e-5);
                    assert_close(&found.weight, &weights, 1e-3);
                }
            }
        }
    }

    #[test]
    fn rms_norm_is_its_definition() {
        let rms = RowNorm::Rms { epsilon: EPSILON };
        let [rows, features] = [37, 19];
        let [x, cotangent] = [1, 2].map(|seed| random(rows * features, seed));
        let [weight, bias] = [random(features, 3), vec![0.0; features]];
        let by_definition = |x: &[f64]| -> Vec<f64> {
            let rows = x.chunks(features).flat_map(|row| {
                let squares = row.iter().map(|x| x * x).sum::<f64>() / features as f64;
                let scale = 1.0 / (squares + EPSILON).sqrt();
                let scaled = row.iter().zip(&weight);
                scaled.map(move |(x, weight)| x * scale * weight)
            });
            rows.collect()
        };
        let step = 1e-6;
        for isa in Isa::available() {
            let y = forward(isa, rms, &x, &weight, &bias);
            assert_close(&y, &by_definition(&x), 1e-12);
            let found = backward(isa, rms, &x, &cotangent, &weight);
            for index in [0, 5, 100, rows * features - 1] {
                let moved = |step: f64| {
                    let mut x = x.clone();
                    x[index] += step;
                    let y = by_definition(&x);
                    y.iter().zip(&cotangent).map(|(y, g)| y * g).sum::<f64>()
                };
                let slope = (moved(step) - moved(-step)) / (2.0 * step);
                let input = found.input[index];
                assert!((input - slope).abs() < 1e-7, "{input} {slope}");
            }
        }
    }
}
