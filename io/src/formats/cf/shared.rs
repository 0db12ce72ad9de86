//! Cache of chunks that several ranks of this process need, so that each is decoded once.
//!
//! A chunk that a box covers in part is likely to be needed by another rank too. The first rank
//! that requests it decodes it; the others decode other chunks meanwhile and then wait for it. The
//! most recently used chunks are kept, up to a bound in bytes.

use std::cell::Cell;
use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use lru::LruCache;
use ndarray::{ArrayD, ArrayViewD, IxDyn, SliceInfoElem};
use rayon::prelude::*;

use super::variable::{Container, Kind, Stamp};
use crate::Error;
use crate::formats::packing::Stored;

/// Number of MiB of chunks to keep, unless [`VARIABLE`] sets another.
const KEPT: usize = 512;
const VARIABLE: &str = "HALOCLINE_CHUNK_CACHE";

type Cells = Vec<Range<usize>>;
type Numbers = Stored<IxDyn>;

/// Identity of a chunk of a file or store.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    path: PathBuf,
    variable: String,
    first: Vec<usize>,
    stamp: Stamp,
}

/// Chunk that some rank decodes or has decoded.
#[derive(Default)]
struct Slot {
    claimed: AtomicBool,
    numbers: OnceLock<Result<Numbers, String>>,
}

thread_local! {
    /// Whether this thread is decoding chunks that others may wait for, in which case it must not
    /// wait itself.
    static DECODING: Cell<bool> = const { Cell::new(false) };
}

fn while_decoding<T>(work: impl FnOnce() -> T) -> T {
    let outer = DECODING.replace(true);
    let result = work();
    DECODING.set(outer);
    result
}

struct Cache {
    slots: LruCache<Key, (Arc<Slot>, usize)>,
    bytes: usize,
    limit: usize,
}

static CACHE: LazyLock<Mutex<Cache>> = LazyLock::new(|| {
    let limit = limit().expect("checked as the file was opened");
    Mutex::new(Cache {
        slots: LruCache::unbounded(),
        bytes: 0,
        limit,
    })
});

/// Reads the largest number of bytes to keep from the environment.
///
/// # Errors
/// A value that is not a number of MiB.
pub(super) fn limit() -> crate::Result<usize> {
    bytes(std::env::var_os(VARIABLE))
}

/// Converts a number of MiB.
fn bytes(value: Option<OsString>) -> crate::Result<usize> {
    let Some(value) = value else {
        return Ok(KEPT << 20);
    };
    let text = value.to_string_lossy();
    match text.parse::<usize>() {
        Ok(megabytes) => Ok(megabytes.saturating_mul(1 << 20)),
        Err(_) => {
            let expected = format!("a number of MiB, such as {KEPT}");
            Err(Error::argument(VARIABLE, text, expected))
        }
    }
}

fn cache() -> MutexGuard<'static, Cache> {
    CACHE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cache {
    fn slot(&mut self, key: &Key) -> Arc<Slot> {
        let (slot, _) = self.slots.get_or_insert_ref(key, Default::default);
        slot.clone()
    }

    fn forget(&mut self, key: &Key) {
        if let Some((_, bytes)) = self.slots.pop(key) {
            self.bytes -= bytes;
        }
    }

    /// Counts the bytes of a decoded chunk, and evicts the least recently used ones. A rank that
    /// waits for an evicted chunk holds a reference to it.
    fn keep(&mut self, key: &Key, bytes: usize) {
        if let Some((_, counted)) = self.slots.get_mut(key) {
            self.bytes += bytes - *counted;
            *counted = bytes;
        }
        while self.bytes > self.limit
            && let Some((_, (_, bytes))) = self.slots.pop_lru()
        {
            self.bytes -= bytes;
        }
    }
}

/// Chunk that this rank decodes on behalf of all ranks that need it.
struct Claim {
    key: Key,
    slot: Arc<Slot>,
    chunk: Cells,
}

impl Claim {
    /// Decodes the chunk and returns the number of its cells.
    fn decode(self, container: &dyn Container, variable: usize) -> u64 {
        let numbers = while_decoding(|| stored(container, variable, &self.chunk));
        let decoded = numbers
            .as_ref()
            .map(|numbers| (numbers.bytes(), volume(&self.chunk)));
        let (bytes, cells) = decoded.unwrap_or_default();
        let _ = self.slot.numbers.set(numbers);
        if bytes > 0 {
            cache().keep(&self.key, bytes);
        }
        cells
    }
}

impl Drop for Claim {
    /// Releases waiting ranks with an error if decoding failed or panicked.
    fn drop(&mut self) {
        if self.slot.numbers.get().is_none_or(Result::is_err) {
            let failed = "the rank that decoded the chunk failed";
            let _ = self.slot.numbers.set(Err(failed.into()));
            // Allows a later attempt to read it.
            cache().forget(&self.key);
        }
    }
}

/// Part of a box: cells that only this rank reads, or a chunk in the cache.
enum Part {
    Own(Numbers),
    Shared(Arc<Slot>),
}

