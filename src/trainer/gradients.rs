//! Gradients of a step: their mean, and a check that they are finite.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData, Transaction};
use halocline_core::comm::Operation;
use halocline_core::paths::{PathVisitor, visit_paths};
use halocline_core::{DeviceMesh, Result, Traffic, ops, param_shards};

use super::clip::scaled;

/// Computes the mean of the gradients of several batches from their sum.
pub(super) fn mean<M: Module>(sum: GradientsParams, batches: usize, model: &M) -> GradientsParams {
    if batches == 1 {
        return sum;
    }
    scaled(model, sum, 1.0 / batches as f64)
}

/// Describes the first loss or gradient of a step that is NaN or infinite; `None` if all are
/// finite.
///
/// `losses` are those of the batches from `first_batch` on. A sum is finite only if all its terms
/// are, so for finite tensors one read from the device suffices. The tensors themselves are read
/// only if a sum is not finite.
pub(super) fn non_finite<M: Module>(
    losses: &[Tensor<1>],
    first_batch: usize,
    gradients: &GradientsParams,
    model: &M,
) -> Option<String> {
    let mut sums = Sums {
        gradients,
        sums: Transaction::default(),
    };
    losses.iter().for_each(|loss| sums.add(loss.clone()));
    model.visit(&mut sums);
    let sums = sums.sums.execute();
    if sums.iter().all(|sum| first_in(sum).is_none()) {
        return None;
    }
    for (batch, loss) in (first_batch..).zip(losses) {
        let Some((_, value)) = first_in(&loss.to_data()) else {
            continue;
        };
        let mut parameter = First::new(None);
        visit_paths(model, &mut parameter);
        return Some(match parameter.found {
            Some(found) => format!("the loss of batch {batch} is {value}, and parameter {found}"),
            None => format!(
                "the loss of batch {batch} is {value} while all parameters are finite: they have grown if the learning \
                 rate is too high; else look at its samples (missing = \"reject\" names a cell of a file that is not \
                 finite)"
            ),
        });
    }
    let mut gradient = First::new(Some(gradients));
    visit_paths(model, &mut gradient);
    let found = gradient.found?;
    Some(format!(
        "the losses are finite, but the gradient of {found}"
    ))
}

/// Returns the findings of any rank of `mesh`, as ranks that hold shards of the model see different
/// gradients. All ranks then react alike, also if parameters are sharded over different meshes.
pub(super) fn agree<M: Module>(
    found: Option<String>,
    model: &M,
    mesh: &DeviceMesh,
) -> Result<Option<String>> {
    if param_shards(model).is_empty() {
        return Ok(found);
    }
    let flag = f64::from(u8::from(found.is_some()));
    let operation = Operation::new("non_finite", Traffic::Control, None);
    let ranks = mesh.shape().ranks();
    let all = ops::all_gather_numbers(mesh.comm(), ranks, &operation, &[flag])?;
    let Some(finder) = all.iter().position(|found| found[0] > 0.0) else {
        return Ok(None);
    };
    // All ranks report the finding of the first rank that has one.
    let rank = ranks[finder];
    let text = found.map(|found| format!("{found} (in the shards of rank {rank})").into_bytes());
    let sent = text.filter(|_| mesh.comm().rank() == rank);
    let text = mesh.broadcast_bytes("non_finite", rank, sent)?;
    Ok(Some(String::from_utf8_lossy(&text).into_owned()))
}

/// Visitor that collects the sum of each gradient.
struct Sums<'a> {
    gradients: &'a GradientsParams,
    sums: Transaction,
}

impl Sums<'_> {
    fn add<const D: usize>(&mut self, values: Tensor<D>) {
        self.sums = std::mem::take(&mut self.sums).register(values.sum());
    }
}

impl ModuleVisitor for Sums<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.add(gradient);
        }
    }
}

/// Visitor that finds the first parameter or gradient with an element that is not finite.
struct First<'a> {
    /// Gradients to search; the parameters if `None`.
    gradients: Option<&'a GradientsParams>,
    found: Option<String>,
}

impl<'a> First<'a> {
    fn new(gradients: Option<&'a GradientsParams>) -> Self {
        Self {
            gradients,
            found: None,
        }
    }
}

impl PathVisitor for First<'_> {
    fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        if self.found.is_some() {
            return;
        }
        let values = match self.gradients {
            Some(gradients) => gradients.get::<D>(param.id),
            None => Some(param.val().inner()),
        };
        let first = values.and_then(|values| first_in(&values.into_data()));
        self.found = first.map(|(index, value)| format!("{}{index:?} is {value}", path.join(".")));
    }
}

/// Returns the index and value of the first element that is not finite.
fn first_in(data: &TensorData) -> Option<(Vec<usize>, f64)> {
    let mut values = data.iter::<f64>().enumerate();
    let (position, value) = values.find(|(_, value)| !value.is_finite())?;
    let mut rest = position;
    let mut index: Vec<usize> = data
        .shape()
        .iter()
        .rev()
        .map(|extent| {
            let coordinate = rest % extent;
            rest /= extent;
            coordinate
        })
        .collect();
    index.reverse();
    Some((index, value))
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use halocline_core::{Launcher, Layout, ParamShard, Shard, shard_parameters};

    use super::*;

    #[test]
    fn all_ranks_agree_though_parameters_are_sharded_over_smaller_meshes() {
        let found = Launcher::local(4).collect(|world| {
            let mesh = world.mesh([("data", 2), ("tensor", 2)])?;
            let row = mesh.submesh(&["tensor"])?;
            let model =
                world.init(|device| LinearConfig::new(4, 6).with_bias(false).init(device))?;
            let model = shard_parameters(model, |_, shape| {
                let layout = Layout::new(row.shape(), shape, &[Shard(1)])?;
                Ok(Some(ParamShard::new(layout, &row)))
            })?;
            let found = (world.rank() == 3).then(|| "it is NaN".to_string());
            agree(found, &model, &mesh)
        });
        let expected = Some("it is NaN (in the shards of rank 3)".to_string());
        assert_eq!(found.unwrap(), vec![expected; 4]);
    }
}
