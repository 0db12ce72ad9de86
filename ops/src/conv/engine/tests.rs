//! The engine against sums written out, on every instruction set that this machine has.

use proptest::prelude::*;
use proptest::test_runner::Config;

use super::correlate::Job;
use super::geometry::{Conv, Dims};
use super::tile::{Piece, Pieces};
use super::weight::WeightJob;
use crate::kernel::memory::View;
use crate::kernel::simd::{Element, Isa};

/// A convolution of a field, given by its cells, that every window lies in.
#[derive(Clone, Debug)]
struct Case {
    conv: Conv,
    batch: usize,
    /// Results per dim.
    count: Dims,
    /// Cells beyond the last window.
    rest: Dims,
    /// Where the field is cut into pieces, per dim, in percent; pieces listed in `gaps` are not there.
    cuts: [usize; 3],
    gaps: u8,
    /// How pieces lie in memory.
    flip: [bool; 5],
    columns_first: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let dims = |range: std::ops::RangeInclusive<usize>| [range.clone(), range.clone(), range];
    let channels = (1..=3_usize, 1..=12_usize, 1..=19_usize);
    let windows = (dims(1..=4), dims(1..=3), dims(1..=3));
    let sizes = (1..=2_usize, [1..=3_usize, 1..=6, 1..=40], dims(0..=2));
    let layout = (
        dims(0..=100),
        any::<u8>(),
        any::<[bool; 5]>(),
        any::<bool>(),
    );
    (channels, windows, sizes, layout, any::<u64>()).prop_map(
        |(
            (groups, inputs, outputs),
            (kernel, stride, dilation),
            (batch, count, rest),
            layout,
            seed,
        )| {
            let (cuts, gaps, flip, columns_first) = layout;
            let conv = Conv {
                groups,
                inputs,
                outputs,
                kernel,
                stride,
                dilation,
            };
            Case {
                conv,
                batch,
                count,
                rest,
                cuts,
                gaps,
                flip,
                columns_first,
                seed,
            }
        },
    )
}

fn volume(dims: Dims) -> usize {
    dims.iter().product()
}

/// All indices of a box.
fn indices(dims: Dims) -> impl Iterator<Item = Dims> {
    let [_, rows, columns] = dims;
    (0..volume(dims)).map(move |i| [i / (rows * columns), i / columns % rows, i % columns])
}

fn flat(at: Dims, dims: Dims) -> usize {
    (at[0] * dims[1] + at[1]) * dims[2] + at[2]
}

/// Numbers of three bits, so that few sums round, also in `f32`.
fn numbers(len: usize, seed: u64) -> Vec<f64> {
    let draw = |i: usize| (i as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
    (0..len).map(|i| draw(i) as f64 / 8.0 - 0.9375).collect()
}

trait Number: Element {
    fn of(value: f64) -> Self;
    fn number(self) -> f64;
    /// Of sums of this test's size.
    const TOLERANCE: f64;
}

impl Number for f32 {
    fn of(value: f64) -> Self {
        value as Self
    }
    fn number(self) -> f64 {
        self.into()
    }
    const TOLERANCE: f64 = 2e-4;
}

impl Number for f64 {
    fn of(value: f64) -> Self {
        value
    }
    fn number(self) -> f64 {
        self
    }
    const TOLERANCE: f64 = 1e-11;
}

/// Cells `[batch, channels, *cells]` written to memory with dims reversed and permuted.
struct Stored<E> {
    data: Vec<E>,
    start: usize,
    shape: [usize; 5],
    strides: [isize; 5],
}

impl<E: Number> Stored<E> {
    fn new(case: &Case, shape: [usize; 5], value: impl Fn([usize; 5]) -> f64) -> Self {
        let order = if case.columns_first {
            [4, 0, 3, 1, 2]
        } else {
            [0, 1, 2, 3, 4]
        };
        let (mut strides, mut size) = ([0; 5], 1_isize);
        for dim in order.into_iter().rev() {
            strides[dim] = size;
            size *= shape[dim] as isize;
        }
        // An odd offset, so that nothing is aligned.
        let mut start = 3;
        for dim in 0..5 {
            if case.flip[dim] && shape[dim] > 0 {
                start += (shape[dim] - 1) as isize * strides[dim];
                strides[dim] = -strides[dim];
            }
        }
        let mut data = vec![E::of(f64::NAN); size as usize + 3];
        let (outer, cells) = (shape[0] * shape[1], [shape[2], shape[3], shape[4]]);
        for i in 0..outer {
            for [d, h, w] in indices(cells) {
                let at = [i / shape[1], i % shape[1], d, h, w];
                let offset: isize = (0..5).map(|dim| at[dim] as isize * strides[dim]).sum();
                data[(start + offset) as usize] = E::of(value(at));
            }
        }
        Self {
            data,
            start: start as usize,
            shape,
            strides,
        }
    }

    fn view(&self) -> View<'_, E, 5> {
        View::new(&self.data, self.start, self.shape, self.strides)
    }
}

