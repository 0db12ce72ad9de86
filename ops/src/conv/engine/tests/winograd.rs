//! Winograd's method against the sums that define a convolution.

use burn_std::bf16;
use proptest::prelude::*;
use proptest::test_runner::Config;

use super::case::*;
use crate::conv::engine::geometry::Conv;
use crate::conv::engine::job::Job;
use crate::conv::engine::method::Method;
use crate::conv::engine::pieces::Pieces;
use crate::conv::engine::winograd::RowTiles;
use crate::kernel::products::{Numbers, Pairs, Products};
use crate::kernel::simd::Isa;

/// A case with a kernel of three rows; possibly of squares, and then possibly with more channels
/// than a panel. Winograd's method computes weight gradients by squares; the fastest method uses
/// oblongs if there are enough cells.
fn rows() -> impl Strategy<Value = Case> {
    let channels = proptest::option::of([60..=80_usize, 60..=80]);
    let squares = proptest::option::of(channels);
    let methods = proptest::sample::select(vec![Method::Winograd, Method::Fastest]);
    (case(), 1..=14_usize, squares, methods).prop_map(|(case, rows, squares, method)| {
        let conv = Conv {
            kernel: [case.conv.kernel[0].min(2), 3, case.conv.kernel[2]],
            stride: [1; 3],
            dilation: [case.conv.dilation[0], 1, case.conv.dilation[2]],
            ..case.conv
        };
        let conv = match squares {
            Some(channels) => {
                let few = [4 * conv.inputs, 4 * conv.outputs];
                let [inputs, outputs] = channels.unwrap_or(few);
                Conv {
                    groups: if channels.is_some() { 1 } else { conv.groups },
                    kernel: [1, 3, 3],
                    dilation: [1; 3],
                    inputs,
                    outputs,
                    ..conv
                }
            }
            None => conv,
        };
        Case {
            conv,
            count: [case.count[0].min(2), rows, case.count[2]],
            method,
            ..case
        }
    })
}

proptest! {
    #![proptest_config(Config { cases: 48, ..Config::default() })]

    #[test]
    fn all_passes_are_the_sums_that_define_them(case in rows()) {
        prop_assert!(RowTiles::new(&case.conv.forward(case.count)).is_some());
        let truth = case.truth();
        for isa in Isa::available() {
            case.check::<f32, Numbers>(isa, &truth)?;
            case.check::<f64, Numbers>(isa, &truth)?;
        }
    }

    #[test]
    fn all_passes_are_those_sums_with_rounded_factors(case in rows()) {
        let truth = case.truth();
        for isa in Isa::available().into_iter().filter(|isa| Pairs::run_on(*isa)) {
            case.check::<f32, Pairs>(isa, &truth)?;
        }
    }

    #[test]
    fn results_in_boxes_have_the_bits_of_all_results(
        case in rows(),
        tiles in 0..3_usize,
        column in any::<u8>(),
        pairs in any::<bool>(),
    ) {
        let truth = case.truth();
        if pairs && Pairs::run_on(Isa::available()[0]) {
            in_boxes::<Pairs>(&case, &truth, tiles, column)?;
        } else {
            in_boxes::<Numbers>(&case, &truth, tiles, column)?;
        }
    }
}

fn in_boxes<P: Products<f32>>(
    case: &Case,
    truth: &Truth,
    tiles: usize,
    column: u8,
) -> Result<(), TestCaseError>
where
    P::Number: Number + PartialEq + std::fmt::Debug,
{
    let Conv {
        groups,
        inputs,
        outputs,
        ..
    } = case.conv;
    let x: Vec<P::Number> = truth.x.iter().map(|x| P::Number::of(*x * 1.1)).collect();
    let weight: Vec<P::Number> = truth.weight.iter().map(|w| P::Number::of(*w)).collect();
    let [d, h, w] = truth.cells;
    let cells = contiguous(&x, [case.batch, groups * inputs, d, h, w]);
    let pieces = Pieces::whole(cells);
    let whole = case.conv.forward(case.count);
    let results = |boxes: &[[std::ops::Range<usize>; 3]]| {
        let parts: Vec<_> = boxes.iter().map(|lattice| whole.within(lattice)).collect();
        let job = Job {
            parts: &parts,
            groups,
            inputs,
            outputs,
            batch: case.batch,
            shape: case.count,
            pieces: &pieces,
            bias: None,
            method: case.method,
        };
        let place =
            |[g, o, i, k]: [usize; 4]| ((g * outputs + o) * inputs + i) * case.conv.elements() + k;
        job.run::<P>(Isa::available()[0], |at| weight[place(at)])
            .to_vec()
    };
    let [planes, rows, columns] = case.count;
    let (row, column) = ((4 * tiles).min(rows), column as usize % (columns + 1));
    let halves = [[0..row, row..rows], [0..column, column..columns]];
    let parts: Vec<_> = halves[0]
        .iter()
        .flat_map(|rows| {
            halves[1]
                .iter()
                .map(|columns| [0..planes, rows.clone(), columns.clone()])
        })
        .filter(|part| !part.iter().any(std::ops::Range::is_empty))
        .collect();
    prop_assert_eq!(
        results(&parts),
        results(&[[0..planes, 0..rows, 0..columns]])
    );
    Ok(())
}

