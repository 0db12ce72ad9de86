//! Fourier and cosine transforms along one or more dims.

use halocline_core::{Error, Layout, Result, ShardTensor};

use super::line::{Frequencies, Line, Scale, Sign};
use super::local::along;

/// Placement of the factor `1/n` between a transform and its inverse, named as in PyTorch.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{FftNorm, SpectralField};
///
/// let mean = |norm| SpectralField::rfft::<2>(Tensor::<1>::from([1.0, 3.0]), &[0], norm);
/// let mean = mean(FftNorm::Forward).into_data();
/// mean.assert_eq(&[[2.0_f32, 0.0], [-1.0, 0.0]].into(), true);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FftNorm {
    /// On the inverse transform.
    #[default]
    Backward,
    /// `1/√n` on both.
    Ortho,
    /// On the forward transform.
    Forward,
}

/// Direction of a transform.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Forward,
    Inverse,
}

impl FftNorm {
    fn factor(self, way: Way, size: usize) -> f64 {
        let size = size as f64;
        match (self, way) {
            (Self::Backward, Way::Forward) | (Self::Forward, Way::Inverse) => 1.0,
            (Self::Ortho, _) => size.sqrt().recip(),
            _ => size.recip(),
        }
    }
}

/// Computes the Fourier transform of a real tensor, without the modes that follow by symmetry: the
/// last of `dims` keeps `n/2 + 1`. See the [module](super).
///
/// # Errors
/// Dims that do not exist, are repeated, or are empty; a sharded dim that must become whole when no
/// other dim can take its mesh axis.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::spectral::{FftNorm, rfft};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<3>::ones([4, 6, 9], &mesh, &[Shard(1)])?;
///     let y: ShardTensor<4> = rfft(x, &[1, 2], FftNorm::Backward)?;
///     // A transform makes its dim whole: the first dim takes the mesh axis.
///     assert_eq!((y.dims(), y.placements()), ([4, 6, 5, 2], &[Shard(0)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn rfft<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    norm: FftNorm,
) -> Result<ShardTensor<E>> {
    const NAME: &str = "rfft";
    const { assert!(E == D + 1, "rfft adds a dim of real and imaginary parts") };
    check_dims(NAME, &x.dims(), dims)?;
    let [others @ .., last] = dims else {
        unreachable!("checked")
    };
    let size = x.dims()[*last];
    let line = Line::ToModes {
        size,
        modes: size / 2 + 1,
        scale: Scale::uniform(norm.factor(Way::Forward, size)),
    };
    let y = along(x, *last, line, [&[], others], NAME)?;
    complex(y, others, &[], norm, Way::Forward, NAME)
}

/// Computes the inverse of [`rfft`]: a real tensor with `size` cells in the last of `dims`, which
/// must have `size/2 + 1` modes. Imaginary parts of modes that are real by symmetry are ignored, as
/// in PyTorch.
///
/// # Errors
/// The errors of [`rfft`]; a last dim that does not hold real and imaginary parts; another number
/// of modes.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{FftNorm, SpectralField};
///
/// let x = Tensor::<1>::from([1.0, 3.0, 5.0]);
/// let modes: Tensor<2> = SpectralField::rfft(x.clone(), &[0], FftNorm::Ortho);
/// let back: Tensor<1> = SpectralField::irfft(modes, &[0], 3, FftNorm::Ortho);
/// back.into_data().assert_approx_eq::<f32>(&x.into_data(), Default::default());
/// ```
pub fn irfft<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    size: usize,
    norm: FftNorm,
) -> Result<ShardTensor<E>> {
    const NAME: &str = "irfft";
    const {
        assert!(
            D == E + 1,
            "irfft takes the dim of real and imaginary parts away"
        )
    };
    check_complex(NAME, &x.dims(), dims)?;
    let [others @ .., last] = dims else {
        unreachable!("checked")
    };
    let modes = x.dims()[*last];
    if size == 0 || modes != size / 2 + 1 {
        let message = format!(
            "{modes} modes in dim {last} for {size} cells; expected {}: pad or slice the modes first",
            size / 2 + 1
        );
        return Err(Error::operator(NAME, message));
    }
    let x = complex(x, others, &[*last], norm, Way::Inverse, NAME)?;
    let scale = Scale::with_conjugates(norm.factor(Way::Inverse, size));
    let line = Line::FromModes { size, modes, scale };
    along(x, *last, line, [&[]; 2], NAME)
}

/// Computes the Fourier transform of a complex tensor, whose last dim holds real and imaginary
/// parts. See the [module](super).
///
/// # Errors
/// The errors of [`rfft`]; a last dim that does not hold real and imaginary parts.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{FftNorm, SpectralField};
///
/// let x = Tensor::<2>::from([[1.0, 0.0], [0.0, 1.0]]); // 1, i
/// let y = SpectralField::fft(x, &[0], FftNorm::Backward);
/// y.into_data().assert_eq(&[[1.0_f32, 1.0], [1.0, -1.0]].into(), true);
/// ```
pub fn fft<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    norm: FftNorm,
) -> Result<ShardTensor<D>> {
    check_complex("fft", &x.dims(), dims)?;
    complex(x, dims, &[], norm, Way::Forward, "fft")
}

/// Computes the inverse of [`fft`].
///
/// # Errors
/// The errors of [`fft`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{FftNorm, SpectralField};
///
/// let y = Tensor::<2>::from([[1.0, 1.0], [1.0, -1.0]]);
/// let x = SpectralField::ifft(y, &[0], FftNorm::Backward);
/// x.into_data().assert_eq(&[[1.0_f32, 0.0], [0.0, 1.0]].into(), true);
/// ```
pub fn ifft<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    norm: FftNorm,
) -> Result<ShardTensor<D>> {
    check_complex("ifft", &x.dims(), dims)?;
    complex(x, dims, &[], norm, Way::Inverse, "ifft")
}

