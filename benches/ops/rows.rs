//! Operators, the shapes of their inputs, and their targets.

use std::cell::RefCell;
use std::sync::{LazyLock, OnceLock};

use burn::tensor::Int;
use halocline::core::{OrRaise, RandomKey};
use halocline::ops::graph::{Aggregate, EdgeShards, Graph};
use halocline::ops::norm::batch_norm_train;
use halocline::ops::prelude::*;
use halocline::ops::resample::{
    Antialias, Corners, Interpolation, Mode, OutOfBounds, SampleOptions,
};
use halocline::prelude::{Boundary, Result, ShardTensor, Tensor};

/// Function that runs an operator on its first input and the others.
type Run<X> = fn(X, Vec<X>) -> X;

pub(crate) struct Row {
    /// Name, also known to PyTorch's side.
    pub(crate) name: &'static str,
    pub(crate) shapes: &'static [[usize; 4]],
    pub(crate) target: Target,
    pub(crate) whole: Run<Tensor<4>>,
    pub(crate) sharded: Run<ShardTensor<4>>,
}

/// Target of an operator on one rank.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    /// Minimum of PyTorch's time relative to ours.
    pub(crate) speed_up: f64,
    /// Maximum of our time relative to copying the same memory.
    pub(crate) memory: Option<f64>,
}

const ANY: Target = Target {
    speed_up: 0.8,
    memory: None,
};
/// Norms, activations, pooling and interpolation, which are memory-bound.
const MEMORY: Target = Target {
    speed_up: 0.8,
    memory: Some(1.3),
};
const TRANSPOSED: Target = Target {
    speed_up: 1.5,
    memory: None,
};
const FOURIER: Target = Target {
    speed_up: 1.0 / 1.5,
    memory: None,
};
const HARMONIC: Target = Target {
    speed_up: 1.5,
    memory: None,
};

/// `[batch, channels, rows, columns]` of most rows.
const FIELD: [usize; 4] = [1, 4, 512, 512];
const CHANNELS: [usize; 4] = [1, 16, 256, 256];
/// Field on the sphere, and its harmonics, with real and imaginary parts side by side.
const SPHERE: [usize; 4] = [1, 1, 721, 1440];
const HARMONICS: [usize; 4] = [1, 1, DEGREES, 2 * DEGREES];
const DEGREES: usize = 361;
const VECTORS: [usize; 4] = [1, 2, 361, 720];
const VECTOR_HARMONICS: [usize; 4] = [1, 2, 181, 2 * 181];
const COARSE: [usize; 4] = [1, 32, 91, 180];
const CELLS: [usize; 4] = [1, 1, 65536, 16];
/// A million edges.
const MANY_CELLS: [usize; 4] = [1, 1, 166_912, 64];

/// Windows of three cells around every second one.
fn window() -> PoolOptions<2> {
    let around = PoolOptions::new([3, 3]).with_stride([2, 2]);
    around.with_padding([Padding::zeros(1, 1); 2])
}

fn around() -> ConvOptions<2> {
    ConvOptions::default().with_padding([Padding::zeros(1, 1); 2])
}

fn number<X: Field<4>>(loss: Result<WithDims<X, 1>>) -> X {
    ShapeField::reshape(loss.or_raise().resolve(), [1, 1, 1, 1])
}

/// Puts real and imaginary parts, which are the last dim, side by side.
fn parts<X: Field<4>>(y: WithDims<X, 5>) -> X {
    let [batch, channels, rows, columns, _] = y.dims();
    ShapeField::reshape(y, [batch, channels, rows, 2 * columns])
}

fn complex<X: Field<4>>(x: X) -> WithDims<X, 5> {
    let [batch, channels, rows, columns] = x.dims();
    ShapeField::reshape(x, [batch, channels, rows, columns / 2, 2])
}

