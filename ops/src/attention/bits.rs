//! Results and gradients have the same bits on one rank and for a plain tensor, with and without
//! overlap, and on any number of threads.

use burn::tensor::{Tensor, TensorData};
use halocline_core::{Launcher, Overlap, Placement, Shard};

use super::*;
use crate::kernel::testing::same_for_all_pools;
use crate::sharding::Sharding;
use crate::testing::{Operator, on_mesh, on_one_device, random};

struct Near<const N: usize>(NeighborhoodOptions<N>);

impl<const D: usize, const N: usize> Operator<D, D> for Near<N> {
    fn apply<X: Field<D>>(&self, inputs: Vec<X>, _: Vec<Tensor<D>>) -> X {
        let [q, k, v] = three(inputs);
        q.neighborhood_attention(k, v, &self.0)
    }
}

struct Dense(AttentionOptions);

impl Operator<4, 4> for Dense {
    fn apply<X: Field<4>>(&self, inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
        let [q, k, v] = three(inputs).map(Field::into_shard);
        X::from_shard(scaled_dot_product_attention(q, k, v, &self.0).unwrap())
    }
}

struct Cells;

impl<const D: usize> Operator<D, D> for Cells {
    fn apply<X: Field<D>>(&self, inputs: Vec<X>, _: Vec<Tensor<D>>) -> X {
        let [q, k, v] = three(inputs);
        q.cell_attention(k, v, &AttentionOptions::default())
    }
}

fn three<X>(inputs: Vec<X>) -> [X; 3] {
    let inputs: Result<[X; 3], _> = inputs.try_into();
    inputs.unwrap_or_else(|_| panic!("queries, keys and values"))
}

fn near_1d() -> Near<1> {
    Near(NeighborhoodOptions::new([5]).with_dilation([2]))
}

fn near_2d() -> Near<2> {
    Near(NeighborhoodOptions::new([3, 4]).with_periodic([false, true]))
}

fn near_3d() -> Near<3> {
    Near(NeighborhoodOptions::new([3, 2, 3]).with_causal([true, false, false]))
}

/// Queries, keys and values, on this thread.
fn inputs<const D: usize>(shape: [usize; D]) -> Vec<Tensor<D>> {
    let names = ["q", "k", "v"].iter();
    names.map(|name| random(shape, name, 0)).collect()
}

/// Result and all gradients on ranks.
fn on_ranks<const D: usize>(
    launcher: Launcher,
    operator: &impl Operator<D, D>,
    shape: [usize; D],
    axes: &[(&'static str, usize)],
    placements: &[Placement],
) -> Vec<Vec<TensorData>> {
    let sharding = Sharding {
        axes: axes.to_vec(),
        placements: placements.to_vec(),
        extents: Vec::new(),
    };
    let found = launcher.collect(|world| {
        let mesh = world.mesh_of(&sharding.axes)?;
        on_mesh(operator, &inputs(shape), &[], &mesh, &sharding)
    });
    found.unwrap()
}

fn assert_same(found: &[TensorData], expected: &[TensorData]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        found.assert_eq(expected, true);
    }
}

fn one_rank_is_plain<const D: usize>(operator: &impl Operator<D, D>, shape: [usize; D]) {
    let (axes, placements) = ([("x", 1)], [Shard(1)]);
    let found = on_ranks(Launcher::local(1), operator, shape, &axes, &placements);
    let plain = Launcher::local(1).collect(|_| Ok(on_one_device(operator, &inputs(shape), &[])));
    assert_same(&found[0], &plain.unwrap()[0]);
}

#[test]
fn one_rank_gives_the_bits_of_the_plain_tensor() {
    one_rank_is_plain(&near_1d(), [1, 33, 2, 8]);
    one_rank_is_plain(&near_2d(), [2, 7, 12, 2, 5]);
    one_rank_is_plain(&near_3d(), [1, 5, 4, 7, 2, 3]);
    let options = AttentionOptions::default();
    one_rank_is_plain(&Dense(options.clone()), [2, 23, 2, 6]);
    one_rank_is_plain(&Dense(options.with_causal(true)), [1, 70, 1, 16]);
    one_rank_is_plain(&Cells, [1, 5, 7, 2, 4]);
    one_rank_is_plain(&Cells, [1, 3, 4, 5, 1, 4]);
}

#[test]
fn halos_that_travel_meanwhile_change_no_bit() {
    fn same<const D: usize>(operator: &impl Operator<D, D>, shape: [usize; D]) {
        let axes = [("a", 2), ("b", 2)];
        let placements = [Shard(1), Shard(if D > 4 { 2 } else { 0 })];
        let [early, late] = [Overlap::On, Overlap::Off].map(|overlap| {
            let launcher = Launcher::local(4).overlap(overlap);
            on_ranks(launcher, operator, shape, &axes, &placements)
        });
        for (early, late) in early.iter().zip(&late) {
            assert_same(early, late);
        }
    }
    same(&near_1d(), [2, 44, 2, 4]);
    same(&near_2d(), [1, 14, 22, 2, 4]);
    same(&near_3d(), [1, 12, 8, 5, 1, 3]);
    same(&Dense(AttentionOptions::default()), [2, 30, 2, 4]);
    let causal = AttentionOptions::default().with_causal(true);
    same(&Dense(causal), [2, 30, 2, 4]);
    same(&Cells, [1, 6, 8, 2, 4]);
}

/// Sizes above those that run on one thread.
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    fn same<const D: usize>(operator: &impl Operator<D, D>, shape: [usize; D]) {
        let bytes = |data: TensorData| data.bytes().to_vec();
        same_for_all_pools(|| {
            let found = on_one_device(operator, &inputs(shape), &[]);
            found.into_iter().map(bytes).collect::<Vec<_>>()
        });
    }
    let wide = NeighborhoodOptions::new([5, 7]).with_periodic([false, true]);
    same(&Near(wide), [1, 25, 42, 4, 8]);
    same(&Near(NeighborhoodOptions::new([31])), [2, 300, 4, 16]);
    for causal in [false, true] {
        let options = AttentionOptions::default().with_causal(causal);
        same(&Dense(options.clone()), [2, 331, 4, 16]);
        // A width at which matrices are used, on processors that have them; several groups of
        // targets in a task.
        same(&Dense(options), [2, 331, 8, 34]);
    }
}
