//! Reading of the chunks of an HDF5 dataset by all threads at once, which the HDF5 library cannot do.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use hdf5_metno::filters::Filter;
use hdf5_reader::{Dataset, Hdf5File, OpenOptions, SliceInfo, SliceInfoElem};
use ndarray::Array4;

use crate::cf::variable::Stamp;
use crate::file_bytes::FileBytes;
use crate::fletcher;

/// Bytes of the largest chunk, of which each thread holds a few.
const MAX_CHUNK: usize = 64 << 20;
/// Chunks that an index without bounds of its parts may list, as it is read for every box.
const MAX_LISTED: usize = 4096;
/// The first version of the format whose indices are read in part.
const INDEXED: u8 = 3;

/// A dataset in chunks of numbers in single precision. It reads no file but its own.
pub(crate) struct Chunked(Dataset);

impl std::fmt::Debug for Chunked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Chunked").field(&self.0.shape()).finish()
    }
}

impl Chunked {
    /// The dataset that the library has opened. None if it has other numbers or filters, chunks that are too large or too
    /// many, or a format that the reader does not know, or if the file has been replaced since it had the stamp.
    pub(crate) fn open(
        path: &Path,
        dataset: &hdf5_metno::Dataset,
        found: Option<Stamp>,
    ) -> Option<Self> {
        let chunk = dataset.chunk()?;
        let bytes = chunk
            .iter()
            .try_fold(size_of::<f32>(), |bytes, extent| bytes.checked_mul(*extent))?;
        let filters = dataset.filters();
        let known = |(place, filter): (usize, &Filter)| match filter {
            Filter::Deflate(_) | Filter::Shuffle => true,
            Filter::Fletcher32 => place + 1 == filters.len(),
            _ => false,
        };
        let whole = dataset.create_plist().ok()?.get_chunk_opts().ok()?;
        if !dataset.dtype().ok()?.is::<f32>()
            || bytes > MAX_CHUNK
            || !filters.iter().enumerate().all(known)
            || whole.is_some_and(|options| !options.is_empty())
        {
            return None;
        }
        let storage = FileBytes::open(path, 2 * bytes + (1 << 20)).ok()?;
        if found != Some(storage.stamp) {
            return None;
        }
        // Samples are read in any order, so that a chunk is seldom needed again soon.
        let options = OpenOptions::default()
            .with_chunk_cache_bytes(0)
            .with_max_chunk_bytes(MAX_CHUNK)
            .with_filter_registry(fletcher::filters());
        let file = Hdf5File::from_storage_with_options(Arc::new(storage), options).ok()?;
        let extents = dataset.shape();
        let counts = extents.iter().zip(&chunk);
        let count = counts.map(|(size, extent)| size.div_ceil(*extent));
        if file.superblock().version < INDEXED && count.product::<usize>() > MAX_LISTED {
            return None;
        }
        file.dataset(&dataset.name()).ok().map(Self)
    }

    /// A box of the dataset; none if a chunk is damaged.
    pub(crate) fn read(&self, cells: &[Range<usize>; 4]) -> Option<Array4<f32>> {
        let range = |range: &Range<usize>| SliceInfoElem::Slice {
            start: range.start as u64,
            end: range.end as u64,
            step: 1,
        };
        let selections = cells.iter().map(range).collect();
        let values = self.0.read_slice_parallel(&SliceInfo { selections }).ok()?;
        let extents = cells.each_ref().map(ExactSizeIterator::len);
        values.into_shape_with_order(extents).ok()
    }
}

#[cfg(test)]
mod tests {
    use hdf5_metno::File;
    use hdf5_metno::filters::Filter;
    use hdf5_metno::plist::dataset_create::ChunkOpts;
    use ndarray::{Array4, ArrayD};

    use super::*;
    use crate::cf::variable::stamp;

    /// Datasets that are read as the library reads them, or left to it.
    #[test]
    fn chunks_are_those_of_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let values = Array4::from_shape_fn((3, 2, 7, 9), |(t, c, y, x)| {
            (t * 1000 + c * 100 + y * 10 + x) as f32
        });
        let read = |name: &str, latest: bool, filters: &[Filter], partial: bool| {
            let path = folder.path().join(name);
            let created = match latest {
                true => File::with_options()
                    .with_fapl(|access| access.libver_v110())
                    .create(&path),
                false => File::create(&path),
            };
            let created = created.unwrap();
            let builder = created.new_dataset::<f32>().shape(values.shape().to_vec());
            let builder = builder.chunk(vec![1, 1, 4, 5]).set_filters(filters);
            let builder = match partial {
                true => builder.chunk_opts(ChunkOpts::DONT_FILTER_PARTIAL_CHUNKS),
                false => builder,
            };
            let dataset = builder.create("fields").unwrap();
            dataset.write(&values).unwrap();
            // A builder holds the file, too.
            drop((builder, dataset));
            created.close().unwrap();
            let found = stamp(&path);
            let file = File::open(&path).unwrap();
            let dataset = file.dataset("fields").unwrap();
            let chunked = Chunked::open(&path, &dataset, found)?;
            let cells = [1..3, 0..2, 2..7, 3..9];
            let all: ArrayD<f32> = dataset.read_dyn().unwrap();
            assert_eq!(all, values.clone().into_dyn());
            let expected = values.slice(ndarray::s![1..3, .., 2..7, 3..9]);
            assert_eq!(chunked.read(&cells).unwrap(), expected);
            assert!(Chunked::open(&path, &dataset, None).is_none(), "replaced");
            Some(())
        };
        let all = [Filter::Shuffle, Filter::Deflate(4), Filter::Fletcher32];
        for latest in [false, true] {
            for count in 0..=all.len() {
                let name = format!("{latest} {count}.h5");
                let found = read(&name, latest, &all[..count], false);
                assert!(found.is_some(), "{name}");
            }
        }
        let summed_first = [Filter::Fletcher32, Filter::Deflate(4)];
        assert!(read("summed first.h5", true, &summed_first, false).is_none());
        assert!(read("partial.h5", true, &all[..1], true).is_none());
    }
}
