//! Shardings on which operators are tested.

use halocline_core::{DeviceMesh, Fan, Layout, Placement, Replicate, Result, Shard, ShardTensor};

/// Sharding of a tensor in a test: mesh axes, placements, and extents where they are not even.
#[derive(Clone, Debug)]
pub struct Sharding {
    /// Mesh axes and their sizes.
    pub axes: Vec<(&'static str, usize)>,
    /// One placement per mesh axis.
    pub placements: Vec<Placement>,
    /// Dims with explicit extents; all others are divided evenly.
    pub extents: Vec<(usize, Vec<usize>)>,
}

impl Sharding {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// Layout of a tensor of the given shape. Placements on dims that the tensor lacks become
    /// `Replicate`, and extents that do not fit are ignored.
    ///
    /// # Errors
    /// The errors of [`Layout::new`].
    pub fn layout(&self, mesh: &DeviceMesh, shape: &[usize]) -> Result<Layout> {
        let placements = self.placements.iter().map(|placement| match placement {
            Shard(dim) if *dim >= shape.len() => Replicate,
            other => *other,
        });
        let placements: Vec<Placement> = placements.collect();
        let mut layout = Layout::new(mesh.shape(), shape, &placements)?;
        for (dim, extents) in &self.extents {
            if let Ok(with) = layout.with_extents(*dim, extents) {
                layout = with;
            }
        }
        Ok(layout)
    }
}

/// Lists shardings of the given dims of a tensor of `shape` over up to `ranks` ranks: each dim
/// alone, pairs of dims on a 2×2 mesh, nested, and with eight or more ranks three dims on a 2×2×2
/// mesh; with even extents, very uneven extents, and empty shards. Tensors also fan out, alone and
/// together with a sharded dim.
pub fn shardings(shape: &[usize], dims: &[usize], ranks: usize) -> Vec<Sharding> {
    let mut found = Vec::new();
    for parts in 1..=ranks {
        for &dim in dims {
            let sharding = |extents: Vec<(usize, Vec<usize>)>| Sharding {
                axes: vec![("x", parts)],
                placements: vec![Shard(dim)],
                extents,
            };
            found.push(sharding(Vec::new()));
            if parts > 1 && shape[dim] > 0 {
                found.push(sharding(vec![(dim, uneven(shape[dim], parts))]));
                let mut empty = vec![0; parts];
                empty[parts - 1] = shape[dim];
                found.push(sharding(vec![(dim, empty)]));
            }
        }
    }
    let alike = |axes: &[&'static str], placements: &[Placement]| Sharding {
        axes: axes.iter().map(|axis| (*axis, 2)).collect(),
        placements: placements.to_vec(),
        extents: Vec::new(),
    };
    if ranks >= 2 {
        found.push(alike(&["x"], &[Fan]));
    }
    if ranks >= 4 {
        if let [first, .., last] = *dims {
            found.push(alike(&["y", "x"], &[Shard(first), Fan]));
            found.push(alike(&["y", "x"], &[Fan, Shard(last)]));
        }
        for (i, &first) in dims.iter().enumerate() {
            for placements in [[Shard(first), Replicate], [Replicate, Shard(first)]] {
                found.push(alike(&["y", "x"], &placements));
            }
            found.push(alike(&["y", "x"], &[Shard(first); 2]));
            for &second in &dims[i + 1..] {
                for (first, second) in [(first, second), (second, first)] {
                    found.push(Sharding {
                        axes: vec![("y", 2), ("x", 2)],
                        placements: vec![Shard(first), Shard(second)],
                        extents: vec![
                            (first, uneven(shape[first], 2)),
                            (second, uneven(shape[second], 2)),
                        ],
                    });
                }
            }
        }
    }
    if ranks >= 8 {
        found.extend(on_three_axes(shape, dims));
    }
    found
}

/// Each dim and the two after it on three axes; nested if there are fewer dims.
fn on_three_axes(shape: &[usize], dims: &[usize]) -> impl Iterator<Item = Sharding> {
    (0..dims.len()).map(move |first| {
        let chosen = [0, 1, 2].map(|next| dims[(first + next) % dims.len()]);
        let extents = chosen.map(|dim| (dim, uneven(shape[dim], 2)));
        Sharding {
            axes: vec![("z", 2), ("y", 2), ("x", 2)],
            placements: chosen.map(Shard).to_vec(),
            extents: if dims.len() < 3 {
                Vec::new()
            } else {
                extents.to_vec()
            },
        }
    })
}

/// Extents of one cell each (zero if there are too few cells), with all remaining cells in the
/// first part.
fn uneven(size: usize, parts: usize) -> Vec<usize> {
    let mut extents = vec![usize::from(size >= parts); parts];
    extents[0] = size - extents[1..].iter().sum::<usize>();
    extents
}

/// Shards a result that fans out along its last dim, so that each rank has a part of the loss.
pub(crate) fn sharded<const D: usize>(y: ShardTensor<D>) -> ShardTensor<D> {
    let placements = y.layout().map_placements(|placement| match placement {
        Fan => Shard(D - 1),
        other => other,
    });
    y.redistribute(&placements)
}
