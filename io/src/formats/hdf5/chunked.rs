//! Parallel reading and decoding of the chunks of an HDF5 dataset, which the HDF5 library cannot
//! do.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use hdf5_metno::filters::Filter;
use hdf5_reader::chunk_index::ChunkEntry;
use hdf5_reader::filters::{FILTER_DEFLATE, FILTER_SHUFFLE, apply_pipeline_with_limit};
use hdf5_reader::messages::filter_pipeline::FilterDescription;
use hdf5_reader::{Hdf5File, OpenOptions};
use ndarray::{Array4, ArrayView4, ArrayViewMut4, Axis, Slice, Zip};
use rayon::prelude::*;

use super::chunk_index::ChunkIndex;
use super::fletcher;
use crate::formats::cf::variable::Stamp;
use crate::formats::file_bytes::FileBytes;

/// Largest chunk in bytes; each thread holds a few chunks.
const MAX_CHUNK: usize = 64 << 20;

/// Chunked dataset of single-precision numbers. It reads no file but the one that it was opened
/// from.
pub(crate) struct Chunked {
    index: ChunkIndex,
    bytes: Arc<FileBytes>,
    chunk: [usize; 4],
    /// All filters except a final checksum.
    filters: Vec<FilterDescription>,
    summed: bool,
}

impl std::fmt::Debug for Chunked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Chunked").field(&self.chunk).finish()
    }
}

impl Chunked {
    /// Opens a dataset that the library has already opened. Returns `None` if its element type,
    /// filters, chunk size, number of chunks or format is not supported, or if the file was
    /// replaced since it had the stamp `found`.
    pub(crate) fn open(
        path: &Path,
        dataset: &hdf5_metno::Dataset,
        found: Option<Stamp>,
    ) -> Option<Self> {
        let chunk: [usize; 4] = dataset.chunk()?.try_into().ok()?;
        let size = chunk
            .iter()
            .try_fold(size_of::<f32>(), |bytes, extent| bytes.checked_mul(*extent))?;
        let mut filters = dataset.filters();
        let summed = filters.last() == Some(&Filter::Fletcher32);
        filters.truncate(filters.len() - usize::from(summed));
        let filters = filters.iter().map(described).collect::<Option<Vec<_>>>()?;
        let whole = dataset.create_plist().ok()?.get_chunk_opts().ok()?;
        if !dataset.dtype().ok()?.is::<f32>()
            || size > MAX_CHUNK
            || whole.is_some_and(|options| !options.is_empty())
        {
            return None;
        }
        let bytes = Arc::new(FileBytes::open(path, 2 * size + (1 << 20)).ok()?);
        if found != Some(bytes.stamp) {
            return None;
        }
        let file = Hdf5File::from_storage_with_options(bytes.clone(), OpenOptions::default());
        let file = file
            .ok()
            .filter(|file| file.superblock().base_address == 0)?;
        let fields = file.dataset(&dataset.name()).ok()?;
        Some(Self {
            index: ChunkIndex::of(file, &fields, &chunk)?,
            bytes,
            chunk,
            filters,
            summed,
        })
    }

    /// Reads a non-empty box of the dataset. Returns `None` if a chunk is damaged or not in the
    /// file.
    pub(crate) fn read(&self, cells: &[Range<usize>; 4]) -> Option<Array4<f32>> {
        let entries = self.index.find(cells)?;
        let mut values = Array4::uninit(cells.each_ref().map(ExactSizeIterator::len));
        let parts = parts(values.view_mut(), cells, &self.chunk);
        let jobs = entries.par_iter().zip_eq(parts);
        jobs.try_for_each_init(Vec::new, |memory, (entry, (part, inside))| {
            self.read_part(entry, memory, part, inside)
        })?;
        // SAFETY: the parts cover the box, each is paired with an entry, and each has been written.
        Some(unsafe { values.assume_init() })
    }

    /// Reads a chunk and writes its cells `inside` the box to `part`. `memory` is a buffer for
    /// bytes of the file.
    fn read_part(
        &self,
        entry: &ChunkEntry,
        memory: &mut Vec<u8>,
        mut part: ArrayViewMut4<'_, MaybeUninit<f32>>,
        inside: [Range<usize>; 4],
    ) -> Option<()> {
        const NUMBER: usize = size_of::<f32>();
        let size = self.chunk.iter().product::<usize>() * NUMBER;
        let length = match entry.size {
            0 => size,
            stored => usize::try_from(stored).ok()?,
        };
        let stored = self.bytes.read_into(entry.address, length, memory).ok()?;
        let (sum, skipped) = (self.filters.len(), entry.filter_mask);
        let stored = if self.summed && skipped & (1 << sum) == 0 {
            fletcher::checked(stored)?
        } else {
            stored
        };
        let decoded;
        let numbers = if self.filters.is_empty() {
            stored
        } else {
            // One extra byte, to detect a stream that is too long.
            let (filters, limit) = (&self.filters, Some(size + 1));
            decoded = apply_pipeline_with_limit(stored, filters, skipped, NUMBER, None, limit);
            decoded.as_deref().ok()?
        };
        let (numbers, _) = (numbers.len() == size).then_some(numbers.as_chunks::<NUMBER>())?;
        let mut numbers = ArrayView4::from_shape(self.chunk, numbers).ok()?;
        numbers.slice_each_axis_inplace(|axis| Slice::from(inside[axis.axis.index()].clone()));
        // Row by row, so that the inner loop runs over contiguous cells.
        let rows = Zip::from(part.rows_mut()).and(numbers.rows());
        rows.for_each(|mut to, from| {
            Zip::from(&mut to)
                .and(&from)
                .for_each(|to, from| _ = to.write(f32::from_ne_bytes(*from)));
        });
        Some(())
    }
}

