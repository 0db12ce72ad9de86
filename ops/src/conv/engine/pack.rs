//! Weights in the order in which strips read them.

use pulp::Simd;

use super::job::Job;
use super::strip::panels;
use crate::kernel::buffer::Buffer;
use crate::kernel::memory::Shared;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;
use crate::kernel::work::deal;

/// Input channels of a task, which packs their weights for all outputs: in an input gradient they
/// are the outer dim of the weights, so that these are read in order.
const RUN: usize = 32;

/// Packs `[group][block][panel][product][term][channel]`, for blocks of `block` channels and rows
/// of `vectors` vectors. `factors` returns the factor of every product for a group and output, the
/// inputs that it holds, and a tap.
pub(super) fn pack<S: Simd, E: Element, P: Products<E>, const PRODUCTS: usize>(
    job: &Job<'_, E, P::Number>,
    [taps, block, vectors]: [usize; 3],
    factors: impl Fn([usize; 2], [Option<usize>; 2], usize) -> [E; PRODUCTS] + Sync,
) -> Buffer<E> {
    const { assert!(RUN.is_multiple_of(P::NUMBERS)) };
    let held = job.inputs.div_ceil(P::NUMBERS);
    let len = job.groups * held * job.outputs * taps * PRODUCTS;
    let (blocks, runs) = (job.inputs.div_ceil(block), block.div_ceil(RUN));
    let fill = |packed: Shared<E>| {
        let panels: Vec<(usize, usize)> = panels::<S>(job.outputs, vectors).collect();
        let pack = |index: usize| {
            let (rest, run) = (index / runs, index % runs);
            let (group, start) = (rest / blocks, rest % blocks * block);
            let of_block = start..job.inputs.min(start + block);
            let here = of_block.len().div_ceil(P::NUMBERS);
            let before = (group * held + start / P::NUMBERS) * job.outputs;
            let of_run = start + run * RUN..of_block.end.min(start + (run + 1) * RUN);
            for input in of_run.step_by(P::NUMBERS) {
                let inputs =
                    [input, input + 1].map(|input| of_block.contains(&input).then_some(input));
                let terms = (input - start) / P::NUMBERS * taps;
                for (first, height) in &panels {
                    let mut place = (before + here * first) * taps * PRODUCTS + terms * height;
                    for tap in 0..taps {
                        for output in *first..first + height {
                            let factors = factors([group, output], inputs, tap);
                            for (product, factor) in factors.into_iter().enumerate() {
                                let place = place + product * here * taps * height;
                                // SAFETY: products are consecutive, and so are panels, all below
                                // `len`.
                                unsafe { *packed.at(place) = factor };
                            }
                            place += 1;
                        }
                    }
                }
            }
        };
        deal(job.groups * blocks * runs, len, pack);
    };
    // SAFETY: the runs of all blocks and groups write every factor once.
    unsafe { Buffer::filled(len, fill) }
}
