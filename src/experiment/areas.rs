//! Areas of the cells as weights of losses.

use burn::tensor::{Tensor, TensorData};
use halocline_core::ShardTensor;
use halocline_ops::prelude::*;

use super::network::OwnNetwork;
use super::setup::Experiment;

impl<N: OwnNetwork> Experiment<N> {
    /// Multiplies the mask of the cells of `field` that the loss counts by the areas of the cells
    /// of an unstructured or curvilinear grid, if these are known.
    pub(super) fn by_area(
        &self,
        field: &ShardTensor<4>,
        mask: Option<ShardTensor<4>>,
    ) -> Option<ShardTensor<4>> {
        let areas = self.areas.get_or_init(|| self.data.grid.cell_weights());
        let Some(areas) = areas else {
            return mask;
        };
        let field = field.clone().inner();
        let mask = mask.unwrap_or_else(|| field.clone() * 0.0 + 1.0);
        let [_, _, rows, columns] = field.dims();
        if rows == 1 {
            // Converts the areas of the cells of this rank only.
            return Some(mask * field.profile(3, areas));
        }
        let data = TensorData::new(areas.clone(), [1, 1, rows, columns]);
        let device = field.device().inner();
        let areas = Tensor::<4>::from_data(data, (&device, field.local().dtype()));
        Some(mask * field.distribute_operand(areas))
    }
}

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, Shard};
    use halocline_io::Grid;

    use super::*;
    use crate::experiment::fixture::{config_in, wave, write_fields};

    #[test]
    fn cells_count_by_their_areas() {
        let folder = tempfile::tempdir().unwrap();
        write_fields(folder.path(), wave);
        // Of errors of 1 and 2 with the weights 0.5 and 1.5.
        for (loss, members, expected) in [
            ("loss = \"mse\"", 1, (0.5 + 1.5 * 4.0) / 2.0),
            ("loss = \"mae\"", 1, (0.5 + 1.5 * 2.0) / 2.0),
            ("loss = \"huber\"", 1, (0.5 * 0.5 + 1.5 * 1.5) / 2.0),
            (
                "loss = \"crps\"\nmembers = 2\nnoise = 0.1",
                2,
                (0.5 + 1.5 * 2.0) / 2.0,
            ),
            (
                "loss = \"energy\"\nmembers = 2\nnoise = 0.1",
                2,
                ((0.5 + 1.5 * 4.0) / 2.0_f64).sqrt(),
            ),
        ] {
            let config = config_in(folder.path(), "", &format!("[training]\n{loss}"));
            let run = Launcher::local(1).run(|world| {
                let mut experiment = Experiment::new(&world, &config)?;
                let cells = Grid::unstructured(vec![50.0, 0.0], vec![0.0, 10.0]).unwrap();
                experiment.data.grid = cells.with_cell_areas(vec![1.0, 3.0]).unwrap();
                let mesh = world.mesh([("lon", 1)])?;
                let ones = ShardTensor::<4>::ones([1, 1, 1, 2], &mesh, &[Shard(3)])?;
                let y = ShardTensor::cat(vec![ones.profile(3, &[1.0, 2.0]); members], 0);
                let target = ones * 0.0;
                let mask = experiment.by_area(&target, None);
                let found = experiment.distance(y, target, mask, [&[1.0], &[1.0]])?;
                assert!(
                    (found.into_scalar::<f64>() - expected).abs() < 1e-6,
                    "{loss}"
                );
                Ok(())
            });
            run.unwrap();
        }
    }

    #[test]
    fn cells_of_rows_and_columns_count_by_their_areas() {
        let folder = tempfile::tempdir().unwrap();
        write_fields(folder.path(), wave);
        for sizes in [[1, 1], [2, 2]] {
            let [lat, lon] = sizes;
            let tables = format!("[mesh]\nlat = {lat}\nlon = {lon}\n");
            let config = config_in(folder.path(), "", &tables);
            let run = Launcher::local(lat * lon).run(|world| {
                let mut experiment = Experiment::new(&world, &config)?;
                let grid = Grid::curvilinear([2, 3], vec![50.0; 6], vec![10.0; 6]).unwrap();
                let areas = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
                experiment.data.grid = grid.with_cell_areas(areas).unwrap();
                let mesh = world.mesh([("lat", lat), ("lon", lon)])?;
                let ones = ShardTensor::<4>::ones([1, 1, 2, 3], &mesh, &[Shard(2), Shard(3)])?;
                // Errors from 1 to 6.
                let line = ones.profile(3, &[0.0, 1.0, 2.0]);
                let y = ones.clone() * (ones.profile(2, &[1.0, 4.0]) + line);
                let mask = experiment.by_area(&ones, None);
                let found = experiment.distance(y, ones * 0.0, mask, [&[1.0], &[1.0]])?;
                // The sum of the cubes from 1 to 6, by the sum of the areas.
                assert!((found.into_scalar::<f64>() - 441.0 / 21.0).abs() < 1e-4);
                Ok(())
            });
            run.unwrap();
        }
    }
}
