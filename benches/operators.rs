//! Single calls: `cargo bench --bench operators`.

use std::sync::Arc;

use divan::{Bencher, black_box};
use halocline::core::MeshShape;
use halocline::core::plan::{ExchangePlan, Need, Source};
use halocline::prelude::*;

fn main() {
    divan::main();
}

fn field(size: usize) -> Tensor<4> {
    Tensor::ones([1, 16, size, size], &Device::default())
}

#[divan::bench(args = [3, 64])]
fn conv2d_of_burn(bencher: Bencher, size: usize) {
    let (x, weight) = (
        field(size),
        Tensor::ones([16, 16, 3, 3], &Device::default()),
    );
    let options = || burn::tensor::ops::ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
    bencher
        .bench_local(|| burn::tensor::module::conv2d(x.clone(), weight.clone(), None, options()));
}

#[divan::bench(args = [3, 64])]
fn conv2d_on_one_rank(bencher: Bencher, size: usize) {
    let (x, weight) = (
        ShardTensor::solo(field(size)),
        Tensor::ones([16, 16, 3, 3], &Device::default()),
    );
    let options = ConvOptions::<2>::default().with_padding([Padding::new(1, Boundary::Zeros); 2]);
    bencher.bench_local(|| x.clone().conv(weight.clone(), None, &options));
}

/// Uncached plan: a halo of one cell on a mesh of `n × n` ranks.
#[divan::bench(args = [2, 8, 32])]
fn plan_of_a_halo(bencher: Bencher, n: usize) {
    let mesh = MeshShape::new(&[("lat", n), ("lon", n)], (0..n * n).collect()).expect("a mesh");
    let layout = Layout::new(&Arc::new(mesh), &[1, 16, 721, 1440], &[Shard(2), Shard(3)]);
    let layout = layout.expect("a layout");
    let need = |position| {
        let local = layout.local_box(position);
        let range = |dim: usize, halo: isize| {
            let range = &local.ranges()[dim];
            range.start as isize - halo..range.end as isize + halo
        };
        let runs: Vec<_> = (0..4)
            .map(|dim| {
                let range = range(dim, if dim < 2 { 0 } else { 1 });
                let size = layout.shape()[dim];
                halocline::core::plan::segments(range, size, Boundary::Zeros, Boundary::Periodic)
            })
            .collect();
        let shape = local
            .shape()
            .iter()
            .zip([0, 0, 2, 2])
            .map(|(size, halo)| size + halo)
            .collect();
        Need::product(shape, &runs)
    };
    bencher.bench_local(|| {
        black_box(ExchangePlan::new(Source::Layout(&layout), 0, n * n, need));
    });
}
