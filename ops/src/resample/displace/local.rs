//! Sampling within the cells of one rank by burn's operators, for devices without our kernels.

use burn::tensor::{Int, Tensor, TensorData};

use super::options::{OutOfBounds, SampleOptions};
use crate::resample::rules::Mode;
use crate::reshape;

/// Parameter `a` of Keys' cubic convolution kernel (1981), as in PyTorch.
pub(super) const KEYS: f64 = -0.75;

/// Samples values at displaced points. `cells` are the cells of `points`, surrounded by the
/// [reach](SampleOptions::reach) of the options; the first of `points` is cell `first` of the
/// field.
pub(super) fn sampled<const D: usize, const N: usize>(
    cells: Tensor<D>,
    points: Tensor<D>,
    options: &SampleOptions<N>,
    first: [usize; N],
) -> Tensor<D> {
    let (held, mut shape) = (cells.dims(), points.dims());
    let [batch, channels] = [held[0], held[1]];
    let outputs: usize = shape[2..].iter().product();
    let inputs: usize = held[2..].iter().product();
    let stride = |dim: usize| held[dim + 3..].iter().product::<usize>() as i64;
    let device = points.device();
    let points = reshape::<D, 3>(points, vec![batch, N, outputs]);
    let places = TensorData::new(own_places(&held, &shape, options), [1, 1, outputs]);
    let mut base = Tensor::<3, Int>::from_data(places, &device);
    let mut taps = Vec::new();
    for (dim, first) in first.into_iter().enumerate() {
        let point = points.clone().narrow(1, dim, 1); // [batch, 1, outputs]
        let point = match options.beyond {
            OutOfBounds::Fail => point,
            OutOfBounds::Clamp => {
                let bound = options.bound[dim] as f64;
                point.clamp(-bound, bound)
            }
        };
        let plain = point.clone().detach();
        let whole = match options.mode {
            Mode::Nearest => {
                // Ties round to the even cell of the field.
                let odd = odd_cells(&shape, dim, first);
                let odd = TensorData::new(odd, [1, 1, outputs]);
                let odd = Tensor::<3>::from_data(odd, (&device, plain.dtype()));
                (plain + odd.clone()).round() - odd
            }
            _ => plain.floor(),
        };
        base = base + whole.clone().int().mul_scalar(stride(dim));
        taps.push(weights(options.mode, &(point - whole), stride(dim)));
    }
    let field = reshape::<D, 3>(cells, vec![batch, channels, inputs]);
    let counts: Vec<usize> = taps.iter().map(Vec::len).collect();
    let terms = (0..counts.iter().product()).map(|choice: usize| {
        let (mut rest, mut offset) = (choice, 0);
        let mut factors = Vec::with_capacity(N);
        for (taps, count) in taps.iter().zip(&counts) {
            let (tap, factor) = &taps[rest % count];
            rest /= count;
            offset += tap;
            factors.push(factor.clone());
        }
        let places = base.clone().add_scalar(offset);
        let values = field
            .clone()
            .gather(2, places.expand([batch, channels, outputs]));
        let weight = factors
            .into_iter()
            .reduce(|product, factor| product * factor);
        values * weight.expect("a weight in every dim")
    });
    let y = terms.reduce(|sum, term| sum + term).expect("a tap");
    shape[1] = channels;
    reshape(y, shape.to_vec())
}

/// Index of every cell of a shard among the held cells, halo included.
fn own_places<const N: usize>(
    held: &[usize],
    shape: &[usize],
    options: &SampleOptions<N>,
) -> Vec<i64> {
    let mut places = vec![0_i64];
    for dim in 0..N {
        let [low, _] = options.reach(dim);
        let along = low..low + shape[dim + 2];
        let next = |place: &i64| {
            let start = place * held[dim + 2] as i64;
            along.clone().map(move |cell| start + cell as i64)
        };
        places = places.iter().flat_map(next).collect();
    }
    places
}

/// Returns 1 for every cell of a shard whose global index in a dim is odd, else 0.
fn odd_cells(shape: &[usize], dim: usize, first: usize) -> Vec<f32> {
    let inner: usize = shape[dim + 3..].iter().product();
    let outputs: usize = shape[2..].iter().product();
    let odd = |output: usize| (first + output / inner % shape[dim + 2]) % 2;
    (0..outputs).map(|output| odd(output) as f32).collect()
}

/// Taps of a value in one dim: memory offsets from the cell below, and weights.
fn weights(mode: Mode, fraction: &Tensor<3>, stride: i64) -> Vec<(i64, Tensor<3>)> {
    let fraction = || fraction.clone();
    let rest = || -fraction() + 1.0;
    match mode {
        Mode::Linear => vec![(0, rest()), (stride, fraction())],
        Mode::Cubic => vec![
            (-stride, far(fraction() + 1.0)),
            (0, near(fraction())),
            (stride, near(rest())),
            (2 * stride, far(rest() + 1.0)),
        ],
        // A weight of 1 with a gradient of zero, and NaN where the displacement is.
        _ => vec![(0, fraction() * 0.0 + 1.0)],
    }
}

/// Keys' kernel at a distance below 1.
fn near(t: Tensor<3>) -> Tensor<3> {
    (t.clone() * (KEYS + 2.0) - (KEYS + 3.0)) * t.clone() * t + 1.0
}

/// Keys' kernel at a distance from 1 to 2.
fn far(t: Tensor<3>) -> Tensor<3> {
    ((t.clone() * KEYS - 5.0 * KEYS) * t.clone() + 8.0 * KEYS) * t - 4.0 * KEYS
}
