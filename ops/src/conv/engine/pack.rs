//! Weights in the order in which strips read them.

use halocline_core::tasks;
use pulp::Simd;

use super::job::{Job, SERIAL};
use super::strip::panels;
use crate::kernel::buffer::Buffer;
use crate::kernel::memory::Shared;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Packs `[group][block][panel][product][term][channel]`, for blocks of so many channels and rows of so many vectors. `factors`
/// gives the factor of every product for a group and output, the inputs that it holds, and a tap.
pub(super) fn pack<S: Simd, E: Element, P: Products<E>, const PRODUCTS: usize>(
    job: &Job<'_, E, P::Number>,
    [taps, block, vectors]: [usize; 3],
    factors: impl Fn([usize; 2], [Option<usize>; 2], usize) -> [E; PRODUCTS] + Sync,
) -> Buffer<E> {
    let held = job.inputs.div_ceil(P::NUMBERS);
    let len = job.groups * held * job.outputs * taps * PRODUCTS;
    let fill = |packed: Shared<E>| {
        let panels: Vec<(usize, usize)> = panels::<S>(job.outputs, vectors).collect();
        let blocks = job.inputs.div_ceil(block);
        let panel = |index: usize| {
            let (rest, (start, height)) = (index / panels.len(), panels[index % panels.len()]);
            let (group, first) = (rest / blocks, rest % blocks * block);
            let inputs = first..job.inputs.min(first + block);
            let here = inputs.len().div_ceil(P::NUMBERS);
            let before = (group * held + first / P::NUMBERS) * job.outputs + here * start;
            let (mut place, of_product) = (before * taps * PRODUCTS, here * taps * height);
            for input in inputs.clone().step_by(P::NUMBERS) {
                let inputs =
                    [input, input + 1].map(|input| inputs.contains(&input).then_some(input));
                for tap in 0..taps {
                    for output in start..start + height {
                        let factors = factors([group, output], inputs, tap);
                        for (product, factor) in factors.into_iter().enumerate() {
                            // SAFETY: products are consecutive, and panels are, all below `len`.
                            unsafe { *packed.at(place + product * of_product) = factor };
                        }
                        place += 1;
                    }
                }
            }
        };
        let all = job.groups * blocks * panels.len();
        if len < SERIAL {
            (0..all).for_each(panel);
        } else {
            tasks::for_each(all, 1, panel);
        }
    };
    // SAFETY: the panels of all blocks and groups write every factor once.
    unsafe { Buffer::filled(len, fill) }
}
