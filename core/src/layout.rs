//! Layouts: the cells of a field that each rank holds, by arithmetic alone.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use crate::balance::even_extents;
use crate::mesh::{MeshShape, ravel, unravel};
use crate::{Error, IndexBox, Result};

pub use crate::placement::Placement::{Fan, Partial, Replicate, Shard};
pub use crate::placement::{Placement, ReduceOp};

/// Layout of a field: mesh, global shape, a placement per axis, and the extents of every dim.
///
/// Pure data, equal on all ranks: every rank computes every rank's box by arithmetic alone. A dim
/// may be sharded over several axes; its parts are then numbered with the leftmost axis outermost.
/// Cloning is cheap.
///
/// # Example
/// ```
/// use halocline_core::{Layout, MeshShape, Shard};
///
/// let mesh = MeshShape::new(&[("lat", 2), ("lon", 2)], (0..4).collect())?;
/// let layout = Layout::new(&mesh.into(), &[3, 721, 1440], &[Shard(1), Shard(2)])?;
/// assert_eq!(layout.extents(1), [361, 360]); // as even as possible
/// assert_eq!(layout.local_box(2).to_string(), "[0..3, 361..721, 0..720]");
/// let uneven = layout.with_extents(1, &[700, 21])?;
/// assert_eq!(uneven.local_shape(2), [3, 21, 720]);
/// assert!(uneven.require_whole("fft", 2).is_err());
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Layout(Arc<Inner>);

struct Inner {
    mesh: Arc<MeshShape>,
    shape: Vec<usize>,
    placements: Vec<Placement>,
    extents: Vec<Vec<usize>>,
    hash: u64,
}

impl Layout {
    /// Makes a layout whose shards differ by at most one cell.
    ///
    /// # Errors
    /// The number of placements differs from the number of axes; a placement names a dim that the
    /// shape does not have.
    pub fn new(mesh: &Arc<MeshShape>, shape: &[usize], placements: &[Placement]) -> Result<Self> {
        if placements.len() != mesh.sizes().len() {
            return Err(Error::Layout(format!(
                "{} placements {placements:?} for the {} axes {:?}; give one per axis",
                placements.len(),
                mesh.sizes().len(),
                mesh.names(),
            )));
        }
        for placement in placements {
            if let Shard(dim) = placement
                && *dim >= shape.len()
            {
                return Err(Error::Layout(format!(
                    "{placement} for a tensor of {} dims {shape:?}",
                    shape.len()
                )));
            }
        }
        let extents = (0..shape.len())
            .map(|dim| even_extents(shape[dim], parts(mesh, placements, dim)))
            .collect();
        Ok(Self::build(mesh.clone(), placements.to_vec(), extents))
    }

    /// Makes a layout in which every rank holds the whole field.
    pub fn replicated(mesh: &Arc<MeshShape>, shape: &[usize]) -> Self {
        let placements = vec![Replicate; mesh.sizes().len()];
        let extents = shape.iter().map(|&size| vec![size]).collect();
        Self::build(mesh.clone(), placements, extents)
    }

    /// Returns this layout with the given extents of a dim, one per part; zero is allowed.
    ///
    /// # Errors
    /// The number of extents differs from the number of parts; the extents do not sum to the dim's
    /// size.
    pub fn with_extents(&self, dim: usize, extents: &[usize]) -> Result<Self> {
        let expected = self.0.extents.get(dim).map_or(0, Vec::len);
        let size = self.0.shape.get(dim).copied().unwrap_or(0);
        let sum = extents
            .iter()
            .try_fold(0_usize, |sum, &extent| sum.checked_add(extent));
        let fits = extents.len() == expected && sum == Some(size);
        if dim >= self.0.shape.len() || !fits {
            return Err(Error::Layout(format!(
                "extents {extents:?} for dim {dim} of {:?}; expected {expected} extents that sum to {size}",
                self.0.shape
            )));
        }
        Ok(self.resized(dim, extents.to_vec()))
    }

    /// Returns this layout with another size of a dim, from the extents of all its parts.
    ///
    /// # Panics
    /// Panics for a dim that does not exist, and if the number of extents differs from the number
    /// of parts.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Layout, MeshShape, Shard};
    ///
    /// let mesh = MeshShape::new(&[("lat", 2)], vec![0, 1])?;
    /// let layout = Layout::new(&mesh.into(), &[3, 721], &[Shard(1)])?;
    /// let coarse = layout.resized(1, vec![181, 180]);
    /// assert_eq!(coarse.to_string(), "[3, 361] lat(2):Shard(1)[181, 180]");
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn resized(&self, dim: usize, extents: Vec<usize>) -> Self {
        let mut all = self.0.extents.clone();
        all[dim] = extents;
        self.derive(self.0.placements.clone(), all)
    }

