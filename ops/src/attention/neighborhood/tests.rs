use burn::tensor::{DType, Tensor, TensorData};
use halocline_core::{Launcher, Shard, ShardTensor};
use proptest::prelude::*;

use super::*;
use crate::attention::{AttentionField, OPERATORS};
use crate::driver::Neighborhood;
use crate::golden::{Arguments, Attributes};
use crate::prelude::*;
use crate::testing::{check_golden, compare, difference, gradient_of, normal, random, random_leaf};

fn arguments(
    shape: &[usize],
    key_heads: usize,
    value_width: usize,
    numbers: &[(&str, Vec<usize>)],
) -> Arguments {
    let dims = shape.len();
    let mut keys = shape.to_vec();
    keys[dims - 2] = key_heads;
    let mut values = keys.clone();
    values[dims - 1] = value_width;
    let input = |name: &str, shape: &[usize]| (name.to_string(), normal(shape, name, 0));
    let numbers = numbers.iter().map(|(key, list)| {
        let list = list.iter().map(|&number| number as f64).collect();
        ((*key).to_string(), list)
    });
    Arguments {
        attributes: Attributes {
            numbers: numbers.collect(),
            ..Attributes::default()
        },
        inputs: vec![input("q", shape), input("k", &keys), input("v", &values)],
        ..Arguments::default()
    }
}

fn operator(name: &str) -> &'static crate::golden::Golden {
    let mut all = OPERATORS.iter();
    all.find(|golden| golden.name == name).expect("an operator")
}

/// Result and logarithms of sums of exponentials, by the definition in f64: every query and key one
/// by one.
fn by_definition<const N: usize>(
    arguments: &Arguments,
    options: &NeighborhoodOptions<N>,
) -> [TensorData; 2] {
    let [q, k, v] = [0, 1, 2].map(|input| {
        let (_, data) = &arguments.inputs[input];
        (
            data.shape().to_vec(),
            data.iter::<f64>().collect::<Vec<f64>>(),
        )
    });
    let shape = q.0.clone();
    let (batch, heads, width) = (shape[0], shape[N + 1], shape[N + 2]);
    let (key_heads, value_width) = (k.0[N + 1], v.0[N + 2]);
    let cells: usize = shape[1..=N].iter().product();
    let coords = |cell: usize| {
        let mut rest = cell;
        let mut coords = [0; N];
        for dim in (0..N).rev() {
            coords[dim] = rest % shape[dim + 1];
            rest /= shape[dim + 1];
        }
        coords
    };
    let reaches = |query: usize, key: usize| -> usize {
        let (query, key) = (coords(query), coords(key));
        let times = (0..N).map(|dim| {
            let (own, size) = (&options.dims[dim], shape[dim + 1]);
            let class = own.class_size(query[dim], size);
            let keys = own.keys(query[dim] / own.dilation, class);
            let cell = |index: isize| {
                let cell = (query[dim] % own.dilation) as isize + index * own.dilation as isize;
                cell.rem_euclid(size as isize) as usize
            };
            keys.filter(|index| cell(*index) == key[dim]).count()
        });
        times.product()
    };
    let scale = options.scale.unwrap_or(1.0 / (width as f64).sqrt());
    let (mut y, mut lse) = (Vec::new(), Vec::new());
    for b in 0..batch {
        for query in 0..cells {
            for h in 0..heads {
                let shared = h * key_heads / heads;
                let row = |data: &[f64], cell: usize, head: usize, heads: usize, width: usize| {
                    let start = ((b * cells + cell) * heads + head) * width;
                    data[start..start + width].to_vec()
                };
                let own = row(&q.1, query, h, heads, width);
                let scores: Vec<(f64, usize)> = (0..cells)
                    .filter_map(|key| {
                        let times = reaches(query, key);
                        let key_row = row(&k.1, key, shared, key_heads, width);
                        let dot: f64 = own.iter().zip(&key_row).map(|(a, b)| a * b).sum();
                        (times > 0).then(|| ((dot * scale).exp() * times as f64, key))
                    })
                    .collect();
                let sum: f64 = scores.iter().map(|(weight, _)| weight).sum();
                let mut mean = vec![0.0; value_width];
                for (weight, key) in scores {
                    let value = row(&v.1, key, shared, key_heads, value_width);
                    mean.iter_mut()
                        .zip(value)
                        .for_each(|(mean, value)| *mean += weight / sum * value);
                }
                y.extend(mean);
                lse.push(sum.ln());
            }
        }
    }
    let mut shape = shape;
    [(y, value_width), (lse, 1)].map(|(numbers, width)| {
        shape[N + 2] = width;
        TensorData::new(numbers, shape.clone())
    })
}

