use burn::nn::conv::ConvTranspose2dConfig;
use burn::tensor::Tensor;
use halocline_core::{Launcher, Partial, Placement, ReduceOp, Replicate, Shard};

use super::*;
use crate::prelude::*;
use crate::testing::{
    Operator, check_op, compare, cotangent_of, difference, gradient_of, random, random_leaf,
};

struct Up<const N: usize>(ConvTransposeOptions<N>);

impl<const D: usize, const N: usize> Operator<D, D> for Up<N> {
    fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, mut parameters: Vec<Tensor<D>>) -> X {
        inputs
            .remove(0)
            .conv_transpose(parameters.remove(0), None, &self.0)
    }
}

/// Compares a transposed convolution of two dims on shards with one on one device.
fn check_plane(options: ConvTransposeOptions<2>) {
    check_op(
        &Up(options),
        &[[2, 3, 5, 7]],
        &[[3, 2, 3, 4]],
        &[0, 2, 3],
        1e-5,
    );
}

/// Any transposed convolution with overlap.
#[test]
fn windows_overlap_across_ranks() {
    let plain = ConvTransposeOptions::default();
    let all = [
        plain.with_stride([2, 3]).with_padding([1, 2]),
        plain
            .with_stride([1, 2])
            .with_dilation([3, 1])
            .with_output_padding([2, 1]),
        plain.with_stride([4, 5]).with_output_padding([3, 0]),
    ];
    all.into_iter().for_each(check_plane);
    check_op(
        &Up(ConvTransposeOptions::<1>::default()),
        &[[1, 2, 9]],
        &[[2, 2, 12]],
        &[2],
        1e-5,
    );
}

/// Parts of windows cross the date line as they cross shards, also where a window is longer than
/// the field.
#[test]
fn windows_go_around_a_periodic_dim() {
    let plain = ConvTransposeOptions::default();
    let all = [
        plain
            .with_padding([1, 1])
            .with_boundary([Boundary::Zeros, Boundary::Periodic]),
        plain
            .with_stride([2, 3])
            .with_padding([1, 2])
            .with_boundary([Boundary::Periodic; 2]),
        plain
            .with_stride([4, 1])
            .with_dilation([1, 4])
            .with_boundary([Boundary::Periodic; 2]),
    ];
    all.into_iter().for_each(check_plane);
}

/// ⟨conv(x), y⟩ = ⟨x, conv_transpose(y)⟩ with the same stride, dilation and padding.
#[test]
fn around_a_dim_it_is_the_adjoint_of_a_convolution() {
    for [kernel, stride, dilation, padding] in [
        [3, 1, 1, 1],
        [4, 2, 1, 1],
        [3, 2, 2, 2],
        [2, 3, 1, 0],
        [5, 1, 2, 4],
    ] {
        let x = random([2, 3, 5 * stride], "x", 0).inner();
        let y = random([2, 4, 5], "y", 0).inner();
        let weight = random([4, 3, kernel], "weight", 0).inner();
        let direct = ConvOptions::default()
            .with_stride([stride])
            .with_dilation([dilation])
            .with_padding([Padding::new(padding, Boundary::Periodic)]);
        let options = ConvTransposeOptions::default()
            .with_stride([stride])
            .with_dilation([dilation])
            .with_padding([padding])
            .with_boundary([Boundary::Periodic]);
        let products = [
            x.clone().conv(weight.clone(), None, &direct) * y.clone(),
            y.conv_transpose(weight, None, &options) * x,
        ];
        let [there, back] = products.map(|product| product.sum().into_scalar::<f32>());
        assert!((there - back).abs() < 1e-3, "{options:?}: {there}, {back}");
    }
}

#[test]
fn a_periodic_dim_is_one_of_endless_copies() {
    for [kernel, stride, dilation, padding] in [
        [3, 1, 1, 1],
        [4, 1, 1, 1],
        [3, 2, 1, 0],
        [1, 2, 1, 1],
        [4, 1, 4, 2],
    ] {
        let x = random([2, 3, 5], "x", 0).inner();
        let weight = random([3, 4, kernel], "weight", 0).inner();
        let copies = Tensor::cat(vec![x.clone(); 5], 2);
        let plain = ConvTransposeOptions::default()
            .with_stride([stride])
            .with_dilation([dilation]);
        let ring = plain
            .with_padding([padding])
            .with_boundary([Boundary::Periodic]);
        let found = x.conv_transpose(weight.clone(), None, &ring);
        let expected = copies.conv_transpose(weight, None, &plain);
        // Windows of the third copy begin ten strides after those of the first.
        let expected = expected.narrow(2, 10 * stride + padding, 5 * stride);
        let off = difference(&found.into_data(), &expected.into_data());
        assert!(off < 1e-5, "{ring:?}: {off}");
    }
}

