//! Division of fields into the blocks of a conversion, by pure functions.

use std::ops::Range;

use crate::{Channel, Error, Result};

/// Box of [time, channel, lat, lon] that is read and written at once.
pub(crate) type Block = [Range<usize>; 4];

/// Divides fields of a shape into blocks, in order. A block has at most `cells` cells and consists
/// of whole chunks of the output and, if memory suffices, of whole chunks of the source.
///
/// # Errors
/// A chunk of the output with more than `cells` cells.
pub(crate) fn blocks(
    [times, channels, rows, columns]: [usize; 4],
    describe: impl Fn(usize) -> Channel,
    chunk: [usize; 3],
    cells: usize,
) -> Result<Vec<Block>> {
    let unit = [chunk[0], 1, chunk[1], chunk[2]];
    let all: Vec<Channel> = (0..channels).map(describe).collect();
    let mut blocks = Vec::new();
    let mut first = 0;
    let alike = |one: &Channel, next: &Channel| {
        let kind = |channel: &Channel| (channel.is_static, channel.chunk);
        one.variable() == next.variable() && kind(one) == kind(next)
    };
    for run in all.chunk_by(alike) {
        let times = if run[0].is_static {
            times.min(1)
        } else {
            times
        };
        let shape = [times, run.len(), rows, columns];
        let source = run[0].chunk.unwrap_or([1; 4]);
        let Some(extents) = extents(shape, source, unit, cells) else {
            let least: usize = (0..4).map(|dim| unit[dim].min(shape[dim])).product();
            let expected = format!("at least {least} for a chunk {chunk:?} of the output");
            return Err(Error::argument("cells in memory", cells, expected));
        };
        let ranges = |dim: usize| {
            let starts = (0..shape[dim]).step_by(extents[dim]);
            starts.map(move |start| start..(start + extents[dim]).min(shape[dim]))
        };
        for time in ranges(0) {
            for level in ranges(1) {
                for row in ranges(2) {
                    let level = first + level.start..first + level.end;
                    let block = |column| [time.clone(), level.clone(), row.clone(), column];
                    blocks.extend(ranges(3).map(block));
                }
            }
        }
        first += run.len();
    }
    Ok(blocks)
}

/// Returns the extents of blocks: multiples of `unit`, or the whole dim, with at most `cells` cells
/// per block.
fn extents(
    shape: [usize; 4],
    source: [usize; 4],
    unit: [usize; 4],
    cells: usize,
) -> Option<[usize; 4]> {
    let multiple = |dim: usize, extent: usize| {
        let whole = extent.max(1) / unit[dim] * unit[dim];
        whole.max(unit[dim]).min(shape[dim].max(1))
    };
    let mut extents = [0, 1, 2, 3].map(|dim| {
        let extent = source[dim].min(shape[dim]).max(1);
        multiple(
            dim,
            extent
                .checked_next_multiple_of(unit[dim])
                .unwrap_or(shape[dim]),
        )
    });
    let volume = |extents: &[usize; 4]| {
        let product = |volume: usize, extent: &usize| volume.saturating_mul(*extent);
        extents.iter().fold(1, product)
    };
    // Extent along a dim that fits into memory, given the other extents.
    let room = |extents: &[usize; 4], dim: usize| {
        let mut others = *extents;
        others[dim] = 1;
        cells / volume(&others).max(1)
    };
    for dim in 0..4 {
        if volume(&extents) > cells {
            extents[dim] = multiple(dim, room(&extents, dim)).min(extents[dim]);
        }
    }
    if volume(&extents) > cells {
        return None;
    }
    // Larger blocks need fewer read calls if the source has no chunks.
    for dim in [3, 2, 1] {
        let room = room(&extents, dim);
        if room >= unit[dim] {
            extents[dim] = multiple(dim, room).max(extents[dim]);
        }
    }
    Some(extents)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn blocks_hold_chunks_of_the_source_if_there_is_room() {
        let shape = [100, 37, 721, 1440];
        let state = [1, 37, 721, 1440];
        let unit = [1, 1, 361, 480];
        assert_eq!(extents(shape, state, unit, 50 << 20), Some(state));
        assert_eq!(
            extents(shape, state, unit, 3 << 20),
            Some([1, 3, 721, 1440])
        );
        // A chunk of the source that holds many times.
        let series = [100, 1, 10, 10];
        assert_eq!(
            extents(shape, series, unit, 40 << 20),
            Some([100, 1, 361, 960])
        );
        assert_eq!(
            extents(shape, series, unit, 200_000),
            Some([1, 1, 361, 480])
        );
        assert_eq!(extents(shape, series, unit, 100_000), None);
        // Without chunks, as much as fits.
        assert_eq!(
            extents(shape, [1; 4], unit, 3 << 20),
            Some([1, 3, 721, 1440])
        );
    }

    proptest! {
        #[test]
        fn blocks_cover_every_cell_once_in_whole_chunks(
            shape in prop::array::uniform4(1..9_usize),
            source in prop::option::of(prop::array::uniform4(1..12_usize)),
            chunk in prop::array::uniform3(1..6_usize),
            is_static in any::<bool>(),
            extra in 0..200_usize,
        ) {
            let least = chunk.iter().product::<usize>();
            let describe = |channel: usize| {
                let name = format!("z@{channel}");
                Channel::new(name).with_chunk(source).with_is_static(is_static && channel < 3)
            };
            let found = blocks(shape, describe, chunk, least + extra).unwrap();
            let mut seen = std::collections::HashSet::new();
            for block in &found {
                let extents = block.each_ref().map(ExactSizeIterator::len);
                prop_assert!(extents.iter().product::<usize>() <= least + extra);
                let unit = [chunk[0], 1, chunk[1], chunk[2]];
                for dim in 0..4 {
                    prop_assert_eq!(block[dim].start % unit[dim], 0);
                    let end = block[dim].end;
                    let whole = end == shape[dim] || (is_static && dim == 0);
                    prop_assert!(end % unit[dim] == 0 || whole);
                }
                let [times, channels, rows, columns] = block.clone();
                for time in times {
                    for channel in channels.clone() {
                        for row in rows.clone() {
                            for column in columns.clone() {
                                prop_assert!(seen.insert([time, channel, row, column]));
                            }
                        }
                    }
                }
            }
            let statics = if is_static { shape[1].min(3) } else { 0 };
            let planes = statics + (shape[1] - statics) * shape[0];
            prop_assert_eq!(seen.len(), planes * shape[2] * shape[3]);
        }
    }
}
