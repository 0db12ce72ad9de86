//! Cases that other libraries for sharded fields get wrong, refuse, or gather the field for. The
//! numbers are those of a collection of cases from PhysicsNeMo's ShardTensor, PyTorch's DTensor and
//! XLA; tests of the same cases in other files name them. Every test of training covers number 16,
//! backward passes on the CPU.

use std::fmt::Debug;

use burn::tensor::DType;
use halocline::core::{CommStats, Traffic};
use halocline::ops::resample::{Corners, Interpolation, Mode};
use halocline::ops::testing::{Operator, check_op, compare, random};
use halocline::prelude::*;

/// Checks an operator on all shardings of these dims against one device.
macro_rules! check {
    ($d:literal to $e:literal; $($x:ident: $shape:expr),+; $($p:ident: $of:expr),*; $dims:expr; $body:expr) => {{
        struct Case;
        impl Operator<$d, $e> for Case {
            fn apply<X: Field<$d>>(&self, inputs: Vec<X>, parameters: Vec<Tensor<$d>>) -> WithDims<X, $e> {
                let [$($x),+] = array(inputs);
                let [$($p),*] = array(parameters);
                $body
            }
        }
        check_op(&Case, &[$($shape),+], &[$($of),*], &$dims, 2e-5);
    }};
}

fn array<T: Debug, const N: usize>(tensors: Vec<T>) -> [T; N] {
    tensors.try_into().expect("as many tensors as shapes")
}

/// Returns the traffic of two ranks while `program` runs, with its backward pass, on a field of 12
/// rows.
fn sent(
    program: impl Fn(ShardTensor<4>) -> Result<ShardTensor<4>> + Send + Sync,
    placement: Placement,
) -> CommStats {
    let stats = Launcher::local(2).check(false).collect(|world| {
        let mesh = world.mesh([("x", 2)])?;
        let x = ShardTensor::<4>::ones([2, 4, 12, 6], &mesh, &[placement])?.require_grad();
        let before = world.comm_stats();
        let y = program(x.clone())?.resolve();
        let loss = (y.clone() * y).sum();
        let gradients = loss.backward();
        assert!(x.grad(&gradients).is_some());
        Ok(world.comm_stats().since(&before))
    });
    stats.unwrap().remove(0)
}

/// 1: 3×3, stride 2, padding 1 on shards of 9 and 7 cells, and stride 2 without padding on 8 and 8.
#[test]
fn strided_convolutions_whose_kernel_is_not_the_stride() {
    check!(4 to 4; x: [1, 2, 16, 5]; weight: [3, 2, 3, 3]; [2, 3]; {
        let padding = [Padding::zeros(1, 1); 2];
        x.conv(weight, None, &ConvOptions::default().with_stride([2, 2]).with_padding(padding))
    });
    check!(4 to 4; x: [1, 2, 16, 5]; weight: [3, 2, 3, 3]; [2, 3];
        x.conv(weight, None, &ConvOptions::default().with_stride([2, 2])));
}

/// 2: placement of sums over a dim before the sharded one.
#[test]
fn sums_and_means_over_a_dim_before_the_sharded_one() {
    check!(3 to 3; x: [3, 5, 7]; ; [0, 1, 2]; x.clone().sum_dims(&[0]) + x.mean_dims(&[0]));
    check!(3 to 3; x: [3, 5, 7]; ; [0, 1, 2]; x.mean_dims(&[0, 1]));
}

/// 3: pooling with padding, overlapping windows, and shards that the stride does not divide.
#[test]
fn pooling_with_padding_and_overlap_on_uneven_shards() {
    check!(4 to 4; x: [1, 2, 11, 7]; ; [0, 1, 2, 3]; {
        let options = PoolOptions::new([3, 3]).with_stride([2, 2]).with_padding([Padding::zeros(1, 1); 2]);
        x.clone().max_pool(&options) + x.avg_pool(&options)
    });
}