fn on_one_rank<const D: usize, const N: usize>(
    arguments: &Arguments,
    options: &NeighborhoodOptions<N>,
) -> [TensorData; 2] {
    let device = burn::tensor::Device::default();
    let inputs = [0, 1, 2].map(|input| {
        let data = arguments.inputs[input].1.clone();
        let dtype = data.dtype();
        ShardTensor::solo(Tensor::<D>::from_data(data, (&device, dtype)))
    });
    let [q, k, v] = inputs;
    let y = neighborhood_attention_with_lse(q, k, v, options).unwrap();
    [y.output, y.lse].map(|x| x.into_local().into_data())
}

/// The larger of the differences of results and of logarithms.
fn largest_difference(found: &[TensorData; 2], expected: &[TensorData; 2]) -> f64 {
    let pairs = found.iter().zip(expected);
    pairs
        .map(|(found, expected)| difference(found, expected))
        .fold(0.0, f64::max)
}

#[test]
fn the_result_is_that_of_the_definition() {
    let cases = [
        ([1, 9, 11, 4, 8], 2, 5, NeighborhoodOptions::new([3, 5])),
        (
            [2, 8, 12, 2, 3],
            2,
            3,
            NeighborhoodOptions::new([4, 3]).with_dilation([2, 3]),
        ),
        (
            [1, 7, 12, 3, 17],
            1,
            16,
            NeighborhoodOptions::new([3, 4]).with_periodic([false, true]),
        ),
        (
            [1, 6, 40, 1, 20],
            1,
            20,
            NeighborhoodOptions::new([5, 7]).with_stride([2, 3]),
        ),
        (
            [1, 6, 12, 1, 4],
            1,
            4,
            NeighborhoodOptions::new([2, 6])
                .with_periodic([false, true])
                .with_dilation([3, 2]),
        ),
        // Two copies of a cell, in reverse order.
        (
            [1, 2, 2, 1, 3],
            1,
            2,
            NeighborhoodOptions::new([2, 2]).with_periodic([true, false]),
        ),
        (
            [1, 10, 9, 2, 4],
            2,
            4,
            NeighborhoodOptions::new([4, 3]).with_causal([true, false]),
        ),
    ];
    for (shape, key_heads, value_width, options) in cases {
        let arguments = arguments(&shape, key_heads, value_width, &[]);
        let expected = by_definition(&arguments, &options);
        let found = on_one_rank::<5, 2>(&arguments, &options);
        let off = largest_difference(&found, &expected);
        assert!(off < 2e-6, "{shape:?}, {options:?}: {off:e}");
        let exact = arguments.cast(DType::F64);
        let found = on_one_rank::<5, 2>(&exact, &options);
        let off = largest_difference(&found, &expected);
        assert!(off < 1e-13, "{shape:?}, {options:?}: {off:e}");
    }
}

/// Uneven and empty extents of batch, space and heads, on meshes of up to three axes.
#[test]
fn shards_give_the_result_and_gradients_of_one_rank() {
    let one = arguments(
        &[2, 13, 2, 5],
        2,
        3,
        &[
            ("kernel_size", vec![5]),
            ("dilation", vec![2]),
            ("stride", vec![2]),
        ],
    );
    check_golden(operator("na1d"), &one, &[1, 2, 3, 4], 1e-5);
    let ring = arguments(
        &[1, 6, 8, 4, 6],
        2,
        6,
        &[
            ("kernel_size", vec![3, 4]),
            ("dilation", vec![1, 2]),
            ("periodic", vec![0, 1]),
        ],
    );
    check_golden(operator("na2d"), &ring, &[2, 3, 4], 1e-5);
    check_golden(
        operator("na2d"),
        &ring.clone().cast(DType::F64),
        &[2, 4],
        1e-12,
    );
    check_golden(operator("na2d"), &ring.cast(DType::BF16), &[2], 3e-2);
    let cube = arguments(
        &[1, 5, 4, 7, 1, 3],
        1,
        3,
        &[
            ("kernel_size", vec![3, 2, 3]),
            ("is_causal", vec![1, 0, 0]),
            ("periodic", vec![0, 0, 1]),
        ],
    );
    check_golden(operator("na3d"), &cube, &[2, 8], 1e-5);
}

