//! Compares convolutions with burn's own, over random shapes, parameters and views.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Device, Distribution, Shape, Tensor, module};
use halocline_core::Boundary;
use halocline_core::ops::{BackwardPass, Operator};
use proptest::prelude::*;
use proptest::test_runner::Config;

use super::engine::geometry::{Conv, three};
use super::run::ConvRun;
use super::{ConvOptions, assembled};
use crate::prelude::*;
use crate::testing::difference;

/// Layout of the input in memory.
#[derive(Clone, Copy, Debug)]
enum View {
    Dense,
    Transposed,
    Sliced,
    Flipped,
    Expanded,
}

#[derive(Clone, Debug)]
struct Case<const N: usize> {
    batch: usize,
    groups: usize,
    inputs: usize,
    outputs: usize,
    cells: [usize; N],
    kernel: [usize; N],
    stride: [usize; N],
    dilation: [usize; N],
    padding: [usize; N],
    biased: bool,
    view: View,
}

fn case<const N: usize>(cells: usize) -> impl Strategy<Value = Case<N>> {
    let channels = (1..=3_usize, 1..=4_usize, 1..=3_usize, 1..=9_usize);
    let dims = move |low: usize, high: usize| prop::collection::vec(low..=high, N);
    let windows = (dims(1, 5), dims(1, 3), dims(1, 3), dims(0, 4));
    let view = prop_oneof![
        Just(View::Dense),
        Just(View::Transposed),
        Just(View::Sliced),
        Just(View::Flipped),
        Just(View::Expanded)
    ];
    (channels, dims(1, cells), windows, any::<bool>(), view).prop_filter_map(
        "no window fits",
        |((batch, groups, inputs, outputs), cells, windows, biased, view)| {
            let all = |values: Vec<usize>| -> [usize; N] { values.try_into().unwrap() };
            let (kernel, stride, dilation, padding) = windows;
            let case = Case {
                batch,
                groups,
                inputs,
                outputs,
                cells: all(cells),
                kernel: all(kernel),
                stride: all(stride),
                dilation: all(dilation),
                padding: all(padding),
                biased,
                view,
            };
            let fits = (0..N).all(|dim| case.cells[dim] + 2 * case.padding[dim] >= case.span(dim));
            fits.then_some(case)
        },
    )
}

impl<const N: usize> Case<N> {
    /// Number of cells from the first to the last element of the kernel, in a dim.
    fn span(&self, dim: usize) -> usize {
        (self.kernel[dim] - 1) * self.dilation[dim] + 1
    }

    fn leaves_cells_over(&self) -> bool {
        (0..N).any(|dim| {
            let after_first = self.cells[dim] + 2 * self.padding[dim] - self.span(dim);
            !after_first.is_multiple_of(self.stride[dim])
        })
    }

    /// The result and the gradients of input, weight and bias are those of burn.
    fn agrees<const D: usize>(
        &self,
        burns: impl Fn(
            Tensor<D>,
            Tensor<D>,
            Option<Tensor<1>>,
            burn::tensor::ops::ConvOptions<N>,
        ) -> Tensor<D>,
    ) -> Result<(), TestCaseError> {
        // In double precision, so that cancellation in sums does not matter.
        let device = burn::tensor::Device::default().autodiff();
        let device = (&device, DType::F64);
        let random = |shape: Vec<usize>| {
            Tensor::<D>::random(Shape::from(shape), Distribution::Uniform(-1.0, 1.0), device)
        };
        let mut stored = vec![self.batch, self.groups * self.inputs];
        stored.extend(self.cells);
        match self.view {
            View::Dense | View::Flipped => {}
            View::Transposed => stored.swap(1, D - 1),
            View::Sliced => stored.iter_mut().for_each(|size| *size += 2),
            View::Expanded => stored[0] = 1,
        }
        let mut shape = vec![self.groups * self.outputs, self.inputs];
        shape.extend(self.kernel);
        let (x, weight) = (random(stored), random(shape));
        let bias = self.biased.then(|| {
            let channels = Tensor::<1>::ones([self.groups * self.outputs], device);
            channels.cumsum(0).sin()
        });
        let leaves = |x: &Tensor<D>| {
            let detached = |tensor: &Tensor<D>| tensor.clone().detach().require_grad();
            let bias = bias.clone().map(|bias| bias.detach().require_grad());
            (detached(x), detached(&weight), bias)
        };
        let viewed = |x: Tensor<D>| match self.view {
            View::Dense => x,
            View::Transposed => x.swap_dims(1, D - 1),
            View::Sliced => {
                let inner = x.dims().map(|size| 1..size - 1);
                x.slice(inner)
            }
            View::Flipped => x.flip(std::array::from_fn::<_, D, _>(|dim| dim as isize)),
            View::Expanded => {
                let mut shape = x.dims();
                shape[0] = self.batch;
                x.expand(shape)
            }
        };
        let cotangent = |y: &Tensor<D>| {
            let size: usize = y.dims().iter().product();
            let cells = Tensor::<1>::ones([size], device);
            cells
                .cumsum(0)
                .mul_scalar(0.7)
                .cos()
                .add_scalar(0.5)
                .reshape(y.dims())
        };
        let outcome =
            |y: Tensor<D>, (x, weight, bias): (Tensor<D>, Tensor<D>, Option<Tensor<1>>)| {
                let gradients = (y.clone() * cotangent(&y)).sum().backward();
                let mut all = vec![
                    y.into_data(),
                    x.grad(&gradients).unwrap().into_data(),
                    weight.grad(&gradients).unwrap().into_data(),
                ];
                all.extend(bias.map(|bias| bias.grad(&gradients).unwrap().into_data()));
                all
            };
        let ours = leaves(&x);
        let options = ConvOptions {
            stride: self.stride,
            dilation: self.dilation,
            padding: self
                .padding
                .map(|width| Padding::new(width, Boundary::Zeros)),
            groups: self.groups,
        };
        let y = viewed(ours.0.clone()).conv(
            ours.1.clone(),
            ours.2.clone().map(Operand::from),
            &options,
        );
        let theirs = leaves(&x);
        let options = burn::tensor::ops::ConvOptions::new(
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        );
        let burns = burns(
            viewed(theirs.0.clone()),
            theirs.1.clone(),
            theirs.2.clone(),
            options,
        );
        let names = [
            "y",
            "gradient of x",
            "gradient of the weight",
            "gradient of the bias",
        ];
        let pairs = outcome(y, ours).into_iter().zip(outcome(burns, theirs));
        for (name, (found, expected)) in names.into_iter().zip(pairs) {
            // burn 0.22.1 does not cut the gradient of grouped weights if there are cells after the
            // last window; the engine's own tests cover these.
            if name == "gradient of the weight" && self.groups > 1 && self.leaves_cells_over() {
                continue;
            }
            let error = difference(&found, &expected);
            prop_assert!(error < 1e-10, "{name} is {error} off");
        }
        Ok(())
    }

