//! Dry runs: records of the communication of a program, without sending messages.

use std::sync::Arc;

use super::ShardTensor;
use super::recompute::recomputing;
use crate::comm::PlannedMessages;
use crate::comm::dry_run::DryRun;
use crate::{Error, LayerKeys, Result, reduce};

impl<const D: usize> ShardTensor<D> {
    /// Records the communication of this rank in a program applied to this tensor: the program runs
    /// with zeros for the cells of other ranks, and nothing is sent. [`LayerKeys`] and running
    /// statistics are left unchanged, and uses of parameters do not join a surrounding backward
    /// pass, so a single rank may run it, also with a backward pass. However, the first operand of
    /// `cat` and of matrix products must not be on the real mesh, and a parameter in stored shards
    /// must not be read by `val()`: either would send messages.
    ///
    /// # Errors
    /// The errors of the program.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Boundary, Halo, Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<2>::ones([6, 5], &mesh, &[Shard(0)])?;
    ///     let planned = x.dry_run(|x| x.with_halo(&[Halo::new(0, 1, Boundary::Periodic)]).map(drop))?;
    ///     assert_eq!(planned.bytes_sent(), 2 * 5 * 4); // a row for each neighbour
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn dry_run<T>(&self, program: impl FnOnce(Self) -> Result<T>) -> Result<PlannedMessages> {
        let comm = self.mesh.comm();
        let engine = Arc::new(DryRun::new(comm.rank(), comm.size(), *comm.settings()));
        let mesh = self.mesh.with_comm(engine.clone());
        let local = self.local.clone().detach();
        let x = Self::from_parts(local, self.layout.clone(), mesh);
        let program = || Error::catch(|| program(x).map(drop));
        LayerKeys::aside(|| reduce::aside(|| recomputing(program)))??;
        Ok(engine.take())
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;

    #[test]
    fn keys_of_layers_are_afterwards_what_they_were() {
        let x = ShardTensor::solo(Tensor::<1>::ones([2], &Default::default()));
        let before = LayerKeys::current();
        let program = |_| {
            LayerKeys::draw();
            Ok(())
        };
        x.dry_run(program).unwrap();
        assert_eq!(LayerKeys::current(), before);
        let failing = |_| -> Result<()> {
            LayerKeys::draw();
            Error::operator("layer", "fails").raise()
        };
        x.dry_run(failing).unwrap_err();
        assert_eq!(LayerKeys::current(), before);
    }
}
