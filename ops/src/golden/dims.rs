//! Dims of an operator that may be sharded.

use halocline_core::{Placement, Replicate, Shard};

use super::{Arguments, Options};
use crate::sharding::Sharding;

/// Dims of the first input that may be sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dims {
    /// All dims.
    All,
    /// All but the second dim.
    AllButChannels,
    /// All but the last dim.
    AllButLast,
    /// All but the last `n` dims, if at least two are left: while one of these is whole, the other
    /// carries its shards.
    InTurn(usize),
    /// All but the dim of the attribute `dim`, by default the last.
    AllButDim,
    /// The first `n` dims, whose cells stay together.
    Leading(usize),
    /// All but the dims that `flatten` merges into an earlier one.
    Flattened,
    /// All dims but the last in which all inputs have the same size: queries, keys and values.
    Alike,
    /// Dims of a matrix product: batch, rows, columns, and the summed dim.
    Product,
    /// All dims of the first input, whose second dim holds the classes. The second input lacks that
    /// dim; other inputs are replicated.
    Classes,
}

impl Dims {
    /// Returns the shape of the sharded index space for these arguments, and those of its dims that
    /// may be sharded.
    pub fn of(self, arguments: &Arguments) -> (Vec<usize>, Vec<usize>) {
        let inputs = arguments.shapes();
        let first = &inputs[0];
        let (mut shape, dims) = (first.clone(), first.len());
        let sharded = |dim: &usize| match self {
            Self::All | Self::Product | Self::Classes => true,
            Self::AllButChannels => *dim != 1,
            Self::AllButLast => dim + 1 != dims,
            Self::InTurn(whole) => whole + 1 < dims && *dim < dims - whole,
            Self::AllButDim => *dim != Options::new(&arguments.attributes).dim("dim", dims),
            Self::Leading(count) => *dim < count,
            Self::Flattened => {
                let [start, end] = Options::new(&arguments.attributes).flattened(dims);
                *dim <= start || *dim > end
            }
            Self::Alike => dim + 1 != dims && inputs.iter().all(|input| input[*dim] == first[*dim]),
        };
        if self == Self::Product {
            shape.extend(inputs[1].last());
        }
        let all = 0..shape.len();
        (shape, all.filter(sharded).collect())
    }

    /// Returns the sharding of one input with `dims` dims, given the sharding of the index space.
    pub fn input(self, input: usize, dims: usize, sharding: &Sharding) -> Sharding {
        let moved = |dim: usize| match (self, input, dim) {
            (Self::Classes, 0, dim) => Some(dim),
            (Self::Classes, 1, dim) => (dim != 1).then(|| dim - usize::from(dim > 1)),
            (Self::Classes, ..) => None,
            // Batch dims, rows, summed dim, columns.
            (Self::Product, _, dim) if dim < dims - 2 => Some(dim),
            (Self::Product, 0, dim) => (dim < dims).then_some(dim),
            (Self::Product, _, dim) => (dim > dims - 2).then(|| dim - 1),
            _ => Some(dim),
        };
        let placement = |placement: &Placement| match placement {
            Shard(dim) => moved(*dim).map_or(Replicate, Shard),
            other => *other,
        };
        let extents = sharding.extents.iter();
        Sharding {
            axes: sharding.axes.clone(),
            placements: sharding.placements.iter().map(placement).collect(),
            extents: extents
                .filter_map(|(dim, extents)| Some((moved(*dim)?, extents.clone())))
                .collect(),
        }
    }
}

impl std::fmt::Display for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::All | Self::Classes => "all",
            Self::InTurn(0) => "all, if there are several",
            Self::InTurn(_) => "all but the last, if several are left",
            Self::AllButChannels => "all but channels",
            Self::AllButDim => "all but the one that it runs along",
            Self::Leading(_) => "those whose cells stay together",
            Self::Flattened => "all but those joined to an earlier one",
            Self::AllButLast | Self::Alike => "all but the last",
            Self::Product => "batch, rows, columns, summed",
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;

    #[test]
    fn a_lone_dim_has_no_other_for_its_shards() {
        let dims = |whole: usize, shape: &[usize]| {
            let x = TensorData::zeros::<f32, _>(shape);
            let arguments = Arguments {
                inputs: vec![("x".into(), x)],
                ..Arguments::default()
            };
            Dims::InTurn(whole).of(&arguments).1
        };
        assert_eq!((dims(0, &[6]), dims(0, &[6, 4])), (vec![], vec![0, 1]));
        assert_eq!(
            (dims(1, &[6, 2]), dims(1, &[6, 4, 2])),
            (vec![], vec![0, 1])
        );
    }
}