/// Computes the type-II cosine transform, `y_k = 2 Σ_j x_j cos(πk(2j + 1)/2n)`, with SciPy's norms:
/// each is that of the Fourier transform of the even extension to `2n` cells; `Ortho` makes it
/// orthonormal.
///
/// # Errors
/// The errors of [`rfft`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{FftNorm, SpectralField};
///
/// let y = Tensor::<1>::from([1.0, 1.0]).dct(&[0], FftNorm::Backward);
/// assert!((y.into_data().iter::<f32>().sum::<f32>() - 4.0).abs() < 1e-6);
/// ```
pub fn dct<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    norm: FftNorm,
) -> Result<ShardTensor<D>> {
    cosine(x, dims, norm, Way::Forward, "dct")
}

/// Computes the inverse of [`dct`]: the scaled type-III cosine transform.
///
/// # Errors
/// The errors of [`rfft`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{FftNorm, SpectralField};
///
/// let x = Tensor::<1>::from([1.0, 3.0, 4.0]);
/// let y = x.clone().dct(&[0], FftNorm::Ortho).idct(&[0], FftNorm::Ortho);
/// y.into_data().assert_approx_eq::<f32>(&x.into_data(), Default::default());
/// ```
pub fn idct<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    norm: FftNorm,
) -> Result<ShardTensor<D>> {
    cosine(x, dims, norm, Way::Inverse, "idct")
}

/// Applies complex transforms along `dims`, ahead of other transforms along the dims `after`.
fn complex<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    after: &[usize],
    norm: FftNorm,
    way: Way,
    operator: &'static str,
) -> Result<ShardTensor<D>> {
    let sign = match way {
        Way::Forward => Sign::Minus,
        Way::Inverse => Sign::Plus,
    };
    each(x, dims, after, |x, dim, pending| {
        let size = x.dims()[dim];
        let line = Line::ToFrequencies(Frequencies {
            size,
            low: size,
            high: 0,
            sign,
            scale: norm.factor(way, size),
        });
        along(x, dim, line, [&[], pending], operator)
    })
}

fn cosine<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    norm: FftNorm,
    way: Way,
    operator: &'static str,
) -> Result<ShardTensor<D>> {
    check_dims(operator, &x.dims(), dims)?;
    each(x, dims, &[], |x, dim, pending| {
        let size = x.dims()[dim];
        let n = size as f64;
        let [edge, interior] = match norm {
            FftNorm::Backward => [2.0, 2.0],
            FftNorm::Ortho => [n.recip().sqrt(), (2.0 / n).sqrt()],
            FftNorm::Forward => [n.recip(); 2],
        };
        let line = match way {
            Way::Forward => Line::ToCosines {
                size,
                scale: Scale { edge, interior },
            },
            Way::Inverse => Line::FromCosines {
                size,
                scale: Scale {
                    edge: (n * edge).recip(),
                    interior: 2.0 / (n * interior),
                },
            },
        };
        along(x, dim, line, [&[], pending], operator)
    })
}

/// Applies a transform along each dim, whole dims first and sharded ones next. Passes it the dims
/// that follow, which end with `after`.
pub(super) fn each<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    after: &[usize],
    transform: impl Fn(ShardTensor<D>, usize, &[usize]) -> Result<ShardTensor<D>>,
) -> Result<ShardTensor<D>> {
    let layout = x.layout().clone();
    each_from(&layout, x, dims, after, transform)
}

/// [`each`] for a tensor of this layout, or for the layout itself.
pub(super) fn each_from<X>(
    layout: &Layout,
    x: X,
    dims: &[usize],
    after: &[usize],
    transform: impl Fn(X, usize, &[usize]) -> Result<X>,
) -> Result<X> {
    let mut order = dims.to_vec();
    order.sort_by_key(|dim| layout.is_sharded(*dim));
    let mut pending = [&order[..], after].concat();
    let mut y = x;
    for dim in order {
        pending.remove(0);
        y = transform(y, dim, &pending)?;
    }
    Ok(y)
}

/// Checks that the dims exist, are not repeated and are not empty.
pub(super) fn check_dims(operator: &str, shape: &[usize], dims: &[usize]) -> Result<()> {
    let wrong = |(place, dim): (usize, &usize)| *dim >= shape.len() || dims[..place].contains(dim);
    if dims.is_empty() || dims.iter().enumerate().any(wrong) {
        let message = format!(
            "dims {dims:?} of {} that can be transformed; expected one or more, each once",
            shape.len()
        );
        return Err(Error::operator(operator, message));
    }
    if let Some(dim) = dims.iter().find(|dim| shape[**dim] == 0) {
        let message = format!("dim {dim} of {shape:?} has no cells; expected one or more");
        return Err(Error::operator(operator, message));
    }
    Ok(())
}

/// Checks that the last dim holds real and imaginary parts, and that other dims can be transformed.
pub(super) fn check_complex(operator: &str, shape: &[usize], dims: &[usize]) -> Result<()> {
    match shape {
        [cells @ .., 2] => check_dims(operator, cells, dims),
        _ => {
            let message = format!(
                "{shape:?}; expected a last dim of 2, for real and imaginary parts: stack them"
            );
            Err(Error::operator(operator, message))
        }
    }
}
