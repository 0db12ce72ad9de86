//! Meshes of a number of ranks, to compare.

use std::collections::BTreeMap;

/// Sizes of the axes of a mesh, by name.
pub(super) type Sizes = BTreeMap<String, usize>;

/// Axes of samples and of fields, whose sizes a comparison varies.
const AXES: [&str; 3] = ["data", "lat", "lon"];
/// Meshes of fields to compare for each number of ranks along `data`.
const OF_FIELDS: usize = 3;

/// Returns meshes of this number of ranks for batches of `batch` samples of fields of this shape:
/// for each size of the axis `data` those whose halos are shortest. Other axes of `mesh` keep their
/// sizes. Each rank has a cell and a sample. There are none if the other axes do not divide the
/// ranks.
pub(super) fn meshes(
    ranks: usize,
    batch: usize,
    [rows, columns]: [usize; 2],
    mesh: &Sizes,
) -> Vec<Sizes> {
    let others = mesh
        .iter()
        .filter(|(name, _)| !AXES.contains(&name.as_str()));
    let kept: Sizes = others.map(|(name, size)| (name.clone(), *size)).collect();
    let others = kept.values().product::<usize>().max(1);
    if !ranks.is_multiple_of(others) {
        return Vec::new();
    }
    let shared = ranks / others;
    let divisors = |of: usize| (1..=of).filter(move |size| of.is_multiple_of(*size));
    let mut found = Vec::new();
    for data in divisors(shared).filter(|data| *data <= batch) {
        let fields = shared / data;
        let shapes = divisors(fields).map(|lat| [lat, fields / lat]);
        let mut shapes: Vec<[usize; 2]> = shapes
            .filter(|[lat, lon]| *lat <= rows && *lon <= columns)
            .collect();
        // Cells along the sides of a shard that has neighbours there.
        let halo = |[lat, lon]: &[usize; 2]| {
            let side = |ranks: usize, cells: usize| if ranks > 1 { cells } else { 0 };
            side(*lat, columns.div_ceil(*lon)) + side(*lon, rows.div_ceil(*lat))
        };
        shapes.sort_by_key(halo);
        for [lat, lon] in shapes.into_iter().take(OF_FIELDS) {
            let mut mesh = kept.clone();
            let sizes = AXES.into_iter().zip([data, lat, lon]);
            mesh.extend(sizes.map(|(axis, size)| (axis.to_string(), size)));
            found.push(mesh);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(
        ranks: usize,
        batch: usize,
        shape: [usize; 2],
        kept: &[(&str, usize)],
    ) -> Vec<[usize; 3]> {
        let kept = kept
            .iter()
            .map(|(name, size)| (name.to_string(), *size))
            .collect();
        let found = meshes(ranks, batch, shape, &kept);
        let sizes = found.iter().map(|mesh| AXES.map(|axis| mesh[axis]));
        sizes.collect()
    }

    #[test]
    fn meshes_with_the_shortest_halos_come_first_for_each_number_of_samples() {
        assert_eq!(
            sizes(8, 2, [181, 360], &[]),
            [
                [1, 1, 8],
                [1, 2, 4],
                [1, 4, 2],
                [2, 1, 4],
                [2, 2, 2],
                [2, 4, 1]
            ]
        );
        // No rank is without a row, and none without a sample.
        assert_eq!(sizes(6, 1, [1, 100], &[]), [[1, 1, 6]]);
        assert_eq!(sizes(5, 1, [2, 2], &[]), [[0; 3]; 0]);
    }

    #[test]
    fn other_axes_keep_their_sizes() {
        let kept = [("member", 2), ("lat", 4)];
        assert_eq!(
            sizes(8, 1, [32, 64], &kept),
            [[1, 1, 4], [1, 2, 2], [1, 4, 1]]
        );
        assert_eq!(sizes(7, 1, [32, 64], &kept), [[0; 3]; 0]);
        let mesh = kept.map(|(name, size)| (name.to_string(), size)).into();
        assert!(
            meshes(8, 1, [32, 64], &mesh)
                .iter()
                .all(|mesh| mesh["member"] == 2)
        );
    }
}
