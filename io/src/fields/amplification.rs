//! Read amplification of chunks on a mesh.

use super::traffic::covered;
use crate::{Channel, Fields};

/// Returns the ranks along [lat, lon] for which [`inspect`](fn@crate::inspect) and
/// `halocline rechunk` judge chunks of fields with this many rows, unless others are given. A single
/// row is divided along its columns.
///
/// # Example
/// ```
/// use halocline_io::assumed_ranks;
///
/// assert_eq!((assumed_ranks(721), assumed_ranks(1)), ([2, 2], [1, 4]));
/// ```
pub fn assumed_ranks(rows: usize) -> [usize; 2] {
    if rows == 1 { [1, 4] } else { [2, 2] }
}

/// Returns the read amplification of fields on a mesh: bytes decoded per byte needed, if each of
/// the ranks along [lat, lon] is a process of its own and reads its shard of one time.
///
/// # Example
/// ```
/// # use halocline_io::{FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// # let grid = Grid::cell_centered(4, 8)?;
/// # let config = WriterConfig::new().with_chunk(Some([1, 1, 4, 8]));
/// # let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &config)?;
/// # writer.append(0.0, halocline_io::ndarray::Array3::ones((1, 4, 8)).view())?;
/// # writer.finish()?;
/// use halocline_io::{amplification, open};
///
/// let fields = open(&path)?; // chunks of a whole field
/// assert_eq!(amplification(&fields, [1, 1]), 1.0);
/// assert_eq!(amplification(&fields, [2, 2]), 4.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn amplification(fields: &impl Fields, ranks: [usize; 2]) -> f64 {
    let [times, channels, rows, columns] = fields.shape();
    let shape = [times, rows, columns];
    let of_channels = (0..channels).map(|index| of_chunk(&fields.describe(index), shape, ranks));
    of_channels.sum::<f64>() / channels.max(1) as f64
}

/// Returns the read amplification of a channel, for the numbers of times, rows and columns.
pub(crate) fn of_chunk(channel: &Channel, shape: [usize; 3], ranks: [usize; 2]) -> f64 {
    let Some([times, _, rows, columns]) = channel.chunk else {
        return 1.0;
    };
    let [_, height, width] = shape;
    let shard = |size: usize, ranks: usize, rank: usize| {
        let start = |rank: usize| size / ranks * rank + rank.min(size % ranks);
        start(rank)..start(rank + 1)
    };
    let boxes = (0..ranks[0]).flat_map(|row| {
        (0..ranks[1]).map(move |column| {
            [
                0..1,
                shard(height, ranks[0], row),
                shard(width, ranks[1], column),
            ]
        })
    });
    let chunk = [times, rows, columns];
    let decoded: u64 = boxes
        .map(|cells| covered(&cells, &shape, Some(&chunk)))
        .sum();
    decoded as f64 / (height * width).max(1) as f64
}