#[test]
fn burns_module_gives_what_it_gives_there() {
    let config = ConvTranspose2dConfig::new([2, 4], [3, 4])
        .with_stride([2, 2])
        .with_padding([1, 1]);
    let layer = config.with_padding_out([1, 0]).init(&Default::default());
    let x = random([1, 2, 5, 7], "x", 0).inner();
    let (ours, theirs) = (x.clone().apply(&layer), layer.forward(x));
    assert!(difference(&ours.into_data(), &theirs.into_data()) < 1e-5);
}

#[test]
fn misuse_is_told() {
    let refused = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("x", 2)])?;
        let x = ShardTensor::<3>::ones([1, 2, 4], &mesh, &[Shard(1)])?;
        let weight = Tensor::<3>::ones([2, 1, 3], world.device());
        let options = ConvTransposeOptions::<1>::default();
        let wide = options.with_padding([4]);
        let whole = ShardTensor::<3>::ones([1, 2, 4], &mesh, &[Shard(2)])?;
        let error = conv_transpose(whole, weight.clone(), None, &wide)
            .unwrap_err()
            .to_string();
        assert!(error.contains("leaves nothing of 6 outputs"), "{error}");
        let ring = options.with_stride([2]).with_boundary([Boundary::Periodic]);
        for (wrong, expected) in [
            (
                ring.with_output_padding([1]),
                "output padding 1 of a periodic dim; expected zero",
            ),
            (
                ring.with_boundary([Boundary::Reflect]),
                "boundary Reflect; expected Zeros or Periodic",
            ),
        ] {
            let whole = ShardTensor::<3>::ones([1, 2, 4], &mesh, &[Shard(2)])?;
            let error = conv_transpose(whole, weight.clone(), None, &wrong);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        conv_transpose(x, weight, None, &options).map(drop)
    });
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("no rule for Shard(1)"), "{error}");
}

/// Value and gradients for a field of six channels, with weights for four outputs or, in groups,
/// six.
fn laid(
    ranks: usize,
    groups: usize,
    [x, weight, bias]: [Placement; 3],
) -> Vec<Vec<burn::tensor::TensorData>> {
    let found = Launcher::local(ranks).collect(|world| {
        let mesh = world.mesh([("tensor", ranks)])?;
        let outputs = if groups == 1 { 4 } else { 6 };
        let x = random_leaf([2, 6, 5, 4], "x", &mesh, &[x])?;
        let weight = random_leaf([6, outputs / groups, 3, 2], "weight", &mesh, &[weight])?;
        let bias = random_leaf([outputs], "bias", &mesh, &[bias])?;
        let options = ConvTransposeOptions::default()
            .with_stride([2, 1])
            .with_groups(groups);
        // A bias is added to the sum, not to each of its parts.
        let partial = weight.placements() == [Shard(0)] && groups == 1;
        let operand = (!partial).then(|| Operand::from(bias.clone()));
        let y = conv_transpose(x.clone(), weight.clone(), operand, &options)?;
        if partial {
            assert_eq!(y.placements(), [Partial(ReduceOp::Sum)]);
        }
        let y = y.resolve();
        let y = match partial {
            true => y + crate::rearrange::reshape::<1, 4, _>(bias.clone(), [1, outputs, 1, 1])?,
            false => y,
        };
        let gradients = (y.clone() * cotangent_of(&y)?).sum().backward();
        Ok(vec![
            y.full_tensor().into_data(),
            gradient_of(&x, &gradients),
            gradient_of(&weight, &gradients),
            gradient_of(&bias, &gradients),
        ])
    });
    found.unwrap()
}

#[test]
fn channels_may_be_sharded_with_the_weight() {
    for (groups, placements) in [
        (1, [Replicate, Shard(1), Shard(0)]),
        (1, [Shard(1), Shard(0), Replicate]),
        (3, [Shard(1), Shard(0), Shard(0)]),
        (3, [Shard(1), Replicate, Replicate]),
    ] {
        let expected = laid(1, groups, [Replicate; 3]).remove(0);
        for found in laid(3, groups, placements) {
            let place = format!("{groups} groups, {placements:?}");
            compare(&found, &expected, 1e-5, &place);
        }
    }
}
