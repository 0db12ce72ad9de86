//! Graphs, and messages along their edges.

use std::sync::{Arc, OnceLock};

use halocline_core::{Error, Replicate, Result, Shard, ShardTensor};

use super::cells::{CellMap, take_cells};
use super::part::Part;
use super::reduce::{Aggregate, reduced};
use super::softmax::softmax;
use crate::driver::empty::{fill_all, without_fill};
use crate::driver::place::extents_by;
use crate::field::{Field, run};
use crate::operand::Operand;
use crate::precision::in_f32;

const NAME: &str = "EdgeShards";

/// Edges from source cells to target cells, sorted by target.
///
/// # Example
/// Averages the neighbours of each cell of a ring, on two ranks:
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::graph::{Aggregate, Graph};
///
/// Launcher::local(2).run(|world| {
///     let edges: Vec<[usize; 2]> = (0..5).flat_map(|i| [[(i + 4) % 5, i], [(i + 1) % 5, i]]).collect();
///     let graph = Graph::new(5, 5, &edges)?;
///     let mesh = world.mesh([("cells", 2)])?;
///     let x = Tensor::<2>::from_floats([[0.0], [1.0], [4.0], [9.0], [16.0]], world.device());
///     let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
///     let edges = graph.distribute(&x, 0)?; // once
///     let means = edges.reduce(edges.sources(x), Aggregate::Mean);
///     let means = means.full_tensor();
///     means.into_data().assert_eq(&[[8.5_f32], [2.0], [5.0], [10.0], [4.5]].into(), true);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Graph {
    cells: [usize; 2],
    /// Source and target of each edge.
    edges: Arc<[[usize; 2]]>,
}

impl Graph {
    /// Creates a graph from edges `[source, target]`, which are sorted by target; edges with the
    /// same target keep their order.
    ///
    /// # Errors
    /// Fails if a source or target is not a cell.
    pub fn new(sources: usize, targets: usize, edges: &[[usize; 2]]) -> Result<Self> {
        let cells = [sources, targets];
        let beyond = |edge: &&[usize; 2]| (0..2).any(|end| edge[end] >= cells[end]);
        if let Some([source, target]) = edges.iter().find(beyond) {
            let message = format!(
                "an edge from {source} to {target} with {sources} sources and {targets} targets"
            );
            return Err(Error::operator("Graph", message));
        }
        let mut edges = edges.to_vec();
        edges.sort_by_key(|[_, target]| *target);
        Ok(Self {
            cells,
            edges: edges.into(),
        })
    }

    /// `[source, target]` of all edges, sorted by target.
    pub fn edges(&self) -> &[[usize; 2]] {
        &self.edges
    }

    /// Number of edges of each target: the work by which [`Balance`](halocline_core::Balance)
    /// divides the targets into parts.
    ///
    /// # Example
    /// ```
    /// use halocline_core::Balance;
    /// use halocline_ops::graph::Graph;
    ///
    /// let graph = Graph::new(4, 4, &[[1, 0], [2, 0], [3, 0], [0, 1], [0, 2], [0, 3]])?;
    /// assert_eq!(graph.work(), [3.0, 1.0, 1.0, 1.0]);
    /// let balance = Balance::of(&graph.work(), &[4], &[2])?;
    /// assert_eq!(balance.extents[0], [1, 3]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn work(&self) -> Vec<f64> {
        let mut work = vec![0.0; self.cells[1]];
        self.edges
            .iter()
            .for_each(|[_, target]| work[*target] += 1.0);
        work
    }

    /// Distributes the edges to the ranks that hold their targets, along dim `dim` of `targets`.
    ///
    /// # Errors
    /// Fails for a dim that does not exist or whose size is not the number of targets.
    pub fn distribute<const D: usize, X: Field<D>>(
        &self,
        targets: &X,
        dim: usize,
    ) -> Result<EdgeShards> {
        let shard = targets.clone().into_shard();
        let size = shard.dims().get(dim).copied();
        if size != Some(self.cells[1]) {
            let message = format!(
                "dim {dim} of {:?} for a graph of {} targets",
                shard.dims(),
                self.cells[1]
            );
            return Err(Error::operator("Graph", message));
        }
        let held = shard.layout().extents(dim);
        let before = |cell: usize| self.edges.partition_point(|[_, target]| *target < cell);
        let [sources, targets] = [0, 1]
            .map(|end: usize| CellMap::new(self.edges.iter().map(|edge| edge[end]).collect()));
        Ok(EdgeShards {
            graph: self.clone(),
            dim,
            extents: extents_by(held, before),
            held: held.to_vec(),
            sources,
            targets,
            parts: held.iter().map(|_| OnceLock::new()).collect(),
        })
    }
}