    /// Returns the layout of an operator's result on the same mesh, from its placements and all its
    /// extents.
    ///
    /// # Panics
    /// Panics if a dim does not have one extent per part, which is a mistake in the operator's
    /// rule.
    pub fn derive(&self, placements: Vec<Placement>, extents: Vec<Vec<usize>>) -> Self {
        for (dim, extents) in extents.iter().enumerate() {
            assert_eq!(
                extents.len(),
                parts(&self.0.mesh, &placements, dim),
                "extents {extents:?} of dim {dim} under {placements:?}"
            );
        }
        Self::build(self.0.mesh.clone(), placements, extents)
    }

    /// Returns this layout with another placement on one axis.
    ///
    /// # Panics
    /// Panics if that changes the dims that are sharded.
    pub fn with_placement(&self, axis: usize, placement: Placement) -> Self {
        let mut placements = self.0.placements.clone();
        placements[axis] = placement;
        self.derive(placements, self.0.extents.clone())
    }

    /// Returns this layout with `Fan` on the given axes, on which it is replicated.
    pub(crate) fn fanned_out(&self, axes: &[usize]) -> Self {
        axes.iter().fold(self.clone(), |layout, axis| {
            layout.with_placement(*axis, Fan)
        })
    }

    /// Returns this layout with the placement `whole` on the given axes, each of which must be the
    /// innermost axis of its dim; the parts along these axes are merged.
    pub fn gathered(&self, axes: &[usize], whole: Placement) -> Self {
        let mut placements = self.0.placements.clone();
        axes.iter().for_each(|axis| placements[*axis] = whole);
        let dims = self.0.extents.iter().enumerate().map(|(dim, extents)| {
            let gathered = self
                .axes_of(dim)
                .into_iter()
                .filter(|axis| axes.contains(axis));
            let parts: usize = gathered.map(|axis| self.0.mesh.sizes()[axis]).product();
            extents
                .chunks(parts)
                .map(|parts| parts.iter().sum())
                .collect()
        });
        let extents = dims.collect();
        self.derive(placements, extents)
    }

    fn build(mesh: Arc<MeshShape>, placements: Vec<Placement>, extents: Vec<Vec<usize>>) -> Self {
        // Hashed once, because layouts are keys of all plan caches.
        let mut hasher = DefaultHasher::new();
        (&mesh, &placements, &extents).hash(&mut hasher);
        Self(Arc::new(Inner {
            mesh,
            shape: extents.iter().map(|parts| parts.iter().sum()).collect(),
            placements,
            extents,
            hash: hasher.finish(),
        }))
    }

    /// The mesh.
    pub fn mesh(&self) -> &Arc<MeshShape> {
        &self.0.mesh
    }

    /// The global shape.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// The placement on every axis.
    pub fn placements(&self) -> &[Placement] {
        &self.0.placements
    }

    /// The placement on every axis, each mapped by a function.
    pub fn map_placements(&self, map: impl Fn(Placement) -> Placement) -> Vec<Placement> {
        self.0.placements.iter().copied().map(map).collect()
    }

    /// The number of cells in each part of a dim; one part if the dim is not sharded.
    pub fn extents(&self, dim: usize) -> &[usize] {
        &self.0.extents[dim]
    }

    /// The extents of all dims.
    pub fn all_extents(&self) -> &[Vec<usize>] {
        &self.0.extents
    }

    /// Whether a dim is sharded.
    pub fn is_sharded(&self, dim: usize) -> bool {
        self.0.placements.contains(&Shard(dim))
    }

    /// The axes over which a dim is sharded, outermost first.
    pub fn axes_of(&self, dim: usize) -> Vec<usize> {
        self.axes_where(|placement| placement == Shard(dim))
    }

    /// The axes over which a dim is sharded, whichever it is.
    pub fn sharded_axes(&self) -> Vec<usize> {
        self.axes_where(|placement| matches!(placement, Shard(_)))
    }

    /// The axes whose placement satisfies a condition.
    pub fn axes_where(&self, is: impl Fn(Placement) -> bool) -> Vec<usize> {
        (0..self.0.placements.len())
            .filter(|&axis| is(self.0.placements[axis]))
            .collect()
    }

    /// The axes with partial values, and the reduction of each.
    pub(crate) fn partial_axes(&self) -> impl Iterator<Item = (usize, ReduceOp)> {
        let placements = self.0.placements.iter().enumerate();
        placements.filter_map(|(axis, placement)| match placement {
            Partial(op) => Some((axis, *op)),
            _ => None,
        })
    }

