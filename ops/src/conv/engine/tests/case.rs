//! Random convolutions, as numbers and as the engine's arguments.

use burn_std::bf16;
use proptest::prelude::*;

use crate::conv::engine::geometry::{Conv, Dims, unravel};
use crate::conv::engine::job::Job;
use crate::conv::engine::method::Method;
use crate::conv::engine::pieces::{Piece, Pieces};
use crate::conv::engine::plan::WeightJob;
use crate::kernel::memory::View;
use crate::kernel::products::{Halves, Numbers, Pairs, Products};
use crate::kernel::simd::{Element, Isa};

/// A convolution, on a field that holds the cells of all windows.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) conv: Conv,
    pub(super) batch: usize,
    /// Results per dim.
    pub(super) count: Dims,
    /// Number of cells beyond the last window.
    pub(super) rest: Dims,
    /// Where the field is cut into pieces, per dim, in percent; pieces listed in `gaps` are
    /// missing.
    pub(super) cuts: [usize; 3],
    pub(super) gaps: u8,
    /// Layout of the pieces in memory.
    pub(super) flip: [bool; 5],
    pub(super) columns_first: bool,
    pub(super) seed: u64,
    pub(super) method: Method,
}

pub(super) fn case() -> impl Strategy<Value = Case> {
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
                method: Method::Direct,
            }
        },
    )
}

pub(super) fn volume(dims: Dims) -> usize {
    dims.iter().product()
}

/// All indices of a box.
pub(super) fn indices(dims: Dims) -> impl Iterator<Item = Dims> {
    (0..volume(dims)).map(move |index| unravel(index, dims))
}

pub(super) fn flat(at: Dims, dims: Dims) -> usize {
    (at[0] * dims[1] + at[1]) * dims[2] + at[2]
}

/// Numbers of three bits, so that few sums are rounded, even in `f32`.
pub(super) fn numbers(len: usize, seed: u64) -> Vec<f64> {
    let draw = |i: usize| (i as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
    (0..len).map(|i| draw(i) as f64 / 8.0 - 0.9375).collect()
}

/// A number in memory.
pub(super) trait Number: Copy {
    fn of(value: f64) -> Self;
    fn number(self) -> f64;
    /// Tolerance for sums of this test's size.
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

impl Number for bf16 {
    fn of(value: f64) -> Self {
        Self::from_f64(value)
    }
    fn number(self) -> f64 {
        self.to_f64()
    }
    const TOLERANCE: f64 = 4e-3;
}

/// Cells `[batch, channels, *cells]` written to memory with dims reversed and permuted.
pub(super) struct Stored<N> {
    pub(super) data: Vec<N>,
    pub(super) start: usize,
    pub(super) shape: [usize; 5],
    pub(super) strides: [isize; 5],
}

impl<N: Number> Stored<N> {
    pub(super) fn new(case: &Case, shape: [usize; 5], value: impl Fn([usize; 5]) -> f64) -> Self {
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
        let mut data = vec![N::of(f64::NAN); size as usize + 3];
        let (outer, cells) = (shape[0] * shape[1], [shape[2], shape[3], shape[4]]);
        for i in 0..outer {
            for [d, h, w] in indices(cells) {
                let at = [i / shape[1], i % shape[1], d, h, w];
                let offset: isize = (0..5).map(|dim| at[dim] as isize * strides[dim]).sum();
                data[(start + offset) as usize] = N::of(value(at));
            }
        }
        Self {
            data,
            start: start as usize,
            shape,
            strides,
        }
    }

    pub(super) fn view(&self) -> View<'_, N> {
        View::new(&self.data, self.start, self.shape, self.strides)
    }
}

/// View of contiguous cells.
pub(super) fn contiguous<N>(cells: &[N], shape: [usize; 5]) -> View<'_, N> {
    let strides = std::array::from_fn(|dim| shape[dim + 1..].iter().product::<usize>() as isize);
    View::new(cells, 0, shape, strides)
}

/// Field, weights, bias and cotangent as numbers, and the expected results.
pub(super) struct Truth {
    pub(super) cells: Dims,
    pub(super) x: Vec<f64>,
    pub(super) weight: Vec<f64>,
    pub(super) bias: Vec<f64>,
    pub(super) cotangent: Vec<f64>,
    pub(super) y: Vec<f64>,
    pub(super) x_gradient: Vec<f64>,
    pub(super) weight_gradient: Vec<f64>,
    pub(super) bias_gradient: Vec<f64>,
}

