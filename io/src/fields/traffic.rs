//! Counts of bytes read from files and stores.

use std::fmt;
use std::ops::{Add, Range};
use std::sync::atomic::{AtomicU64, Ordering};

/// Total bytes read for boxes of cells since a file or store was opened.
///
/// # Example
/// ```
/// use halocline_io::ndarray::Array3;
/// use halocline_io::{FieldFile, FieldWriter, Fields, Grid, WriterConfig};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// let grid = Grid::cell_centered(4, 8)?;
/// let config = WriterConfig::new().with_chunk(Some([1, 1, 4, 8])); // a whole field per chunk
/// let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &config)?;
/// writer.append(0.0, Array3::ones((1, 4, 8)).view())?;
/// writer.finish()?;
///
/// let file = FieldFile::open(&path)?;
/// file.read([0..1, 0..1, 0..2, 0..8])?; // the northern half
/// let traffic = file.traffic();
/// assert_eq!((traffic.decoded, traffic.needed), (4 * 8 * 4, 2 * 8 * 4));
/// assert_eq!(traffic.amplification(), 2.0);
/// println!("{traffic}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes read from the file or store, before decompression. For a [field
    /// file](crate::FieldFile), an estimate from the mean compression of its fields.
    pub fetched: u64,
    /// Bytes of the decoded chunks, clipped to the field. Chunks of Zarr stores and NetCDF files
    /// that another reader in this process decoded are not counted.
    pub decoded: u64,
    /// Bytes of the requested values.
    pub needed: u64,
}

impl Traffic {
    /// Returns the read amplification: bytes decoded per byte needed. It is 1 if chunks fit the
    /// boxes, and does not depend on compression.
    pub fn amplification(&self) -> f64 {
        if self.needed == 0 {
            return 1.0;
        }
        self.decoded as f64 / self.needed as f64
    }
}

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            fetched: self.fetched + other.fetched,
            decoded: self.decoded + other.decoded,
            needed: self.needed + other.needed,
        }
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [fetched, decoded, needed] =
            [self.fetched, self.decoded, self.needed].map(|bytes| bytes as f64 / 1e6);
        if self.decoded == 0 && self.needed > 0 {
            return write!(
                f,
                "{needed:.3} MB needed, all from the cache of decoded chunks"
            );
        }
        write!(
            f,
            "{fetched:.3} MB fetched, {decoded:.3} MB decoded, {needed:.3} MB needed: \
             read amplification {:.2}",
            self.amplification()
        )
    }
}

/// Counter of [`Traffic`], shared by threads.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    fetched: AtomicU64,
    decoded: AtomicU64,
    needed: AtomicU64,
}

impl Counter {
    pub(crate) fn add(&self, fetched: u64, decoded: u64, needed: u64) {
        self.fetched.fetch_add(fetched, Ordering::Relaxed);
        self.decoded.fetch_add(decoded, Ordering::Relaxed);
        self.needed.fetch_add(needed, Ordering::Relaxed);
    }

    pub(crate) fn total(&self) -> Traffic {
        let [fetched, decoded, needed] =
            [&self.fetched, &self.decoded, &self.needed].map(|bytes| bytes.load(Ordering::Relaxed));
        Traffic {
            fetched,
            decoded,
            needed,
        }
    }
}

/// Returns the number of cells of the chunks that a box intersects, clipped to the field; without
/// chunks, of the box itself.
pub(crate) fn covered(cells: &[Range<usize>], shape: &[usize], chunk: Option<&[usize]>) -> u64 {
    let extent = |(dim, range): (usize, &Range<usize>)| match chunk.map(|chunk| chunk[dim].max(1)) {
        _ if range.is_empty() => 0,
        None => range.len(),
        Some(chunk) => {
            let low = range.start / chunk * chunk;
            let high = range.end.div_ceil(chunk).saturating_mul(chunk);
            high.min(shape[dim]) - low
        }
    };
    cells
        .iter()
        .enumerate()
        .map(extent)
        .map(|n| n as u64)
        .product()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_from_the_cache_have_no_amplification() {
        let traffic = |decoded| Traffic {
            needed: 2_000_000,
            decoded,
            ..Traffic::default()
        };
        let expected = "2.000 MB needed, all from the cache of decoded chunks";
        assert_eq!(traffic(0).to_string(), expected);
        let text = traffic(1_000_000).to_string();
        assert!(text.ends_with("read amplification 0.50"), "{text}");
    }

    #[test]
    fn chunks_are_covered_up_to_the_edge_of_the_field() {
        let shape = [5, 7, 9];
        let cells = [1..2, 2..4, 8..9];
        assert_eq!(covered(&cells, &shape, None), 2);
        assert_eq!(covered(&cells, &shape, Some(&[1, 3, 4])), 6);
        assert_eq!(covered(&cells, &shape, Some(&[2, 100, 4])), 2 * 7);
        assert_eq!(covered(&[1..1, 2..4, 8..9], &shape, Some(&[1, 3, 4])), 0);
    }
}
