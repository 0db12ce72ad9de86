//! Identities between kinds of attention, on random shapes and meshes.

use burn::tensor::{Tensor, TensorData};
use halocline_core::{
    DeviceMesh, Launcher, Layout, Placement, Replicate, Result, Shard, ShardTensor,
};
use proptest::prelude::*;

use super::*;
use crate::prelude::*;
use crate::testing::{compare, difference, extents_between, gradient_of, normal};

/// Cuts between ranks, in thousandths of a dim: any extents, including empty ones.
type Cuts = Vec<usize>;

fn cuts() -> impl Strategy<Value = Cuts> {
    prop::collection::vec(0..=1000_usize, 0..3)
}

fn extents(cuts: &Cuts, size: usize) -> Vec<usize> {
    extents_between(cuts.iter().map(|cut| cut * size / 1000).collect(), size)
}

/// Cuts a field that is the same on all ranks along dim 1.
fn cut<const D: usize>(
    whole: &Tensor<D>,
    mesh: &DeviceMesh,
    cuts: &Cuts,
) -> Result<ShardTensor<D>> {
    let (shape, placements): ([usize; D], [Placement; 1]) = (whole.dims(), [Shard(1)]);
    let layout = Layout::new(mesh.shape(), &shape, &placements)?;
    let layout = layout.with_extents(1, &extents(cuts, shape[1]))?;
    ShardTensor::distribute(whole.clone(), mesh, &layout)
}