static SHT: LazyLock<Sht> = LazyLock::new(|| transform([SPHERE[2], SPHERE[3]]));
static VECTOR_SHT: LazyLock<Sht> = LazyLock::new(|| transform([VECTORS[2], VECTORS[3]]));

fn transform(size: [usize; 2]) -> Sht {
    Sht::new(size, SphereGrid::Equiangular).expect("a grid")
}

static NEAR: LazyLock<GeodesicNeighborhood> = LazyLock::new(|| {
    let size = [COARSE[2], COARSE[3]];
    GeodesicNeighborhood::new(size, SphereGrid::Equiangular, None).expect("a grid")
});

static DISCO: LazyLock<Disco> = LazyLock::new(|| {
    let size = [COARSE[2], COARSE[3]];
    Disco::new(size, size, [3, 4], SphereGrid::Equiangular, None).expect("kernels")
});

thread_local! {
    static BACKWARDS: RefCell<Option<ShardTensor<4, Int>>> = const { RefCell::new(None) };
}

/// Indices of the last dim in reverse order, on the mesh of a field; made once.
fn backwards<X: Field<4>>(x: &X) -> ShardTensor<4, Int> {
    let x = x.clone().into_shard();
    let made = BACKWARDS
        .take()
        .filter(|index| index.layout() == x.layout());
    let index = made.unwrap_or_else(|| {
        let (local, layout, mesh) = x.into_parts();
        let shape = local.dims();
        let cells = Tensor::<1, Int>::arange(0..shape[3] as i64, &local.device()).flip([0]);
        let index = cells
            .reshape([1, 1, 1, shape[3]])
            .repeat(&[shape[0], shape[1], shape[2], 1]);
        ShardTensor::from_parts(index, layout, mesh)
    });
    BACKWARDS.set(Some(index.clone()));
    index
}

/// Six neighbours of each cell, on one rank and on two.
fn edges<X: Field<4>>(x: &X) -> &'static EdgeShards {
    static EDGES: [[OnceLock<EdgeShards>; 2]; 2] = [const { [const { OnceLock::new() }; 2] }; 2];
    let cells = x.dims()[2];
    let parts = x.clone().into_shard().layout().extents(2).len();
    EDGES[usize::from(cells == CELLS[2])][parts - 1].get_or_init(|| {
        let near = [1, 256, 257].map(|step| [step, cells - step]);
        let edges_to = |cell: usize| {
            let near = near.as_flattened().iter();
            near.map(move |step| [(cell + step) % cells, cell])
                .collect::<Vec<_>>()
        };
        let edges: Vec<[usize; 2]> = (0..cells).flat_map(edges_to).collect();
        let graph = Graph::new(cells, cells, &edges).expect("a graph");
        graph.distribute(x, 2).expect("edges")
    })
}

macro_rules! rows {
    ($($name:literal, $target:ident, [$($shape:expr),+]: |$x:ident, $others:pat_param| $body:expr;)*) => {
        &[$({
            fn run<X: Field<4>>($x: X, $others: Vec<X>) -> X {
                $body
            }
            Row {
                name: $name,
                shapes: &[$($shape),+],
                target: $target,
                whole: run::<Tensor<4>>,
                sharded: run::<ShardTensor<4>>,
            }
        }),*]
    };
}

