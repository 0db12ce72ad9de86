//! Random arguments of every operator: options with PyTorch's names, inputs and parameters.

mod moves;
mod spectral;
mod values;

use burn::tensor::DType;
use halocline::core::{Distribution, IndexBox, RandomKey};
use halocline::ops::golden::Arguments;
use halocline::ops::testing::normal;
use halocline::prelude::TensorData;
use serde_json::{Value, json};

use crate::draw::Draw;
use crate::file::attributes;
use moves::{rearrangement, reduction};
use values::{einsum, elementwise, loss, product};

/// Drawn options, and the arguments of an operator.
pub(crate) struct Case {
    pub(crate) options: Value,
    pub(crate) arguments: Arguments,
}

impl Case {
    pub(crate) fn new(options: Value) -> Self {
        let arguments = Arguments {
            attributes: attributes(&options),
            ..Arguments::default()
        };
        Self { options, arguments }
    }

    /// Adds an input of floats.
    pub(crate) fn x(self, name: &str, shape: &[usize]) -> Self {
        self.input(name, normal(shape, name, 0))
    }

    /// Adds an input of indices below a bound.
    pub(crate) fn index(self, name: &str, shape: &[usize], bound: usize) -> Self {
        self.input(name, indices(name, shape, bound))
    }

    pub(crate) fn input(mut self, name: &str, data: TensorData) -> Self {
        self.arguments.inputs.push((name.into(), data));
        self
    }

    pub(crate) fn parameter(mut self, name: &str, shape: &[usize]) -> Self {
        let data = normal(shape, name, 0);
        self.arguments.parameters.insert(name.into(), data);
        self
    }

    fn parameters(self, with: bool, names: &[&str], shape: &[usize]) -> Self {
        let names = if with { names } else { &[] };
        names
            .iter()
            .fold(self, |case, name| case.parameter(name, shape))
    }
}

/// Returns random indices below a bound.
fn indices(name: &str, shape: &[usize], bound: usize) -> TensorData {
    let values = uniform(name, shape, 0.0, bound as f64).into_iter();
    let values: Vec<i64> = values.map(|value| value as i64).collect();
    TensorData::new(values, shape.to_vec())
}

/// Draws an integer type of indices.
fn integers(draw: &mut Draw) -> DType {
    draw.pick(&[DType::I64, DType::I32, DType::I16, DType::U8, DType::U32])
}

fn uniform(name: &str, shape: &[usize], low: f64, high: f64) -> Vec<f32> {
    let uniform = Distribution::Uniform(low, high);
    RandomKey::new(0, name).fill(uniform, shape, &IndexBox::whole(shape))
}

/// Draws arguments for an operator of the registry; `None` if there are none here.
pub(crate) fn draw_case(operator: &str, draw: &mut Draw) -> Option<Case> {
    Some(match operator {
        "conv1d" | "conv2d" | "conv3d" => conv(spatial(operator), draw),
        "conv_transpose1d" | "conv_transpose2d" | "conv_transpose3d" => {
            conv_transpose(spatial(operator), draw)
        }
        "unfold" | "fold" => fold(operator, draw),
        _ if operator.starts_with("adaptive_") => {
            let (x, cells) = field(spatial(operator), 1, draw);
            let sizes: Vec<usize> = cells
                .iter()
                .map(|&size| draw.within(1..=size + 1))
                .collect();
            Case::new(json!({ "output_size": sizes })).x("x", &x)
        }
        _ if operator.contains("_pool") => pool(operator, draw),
        "grid_sample" => grid_sample(draw),
        _ if operator.starts_with("interpolate") => interpolate(spatial(operator), draw),
        _ if operator.ends_with("_norm") => norm(operator, draw),
        "na1d" | "na2d" | "na3d" => neighborhood(spatial(operator), draw),
        "scaled_dot_product_attention" => attention(draw),
        _ if operator.contains("fft")
            || operator.contains("dct")
            || operator.contains("spectral")
            || operator.contains("sht")
            || operator.starts_with("disco_conv")
            || operator.starts_with("sphere_")
            || operator == "regrid" =>
        {
            spectral::transform(operator, draw)?
        }
        _ if operator.contains("loss")
            || operator.contains("cross_entropy")
            || operator == "total_variation" =>
        {
            loss(operator, draw)?
        }
        "relu" | "gelu" | "silu" | "prelu" | "addcmul" => elementwise(operator, draw),
        "einsum" => einsum(draw),
        "matmul" | "linear" | "linear_row_col_mlp" | "embedding" => product(operator, draw),
        _ => reduction(operator, draw).or_else(|| rearrangement(operator, draw))?,
    })
}

