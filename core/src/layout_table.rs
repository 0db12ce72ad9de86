//! Tables of the cells held by each rank.

use crate::layout::Layout;

impl Layout {
    /// Lists the cells of every rank: one line with the rank, its coordinates in the mesh, and its
    /// range of each dim.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Replicate, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2), ("data", 1)])?;
    ///     let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0), Replicate])?;
    ///     let expected = [
    ///         "rank  lat  data  dim 0  dim 1",
    ///         "   0    0     0   0..3   0..3",
    ///         "   1    1     0   3..5   0..3",
    ///     ];
    ///     assert!(x.layout().table().lines().eq(expected));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn table(&self) -> String {
        let mesh = self.mesh();
        let dims = (0..self.shape().len()).map(|dim| format!("dim {dim}"));
        let titles = ["rank".to_string()].into_iter();
        let titles = titles.chain(mesh.names().iter().cloned()).chain(dims);
        let mut lines: Vec<Vec<String>> = vec![titles.collect()];
        for (position, rank) in mesh.ranks().iter().enumerate() {
            let cells = self.local_box(position);
            let coords = mesh.coords(position).into_iter();
            let numbers = [*rank]
                .into_iter()
                .chain(coords)
                .map(|number| number.to_string());
            let ranges = cells.ranges().iter().map(|range| format!("{range:?}"));
            lines.push(numbers.chain(ranges).collect());
        }
        let width = |column: usize| {
            lines
                .iter()
                .map(|line| line[column].len())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
        let mut table = String::new();
        for line in &lines {
            let cells = line
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:>width$}"));
            table += &cells.collect::<Vec<_>>().join("  ");
            table.push('\n');
        }
        table
    }
}