/// Edges of a [`Graph`] distributed with its targets. See the example of [`Graph`].
#[derive(Clone, Debug)]
pub struct EdgeShards {
    graph: Graph,
    /// Dim of cells, and of edges.
    dim: usize,
    /// Numbers of edges of each part, and of its targets.
    extents: Vec<usize>,
    held: Vec<usize>,
    sources: CellMap,
    targets: CellMap,
    /// Edges by target for each part, computed at its first reduction.
    parts: Arc<[OnceLock<Arc<Part>>]>,
}

impl EdgeShards {
    /// Graph of these edges.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Gathers the value at the source of every edge; see [`take_cells`].
    ///
    /// # Errors
    /// Fails if the number of cells is not the graph's number of sources; otherwise errors of
    /// [`take_cells`].
    pub fn try_sources<const D: usize>(&self, x: ShardTensor<D>) -> Result<ShardTensor<D>> {
        self.at(x, 0)
    }

    /// Gathers the value at the target of every edge, which lies on the same rank: nothing is sent.
    ///
    /// # Errors
    /// Fails if the number of cells is not the graph's number of targets; otherwise errors of
    /// [`take_cells`].
    pub fn try_targets<const D: usize>(&self, x: ShardTensor<D>) -> Result<ShardTensor<D>> {
        self.at(x, 1)
    }

    fn at<const D: usize>(&self, x: ShardTensor<D>, end: usize) -> Result<ShardTensor<D>> {
        let size = x.dims().get(self.dim).copied();
        if size != Some(self.graph.cells[end]) {
            let (kind, expected) = (["sources", "targets"][end], self.graph.cells[end]);
            let message = format!("dim {} of {:?} for {expected} {kind}", self.dim, x.dims());
            return Err(Error::operator(NAME, message));
        }
        take_cells(
            x,
            self.dim,
            [&self.sources, &self.targets][end],
            &self.extents,
        )
    }

    /// Reduces the values of the edges of each target to one; see [`Aggregate`]. Nothing is sent.
    ///
    /// # Errors
    /// Fails if the messages are not distributed as the edges are, and for partial values.
    pub fn try_reduce<const D: usize>(
        &self,
        messages: ShardTensor<D>,
        aggregate: Aggregate,
    ) -> Result<ShardTensor<D>> {
        let part = self.part_of(&messages)?;
        reduced(messages, self.dim, &self.held, part, aggregate)
    }

    /// Edges of this rank, on which the messages lie.
    fn part_of<const D: usize>(&self, messages: &ShardTensor<D>) -> Result<&Arc<Part>> {
        messages.require_resolved(NAME)?;
        let layout = messages.layout();
        if self.dim >= D || layout.extents(self.dim) != self.extents {
            let message = format!(
                "messages {layout} of edges {:?} in dim {}",
                self.extents, self.dim
            );
            return Err(Error::operator(NAME, message));
        }
        let number = layout.part(self.dim, messages.mesh().position());
        Ok(self.parts[number].get_or_init(|| Arc::new(self.part(number))))
    }

    /// Computes the softmax over the edges of each target, such as attention weights. Nothing is
    /// sent.
    ///
    /// # Errors
    /// Errors of [`try_reduce`](Self::try_reduce).
    pub fn try_softmax<const D: usize>(&self, scores: ShardTensor<D>) -> Result<ShardTensor<D>> {
        let part = self.part_of(&scores)?;
        in_f32(scores, |scores| {
            let (local, layout, mesh) = scores.into_parts();
            let local = fill_all(local, &layout, NAME, 0.0)?;
            let y = Error::catch(|| softmax(local, self.dim, part))?;
            without_fill(y, layout, mesh, NAME)
        })
    }

