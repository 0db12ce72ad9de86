//! Mesh shapes: named axes over ranks.

use std::fmt;
use std::hash::Hash;

use crate::{Error, Result};

/// The shape of a mesh: named axes and the ranks at its positions, in row-major order. Pure data.
///
/// A *position* is an index into the mesh; a *rank* is a rank of the world. They differ in a
/// sub-mesh.
///
/// # Example
/// ```
/// use halocline_core::MeshShape;
///
/// let mesh = MeshShape::new(&[("data", 2), ("lat", 3)], (0..6).collect())?;
/// assert_eq!((mesh.coords(4), mesh.position(&[1, 1])), (vec![1, 1], 4));
/// assert_eq!(mesh.positions_along(4, &[mesh.axis("lat")?]), [3, 4, 5]);
/// let column = mesh.submesh(4, &["data"])?;
/// assert_eq!((column.ranks(), column.sizes()), (&[1, 4][..], &[2][..]));
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MeshShape {
    names: Vec<String>,
    sizes: Vec<usize>,
    ranks: Vec<usize>,
}

impl MeshShape {
    /// Makes a mesh of the given axes over `ranks`.
    ///
    /// # Errors
    /// The product of the sizes is not the number of ranks; an axis name or a rank occurs twice.
    pub fn new(axes: &[(&str, usize)], ranks: Vec<usize>) -> Result<Self> {
        let sizes: Vec<usize> = axes.iter().map(|(_, size)| *size).collect();
        let names: Vec<String> = axes.iter().map(|(name, _)| name.to_string()).collect();
        if let Some(name) = names
            .iter()
            .enumerate()
            .find_map(|(i, name)| names[..i].contains(name).then_some(name))
        {
            return Err(Error::Mesh(format!(
                "axis \"{name}\" is named twice in {axes:?}; axis names must differ"
            )));
        }
        let product = sizes.iter().copied().fold(1, usize::saturating_mul);
        if product != ranks.len() || ranks.is_empty() {
            return Err(Error::Mesh(format!(
                "sizes of {axes:?} multiply to {product}, but there are {} ranks",
                ranks.len()
            )));
        }
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Mesh(format!(
                "rank {} is twice in {ranks:?}; a rank has one position",
                pair[0]
            )));
        }
        Ok(Self {
            names,
            sizes,
            ranks,
        })
    }

    /// The mesh of one rank, for tensors that are not sharded at all.
    pub fn solo(rank: usize) -> Self {
        Self {
            names: vec!["solo".into()],
            sizes: vec![1],
            ranks: vec![rank],
        }
    }

    /// The number of positions.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The size of every axis.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The name of every axis.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The ranks of the world, by position.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The position of a rank of the world; `None` if the rank is not in the mesh.
    pub(crate) fn position_of(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|held| *held == rank)
    }

    /// The index of the axis called `name`.
    ///
    /// # Errors
    /// The mesh has no such axis.
    pub fn axis(&self, name: &str) -> Result<usize> {
        self.names.iter().position(|n| n == name).ok_or_else(|| {
            Error::Mesh(format!("no axis \"{name}\"; the axes are {:?}", self.names))
        })
    }

    /// The coordinates of a position, one per axis.
    pub fn coords(&self, position: usize) -> Vec<usize> {
        unravel(position, &self.sizes)
    }

    /// The position at the given coordinates.
    pub fn position(&self, coords: &[usize]) -> usize {
        ravel(coords, &self.sizes)
    }

    /// The positions that differ from `position` in `axes` only, in row-major order of `axes`,
    /// which must be distinct.
    pub fn positions_along(&self, position: usize, axes: &[usize]) -> Vec<usize> {
        let line = |axis: usize| {
            let stride: usize = self.sizes[axis + 1..].iter().product();
            (self.sizes[axis], stride)
        };
        // The position with zero coordinates on `axes`, then all positions along one axis after
        // another.
        let origin = axes.iter().fold(position, |origin, &axis| {
            let (size, stride) = line(axis);
            origin - origin / stride % size * stride
        });
        axes.iter().fold(vec![origin], |group, &axis| {
            let (size, stride) = line(axis);
            let lines = group
                .iter()
                .map(|first| (0..size).map(move |index| first + index * stride));
            lines.flatten().collect()
        })
    }

    /// The sub-mesh of the named axes through `position`.
    ///
    /// # Errors
    /// A name is not an axis of the mesh, or occurs twice.
    pub fn submesh(&self, position: usize, names: &[&str]) -> Result<Self> {
        let axes = names
            .iter()
            .map(|name| self.axis(name))
            .collect::<Result<Vec<_>>>()?;
        let shape: Vec<(&str, usize)> = names
            .iter()
            .zip(&axes)
            .map(|(name, &axis)| (*name, self.sizes[axis]))
            .collect();
        let positions: usize = shape.iter().map(|(_, size)| size).product();
        // Checked before `positions_along`, which needs distinct axes.
        let mut mesh = Self::new(&shape, (0..positions).collect())?;
        let group = self.positions_along(position, &axes).into_iter();
        mesh.ranks = group.map(|position| self.ranks[position]).collect();
        Ok(mesh)
    }
}

