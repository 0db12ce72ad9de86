//! The kernels: one unit for every query and head, or for every key and head.

use burn::tensor::DType;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::cubecl::{self, calculate_cube_count_elemwise};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::windows::Windows;
use crate::attention::engine::dense::LOWEST;
use crate::attention::engine::tiles::Side;

/// Sizes of a pass over targets that reach sources.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    planes: usize,
    rows: usize,
    columns: usize,
    source_planes: usize,
    source_rows: usize,
    source_columns: usize,
    plane_step: usize,
    row_step: usize,
    column_step: usize,
    /// Number of heads of queries.
    heads: usize,
    /// Number of query heads that share a head of keys and values.
    shared: usize,
}

/// A target: its sample, its head and the box of sources that it reaches.
#[derive(CubeType, Clone, Copy)]
struct Target {
    sample: usize,
    head: usize,
    first_plane: usize,
    planes: usize,
    first_row: usize,
    rows: usize,
    first_column: usize,
    columns: usize,
}

/// Target of this unit, whose index is `[batch, planes, rows, columns, heads]`.
#[cube]
fn target(index: usize, heads: usize, windows: &Tensor<i32>, sizes: &Sizes) -> Target {
    let head = index % heads;
    let cell = index / heads;
    let column = cell % sizes.columns;
    let cell = cell / sizes.columns;
    let row = cell % sizes.rows;
    let cell = cell / sizes.rows;
    let plane = cell % sizes.planes;
    let row_at = 2 * (sizes.planes + row);
    let column_at = 2 * (sizes.planes + sizes.rows + column);
    Target {
        sample: cell / sizes.planes,
        head,
        first_plane: windows[2 * plane] as usize,
        planes: windows[2 * plane + 1] as usize,
        first_row: windows[row_at] as usize,
        rows: windows[row_at + 1] as usize,
        first_column: windows[column_at] as usize,
        columns: windows[column_at + 1] as usize,
    }
}

/// Index, in the whole batch, of a source in a target's box.
#[cube]
fn source(target: &Target, plane: usize, row: usize, column: usize, sizes: &Sizes) -> usize {
    let plane = target.first_plane + plane * sizes.plane_step;
    let row = target.first_row + row * sizes.row_step;
    let column = target.first_column + column * sizes.column_step;
    let cell = (target.sample * sizes.source_planes + plane) * sizes.source_rows + row;
    cell * sizes.source_columns + column
}

/// Reads vectors of a tensor.
#[cube]
fn read<F: Float, N: Size>(
    from: &Tensor<Vector<F, N>>,
    start: usize,
    #[comptime] count: usize,
) -> Array<Vector<F, N>> {
    let mut vectors = Array::<Vector<F, N>>::new(count);
    #[unroll]
    for element in 0..count {
        vectors[element] = from[start + element];
    }
    vectors
}

#[cube]
fn zeros<F: Float, N: Size>(#[comptime] count: usize) -> Array<Vector<F, N>> {
    let mut vectors = Array::<Vector<F, N>>::new(count);
    #[unroll]
    for element in 0..count {
        vectors[element] = Vector::new(F::new(0.0_f32));
    }
    vectors
}

/// Dot product of vectors with those of a tensor.
#[cube]
fn dot<F: Float, N: Size>(
    vectors: &Array<Vector<F, N>>,
    from: &Tensor<Vector<F, N>>,
    start: usize,
    #[comptime] count: usize,
) -> F {
    let mut sums = Vector::<F, N>::new(F::new(0.0_f32));
    #[unroll]
    for element in 0..count {
        sums += vectors[element] * from[start + element];
    }
    let mut sum = sums.extract(0usize);
    let lanes = sums.vector_size();
    #[unroll]
    for lane in 1..lanes {
        sum += sums.extract(lane);
    }
    sum
}

/// Adds the vectors of a tensor, multiplied by a factor.
#[cube]
fn add<F: Float, N: Size>(
    sums: &mut Array<Vector<F, N>>,
    factor: F,
    from: &Tensor<Vector<F, N>>,
    start: usize,
    #[comptime] count: usize,
) {
    let factor = Vector::<F, N>::new(factor);
    #[unroll]
    for element in 0..count {
        sums[element] += factor * from[start + element];
    }
}

#[cube]
fn write<F: Float, N: Size>(
    vectors: &Array<Vector<F, N>>,
    to: &mut Tensor<Vector<F, N>>,
    start: usize,
    #[comptime] count: usize,
) {
    #[unroll]
    for element in 0..count {
        to[start + element] = vectors[element];
    }
}

