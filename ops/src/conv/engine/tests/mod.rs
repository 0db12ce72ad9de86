//! Compares the engine with sums written out, on every instruction set of this machine.

use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::conv::engine::geometry::Conv;
use crate::conv::engine::job::Job;
use crate::conv::engine::matrices::gradient;
use crate::conv::engine::method::Method;
use crate::conv::engine::part::holds_matrices;
use crate::conv::engine::pieces::Pieces;
use crate::conv::engine::tile::TileLayout;
use crate::kernel::products::{Numbers, Pairs, Products};
use crate::kernel::simd::Isa;

use case::*;

mod case;
mod winograd;

proptest! {
    #![proptest_config(Config { cases: 48, ..Config::default() })]

    #[test]
    fn all_passes_are_the_sums_that_define_them(case in case()) {
        case.check_all()?;
    }

    #[test]
    fn the_gradient_of_a_box_has_the_bits_of_the_gradient_of_all(
        case in case(), from in any::<[u8; 3]>(), to in any::<[u8; 3]>(), mixes: bool, by_matrices: bool,
    ) {
        let mut case = case;
        if !mixes {
            (case.conv.inputs, case.conv.outputs) = (1, 1);
            case.count[1] += 7;
        }
        let method = if by_matrices { Method::Matrices } else { case.method };
        let truth = case.truth();
        let Conv { groups, inputs, outputs, .. } = case.conv;
        let weight: Vec<f32> = truth.weight.iter().map(|w| *w as f32).collect();
        let cotangent: Vec<f32> = truth.cotangent.iter().map(|g| (*g * 1.1) as f32).collect();
        let [d, h, w] = case.count;
        let cells = contiguous(&cotangent, [case.batch, groups * outputs, d, h, w]);
        let gradient = |ranges: [std::ops::Range<usize>; 3]| {
            let parts = case.conv.input_gradient(&ranges).into_iter();
            let parts: Vec<_> = parts.map(|part| part.meeting(case.count)).collect();
            Job {
                parts: &parts,
                groups,
                inputs: outputs,
                outputs: inputs,
                batch: case.batch,
                shape: ranges.each_ref().map(ExactSizeIterator::len),
                pieces: &Pieces::whole(cells),
                bias: None,
                method,
            }
            .run::<Numbers>(Isa::available()[0], |[g, i, o, k]| {
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

    #[test]
    fn channels_that_do_not_mix_share_reads_between_rows(case in case(), rows in 1..=23_usize, columns in 1..=130_usize) {
        let mut case = case;
        (case.conv.inputs, case.conv.outputs) = (1, 1);
        case.count = [case.count[0].min(2), rows, columns];
        case.check_all()?;
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
        method: Method::Direct,
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    for method in [Method::Direct, Method::Winograd, Method::Matrices] {
        let case = Case { method, ..large() };
        let truth = case.truth();
        for isa in Isa::available() {
            let run = |pairs| match pairs {
                true => case.run::<f32, Pairs>(isa, &truth),
                false => case.run::<f32, Numbers>(isa, &truth),
            };
            let on = |threads, pairs| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                pool.build().unwrap().install(|| run(pairs))
            };
            for pairs in [false, Pairs::run_on(isa)] {
                let one = on(1, pairs);
                for threads in [2, 3, 7] {
                    let name = isa.name();
                    assert_eq!(on(threads, pairs), one, "{threads} threads on {name}");
                }
            }
        }
    }
}

#[test]
fn many_ranks_may_compute_at_once() {
    let case = large();
    let truth = case.truth();
    let isa = Isa::available()[0];
    let run = |pairs| match pairs {
        true => case.run::<f32, Pairs>(isa, &truth),
        false => case.run::<f32, Numbers>(isa, &truth),
    };
    for pairs in [false, Pairs::run_on(isa)] {
        let expected = run(pairs);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| assert_eq!(run(pairs), expected));
            }
        });
    }
}

#[test]
fn nothing_may_come_in() {
    for batch in [0, 1] {
        let mut case = large();
        case.batch = batch;
        case.count = [1, 3, 5];
        // Cut such that every box is a gap or empty.
        case.cuts = [100; 3];
        let truth = case.truth();
        case.check::<f32, Numbers>(Isa::available()[0], &truth)
            .unwrap();
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
    let split = Case {
        method: Method::Matrices,
        ..case.clone()
    };
    let truth = case.truth();
    for isa in Isa::available() {
        case.check::<f32, Numbers>(isa, &truth).unwrap();
        split.check::<f32, Numbers>(isa, &truth).unwrap();
    }
    let dilated = |dilation| Conv {
        dilation: [1, dilation, dilation],
        ..case.conv
    };
    for (dilation, holds) in [(1, true), (100, false)] {
        let correlation = dilated(dilation).forward(case.count);
        assert_eq!(holds_matrices::<f32, Numbers>(&correlation, 512), holds);
        let smallest = TileLayout::smallest(&correlation, 32);
        assert_eq!(gradient::holds::<f32, Numbers>(&smallest, 512), holds);
    }
    // Boxes that some taps do not reach are computed like the others.
    let far = Conv {
        stride: [1; 3],
        ..dilated(40)
    };
    for rows in [0..180, 0..40] {
        let boxes = far.input_gradient(&[0..1, rows, 0..180]);
        let correlation = boxes[0].clone().meeting([1, 100, 100]);
        assert!(!holds_matrices::<f32, Numbers>(&correlation, 64));
    }
    // Dense tiles are as large as necessary.
    let many = Conv {
        kernel: [5; 3],
        stride: [1; 3],
        ..dilated(1)
    };
    assert!(holds_matrices::<f32, Numbers>(
        &many.forward([5, 5, 60]),
        512
    ));
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
        let [y, _, weight, _] = case.run::<f32, Numbers>(isa, &truth);
        assert!(
            y.iter().chain(&weight).all(|value| value.is_finite()),
            "{}",
            isa.name()
        );
    }
}