    /// The first axis with a partial value, if any.
    pub fn partial_axis(&self) -> Option<(usize, ReduceOp)> {
        self.partial_axes().next()
    }

    /// The placement on an axis, with the name of the axis, for error messages.
    pub(crate) fn placement_on(&self, axis: usize) -> String {
        let (placement, name) = (self.0.placements[axis], &self.0.mesh.names()[axis]);
        format!("{placement} on axis \"{name}\"")
    }

    /// Requires that no axis holds partial values.
    ///
    /// # Errors
    /// [`Error::Placement`] with the axis, and `resolve()` as the remedy.
    pub fn require_resolved(&self, operator: &str) -> Result<()> {
        let Some((axis, _)) = self.partial_axis() else {
            return Ok(());
        };
        let (placement, help) = (self.placement_on(axis), "call resolve() first");
        Err(Error::placement(operator, placement, help))
    }

    /// Requires that a dim is not sharded.
    ///
    /// # Errors
    /// [`Error::Placement`] with the axis, and a redistribution as the remedy.
    pub fn require_whole(&self, operator: &str, dim: usize) -> Result<()> {
        let Some(axis) = self.axes_of(dim).first().copied() else {
            return Ok(());
        };
        let (placement, help) = (self.placement_on(axis), self.whole_in(dim));
        Err(Error::placement(operator, placement, help))
    }

    /// The redistribution that makes a dim whole, for error messages.
    pub(crate) fn whole_in(&self, dim: usize) -> String {
        let whole = self.map_placements(|held| if held == Shard(dim) { Replicate } else { held });
        format!("redistribute(&{whole:?}) first")
    }

    /// Whether any rank holds no cells.
    pub fn has_empty_shard(&self) -> bool {
        self.0.extents.iter().flatten().any(|&extent| extent == 0)
    }

    /// The index of the part of a dim that a position holds.
    pub fn part(&self, dim: usize, position: usize) -> usize {
        let axes = self.0.placements.iter().zip(self.0.mesh.sizes());
        let (mut part, mut stride, mut rest) = (0, 1, position);
        // The last axis has the innermost coordinate.
        for (placement, size) in axes.rev() {
            if *placement == Shard(dim) {
                part += rest % size * stride;
                stride *= size;
            }
            rest /= size;
        }
        part
    }

    /// The cells of a dim that a part holds.
    pub fn part_range(&self, dim: usize, part: usize) -> Range<usize> {
        let extents = &self.0.extents[dim];
        let start = extents[..part].iter().sum();
        start..start + extents[part]
    }

    /// The cells that a position holds.
    pub fn local_box(&self, position: usize) -> IndexBox {
        let dims = 0..self.0.shape.len();
        let ranges = dims.map(|dim| self.part_range(dim, self.part(dim, position)));
        IndexBox::new(ranges.collect())
    }

    /// The shape of the shard at a position.
    pub fn local_shape(&self, position: usize) -> Vec<usize> {
        self.local_box(position).shape()
    }

    /// Splits a box of cells by owner: the position that supplies each piece to the position
    /// `near`.
    ///
    /// If several positions hold the same cells, the owner is the one that shares `near`'s other
    /// coordinates, so that nothing travels along axes on which the field is replicated.
    pub fn owners(&self, cells: &IndexBox, near: usize) -> Vec<(usize, IndexBox)> {
        let overlaps: Vec<Vec<(usize, Range<usize>)>> = cells
            .ranges()
            .iter()
            .enumerate()
            .map(|(dim, range)| self.overlaps(dim, range))
            .collect();
        let counts: Vec<usize> = overlaps.iter().map(Vec::len).collect();
        let coords = self.0.mesh.coords(near);
        // One piece per combination of overlaps, one overlap per dim. The other coordinates stay
        // those of `near`.
        (0..counts.iter().product())
            .map(|index| {
                let mut owner = coords.clone();
                let mut ranges = Vec::with_capacity(counts.len());
                for (dim, choice) in unravel(index, &counts).into_iter().enumerate() {
                    let (part, range) = &overlaps[dim][choice];
                    ranges.push(range.clone());
                    let axes = self.axes_of(dim);
                    let sizes: Vec<usize> =
                        axes.iter().map(|&axis| self.0.mesh.sizes()[axis]).collect();
                    // The inverse of `part`, with the leftmost axis outermost.
                    for (axis, coord) in axes.into_iter().zip(unravel(*part, &sizes)) {
                        owner[axis] = coord;
                    }
                }
                (ravel(&owner, self.0.mesh.sizes()), IndexBox::new(ranges))
            })
            .collect()
    }