/// The field, the weights, the bias and the cotangent as numbers, and what is to come out.
struct Truth {
    cells: Dims,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    cotangent: Vec<f64>,
    y: Vec<f64>,
    x_gradient: Vec<f64>,
    weight_gradient: Vec<f64>,
    bias_gradient: Vec<f64>,
}

impl Case {
    fn cells(&self) -> Dims {
        std::array::from_fn(|dim| {
            let conv = &self.conv;
            let span = (conv.kernel[dim] - 1) * conv.dilation[dim] + 1;
            (self.count[dim] - 1) * conv.stride[dim] + span + self.rest[dim]
        })
    }

    /// The boxes that the field is cut into, as first cell and size, without the gaps.
    fn boxes(&self) -> Vec<(Dims, Dims)> {
        let cells = self.cells();
        let cut: Dims = std::array::from_fn(|dim| cells[dim] * self.cuts[dim] / 100);
        let all = (0..8_usize).map(|part| {
            let high = [part & 4 != 0, part & 2 != 0, part & 1 != 0];
            let at = std::array::from_fn(|dim| if high[dim] { cut[dim] } else { 0 });
            let size = std::array::from_fn(|dim| {
                if high[dim] {
                    cells[dim] - cut[dim]
                } else {
                    cut[dim]
                }
            });
            (part, at, size)
        });
        // Three gaps at most.
        let there = all.filter(|(part, _, size)| {
            let gap = self.gaps & 7 == *part as u8 || (self.gaps >> 3) & 7 == *part as u8;
            !gap && volume(*size) > 0
        });
        there.map(|(_, at, size)| (at, size)).collect()
    }

    fn truth(&self) -> Truth {
        let Conv {
            groups,
            inputs,
            outputs,
            kernel,
            stride,
            dilation,
        } = self.conv;
        let (cells, elements) = (self.cells(), self.conv.elements());
        let mut x = numbers(self.batch * groups * inputs * volume(cells), self.seed);
        let boxes = self.boxes();
        let covered = |at: Dims| {
            boxes
                .iter()
                .any(|(from, size)| (0..3).all(|d| (from[d]..from[d] + size[d]).contains(&at[d])))
        };
        for (i, at) in
            (0..x.len() / volume(cells)).flat_map(|i| indices(cells).map(move |at| (i, at)))
        {
            if !covered(at) {
                x[i * volume(cells) + flat(at, cells)] = 0.0;
            }
        }
        let weight = numbers(groups * outputs * inputs * elements, self.seed ^ 1);
        let bias = numbers(groups * outputs, self.seed ^ 2);
        let cotangent = numbers(
            self.batch * groups * outputs * volume(self.count),
            self.seed ^ 3,
        );
        let mut truth = Truth {
            cells,
            y: Vec::new(),
            x_gradient: vec![0.0; x.len()],
            weight_gradient: vec![0.0; weight.len()],
            bias_gradient: vec![0.0; bias.len()],
            x,
            weight,
            bias,
            cotangent,
        };
        for sample in 0..self.batch {
            for channel in 0..groups * outputs {
                for at in indices(self.count) {
                    let g = truth.cotangent[truth.y.len()];
                    let mut sum = truth.bias[channel];
                    for input in 0..inputs {
                        for (element, k) in indices(kernel).enumerate() {
                            let cell =
                                std::array::from_fn(|d| at[d] * stride[d] + k[d] * dilation[d]);
                            let field = (sample * groups + channel / outputs) * inputs + input;
                            let x = field * volume(cells) + flat(cell, cells);
                            let w = (channel * inputs + input) * elements + element;
                            sum += truth.weight[w] * truth.x[x];
                            truth.x_gradient[x] += truth.weight[w] * g;
                            truth.weight_gradient[w] += truth.x[x] * g;
                        }
                    }
                    truth.bias_gradient[channel] += g;
                    truth.y.push(sum);
                }
            }
        }
        truth
    }