#[cube(launch, address_type = "dynamic")]
fn forward_kernel<F: Float, N: Size>(
    queries: &Tensor<Vector<F, N>>,
    pairs: &Tensor<Vector<F, N>>,
    windows: &Tensor<i32>,
    output: &mut Tensor<Vector<F, N>>,
    lse: &mut Tensor<F>,
    units: usize,
    sizes: &Sizes,
    #[comptime] widths: [usize; 2],
    #[define(F)] _dtype: ElemType,
) {
    let index = ABSOLUTE_POS;
    if index >= units {
        terminate!();
    }
    let [key_width, value_width] = comptime!(widths);
    let target = target(index, sizes.heads, windows, sizes);
    let key_heads = sizes.heads / sizes.shared;
    let key_head = target.head / sizes.shared;
    let query = read(queries, index * key_width, key_width);
    let mut sums = zeros::<F, N>(value_width);
    let mut most = F::new(comptime!(LOWEST as f32));
    let mut sum = F::new(0.0_f32);
    for plane in 0..target.planes {
        for row in 0..target.rows {
            for column in 0..target.columns {
                let key = source(&target, plane, row, column, sizes);
                let at = (key * key_heads + key_head) * (key_width + value_width);
                let score = dot(&query, pairs, at, key_width);
                if score > most {
                    let factor = (most - score).exp();
                    sum *= factor;
                    let factor = Vector::<F, N>::new(factor);
                    #[unroll]
                    for element in 0..value_width {
                        sums[element] *= factor;
                    }
                    most = score;
                }
                let weight = (score - most).exp();
                sum += weight;
                add(&mut sums, weight, pairs, at + key_width, value_width);
            }
        }
    }
    // Without keys the output is zero, and the logarithm is the lowest number.
    let mut factor = F::new(0.0_f32);
    if sum != F::new(0.0_f32) {
        factor = F::new(1.0_f32) / sum;
        most += sum.ln();
    }
    lse[index] = most;
    let factor = Vector::<F, N>::new(factor);
    #[unroll]
    for element in 0..value_width {
        sums[element] *= factor;
    }
    write(&sums, output, index * value_width, value_width);
}

#[cube(launch, address_type = "dynamic")]
fn query_kernel<F: Float, N: Size>(
    queries: &Tensor<Vector<F, N>>,
    pairs: &Tensor<Vector<F, N>>,
    cotangents: &Tensor<Vector<F, N>>,
    numbers: &Tensor<F>,
    windows: &Tensor<i32>,
    gradient: &mut Tensor<Vector<F, N>>,
    units: usize,
    sizes: &Sizes,
    #[comptime] widths: [usize; 2],
    #[define(F)] _dtype: ElemType,
) {
    let index = ABSOLUTE_POS;
    if index >= units {
        terminate!();
    }
    let [key_width, value_width] = comptime!(widths);
    let target = target(index, sizes.heads, windows, sizes);
    let key_heads = sizes.heads / sizes.shared;
    let key_head = target.head / sizes.shared;
    let query = read(queries, index * key_width, key_width);
    let cotangent = read(cotangents, index * value_width, value_width);
    let lse = numbers[2 * index];
    let product = numbers[2 * index + 1];
    let mut sums = zeros::<F, N>(key_width);
    for plane in 0..target.planes {
        for row in 0..target.rows {
            for column in 0..target.columns {
                let key = source(&target, plane, row, column, sizes);
                let at = (key * key_heads + key_head) * (key_width + value_width);
                let weight = (dot(&query, pairs, at, key_width) - lse).exp();
                let of_weight = dot(&cotangent, pairs, at + key_width, value_width);
                add(
                    &mut sums,
                    weight * (of_weight - product),
                    pairs,
                    at,
                    key_width,
                );
            }
        }
    }
    write(&sums, gradient, index * key_width, key_width);
}

#[cube(launch, address_type = "dynamic")]
fn key_kernel<F: Float, N: Size>(
    queries: &Tensor<Vector<F, N>>,
    pairs: &Tensor<Vector<F, N>>,
    cotangents: &Tensor<Vector<F, N>>,
    numbers: &Tensor<F>,
    windows: &Tensor<i32>,
    gradient: &mut Tensor<Vector<F, N>>,
    units: usize,
    sizes: &Sizes,
    #[comptime] widths: [usize; 2],
    #[define(F)] _dtype: ElemType,
) {
    let index = ABSOLUTE_POS;
    if index >= units {
        terminate!();
    }
    let [key_width, value_width] = comptime!(widths);
    let target = target(index, sizes.heads / sizes.shared, windows, sizes);
    let at = index * (key_width + value_width);
    let key = read(pairs, at, key_width);
    let value = read(pairs, at + key_width, value_width);
    let mut of_key = zeros::<F, N>(key_width);
    let mut of_value = zeros::<F, N>(value_width);
    for plane in 0..target.planes {
        for row in 0..target.rows {
            for column in 0..target.columns {
                let query = source(&target, plane, row, column, sizes);
                let first = query * sizes.heads + target.head * sizes.shared;
                for head in 0..sizes.shared {
                    let query = first + head;
                    let (query_at, value_at) = (query * key_width, query * value_width);
                    let score = dot(&key, queries, query_at, key_width);
                    let weight = (score - numbers[2 * query]).exp();
                    let of_weight = dot(&value, cotangents, value_at, value_width);
                    let of_score = weight * (of_weight - numbers[2 * query + 1]);
                    add(&mut of_value, weight, cotangents, value_at, value_width);
                    add(&mut of_key, of_score, queries, query_at, key_width);
                }
            }
        }
    }
    write(&of_key, gradient, at, key_width);
    write(&of_value, gradient, at + key_width, value_width);
}