pub(crate) const ROWS: &[Row] = rows! {
    // For sharded tensors, as burn adds tensors on one device itself.
    "add", ANY, [FIELD, FIELD]: |x, y| X::from_shard(x.into_shard() + y[0].clone().into_shard());
    "relu", MEMORY, [FIELD]: |x, _| x.relu();
    "gelu", MEMORY, [FIELD]: |x, _| x.gelu();
    "silu", MEMORY, [FIELD]: |x, _| x.silu();
    "dropout", ANY, [FIELD]: |x, _| x.dropout(0.1, RandomKey::new(0, "dropout"));
    "softmax", ANY, [FIELD]: |x, _| x.softmax(3);
    "log_softmax of channels", ANY, [FIELD]: |x, _| x.log_softmax(1);
    "logsumexp", ANY, [FIELD]: |x, _| x.logsumexp(3);
    "sum", ANY, [FIELD]: |x, _| x.sum_dims(&[2, 3]).resolve();
    "mean", ANY, [FIELD]: |x, _| x.mean_dims(&[2, 3]).resolve();
    "max", ANY, [FIELD]: |x, _| x.max_dims(&[2, 3]);
    "var", ANY, [FIELD]: |x, _| x.var_dims(&[2, 3], 1.0).resolve();
    "std", ANY, [FIELD]: |x, _| x.std_dims(&[2, 3], 1.0);
    "vector_norm", ANY, [FIELD]: |x, _| x.vector_norm(2.0, &[2, 3]);
    "cumsum", ANY, [FIELD]: |x, _| x.cumsum(3);
    "cumsum of rows", ANY, [FIELD]: |x, _| x.cumsum(2);
    "cumprod", ANY, [FIELD]: |x, _| x.cumprod(3);
    "topk", ANY, [FIELD]: |x, _| StatisticsField::topk_with_indices(x, 4, 3).0;
    "group_norm", MEMORY, [FIELD]: |x, _| x.group_norm(2, None, None, 1e-5);
    "instance_norm", MEMORY, [FIELD]: |x, _| x.group_norm(4, None, None, 1e-5);
    "batch_norm", MEMORY, [FIELD]: |x, _| {
        x.try_op(|x| Ok(batch_norm_train(x, None, None, 1e-5)?.0)).expect("a norm")
    };
    "layer_norm", MEMORY, [FIELD]: |x, _| x.layer_norm(None, None, 1e-5);
    "layer_norm of two dims", MEMORY, [FIELD]: |x, _| x.layer_norm_dims(2, None, None, 1e-5);
    "rms_norm", MEMORY, [FIELD]: |x, _| x.rms_norm(None, 1e-6);
    "weight_norm", MEMORY, [FIELD, [1, 4, 1, 1]]: |x, g| x.weight_norm(g[0].clone().into_shard(), 1);
    "max_pool2d", MEMORY, [FIELD]: |x, _| x.max_pool(&window());
    "avg_pool2d", MEMORY, [FIELD]: |x, _| x.avg_pool(&window());
    "adaptive_avg_pool2d", MEMORY, [FIELD]: |x, _| x.adaptive_avg_pool([31, 17]);
    "adaptive_max_pool2d", MEMORY, [FIELD]: |x, _| x.adaptive_max_pool([31, 17]);
    "lp_pool2d", MEMORY, [FIELD]: |x, _| x.lp_pool(2.0, &PoolOptions::new([2, 2]));
    "conv2d", ANY, [CHANNELS, [16, 16, 3, 3]]: |x, w| {
        x.conv(w[0].clone().into_shard(), None, &around())
    };
    "conv_transpose2d", TRANSPOSED, [FIELD, [4, 4, 3, 3]]: |x, w| {
        let twice = ConvTransposeOptions::default().with_stride([2, 2]);
        x.conv_transpose(w[0].clone().into_shard(), None, &twice)
    };
    "conv_transpose2d, 16 channels", TRANSPOSED, [CHANNELS, [16, 16, 4, 4]]: |x, w| {
        let twice = ConvTransposeOptions::default().with_stride([2, 2]).with_padding([1, 1]);
        x.conv_transpose(w[0].clone().into_shard(), None, &twice)
    };
    "unfold", ANY, [FIELD]: |x, _| x.unfold_windows([3, 3], &around());
    "fold", ANY, [[1, 36, 512, 512]]: |x, _| x.fold_windows([512, 512], [3, 3], &around());
    "nearest, doubled", MEMORY, [FIELD]: |x, _| {
        x.interpolate([1024, 1024], Interpolation::new(Mode::Nearest))
    };
    "bilinear, doubled", MEMORY, [FIELD]: |x, _| x.upsample_bilinear([Boundary::Replicate; 2]);
    "bilinear, corners", MEMORY, [FIELD]: |x, _| {
        x.interpolate([700, 300], Interpolation::new(Mode::Linear).with_corners(Corners::Centers))
    };
    "bilinear, antialiased", MEMORY, [FIELD]: |x, _| {
        let mode = Interpolation::new(Mode::Linear).with_antialias(Antialias::On);
        x.interpolate([181, 97], mode)
    };
    "bicubic", MEMORY, [FIELD]: |x, _| x.interpolate([700, 300], Interpolation::new(Mode::Cubic));
    "area", MEMORY, [FIELD]: |x, _| x.interpolate([181, 97], Interpolation::new(Mode::Area));
    "grid_sample", ANY, [FIELD, [1, 2, 512, 512]]: |x, d| {
        let options = SampleOptions::new([2, 2])
            .with_boundary([Boundary::Replicate; 2])
            .with_corners(Corners::Centers)
            .with_out_of_bounds(OutOfBounds::Clamp);
        x.displace(d[0].clone(), &options)
    };
    "pixel_shuffle", ANY, [FIELD]: |x, _| x.pixel_shuffle(2);
    "pixel_unshuffle", ANY, [FIELD]: |x, _| x.pixel_unshuffle(2);
    "pad", ANY, [FIELD]: |x, _| {
        let ring = Padding::new(3, Boundary::Periodic);
        x.pad(&[(2, ring), (3, ring)], 0.0)
    };
    "roll", ANY, [FIELD]: |x, _| x.roll(&[5, -7], &[2, 3]);
    "flip", ANY, [FIELD]: |x, _| x.flip(&[2, 3]);
    "permute", ANY, [FIELD]: |x, _| x.permute([0, 2, 3, 1]);
    "repeat", ANY, [FIELD]: |x, _| x.repeat_all([1, 2, 1, 1]);
    "slice", ANY, [FIELD]: |x, _| x.slice_dim(3, 1..512, 2);
    "shift", ANY, [FIELD]: |x, _| x.shift(2, 3, Boundary::Replicate);
    "cat", ANY, [FIELD, FIELD]: |x, y| X::cat(vec![x, y[0].clone()], 1);
    "cat of rows", ANY, [FIELD, FIELD]: |x, y| X::cat(vec![x, y[0].clone()], 2);
    "stack", ANY, [FIELD, FIELD]: |x, y| {
        <WithDims<X, 5> as RearrangeField<5>>::flatten::<4>(X::stack::<5>(vec![x, y[0].clone()], 1), 1, 2)
    };
    "gather", ANY, [FIELD]: |x, _| { let index = backwards(&x); x.gather(3, index) };
    "scatter_add", ANY, [FIELD, FIELD]: |x, y| {
        let index = backwards(&x);
        x.scatter_add(3, index, y[0].clone())
    };
    "index_select", ANY, [FIELD]: |x, _| {
        let cells: Vec<usize> = (0..512).rev().collect();
        x.index_select(3, &cells)
    };
    "tril", ANY, [FIELD]: |x, _| x.tril(0);
    "matmul", ANY, [[1, 4, 384, 512], FIELD]: |x, y| x.matmul(y[0].clone());
    "linear", ANY, [[1, 1, 8192, 128], [1, 1, 128, 128]]: |x, w| {
        let weight = ShapeField::reshape::<2>(w[0].clone(), [128, 128]);
        x.linear(weight.into_shard(), None)
    };
    "einsum", ANY, [FIELD, [4, 6, 1, 1]]: |x, w| {
        x.einsum::<4, 4>("bchw,coxy->bohw", w[0].clone().into_shard())
    };
    "mse_loss", ANY, [FIELD, FIELD]: |x, y| number(mse_loss(x, y[0].clone(), Reduction::Mean));
    "l1_loss", ANY, [FIELD, FIELD]: |x, y| number(l1_loss(x, y[0].clone(), Reduction::Mean));
    "huber_loss", ANY, [FIELD, FIELD]: |x, y| {
        number(huber_loss(x, y[0].clone(), 1.0, Reduction::Mean))
    };
    "total_variation", ANY, [FIELD]: |x, _| {
        let dims = [2, 3].map(|dim| (dim, Boundary::Replicate));
        number(total_variation(x, &dims, Reduction::Mean))
    };
    "gradient_loss", ANY, [FIELD, FIELD]: |x, y| {
        let dims = [2, 3].map(|dim| (dim, Boundary::Replicate));
        number(gradient_loss(x, y[0].clone(), &dims, Reduction::Mean))
    };
    "ssim_loss", ANY, [FIELD, FIELD]: |x, y| {
        number(ssim_loss(x, y[0].clone(), &SsimOptions::<2>::new(4.0), Reduction::Mean))
    };
    "spectral_loss", ANY, [FIELD, FIELD]: |x, y| {
        number(spectral_loss::<5, 4, X>(x, y[0].clone(), &[2, 3], Reduction::Mean))
    };
    "message_passing", ANY, [CELLS]: |x, _| {
        let edges = edges(&x);
        edges.reduce(edges.sources(x), Aggregate::Sum)
    };
    "message_passing, 64 features", ANY, [MANY_CELLS]: |x, _| {
        let edges = edges(&x);
        edges.reduce(edges.sources(x), Aggregate::Sum)
    };
    "rfft", FOURIER, [FIELD]: |x, _| parts(x.rfft::<5>(&[3], FftNorm::Backward));
    "rfft2", FOURIER, [FIELD]: |x, _| parts(x.rfft::<5>(&[2, 3], FftNorm::Backward));
    "rfft2, 721 x 1440", FOURIER, [SPHERE]: |x, _| parts(x.rfft::<5>(&[2, 3], FftNorm::Backward));
    "irfft2", FOURIER, [[1, 4, 512, 514]]: |x, _| {
        SpectralField::irfft::<4>(complex(x), &[2, 3], 512, FftNorm::Backward)
    };
    "fft2", FOURIER, [FIELD]: |x, _| parts(SpectralField::fft(complex(x), &[2, 3], FftNorm::Backward));
    "ifft2", FOURIER, [FIELD]: |x, _| parts(SpectralField::ifft(complex(x), &[2, 3], FftNorm::Backward));
    "dct", ANY, [FIELD]: |x, _| x.dct(&[2, 3], FftNorm::Ortho);
    "spectral_conv", ANY, [CHANNELS, [16, 16, 32, 34]]: |x, w| {
        x.spectral_conv::<5>(complex(w[0].clone()).into_shard())
    };
    "sht", HARMONIC, [SPHERE]: |x, _| parts(x.sht::<5>(&SHT));
    "isht", HARMONIC, [HARMONICS]: |x, _| SphereField::isht::<4>(complex(x), &SHT);
    "vector_sht", HARMONIC, [VECTORS]: |x, _| parts(x.vector_sht::<5>(&VECTOR_SHT));
    "vector_isht", HARMONIC, [VECTOR_HARMONICS]: |x, _| {
        SphereField::vector_isht::<4>(complex(x), &VECTOR_SHT)
    };
    // PyTorch's layer also multiplies by four identity matrices.
    "sphere_attention", ANY, [COARSE, COARSE, COARSE]: |x, others| {
        let [keys, values] = [0, 1].map(|other: usize| others[other].clone());
        x.sphere_attention(keys, values, 4, &NEAR)
    };
    "disco_conv", ANY, [COARSE, [1, 32, 32, 5]]: |x, w| {
        let weight = ShapeField::reshape::<3>(w[0].clone(), [32, 32, 5]);
        x.disco_conv(weight.into_shard(), None, 1, &DISCO)
    };
};
