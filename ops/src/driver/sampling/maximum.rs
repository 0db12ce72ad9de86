//! Maxima, dim by dim.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, blank};

use super::{Combine, Map};
use crate::reshape;

/// The maximum of cells; weights do not count.
#[derive(Clone, Debug)]
pub(crate) struct Maximum(Arc<[(usize, Map)]>);

impl Combine for Maximum {
    fn new(mut maps: Vec<(usize, Map)>) -> Self {
        maps.sort_by_key(|(dim, _)| std::cmp::Reverse(*dim));
        Self(maps.into())
    }
}

/// The shape before a step, and which cell each of its outputs takes, `[outer, outputs, inner]`; none if there are none.
#[derive(Debug)]
pub(crate) struct Chosen {
    shape: Vec<usize>,
    cells: Option<Tensor<3, Int>>,
}

impl Operator for Maximum {
    type Saved = Vec<Chosen>;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["maximum", "maximum (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Vec<Chosen>)> {
        let mut x = inputs.remove(0);
        let mut chosen = Vec::new();
        for (dim, map) in self.0.iter() {
            let shape = x.shape().to_vec();
            let (y, cells) = along(x, *dim, map);
            chosen.push(Chosen { shape, cells });
            x = y;
        }
        Ok((x, chosen))
    }

    fn backward(&self, pass: BackwardPass<'_, Vec<Chosen>>) -> Result<Vec<Option<DispatchTensor>>> {
        let mut gradient = pass.cotangent;
        for ((dim, _), Chosen { shape, cells }) in self.0.iter().zip(pass.saved).rev() {
            let zeros = blank(&gradient, shape, Some(0.0));
            gradient = match cells {
                None => zeros,
                Some(cells) => {
                    let extents = extents(shape, *dim);
                    let zeros = reshape::<1, 3>(Tensor::from_dispatch(zeros), extents.to_vec());
                    let values =
                        reshape::<1, 3>(Tensor::from_dispatch(gradient), cells.dims().to_vec());
                    let sum = zeros.scatter(1, cells.clone(), values, IndexingUpdateOp::Add);
                    reshape::<3, 1>(sum, shape.clone()).into_dispatch()
                }
            };
        }
        Ok(vec![Some(gradient)])
    }
}

fn extents(shape: &[usize], dim: usize) -> [usize; 3] {
    let [before, after] = [&shape[..dim], &shape[dim + 1..]];
    [before.iter().product(), shape[dim], after.iter().product()]
}

/// The maxima along a dim, and the cells that they are of.
fn along(x: DispatchTensor, dim: usize, map: &Map) -> (DispatchTensor, Option<Tensor<3, Int>>) {
    let mut shape = x.shape().to_vec();
    let [outer, size, inner] = extents(&shape, dim);
    shape[dim] = map.len();
    if x.shape().contains(&0) || shape.contains(&0) {
        return (blank(&x, &shape, Some(0.0)), None);
    }
    // As many cells for every output: the last one several times.
    let longest = map.iter().map(Vec::len).max().unwrap_or(1);
    let cells = map
        .iter()
        .flat_map(|taps| (0..longest).map(|tap| taps[tap.min(taps.len() - 1)].0 as i64));
    let cells = TensorData::new(cells.collect::<Vec<i64>>(), [map.len() * longest]);
    let cells = Tensor::<1, Int>::from_data(cells, &Device::new(x.device()));
    let x = reshape::<1, 3>(Tensor::from_dispatch(x), vec![outer, size, inner]);
    let taken = x.select(1, cells.clone());
    let taken = taken.reshape([outer, map.len(), longest, inner]);
    let (y, tap) = taken.max_dim_with_indices(2);
    let cells = cells.reshape([1, map.len(), longest, 1]);
    let cells = cells
        .expand([outer, map.len(), longest, inner])
        .gather(2, tap);
    let y = reshape::<4, 1>(y, shape).into_dispatch();
    (y, Some(cells.reshape([outer, map.len(), inner])))
}
