//! Where the chunks of an HDF5 dataset are in its file.

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

/// Chunks that a tree may list: it is read whole for every box.
const MAX_LISTED: u64 = 4096;

/// The index of a dataset's chunks, of which the parts for a box are read.
pub(crate) struct ChunkIndex {
    file: Hdf5File,
    address: u64,
    /// `None`: a tree of the first version.
    indexing: Option<ChunkIndexing>,
    shape: Vec<u64>,
    max_shape: Option<Vec<u64>>,
    chunk: Vec<u32>,
}

impl ChunkIndex {
    /// The index of a dataset; none if it is not in chunks of these extents, or if the index is read whole for every box and
    /// may have too many.
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
        // The size of an element may follow.
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

    /// The chunks that a box with cells meets, in their order; none if one is not in the file, or more than once.
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

    /// The number of a chunk among those of a grid; none if it is not in it.
    fn place(&self, entry: &ChunkEntry, grid: &[Range<usize>]) -> Option<usize> {
        let mut dims = grid.iter().zip(&self.chunk).zip(&entry.offsets);
        dims.try_fold(0, |place, ((range, extent), offset)| {
            let number = (offset / u64::from(*extent)) as usize;
            let inside = offset % u64::from(*extent) == 0 && range.contains(&number);
            inside.then(|| place * range.len() + number - range.start)
        })
    }

    /// The chunks from `first` to `last` of the grid, and perhaps others.
    fn entries(&self, first: &[u64], last: &[u64]) -> Result<Vec<ChunkEntry>> {
        let (storage, sizes) = (self.file.storage(), self.file.superblock());
        let (offset, length) = (sizes.offset_size, sizes.length_size);
        let (address, chunk) = (self.address, &self.chunk);
        let max_shape = self.max_shape.as_deref();
        // HDF5 numbers chunks over the largest extents, where none is without bound.
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

/// A chunk of a tree of the first version.
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