/// The query heads of a rank are those that its key heads serve.
#[test]
fn heads_of_grouped_queries_may_be_sharded() {
    let options = NeighborhoodOptions::new([3, 4]).with_periodic([false, true]);
    let run = |axes: [usize; 2]| {
        let found = Launcher::local(axes[0] * axes[1]).collect(|world| {
            let mesh = world.mesh([("heads", axes[0]), ("lat", axes[1])])?;
            let leaf = |name: &str, heads: usize, width: usize| {
                random_leaf([1, 9, 6, heads, width], name, &mesh, &[Shard(3), Shard(1)])
            };
            let leaves = [leaf("q", 6, 4)?, leaf("k", 2, 4)?, leaf("v", 2, 3)?];
            let [q, k, v] = leaves.clone();
            let y = neighborhood_attention(q, k, v, &options)?;
            let gradients = (y.clone() * y.clone()).sum().backward();
            let mut found = vec![y.full_tensor().into_data()];
            found.extend(leaves.iter().map(|leaf| gradient_of(leaf, &gradients)));
            Ok(found)
        });
        found.unwrap()
    };
    let expected = run([1, 1]).remove(0);
    for axes in [[2, 1], [2, 2]] {
        for found in run(axes) {
            compare(&found, &expected, 1e-5, &format!("{axes:?}"));
        }
    }
}

#[test]
fn many_keys_that_all_queries_reach_are_those_of_windows() {
    let [q, k, v] = ["q", "k", "v"].map(|name| random::<4>([1, MANY, 1, 4], name, 0).inner());
    let options = NeighborhoodOptions::new([MANY]);
    let [whole_q, whole_k, whole_v] = [&q, &k, &v].map(|x| ShardTensor::solo(x.clone()));
    assert!(dense(&whole_q, &options).is_some());
    assert!(dense(&whole_q, &options.with_causal([true])).is_none());
    let prepared = Prepared::new(&whole_q, &whole_k, &whole_v, &options, false).unwrap();
    let expected = local(whole_q, whole_k, whole_v, &prepared).unwrap();
    let found = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("lon", 2)])?;
        let shard = |x: &Tensor<4>| ShardTensor::distribute(x.clone(), &mesh, &[Shard(1)]);
        let y = neighborhood_attention(shard(&q)?, shard(&k)?, shard(&v)?, &options)?;
        Ok(y.full_tensor().into_data())
    });
    let off = difference(&found.unwrap()[0], &expected.into_data());
    assert!(off < 1e-5, "{off:e}");
}

/// The gradient of a key's value from queries of its own rank, 257, would be 256 in bf16, and 256
/// with that of another.
#[test]
fn gradients_of_halos_are_rounded_once() {
    let found = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("lon", 2)])?;
        let field = |cells: [f64; 4]| {
            let cells = TensorData::new(cells.to_vec(), [1, 4, 1, 1]);
            let cells = Tensor::<4>::from_data(cells, (world.device(), DType::BF16)).inner();
            ShardTensor::distribute(cells, &mesh, &[Shard(1)])
        };
        let (q, k, v) = (field([0.0; 4])?, field([0.0; 4])?, field([0.0; 4])?);
        let v = v.require_grad();
        let y = neighborhood_attention(q, k, v.clone(), &NeighborhoodOptions::new([3]))?;
        let gradients = (y * field([768.0, 3.0, 3.0, 0.0])?).sum().backward();
        let of_v = v.grad(&gradients).expect("a gradient");
        Ok(of_v.full_tensor().into_data())
    });
    let found: Vec<f64> = found.unwrap()[0].iter::<f64>().collect();
    assert_eq!(found[1], 258.0);
}

/// The gradient in a random direction matches finite differences, in f64.
#[test]
fn gradients_are_those_of_differences() {
    // Vectors of neighbors in the second dim, the last of which is not full.
    let shape = [1, 6, 13, 2, 3];
    let options = NeighborhoodOptions::new([3, 4])
        .with_periodic([false, true])
        .with_stride([2, 1]);
    let exact = arguments(&shape, 1, 4, &[]).cast(DType::F64);
    let device = burn::tensor::Device::default().autodiff();
    let leaves: Vec<Tensor<5>> = exact
        .inputs
        .iter()
        .map(|(_, data)| Tensor::from_data(data.clone(), (&device, DType::F64)).require_grad())
        .collect();
    let loss = |inputs: &[Tensor<5>]| {
        let [q, k, v] = [0, 1, 2].map(|input| inputs[input].clone());
        let y = q.neighborhood_attention(k, v, &options);
        let weight = normal(&y.dims(), "weight", 0).convert_dtype(DType::F64);
        (y * Tensor::from_data(weight, (&device, DType::F64))).sum()
    };
    let gradients = loss(&leaves).backward();
    for (input, leaf) in leaves.iter().enumerate() {
        let direction = normal(&leaf.dims(), "direction", input).convert_dtype(DType::F64);
        let direction = Tensor::<5>::from_data(direction, (&device, DType::F64));
        let moved = |step: f64| {
            let mut inputs = leaves.clone();
            inputs[input] = inputs[input].clone() + direction.clone() * step;
            loss(&inputs).into_scalar::<f64>()
        };
        let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        let gradient = leaf.grad(&gradients).expect("a gradient");
        let expected = (gradient * direction.inner()).sum().into_scalar::<f64>();
        assert!(
            (slope - expected).abs() < 1e-7 * expected.abs().max(1.0),
            "{input}: {slope} {expected}"
        );
    }
}

