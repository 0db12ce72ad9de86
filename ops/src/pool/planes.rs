//! Pooling of planes, the last two dims.

use burn::tensor::Tensor;
use halocline_core::{IndexBox, Result, ShardTensor};

use super::node::{Windows, run};
use super::slide::Slide;
use crate::driver::strides::in_row_major;
use crate::driver::{Stencil, StencilPlan};
use crate::kernel::flex;
use crate::retype;

/// Pools the cells that a stencil's windows cover. `slides` returns the windows along each dim for
/// a box of outputs; `finish` receives the result and the box.
///
/// Three-dimensional pooling runs over the last two dims and then over the first, which yields the
/// same maximum, mean or norm.
pub(super) fn by_planes<const D: usize, W: Windows>(
    stencil: &Stencil,
    plan: &StencilPlan,
    x: ShardTensor<D>,
    slides: impl Fn(&IndexBox) -> Vec<Slide>,
    windows: W,
    finish: impl Fn(Tensor<D>, &IndexBox) -> Tensor<D>,
) -> Result<ShardTensor<D>> {
    if flex::runs_on(&x.device()) && D < 5 {
        return stencil.run_unassembled(x, plan, |x, exchange, outputs| {
            let slides = match slides(outputs)[..] {
                [width] => [Slide::new(1, 1), width],
                [height, width] => [height, width],
                _ => unreachable!("one or two spatial dims"),
            };
            finish(run(windows, slides, x, exchange), outputs)
        });
    }
    stencil.run_planned(x, plan, |x, outputs| {
        finish(assembled(x, &slides(outputs), windows), outputs)
    })
}

fn assembled<const D: usize, W: Windows>(x: Tensor<D>, slides: &[Slide], windows: W) -> Tensor<D> {
    let one = Slide::new(1, 1);
    let dims = x.dims();
    let pool = |x, slides| in_row_major(run::<4>(windows, slides, in_row_major(x), None));
    match *slides {
        [width] => {
            let plane = x.reshape([dims[0], dims[1], 1, dims[2]]);
            let y = pool(plane, [one, width]);
            let [batch, channels, _, width] = y.dims();
            retype(y.reshape([batch, channels, width]))
        }
        [height, width] => retype(pool(retype(x), [height, width])),
        [depth, height, width] => {
            let planes = x.reshape([dims[0], dims[1] * dims[2], dims[3], dims[4]]);
            let planes = pool(planes, [height, width]);
            let [_, _, rows, columns] = planes.dims();
            let lines = planes.reshape([dims[0], dims[1], dims[2], rows * columns]);
            let y = pool(lines, [depth, one]);
            let layers = y.dims()[2];
            retype(y.reshape([dims[0], dims[1], layers, rows, columns]))
        }
        _ => unreachable!("a stencil of {} dims has been refused", slides.len()),
    }
}
