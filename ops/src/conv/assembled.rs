//! Convolution by a backend's own operators on the assembled field, for devices without our
//! kernels.

use burn::backend::ops::{FloatTensorOps, ModuleOps};
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Shape;
use burn::tensor::ops::ConvOptions;
use halocline_core::ops::{BackwardPass, Boxes, Exchange, blank, cut, paste};
use halocline_core::{IndexBox, Result};

use super::engine::geometry::Conv;
use super::run::{ConvRun, Received, cut_out, joint_shape, split};
use crate::driver::strides::row_major;
use crate::kernel::flex::in_dtype;
use crate::precision::wider;

/// Calls burn's operator for the spatial dims of a shape, with the convolution's options as its
/// last argument.
macro_rules! by_dims {
    ($shape:expr, $conv:expr, $one:ident | $two:ident | $three:ident ($($argument:expr),*)) => {
        match $shape.len() {
            3 => Dispatch::$one($($argument,)* options($conv)),
            4 => Dispatch::$two($($argument,)* options($conv)),
            _ => Dispatch::$three($($argument,)* options($conv)),
        }
    };
}

/// Converts a convolution's options to those of burn, for the last `N` of three dims.
fn options<const N: usize>(conv: &Conv) -> ConvOptions<N> {
    let last = |dims: [usize; 3]| std::array::from_fn(|dim| dims[3 - N + dim]);
    ConvOptions::new(last(conv.stride), [0; N], last(conv.dilation), conv.groups)
}

/// Computes the result and also returns the received boxes.
///
/// While boxes are in flight, all results are computed, with arbitrary values in the missing cells;
/// the results that depend on these are then computed again and pasted over. Computing only parts
/// of the results would require joining them, which copies everything.
pub(super) fn forward(
    run: &ConvRun,
    inputs: Vec<DispatchTensor>,
) -> Result<(DispatchTensor, Vec<DispatchTensor>)> {
    let (fields, parameters) = inputs.split_at(run.fields);
    let x = &joined(fields);
    let [weight, bias] = [0, 1].map(|parameter| parameters[parameter].clone());
    let bias = (bias.shape().num_elements() != 0).then_some(bias);
    let compute = |received: &Received<'_>, results: &IndexBox| {
        if results.volume() == 0 {
            return blank(x, &results.shape(), None);
        }
        let field = match &run.exchange {
            None => cut_used(run, results, x),
            Some(exchange) => {
                let cells = used(run, results, &exchange.forward.plan.output_shape);
                exchange.assemble_part(x, received, &cells)
            }
        };
        let (weight, bias) = (weight.clone(), bias.clone());
        let y = by_dims!(
            run.output,
            &run.conv,
            conv1d | conv2d | conv3d(field, weight, bias)
        );
        row_major(y)
    };
    // The first stage computes the whole output, from all cells or, with overlap, without those of
    // received boxes.
    let mut all: Option<DispatchTensor> = None;
    let received = run.in_stages(std::slice::from_ref(x), |received, results| {
        all = Some(match all.take() {
            None => compute(received, &IndexBox::whole(&run.output)),
            Some(y) => results.iter().fold(y, |y, results| {
                paste(y, results, compute(received, results))
            }),
        });
        Ok(())
    })?;
    Ok((all.expect("at least one stage"), received))
}

