//! Multi-step forecasts, and ensembles of initial states.

use halocline_core::{Distribution, Error, RandomKey, Replicate, Result, Shard, ShardTensor};
use halocline_ops::prelude::*;

/// Runs an autoregressive forecast: each prediction becomes input of the next step, and gradients
/// flow through all steps.
///
/// `step` predicts the targets from the input and the forcings of that step, concatenated along
/// channels. After each step, [`next_input`] builds the next input by `feedback`: for every input,
/// its index among the targets, as in a loader's `Channels::feedback`.
///
/// Training memory grows with the number of steps. If `step` calls [`recompute`](Field::recompute),
/// only the inputs of the steps are kept.
///
/// # Shapes
/// `input` `[batch, history · inputs, lat, lon]`, `forcing` `[batch, steps · forcings, lat, lon]` →
/// `[batch, steps · targets, lat, lon]`.
///
/// # Placement
/// Any without shards of channels.
///
/// # Errors
/// `steps` is zero, or does not divide the forcings; `feedback` does not divide the input, or has
/// an index that a prediction lacks; `step` fails.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::rollout;
/// use halocline_ops::prelude::*;
///
/// let field = |channels: [f32; 2]| {
///     Tensor::<1>::from_floats(channels, &Device::default()).reshape([1, 2, 1, 1])
/// };
/// // One input; each step adds its forcing: 1, then 10.
/// let input = Tensor::<4>::ones([1, 1, 1, 1], &Device::default());
/// let y = rollout(input, Some(field([1.0, 10.0])), 2, &[0], |_, x| Ok(x.sum_dims(&[1])))?;
/// y.into_data().assert_eq(&field([2.0, 12.0]).into_data(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn rollout<X: Field<4>>(
    input: X,
    forcing: Option<X>,
    steps: usize,
    feedback: &[usize],
    mut step: impl FnMut(usize, X) -> Result<X>,
) -> Result<X> {
    const NAME: &str = "rollout";
    let forcings = forcing.as_ref().map_or(0, |forcing| forcing.dims()[1]);
    if steps == 0 || !forcings.is_multiple_of(steps) {
        let message = format!(
            "{steps} steps with {forcings} channels of forcings; expected at least 1 step, and as many forcings for each"
        );
        return Err(Error::operator(NAME, message));
    }
    if steps > 1 {
        check_feedback(NAME, input.dims()[1], feedback)?;
    }
    let forcings = forcings / steps;
    let mut state = input;
    let mut predictions = Vec::new();
    for number in 0..steps {
        let x = match &forcing {
            None => state.clone(),
            Some(forcing) => {
                let given = forcing.clone().narrow(1, number * forcings, forcings);
                X::cat(vec![state.clone(), given], 1)
            }
        };
        let prediction = step(number, x)?;
        predictions.push(prediction.clone());
        if number + 1 == steps {
            break;
        }
        state = next_input(state, prediction, feedback)?;
    }
    Ok(match predictions.len() {
        1 => predictions.remove(0),
        _ => X::cat(predictions, 1),
    })
}

/// Builds the input of the step that follows a prediction: drops the earliest time of the history
/// and appends the prediction as the newest. Times of the history are one lead apart
/// (`DatasetConfig::history_hours`). `feedback` is, for every input, its index among the targets.
///
/// # Shapes
/// `input` `[batch, history · inputs, lat, lon]`, `prediction` `[batch, targets, lat, lon]` →
/// `[batch, history · inputs, lat, lon]`.
///
/// # Placement
/// Any without shards of channels.
///
/// # Errors
/// `feedback` does not divide the input, or has an index that the prediction lacks.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::next_input;
///
/// let field = |channels: &[f32]| {
///     Tensor::<1>::from_floats(channels, &Device::default()).reshape([1, channels.len(), 1, 1])
/// };
/// // One input at two times; the second of the two targets is the input.
/// let next = next_input(field(&[1.0, 2.0]), field(&[7.0, 3.0]), &[1])?;
/// next.into_data().assert_eq(&field(&[2.0, 3.0]).into_data(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn next_input<X: Field<4>>(input: X, prediction: X, feedback: &[usize]) -> Result<X> {
    const NAME: &str = "next_input";
    let (inputs, channels) = (feedback.len(), input.dims()[1]);
    check_feedback(NAME, channels, feedback)?;
    let targets = prediction.dims()[1];
    if let Some(place) = feedback.iter().find(|place| **place >= targets) {
        let message = format!(
            "place {place} of an input in a prediction of {targets} channels; expected one below {targets}"
        );
        return Err(Error::operator(NAME, message));
    }
    let newest = prediction.index_select(1, feedback);
    Ok(match channels - inputs {
        0 => newest,
        kept => X::cat(vec![input.narrow(1, inputs, kept), newest], 1),
    })
}

