//! Comparison of the engine with sums written out, on every instruction set of this machine.

use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::conv::engine::geometry::Conv;
use crate::conv::engine::job::Job;
use crate::conv::engine::method::Method;
use crate::conv::engine::pieces::Pieces;
use crate::kernel::memory::View;
use crate::kernel::simd::Isa;

use case::*;

mod case;
mod winograd;

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
                method: case.method,
                halves: false,
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
        method: Method::Direct,
        halves: false,
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let ways = [
        (Method::Direct, false),
        (Method::Winograd, false),
        (Method::Winograd, true),
    ];
    let cases = ways.map(|(method, halves)| Case {
        method,
        halves,
        ..large()
    });
    for (case, isa) in cases
        .iter()
        .flat_map(|case| Isa::available().into_iter().map(move |isa| (case, isa)))
    {
        let truth = case.truth();
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
    for cuts in [[0; 3], [0, 30, 70]] {
        finite_but_in_windows(&Case {
            cuts,
            count: [1, 9, 40],
            batch: 1,
            ..large()
        });
    }
}

/// After a field full of such values, of which tiles must hold none.
fn finite_but_in_windows(case: &Case) {
    let mut truth = case.truth();
    let hit = [0, 4, 17];
    for isa in Isa::available() {
        let x = std::mem::take(&mut truth.x);
        truth.x = vec![f64::NAN; x.len()];
        case.run::<f32>(isa, &truth);
        truth.x = x;
        truth.x[flat(hit, truth.cells)] = f64::NAN;
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

#[test]
fn few_tasks_are_divided_evenly() {
    use super::tile::balanced;
    // 3 tiles become 4, 9 become 12, and 1 of 2 tasks becomes 2.
    assert_eq!(balanced([1, 8, 180], [1, 23, 180], 1), [1, 6, 180]);
    assert_eq!(balanced([1, 8, 180], [1, 23, 180], 3), [1, 6, 180]);
    assert_eq!(balanced([1, 12, 90], [1, 12, 90], 2), [1, 6, 90]);
    // Many are left as they are, and so is a row.
    assert_eq!(balanced([1, 8, 360], [1, 181, 360], 1), [1, 8, 360]);
    assert_eq!(balanced([1, 1, 40], [1, 1, 120], 1), [1, 1, 40]);
}