/// 4: interpolation with `align_corners`, to sizes that are no multiple, and to coarser grids.
#[test]
fn interpolation_to_any_size_with_either_corners() {
    for corners in [Corners::Edges, Corners::Centers] {
        struct Case(Corners);
        impl Operator<4, 4> for Case {
            fn apply<X: Field<4>>(&self, inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
                let [x] = array(inputs);
                let linear = Interpolation::new(Mode::Linear).with_corners(self.0);
                let cubic = Interpolation::new(Mode::Cubic).with_corners(self.0);
                x.interpolate([13, 9], linear).interpolate([4, 5], cubic)
            }
        }
        check_op(&Case(corners), &[[1, 2, 7, 8]], &[], &[0, 1, 2, 3], 2e-5);
    }
}

/// 5 and 10: statistics of groups where the batch is sharded as well, with a mean that cancels in
/// single precision.
#[test]
fn group_norm_of_a_sharded_batch_with_a_large_mean() {
    check!(4 to 4; x: [3, 4, 5, 7]; ; [0, 2, 3]; (x + 100.0).group_norm(2, None, None, 1e-3));
}

/// 5: statistics in half precision are those of single precision.
#[test]
fn group_norm_in_half_precision_does_not_cancel() {
    let x = random::<3>([1, 2, 64], "x", 0).inner() + 100.0;
    let half = x.cast(DType::BF16);
    let exact = half
        .clone()
        .cast(DType::F64)
        .group_norm(1, None, None, 1e-5);
    let off = (half.group_norm(1, None, None, 1e-5).cast(DType::F64) - exact)
        .abs()
        .max();
    assert!(off.into_scalar::<f64>() < 0.02);
}

/// 6: neighborhoods that are causal, strided, even, and wider than a shard.
#[test]
fn neighborhood_attention_with_every_option() {
    check!(4 to 4; q: [1, 13, 2, 4], k: [1, 13, 2, 4], v: [1, 13, 2, 4]; ; [1]; {
        let options = NeighborhoodOptions::new([4]).with_stride([2]).with_dilation([2]).with_causal([true]);
        q.neighborhood_attention(k, v, &options)
    });
    check!(4 to 4; q: [1, 7, 2, 4], k: [1, 7, 2, 4], v: [1, 7, 2, 4]; ; [0, 1, 2];
        q.neighborhood_attention(k, v, &NeighborhoodOptions::new([6])));
}

/// 7: a 3×3 convolution of sharded rows or columns.
#[test]
fn convolutions_of_sharded_rows_and_columns() {
    check!(4 to 4; x: [2, 2, 9, 11]; weight: [3, 2, 3, 3]; [2, 3]; {
        let padding = [Padding::zeros(1, 1); 2];
        x.conv(weight, None, &ConvOptions::default().with_padding(padding))
    });
}

/// 7: pooling, padding, roll, interpolation and norms that gather the field. A row is 2·4·6 cells
/// of 4 bytes.
#[test]
fn what_needs_neighbours_sends_rows_and_not_the_field() {
    const ROW: u64 = 2 * 4 * 6 * 4;
    let bytes = |program: fn(ShardTensor<4>) -> ShardTensor<4>| {
        let stats = sent(|x| Ok(program(x)), Shard(2));
        assert_eq!(stats.of(Traffic::Redistribute).bytes, 0);
        stats.of(Traffic::Exchange).bytes
    };
    // One row forward and one backward.
    let pool = |x: ShardTensor<4>| {
        let options = PoolOptions::new([3, 1]).with_stride([1, 1]);
        x.max_pool(&options.with_padding([Padding::zeros(1, 1), Padding::default()]))
    };
    assert_eq!(bytes(pool), 2 * ROW);
    let ring = |x: ShardTensor<4>| x.pad(&[(2, Padding::new(1, Boundary::Periodic))], 0.0);
    assert_eq!(bytes(ring), 2 * ROW);
    assert_eq!(bytes(|x| x.roll(&[1], &[2])), 2 * ROW);
    assert_eq!(bytes(|x| x.group_norm(2, None, None, 1e-5)), 0);
    // With a cell beyond each end of the row.
    let row = ROW / 6 * 8;
    assert_eq!(
        bytes(|x| x.upsample_bilinear([Boundary::Replicate; 2])),
        2 * row
    );
}