/// Returns the number of spatial dims in the name of an operator.
fn spatial(operator: &str) -> usize {
    let digit = operator.chars().find(char::is_ascii_digit);
    digit.map_or(2, |digit| digit as usize - '0' as usize)
}

/// Returns the largest number of cells along a dim of `[batch, channels, *spatial]`.
fn most(spatial: usize) -> usize {
    [13, 11, 6][spatial - 1]
}

/// Draws a shape `[batch, channels, *spatial]` with at least `least` cells in each spatial dim, and
/// returns its spatial part as well.
fn field(spatial: usize, least: usize, draw: &mut Draw) -> (Vec<usize>, Vec<usize>) {
    let cells = draw.list(spatial, least..=most(spatial).max(least));
    let mut shape = draw.list(2, 1..=3);
    shape.extend(&cells);
    (shape, cells)
}

/// Draws a shape of one to four dims.
fn shape(draw: &mut Draw) -> Vec<usize> {
    let dims = draw.within(1..=4);
    draw.list(dims, 1..=7)
}

/// Draws kernel, stride and dilation by dim, and returns them with the span of a window in cells.
fn windows(spatial: usize, dilations: usize, draw: &mut Draw) -> [Vec<usize>; 4] {
    let kernel = draw.list(spatial, 1..=if spatial == 3 { 3 } else { 4 });
    let stride = draw.list(spatial, 1..=3);
    let dilation = draw.list(spatial, 1..=dilations);
    let span = kernel.iter().zip(&dilation).map(|(k, d)| (k - 1) * d + 1);
    let span = span.collect();
    [kernel, stride, dilation, span]
}

/// Draws sizes that windows of these spans fit into.
fn sizes(spans: &[usize], draw: &mut Draw) -> Vec<usize> {
    let sizes = spans.iter().map(|span| span + draw.within(0..=6));
    sizes.collect()
}

fn with_channels(draw: &mut Draw, channels: usize, cells: &[usize]) -> Vec<usize> {
    [&[draw.within(1..=3), channels][..], cells].concat()
}

fn conv(spatial: usize, draw: &mut Draw) -> Case {
    // Some are as in models: in two and three dims Winograd's method or, where the processor has
    // them, matrix instructions compute them.
    let is_layer = draw.within(0..=2) == 0;
    let [kernel, stride, dilation, span] = if is_layer {
        [3, 1, 1, 3].map(|number| vec![number; spatial])
    } else {
        windows(spatial, 2, draw)
    };
    let cells = if is_layer {
        draw.list(spatial, 6..=most(spatial).max(9))
    } else {
        sizes(&span, draw)
    };
    let padding: Vec<usize> = span.iter().map(|span| draw.within(0..=span - 1)).collect();
    let mode = draw.pick(&["zeros", "zeros", "circular", "reflect", "replicate"]);
    // Kernels of even sizes have one more cell of padding at the end.
    let may_be_same = stride.iter().all(|stride| *stride == 1);
    let padding = match draw.within(0..=3) {
        0 if may_be_same => json!("same"),
        0 if mode == "zeros" => json!("valid"),
        _ => json!(padding),
    };
    let channels = if is_layer { 8..=9 } else { 1..=3 };
    let (groups, each) = (draw.within(1..=2), draw.list(2, channels));
    let x = with_channels(draw, groups * each[0], &cells);
    let weight = [&[groups * each[1], each[0]][..], &kernel].concat();
    let options = json!({
        "stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": mode,
    });
    let case = Case::new(options).x("x", &x).parameter("weight", &weight);
    case.parameters(draw.coin(), &["bias"], &weight[..1])
}

fn conv_transpose(spatial: usize, draw: &mut Draw) -> Case {
    let [kernel, stride, dilation, span] = windows(spatial, 2, draw);
    let cells = draw.list(spatial, 1..=most(spatial) / 2 + 1);
    let padding: Vec<usize> = span.iter().map(|span| draw.within(0..=span / 2)).collect();
    let padding: Vec<usize> = padding
        .iter()
        .zip(&span)
        .map(|(padding, span)| *padding.min(&((span - 1) / 2)))
        .collect();
    let more: Vec<usize> = stride
        .iter()
        .zip(&dilation)
        .map(|(stride, dilation)| draw.within(0..=*stride.max(dilation) - 1))
        .collect();
    let mode = draw.pick(&["zeros", "zeros", "circular"]);
    let more = if mode == "circular" {
        vec![0; spatial]
    } else {
        more
    };
    let (groups, each) = (draw.within(1..=2), draw.list(2, 1..=3));
    let x = with_channels(draw, groups * each[0], &cells);
    let weight = [&[groups * each[0], each[1]][..], &kernel].concat();
    let options = json!({
        "stride": stride, "padding": padding, "output_padding": more, "dilation": dilation, "groups": groups, "padding_mode": mode,
    });
    let case = Case::new(options).x("x", &x).parameter("weight", &weight);
    case.parameters(draw.coin(), &["bias"], &[groups * each[1]])
}