/// Converts a filter to the reader's description; `None` if the filter is not supported here.
fn described(filter: &Filter) -> Option<FilterDescription> {
    let id = match filter {
        Filter::Deflate(_) => FILTER_DEFLATE,
        Filter::Shuffle => FILTER_SHUFFLE,
        _ => return None,
    };
    Some(FilterDescription {
        id,
        name: None,
        client_data: Vec::new(),
    })
}

/// Part of a box that lies in one chunk, and its cells relative to the chunk.
type Part<'a> = (ArrayViewMut4<'a, MaybeUninit<f32>>, [Range<usize>; 4]);

/// Splits a box into parts that lie in one chunk each, in the order of the chunks.
fn parts<'a>(
    values: ArrayViewMut4<'a, MaybeUninit<f32>>,
    cells: &[Range<usize>; 4],
    chunk: &[usize; 4],
) -> Vec<Part<'a>> {
    let mut parts = vec![(values, cells.clone())];
    for (axis, extent) in chunk.iter().enumerate() {
        let mut cut = Vec::new();
        for (mut rest, mut inside) in parts {
            let range = cells[axis].clone();
            for number in range.start / extent..range.end.div_ceil(*extent) {
                let (from, end) = (number * extent, range.end.min((number + 1) * extent));
                let start = range.start.max(from);
                let (part, others) = rest.split_at(Axis(axis), end - start);
                inside[axis] = start - from..end - from;
                cut.push((part, inside.clone()));
                rest = others;
            }
        }
        parts = cut;
    }
    parts
}

#[cfg(test)]
mod tests {
    use hdf5_metno::File;
    use hdf5_metno::filters::Filter;
    use hdf5_metno::plist::dataset_create::{AllocTime, ChunkOpts};
    use hdf5_metno::{Extent, SimpleExtents};
    use ndarray::{Array4, ArrayD, s};

    use super::*;
    use crate::formats::cf::variable::stamp;

    /// Kind of dataset: its chunks, and the properties that determine its chunk index.
    struct Kind {
        /// Uses the newest file format.
        latest: bool,
        chunk: [usize; 4],
        /// Number of leading dims with unlimited extent.
        unlimited: usize,
        /// Cells by which the other dims may grow.
        room: usize,
        allocation: AllocTime,
    }

    const KIND: Kind = Kind {
        latest: true,
        chunk: [1, 1, 4, 5],
        unlimited: 0,
        room: 0,
        allocation: AllocTime::Incr,
    };

    fn values() -> Array4<f32> {
        Array4::from_shape_fn((3, 2, 7, 9), |(t, c, y, x)| {
            (t * 1000 + c * 100 + y * 10 + x) as f32
        })
    }

    /// Writes all times except the last `missing` ones.
    fn write(path: &Path, kind: &Kind, filters: &[Filter], partial: bool, missing: usize) {
        let created = if kind.latest {
            File::with_options()
                .with_fapl(|access| access.libver_v110())
                .create(path)
        } else {
            File::create(path)
        };
        let created = created.unwrap();
        let values = values();
        let extents = values.shape().iter().enumerate();
        let extents = extents.map(|(dim, size)| Extent {
            dim: *size,
            max: (dim >= kind.unlimited).then_some(*size + kind.room),
        });
        let builder = created
            .new_dataset::<f32>()
            .shape(SimpleExtents::from_vec(extents.collect()))
            .chunk(kind.chunk)
            .alloc_time(Some(kind.allocation))
            .set_filters(filters);
        let builder = if partial {
            builder.chunk_opts(ChunkOpts::DONT_FILTER_PARTIAL_CHUNKS)
        } else {
            builder
        };
        let dataset = builder.create("fields").unwrap();
        let written = s![..3 - missing, .., .., ..];
        dataset.write_slice(values.slice(written), written).unwrap();
        // A builder keeps the file open too.
        drop((builder, dataset));
        created.close().unwrap();
    }

