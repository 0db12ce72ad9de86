//! Weights in the order in which strips read them.

use halocline_core::tasks;
use pulp::Simd;

use super::job::{Job, SERIAL};
use super::strip::panels;
use crate::kernel::buffer::Buffer;
use crate::kernel::memory::Shared;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Channels whose weights a task packs for all outputs, in the order of memory if they are those of the gradient's outputs.
const RUN: usize = 32;

/// Packs `[group][block][panel][product][term][channel]`, for blocks of so many channels and rows of so many vectors. `factors`
/// gives the factor of every product for a group and output, the inputs that it holds, and a tap.
pub(super) fn pack<S: Simd, E: Element, P: Products<E>, const PRODUCTS: usize>(
    job: &Job<'_, E, P::Number>,
    [taps, block, vectors]: [usize; 3],
    factors: impl Fn([usize; 2], [Option<usize>; 2], usize) -> [E; PRODUCTS] + Sync,
) -> Buffer<E> {
    let held = job.inputs.div_ceil(P::NUMBERS);
    let len = job.groups * held * job.outputs * taps * PRODUCTS;
    let (blocks, runs) = (job.inputs.div_ceil(block), block.div_ceil(RUN));
    let fill = |packed: Shared<E>| {
        let panels: Vec<(usize, usize)> = panels::<S>(job.outputs, vectors).collect();
        let run = |index: usize| {
            let (rest, first) = (index / runs, index % runs * RUN);
            let (group, start) = (rest / blocks, rest % blocks * block);
            let block = start..job.inputs.min(start + block);
            let here = block.len().div_ceil(P::NUMBERS);
            let before = (group * held + start / P::NUMBERS) * job.outputs;
            let run = block.start + first..block.end.min(block.start + first + RUN);
            for input in run.step_by(P::NUMBERS) {
                let inputs =
                    [input, input + 1].map(|input| block.contains(&input).then_some(input));
                let terms = (input - block.start) / P::NUMBERS * taps;
                for (start, height) in &panels {
                    let mut place = (before + here * start) * taps * PRODUCTS + terms * height;
                    for tap in 0..taps {
                        for output in *start..start + height {
                            let factors = factors([group, output], inputs, tap);
                            for (product, factor) in factors.into_iter().enumerate() {
                                let place = place + product * here * taps * height;
                                // SAFETY: products are consecutive, and panels are, all below `len`.
                                unsafe { *packed.at(place) = factor };
                            }
                            place += 1;
                        }
                    }
                }
            }
        };
        let all = job.groups * blocks * runs;
        if len < SERIAL {
            (0..all).for_each(run);
        } else {
            tasks::for_each(all, 1, run);
        }
    };
    // SAFETY: the runs of all blocks and groups write every factor once.
    unsafe { Buffer::filled(len, fill) }
}