    /// Distributes features of edges, given in the order of [`Graph::edges`], with the edges.
    /// `targets` has the layout for which the edges were distributed; its other dims may have other
    /// sizes where they are not sharded.
    ///
    /// # Errors
    /// Fails for another number of edges, for `targets` in another layout, and for dims that do not
    /// match its shards.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    /// use halocline_ops::graph::Graph;
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("cells", 2)])?;
    ///     let x = ShardTensor::<2>::ones([4, 3], &mesh, &[Shard(0)])?;
    ///     let edges = Graph::new(4, 4, &[[1, 0], [0, 1], [3, 2]])?.distribute(&x, 0)?;
    ///     let lengths = Tensor::<2>::from_floats([[1.0], [1.0], [2.0]], world.device());
    ///     let lengths = edges.features(&x, lengths)?;
    ///     assert_eq!(lengths.local().dims(), [[2, 1], [1, 1]][world.rank()]);
    ///     assert_eq!((edges.sources(x) * lengths).dims(), [3, 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn features<const D: usize>(
        &self,
        targets: &ShardTensor<D>,
        features: impl Into<Operand<D>>,
    ) -> Result<ShardTensor<D>> {
        let features = features.into();
        let (shape, held) = (features.dims(), targets.layout());
        let sizes = held.shape();
        let follows = |dim: usize| dim == self.dim || shape[dim] == sizes[dim];
        let fits = |dim: usize| follows(dim) || shape[dim] == 1 || !held.is_sharded(dim);
        let edges = self.graph.edges.len();
        let lies = self.dim < D && held.extents(self.dim) == self.held && shape[self.dim] == edges;
        if !lies || !(0..D).all(fits) {
            let message = format!(
                "features {shape:?} of {edges} edges in dim {}, beside targets {held} of extents {:?}",
                self.dim, self.held
            );
            return Err(Error::operator(NAME, message));
        }
        let placements = held.map_placements(|placement| match placement {
            Shard(dim) if !follows(dim) => Replicate,
            other => other,
        });
        let extents = (0..D).map(|dim| match dim {
            _ if dim == self.dim => self.extents.clone(),
            _ if follows(dim) => held.extents(dim).to_vec(),
            _ => vec![shape[dim]],
        });
        let layout = held.derive(placements, extents.collect());
        // Detached, since a loss may depend on the features alone.
        let features = features.place_on(&targets.clone().inner())?;
        features.try_redistribute(&layout)
    }

    /// Edges of the targets of a part.
    fn part(&self, part: usize) -> Part {
        let [edge, first] =
            [&self.extents, &self.held].map(|held| held[..part].iter().sum::<usize>());
        let edges = &self.graph.edges[edge..edge + self.extents[part]];
        let place = |cell: usize| edges.partition_point(|[_, target]| *target < first + cell);
        let targets = (0..self.held[part]).map(|cell| place(cell)..place(cell + 1));
        Part::new(targets.collect())
    }

    /// [`try_sources`](Self::try_sources) for either kind of tensor.
    ///
    /// # Panics
    /// Panics if that method returns an error.
    #[track_caller]
    pub fn sources<const D: usize, X: Field<D>>(&self, x: X) -> X {
        run(x, |x| self.try_sources(x))
    }

    /// [`try_targets`](Self::try_targets) for either kind of tensor.
    ///
    /// # Panics
    /// Panics if that method returns an error.
    #[track_caller]
    pub fn targets<const D: usize, X: Field<D>>(&self, x: X) -> X {
        run(x, |x| self.try_targets(x))
    }

    /// [`try_softmax`](Self::try_softmax) for either kind of tensor.
    ///
    /// # Panics
    /// Panics if that method returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::graph::Graph;
    ///
    /// let x = Tensor::<1>::from([0.0, 3.0, 0.0]);
    /// let edges = Graph::new(3, 3, &[[0, 1], [2, 1], [1, 2]])?.distribute(&x, 0)?;
    /// let weights = edges.softmax(edges.sources(x)); // two edges of target 1 with a score of 0
    /// weights.into_data().assert_eq(&[0.5_f32, 0.5, 1.0].into(), true);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn softmax<const D: usize, X: Field<D>>(&self, scores: X) -> X {
        run(scores, |x| self.try_softmax(x))
    }

    /// [`try_reduce`](Self::try_reduce) for either kind of tensor.
    ///
    /// # Panics
    /// Panics if that method returns an error.
    pub fn reduce<const D: usize, X: Field<D>>(&self, messages: X, aggregate: Aggregate) -> X {
        run(messages, |x| self.try_reduce(x, aggregate))
    }
}