    /// Our kernels and a backend's own operators on the assembled field give the same results, also
    /// with cells after the last window.
    fn is_assembled<const D: usize>(&self) -> Result<(), TestCaseError> {
        let device = Device::flex();
        let random = |shape: &[usize]| {
            let shape = Shape::from(shape.to_vec());
            let uniform = Distribution::Uniform(-1.0, 1.0);
            Tensor::<D>::random(shape, uniform, (&device, DType::F64)).into_dispatch()
        };
        let shape = |ends: [usize; 2], dims: [usize; N]| [&ends[..], &dims].concat();
        let cells: [usize; N] = std::array::from_fn(|dim| self.cells[dim].max(self.span(dim)));
        let outputs: [usize; N] =
            std::array::from_fn(|dim| (cells[dim] - self.span(dim)) / self.stride[dim] + 1);
        let channels = [self.groups * self.inputs, self.groups * self.outputs];
        let run = ConvRun {
            conv: Conv {
                groups: self.groups,
                inputs: self.inputs,
                outputs: self.outputs,
                kernel: three(&self.kernel),
                stride: three(&self.stride),
                dilation: three(&self.dilation),
            },
            fields: 1,
            exchange: None,
            output: shape([self.batch, channels[1]], outputs),
        };
        let x = random(&shape([self.batch, channels[0]], cells));
        let weight = random(&shape([channels[1], self.inputs], self.kernel));
        let bias = Tensor::<1>::ones([channels[1]], (&device, DType::F64));
        let bias = bias.cumsum(0).sin().into_dispatch();
        let cotangent = random(&run.output);
        let pass = |saved| BackwardPass {
            inputs: [&x, &weight].map(|input| Some(input.clone())).into(),
            saved,
            cotangent: cotangent.clone(),
            wanted: &[true; 3],
        };
        let inputs = || [&x, &weight, &bias].map(Clone::clone).to_vec();
        let (y, saved) = run.forward(inputs()).unwrap();
        let gradients = run.backward(pass(&saved)).unwrap();
        let ours = [y].into_iter().chain(gradients.into_iter().flatten());
        let (y, saved) = assembled::forward(&run, inputs()).unwrap();
        let gradients = assembled::backward(&run, pass(&saved)).unwrap();
        let theirs = [y].into_iter().chain(gradients.into_iter().flatten());
        for (ours, theirs) in ours.zip(theirs) {
            prop_assert_eq!(ours.shape(), theirs.shape());
            let [ours, theirs] =
                [ours, theirs].map(|tensor| Tensor::<1>::from_dispatch(tensor).into_data());
            let error = difference(&ours, &theirs);
            prop_assert!(error < 1e-10, "{error} off");
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(Config { cases: 256, ..Config::default() })]

    #[test]
    fn conv1d_agrees_with_burn(case in case::<1>(40)) {
        case.agrees::<3>(module::conv1d)?;
    }

    #[test]
    fn conv2d_agrees_with_burn(case in case::<2>(40)) {
        case.agrees::<4>(module::conv2d)?;
    }

    #[test]
    fn conv3d_agrees_with_burn(case in case::<3>(12)) {
        case.agrees::<5>(module::conv3d)?;
    }

    #[test]
    fn kernels_agree_with_the_assembled_convolution(
        one in case::<1>(40), two in case::<2>(20), three in case::<3>(8),
    ) {
        one.is_assembled::<3>()?;
        two.is_assembled::<4>()?;
        three.is_assembled::<5>()?;
    }
}