    /// All that the engine computes.
    fn run<E: Number>(&self, isa: Isa, truth: &Truth) -> [Vec<E>; 4] {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = self.conv;
        let elements = self.conv.elements();
        let convert = |values: &[f64]| values.iter().map(|value| E::of(*value)).collect::<Vec<E>>();
        let (weight, bias) = (convert(&truth.weight), convert(&truth.bias));
        let channels = groups * inputs;
        let stored: Vec<(Dims, Stored<E>)> = self
            .boxes()
            .into_iter()
            .map(|(from, size)| {
                let shape = [self.batch, channels, size[0], size[1], size[2]];
                let cells = Stored::new(self, shape, |[b, c, d, h, w]| {
                    let at = [from[0] + d, from[1] + h, from[2] + w];
                    truth.x[(b * channels + c) * volume(truth.cells) + flat(at, truth.cells)]
                });
                (from, cells)
            })
            .collect();
        let pieces = stored
            .iter()
            .map(|(at, cells)| Piece {
                at: *at,
                cells: cells.view(),
            })
            .rev()
            .collect();
        let pieces = Pieces::new(pieces);
        let [depth, rows, columns] = self.count;
        let shape = [self.batch, groups * outputs, depth, rows, columns];
        let cotangent = Stored::new(self, shape, |[b, c, d, h, w]| {
            truth.cotangent
                [(b * groups * outputs + c) * volume(self.count) + flat([d, h, w], self.count)]
        });
        let place = |group: usize, output: usize, input: usize, element: usize| {
            ((group * outputs + output) * inputs + input) * elements + element
        };
        let y = Job {
            parts: &[self.conv.forward(self.count)],
            groups,
            inputs,
            outputs,
            batch: self.batch,
            shape: self.count,
            pieces: &pieces,
            bias: Some(&bias),
            activation: None,
        }
        .run(isa, |[g, o, i, k]| weight[place(g, o, i, k)]);
        let x_gradient = Job {
            parts: &self.conv.input_gradient(&truth.cells.map(|size| 0..size)),
            groups,
            inputs: outputs,
            outputs: inputs,
            batch: self.batch,
            shape: truth.cells,
            pieces: &Pieces::whole(cotangent.view()),
            bias: None,
            activation: None,
        }
        .run(isa, |[g, i, o, k]| weight[place(g, o, i, k)]);
        let parameters = WeightJob {
            conv: &self.conv,
            pieces: &pieces,
            cotangent: cotangent.view(),
        }
        .run(isa);
        [
            y.to_vec(),
            x_gradient.to_vec(),
            parameters.weight,
            parameters.bias,
        ]
    }