/// Checks that the channels of an input are a whole number of times.
fn check_feedback(name: &str, channels: usize, feedback: &[usize]) -> Result<()> {
    let inputs = feedback.len();
    if inputs > 0 && channels > 0 && channels.is_multiple_of(inputs) {
        return Ok(());
    }
    let message = format!(
        "an input of {channels} channels with the places of {inputs} in a prediction; expected one place for each input \
         of a time"
    );
    Err(Error::operator(name, message))
}

/// Makes an ensemble of states around `x` by adding normal noise with standard deviation `std`. The
/// result is the same on any mesh, bit for bit.
///
/// Members are stacked along the batch, so that a model processes them as one batch:
/// [`unflatten`](RearrangeField::unflatten) with `(0, &[members, batch])` splits off a dim of
/// members, as [`crps`](crate::crps()) expects it. With a mesh `axis`, members are sharded over it.
///
/// # Shapes
/// `[batch, channels, lat, lon]` → `[members · batch, channels, lat, lon]`.
///
/// # Placement
/// `x` is replicated on the axis of members, and its batch is not sharded.
///
/// # Errors
/// There are no members; the axis does not exist, or `x` is sharded on it; `x` has partial values.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, RandomKey, Replicate, Shard, ShardTensor};
/// use halocline_models::perturbed;
/// use halocline_ops::prelude::*;
///
/// Launcher::local(4).run(|world| {
///     let mesh = world.mesh([("member", 2), ("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 3, 5, 4], &mesh, &[Replicate, Shard(2)])?;
///     let key = RandomKey::new(world.seed(), ("members", 0));
///     let states = perturbed(x, 4, 0.1, key, Some("member"))?;
///     assert_eq!(states.placements(), [Shard(0), Shard(2)]);
///     let ensemble = states.unflatten::<5>(0, &[4, 1]);
///     assert_eq!(ensemble.local_dims()[0], 2);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn perturbed(
    x: ShardTensor<4>,
    members: usize,
    std: f64,
    key: RandomKey,
    axis: Option<&str>,
) -> Result<ShardTensor<4>> {
    const NAME: &str = "perturbed";
    x.require_resolved(NAME)?;
    let names = x.mesh().shape().names();
    let axis = match axis {
        None => None,
        Some(axis) => {
            let found = names.iter().position(|name| name == axis);
            let whole = found.filter(|found| x.placements()[*found] == Replicate);
            if members == 0 || whole.is_none() {
                let message = format!(
                    "{members} members on axis {axis:?} of {names:?} for {}; expected members, and an axis on which the \
                     field is replicated",
                    x.layout()
                );
                return Err(Error::operator(NAME, message));
            }
            whole
        }
    };
    if members == 0 {
        return Err(Error::operator(
            NAME,
            "0 members; expected at least 1".to_string(),
        ));
    }
    let dims = x.dims();
    let shape: [usize; 5] = std::array::from_fn(|dim| match dim {
        0 => members,
        dim => dims[dim - 1],
    });
    let place = |(index, placement): (usize, &halocline_core::Placement)| match placement {
        _ if Some(index) == axis => Shard(0),
        Shard(dim) => Shard(dim + 1),
        other => *other,
    };
    let placements: Vec<_> = x.placements().iter().enumerate().map(place).collect();
    // Members are split evenly; all other dims as in `x`.
    let even = halocline_core::Layout::new(x.layout().mesh(), &shape, &placements)?;
    let mut extents = vec![even.extents(0).to_vec()];
    extents.extend(x.layout().all_extents().iter().cloned());
    let layout = x.layout().derive(placements, extents);
    let normal = Distribution::Normal(0.0, std);
    let noise = ShardTensor::<5>::random(shape, normal, key, x.mesh(), &layout)?;
    Error::catch(|| {
        let states = x.unsqueeze_dim::<5>(0) + noise;
        RearrangeField::flatten::<4>(states, 0, 1)
    })
}
