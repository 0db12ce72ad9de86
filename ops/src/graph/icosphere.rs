//! Icosahedral grids.

use std::collections::HashMap;

/// Icosahedral grid on the unit sphere, as the meshes of GraphCast: an icosahedron whose faces are
/// each divided into four, `levels` times. The corners of the faces are the cells.
///
/// Cells are numbered along the faces of the finest level, where the faces within one coarser face
/// are consecutive: ranges of numbers are compact regions, so ranks exchange few cells. For a
/// limited area, keep the cells within it and the edges between them.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::graph::{Aggregate, Graph, Icosphere};
///
/// let grid = Icosphere::new(2);
/// let count = grid.positions().len();
/// assert_eq!((count, grid.edges(2).len()), (162, 2 * 480));
/// let x = ShardTensor::solo(Tensor::<2>::ones([count, 3], &Default::default()));
/// // Edges of all levels, as in GraphCast.
/// let edges: Vec<[usize; 2]> = (0..=2).flat_map(|level| grid.edges(level)).copied().collect();
/// let edges = Graph::new(count, count, &edges)?.distribute(&x, 0)?;
/// let mean = edges.reduce(edges.sources(x.clone()), Aggregate::Mean);
/// mean.local().to_data().assert_approx_eq::<f32>(&x.local().to_data(), Default::default());
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Icosphere {
    positions: Vec<[f64; 3]>,
    edges: Vec<Vec<[usize; 2]>>,
}

impl Icosphere {
    /// Creates the grid of `10 · 4^levels + 2` cells.
    ///
    /// # Example
    /// ```
    /// use halocline_ops::graph::Icosphere;
    ///
    /// assert_eq!(Icosphere::new(6).positions().len(), 40_962);
    /// ```
    pub fn new(levels: usize) -> Self {
        let (mut corners, faces) = icosahedron();
        let mut of_levels = vec![faces];
        for level in 0..levels {
            let mut middles = HashMap::new();
            let mut middle = |a: usize, b: usize| {
                *middles.entry([a.min(b), a.max(b)]).or_insert_with(|| {
                    let sum = [0, 1, 2].map(|axis: usize| corners[a][axis] + corners[b][axis]);
                    corners.push(normalized(sum));
                    corners.len() - 1
                })
            };
            let divide = |&[a, b, c]: &[usize; 3]| {
                let [ab, bc, ca] = [middle(a, b), middle(b, c), middle(c, a)];
                [[a, ab, ca], [ab, b, bc], [ab, bc, ca], [ca, bc, c]]
            };
            of_levels.push(of_levels[level].iter().flat_map(divide).collect());
        }
        let mut numbers = vec![None; corners.len()];
        let mut positions = Vec::with_capacity(corners.len());
        for corner in of_levels[levels].iter().flatten() {
            numbers[*corner].get_or_insert_with(|| {
                positions.push(corners[*corner]);
                positions.len() - 1
            });
        }
        let number = |corner: usize| numbers[corner].expect("a corner of the finest faces");
        // Neighbouring faces traverse their common side in opposite directions.
        let edges = |faces: &Vec<[usize; 3]>| {
            let sides =
                |&[a, b, c]: &[usize; 3]| [[a, b], [b, c], [c, a]].map(|side| side.map(number));
            faces.iter().flat_map(sides).collect()
        };
        Self {
            edges: of_levels.iter().map(edges).collect(),
            positions,
        }
    }

    /// Positions of the cells on the unit sphere, as x, y and z.
    ///
    /// # Example
    /// ```
    /// use halocline_ops::graph::Icosphere;
    ///
    /// let grid = Icosphere::new(1);
    /// let northern = grid.positions().iter().filter(|place| place[2] > 0.0);
    /// assert_eq!(northern.count(), 17); // of 42, 8 on the equator
    /// ```
    pub fn positions(&self) -> &[[f64; 3]] {
        &self.positions
    }

    /// Pairs of neighbours on a level, as source and target in both directions; the last level is
    /// the finest.
    ///
    /// # Panics
    /// Panics if the grid has no such level.
    ///
    /// # Example
    /// ```
    /// use halocline_ops::graph::Icosphere;
    ///
    /// let grid = Icosphere::new(1);
    /// assert_eq!([0, 1].map(|level| grid.edges(level).len()), [2 * 30, 2 * 120]);
    /// ```
    pub fn edges(&self, level: usize) -> &[[usize; 2]] {
        &self.edges[level]
    }
}

