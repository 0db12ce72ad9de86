use burn::tensor::{Tensor, TensorData};
use halocline_core::{Launcher, Layout, MeshShape, Placement, Shard};
use halocline_ops::testing::{compare, random};

use super::*;
use crate::parallel::{Link, Machine, Workload, resolve};

/// Positions of cells that spiral from pole to pole.
fn spiral() -> Vec<[f64; 2]> {
    let position = |cell: u32| {
        let sine = 1.0 - (f64::from(cell) + 0.5) / 20.0;
        [sine.asin().to_degrees(), 137.5 * f64::from(cell)]
    };
    (0..40).map(position).collect()
}

/// Placement of fields on a mesh: axes, placements, and extents of some dims.
type Place<'a> = (
    &'a [(&'a str, usize)],
    &'a [Placement],
    &'a [(usize, [usize; 2])],
);

/// Result, and gradients of the field and of some parameters.
fn results(shape: [usize; 4], (axes, placements, extents): Place<'_>) -> Vec<Vec<TensorData>> {
    let ranks = axes.iter().map(|(_, size)| size).product();
    let found = Launcher::local(ranks).collect(|world| {
        let mesh = world.mesh_of(axes)?;
        let graph = GridMesh::new(&spiral(), 1)?;
        let config = GraphCastNetConfig::new(3, 2).with_width(5).with_layers(2);
        let model = world.init(|device| config.init(&graph, device))?;
        let mut layout = Layout::new(mesh.shape(), &shape, placements)?;
        for (dim, extents) in extents {
            layout = layout.with_extents(*dim, extents)?;
        }
        let x = random::<4>(shape, "x", 0).inner();
        let x = ShardTensor::distribute(x, &mesh, &layout)?.require_grad();
        let y = x.clone().apply(&model);
        assert_eq!(y.placements(), placements);
        let gradients = (y.clone() * y.clone()).sum().backward();
        let gradient = x.grad(&gradients).expect("a gradient");
        let mut found: Vec<TensorData> = [y, gradient].map(|x| x.full_tensor().into_data()).into();
        for layer in [
            &model.channels,
            &model.nodes[1].inner,
            &model.edges[1].inner,
            &model.output.inner,
        ] {
            let gradient: Tensor<2> = layer.weight.grad(&gradients).expect("a gradient");
            found.push(gradient.into_data());
        }
        Ok(found)
    });
    found.unwrap()
}

#[test]
fn cells_on_ranks_have_the_gradients_of_one_device() {
    let places: [([usize; 4], &[Place<'_>]); 2] = [
        (
            [2, 3, 1, 40],
            &[
                (&[("lon", 2)], &[Shard(3)], &[(3, [27, 13])]),
                (&[("lon", 2)], &[Shard(3)], &[(3, [0, 40])]),
                (&[("lat", 2), ("lon", 2)], &[Shard(2), Shard(3)], &[]),
                (&[("data", 2), ("lon", 2)], &[Shard(0), Shard(3)], &[]),
            ],
        ),
        (
            [2, 3, 5, 8],
            &[
                (&[("lat", 3)], &[Shard(2)], &[]),
                (
                    &[("lat", 2), ("lon", 2)],
                    &[Shard(2), Shard(3)],
                    &[(2, [4, 1]), (3, [3, 5])],
                ),
                (&[("lon", 2), ("lat", 2)], &[Shard(3), Shard(2)], &[]),
            ],
        ),
    ];
    for (shape, places) in places {
        let expected = results(shape, (&[("lon", 1)], &[Shard(3)], &[])).remove(0);
        for place in places {
            for found in results(shape, *place) {
                compare(&found, &expected, 5e-5, &format!("{place:?}"));
            }
        }
    }
}

#[test]
fn the_order_of_cells_does_not_matter() {
    let run = |order: &[usize]| {
        let found = Launcher::local(1).collect(|world| {
            let positions: Vec<[f64; 2]> = order.iter().map(|cell| spiral()[*cell]).collect();
            let graph = GridMesh::new(&positions, 1)?;
            let config = GraphCastNetConfig::new(1, 1).with_width(6).with_layers(1);
            let model = world.init(|device| config.init(&graph, device))?;
            let field = random::<4>([1, 1, 1, 40], "x", 0).inner();
            let y = field.index_select(3, order).apply(&model);
            let back: Vec<usize> = (0..40)
                .map(|cell| order.iter().position(|other| *other == cell).unwrap())
                .collect();
            Ok(vec![y.index_select(3, &back).into_data()])
        });
        found.unwrap().remove(0)
    };
    let forward: Vec<usize> = (0..40).collect();
    let turned: Vec<usize> = (0..40).map(|cell| (cell * 7 + 3) % 40).collect();
    compare(&run(&turned), &run(&forward), 1e-5, "turned");
}

#[test]
fn fields_of_other_grids_are_refused() {
    let (graph, device) = (GridMesh::new(&spiral(), 1).unwrap(), Device::default());
    let model = GraphCastNetConfig::new(1, 1).init(&graph, &device);
    let x = ShardTensor::solo(Tensor::<4>::ones([1, 1, 4, 9], &device));
    let error = model.computed(x).unwrap_err().to_string();
    assert!(error.contains("4 x 9 cells; expected 40"), "{error}");
}

#[test]
fn layers_are_priced_by_their_cells_and_edges() {
    let graph = GridMesh::new(&spiral(), 1).unwrap();
    let config = GraphCastNetConfig::new(3, 2).with_width(6).with_layers(2);
    let model = config.init(&graph, &Device::default());
    let (samples, passes) = (4, 2);
    let mut workload = Workload::new(samples * 40, &[]);
    for (path, rows) in model.rows(samples, passes) {
        workload = workload.with_rows(path, rows);
    }
    let link = Link {
        latency: 0.0,
        bandwidth: 1.0,
    };
    let mesh = MeshShape::new(&[("data", 1)], vec![0]).unwrap().into();
    let resolved = resolve(&model, &mesh, &Plan::default()).unwrap();
    let price = resolved.price(&workload, &Machine::new(6.0, link)).unwrap();
    let ([cells, corners], [encoder, processor, decoder]) = graph.counts();
    // Weights of each row, for features of width 6.
    let embeddings = (3 * 6) * cells + (3 * 6 + 36) * corners;
    let embedded = embeddings + (4 * 6 + 36) * (encoder + processor + decoder);
    let for_cells = (3 * 6 + 36 + 36 + 72 + 4 * 36 + 36 + 6 * 2) * cells;
    let for_corners = (4 * 36 + 2 * 5 * 36 + 36) * corners;
    let for_edges = 72 * (encoder + 2 * processor + decoder);
    let products = passes * embedded + samples * (for_cells + for_corners + for_edges);
    let expected = products as f64;
    assert!(
        (price.compute - expected).abs() < 1e-9 * expected,
        "{price}"
    );
}
