//! Metric factors of the scheme.

use burn::tensor::{DType, Device, Tensor, TensorData};
use halocline_core::IndexBox;

use super::{Config, Grid};

/// Metric factors: lengths, areas and the Coriolis parameter on one rank's cells, as tensors of
/// shape `[1, 1, rows, 1]` unless stated otherwise.
///
/// Rows count from the northern halo row, so that a shard of `n` rows has rows `0..n + 2`, and its
/// interior is `1..n + 1`. A face or corner has the index of the row to whose south (and east) it
/// lies. Metrics without a counterpart at a pole are zero there; the poles need no other treatment.
///
/// The scale `s` is chosen so that the Bernoulli function needs no factor: see
/// [`scheme`](super::scheme).
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) dtype: DType,
    /// Δx/Δy at the eastern faces of rows `0..n + 2`.
    pub(super) aspect_east: Tensor<4>,
    /// Δx/Δy at the southern faces of rows `0..n + 2`.
    pub(super) aspect_south: Tensor<4>,
    /// Δy/Δx at the centres of rows `1..n + 2`.
    pub(super) inverse_aspect: Tensor<4>,
    /// Δy/A at the centres of rows `1..n + 2`.
    pub(super) divergence: Tensor<4>,
    /// Δy/A at the corners `0..n + 1`.
    pub(super) curl: Tensor<4>,
    /// Coriolis parameter at the corners, `[1, 1, n + 1, 1 or columns + 1]`.
    pub(super) coriolis: Tensor<4>,
    /// s Δy/2Δx at the eastern faces of the shard's rows.
    pub(super) gradient_east: Tensor<4>,
    /// s/2 at the southern faces of the shard's rows.
    pub(super) gradient_south: Tensor<4>,
    /// Δy/Δx at the southern faces of the shard's rows.
    pub(super) inverse_aspect_south: Tensor<4>,
    /// One in rows where neither the northern nor the southern corner is a pole.
    pub(super) off_pole: Tensor<4>,
    /// One at the southern faces of the shard's rows, except at the pole.
    pub(super) face_open: Tensor<4>,
    /// One at the southern faces of rows `0..n + 1` that have two cells on either side.
    pub(super) faces_around: Tensor<4>,
    /// 4 g/κ, `[1, 1, 1, 1]`.
    pub(super) gravity: Tensor<4>,
    /// Height of the ground at the centres, `[1, 1, n + 1, columns + 1]` from row 1 and column 1
    /// on.
    pub(super) ground: Option<Tensor<4>>,
    /// Areas of the shard's cells, and of the surroundings of their eastern faces, southern faces
    /// and south-eastern corners, in m².
    pub(super) areas: Areas,
    /// Scale `s`, in 1/m.
    pub(super) scale: f64,
    /// Δy in m.
    pub(super) dy: f64,
}

/// Areas of the shard's rows, in m².
#[derive(Clone, Debug)]
pub(super) struct Areas {
    pub(super) cell: Tensor<4>,
    pub(super) east: Tensor<4>,
    pub(super) south: Tensor<4>,
    pub(super) corner: Tensor<4>,
}

impl Metrics {
    /// Computes the metrics of the cells `cells`, `[rows, columns]`.
    pub(super) fn new(
        grid: &Grid,
        config: &Config,
        cells: &IndexBox,
        dtype: DType,
        device: &Device,
    ) -> Self {
        let [rows, columns] = [cells.ranges()[0].clone(), cells.ranges()[1].clone()];
        let n = rows.len() as isize;
        let north = rows.start as isize - 1; // global row of row 0
        let radius = config.planet.radius;
        let (dlat, dlon) = (grid.dlat(), grid.dlon());
        let dy = radius * dlat;
        let aspect = dlon / dlat;
        let kappa = 0.5 * dlat / (0.5 * dlat).sin(); // ΔxΔy/A, the same for all cells
        let scale = kappa / (2.0 * dy);
        let inverse = |value: f64| if value == 0.0 { 0.0 } else { 1.0 / value };

        let tensor = |values: Vec<f64>, shape: [usize; 4]| {
            Tensor::<4>::from_data(TensorData::new(values, shape), (device, dtype))
        };
        // Values by global row; the southern face of a row is the northern face of the next.
        let column = |rows: std::ops::Range<isize>, f: &dyn Fn(isize) -> f64| {
            let values: Vec<f64> = rows.map(|row| f(north + row)).collect();
            let shape = [1, 1, values.len(), 1];
            tensor(values, shape)
        };
        let shard = 1..n + 1;
        let open = |face: isize| if grid.cos_face(face) == 0.0 { 0.0 } else { 1.0 };

        let eastward = if config.planet.tilt == 0.0 {
            0..1
        } else {
            0..columns.len() + 1
        };
        let coriolis: Vec<f64> = (0..n + 1)
            .flat_map(|row| {
                eastward
                    .clone()
                    .map(move |column| (north + row + 1, column))
            })
            .map(|(face, column)| {
                let longitude = grid.longitude(columns.start as f64 + column as f64 - 0.5);
                open(face) * config.planet.coriolis(grid.face(face), longitude)
            })
            .collect();
        let ground = config.topography.map(|topography| {
            let height = |row: isize, column: usize| {
                let longitude = grid.longitude((columns.start + column) as f64);
                topography.height(grid.centre(north + row), longitude)
            };
            let values = (1..n + 2)
                .flat_map(|row| (0..=columns.len()).map(move |column| (row, column)))
                .map(|(row, column)| height(row, column));
            tensor(values.collect(), [1, 1, rows.len() + 1, columns.len() + 1])
        });
        let square = radius * radius;
        Self {
            dtype,
            aspect_east: column(0..n + 2, &|row| aspect * grid.cos_centre(row)),
            aspect_south: column(0..n + 2, &|row| aspect * grid.cos_face(row + 1)),
            inverse_aspect: column(1..n + 2, &|row| inverse(aspect * grid.cos_centre(row))),
            divergence: column(1..n + 2, &|row| dy * inverse(square * grid.cell_area(row))),
            curl: column(0..n + 1, &|row| {
                dy * inverse(square * grid.corner_area(row + 1))
            }),
            coriolis: tensor(coriolis, [1, 1, rows.len() + 1, eastward.len()]),
            gradient_east: column(shard.clone(), &|row| {
                0.5 * scale * inverse(aspect * grid.cos_centre(row))
            }),
            gradient_south: column(shard.clone(), &|row| 0.5 * scale * open(row + 1)),
            inverse_aspect_south: column(shard.clone(), &|row| {
                inverse(aspect * grid.cos_face(row + 1))
            }),
            off_pole: column(shard.clone(), &|row| open(row) * open(row + 1)),
            face_open: column(shard.clone(), &|row| open(row + 1)),
            faces_around: column(0..n + 1, &|row| open(row) * open(row + 1) * open(row + 2)),
            gravity: tensor(vec![4.0 * config.planet.gravity / kappa], [1; 4]),
            ground,
            areas: Areas {
                cell: column(shard.clone(), &|row| square * grid.cell_area(row)),
                east: column(shard.clone(), &|row| {
                    square * dlat * dlon * grid.cos_centre(row)
                }),
                south: column(shard.clone(), &|row| {
                    square * dlat * dlon * grid.cos_face(row + 1)
                }),
                corner: column(shard, &|row| square * grid.corner_area(row + 1)),
            },
            scale,
            dy,
        }
    }
}
