//! Chunks that fit a mesh: every rank holds whole chunks, so that no two ranks write the same one.

/// Largest extent chosen for a chunk: 1 MiB of f32 in two dims.
const MOST: usize = 512;

/// Returns the extent of chunks along a dim of which ranks hold `extents`: the largest extent,
/// divided into equal parts of at most [`MOST`].
pub(crate) fn extent(extents: &[usize]) -> usize {
    let largest = extents.iter().copied().max().unwrap_or(0).max(1);
    largest.div_ceil(largest.div_ceil(MOST))
}

/// Returns the extents nearest to `extents` that end at chunk boundaries. A rank may get an extent
/// of zero.
pub(crate) fn aligned(extents: &[usize], chunk: usize) -> Vec<usize> {
    let size: usize = extents.iter().sum();
    let mut end = 0;
    let mut before = 0;
    let mut all = Vec::with_capacity(extents.len());
    for extent in extents {
        end += extent;
        let nearest = (end + chunk / 2) / chunk * chunk;
        let boundary = if end == size { size } else { nearest.min(size) };
        all.push(boundary - before);
        before = boundary;
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn even_shards_are_chunks() {
        assert_eq!(
            (extent(&[361, 360]), aligned(&[361, 360], 361)),
            (361, vec![361, 360])
        );
        assert_eq!((extent(&[720, 720]), extent(&[1440])), (360, 480));
        assert_eq!(aligned(&[720, 720], 360), [720, 720]);
        // One row moves to another rank.
        assert_eq!(aligned(&[241, 240, 240], 241), [241, 241, 239]);
        assert_eq!(aligned(&[3, 2, 2], 3), [3, 3, 1]);
        assert_eq!(aligned(&[10, 700], extent(&[10, 700])), [0, 710]);
        assert_eq!((extent(&[0, 0]), aligned(&[0, 0], 1)), (1, vec![0, 0]));
    }

    proptest! {
        #[test]
        fn boundaries_are_those_of_chunks(
            extents in prop::collection::vec(0..60_usize, 1..6),
            chunk in 1..40_usize,
        ) {
            let size: usize = extents.iter().sum();
            let found = aligned(&extents, chunk);
            prop_assert_eq!(found.iter().sum::<usize>(), size);
            let (mut end, mut wanted) = (0, 0);
            for (found, extent) in found.iter().zip(&extents) {
                end += found;
                wanted += extent;
                prop_assert!(end % chunk == 0 || end == size);
                prop_assert!(end.abs_diff(wanted) <= chunk / 2 || end == size);
            }
        }
    }
}