fn fold(operator: &str, draw: &mut Draw) -> Case {
    let [kernel, stride, dilation, span] = windows(2, 2, draw);
    let cells = sizes(&span, draw);
    let padding: Vec<usize> = span.iter().map(|span| draw.within(0..=span - 1)).collect();
    let mut options = json!({
        "kernel_size": kernel, "stride": stride, "dilation": dilation, "padding": padding,
    });
    let channels = draw.within(1..=2);
    if operator == "unfold" {
        return Case::new(options).x("x", &with_channels(draw, channels, &cells));
    }
    let count = |dim: usize| (cells[dim] + 2 * padding[dim] - span[dim]) / stride[dim] + 1;
    let x = with_channels(
        draw,
        channels * kernel.iter().product::<usize>(),
        &[count(0), count(1)],
    );
    options["output_size"] = json!(cells);
    Case::new(options).x("x", &x)
}

fn pool(operator: &str, draw: &mut Draw) -> Case {
    let spatial = spatial(operator);
    let dilations = if operator.starts_with("max") { 2 } else { 1 };
    let [kernel, stride, dilation, span] = windows(spatial, dilations, draw);
    let cells = sizes(&span, draw);
    let x = with_channels(draw, 2, &cells);
    let padding: Vec<usize> = kernel
        .iter()
        .map(|size| draw.within(0..=size / 2))
        .collect();
    let ceil = draw.coin();
    let options = match &operator[..2] {
        "lp" => json!({
            "norm_type": draw.pick(&[2, 4]), "kernel_size": kernel, "stride": stride, "ceil_mode": false,
        }),
        "av" => json!({
            "kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil,
            "count_include_pad": draw.coin(),
        }),
        _ => json!({
            "kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil,
        }),
    };
    Case::new(options).x("x", &x)
}

fn interpolate(spatial: usize, draw: &mut Draw) -> Case {
    let (x, _) = field(spatial, 1, draw);
    let sizes = draw.list(spatial, 1..=most(spatial) + 3);
    let linear = ["linear", "bilinear", "trilinear"][spatial - 1];
    let cubic = if spatial == 2 { "bicubic" } else { linear };
    let mode = draw.pick(&[linear, linear, cubic, "nearest", "nearest-exact", "area"]);
    let corners = (mode == linear || mode == cubic).then(|| draw.coin());
    let antialias = spatial == 2 && corners.is_some() && draw.within(0..=2) == 0;
    // With one column, PyTorch's antialiasing with aligned corners fills all rows with the first
    // row's value.
    let least = if antialias { 2 } else { 1 };
    let sizes: Vec<usize> = sizes.into_iter().map(|size| size.max(least)).collect();
    let padding = if corners == Some(true) {
        "replicate"
    } else {
        draw.pick(&["replicate", "circular"])
    };
    let options = json!({
        "mode": mode, "align_corners": corners, "output_size": sizes, "antialias": antialias, "padding_mode": padding,
    });
    Case::new(options).x("x", &x)
}

fn grid_sample(draw: &mut Draw) -> Case {
    let spatial = draw.within(2..=3);
    let (x, cells) = field(spatial, 2, draw);
    let mode = draw.pick(&[
        "nearest",
        "bilinear",
        if spatial == 2 { "bicubic" } else { "bilinear" },
    ]);
    let options = json!({
        "mode": mode,
        "padding_mode": draw.pick(&["zeros", "border", "reflection"]),
        "align_corners": draw.coin(),
        "bound": cells,
    });
    // The place of each cell, shifted by up to almost half a field.
    let shape = [&x[..1], &cells, &[spatial]].concat();
    let mut places = uniform("grid", &shape, -0.9, 0.9);
    for (index, place) in places.iter_mut().enumerate() {
        let (output, dim) = (index / spatial, spatial - 1 - index % spatial);
        let inner: usize = cells[dim + 1..].iter().product();
        let cell = output / inner % cells[dim];
        *place += 2.0 * cell as f32 / (cells[dim] - 1) as f32 - 1.0;
    }
    let case = Case::new(options).x("x", &x);
    case.input("grid", TensorData::new(places, shape))
}