impl Case {
    pub(super) fn cells(&self) -> Dims {
        std::array::from_fn(|dim| {
            (self.count[dim] - 1) * self.conv.stride[dim] + self.conv.span(dim) + self.rest[dim]
        })
    }

    /// Boxes that the field is cut into, as first cell and size, without the gaps.
    pub(super) fn boxes(&self) -> Vec<(Dims, Dims)> {
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
        // At most three gaps.
        let pieces = all.filter(|(part, _, size)| {
            let gap = self.gaps & 7 == *part as u8 || (self.gaps >> 3) & 7 == *part as u8;
            !gap && volume(*size) > 0
        });
        pieces.map(|(_, at, size)| (at, size)).collect()
    }

    pub(super) fn truth(&self) -> Truth {
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

    /// Results of all passes of the engine.
    pub(super) fn run<E: Element, P: Products<E>>(&self, isa: Isa, truth: &Truth) -> [Vec<f64>; 4]
    where
        P::Number: Number,
    {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = self.conv;
        let elements = self.conv.elements();
        let convert = |values: &[f64]| {
            let numbers = values.iter().map(|value| P::Number::of(*value));
            numbers.collect::<Vec<P::Number>>()
        };
        let (weight, bias) = (convert(&truth.weight), convert(&truth.bias));
        let bias: Vec<E> = bias.into_iter().map(P::widened).collect();
        let channels = groups * inputs;
        let stored: Vec<(Dims, Stored<P::Number>)> = self
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
                channel: 0,
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
            method: self.method,
        }
        .run::<P>(isa, |[g, o, i, k]| weight[place(g, o, i, k)]);
        let x_gradient = Job {
            parts: &self.conv.input_gradient(&truth.cells.map(|size| 0..size)),
            groups,
            inputs: outputs,
            outputs: inputs,
            batch: self.batch,
            shape: truth.cells,
            pieces: &Pieces::whole(cotangent.view()),
            bias: None,
            method: self.method,
        }
        .run::<P>(isa, |[g, i, o, k]| weight[place(g, o, i, k)]);
        let parameters = WeightJob {
            conv: &self.conv,
            pieces: &pieces,
            cotangent: cotangent.view(),
            method: self.method,
        }
        .run::<E, P>(isa);
        let [y, x_gradient] =
            [y, x_gradient].map(|numbers| numbers.iter().map(|number| number.number()).collect());
        let [weight, bias] = [parameters.weight, parameters.bias]
            .map(|sums| sums.into_iter().map(E::to_f64).collect());
        [y, x_gradient, weight, bias]
    }

    /// Checks all passes on every instruction set, with numbers of every type.
    pub(super) fn check_all(&self) -> Result<(), TestCaseError> {
        let truth = self.truth();
        for isa in Isa::available() {
            self.check::<f32, Numbers>(isa, &truth)?;
            self.check::<f64, Numbers>(isa, &truth)?;
            self.check::<f32, Halves>(isa, &truth)?;
            if Pairs::run_on(isa) {
                self.check::<f32, Pairs>(isa, &truth)?;
            }
        }
        Ok(())
    }

    pub(super) fn check<E: Element, P: Products<E>>(
        &self,
        isa: Isa,
        truth: &Truth,
    ) -> Result<(), TestCaseError>
    where
        P::Number: Number,
    {
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
        // Square root of the number of products in each sum.
        let Conv {
            inputs, outputs, ..
        } = self.conv;
        let cells = self.batch * volume(self.count);
        let products = [
            inputs * self.conv.elements(),
            outputs * self.conv.elements(),
            cells,
        ];
        let spread = products.map(|products| (products as f64).sqrt());
        let may_round = matches!(self.method, Method::Winograd | Method::Fastest);
        let found = self.run::<E, P>(isa, truth);
        for (pass, ((name, found), expected)) in names.iter().zip(found).zip(expected).enumerate() {
            prop_assert_eq!(found.len(), expected.len());
            let rounding = match spread.get(pass) {
                // Transformed rows are rounded.
                Some(spread) if P::NUMBERS == 2 && may_round => 0.05 * spread,
                _ => 0.0,
            };
            for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                let error = (found - expected).abs();
                let allowed = P::Number::TOLERANCE * expected.abs().max(1.0) + rounding;
                if error.is_nan() || error > allowed {
                    let message =
                        format!("{name} [{i}] on {}: {found:?} for {expected}", isa.name());
                    return Err(TestCaseError::fail(message));
                }
            }
        }
        Ok(())
    }
}
