use burn::tensor::{Tensor, TensorData};
use halocline_core::{
    Balance, DeviceMesh, Launcher, Layout, Placement, Replicate, Shard, ShardTensor, Traffic,
};

use super::*;
use crate::prelude::*;
use crate::testing::{Operator, check_op, compare, random};

/// Edges between nine cells: one cell without edges, one with many.
fn edges() -> Vec<[usize; 2]> {
    let all = (0..40).map(|edge| [edge * 7 % 9, edge * edge % 5 + edge % 3]);
    all.collect()
}

struct Messages(Aggregate);

impl Operator<3, 3> for Messages {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
        let x = inputs.remove(0);
        let edges = Graph::new(9, 9, &edges())
            .unwrap()
            .distribute(&x, 1)
            .unwrap();
        let sources = edges.sources(x.clone());
        edges.reduce(sources * edges.targets(x).sin(), self.0)
    }
}

#[test]
fn messages_cross_ranks() {
    for aggregate in [
        Aggregate::Sum,
        Aggregate::Mean,
        Aggregate::Max,
        Aggregate::Min,
    ] {
        check_op(&Messages(aggregate), &[[2, 9, 3]], &[], &[0, 1, 2], 1e-5);
    }
}

/// A star next to targets with one edge and with none.
struct Star(Aggregate);

impl Operator<2, 2> for Star {
    fn apply<X: Field<2>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<2>>) -> X {
        let x = inputs.remove(0);
        let star = (0..64).map(|source| [source, 5]);
        let singles = (0..40).map(|target| [target + 7, target + target / 5]);
        let edges: Vec<[usize; 2]> = star.chain(singles).collect();
        let edges = Graph::new(64, 64, &edges)
            .unwrap()
            .distribute(&x, 0)
            .unwrap();
        let sources = edges.sources(x.clamp(-0.7, 0.7)); // several attain the extreme value
        edges.reduce(sources, self.0)
    }
}

#[test]
fn targets_have_any_numbers_of_edges() {
    for aggregate in [Aggregate::Max, Aggregate::Min] {
        check_op(&Star(aggregate), &[[64, 2]], &[], &[0, 1], 1e-6);
    }
}

#[test]
fn infinite_and_undefined_extrema_keep_their_gradients() {
    let values = [f32::NEG_INFINITY, f32::NEG_INFINITY, 2.0, f32::NAN, 1.0];
    let device = burn::tensor::Device::default().autodiff();
    let x = Tensor::<1>::from_floats(values, &device).require_grad();
    let edges = [[0, 0], [1, 0], [2, 1], [3, 1], [2, 2], [4, 2], [4, 2]];
    let edges = Graph::new(5, 5, &edges).unwrap().distribute(&x, 0).unwrap();
    let y = edges.reduce(edges.sources(x.clone()), Aggregate::Max);
    let gradients = y.clone().sum().backward();
    let y: Vec<f32> = y.into_data().iter().collect();
    assert!(y[1].is_nan(), "{y:?}");
    assert_eq!((y[0], &y[2..]), (f32::NEG_INFINITY, &[2.0, 0.0, 0.0][..]));
    let gradient = x.grad(&gradients).expect("a gradient").into_data();
    gradient.assert_eq(&[0.5_f32, 0.5, 1.0, 1.0, 0.0].into(), true);
}

struct Weighted;

impl Operator<3, 3> for Weighted {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, mut lengths: Vec<Tensor<3>>) -> X {
        let x = inputs.remove(0);
        let edges = Graph::new(9, 9, &edges())
            .unwrap()
            .distribute(&x, 1)
            .unwrap();
        let lengths = edges
            .features(&x.clone().into_shard(), lengths.remove(0))
            .unwrap();
        let sources = edges.sources(x.clone());
        let weights =
            edges.softmax(sources.clone() * edges.targets(x) * X::from_shard(lengths) * 3.0);
        edges.reduce(weights * sources.sin(), Aggregate::Sum)
    }
}

#[test]
fn attention_along_edges_with_features() {
    check_op(&Weighted, &[[2, 9, 3]], &[[2, 40, 3]], &[0, 1, 2], 1e-5);
    check_op(&Weighted, &[[2, 9, 3]], &[[1, 40, 1]], &[0, 1, 2], 1e-5);
}

