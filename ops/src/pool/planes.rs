//! Pooling by planes.

use burn::tensor::Tensor;

use super::slide::Slide;
use crate::driver::strides::in_row_major;
use crate::retype;

/// Pools by planes: in three dims over the last two, and then over the first, which gives the same
/// maximum, mean or norm.
pub(super) fn by_planes<const D: usize>(
    x: Tensor<D>,
    slides: &[Slide],
    pool: impl Fn(Tensor<4>, [Slide; 2]) -> Tensor<4>,
) -> Tensor<D> {
    let one = Slide::new(1, 1);
    let dims = x.dims();
    let pool = |x, slides| in_row_major(pool(in_row_major(x), slides));
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