#[test]
fn kernels_and_burns_operators_agree() {
    let edges = NeighborhoodOptions::new([3, 4])
        .with_causal([true, false])
        .with_periodic([false, true]);
    agree([2, 6, 8, 4, 5], 2, &edges);
    // Neighbors in lanes, with several heads of keys.
    let strided = NeighborhoodOptions::new([5, 7]).with_stride([2, 1]);
    agree([2, 20, 45, 6, 8], 3, &strided);
    agree([1, 9, 6, 40, 4, 8], 2, &NeighborhoodOptions::new([3, 3, 5]));
}

/// Compares results and gradients of kernels with those of burn's operators.
fn agree<const D: usize, const N: usize>(
    shape: [usize; D],
    key_heads: usize,
    options: &NeighborhoodOptions<N>,
) {
    let arguments = arguments(&shape, key_heads, 3, &[]);
    let device = burn::tensor::Device::flex().autodiff();
    let inputs = || {
        let inputs = arguments.inputs.iter();
        let inputs =
            inputs.map(|(_, data)| Tensor::<D>::from_data(data.clone(), &device).require_grad());
        inputs.collect::<Vec<_>>()
    };
    let gradients = |inputs: Vec<Tensor<D>>, y: Tensor<D>| {
        let gradients = (y.clone() * y.clone().detach().cos()).sum().backward();
        let inputs = inputs
            .iter()
            .map(|input| input.grad(&gradients).expect("a gradient"));
        std::iter::once(y.inner())
            .chain(inputs)
            .map(Tensor::into_data)
            .collect::<Vec<_>>()
    };
    let ours = inputs();
    let y = ours[0]
        .clone()
        .neighborhood_attention(ours[1].clone(), ours[2].clone(), options);
    let ours = gradients(ours, y);
    let burns = inputs();
    let [q, k, v] = [0, 1, 2].map(|input| ShardTensor::solo(burns[input].clone()));
    let prepared = Prepared::new(&q, &k, &v, options, false).unwrap();
    let burns = gradients(burns, composed::attention(q, k, v, &prepared).unwrap());
    for (ours, burns) in ours.iter().zip(&burns) {
        assert!(difference(ours, burns) < 1e-5);
    }
}

fn case() -> impl Strategy<Value = (NeighborhoodOptions<2>, [usize; 2])> {
    let dim = || {
        (2..6_usize, 1..3_usize, 0..3_usize, 0..7_usize).prop_flat_map(
            |(kernel, dilation, kind, more)| {
                (1..=kernel).prop_map(move |stride| {
                    let more = if kind == 2 { more * dilation } else { more };
                    let neighborhood = Neighborhood {
                        kernel,
                        dilation,
                        stride,
                        causal: kind == 1,
                        periodic: kind == 2,
                    };
                    (neighborhood, kernel * dilation + more)
                })
            },
        )
    };
    [dim(), dim()].prop_map(|dims| {
        let options = NeighborhoodOptions {
            dims: dims.map(|(neighborhood, _)| neighborhood),
            scale: None,
        };
        (options, dims.map(|(_, size)| size))
    })
}

proptest! {
    #![proptest_config(crate::testing::cases(300))]

    /// Matches the definition, and a constant field stays constant.
    #[test]
    fn random_neighborhoods_are_those_of_the_definition((options, [height, width]) in case(), heads in 1..4_usize) {
        let arguments = arguments(&[1, height, width, heads, 3], 1, 2, &[]);
        let found = on_one_rank::<5, 2>(&arguments, &options);
        let off = largest_difference(&found, &by_definition(&arguments, &options));
        prop_assert!(off < 5e-6, "{off:e}");
        let mut constant = arguments;
        let shape = constant.inputs[2].1.shape().to_vec();
        let count = shape.iter().product();
        constant.inputs[2].1 = TensorData::new(vec![1.5_f32; count], shape);
        let [found, _] = on_one_rank::<5, 2>(&constant, &options);
        for value in found.iter::<f64>() {
            prop_assert!((value - 1.5).abs() < 1e-5, "{value}");
        }
    }
}