/// Distributes a tensor, whose gradient is required.
fn leaf<const D: usize>(
    whole: &Tensor<D>,
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<ShardTensor<D>> {
    Ok(ShardTensor::distribute(whole.clone(), mesh, placements)?.require_grad())
}

fn field<const D: usize>(shape: [usize; D], name: &str) -> Tensor<D> {
    Tensor::from_data(normal(&shape, name, 0), &Default::default())
}

fn fields<const D: usize>(shape: [usize; D]) -> [Tensor<D>; 3] {
    ["q", "k", "v"].map(|name| field(shape, name))
}

/// Runs a program of queries, keys and values on ranks that hold parts of dim 1, and returns the
/// whole result.
fn on_ranks<const D: usize>(
    fields: &[Tensor<D>; 3],
    cuts: &Cuts,
    program: impl Fn([ShardTensor<D>; 3]) -> Result<ShardTensor<D>> + Send + Sync,
) -> TensorData {
    let found = Launcher::local(cuts.len() + 1).collect(|world| {
        let mesh = world.mesh([("x", world.size())])?;
        let [q, k, v] = fields;
        let y = program([
            cut(q, &mesh, cuts)?,
            cut(k, &mesh, cuts)?,
            cut(v, &mesh, cuts)?,
        ])?;
        Ok(y.full_tensor().into_data())
    });
    found.unwrap().remove(0)
}

/// Loss with gradients by the output and by the log-sum-exps.
fn loss<const D: usize, X: Field<D>>(y: &AttentionOutput<X>) -> WithDims<X, 1> {
    (y.output.clone() * y.output.clone()).sum() + (y.lse.clone() * y.lse.clone()).sum()
}

fn assert_same(found: &TensorData, expected: &Tensor<4>) {
    let off = difference(found, &expected.clone().into_data());
    assert!(off < 5e-6, "{off:e}");
}

/// Options for a dim whose length they fit, from random numbers.
#[derive(Clone, Copy, Debug)]
struct Window {
    length: usize,
    kernel: usize,
    dilation: usize,
    stride: usize,
    causal: bool,
    periodic: bool,
}

fn window() -> impl Strategy<Value = Window> {
    let kind = prop_oneof![
        Just([false, false]),
        Just([true, false]),
        Just([false, true])
    ];
    let numbers = (2..5_usize, 1..3_usize, 1..4_usize, 0..3_usize);
    (numbers, kind).prop_map(
        |((kernel, dilation, stride, more), [causal, periodic])| Window {
            length: (kernel + more) * dilation,
            kernel,
            dilation,
            stride: stride.min(kernel),
            causal,
            periodic,
        },
    )
}

fn options<const N: usize>(windows: [Window; N]) -> NeighborhoodOptions<N> {
    NeighborhoodOptions::new(windows.map(|window| window.kernel))
        .with_dilation(windows.map(|window| window.dilation))
        .with_stride(windows.map(|window| window.stride))
        .with_causal(windows.map(|window| window.causal))
        .with_periodic(windows.map(|window| window.periodic))
}

/// Attention of fields whose dims 1 and 2 are cut over the two axes of a mesh: the whole results,
/// and the logarithms.
fn on_planes<const D: usize, const N: usize>(
    fields: &[Tensor<D>; 3],
    cuts: [&Cuts; 2],
    options: &NeighborhoodOptions<N>,
) -> [TensorData; 2] {
    let ranks = cuts.map(|cuts| cuts.len() + 1);
    let found = Launcher::local(ranks[0] * ranks[1]).collect(|world| {
        let mesh = world.mesh([("a", ranks[0]), ("b", ranks[1])])?;
        let shard = |x: &Tensor<D>| {
            let shape = x.dims();
            let mut layout = Layout::new(mesh.shape(), &shape, &[Shard(1), Shard(2)])?;
            for (dim, cuts) in [1, 2].into_iter().zip(cuts) {
                layout = layout.with_extents(dim, &extents(cuts, shape[dim]))?;
            }
            ShardTensor::distribute(x.clone(), &mesh, &layout)
        };
        let [q, k, v] = fields;
        let y = neighborhood_attention_with_lse(shard(q)?, shard(k)?, shard(v)?, options)?;
        let whole = |x: ShardTensor<D>| x.full_tensor().into_data();
        Ok([whole(y.output), whole(y.lse)])
    });
    found.unwrap().remove(0)
}

fn near<const D: usize, const N: usize>(
    options: NeighborhoodOptions<N>,
) -> impl Fn([ShardTensor<D>; 3]) -> Result<ShardTensor<D>> {
    move |[q, k, v]| neighborhood_attention(q, k, v, &options)
}

proptest! {
    #![proptest_config(crate::testing::cases(60))]

    #[test]
    fn a_window_of_the_whole_length_is_dense_attention(
        length in 2..20_usize, heads in 1..3_usize, width in 1..9_usize, cuts in cuts(),
    ) {
        let fields = fields([2, length, heads, width]);
        let [q, k, v] = fields.clone();
        let dense = q.scaled_dot_product_attention(k, v, &AttentionOptions::default());
        assert_same(&on_ranks(&fields, &cuts, near(NeighborhoodOptions::new([length]))), &dense);
    }

    /// A dilated window is a window over every `dilation`-th cell.
    #[test]
    fn dilation_is_attention_of_strided_subsequences(
        kernel in 2..6_usize, dilation in 1..4_usize, more in 0..5_usize, stride in 1..3_usize,
        kind in 0..3_usize, cuts in cuts(),
    ) {
        let (count, stride) = (kernel + more, stride.min(kernel));
        let fields = fields([1, count * dilation, 2, 4]);
        let options = NeighborhoodOptions::new([kernel]).with_stride([stride]);
        let options = options.with_causal([kind == 1]).with_periodic([kind == 2]);
        // [1, count, dilation, heads, width] → a sample for each of the subsequences.
        let apart = |x: Tensor<4>| {
            let x = x.reshape([count, dilation, 2, 4]);
            x.swap_dims(0, 1)
        };
        let [q, k, v] = fields.clone().map(apart);
        let y = q.neighborhood_attention(k, v, &options).swap_dims(0, 1);
        let y = y.reshape([1, count * dilation, 2, 4]);
        let dilated = near(options.with_dilation([dilation]));
        assert_same(&on_ranks(&fields, &cuts, dilated), &y);
    }

    #[test]
    fn a_stride_of_the_kernel_is_blocked_attention(
        kernel in 2..7_usize, blocks in 1..5_usize, cuts in cuts(),
    ) {
        let fields = fields([1, kernel * blocks, 2, 4]);
        let [q, k, v] = fields.clone().map(|x| x.reshape([blocks, kernel, 2, 4]));
        let y = q.scaled_dot_product_attention(k, v, &AttentionOptions::default());
        let y = y.reshape([1, kernel * blocks, 2, 4]);
        let blocked = near(NeighborhoodOptions::new([kernel]).with_stride([kernel]));
        assert_same(&on_ranks(&fields, &cuts, blocked), &y);
    }

    #[test]
    fn a_shift_of_a_periodic_field_shifts_the_result(
        kernel in 2..6_usize, more in 0..9_usize, shift in -20..20_isize, cuts in cuts(),
    ) {
        let fields = fields([1, kernel + more, 2, 4]);
        let options = NeighborhoodOptions::new([kernel]).with_periodic([true]);
        let [q, k, v] = fields.clone();
        let y = q.neighborhood_attention(k, v, &options);
        let found = on_ranks(&fields, &cuts, |fields| {
            let [q, k, v] = fields.map(|x| x.roll(&[shift], &[1]));
            Ok(neighborhood_attention(q, k, v, &options)?.roll(&[-shift], &[1]))
        });
        assert_same(&found, &y);
    }

    #[test]
    fn a_window_of_the_whole_plane_is_attention_to_all_cells(
        rows in 2..7_usize, columns in 2..7_usize, cuts in [cuts(), cuts()],
    ) {
        let fields = fields([1, rows, columns, 2, 4]);
        let [q, k, v] = fields.clone().map(|x| x.reshape([1, rows * columns, 2, 4]));
        let tokens = [q, k, v].map(ShardTensor::solo);
        let [q, k, v] = tokens;
        let dense = scaled_dot_product_attention_with_lse(q, k, v, &AttentionOptions::default()).unwrap();
        let found = on_planes(&fields, cuts.each_ref(), &NeighborhoodOptions::new([rows, columns]));
        for (found, expected) in found.into_iter().zip([dense.output, dense.lse]) {
            let expected = expected.into_local();
            let shape = expected.dims();
            assert_same(&TensorData::new(found.try_into_vec::<f32>().unwrap(), shape), &expected);
        }
    }

    /// With any options in any dims, ranks have the result and logarithms of one rank, and constant
    /// values stay constant.
    #[test]
    fn ranks_agree_with_one_and_constants_stay(
        windows in [window(), window()], depth in prop::option::of(window()), cuts in [cuts(), cuts()],
    ) {
        fn check<const D: usize, const N: usize>(cells: [usize; N], options: &NeighborhoodOptions<N>, cuts: [&Cuts; 2]) {
            let mut shape = [1; D];
            shape[1..=N].copy_from_slice(&cells);
            shape[D - 2..].copy_from_slice(&[2, 3]);
            let [q, k, v] = fields(shape);
            let mut one = [1; D];
            one[D - 2..].copy_from_slice(&[2, 3]);
            let value = field::<D>(one, "value");
            let [constant, _] = on_planes(&[q.clone(), k.clone(), value.clone().expand(shape)], cuts, options);
            let off = difference(&constant, &value.expand(shape).into_data());
            assert!(off < 5e-6, "{options:?}: {off:e}");
            let [whole_q, whole_k, whole_v] = [&q, &k, &v].map(|x| ShardTensor::solo(x.clone()));
            let expected = neighborhood_attention_with_lse(whole_q, whole_k, whole_v, options).unwrap();
            let found = on_planes(&[q, k, v], cuts, options);
            for (found, expected) in found.iter().zip([expected.output, expected.lse]) {
                let off = difference(found, &expected.into_local().into_data());
                assert!(off < 5e-6, "{options:?}: {off:e}");
            }
        }
        let cells = windows.map(|window| window.length);
        match depth {
            None => check::<5, 2>(cells, &options(windows), cuts.each_ref()),
            Some(depth) => check::<6, 3>(
                [cells[0], cells[1], depth.length],
                &options([windows[0], windows[1], depth]),
                cuts.each_ref(),
            ),
        }
    }

    /// Parts of the keys, some of which may be empty, and the queries of any ranks.
    #[test]
    fn parts_of_the_keys_merge_to_all_of_them(
        queries in 1..20_usize, keys in 1..30_usize, parts in cuts(), cuts in cuts(), scale in 0.1..20.0_f64,
    ) {
        let q = field([2, queries, 2, 4], "q");
        let [k, v] = ["k", "v"].map(|name| field::<4>([2, keys, 2, 4], name));
        let options = AttentionOptions::default().with_scale(scale);
        let y = q.clone().scaled_dot_product_attention(k.clone(), v.clone(), &options);
        let found = Launcher::local(cuts.len() + 1).collect(|world| {
            let mesh = world.mesh([("x", world.size())])?;
            let mut merged = Vec::new();
            let mut start = 0;
            for part in extents(&parts, keys).into_iter().filter(|part| *part > 0) {
                let whole = |x: &Tensor<4>| {
                    let x = x.clone().narrow(1, start, part);
                    ShardTensor::distribute(x, &mesh, &[Replicate])
                };
                let (q, k, v) = (cut(&q, &mesh, &cuts)?, whole(&k)?, whole(&v)?);
                merged.push(scaled_dot_product_attention_with_lse(q, k, v, &options)?);
                start += part;
            }
            let merged = AttentionOutput::merge(merged).output;
            Ok(merged.full_tensor().into_data())
        });
        assert_same(&found.unwrap()[0], &y);
    }

    /// Tokens of all queries next to the window: as one softmax over both, with its gradients.
    #[test]
    fn tokens_are_keys_of_every_query(
        kernel in 2..6_usize, more in 0..5_usize, tokens in 1..5_usize, cuts in cuts(),
    ) {
        let length = kernel + more;
        let of_field = fields([2, length, 2, 4]);
        let of_tokens = ["tk", "tv"].map(|name| field::<4>([2, tokens, 2, 4], name));
        let options = NeighborhoodOptions::new([length]);
        let tracked = |x: &Tensor<4>| x.clone().autodiff().detach().require_grad();
        // A window of the whole length, so that dense attention to both is the reference.
        let [q, k, v] = of_field.each_ref().map(tracked);
        let [tk, tv] = of_tokens.each_ref().map(tracked);
        let both = |x: &Tensor<4>, y: &Tensor<4>| Tensor::cat(vec![x.clone(), y.clone()], 1);
        let dense = AttentionOptions::default();
        let y = q.clone().scaled_dot_product_attention_with_lse(both(&k, &tk), both(&v, &tv), &dense);
        let gradients = loss(&y).backward();
        let expected: Vec<TensorData> = [y.output.inner(), y.lse.inner()]
            .into_iter()
            .chain([&q, &k, &v, &tk, &tv].map(|leaf| leaf.grad(&gradients).unwrap()))
            .map(Tensor::into_data)
            .collect();
        let found = Launcher::local(cuts.len() + 1).collect(|world| {
            let mesh = world.mesh([("x", world.size())])?;
            let [q, k, v] = of_field.each_ref().map(|x| cut(x, &mesh, &cuts));
            let [q, k, v] = [q?, k?, v?].map(ShardTensor::require_grad);
            let [tk, tv] = of_tokens.each_ref().map(|x| leaf(x, &mesh, &[Replicate]));
            let (tk, tv) = (tk?, tv?);
            let y = neighborhood_attention_with_tokens_and_lse(
                [q.clone(), k.clone(), v.clone()],
                [tk.clone(), tv.clone()],
                &options,
            )?;
            let gradients = loss(&y).backward();
            let mut found = vec![y.output, y.lse];
            found.extend([q, k, v, tk, tv].map(|leaf| leaf.grad(&gradients).expect("a gradient")));
            let whole = found.into_iter().map(|x| x.full_tensor().into_data());
            Ok(whole.collect::<Vec<_>>())
        });
        compare(&found.unwrap()[0], &expected, 1e-5, "tokens");
    }
}

/// Attention to all cells of a field and to tokens: as one softmax over both, with its gradients.
#[test]
fn tokens_are_keys_of_every_cell() {
    let of_field = fields([2, 3, 5, 2, 4]);
    let of_tokens = ["tk", "tv"].map(|name| field::<4>([1, 3, 2, 4], name));
    let whole = |x: &Tensor<4>| x.clone().autodiff().detach().require_grad();
    let expected = {
        let [q, k, v] = of_field.each_ref().map(|x| {
            let x = x.clone().autodiff().detach();
            x.reshape([2, 15, 2, 4]).require_grad()
        });
        let [tk, tv] = of_tokens.each_ref().map(whole);
        let both = |x: &Tensor<4>, tokens: &Tensor<4>| {
            Tensor::cat(vec![x.clone(), tokens.clone().repeat_dim(0, 2)], 1)
        };
        let (keys, values) = (both(&k, &tk), both(&v, &tv));
        let options = AttentionOptions::default();
        let y = q
            .clone()
            .scaled_dot_product_attention_with_lse(keys, values, &options);
        let gradients = loss(&y).backward();
        let of_cells = [y.output.inner(), y.lse.inner()].into_iter();
        let of_cells = of_cells.chain([&q, &k, &v].map(|leaf| leaf.grad(&gradients).unwrap()));
        let of_cells = of_cells.map(|x| {
            let width = x.dims()[3];
            x.reshape([2, 3, 5, 2, width]).into_data()
        });
        let of_tokens = [&tk, &tv].map(|leaf| leaf.grad(&gradients).unwrap().into_data());
        of_cells.chain(of_tokens).collect::<Vec<_>>()
    };
    let found = Launcher::local(4).collect(|world| {
        let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
        let shard = |x: &Tensor<5>| leaf(x, &mesh, &[Shard(1), Shard(2)]);
        let [q, k, v] = of_field.each_ref().map(shard);
        let (q, k, v) = (q?, k?, v?);
        let replicated = |x: &Tensor<4>| leaf(x, &mesh, &[Replicate; 2]);
        let (tk, tv) = (replicated(&of_tokens[0])?, replicated(&of_tokens[1])?);
        let y = cell_attention_with_tokens_and_lse(
            [q.clone(), k.clone(), v.clone()],
            [tk.clone(), tv.clone()],
            &AttentionOptions::default(),
        )?;
        let gradients = loss(&y).backward();
        let mut found = [y.output, y.lse]
            .map(|x| x.full_tensor().into_data())
            .to_vec();
        found.extend([q, k, v].map(|leaf| gradient_of(&leaf, &gradients)));
        found.extend([tk, tv].map(|leaf| gradient_of(&leaf, &gradients)));
        Ok(found)
    });
    for found in found.unwrap() {
        compare(&found, &expected, 1e-5, "all cells and tokens");
    }
}

/// Learned tokens of one sample, with samples on more ranks than there are samples: one rank has
/// none.
#[test]
fn tokens_of_one_sample_serve_all_samples() {
    let [q, k, v] = fields([3, 6, 2, 4]);
    let tokens = ["tk", "tv"].map(|name| field::<4>([1, 2, 2, 4], name));
    let options = NeighborhoodOptions::new([3]);
    let run = |ranks: usize| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("batch", ranks)])?;
            let shard = |x: &Tensor<4>| ShardTensor::distribute(x.clone(), &mesh, &[Shard(0)]);
            let whole = |x: &Tensor<4>| leaf(x, &mesh, &[Replicate]);
            let tokens = [whole(&tokens[0])?, whole(&tokens[1])?];
            let fields = [shard(&q)?, shard(&k)?, shard(&v)?];
            let y = neighborhood_attention_with_tokens(fields, tokens.clone(), &options)?;
            let gradients = (y.clone() * y.clone()).sum().backward();
            let mut found = vec![y.full_tensor().into_data()];
            found.extend(tokens.map(|leaf| gradient_of(&leaf, &gradients)));
            Ok(found)
        });
        found.unwrap()
    };
    let expected = run(1).remove(0);
    for found in run(4) {
        compare(&found, &expected, 1e-5, "tokens of one sample");
    }
}
