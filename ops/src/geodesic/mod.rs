//! Operators on the cells within a geodesic radius: discrete-continuous convolution, its transpose,
//! and neighborhood attention on the sphere.
//!
//! An exchange makes longitude whole, because cells near the poles have neighbors at all
//! longitudes. In latitude only a halo travels: the rows within reach of a rank's own rows.

pub mod attention;
mod attention_node;
mod basis;
mod disc;
pub mod disco;
mod filter;
mod golden;
mod kernels;
mod node;
mod reach;
mod rows;
mod sums;
#[cfg(test)]
mod tests;
pub mod transposed;

pub(crate) use golden::OPERATORS;

pub use attention::{GeodesicNeighborhood, sphere_attention};
pub use basis::{DiscoBasis, DiscoKernel, DiscoNorm};
pub use disco::{Disco, disco_conv};
pub use transposed::{DiscoTranspose, disco_conv_transpose};

use crate::field::{Field, run};
use crate::operand::Operand;

/// Methods for operators on geodesic neighborhoods.
pub trait GeodesicField: Field<4> {
    /// Discrete-continuous convolution on the sphere, with a weight of shape
    /// `[channels_out, channels_in/groups, functions]`. See [`disco`].
    ///
    /// # Panics
    /// Panics where [`disco_conv`] returns an error; [`Disco`] has an example.
    #[must_use]
    #[track_caller]
    fn disco_conv(
        self,
        weight: impl Into<Operand<3>>,
        bias: Option<Operand<1>>,
        groups: usize,
        kernels: &Disco,
    ) -> Self {
        run(self, |x| disco_conv(x, weight, bias, groups, kernels))
    }

    /// Transposed discrete-continuous convolution to a finer grid, with a weight of shape
    /// `[channels_out, channels_in/groups, functions]`. See [`transposed`].
    ///
    /// # Panics
    /// Panics where [`disco_conv_transpose`] returns an error; [`DiscoTranspose`] has an example.
    #[must_use]
    #[track_caller]
    fn disco_conv_transpose(
        self,
        weight: impl Into<Operand<3>>,
        bias: Option<Operand<1>>,
        groups: usize,
        kernels: &DiscoTranspose,
    ) -> Self {
        run(self, |x| {
            disco_conv_transpose(x, weight, bias, groups, kernels)
        })
    }

    /// Attention of each cell to the cells within a radius; `self` holds the queries. See
    /// [`attention`].
    ///
    /// # Panics
    /// Panics where [`sphere_attention`] returns an error; [`GeodesicNeighborhood`] has an example.
    #[must_use]
    #[track_caller]
    fn sphere_attention(
        self,
        keys: Self,
        values: Self,
        heads: usize,
        neighborhood: &GeodesicNeighborhood,
    ) -> Self {
        let (keys, values) = (keys.into_shard(), values.into_shard());
        run(self, |queries| {
            sphere_attention(queries, keys, values, heads, neighborhood)
        })
    }
}

impl<X: Field<4>> GeodesicField for X {}
