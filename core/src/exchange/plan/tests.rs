//! Tests of the plans of all ranks against brute force.

use super::*;
use crate::Layout;
use crate::mesh::{ravel, unravel};
use crate::region::segments;
use crate::{Boundary, MeshShape, Placement, Replicate, Shard};
use proptest::prelude::*;
use std::sync::Arc;

/// All cells of a box, as flat indices of an array of `shape`.
fn cells(part: &IndexBox, shape: &[usize]) -> Vec<usize> {
    flipped(part, &vec![false; shape.len()], shape)
}

/// The same, in reverse order in some dims.
fn flipped(part: &IndexBox, flip: &[bool], shape: &[usize]) -> Vec<usize> {
    let sizes = part.shape();
    (0..part.volume())
        .map(|index| {
            let offsets = unravel(index, &sizes);
            let place: Vec<usize> = (0..sizes.len())
                .map(|d| {
                    let range = &part.ranges()[d];
                    if flip[d] {
                        range.end - 1 - offsets[d]
                    } else {
                        range.start + offsets[d]
                    }
                })
                .collect();
            ravel(&place, shape)
        })
        .collect()
}

/// Runs the plans of all ranks over the field `0, 1, 2, …` and returns the cells that each rank
/// assembles (-1 = fill).
fn simulate(layout: &Layout, need_of: &dyn Fn(usize) -> Need) -> Vec<Vec<i64>> {
    let size = layout.mesh().size();
    let plan = |p| ExchangePlan::new(Source::Layout(layout), p, size, need_of);
    let assembled = assemble((0..size).map(plan).collect(), layout);
    let looped = |p| plan(p).through_loopback(p);
    assert_eq!(assembled, assemble((0..size).map(looped).collect(), layout));
    assembled
}

/// Returns the cells that each rank assembles according to its plan.
fn assemble(plans: Vec<ExchangePlan>, layout: &Layout) -> Vec<Vec<i64>> {
    let size = plans.len();
    let shards: Vec<Vec<i64>> = (0..size)
        .map(|p| {
            let held = cells(&layout.local_box(p), layout.shape());
            held.into_iter().map(|c| c as i64).collect()
        })
        .collect();
    (0..size)
        .map(|p| {
            let plan = &plans[p];
            let mut out = vec![-1; plan.output_shape.iter().product()];
            let mut put = |owner: usize, transfer: &Transfer| {
                let from = flipped(&transfer.src, &transfer.flip, &plans[owner].source_shape);
                let to = cells(&transfer.dst, &plan.output_shape);
                for (from, to) in from.into_iter().zip(to) {
                    assert_eq!(out[to], -1, "a cell is written twice");
                    out[to] = shards[owner][from];
                }
            };
            plan.copies.iter().for_each(|copy| put(p, copy));
            for (owner, transfers) in &plan.receives {
                let sent = plans[*owner].sends.iter().find(|(peer, _)| *peer == p);
                assert_eq!(
                    sent.map(|(_, t)| t),
                    Some(transfers),
                    "send and receive differ"
                );
                transfers.iter().for_each(|t| put(*owner, t));
            }
            out
        })
        .collect()
}

fn boundary() -> impl Strategy<Value = Boundary> {
    prop_oneof![
        Just(Boundary::Zeros),
        Just(Boundary::Periodic),
        Just(Boundary::Reflect),
        Just(Boundary::Replicate)
    ]
}

#[derive(Clone, Debug)]
struct Case {
    layout: Layout,
    pads: Vec<(isize, isize, Boundary)>,
}

/// A layout of 1 to 3 dims over 1 to 3 axes with random extents, and a halo for every dim.
fn case() -> impl Strategy<Value = Case> {
    (1..=3_usize, 1..=3_usize).prop_flat_map(|(dims, axes)| {
        let sizes = prop::collection::vec(1..=3_usize, axes);
        let placements = prop::collection::vec(prop::option::of(0..dims), axes);
        let extents = prop::collection::vec(prop::collection::vec(0..4_usize, 27), dims);
        let pads = prop::collection::vec((0..9_isize, 0..9_isize, boundary()), dims);
        (sizes, placements, extents, pads).prop_map(move |(sizes, placements, extents, pads)| {
            let names = ["a", "b", "c"];
            let axes: Vec<(&str, usize)> = names.iter().copied().zip(sizes.clone()).collect();
            let ranks = (0..sizes.iter().product()).collect();
            let mesh = Arc::new(MeshShape::new(&axes, ranks).unwrap());
            let placements: Vec<Placement> = placements
                .iter()
                .map(|dim| dim.map_or(Replicate, Shard))
                .collect();
            let blank = Layout::new(&mesh, &vec![0; dims], &placements).unwrap();
            let extents = (0..dims)
                .map(|dim| extents[dim][..blank.extents(dim).len()].to_vec())
                .collect();
            Case {
                layout: blank.derive(placements, extents),
                pads,
            }
        })
    })
}

