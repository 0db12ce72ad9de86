//! Shards with halos, for hand-written stencils and for every stencil operator.

use std::hash::Hash;
use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::kind::Basic;

use super::ShardTensor;
use crate::comm::{Operation, Traffic};
use crate::exchange::{ExchangePlan, Need, Source};
use crate::ops;
use crate::region::{Boundary, Sides, check_poles};
use crate::{Error, Result};

/// Halo of a shard in one dim; see the example of [`ShardTensor::with_halo`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Halo {
    /// The dim.
    pub dim: usize,
    /// The number of cells before the shard.
    pub low: usize,
    /// The number of cells after it.
    pub high: usize,
    /// The boundaries at the low and the high end of the field.
    pub boundary: [Boundary; 2],
}

impl Halo {
    /// Makes a halo of the same width and boundary on both sides.
    pub fn new(dim: usize, width: usize, boundary: Boundary) -> Self {
        Self {
            dim,
            low: width,
            high: width,
            boundary: [boundary; 2],
        }
    }
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// Returns this rank's shard with its halo, corners included.
    ///
    /// # Shapes
    /// Local: the shard's shape, extended by `low + high` in each of the given dims, sharded or
    /// not.
    ///
    /// # Adjoint
    /// The gradients of halo cells are added to the cells that they copy, on the ranks that own
    /// these.
    ///
    /// # Errors
    /// Partial values; a dim that the tensor does not have, or that is given twice; poles of a
    /// field that has no [opposite meridians](crate::plan::check_poles); failures of communication.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::{Boundary, Halo, Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lon", world.size())])?;
    ///     let cells = Tensor::<1>::from_floats([0.0, 1.0, 2.0, 3.0], world.device());
    ///     let x = ShardTensor::distribute(cells, &mesh, &[Shard(0)])?;
    ///     let padded = x.with_halo(&[Halo::new(0, 1, Boundary::Periodic)])?;
    ///     let expected = [[3.0, 0.0, 1.0, 2.0], [1.0, 2.0, 3.0, 0.0]];
    ///     padded.into_data().assert_eq(&expected[world.rank()].into(), false);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn with_halo(&self, halos: &[Halo]) -> Result<Tensor<D, K>> {
        self.with_halo_for("with_halo", halos)
    }

    /// Like [`with_halo`](Self::with_halo), as part of an operator, which errors name.
    ///
    /// # Errors
    /// The errors of [`with_halo`](Self::with_halo).
    pub fn with_halo_for(&self, operator: &'static str, halos: &[Halo]) -> Result<Tensor<D, K>> {
        for (i, halo) in halos.iter().enumerate() {
            if halo.dim >= D || halos[..i].iter().any(|other| other.dim == halo.dim) {
                let message = format!("halos {halos:?} for {D} dims; each dim at most once");
                return Err(Error::operator(operator, message));
            }
        }
        let mut sides = [Sides::default(); D];
        for halo in halos {
            sides[halo.dim] = ([halo.low, halo.high], halo.boundary);
        }
        check_poles(operator, self.layout().shape(), &sides)?;
        let layout = self.layout().clone();
        self.assemble(operator, halos.to_vec(), |position| {
            let shard = layout.local_box(position);
            let ranges = shard.ranges().iter().zip(&sides);
            let ranges = ranges.map(|(range, ([low, high], _))| {
                range.start as isize - *low as isize..(range.end + high) as isize
            });
            let ranges: Vec<_> = ranges.collect();
            let boundaries = sides.map(|(_, boundary)| boundary);
            Need::within(layout.shape(), &ranges, &boundaries)
        })
    }

    /// Assembles on every rank the cells that `need_of` returns for its position.
    ///
    /// `need_of` must be the same function on all ranks. `key` is everything that it depends on
    /// besides the layout, and is equal on all ranks: the plan is made once per key.
    ///
    /// # Errors
    /// Partial values; different keys on different ranks; failures of communication.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::plan::{Need, Source};
    /// use halocline_core::{IndexBox, Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let cells = Tensor::<1>::from_floats([0.0, 1.0, 2.0, 3.0], world.device());
    ///     let x = ShardTensor::distribute(cells, &mesh, &[Shard(0)])?;
    ///     let need = |_| Need::of(IndexBox::new(Vec::from([3..4])));
    ///     let last = x.assemble("last", (), need)?;
    ///     last.into_data().assert_eq(&[3.0_f32].into(), false);
    ///     let plan = mesh.exchange_plan(Source::Layout(x.layout()), need).into();
    ///     assert_eq!(x.run_plan("last", &plan)?.dims(), [1]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn assemble<Key>(
        &self,
        operator: &'static str,
        key: Key,
        need_of: impl Fn(usize) -> Need,
    ) -> Result<Tensor<D, K>>
    where
        Key: Hash + Eq + Send + 'static,
    {
        self.require_resolved(operator)?;
        let key = (operator, self.layout().clone(), key);
        let mesh = self.mesh();
        let plan = mesh.cache().get_or_make(key, |key| {
            let plan = mesh.exchange_plan(Source::Layout(&key.1), need_of);
            Ok(plan.with_arguments(key))
        })?;
        self.run_plan(operator, &plan)
    }

    /// Runs a plan that was made for this tensor's layout; see the example of
    /// [`assemble`](Self::assemble).
    ///
    /// # Errors
    /// Communication fails.
    pub fn run_plan(
        &self,
        operator: &'static str,
        plan: &Arc<ExchangePlan>,
    ) -> Result<Tensor<D, K>> {
        let operation = Operation::new(operator, Traffic::Exchange, Some(self.layout()));
        let (local, mesh) = (self.local().clone(), self.mesh());
        Error::catch(|| ops::exchange(local, mesh, plan.clone(), operation))
    }
}