/// Launch parameters of a pass.
struct Launch {
    units: usize,
    cubes: CubeCount,
    cube: CubeDim,
    address: AddressType,
    vector: usize,
    sizes: SizesLaunch,
    /// Widths in vectors.
    widths: [usize; 2],
}

impl Launch {
    /// A pass over the targets of a side, given queries, and keys and values concatenated.
    fn new(side: Side, q: &CubeTensor, pairs: &CubeTensor, windows: &Windows) -> Self {
        let (shape, pairs_shape) = (q.meta.shape(), pairs.meta.shape());
        let last = shape.len() - 1;
        let widths = [shape[last], pairs_shape[last] - shape[last]];
        let (heads, key_heads) = (shape[last - 1], pairs_shape[last - 1]);
        let (targets, other) = match side {
            Side::Queries => (shape, Side::Keys),
            Side::Keys => (pairs_shape, Side::Queries),
        };
        let units = targets.iter().take(last).product();
        let cube = CubeDim::new(&q.client, units);
        let vector = [4, 2]
            .into_iter()
            .find(|size| widths.iter().all(|width| width % size == 0));
        let vector = vector.unwrap_or(1);
        let [planes, rows, columns] = windows.extents(side);
        let [source_planes, source_rows, source_columns] = windows.extents(other);
        let [plane_step, row_step, column_step] = windows.steps;
        // At least the size of any operand or result: each query has two numbers, and vectors of
        // both widths.
        let queries = shape.iter().take(last).product::<usize>();
        let pairs = pairs_shape.iter().product::<usize>();
        let elements = queries * (widths[0] + widths[1] + 2) + pairs;
        Self {
            units,
            cubes: calculate_cube_count_elemwise(&q.client, units, cube),
            cube,
            address: AddressType::from_len(elements),
            vector,
            sizes: SizesLaunch::new(
                planes,
                rows,
                columns,
                source_planes,
                source_rows,
                source_columns,
                plane_step,
                row_step,
                column_step,
                heads,
                heads / key_heads,
            ),
            widths: widths.map(|width| width / vector),
        }
    }
}

/// Number type of the kernels.
fn element(tensor: &CubeTensor) -> ElemType {
    match tensor.dtype {
        DType::F64 => f64::elem_type_native(),
        _ => f32::elem_type_native(),
    }
}

/// An empty tensor of this shape, on the device of another.
fn empty(like: &CubeTensor, shape: &[usize]) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, shape.to_vec().into(), like.dtype)
}

/// Computes outputs and logarithms.
pub(super) fn forward([q, pairs, table]: [CubeTensor; 3], windows: &Windows) -> [CubeTensor; 2] {
    let launch = Launch::new(Side::Queries, &q, &pairs, windows);
    let with_width = |width: usize| {
        let mut shape = q.meta.shape().to_vec();
        *shape.last_mut().expect("a width") = width;
        empty(&q, &shape)
    };
    let (output, lse) = (with_width(launch.widths[1] * launch.vector), with_width(1));
    let (client, dtype) = (q.client.clone(), element(&q));
    forward_kernel::launch(
        &client,
        launch.cubes,
        launch.cube,
        launch.address,
        launch.vector,
        q.into_tensor_arg(),
        pairs.into_tensor_arg(),
        table.into_tensor_arg(),
        output.clone().into_tensor_arg(),
        lse.clone().into_tensor_arg(),
        launch.units,
        launch.sizes,
        launch.widths,
        dtype,
    );
    [output, lse]
}

/// Launches a kernel of the backward pass.
macro_rules! backward {
    ($name:ident, $kernel:ident, $side:expr, $of:literal) => {
        pub(super) fn $name(memory: [CubeTensor; 5], windows: &Windows) -> [CubeTensor; 1] {
            let launch = Launch::new($side, &memory[0], &memory[1], windows);
            let gradient = empty(&memory[0], memory[$of].meta.shape());
            let (client, dtype) = (memory[0].client.clone(), element(&memory[0]));
            let [q, pairs, cotangents, numbers, table] = memory.map(CubeTensor::into_tensor_arg);
            $kernel::launch(
                &client,
                launch.cubes,
                launch.cube,
                launch.address,
                launch.vector,
                q,
                pairs,
                cotangents,
                numbers,
                table,
                gradient.clone().into_tensor_arg(),
                launch.units,
                launch.sizes,
                launch.widths,
                dtype,
            );
            [gradient]
        }
    };
}

backward!(query_gradients, query_kernel, Side::Queries, 0);
backward!(key_gradients, key_kernel, Side::Keys, 1);