/// Read of a box of a variable, in progress.
pub(crate) struct Request<'a> {
    container: &'a dyn Container,
    variable: usize,
    cells: &'a [Range<usize>],
    parts: Vec<(Cells, Part)>,
    /// Number of values that this rank has decoded.
    decoded: u64,
}

impl<'a> Request<'a> {
    /// Starts the read of a box: decodes all of its chunks that no other rank has claimed.
    ///
    /// # Errors
    /// A chunk that cannot be read.
    pub(crate) fn start(
        container: &'a dyn Container,
        variable: usize,
        cells: &'a [Range<usize>],
    ) -> Result<Self, String> {
        let mut request = Self {
            container,
            variable,
            cells,
            parts: Vec::new(),
            decoded: 0,
        };
        let found = &container.variables()[variable];
        let chunk = found.chunk.as_deref().filter(|chunk| !chunk.contains(&0));
        let Some(chunk) = chunk else {
            request.read(cells.to_vec())?;
            return Ok(request);
        };
        let inside = inside(cells, &found.shape, chunk);
        if inside.iter().all(|range| !range.is_empty()) {
            request.read(inside.clone())?;
        }
        if inside == cells {
            return Ok(request);
        }
        // Only Rayon threads claim chunks, so that claimed chunks are decoded even if all other
        // threads wait.
        rayon::scope(|_| while_decoding(|| request.share(chunk, &inside)))?;
        Ok(request)
    }

    /// Decodes the chunks of extents `chunk` that do not lie `inside`, except those claimed by
    /// other ranks.
    fn share(&mut self, chunk: &[usize], inside: &[Range<usize>]) -> Result<(), String> {
        let (container, variable, cells) = (self.container, self.variable, self.cells);
        let found = &container.variables()[variable];
        let mut claims = Vec::new();
        let mut absent: Vec<Cells> = Vec::new();
        for chunk in chunks(cells, &found.shape, chunk) {
            if within(&chunk, inside) {
                continue;
            }
            let first: Vec<usize> = chunk.iter().map(|range| range.start).collect();
            let Some(stamp) = container.stamp(variable, &first) else {
                // The chunk is not stored, so there is nothing to decode.
                let common = chunk.iter().zip(cells);
                let common = common
                    .map(|(chunk, cells)| chunk.start.max(cells.start)..chunk.end.min(cells.end));
                absent.push(common.collect());
                continue;
            };
            let key = Key {
                path: container.path().into(),
                variable: found.name.clone(),
                first,
                stamp,
            };
            let slot = cache().slot(&key);
            if !slot.claimed.swap(true, Ordering::AcqRel) {
                let (slot, chunk) = (slot.clone(), chunk.clone());
                claims.push(Claim { key, slot, chunk });
            }
            self.parts.push((chunk, Part::Shared(slot)));
        }
        // On all threads, because each level of a variable may lie in its own chunks.
        let claims = claims.into_par_iter();
        let decoded = claims.map(|claim| claim.decode(container, variable));
        self.decoded += decoded.sum::<u64>();
        // After the claims, because an error before would fail the ranks that wait for them.
        absent.into_iter().try_for_each(|cells| self.read(cells))
    }

    /// Waits for the chunks that other ranks decode. Returns the numbers of the box, and the number
    /// of values that this rank has decoded.
    ///
    /// # Errors
    /// A chunk that cannot be read.
    pub(crate) fn finish(mut self) -> Result<(Numbers, u64), String> {
        if let [(cells, Part::Own(_))] = &self.parts[..]
            && cells == self.cells
            && let Some((_, Part::Own(numbers))) = self.parts.pop()
        {
            return Ok((numbers, self.decoded));
        }
        let extents: Vec<usize> = self.cells.iter().map(ExactSizeIterator::len).collect();
        let single = self.container.variables()[self.variable].kind == Kind::Single;
        let mut numbers = if single {
            Stored::Single(ArrayD::zeros(extents))
        } else {
            Stored::Double(ArrayD::zeros(extents))
        };
        for (chunk, part) in std::mem::take(&mut self.parts) {
            match part {
                Part::Own(own) => paste(&mut numbers, self.cells, &own, &chunk),
                // Rayon may run this inside the task that decodes the chunk, which would then wait
                // for itself.
                Part::Shared(slot) if slot.numbers.get().is_none() && DECODING.get() => {
                    let own = stored(self.container, self.variable, &chunk)?;
                    self.decoded += volume(&chunk);
                    paste(&mut numbers, self.cells, &own, &chunk);
                }
                Part::Shared(slot) => {
                    let shared = slot.numbers.wait().as_ref().map_err(String::clone)?;
                    paste(&mut numbers, self.cells, shared, &chunk);
                }
            }
        }
        Ok((numbers, self.decoded))
    }

    /// Reads a box without sharing it.
    fn read(&mut self, cells: Cells) -> Result<(), String> {
        let numbers = stored(self.container, self.variable, &cells)?;
        self.decoded += volume(&cells);
        self.parts.push((cells, Part::Own(numbers)));
        Ok(())
    }
}