/// The row-major index of `coords` in an array of the given sizes.
pub(crate) fn ravel(coords: &[usize], sizes: &[usize]) -> usize {
    coords
        .iter()
        .zip(sizes)
        .fold(0, |index, (coord, size)| index * size + coord)
}

/// The inverse of [`ravel`].
pub(crate) fn unravel(mut index: usize, sizes: &[usize]) -> Vec<usize> {
    let mut coords = vec![0; sizes.len()];
    for (coord, size) in coords.iter_mut().zip(sizes).rev() {
        *coord = index % size;
        index /= size;
    }
    coords
}

impl fmt::Display for MeshShape {
    /// A table of ranks: the last axis runs across, the others run down.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<String> = self
            .names
            .iter()
            .zip(&self.sizes)
            .map(|(name, size)| format!("{name} {size}"))
            .collect();
        writeln!(f, "mesh [{}]", axes.join(" × "))?;
        let across = *self.sizes.last().unwrap_or(&1);
        let leading = self.sizes.len().saturating_sub(1);
        for row in 0..self.size() / across {
            let coords = self.coords(row * across);
            let label: Vec<String> = (0..leading)
                .map(|axis| format!("{} {}", self.names[axis], coords[axis]))
                .collect();
            write!(f, "  {:<16}", label.join(", "))?;
            for rank in &self.ranks[row * across..(row + 1) * across] {
                write!(f, "{rank:>5}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_in_the_order_of_their_axes() {
        let mesh = MeshShape::new(&[("data", 2), ("lat", 3)], (0..6).collect()).unwrap();
        assert_eq!(mesh.positions_along(4, &[0]), [1, 4]);
        assert_eq!(mesh.positions_along(4, &[0, 1]), [0, 1, 2, 3, 4, 5]);
        assert_eq!(mesh.positions_along(4, &[1, 0]), [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn display_is_a_table() {
        let mesh = MeshShape::new(&[("lat", 2), ("lon", 2)], (0..4).collect()).unwrap();
        assert_eq!(
            mesh.to_string(),
            "mesh [lat 2 × lon 2]\n  lat 0               0    1\n  lat 1               2    3\n"
        );
    }

    #[test]
    fn errors_name_what_is_wrong() {
        let ranks = || (0..4).collect::<Vec<_>>();
        let error = |axes: &[(&str, usize)]| MeshShape::new(axes, ranks()).unwrap_err().to_string();
        assert!(error(&[("lat", 3)]).contains("multiply to 3, but there are 4 ranks"));
        // A product that overflows does not wrap around to a number of ranks.
        let overflows = error(&[("lat", usize::MAX), ("lon", usize::MAX - 3)]);
        assert!(overflows.contains("but there are 4 ranks"), "{overflows}");
        assert!(error(&[("lat", 2), ("lat", 2)]).contains("\"lat\" is named twice"));
        let mesh = MeshShape::new(&[("lat", 2), ("lon", 2)], ranks()).unwrap();
        let twice = mesh.submesh(3, &["lon", "lon"]).unwrap_err().to_string();
        assert!(twice.contains("\"lon\" is named twice"));
        let mesh = MeshShape::new(&[("lat", 4)], ranks()).unwrap();
        let unknown = mesh.axis("lon").unwrap_err().to_string();
        assert!(unknown.contains("no axis \"lon\"") && unknown.contains("\"lat\""));
    }
}
