//! Halos across the poles, cell by cell.

use burn::tensor::Tensor;
use halocline_core::{
    Boundary, Halo, Launcher, Layout, Partial, Placement, ReduceOp, Replicate, Shard, ShardTensor,
};

const ROWS: usize = 5;
const COLUMNS: usize = 6;

/// The value of a cell, which may lie beyond the ends, of a field that continues across the poles.
fn value(boundary: Boundary, row: isize, column: isize) -> f32 {
    let inside = (0..ROWS as isize).contains(&row);
    let last = ROWS as isize - 1;
    let repeated = isize::from(boundary == Boundary::PoleEdge);
    let mirrored = match row {
        row if row < 0 => -row - repeated,
        row if row > last => 2 * last - row + repeated,
        row => row,
    };
    let half = if inside { 0 } else { COLUMNS as isize / 2 };
    let column = (column + half).rem_euclid(COLUMNS as isize);
    (mirrored * 10 + column) as f32
}

/// The axes of a mesh, and the placements on them.
type Mesh<'a> = (&'a [(&'a str, usize)], &'a [Placement]);

#[test]
fn halos_hold_the_cells_across_the_poles_and_their_gradients_return() {
    let meshes: [Mesh; 6] = [
        (&[("lat", 1)], &[Replicate]),
        (&[("lat", 3)], &[Shard(0)]),
        (&[("lon", 4)], &[Shard(1)]),
        (&[("lat", 2), ("lon", 2)], &[Shard(0), Shard(1)]),
        // More ranks than rows, and several axes on one dim.
        (&[("lat", 7)], &[Shard(0)]),
        (
            &[("a", 2), ("b", 2), ("c", 2)],
            &[Shard(1), Shard(0), Shard(1)],
        ),
    ];
    for boundary in [Boundary::PoleRow, Boundary::PoleEdge] {
        for (axes, placements) in meshes {
            let ranks = axes.iter().map(|(_, size)| size).product();
            let run = Launcher::local(ranks).run(|world| {
                let mesh = world.mesh_of(axes)?;
                let cells = (0..ROWS * COLUMNS).map(|i| (i / COLUMNS * 10 + i % COLUMNS) as f32);
                let cells: Vec<f32> = cells.collect();
                let device = world.device().clone().inner();
                let tensor = |values: &[f32], shape: [usize; 2]| {
                    Tensor::<1>::from_floats(values, &device).reshape::<2, _>(shape)
                };
                let whole = tensor(&cells, [ROWS, COLUMNS]);
                let x = ShardTensor::distribute(whole, &mesh, placements)?.require_grad();
                let rows = Halo {
                    low: 3,
                    high: 2,
                    ..Halo::new(0, 0, boundary)
                };
                let haloed = x.with_halo(&[rows, Halo::new(1, 2, Boundary::Periodic)])?;
                let own = x.layout().local_box(mesh.position());
                let [first_row, first_column] =
                    [0, 1].map(|dim| own.ranges()[dim].start as isize - [3, 2][dim]);
                let [height, width] = haloed.dims();
                let found: Vec<f32> = haloed.clone().into_data().try_to_vec().unwrap();
                // The cotangent of each cell here is its number.
                let number = |index: usize| (mesh.position() * 1000 + index) as f32;
                let numbers: Vec<f32> = (0..height * width).map(number).collect();
                let mut sums = [0.0_f32; ROWS * COLUMNS];
                for (index, found) in found.into_iter().enumerate() {
                    let (row, column) = (index / width, index % width);
                    let (row, column) = (first_row + row as isize, first_column + column as isize);
                    let expected = value(boundary, row, column);
                    assert_eq!(
                        found, expected,
                        "{boundary:?} on {axes:?} at {row}, {column}"
                    );
                    let cell = expected as usize;
                    sums[cell / 10 * COLUMNS + cell % 10] += numbers[index];
                }
                // The gradient of a cell is the sum over its copies on all ranks.
                let gradients = (haloed * tensor(&numbers, [height, width]))
                    .sum()
                    .backward();
                let gradient = x.grad(&gradients).expect("a gradient");
                let partial = vec![Partial(ReduceOp::Sum); axes.len()];
                let layout = Layout::new(mesh.shape(), &[ROWS, COLUMNS], &partial)?;
                let sums = tensor(&sums, [ROWS, COLUMNS]);
                let sums = ShardTensor::from_local(sums, &mesh, &layout)?.full_tensor();
                let gradient = gradient.full_tensor().into_data();
                gradient.assert_eq(&sums.into_data(), true);
                Ok(())
            });
            run.unwrap();
        }
    }
}

#[test]
fn a_halo_beyond_the_other_pole_is_refused() {
    let x = ShardTensor::solo(Tensor::<2>::ones([3, 4], &Default::default()));
    let error = x
        .with_halo(&[Halo::new(0, 4, Boundary::PoleEdge)])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "with_halo: 4 cells across a pole of dim 0; expected at most 3 of 3"
    );
}