    fn check<E: Number>(&self, isa: Isa, truth: &Truth) -> Result<(), TestCaseError> {
        let names = [
            "y",
            "gradient of x",
            "gradient of the weight",
            "gradient of the bias",
        ];
        let expected = [
            &truth.y,
            &truth.x_gradient,
            &truth.weight_gradient,
            &truth.bias_gradient,
        ];
        for ((name, found), expected) in names.iter().zip(self.run::<E>(isa, truth)).zip(expected) {
            prop_assert_eq!(found.len(), expected.len());
            for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                let error = (found.number() - expected).abs();
                if error.is_nan() || error > E::TOLERANCE * expected.abs().max(1.0) {
                    let message =
                        format!("{name} [{i}] on {}: {found:?} for {expected}", isa.name());
                    return Err(TestCaseError::fail(message));
                }
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(Config { cases: 48, ..Config::default() })]

    #[test]
    fn all_passes_are_the_sums_that_define_them(case in case()) {
        let truth = case.truth();
        for isa in Isa::available() {
            case.check::<f32>(isa, &truth)?;
            case.check::<f64>(isa, &truth)?;
        }
    }

    #[test]
    fn the_gradient_of_a_box_has_the_bits_of_the_gradient_of_all(
        case in case(), from in any::<[u8; 3]>(), to in any::<[u8; 3]>(), mixes: bool,
    ) {
        let mut case = case;
        if !mixes {
            (case.conv.inputs, case.conv.outputs) = (1, 1);
            case.count[1] += 7;
        }
        let truth = case.truth();
        let Conv { groups, inputs, outputs, .. } = case.conv;
        let weight: Vec<f32> = truth.weight.iter().map(|w| *w as f32).collect();
        let cotangent: Vec<f32> = truth.cotangent.iter().map(|g| (*g * 1.1) as f32).collect();
        let [d, h, w] = case.count;
        let shape = [case.batch, groups * outputs, d, h, w];
        let strides = [groups * outputs * d * h * w, d * h * w, h * w, w, 1].map(|stride| stride as isize);
        let cells = View::new(&cotangent, 0, shape, strides);
        let gradient = |ranges: [std::ops::Range<usize>; 3]| {
            Job {
                parts: &case.conv.input_gradient(&ranges),
                groups,
                inputs: outputs,
                outputs: inputs,
                batch: case.batch,
                shape: ranges.each_ref().map(ExactSizeIterator::len),
                pieces: &Pieces::whole(cells),
                bias: None,
            activation: None,
            }
            .run(Isa::available()[0], |[g, i, o, k]| {
                weight[((g * outputs + o) * inputs + i) * case.conv.elements() + k]
            })
            .to_vec()
        };
        let all = gradient(truth.cells.map(|size| 0..size));
        let ranges: [_; 3] = std::array::from_fn(|dim| {
            let size = truth.cells[dim];
            let (a, b) = (from[dim] as usize % (size + 1), to[dim] as usize % (size + 1));
            a.min(b)..a.max(b)
        });
        let part = gradient(ranges.clone());
        let size = ranges.each_ref().map(ExactSizeIterator::len);
        for field in 0..case.batch * groups * inputs {
            for at in indices(size) {
                let cell = std::array::from_fn(|dim| ranges[dim].start + at[dim]);
                let expected = all[field * volume(truth.cells) + flat(cell, truth.cells)];
                prop_assert_eq!(part[field * volume(size) + flat(at, size)].to_bits(), expected.to_bits());
            }
        }
    }
}

proptest! {
    #![proptest_config(Config { cases: 48, ..Config::default() })]

    #[test]
    fn channels_that_do_not_mix_share_reads_between_rows(case in case(), rows in 1..=23_usize, columns in 1..=130_usize) {
        let mut case = case;
        (case.conv.inputs, case.conv.outputs) = (1, 1);
        case.count = [case.count[0].min(2), rows, columns];
        let truth = case.truth();
        for isa in Isa::available() {
            case.check::<f32>(isa, &truth)?;
            case.check::<f64>(isa, &truth)?;
        }
    }
}

/// A case that is cut into many tasks in every pass.
fn large() -> Case {
    Case {
        conv: Conv {
            groups: 2,
            inputs: 5,
            outputs: 9,
            kernel: [1, 3, 3],
            stride: [1; 3],
            dilation: [1; 3],
        },
        batch: 2,
        count: [1, 61, 203],
        rest: [0; 3],
        cuts: [0, 30, 70],
        gaps: 0,
        flip: [false; 5],
        columns_first: false,
        seed: 7,
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let case = large();
    let truth = case.truth();
    for isa in Isa::available() {
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| case.run::<f32>(isa, &truth))
        };
        let one = on(1);
        for threads in [2, 3, 7] {
            assert_eq!(on(threads), one, "{threads} threads on {}", isa.name());
        }
    }
}