fn normalized(place: [f64; 3]) -> [f64; 3] {
    let length = place.iter().map(|x| x * x).sum::<f64>().sqrt();
    place.map(|x| x / length)
}

/// Corners of an icosahedron and its faces, counterclockwise as seen from outside.
fn icosahedron() -> (Vec<[f64; 3]>, Vec<[usize; 3]>) {
    let long = (1.0 + 5.0_f64.sqrt()) / 2.0;
    let signs = [[-1.0, long], [1.0, long], [-1.0, -long], [1.0, -long]];
    let turned = (0..3).flat_map(|turn| {
        signs.map(|[short, long]| {
            let mut place = [short, long, 0.0];
            place.rotate_right(turn);
            normalized(place)
        })
    });
    let faces = [
        [0, 11, 5],
        [0, 5, 1],
        [0, 1, 7],
        [0, 7, 10],
        [0, 10, 11],
        [1, 5, 9],
        [5, 11, 4],
        [11, 10, 2],
        [10, 7, 6],
        [7, 1, 8],
        [3, 9, 4],
        [3, 4, 2],
        [3, 2, 6],
        [3, 6, 8],
        [3, 8, 9],
        [4, 9, 5],
        [2, 4, 11],
        [6, 2, 10],
        [8, 6, 7],
        [9, 8, 1],
    ];
    (turned.collect(), faces.to_vec())
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::graph::{Aggregate, Graph};
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    #[test]
    fn cells_have_five_or_six_neighbours_that_are_near() {
        for levels in 0..4 {
            let grid = Icosphere::new(levels);
            let cells = grid.positions();
            assert_eq!(cells.len(), 10 * 4_usize.pow(levels as u32) + 2);
            let mut degrees = vec![0; cells.len()];
            let apart = |&[a, b]: &[usize; 2]| {
                let squares =
                    [0, 1, 2].map(|axis: usize| (cells[a][axis] - cells[b][axis]).powi(2));
                squares.iter().sum::<f64>().sqrt()
            };
            let lengths: Vec<f64> = grid.edges(levels).iter().map(apart).collect();
            let longest = lengths.iter().copied().fold(0.0, f64::max);
            assert!(lengths.iter().all(|length| *length > 0.8 * longest));
            for [source, target] in grid.edges(levels) {
                assert!(grid.edges(levels).contains(&[*target, *source]));
                degrees[*target] += 1;
            }
            assert_eq!(degrees.iter().filter(|degree| **degree == 5).count(), 12);
            assert!(degrees.iter().all(|degree| [5, 6].contains(degree)));
        }
    }

    /// Most edges stay within one quarter of the cells in numbering order.
    #[test]
    fn ranges_of_numbers_are_regions() {
        let grid = Icosphere::new(4);
        let quarter = |cell: usize| 4 * cell / grid.positions().len();
        let edges = grid.edges(4).iter();
        let across = edges.filter(|[a, b]| quarter(*a) != quarter(*b)).count();
        assert!(10 * across < grid.edges(4).len(), "{across}");
    }

    /// Means of neighbours: on the globe along edges of all levels, and in a limited area.
    struct Means(bool);

    impl Means {
        fn graph(&self) -> Graph {
            let grid = Icosphere::new(1);
            if !self.0 {
                let edges: Vec<_> = [0, 1]
                    .iter()
                    .flat_map(|level| grid.edges(*level))
                    .copied()
                    .collect();
                return Graph::new(42, 42, &edges).unwrap();
            }
            let inside = |cell: &usize| grid.positions()[*cell][2] > 0.1;
            let kept: Vec<usize> = (0..42).filter(inside).collect();
            let number = |cell: usize| kept.iter().position(|other| *other == cell);
            let edges = grid.edges(1).iter();
            let edges = edges.filter_map(|[a, b]| Some([number(*a)?, number(*b)?]));
            Graph::new(kept.len(), kept.len(), &edges.collect::<Vec<_>>()).unwrap()
        }
    }

    impl Operator<2, 2> for Means {
        fn apply<X: Field<2>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<2>>) -> X {
            let x = inputs.remove(0);
            let edges = self.graph().distribute(&x, 0).unwrap();
            let near = edges.reduce(edges.sources(x.clone()), Aggregate::Mean);
            edges.reduce(edges.sources(near * x), Aggregate::Mean)
        }
    }

    #[test]
    fn grids_of_the_globe_and_of_an_area_may_be_sharded() {
        for limited in [false, true] {
            let means = Means(limited);
            let cells = means.graph().work().len();
            check_op(&means, &[[cells, 3]], &[], &[0, 1], 1e-5);
        }
    }
}