/// 8: random numbers depend on the place in the field, not on ranks.
#[test]
fn dropout_drops_the_same_elements_on_any_mesh() {
    check!(3 to 3; x: [3, 5, 7]; ; [0, 1, 2]; x.dropout(0.5, RandomKey::new(3, "drop")));
}

/// 9: 5 cells on 4 ranks, and fewer cells than ranks.
#[test]
fn fewer_cells_than_ranks() {
    check!(3 to 3; x: [2, 2, 5]; weight: [2, 2, 3]; [2]; {
        let ring = [Padding::new(1, Boundary::Periodic)];
        x.conv(weight, None, &ConvOptions::default().with_padding(ring)).gelu()
    });
    check!(3 to 3; x: [1, 2, 2]; weight: [2, 2, 2]; [2]; x.conv(weight, None, &ConvOptions::<1>::default()));
}

/// 9: 9 cells on 8 ranks, two on the first and one on each other.
#[test]
fn nine_cells_on_eight_ranks() {
    let run = |ranks: usize| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("x", ranks)])?;
            let [x, weight] =
                [[1, 2, 9], [2, 2, 3]].map(|shape| random::<3>(shape, "x", 0).inner());
            let x = ShardTensor::distribute(x, &mesh, &[Shard(2)])?.require_grad();
            let ring = [Padding::new(1, Boundary::Periodic)];
            let options = ConvOptions::default().with_padding(ring);
            let y = x.clone().conv(weight, None, &options).gelu();
            let pooled = y.max_pool(&PoolOptions::new([2]).with_stride([2]));
            let gradients = pooled.clone().square().sum().backward();
            let of_x = x.grad(&gradients).expect("a gradient");
            Ok([pooled, of_x].map(|x| x.full_tensor().into_data()))
        });
        found.unwrap().remove(0)
    };
    compare(&run(8), &run(1), 1e-5, "8 ranks");
}

/// 10: a convolution, a norm and attention on meshes of two axes, with samples on several ranks.
#[test]
fn backward_passes_on_meshes_of_two_axes() {
    check!(4 to 4; x: [3, 4, 7, 5]; weight: [4, 4, 3, 3]; [0, 2, 3]; {
        let padding = [Padding::zeros(1, 1), Padding::new(1, Boundary::Periodic)];
        x.conv(weight, None, &ConvOptions::default().with_padding(padding)).group_norm(2, None, None, 1e-3)
    });
    check!(4 to 4; q: [3, 7, 2, 4], k: [3, 7, 2, 4], v: [3, 7, 2, 4]; ; [0, 1, 2];
        q.scaled_dot_product_attention(k, v, &AttentionOptions::default()));
}

/// 11: even kernels whose stride is another, overlap of transposed windows, a periodic dim, batch
/// and instance norms.
#[test]
fn even_kernels_transposed_overlap_and_norms() {
    check!(3 to 3; x: [2, 2, 11]; weight: [3, 2, 4]; [0, 2]; {
        let ring = [Padding::new(2, Boundary::Periodic)];
        x.conv(weight, None, &ConvOptions::default().with_stride([3]).with_padding(ring))
    });
    check!(3 to 3; x: [2, 2, 7]; weight: [2, 3, 5]; [0, 2];
        x.conv_transpose(weight, None, &ConvTransposeOptions::default().with_stride([2])));
    check!(3 to 3; x: [3, 2, 7]; ; [0, 1, 2];
        x.try_op(|x| Ok(halocline::ops::norm::batch_norm_train(x, None, None, 1e-3)?.0)).expect("a rule"));
    check!(3 to 3; x: [3, 2, 7]; ; [0, 2]; x.group_norm(2, None, None, 1e-3));
}

