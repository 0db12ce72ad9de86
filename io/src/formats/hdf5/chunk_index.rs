//! Locations of the chunks of an HDF5 dataset in its file.

use std::ops::Range;

use hdf5_reader::chunk_index::{
    ChunkEntry, collect_implicit_chunk_entries, collect_v2_chunk_entries_storage,
    single_chunk_entry,
};
use hdf5_reader::error::{Error, Result};
use hdf5_reader::extensible_array::collect_extensible_array_chunk_entries_storage;
use hdf5_reader::fixed_array::collect_fixed_array_chunk_entries_storage;
use hdf5_reader::messages::HdfMessage;
use hdf5_reader::messages::layout::{ChunkIndexing, DataLayout};
use hdf5_reader::{Dataset, Hdf5File, btree_v1, btree_v1::BTreeV1Key};

/// Largest number of chunks in a tree, which is read in full for every box.
const MAX_LISTED: u64 = 4096;

/// Index of the chunks of a dataset, of which only the parts needed for a box are read.
pub(crate) struct ChunkIndex {
    file: Hdf5File,
    address: u64,
    /// `None` for a version 1 B-tree.
    indexing: Option<ChunkIndexing>,
    shape: Vec<u64>,
    max_shape: Option<Vec<u64>>,
    chunk: Vec<u32>,
}

impl ChunkIndex {
    /// Opens the index of a dataset. Returns `None` if the dataset is not chunked with these
    /// extents, or if the index is a tree, which is read in full for every box, that may list too
    /// many chunks.
    pub(crate) fn of(file: Hdf5File, dataset: &Dataset, chunk: &[usize]) -> Option<Self> {
        let header = file.get_or_parse_header(dataset.address()).ok()?;
        let layout = header.messages.iter().find_map(|message| match message {
            HdfMessage::DataLayout(found) => Some(&found.layout),
            _ => None,
        });
        let Some(DataLayout::Chunked {
            address,
            dims,
            chunk_indexing,
            ..
        }) = layout
        else {
            return None;
        };
        let chunk: Vec<u32> = chunk
            .iter()
            .map(|extent| u32::try_from(*extent).ok())
            .collect::<Option<_>>()?;
        let mut counts = dataset.shape().iter().zip(&chunk);
        let count = counts.try_fold(1_u64, |count, (size, extent)| {
            count.checked_mul(size.div_ceil(u64::from(*extent)))
        });
        let is_tree = matches!(chunk_indexing, None | Some(ChunkIndexing::BTreeV2));
        if is_tree && count.is_none_or(|count| count > MAX_LISTED) {
            return None;
        }
        // The size of an element may follow the extents.
        let same = dims.starts_with(&chunk) && dataset.ndim() == chunk.len();
        same.then(|| Self {
            address: *address,
            indexing: chunk_indexing.clone(),
            shape: dataset.shape().to_vec(),
            max_shape: dataset.max_dims().map(<[u64]>::to_vec),
            chunk,
            file,
        })
    }

    /// Finds the chunks that intersect a non-empty box, in row-major order. Returns `None` if a
    /// chunk is not in the file, or is listed more than once.
    pub(crate) fn find(&self, cells: &[Range<usize>; 4]) -> Option<Vec<ChunkEntry>> {
        let of_chunks = cells.iter().zip(&self.chunk).map(|(range, extent)| {
            let extent = *extent as usize;
            range.start / extent..range.end.div_ceil(extent)
        });
        let grid: Vec<Range<usize>> = of_chunks.collect();
        let first: Vec<u64> = grid.iter().map(|range| range.start as u64).collect();
        let last: Vec<u64> = grid.iter().map(|range| range.end as u64 - 1).collect();
        let found = self.entries(&first, &last).ok()?;
        let count = grid.iter().map(ExactSizeIterator::len).product();
        let mut places = vec![None; count];
        for entry in found {
            if let Some(place) = self.place(&entry, &grid) {
                if places[place].is_some() {
                    return None;
                }
                places[place] = Some(entry);
            }
        }
        places.into_iter().collect()
    }

    /// Returns the row-major index of a chunk within a grid of chunks, or `None` if it lies
    /// outside.
    fn place(&self, entry: &ChunkEntry, grid: &[Range<usize>]) -> Option<usize> {
        let mut dims = grid.iter().zip(&self.chunk).zip(&entry.offsets);
        dims.try_fold(0, |place, ((range, extent), offset)| {
            let number = (offset / u64::from(*extent)) as usize;
            let inside = offset % u64::from(*extent) == 0 && range.contains(&number);
            inside.then(|| place * range.len() + number - range.start)
        })
    }

    /// Reads the entries of the chunks from `first` to `last`, and possibly of others.
    fn entries(&self, first: &[u64], last: &[u64]) -> Result<Vec<ChunkEntry>> {
        let (storage, sizes) = (self.file.storage(), self.file.superblock());
        let (offset, length) = (sizes.offset_size, sizes.length_size);
        let (address, chunk) = (self.address, &self.chunk);
        let max_shape = self.max_shape.as_deref();
        // HDF5 numbers chunks over the maximum extents if all of these are bounded.
        let bounded = max_shape.filter(|extents| !extents.contains(&u64::MAX));
        let numbered = bounded.unwrap_or(&self.shape);
        let (bounds, dims) = (Some((first, last)), chunk.len() as u32);
        match &self.indexing {
            None => {
                let leaves = btree_v1::collect_btree_v1_leaves_storage(
                    storage,
                    address,
                    offset,
                    length,
                    Some(dims),
                    chunk,
                    bounds,
                )?;
                leaves.into_iter().map(of_leaf).collect()
            }
            Some(ChunkIndexing::SingleChunk {
                filtered_size,
                filters,
            }) => {
                let entry = single_chunk_entry(address, *filtered_size, *filters, chunk.len());
                Ok(vec![entry])
            }
            Some(ChunkIndexing::Implicit) => {
                let size = size_of::<f32>();
                let end = storage.len();
                collect_implicit_chunk_entries(address, numbered, chunk, size, bounds, end)
            }
            Some(ChunkIndexing::FixedArray { .. }) => collect_fixed_array_chunk_entries_storage(
                storage, address, offset, length, numbered, chunk, bounds,
            ),
            Some(ChunkIndexing::ExtensibleArray { .. }) => {
                let shape = &self.shape;
                collect_extensible_array_chunk_entries_storage(
                    storage, address, offset, length, shape, max_shape, chunk, bounds,
                )
            }
            Some(ChunkIndexing::BTreeV2) => collect_v2_chunk_entries_storage(
                storage, address, offset, length, dims, chunk, bounds,
            ),
        }
    }
}

/// Converts a leaf of a version 1 B-tree to a chunk entry.
fn of_leaf((key, address): (BTreeV1Key, u64)) -> Result<ChunkEntry> {
    match key {
        BTreeV1Key::RawData {
            chunk_size,
            filter_mask,
            offsets,
        } => Ok(ChunkEntry {
            address,
            size: u64::from(chunk_size),
            filter_mask,
            offsets,
        }),
        _ => Err(Error::InvalidData("a tree of groups, not of chunks".into())),
    }
}
