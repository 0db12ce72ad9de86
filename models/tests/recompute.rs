//! Models whose blocks the backward pass recomputes.

use burn::module::{Module, Param};
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use halocline_core::paths::{PathVisitor, visit_paths};
use halocline_core::{Launcher, Shard, ShardTensor, Traffic};
use halocline_models::{
    FnoConfig, GraphCastNetConfig, GridMesh, SfnoConfig, SurrogateCnnConfig, UNetConfig,
};
use halocline_ops::prelude::*;

const ROWS: usize = 9;
const COLUMNS: usize = 12;

/// Tensors by path.
type Named = Vec<(String, TensorData)>;

/// Visitor that collects the gradients of all parameters.
struct Collected<'a> {
    gradients: &'a Gradients,
    found: Named,
}

impl PathVisitor for Collected<'_> {
    fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        let gradient = param.val().grad(self.gradients).expect("a gradient");
        self.found.push((path.join("."), gradient.into_data()));
    }
}

/// Returns the result, the gradients of the field and of all parameters, and the bytes that were
/// sent in exchanges and redistributions, on each of the ranks that shard a dim of the field.
fn run<M>(
    ranks: usize,
    dim: usize,
    make: impl Fn(&Device) -> M + Send + Sync,
) -> Vec<(Named, [u64; 2])>
where
    M: Module + Layer<ShardTensor<4>, Output = ShardTensor<4>>,
{
    let launcher = Launcher::local(ranks).seed(3).check(false);
    let found = launcher.collect(|world| {
        let mesh = world.mesh([("x", ranks)])?;
        let model = world.init(&make)?;
        let values = (0..2 * 3 * ROWS * COLUMNS).map(|i| ((i * 37) % 23) as f32 / 11.0 - 1.0);
        let data = TensorData::new(values.collect::<Vec<_>>(), [2, 3, ROWS, COLUMNS]);
        let whole = Tensor::<4>::from_data(data, &world.device().clone().inner());
        let x = ShardTensor::distribute(whole, &mesh, &[Shard(dim)])?.require_grad();
        let before = world.comm_stats();
        let y = x.clone().apply(&model);
        let gradients = (y.clone() * y.clone()).sum().backward();
        let sent = world.comm_stats().since(&before);
        let sent = [Traffic::Exchange, Traffic::Redistribute].map(|traffic| sent.of(traffic).bytes);
        let gradient = x.grad(&gradients).expect("a gradient");
        let mut collected = Collected {
            gradients: &gradients,
            found: vec![
                ("y".into(), y.full_tensor().into_data()),
                ("x".into(), gradient.full_tensor().into_data()),
            ],
        };
        visit_paths(&model, &mut collected);
        Ok((collected.found, sent))
    });
    found.unwrap()
}

/// Checks that recomputed blocks give the same bits, and that nothing is sent twice.
fn check<M>(make: impl Fn(bool, &Device) -> M + Send + Sync)
where
    M: Module + Layer<ShardTensor<4>, Output = ShardTensor<4>>,
{
    for (ranks, dim) in [(1, 2), (2, 2), (2, 0)] {
        let [kept, again] =
            [false, true].map(|recompute| run(ranks, dim, |device| make(recompute, device)));
        for ((kept, sent), (again, sent_again)) in kept.iter().zip(&again) {
            assert_eq!(sent, sent_again, "bytes on {ranks} ranks, dim {dim}");
            assert_eq!(kept.len(), again.len());
            for ((path, kept), (_, again)) in kept.iter().zip(again) {
                let same = kept.iter::<f32>().eq(again.iter::<f32>());
                assert!(same, "{path} on {ranks} ranks, dim {dim}");
            }
        }
    }
}

#[test]
fn blocks_of_a_surrogate_have_the_same_bits() {
    let config = SurrogateCnnConfig::new(3).with_width(4).with_blocks(2);
    check(|recompute, device| config.clone().with_recompute(recompute).init(device));
}

#[test]
fn levels_of_a_u_net_have_the_same_bits() {
    let config = UNetConfig::new(3, 2).with_width(4);
    check(|recompute, device| config.clone().with_recompute(recompute).init(device));
}

#[test]
fn blocks_of_a_fourier_operator_have_the_same_bits() {
    let config = FnoConfig::new(3, 2, [4, 4]).with_width(4).with_blocks(2);
    check(|recompute, device| config.clone().with_recompute(recompute).init(device));
}

#[test]
fn blocks_of_a_spherical_operator_have_the_same_bits() {
    let config = SfnoConfig::new(3, 2).with_width(4).with_blocks(2);
    let outer = Sht::new([ROWS, COLUMNS], SphereGrid::Lobatto).unwrap();
    let inner = Sht::new([4, 8], SphereGrid::LegendreGauss).unwrap();
    let coarse = outer.clone().with_degrees(inner.degrees()).unwrap();
    for transforms in [[&outer, &outer], [&coarse, &inner]] {
        check(|recompute, device| {
            let config = config.clone().with_recompute(recompute);
            config.init_within(transforms, device)
        });
    }
}

#[test]
fn layers_of_a_graph_network_have_the_same_bits() {
    let position = |cell: usize| {
        let [row, column] = [cell / COLUMNS, cell % COLUMNS].map(|place| place as f64);
        [80.0 - 20.0 * row, 30.0 * column]
    };
    let positions: Vec<[f64; 2]> = (0..ROWS * COLUMNS).map(position).collect();
    let mesh = GridMesh::new(&positions, 1).unwrap();
    for layers in [1, 3] {
        let config = GraphCastNetConfig::new(3, 2)
            .with_width(5)
            .with_layers(layers);
        check(|recompute, device| config.clone().with_recompute(recompute).init(&mesh, device));
    }
}