/// Draws shapes with enough cells in every mean that nothing is divided by a small deviation.
fn norm(operator: &str, draw: &mut Draw) -> Case {
    const EPSILON: f64 = 1e-3;
    let with = draw.coin();
    if operator == "weight_norm" {
        let v = draw.list(3, 1..=6);
        let dim = draw.pick(&[None, Some(0), Some(1), Some(2)]);
        let g: Vec<usize> = (0..3)
            .map(|other| if dim == Some(other) { v[other] } else { 1 })
            .collect();
        return Case::new(json!({ "dim": dim }))
            .x("v", &v)
            .parameter("g", &g);
    }
    if operator == "vector_norm" {
        let x = draw.list(3, 2..=6);
        let order = draw.pick(&[0.5, 1.0, 1.5, 2.0, 3.0]);
        return Case::new(json!({ "ord": order, "dims": draw.some(3) })).x("x", &x);
    }
    if ["layer_norm", "rms_norm"].contains(&operator) {
        let dims = draw.within(1..=3);
        let x = draw.list(4, 3..=6);
        let normalized = &x[4 - dims..];
        let names = if operator == "rms_norm" {
            &["weight"][..]
        } else {
            &["weight", "bias"]
        };
        let options = json!({ "normalized_shape": normalized, "eps": EPSILON });
        return Case::new(options)
            .x("x", &x)
            .parameters(with, names, normalized);
    }
    let (groups, each) = (draw.within(1..=3), draw.within(1..=2));
    let channels = groups * each;
    let spatial = draw.within(1..=2);
    let cells = draw.list(spatial, 4..=9);
    let x = with_channels(draw, channels, &cells);
    let options = match operator {
        "group_norm" => json!({ "num_groups": groups, "eps": EPSILON }),
        "batch_norm" => json!({ "training": draw.coin(), "eps": EPSILON }),
        _ => json!({ "eps": EPSILON }),
    };
    let given = options["training"] == json!(false);
    let mut case = Case::new(options).x("x", &x);
    if given {
        let variance = TensorData::new(uniform("variance", &[channels], 0.5, 2.0), [channels]);
        let variance = ("running_var".into(), variance);
        case.arguments.parameters.extend([variance]);
        case = case.parameter("running_mean", &[channels]);
    }
    case.parameters(with, &["weight", "bias"], &[channels])
}

fn neighborhood(spatial: usize, draw: &mut Draw) -> Case {
    let kernel = draw.list(spatial, 2..=if spatial == 3 { 2 } else { 4 });
    let dilation = draw.list(spatial, 1..=2);
    let span = |(kernel, dilation): (&usize, &usize)| kernel * dilation + draw.within(0..=3);
    let cells: Vec<usize> = kernel.iter().zip(&dilation).map(span).collect();
    let stride: Vec<usize> = kernel
        .iter()
        .map(|&kernel| draw.within(1..=kernel))
        .collect();
    let causal: Vec<bool> = (0..spatial).map(|_| draw.coin()).collect();
    let may_wrap = |dim: usize| !causal[dim] && cells[dim].is_multiple_of(dilation[dim]);
    let periodic: Vec<bool> = (0..spatial)
        .map(|dim| may_wrap(dim) && draw.coin())
        .collect();
    let (heads, shared, width) = (draw.within(1..=2), draw.within(1..=2), draw.within(1..=5));
    let batch = draw.within(1..=2);
    let of = |heads: usize| [&[batch][..], &cells, &[heads, width]].concat();
    let options = json!({
        "kernel_size": kernel, "dilation": dilation, "stride": stride, "is_causal": causal, "periodic": periodic,
        "scale": 0.5,
    });
    let case = Case::new(options).x("q", &of(heads * shared));
    case.x("k", &of(heads)).x("v", &of(heads))
}

fn attention(draw: &mut Draw) -> Case {
    let [batch, heads, shared, width] =
        [(1, 2), (1, 2), (1, 2), (1, 5)].map(|(a, b)| draw.within(a..=b));
    let (queries, causal) = (draw.within(1..=11), draw.coin());
    let keys = if causal { queries } else { draw.within(1..=11) };
    let scale = draw.pick(&[None, Some(0.3)]);
    let case = Case::new(json!({ "is_causal": causal, "scale": scale }));
    let case = case.x("q", &[batch, heads * shared, queries, width]);
    let of_keys = [batch, heads, keys, width];
    case.x("k", &of_keys).x("v", &of_keys)
}
