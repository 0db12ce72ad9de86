//! Multi-step forecasts.

use halocline_core::{Error, Result};
use halocline_ops::prelude::*;

/// Runs an autoregressive forecast: each prediction becomes input of the next step, and gradients
/// flow through all steps.
///
/// `step` predicts the targets from the input and the forcings of that step, concatenated along
/// channels. After each step, [`next_input`] builds the next input by `feedback`: for every input,
/// its index among the targets, as in a loader's `Channels::feedback`.
///
/// A state that the model carries besides, such as that of a recurrent network, is a variable that
/// `step` captures and replaces.
///
/// Training memory grows with the number of steps. If `step` calls [`recompute`](Field::recompute),
/// only the inputs of the steps are kept. From the second step on, a carried state has gradients,
/// and a block that captures it panics: pass it by [`recompute_with`](Field::recompute_with), and
/// return the next one beside the prediction, as in the second example.
///
/// # Shapes
/// `input` `[batch, history · inputs, *spatial]`, `forcing` `[batch, steps · forcings, *spatial]` →
/// `[batch, steps · targets, *spatial]`.
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
///
/// A recurrent network, of which the backward pass recomputes each step:
/// ```
/// use burn::nn::conv::Conv2dConfig;
/// use burn::tensor::{Device, Tensor};
/// use halocline_core::Halos;
/// use halocline_models::rollout;
/// use halocline_ops::prelude::*;
///
/// let device = Device::default().autodiff();
/// let cell = Conv2dConfig::new([2, 2], [1, 1]).init(&device);
/// let zeros = || Tensor::<4>::zeros([1, 1, 3, 5], &device);
/// let (input, mut state) = (zeros(), zeros());
/// let y = rollout(input, None, 3, &[0], |_, x| {
///     let both = x.recompute_with::<4, _>(state.clone(), &cell, Halos::Keep, |cell, x, state| {
///         Tensor::cat(vec![x, state], 1).apply(cell).tanh() // the prediction and the next state
///     });
///     state = both.clone().narrow(1, 1, 1);
///     Ok(both.narrow(1, 0, 1))
/// })?;
/// assert!(cell.weight.grad(&y.sum().backward()).is_some());
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn rollout<const D: usize, X: Field<D>>(
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
/// `input` `[batch, history · inputs, *spatial]`, `prediction` `[batch, targets, *spatial]` →
/// `[batch, history · inputs, *spatial]`.
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
pub fn next_input<const D: usize, X: Field<D>>(
    input: X,
    prediction: X,
    feedback: &[usize],
) -> Result<X> {
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

#[cfg(test)]
mod tests {
    use burn::nn::PaddingConfig1d;
    use burn::nn::conv::{Conv1d, Conv1dConfig};
    use burn::tensor::{Device, Tensor, Tolerance};
    use halocline_core::Halos;

    use super::*;

    /// Cells along one dim, and a state that the model carries: the number of its steps.
    #[test]
    fn fields_of_any_dims_roll_out_with_a_carried_state() {
        let device = Device::default().autodiff();
        let input = Tensor::<3>::ones([2, 1, 5], &device).require_grad();
        let mut carried = Tensor::<3>::zeros([2, 1, 5], &device);
        let y = rollout(input.clone(), None, 3, &[0], |_, x| {
            carried = carried.clone() + 1.0;
            Ok(x * carried.clone())
        });
        let y = y.unwrap();
        assert_eq!(y.dims(), [2, 3, 5]);
        let last = y.narrow(1, 2, 1);
        assert_eq!(last.clone().max().into_scalar::<f32>(), 6.0);
        let gradient = input.grad(&last.sum().backward()).expect("a gradient");
        assert_eq!(gradient.into_data().iter::<f32>().sum::<f32>(), 60.0);
    }

    fn conv(device: &Device) -> Conv1d {
        let config = Conv1dConfig::new(2, 2, 3).with_padding(PaddingConfig1d::Same);
        config.init(device)
    }

    /// Prediction and next state of a recurrent network, `[batch, 2, cells]`.
    fn cell(conv: &Conv1d, x: Tensor<3>, state: Tensor<3>) -> Tensor<3> {
        Tensor::cat(vec![x, state], 1).apply(conv).tanh()
    }

    #[test]
    fn a_carried_state_passes_through_recomputed_steps() {
        let device = Device::default().autodiff();
        let conv = conv(&device);
        let run = |recompute: bool| {
            let input = Tensor::<3>::ones([2, 1, 5], &device).require_grad();
            let mut state = Tensor::<3>::zeros([2, 1, 5], &device);
            let y = rollout(input.clone(), None, 3, &[0], |_, x| {
                let both = if recompute {
                    x.recompute_with::<3, _>(state.clone(), &conv, Halos::Keep, cell)
                } else {
                    cell(&conv, x, state.clone())
                };
                state = both.clone().narrow(1, 1, 1);
                Ok(both.narrow(1, 0, 1))
            });
            let y = y.unwrap();
            let gradients = y.clone().sum().backward();
            let weight = conv.weight.grad(&gradients).expect("a gradient");
            let input = input.grad(&gradients).expect("a gradient");
            [y, input, weight].map(|x| x.into_data())
        };
        for (again, kept) in run(true).iter().zip(&run(false)) {
            again.assert_approx_eq::<f32>(kept, Tolerance::absolute(1e-6));
        }
    }

    #[test]
    fn a_recomputed_step_that_captures_a_carried_state_is_refused() {
        let device = Device::default().autodiff();
        let conv = conv(&device);
        let input = Tensor::<3>::ones([2, 1, 5], &device).require_grad();
        let mut state = Tensor::<3>::zeros([2, 1, 5], &device);
        let mut steps = 0;
        let refused = Error::catch(|| {
            rollout(input, None, 3, &[0], |number, x| {
                steps = number + 1;
                let captured = state.clone();
                let block = move |conv: &Conv1d, x| cell(conv, x, captured.clone());
                let both = x.recompute(&conv, Halos::Keep, block);
                state = both.clone().narrow(1, 1, 1);
                Ok(both.narrow(1, 0, 1))
            })
        });
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("pass it by recompute_with"), "{error}");
        // The first state has no gradient.
        assert_eq!(steps, 2);
    }
}