#[test]
fn many_ranks_may_compute_at_once() {
    let case = large();
    let truth = case.truth();
    let isa = Isa::available()[0];
    let expected = case.run::<f32>(isa, &truth);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| assert_eq!(case.run::<f32>(isa, &truth), expected));
        }
    });
}

#[test]
fn nothing_may_come_in() {
    for batch in [0, 1] {
        let mut case = large();
        case.batch = batch;
        case.count = [1, 3, 5];
        // Cut so that every box is a gap or empty.
        case.cuts = [100; 3];
        let truth = case.truth();
        case.check::<f32>(Isa::available()[0], &truth).unwrap();
    }
}

#[test]
fn large_dilations_keep_scratch_small() {
    let case = Case {
        conv: Conv {
            groups: 1,
            inputs: 40,
            outputs: 3,
            kernel: [1, 3, 3],
            stride: [1, 2, 1],
            dilation: [1, 40, 40],
        },
        cuts: [0; 3],
        count: [1, 5, 60],
        batch: 1,
        ..large()
    };
    let truth = case.truth();
    for isa in Isa::available() {
        case.check::<f32>(isa, &truth).unwrap();
    }
}

#[test]
fn cells_between_taps_do_not_reach_the_weights() {
    let case = Case {
        conv: Conv {
            groups: 1,
            inputs: 1,
            outputs: 1,
            kernel: [1, 1, 2],
            stride: [1; 3],
            dilation: [1, 1, 2],
        },
        cuts: [0; 3],
        count: [1; 3],
        batch: 1,
        ..large()
    };
    let mut truth = case.truth();
    truth.x[1] = f64::NAN;
    for isa in Isa::available() {
        let [y, _, weight, _] = case.run::<f32>(isa, &truth);
        assert!(
            y.iter().chain(&weight).all(|value| value.is_finite()),
            "{}",
            isa.name()
        );
    }
}

#[test]
fn values_that_are_not_finite_stay_in_their_windows() {
    let case = Case {
        cuts: [0; 3],
        count: [1, 9, 40],
        batch: 1,
        ..large()
    };
    let mut truth = case.truth();
    let hit = [0, 4, 17];
    truth.x[flat(hit, truth.cells)] = f64::NAN;
    for isa in Isa::available() {
        let [y, _, weight, bias] = case.run::<f32>(isa, &truth);
        assert!(bias.iter().all(|gradient| gradient.is_finite()));
        for (index, gradient) in weight.iter().enumerate() {
            let elements = case.conv.elements();
            let (channel, input) = (
                index / elements / case.conv.inputs,
                index / elements % case.conv.inputs,
            );
            let meets = channel < case.conv.outputs && input == 0;
            assert_eq!(gradient.is_nan(), meets, "weight {index} on {}", isa.name());
        }
        for channel in 0..case.conv.groups * case.conv.outputs {
            for at in indices(case.count) {
                let reaches = channel < case.conv.outputs
                    && (0..3).all(|d| (at[d]..at[d] + case.conv.kernel[d]).contains(&hit[d]));
                assert_eq!(
                    y[channel * volume(case.count) + flat(at, case.count)].is_nan(),
                    reaches,
                    "{at:?}"
                );
            }
        }
    }
}