/// 12: attention on a ring with unequal shards, causal, with queries that share keys.
#[test]
fn ring_attention_with_unequal_shards() {
    struct Grouped;

    impl Operator<4, 4> for Grouped {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            let x = inputs.remove(0);
            let keys = RearrangeField::narrow(x.clone(), 2, 0, 1);
            let values = RearrangeField::narrow(x.clone(), 2, 1, 1);
            x.scaled_dot_product_attention(
                keys,
                values,
                &AttentionOptions::default().with_causal(true),
            )
        }
    }
    check_op(&Grouped, &[[2, 9, 2, 4]], &[], &[0, 1], 2e-5);
}

/// 12: an element of the result that is zero in two blocks of keys.
#[test]
fn ring_attention_whose_values_are_zero() {
    check!(4 to 4; q: [1, 8, 1, 4], k: [1, 8, 1, 4], v: [1, 8, 1, 4]; ; [1];
        q.scaled_dot_product_attention(k, v * 0.0, &AttentionOptions::default()));
}

/// 13: a halo of five cells with shards of one or two.
#[test]
fn convolutions_wider_than_the_neighbours_shard() {
    check!(3 to 3; x: [1, 2, 7]; weight: [2, 2, 11]; [2]; {
        let wide = [Padding::new(5, Boundary::Reflect)];
        x.conv(weight, None, &ConvOptions::default().with_padding(wide))
    });
}

/// 14: a scatter sends each rank its shard and no more.
#[test]
fn a_scatter_sends_shards() {
    let stats = Launcher::local(3).check(false).collect(|world| {
        let mesh = world.mesh([("x", 3)])?;
        let before = world.comm_stats();
        let whole = world
            .is_root()
            .then(|| Tensor::<2>::ones([300, 2], world.device()));
        scatter_tensor(whole, 0, &mesh, &[Shard(0)])?;
        Ok(world.comm_stats().since(&before))
    });
    let bytes: u64 = Traffic::ALL
        .iter()
        .map(|traffic| stats.as_ref().unwrap()[0].of(*traffic).bytes)
        .sum();
    let shards = 2 * 100 * 2 * 4;
    assert!((shards..shards + 1000).contains(&bytes), "{bytes} bytes");
}

/// XLA's issue 47945: a grouped convolution of a sharded batch gathers its input.
#[test]
fn grouped_convolution_on_a_batch_sharded_input_gathers_nothing() {
    check!(4 to 4; x: [3, 4, 5, 7]; weight: [6, 2, 3, 3]; [0];
        x.conv(weight, None, &ConvOptions::<2>::default().with_groups(2)));
    let weight = Tensor::<4>::ones([4, 2, 3, 3], &Default::default());
    let options = ConvOptions::<2>::default().with_groups(2);
    let stats = sent(
        |x| halocline::ops::conv::conv(x, weight.clone(), None, &options),
        Shard(0),
    );
    for traffic in Traffic::ALL {
        let bytes = stats.of(traffic).bytes;
        assert!(
            traffic == Traffic::Reduce || bytes == 0,
            "{traffic:?}: {bytes} bytes"
        );
    }
}

/// JAX's issue 39301: the gradient of a roll along a sharded axis, here by more than a shard and
/// also backwards.
#[test]
fn reverse_mode_of_roll_on_a_sharded_axis() {
    check!(2 to 2; x: [7, 3]; ; [0, 1]; x.clone().roll(&[5], &[0]) * x.roll(&[-2], &[0]));
    // The gradient of cell 6, which the roll moves to the first place.
    let gradients = Launcher::local(3).collect(|world| {
        let mesh = world.mesh([("x", 3)])?;
        let x = ShardTensor::<1>::ones([7], &mesh, &[Shard(0)])?.require_grad();
        let first = x.clone().roll(&[1], &[0]).narrow(0, 0, 1).sum();
        let gradient = x.grad(&first.backward()).expect("a gradient");
        Ok(gradient.full_tensor().into_data())
    });
    gradients.unwrap()[0].assert_eq(&[0.0_f32, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0].into(), true);
}