#[test]
fn values_that_are_not_finite_stay_in_their_windows() {
    for cuts in [[0; 3], [0, 30, 70]] {
        let case = Case {
            cuts,
            count: [1, 9, 40],
            batch: 1,
            ..large()
        };
        let split = Case {
            method: Method::Matrices,
            ..case.clone()
        };
        for isa in Isa::available() {
            for hit in [[0, 4, 17], [0, 10, 41], [0, 0, 0]] {
                finite_but_in_windows::<Numbers>(&case, isa, hit);
                finite_but_in_windows::<Numbers>(&split, isa, hit);
                if Pairs::run_on(isa) {
                    finite_but_in_windows::<Pairs>(&case, isa, hit);
                }
            }
        }
    }
}

/// Runs after a field full of NaN, which must not remain in tiles.
fn finite_but_in_windows<P: Products<f32>>(case: &Case, isa: Isa, hit: [usize; 3])
where
    P::Number: Number,
{
    let mut truth = case.truth();
    let x = std::mem::take(&mut truth.x);
    truth.x = vec![f64::NAN; x.len()];
    case.run::<f32, P>(isa, &truth);
    truth.x = x;
    truth.x[flat(hit, truth.cells)] = f64::NAN;
    let [y, _, weight, bias] = case.run::<f32, P>(isa, &truth);
    assert!(bias.iter().all(|gradient| gradient.is_finite()));
    let Conv {
        groups,
        inputs,
        outputs,
        kernel,
        ..
    } = case.conv;
    for channel in 0..groups * outputs {
        for (element, tap) in indices(kernel).enumerate() {
            for input in 0..inputs {
                let of_window = |d: usize| (0..case.count[d]).any(|at| at + tap[d] == hit[d]);
                let meets = channel < outputs && input == 0 && (0..3).all(of_window);
                let gradient = weight[(channel * inputs + input) * volume(kernel) + element];
                let name = isa.name();
                assert_eq!(
                    gradient.is_nan(),
                    meets,
                    "{channel} {input} {tap:?} on {name}"
                );
            }
        }
        for at in indices(case.count) {
            let reaches =
                channel < outputs && (0..3).all(|d| (at[d]..at[d] + kernel[d]).contains(&hit[d]));
            let y = y[channel * volume(case.count) + flat(at, case.count)];
            assert_eq!(y.is_nan(), reaches, "{at:?} on {}", isa.name());
        }
    }
}

proptest! {
    #![proptest_config(Config { cases: 32, ..Config::default() })]

    /// Channels and columns of less than a matrix, and of several matrices.
    #[test]
    fn many_channels_are_summed_in_pairs(
        case in case(), inputs in 2..=36_usize, outputs in 2..=36_usize, columns in 20..=70_usize,
    ) {
        let [planes, rows, _] = case.count;
        let [depth, high, wide] = case.conv.kernel;
        let case = Case {
            conv: Conv {
                groups: case.conv.groups.min(2),
                inputs,
                outputs,
                kernel: [depth.min(2), high, wide],
                ..case.conv
            },
            count: [planes.min(2), rows, columns],
            ..case
        };
        let truth = case.truth();
        for isa in Isa::available().into_iter().filter(|isa| Pairs::run_on(*isa)) {
            case.check::<f32, Pairs>(isa, &truth)?;
        }
        let split = Case { method: Method::Matrices, ..case };
        for isa in Isa::available().into_iter().filter(|isa| isa.has_matrices()) {
            split.check::<f32, Numbers>(isa, &truth)?;
        }
    }
}

#[test]
fn few_tasks_are_divided_evenly() {
    use super::tile::balanced;
    // 3 tiles become 4, 9 become 12, and 1 of 2 tasks becomes 2.
    assert_eq!(balanced([1, 8, 180], [1, 23, 180], 1), [1, 6, 180]);
    assert_eq!(balanced([1, 8, 180], [1, 23, 180], 3), [1, 6, 180]);
    assert_eq!(balanced([1, 12, 90], [1, 12, 90], 2), [1, 6, 90]);
    // Many tiles are left as they are, and so is a single row.
    assert_eq!(balanced([1, 8, 360], [1, 181, 360], 1), [1, 8, 360]);
    assert_eq!(balanced([1, 1, 40], [1, 1, 120], 1), [1, 1, 40]);
}