/// Computes the requested gradients of input, weight and bias. Gradients of halos are in flight
/// while the gradient of the weights is computed.
pub(super) fn backward(
    run: &ConvRun,
    mut pass: BackwardPass<'_, Vec<DispatchTensor>>,
) -> Result<Vec<Option<DispatchTensor>>> {
    let fields: Vec<_> = (0..run.fields).map(|x| pass.take_input(x)).collect();
    let (x, weight) = (joined(&fields), pass.take_input(run.fields));
    let BackwardPass {
        saved: received,
        cotangent,
        wanted,
        ..
    } = pass;
    let (of_fields, of_parameters) = wanted.split_at(run.fields);
    let (conv, output) = (&run.conv, &run.output);
    let empty = output.contains(&0);
    let whole = run.field(x, received);
    let field = cut_used(run, &IndexBox::whole(output), &whole);
    let gradient = of_fields.contains(&true).then(|| {
        if empty {
            return blank(&whole, &whole.shape(), Some(0.0));
        }
        let gradient = by_dims!(
            output,
            conv,
            conv1d_x_backward
                | conv2d_x_backward
                | conv3d_x_backward(field.clone(), weight.clone(), cotangent.clone())
        );
        let gradient = row_major(gradient);
        if gradient.shape() == whole.shape() {
            return gradient;
        }
        // Cells after the last window are in no window, so their gradient is zero.
        let used = IndexBox::whole(&gradient.shape());
        paste(blank(&whole, &whole.shape(), Some(0.0)), &used, gradient)
    });
    let exchange = run.exchange.clone().map(Exchange::reversed);
    let travelling = match (&gradient, &exchange) {
        (Some(gradient), Some(exchange)) => Some(exchange.send_all(gradient)?),
        _ => None,
    };
    travelling.iter().for_each(Boxes::in_background);
    let weights = of_parameters[0].then(|| {
        if empty {
            return blank(&weight, &weight.shape(), Some(0.0));
        }
        by_dims!(
            output,
            conv,
            conv1d_weight_backward
                | conv2d_weight_backward
                | conv3d_weight_backward(field, weight.clone(), cotangent.clone())
        )
    });
    let bias = of_parameters[1].then(|| sum_of_channels(cotangent, output));
    let input = match (gradient, &exchange, travelling) {
        (Some(gradient), Some(exchange), Some(boxes)) => {
            Some(exchange.assemble(gradient, boxes.finish()?))
        }
        (gradient, ..) => gradient,
    };
    let mut gradients = split(input, &fields);
    gradients.extend([weights, bias]);
    Ok(gradients)
}

/// Concatenates tensors along channels.
fn joined(fields: &[DispatchTensor]) -> DispatchTensor {
    match fields {
        [field] => field.clone(),
        fields => cut_out(fields, &IndexBox::whole(&joint_shape(fields))),
    }
}

/// Box of a field of this shape that the windows of some results reach.
fn used(run: &ConvRun, results: &IndexBox, field: &[usize]) -> IndexBox {
    let mut cells = IndexBox::whole(field).ranges().to_vec();
    let missing = 5 - cells.len();
    for (dim, cells) in cells.iter_mut().enumerate().skip(2) {
        let (spatial, results) = (dim - 2 + missing, &results.ranges()[dim]);
        let last = results.end.saturating_sub(1) * run.conv.stride[spatial];
        let end = cells.end.min(last + run.conv.span(spatial));
        *cells = results.start * run.conv.stride[spatial]..end;
    }
    IndexBox::new(cells)
}

/// Cuts the field to the box that the windows of some results reach, without cells after the last
/// window.
fn cut_used(run: &ConvRun, results: &IndexBox, field: &DispatchTensor) -> DispatchTensor {
    let shape = field.shape();
    let cells = used(run, results, &shape);
    if cells.shape()[..] == shape[..] {
        return field.clone();
    }
    cut(field, &cells)
}

/// Gradient of the bias: the sum of each channel of the cotangent.
pub(super) fn sum_of_channels(cotangent: DispatchTensor, shape: &[usize]) -> DispatchTensor {
    let [batch, channels] = [shape[0], shape[1]];
    if shape.contains(&0) {
        return blank(&cotangent, &[channels], Some(0.0));
    }
    let cells = shape[2..].iter().product();
    // Rounded once: the sum of one sample may exceed the total.
    let dtype = cotangent.dtype();
    let cotangent = in_dtype(cotangent, wider(dtype));
    let flat = Dispatch::float_reshape(cotangent, Shape::from([batch, channels, cells]));
    let sum = Dispatch::float_sum_dim(Dispatch::float_sum_dim(flat, 2), 0);
    in_dtype(Dispatch::float_reshape(sum, Shape::from([channels])), dtype)
}