/// Reads a box of a variable in its stored type.
fn stored(
    container: &dyn Container,
    variable: usize,
    cells: &[Range<usize>],
) -> Result<Numbers, String> {
    Ok(match container.variables()[variable].kind {
        Kind::Single => Stored::Single(container.single(variable, cells)?),
        _ => Stored::Double(container.double(variable, cells)?),
    })
}

/// Number of cells in a box.
fn volume(cells: &[Range<usize>]) -> u64 {
    cells.iter().map(|range| range.len() as u64).product()
}

/// Returns the part of a box whose chunks lie entirely inside it; if there is none, some range is
/// empty.
fn inside(cells: &[Range<usize>], shape: &[usize], chunk: &[usize]) -> Cells {
    let dims = cells.iter().zip(shape).zip(chunk);
    let range = |((range, size), chunk): ((&Range<usize>, &usize), &usize)| {
        let low = range.start.next_multiple_of(*chunk).min(range.end);
        let high = if range.end == *size {
            range.end
        } else {
            range.end / chunk * chunk
        };
        low..high.max(low)
    };
    dims.map(range).collect()
}

/// Iterates over the chunks that intersect a box, clipped to the field.
fn chunks(cells: &[Range<usize>], shape: &[usize], chunk: &[usize]) -> impl Iterator<Item = Cells> {
    let (shape, chunk) = (shape.to_vec(), chunk.to_vec());
    let counts: Vec<Range<usize>> = cells
        .iter()
        .zip(&chunk)
        .map(|(range, chunk)| {
            if range.is_empty() {
                0..0
            } else {
                range.start / chunk..range.end.div_ceil(*chunk)
            }
        })
        .collect();
    let total: usize = counts.iter().map(ExactSizeIterator::len).product();
    (0..total).map(move |mut index| {
        let mut ranges = vec![0..0; counts.len()];
        for (dim, count) in counts.iter().enumerate().rev() {
            let first = (count.start + index % count.len()) * chunk[dim];
            ranges[dim] = first..first.saturating_add(chunk[dim]).min(shape[dim]);
            index /= count.len();
        }
        ranges
    })
}

fn within(inner: &[Range<usize>], outer: &[Range<usize>]) -> bool {
    let mut dims = inner.iter().zip(outer);
    dims.all(|(inner, outer)| outer.start <= inner.start && inner.end <= outer.end)
}

/// Copies the intersection of two boxes.
fn paste(to: &mut Numbers, to_cells: &[Range<usize>], from: &Numbers, from_cells: &[Range<usize>]) {
    let seen_from = |outer: &[Range<usize>]| -> Vec<SliceInfoElem> {
        let dims = to_cells.iter().zip(from_cells).zip(outer);
        let range = |((to, from), outer): ((&Range<usize>, &Range<usize>), &Range<usize>)| -> SliceInfoElem {
            let [low, high] = [to.start.max(from.start), to.end.min(from.end)];
            (low - outer.start..high - outer.start).into()
        };
        dims.map(range).collect()
    };
    let (to_ranges, from_ranges) = (seen_from(to_cells), seen_from(from_cells));
    fn assign<T: Clone>(
        to: &mut ArrayD<T>,
        to_ranges: &[SliceInfoElem],
        from: ArrayViewD<'_, T>,
        from_ranges: &[SliceInfoElem],
    ) {
        to.slice_mut(to_ranges).assign(&from.slice(from_ranges));
    }
    match (to, from) {
        (Stored::Single(to), Stored::Single(from)) => {
            assign(to, &to_ranges, from.view(), &from_ranges);
        }
        (Stored::Double(to), Stored::Double(from)) => {
            assign(to, &to_ranges, from.view(), &from_ranges);
        }
        _ => unreachable!("a variable has numbers of one kind"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_the_cache_that_are_no_numbers_are_refused() {
        let bytes = |text: &str| bytes(Some(text.into()));
        assert_eq!(bytes("3").unwrap(), 3 << 20);
        for wrong in ["1G", "-1", ""] {
            let error = bytes(wrong).unwrap_err().to_string();
            let told = format!("HALOCLINE_CHUNK_CACHE: got {wrong}, expected a number of MiB");
            assert!(error.contains(&told), "{error}");
        }
    }

    #[test]
    fn the_chunks_of_a_box_are_its_own_or_shared() {
        let (shape, chunk) = ([5, 7], [2, 3]);
        let boxes = |cells: [Range<usize>; 2]| chunks(&cells, &shape, &chunk).collect::<Vec<_>>();
        assert_eq!(boxes([1..3, 3..6]), [vec![0..2, 3..6], vec![2..4, 3..6]]);
        assert_eq!(boxes([4..5, 5..7]), [vec![4..5, 3..6], vec![4..5, 6..7]]);
        assert_eq!(boxes([1..1, 0..7]), Vec::<Cells>::new());
        assert_eq!(inside(&[1..5, 0..6], &shape, &chunk), [2..5, 0..6]);
        assert_eq!(inside(&[0..5, 1..7], &shape, &chunk), [0..5, 3..7]);
        assert!(inside(&[1..2, 0..7], &shape, &chunk)[0].is_empty());
        assert!(within(
            &[4..5, 3..6],
            &inside(&[1..5, 0..6], &shape, &chunk)
        ));
    }
}
