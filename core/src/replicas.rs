//! Checks that tensors are equal on all ranks.

use std::hash::BuildHasher;
use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::kind::Basic;
use foldhash::fast::FixedState;

use crate::comm::{Communicator, Operation, Traffic, collectives};
use crate::{Error, Result};

/// Returns an error unless the ranks hold the same tensor, bit for bit. Tensors are compared only
/// with checks enabled.
pub(crate) fn require_replicas<const D: usize, K: Basic>(
    operator: &'static str,
    comm: &Arc<dyn Communicator>,
    ranks: &[usize],
    tensor: &Tensor<D, K>,
) -> Result<()> {
    if !comm.settings().check || ranks.len() == 1 {
        return Ok(());
    }
    let data = tensor.clone().into_data();
    let kind = format!("{:?} of {:?}", tensor.dims(), data.dtype());
    let hash = FixedState::default().hash_one(data.as_bytes());
    let signature = [&hash.to_le_bytes(), kind.as_bytes()].concat();
    let operation = Operation::new(operator, Traffic::Control, None);
    let all = collectives::all_gather_bytes(comm, ranks, &operation, &signature)?;
    let Some(differs) = all.iter().position(|theirs| *theirs != all[0]) else {
        return Ok(());
    };
    let kind_on = |place: usize| String::from_utf8_lossy(&all[place][8..]).into_owned();
    Err(Error::Replicas(format!(
        "{operator}: rank {} holds another tensor ({}) than rank {} ({}); all ranks must hold the same cells: \
         make them from a seed or by World::init, or send those of one rank by scatter_tensor",
        ranks[differs],
        kind_on(differs),
        ranks[0],
        kind_on(0),
    )))
}