/// Root mean square and maximum of the differences, NaN if one is.
fn errors(found: &[f64], exact: &[f64]) -> [f64; 2] {
    let errors = || {
        found
            .iter()
            .zip(exact)
            .map(|(found, exact)| (found - exact).abs())
    };
    let mean = errors().map(|error| error * error).sum::<f64>() / exact.len() as f64;
    let largest = errors().fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a });
    [mean.sqrt(), largest]
}

/// A case whose numbers have `bits` bits, so that products are rounded, with this number of input
/// channels, columns of taps, and rows and columns of results.
fn rounded(channels: usize, taps: usize, [rows, columns]: [usize; 2], bits: u32) -> (Case, Truth) {
    let case = Case {
        conv: Conv {
            groups: 1,
            inputs: channels,
            outputs: 16,
            kernel: [1, 3, taps],
            stride: [1; 3],
            dilation: [1; 3],
        },
        batch: 1,
        count: [1, rows, columns],
        rest: [0; 3],
        cuts: [0; 3],
        gaps: 0,
        flip: [false; 5],
        columns_first: false,
        seed: 3,
        method: Method::Direct,
    };
    let mut truth = case.truth();
    let (mut state, half) = (1_u32, f64::from(1_u32 << (bits - 1)));
    for numbers in [&mut truth.x, &mut truth.weight, &mut truth.cotangent] {
        for number in numbers {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *number = f64::from(state >> (32 - bits)) / half - 1.0;
        }
    }
    (case, truth)
}

/// Checks that the errors of a method are at most `most` times those of direct sums.
fn check_rounding(method: Method, taps: usize, sizes: [usize; 2], most: f64) {
    for channels in [16, 64] {
        let (direct, truth) = rounded(channels, taps, sizes, 24);
        let other = Case {
            method,
            ..direct.clone()
        };
        for isa in Isa::available() {
            let exact = direct.run::<f64, Numbers>(isa, &truth);
            let [direct, other] =
                [&direct, &other].map(|case| case.run::<f32, Numbers>(isa, &truth));
            for pass in 0..3 {
                let [direct, other] =
                    [&direct, &other].map(|found| errors(&found[pass], &exact[pass]));
                for (direct, other) in direct.into_iter().zip(other) {
                    assert!(
                        other <= most * direct,
                        "pass {pass}, {channels} channels: {other} for {direct}"
                    );
                }
            }
        }
    }
}

#[test]
fn rounding_of_rows_is_at_most_four_times_that_of_direct_sums() {
    check_rounding(Method::Winograd, 5, [16, 33], 4.0);
}

/// The field has the minimum number of cells for which all passes use squares.
#[test]
fn rounding_of_squares_is_at_most_four_times_that_of_direct_sums() {
    check_rounding(Method::Fastest, 3, [50, 76], 4.0);
}

/// The field has the minimum number of cells for which weight gradients use oblongs.
#[test]
fn rounding_of_oblongs_is_at_most_four_times_that_of_direct_sums() {
    check_rounding(Method::Fastest, 3, [16, 32], 4.0);
}

#[test]
fn rounding_by_matrices_is_at_most_twice_that_of_direct_sums() {
    check_rounding(Method::Matrices, 3, [16, 33], 2.0);
}

/// Compares root mean squares: the largest error of direct sums, which are rounded once, is half a
/// unit.
#[test]
fn rounding_to_bf16_is_at_most_four_times_that_of_results() {
    for channels in [8, 64] {
        let (exact, truth) = rounded(channels, 3, [16, 33], 8);
        let pairs = Case {
            method: Method::Winograd,
            ..exact.clone()
        };
        let near = |results: Vec<f64>| -> Vec<f64> {
            let results = results.into_iter();
            results
                .map(|result| bf16::from_f64(result).to_f64())
                .collect()
        };
        for isa in Isa::available()
            .into_iter()
            .filter(|isa| Pairs::run_on(*isa))
        {
            let expected = exact.run::<f64, Numbers>(isa, &truth);
            let direct = exact.run::<f32, Numbers>(isa, &truth).map(near);
            let pairs = pairs.run::<f32, Pairs>(isa, &truth).map(near);
            for pass in 0..3 {
                let [direct, pairs] =
                    [&direct, &pairs].map(|found| errors(&found[pass], &expected[pass])[0]);
                assert!(
                    pairs <= 4.0 * direct,
                    "pass {pass}, {channels} channels, {}: {pairs} for {direct}",
                    isa.name()
                );
            }
        }
    }
}