    /// The parts of a dim that intersect `range`, each with the intersection.
    fn overlaps(&self, dim: usize, range: &Range<usize>) -> Vec<(usize, Range<usize>)> {
        let mut start = 0;
        let mut found = Vec::new();
        for (part, extent) in self.0.extents[dim].iter().enumerate() {
            let overlap = range.start.max(start)..range.end.min(start + extent);
            if !overlap.is_empty() {
                found.push((part, overlap));
            }
            start += extent;
        }
        found
    }
}

/// The number of parts of a dim.
fn parts(mesh: &MeshShape, placements: &[Placement], dim: usize) -> usize {
    placements
        .iter()
        .zip(mesh.sizes())
        .filter(|(placement, _)| **placement == Shard(dim))
        .map(|(_, size)| size)
        .product()
}

impl PartialEq for Layout {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (self.0.hash == other.0.hash
                && self.0.placements == other.0.placements
                && self.0.extents == other.0.extents
                && self.0.mesh == other.0.mesh)
    }
}

impl Eq for Layout {}

impl Hash for Layout {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl fmt::Display for Layout {
    /// Prints the global shape, then the placement on each axis, with the extents of sharded dims.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0.shape)?;
        let axes = self.0.mesh.names().iter().zip(self.0.mesh.sizes());
        for ((name, size), placement) in axes.zip(&self.0.placements) {
            write!(f, " {name}({size}):{placement}")?;
            if let Shard(dim) = placement {
                write!(f, "{:?}", self.0.extents[*dim])?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells_of(range: Range<usize>) -> IndexBox {
        IndexBox::new(Vec::from([range]))
    }

    fn mesh(axes: &[(&str, usize)]) -> Arc<MeshShape> {
        let size = axes.iter().map(|(_, size)| size).product();
        Arc::new(MeshShape::new(axes, (0..size).collect()).unwrap())
    }

    #[test]
    fn nested_sharding_numbers_parts_with_the_left_axis_outermost() {
        let layout =
            Layout::new(&mesh(&[("a", 2), ("b", 3)]), &[5, 4], &[Shard(0), Shard(0)]).unwrap();
        assert_eq!(layout.extents(0), [1, 1, 1, 1, 1, 0]);
        assert!(layout.has_empty_shard());
        assert_eq!(layout.part(0, 4), 4);
        assert_eq!(layout.local_box(4).to_string(), "[4..5, 0..4]");
        assert_eq!(layout.local_box(5).volume(), 0);
    }

    #[test]
    fn owners_are_found_without_travelling_along_replicated_axes() {
        let mesh = mesh(&[("data", 2), ("lat", 2)]);
        let layout = Layout::new(&mesh, &[9], &[Replicate, Shard(0)]).unwrap();
        let cells = cells_of(3..7);
        let owners = layout.owners(&cells, 2); // data 1, lat 0
        assert_eq!(owners[0], (2, cells_of(3..5)));
        assert_eq!(owners[1], (3, cells_of(5..7)));
    }

    #[test]
    fn extents_may_be_any_that_sum_to_the_dim() {
        let layout = Layout::new(&mesh(&[("x", 3)]), &[7], &[Shard(0)]).unwrap();
        let uneven = layout.with_extents(0, &[0, 6, 1]).unwrap();
        assert_eq!(uneven.part_range(0, 1), 0..6);
        assert_ne!(uneven, layout);
        let error = layout.with_extents(0, &[1, 2]).unwrap_err().to_string();
        assert!(error.contains("[1, 2]") && error.contains("3 extents that sum to 7"));
    }

    #[test]
    fn misuse_is_told() {
        let mesh = mesh(&[("x", 2)]);
        let count = Layout::new(&mesh, &[4], &[]).unwrap_err().to_string();
        assert!(count.contains("one per axis"), "{count}");
        let dim = Layout::new(&mesh, &[4], &[Shard(1)]).unwrap_err();
        assert!(dim.to_string().contains("Shard(1) for a tensor of 1 dims"));
    }

    #[test]
    fn display_shows_shape_placements_and_extents() {
        let layout = Layout::new(
            &mesh(&[("data", 1), ("lat", 2)]),
            &[2, 5],
            &[Replicate, Shard(1)],
        );
        assert_eq!(
            layout.unwrap().to_string(),
            "[2, 5] data(1):Replicate lat(2):Shard(1)[3, 2]"
        );
    }
}
