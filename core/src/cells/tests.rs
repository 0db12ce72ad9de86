use burn::tensor::{Device, Tensor};

use super::*;
use crate::dispatch::{cast, cut, flipped};

fn cells(ranges: [std::ops::Range<usize>; 3]) -> IndexBox {
    IndexBox::new(ranges.to_vec())
}

fn numbers(shape: [usize; 3]) -> Tensor<3> {
    let count = shape.iter().product::<usize>() as i64;
    let numbers = Tensor::<1, burn::tensor::Int>::arange(0..count, &Device::flex());
    numbers.float().reshape(shape)
}

#[test]
fn boxes_of_views_are_written_to_their_places() {
    let x = numbers([2, 3, 5]);
    let dispatch = x.clone().into_dispatch();
    let low = cut(&dispatch, &cells([0..2, 0..3, 0..2]));
    let turned = flipped(
        cut(&dispatch, &cells([0..2, 1..3, 2..5])),
        &[true, false, true],
    );
    let across = x.clone().permute([0, 2, 1]).into_dispatch();
    let boxes = [
        (cells([0..2, 0..3, 1..3]), low),
        (cells([0..2, 0..2, 3..6]), turned),
        (cells([0..2, 3..8, 0..3]), across),
    ];
    let y = assembled(&dispatch, &[2, 8, 6], Some(-1.0), &boxes).unwrap();
    let y = Tensor::<3>::from_dispatch(y);
    let expected = Tensor::<3>::full([2, 8, 6], -1.0, &Device::flex())
        .slice_assign([0..2, 0..3, 1..3], x.clone().narrow(2, 0, 2))
        .slice_assign(
            [0..2, 0..2, 3..6],
            x.clone().slice([0..2, 1..3, 2..5]).flip([0, 2]),
        )
        .slice_assign([0..2, 3..8, 0..3], x.permute([0, 2, 1]));
    y.into_data().assert_eq(&expected.into_data(), true);
}

#[test]
fn large_boxes_are_written_by_all_threads() {
    let x = numbers([3, 200, 150]);
    let dispatch = x.clone().into_dispatch();
    let across = x.clone().permute([0, 2, 1]);
    let column = x.clone().narrow(2, 7, 1);
    let boxes = [
        (cells([0..3, 0..200, 1..151]), dispatch.clone()),
        (
            cells([0..3, 0..0, 0..9]),
            Tensor::<3>::zeros([3, 0, 9], &Device::flex()).into_dispatch(),
        ),
        (
            cells([0..3, 200..350, 0..200]),
            across.clone().into_dispatch(),
        ),
        (cells([0..3, 0..200, 0..1]), column.clone().into_dispatch()),
    ];
    let y = Tensor::<3>::from_dispatch(of_boxes(&dispatch, &[3, 350, 200], Some(-1.0), &boxes));
    let expected = Tensor::<3>::full([3, 350, 200], -1.0, &Device::flex())
        .slice_assign([0..3, 0..200, 1..151], x)
        .slice_assign([0..3, 200..350, 0..200], across)
        .slice_assign([0..3, 0..200, 0..1], column);
    y.into_data().assert_eq(&expected.into_data(), true);
}

#[test]
fn short_runs_are_written_together() {
    for (run, channels) in [(2, 20), (3, 20), (4, 5), (8, 300)] {
        let x = numbers([70, channels * 2, run]);
        let x = x
            .reshape([7, 10, channels, 2, run])
            .permute([0, 2, 3, 1, 4]);
        let y = Tensor::<5>::from_dispatch(in_order(x.clone().into_dispatch()));
        y.into_data().assert_eq(&x.into_data(), true);
    }
}

#[test]
fn a_long_dim_of_close_cells_is_written_in_lines() {
    let x = numbers([40, 300, 3]).permute([2, 1, 0]);
    let y = Tensor::<3>::from_dispatch(in_order(x.clone().into_dispatch()));
    y.into_data().assert_eq(&x.into_data(), true);
}

#[test]
fn boxes_may_be_many_and_cover_all() {
    let x = numbers([100, 2, 3]);
    let dispatch = x.clone().into_dispatch();
    let part = |row: usize| {
        (
            cells([row..row + 1, 0..2, 0..3]),
            x.clone().narrow(0, row, 1).into_dispatch(),
        )
    };
    let boxes: Vec<_> = (0..100).map(part).collect();
    let y = Tensor::<3>::from_dispatch(of_boxes(&dispatch, &[100, 2, 3], Some(-1.0), &boxes));
    y.into_data().assert_eq(&x.into_data(), true);
}

#[test]
#[should_panic(expected = "of [4, 0]")]
fn boxes_have_the_dims_of_the_result() {
    let x = Tensor::<1>::zeros([2], &Device::flex()).into_dispatch();
    let place = IndexBox::whole(&[2]);
    of_boxes(&x, &[4, 0], None, &[(place, x.clone())]);
}

#[test]
fn sums_of_boxes_that_overlap_and_of_those_that_do_not() {
    let x = numbers([2, 3, 4]);
    let dispatch = x.clone().into_dispatch();
    let whole = cells([0..2, 0..3, 0..4]);
    let part = cut(&dispatch, &cells([0..1, 0..3, 1..3]));
    let boxes = [
        (whole.clone(), dispatch.clone()),
        (cells([1..2, 0..3, 2..4]), part),
    ];
    let sum = |boxes: &[_]| {
        let sum = summed(&dispatch, &[2, 3, 4], boxes).unwrap();
        Tensor::<3>::from_dispatch(sum).into_data()
    };
    sum(&boxes[..1]).assert_eq(&x.clone().into_data(), true);
    let added = x.clone().slice([1..2, 0..3, 2..4]) + x.clone().slice([0..1, 0..3, 1..3]);
    sum(&boxes).assert_eq(&x.slice_assign([1..2, 0..3, 2..4], added).into_data(), true);
    let half = cast(dispatch.clone(), DType::F16);
    assert!(summed(&half, &[2, 3, 4], &[]).is_none());
}