struct Taken;

impl Operator<2, 2> for Taken {
    fn apply<X: Field<2>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<2>>) -> X {
        let map = CellMap::new(vec![6, 6, 0, 3, 2, 6, 1, 1, 5]);
        let x = inputs.remove(0);
        x.try_op(|x| {
            // All on the last part; other ranks take none.
            let mut extents = vec![0; x.layout().extents(0).len()];
            *extents.last_mut().expect("a part") = 9;
            take_cells(x, 0, &map, &extents)
        })
        .unwrap()
    }
}

#[test]
fn cells_are_taken_from_any_ranks_by_any() {
    check_op(&Taken, &[[7, 3]], &[], &[0, 1], 1e-6);
}

/// Ranks along another axis do not communicate, and a cell requested twice travels once.
#[test]
fn each_cell_travels_once() {
    Launcher::local(4)
        .check(false)
        .run(|world| {
            let mesh = world.mesh([("batch", 2), ("cells", 2)])?;
            let x = ShardTensor::<3>::ones([2, 6, 5], &mesh, &[Shard(0), Shard(1)])?;
            // The first part holds cells 0 to 2 and takes 4 twice; the second takes 1 and 2.
            let map = CellMap::new(vec![4, 4, 0, 1, 2, 5]);
            let before = world.comm_stats();
            take_cells(x, 1, &map, &[3, 3])?;
            let sent = world.comm_stats().since(&before).of(Traffic::Exchange);
            let cells = [2, 1][world.rank() % 2];
            assert_eq!((sent.messages, sent.bytes), (1, cells * 5 * 4));
            Ok(())
        })
        .unwrap();
}

#[test]
fn targets_may_be_cut_by_their_edges() {
    let graph = Graph::new(9, 9, &edges()).unwrap();
    let balance = Balance::of(&graph.work(), &[9], &[3]).unwrap();
    assert!(balance.balanced < balance.even);
    let run = |ranks: usize| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("cells", ranks)])?;
            let mut layout = Layout::new(mesh.shape(), &[9, 2], &[Shard(0)])?;
            if ranks == 3 {
                layout = layout.with_extents(0, &balance.extents[0])?;
            }
            let x = ShardTensor::distribute(random([9, 2], "x", 0).inner(), &mesh, &layout)?;
            let edges = graph.distribute(&x, 0)?;
            let y = edges.reduce(edges.sources(x), Aggregate::Sum);
            Ok(vec![y.full_tensor().into_data()])
        });
        found.unwrap().remove(0)
    };
    compare(&run(3), &run(1), 1e-6, "by edges");
}

/// Lattice points, with many ties in distance to a query.
fn lattice(mesh: &DeviceMesh, placements: &[Placement]) -> Result<ShardTensor<2>> {
    let points: Vec<f32> = (0..28)
        .flat_map(|i| [(i % 7) as f32, (i / 7 * 3 % 4) as f32])
        .collect();
    let points = Tensor::from_data(TensorData::new(points, [28, 2]), mesh.device());
    ShardTensor::distribute(points.inner(), mesh, placements)
}

fn sorted_by_distance(query: usize, of: &ShardTensor<2>) -> Vec<(f64, usize)> {
    let points: Vec<f64> = of.local().to_data().iter::<f64>().collect();
    let square = |point: usize| {
        let [x, y] = [0, 1].map(|dim: usize| points[2 * point + dim] - points[2 * query + dim]);
        x * x + y * y
    };
    let mut all: Vec<(f64, usize)> = (0..28).map(|point| (square(point), point)).collect();
    all.sort_by(|a, b| a.partial_cmp(b).unwrap());
    all
}