proptest! {
    #[test]
    fn every_rank_assembles_what_brute_force_says(case in case()) {
        let Case { layout, pads } = case;
        let need_of = |position: usize| {
            let held = layout.local_box(position);
            let ranges: Vec<_> = held.ranges().iter().zip(&pads).map(|(range, (low, high, _))| {
                range.start as isize - low..range.end as isize + high
            }).collect();
            let dims: Vec<_> = ranges.iter().zip(&pads).enumerate().map(|(dim, (range, (_, _, b)))| {
                segments(range.clone(), layout.shape()[dim], *b, *b)
            }).collect();
            Need::product(ranges.iter().map(|r| r.len()).collect(), &dims)
        };
        for (position, out) in simulate(&layout, &need_of).into_iter().enumerate() {
            let held = layout.local_box(position);
            let shape = need_of(position).shape;
            for (index, value) in out.into_iter().enumerate() {
                let place: Option<Vec<usize>> = unravel(index, &shape).into_iter().enumerate().map(|(dim, i)| {
                    let global = held.ranges()[dim].start as isize - pads[dim].0 + i as isize;
                    pads[dim].2.source(global, layout.shape()[dim])
                }).collect();
                let expected = place.map_or(-1, |place| ravel(&place, layout.shape()) as i64);
                prop_assert_eq!(value, expected);
            }
        }
    }

    #[test]
    fn any_layout_is_made_from_any_other(from in case(), keep in prop::collection::vec(any::<u32>(), 3)) {
        let from = from.layout;
        let dims = from.shape().len();
        let placements: Vec<Placement> = from.placements().iter().zip(keep).map(|(_, k)| {
            if k as usize % (dims + 1) == dims { Replicate } else { Shard(k as usize % (dims + 1)) }
        }).collect();
        let to = Layout::new(from.mesh(), from.shape(), &placements).unwrap();
        let assembled = simulate(&from, &|position| Need::of(to.local_box(position)));
        for (position, out) in assembled.into_iter().enumerate() {
            let expected: Vec<i64> =
                cells(&to.local_box(position), to.shape()).into_iter().map(|c| c as i64).collect();
            prop_assert_eq!(out, expected);
        }
    }
}

#[test]
fn a_plan_prints_its_boxes_and_bytes() {
    let mesh = Arc::new(MeshShape::new(&[("lat", 2)], vec![0, 1]).unwrap());
    let layout = Layout::new(&mesh, &[4, 3], &[Shard(0)]).unwrap();
    let plan = ExchangePlan::new(Source::Layout(&layout), 0, 2, |position| {
        let held = layout.local_box(position).ranges()[0].clone();
        let rows = segments(
            held.start as isize - 1..held.end as isize + 1,
            4,
            Boundary::Zeros,
            Boundary::Zeros,
        );
        let columns = segments(0..3, 3, Boundary::Zeros, Boundary::Zeros);
        Need::product(vec![4, 3], &[rows, columns])
    });
    assert_eq!(
        plan.to_string(),
        "exchange [2, 3] → [4, 3]\n\
         \x20 copy         [0..2, 0..3] → [1..3, 0..3]\n\
         \x20 send to    1 [1..2, 0..3] (12 B)\n\
         \x20 receive    1 [3..4, 0..3] (12 B)\n\
         \x20 sends 12 B, receives 12 B in f32"
    );
    assert_eq!(
        plan.reversed().to_string(),
        "exchange [4, 3] → [2, 3]\n\
         \x20 copy         [1..3, 0..3] → [0..2, 0..3]\n\
         \x20 send to    1 [3..4, 0..3] (12 B)\n\
         \x20 receive    1 [1..2, 0..3] (12 B)\n\
         \x20 sends 12 B, receives 12 B in f32"
    );
}