    /// Datasets are either read with the same result as the library's, or left to the library.
    #[test]
    fn chunks_are_those_of_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let read = |kind: &Kind, filters: &[Filter], partial: bool| {
            let path = folder.path().join("fields.h5");
            write(&path, kind, filters, partial, 0);
            let found = stamp(&path);
            let file = File::open(&path).unwrap();
            let dataset = file.dataset("fields").unwrap();
            let chunked = Chunked::open(&path, &dataset, found)?;
            let values = values();
            let all: ArrayD<f32> = dataset.read_dyn().unwrap();
            assert_eq!(all, values.clone().into_dyn());
            let expected = values.slice(s![1..3, .., 2..7, 3..9]);
            assert_eq!(chunked.read(&[1..3, 0..2, 2..7, 3..9]).unwrap(), expected);
            assert_eq!(chunked.read(&[0..3, 0..2, 0..7, 0..9]).unwrap(), values);
            for ((time, channel, row, column), value) in values.indexed_iter() {
                let index = [time, channel, row, column];
                let cell = index.map(|at| at..at + 1);
                assert_eq!(chunked.read(&cell).unwrap()[[0; 4]], *value, "{index:?}");
            }
            assert!(Chunked::open(&path, &dataset, None).is_none(), "replaced");
            Some(())
        };
        let all = [Filter::Shuffle, Filter::Deflate(4), Filter::Fletcher32];
        // Chunk indices of HDF5: version 1 B-trees, fixed arrays, extensible arrays, version 2
        // B-trees, single chunks without an index, and implicit indices of chunks that are
        // allocated early.
        let kinds = [
            Kind {
                latest: false,
                ..KIND
            },
            KIND,
            Kind {
                unlimited: 1,
                ..KIND
            },
            Kind {
                unlimited: 2,
                ..KIND
            },
            Kind {
                chunk: [3, 2, 7, 9],
                ..KIND
            },
            Kind {
                allocation: AllocTime::Early,
                ..KIND
            },
            Kind { room: 11, ..KIND },
            Kind {
                room: 11,
                allocation: AllocTime::Early,
                ..KIND
            },
            Kind {
                room: 11,
                unlimited: 1,
                ..KIND
            },
        ];
        for (number, kind) in kinds.iter().enumerate() {
            for count in 0..=all.len() {
                let found = read(kind, &all[..count], false);
                assert!(found.is_some(), "kind {number}, {count} filters");
            }
            assert!(
                read(kind, &all[2..], false).is_some(),
                "kind {number}, checksums"
            );
        }
        let summed_first = [Filter::Fletcher32, Filter::Deflate(4)];
        assert!(read(&KIND, &summed_first, false).is_none());
        assert!(read(&KIND, &all[..1], true).is_none());
    }

    #[test]
    fn chunks_that_are_not_in_the_file_are_left_to_the_library() {
        let folder = tempfile::tempdir().unwrap();
        for kind in [
            KIND,
            Kind {
                latest: false,
                ..KIND
            },
            Kind {
                unlimited: 1,
                ..KIND
            },
        ] {
            let path = folder.path().join("fields.h5");
            write(&path, &kind, &[], false, 1);
            let file = File::open(&path).unwrap();
            let dataset = file.dataset("fields").unwrap();
            let chunked = Chunked::open(&path, &dataset, stamp(&path)).unwrap();
            let written = chunked.read(&[0..2, 0..2, 0..7, 0..9]);
            assert_eq!(written.unwrap(), values().slice(s![..2, .., .., ..]));
            assert!(chunked.read(&[1..3, 0..2, 0..7, 0..9]).is_none());
        }
    }

    #[test]
    fn filters_that_a_chunk_skips_are_not_undone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fields.h5");
        let kind = Kind {
            chunk: [3, 2, 7, 9],
            ..KIND
        };
        write(&path, &kind, &[], false, 0);
        let file = File::open(&path).unwrap();
        let dataset = file.dataset("fields").unwrap();
        let mut chunked = Chunked::open(&path, &dataset, stamp(&path)).unwrap();
        let cells = [0..3, 0..2, 0..7, 0..9];
        let mut entry = chunked.index.find(&cells).unwrap().remove(0);
        // Imitates a dataset with filters whose chunk was stored without them.
        let filters = [Filter::Shuffle, Filter::Deflate(4)];
        chunked.filters = filters.iter().filter_map(described).collect();
        chunked.summed = true;
        for (mask, reads) in [(0b111, true), (0b011, false), (0b101, false), (0, false)] {
            entry.filter_mask = mask;
            let mut part = Array4::uninit((3, 2, 7, 9));
            let read = chunked.read_part(&entry, &mut Vec::new(), part.view_mut(), cells.clone());
            assert_eq!(read.is_some(), reads, "{mask:b}");
            if reads {
                // SAFETY: the chunk covers the part, and has been read.
                assert_eq!(unsafe { part.assume_init() }, values());
            }
        }
    }
}