#[test]
fn neighbours_are_those_of_brute_force_on_any_ranks() {
    for (ranks, points, queries) in [
        (1, Replicate, Replicate),
        (2, Shard(0), Shard(0)),
        (3, Shard(0), Replicate),
        (3, Replicate, Shard(0)),
    ] {
        Launcher::local(ranks)
            .run(|world| {
                let mesh = world.mesh([("cells", ranks)])?;
                let all = lattice(&mesh, &[Replicate])?;
                let (points, queries) = (lattice(&mesh, &[points])?, lattice(&mesh, &[queries])?);
                let nearest = nearest_neighbours(&points, &queries, 5)?;
                let within = neighbours_within(&points, &queries, 2.0, None)?;
                let few = neighbours_within(&points, &queries, 2.0, Some(5))?;
                let (mut five, mut near, mut nearest_five) = (Vec::new(), Vec::new(), Vec::new());
                for query in 0..28 {
                    let sorted = sorted_by_distance(query, &all);
                    five.extend(sorted[..5].iter().map(|(_, point)| [*point, query]));
                    let close = sorted.iter().filter(|(square, _)| *square <= 4.0);
                    let close = close.map(|(_, point)| [*point, query]);
                    near.extend(close.clone());
                    nearest_five.extend(close.take(5));
                }
                assert_eq!(nearest.edges(), five);
                assert_eq!(within.edges(), near);
                assert_eq!(few.edges(), nearest_five);
                Ok(())
            })
            .unwrap();
    }
}

/// All ranks along the other axis hold the same points.
#[test]
fn neighbours_are_those_of_brute_force_on_two_axes() {
    for placements in [
        [Shard(0), Replicate],
        [Replicate, Shard(0)],
        [Shard(0), Shard(0)],
    ] {
        Launcher::local(4)
            .run(|world| {
                let mesh = world.mesh([("data", 2), ("cells", 2)])?;
                let all = lattice(&mesh, &[Replicate; 2])?;
                let points = lattice(&mesh, &placements)?;
                let nearest = nearest_neighbours(&points, &points, 5)?;
                let sorted = |query| sorted_by_distance(query, &all);
                let nearest_of = |query| sorted(query).into_iter().take(5);
                let five = (0..28)
                    .flat_map(|query| nearest_of(query).map(move |(_, point)| [point, query]));
                assert_eq!(nearest.edges(), five.collect::<Vec<_>>());
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn distances_have_gradients_on_any_ranks() {
    let run = |ranks: usize| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("cells", ranks)])?;
            let points = random::<2>([11, 3], "points", 0).inner();
            let points = ShardTensor::distribute(points, &mesh, &[Shard(0)])?.require_grad();
            let graph = nearest_neighbours(&points, &points, 3)?;
            let edges = graph.distribute(&points, 0)?;
            let lengths = distances(&points, &points, &edges)?;
            let gradients = (lengths.clone() * lengths.clone().sin()).sum().backward();
            let gradient = points.grad(&gradients).expect("a gradient");
            let whole = [lengths, gradient];
            Ok(whole.map(|x| x.full_tensor().into_data()))
        });
        found.unwrap()
    };
    let expected = run(1).remove(0);
    assert!(expected[1].iter::<f64>().all(f64::is_finite));
    for found in run(4) {
        compare(&found, &expected, 1e-5, "distances");
    }
}

#[test]
fn misuse_is_told() {
    let x = ShardTensor::solo(Tensor::<2>::ones([3, 2], &Default::default()));
    let error = Graph::new(3, 3, &[[0, 3]]).unwrap_err().to_string();
    assert!(error.contains("from 0 to 3 with 3 sources"), "{error}");
    let graph = Graph::new(3, 4, &[[0, 3]]).unwrap();
    let error = graph.distribute(&x, 0).unwrap_err().to_string();
    assert!(error.contains("a graph of 4 targets"), "{error}");
    let error = take_cells(x.clone(), 0, &CellMap::new(vec![3]), &[1]).unwrap_err();
    assert!(error.to_string().contains("cell 3 of dim 0"), "{error}");
    let error = nearest_neighbours(&x, &x, 4).unwrap_err().to_string();
    assert!(error.contains("4 neighbours among 3 points"), "{error}");
    let apart = x.clone() / 0.0;
    let told = |max_points| {
        let result = neighbours_within(&x, &apart, 1.0, max_points);
        result.unwrap_err().to_string()
    };
    assert!(told(None).contains("not finite"), "{}", told(None));
    assert!(
        told(Some(0)).contains("max_points of 0"),
        "{}",
        told(Some(0))
    );
}
