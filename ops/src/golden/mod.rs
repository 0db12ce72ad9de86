//! Registry of operators, and golden cases: arguments with results computed on one device.

mod attributes;
mod dims;

pub use attributes::{Attributes, Options};
pub use dims::Dims;

use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use burn::tensor::kind::{Basic, Float, Int};
use burn::tensor::{DType, Gradients, Tensor, TensorData};
use halocline_core::{DeviceMesh, Error, Result, ShardTensor, Traffic};

use crate::operand::Operand;
use crate::sharding::{Sharding, sharded, shardings};
use crate::testing::require_layout;

/// Registry entry of an operator.
#[derive(Debug)]
pub struct Golden {
    /// Name, with which the files of its cases begin.
    pub name: &'static str,
    /// Method that runs the operator, or the function if there is none; empty for a case that
    /// combines several operators.
    pub method: &'static str,
    /// PyTorch function with the same semantics.
    pub pytorch: &'static str,
    /// Dims that may be sharded.
    pub sharded: Dims,
    /// Data sent in the forward pass, and in the backward pass for gradients of inputs.
    pub travels: [&'static str; 2],
    /// burn modules that run the operator.
    pub modules: &'static str,
    /// Applies the operator to a case.
    pub run: fn(&Case) -> Result<Box<dyn Output>>,
}

/// Strips a suffix for the number of dims, such as `2d`.
const fn without_dims(name: &'static str) -> &'static str {
    let (start, end) = name.split_at(name.len() - 2);
    match end.as_bytes() {
        b"1d" | b"2d" | b"3d" => start,
        _ => name,
    }
}

/// Error for a case whose input has a number of dims that the operator does not take.
pub(crate) fn no_case(dims: usize) -> Error {
    Error::other(format!("an input of {dims} dims"))
}

/// Gradients of inputs and parameters by name; `None` for a tensor without a gradient.
pub type NamedGradients = Vec<(String, Option<TensorData>)>;

impl Golden {
    /// Creates an entry with defaults: PyTorch's name is the same, the method's too but without a
    /// suffix such as `2d`, all dims may be sharded, and nothing is sent.
    pub const fn new(name: &'static str, run: fn(&Case) -> Result<Box<dyn Output>>) -> Self {
        Self {
            name,
            method: without_dims(name),
            pytorch: name,
            sharded: Dims::All,
            travels: ["–", "–"],
            modules: "",
            run,
        }
    }

    /// Sets the name of the method.
    #[must_use]
    pub const fn with_method(self, method: &'static str) -> Self {
        Self { method, ..self }
    }

    /// Sets the PyTorch function.
    #[must_use]
    pub const fn with_pytorch(self, pytorch: &'static str) -> Self {
        Self { pytorch, ..self }
    }

    /// Restricts the dims that may be sharded.
    #[must_use]
    pub const fn with_sharded(self, sharded: Dims) -> Self {
        Self { sharded, ..self }
    }

    /// Describes the data sent in the forward pass and in the backward pass.
    #[must_use]
    pub const fn with_travels(self, travels: [&'static str; 2]) -> Self {
        Self { travels, ..self }
    }

    /// Sets the burn modules that run the operator.
    #[must_use]
    pub const fn with_modules(self, modules: &'static str) -> Self {
        Self { modules, ..self }
    }

    /// Lists the shardings that the operator permits for these arguments over these numbers of
    /// ranks.
    pub fn shardings(&self, arguments: &Arguments, ranks: &[usize]) -> Vec<Sharding> {
        let (shape, dims) = self.sharded.of(arguments);
        let most = ranks.iter().copied().max().unwrap_or(1);
        let mut found = shardings(&shape, &dims, most);
        found.retain(|sharding| ranks.contains(&sharding.ranks()));
        found
    }

    /// Applies the operator to shards and runs its backward pass.
    ///
    /// Returns the result and the gradients, `None` for a tensor without one.
    ///
    /// # Errors
    /// Errors of the operator; also fails if the sharding does not match the arguments.
    pub fn run_on(
        &self,
        mesh: &DeviceMesh,
        sharding: &Sharding,
        arguments: &Arguments,
        cotangent: impl FnOnce(&[usize]) -> TensorData,
    ) -> Result<(TensorData, NamedGradients)> {
        let case = self.case(mesh, sharding, arguments)?;
        let y = self.apply(&case)?;
        let cotangent = cotangent(&y.shape());
        let (value, gradients) = y.backward(cotangent)?;
        Ok((value, case.gradients(&gradients)))
    }

    fn case<'a>(
        &self,
        mesh: &DeviceMesh,
        sharding: &Sharding,
        arguments: &'a Arguments,
    ) -> Result<Case<'a>> {
        Case::new(arguments, mesh, |input, dims| {
            self.sharded.input(input, dims, sharding)
        })
    }

    /// Applies the operator. Fails if an attribute, input or parameter is never read.
    fn apply(&self, case: &Case) -> Result<Box<dyn Output>> {
        let y = (self.run)(case)?;
        case.attributes.require_honoured(self.name)?;
        case.require_read(self.name)?;
        Ok(y)
    }

    /// Bytes sent by this rank forward and backward, without checks and metadata.
    ///
    /// # Errors
    /// Errors of the operator; also fails if the sharding does not match the arguments.
    pub fn bytes_sent(
        &self,
        mesh: &DeviceMesh,
        sharding: &Sharding,
        arguments: &Arguments,
    ) -> Result<[u64; 2]> {
        let case = self.case(mesh, sharding, arguments)?;
        let counted = || {
            let stats = mesh.comm().counters().snapshot();
            let all = Traffic::ALL.into_iter();
            let all = all.filter(|traffic| *traffic != Traffic::Control);
            let counts = all.map(|traffic| {
                let backward = stats.of_backward(traffic).bytes;
                [stats.of(traffic).bytes - backward, backward]
            });
            counts.fold([0, 0], |[a, b], [c, d]| [a + c, b + d])
        };
        let before = counted();
        let y = self.apply(&case)?;
        let forward = counted()[0] - before[0];
        let ones = TensorData::ones::<f64, _>(y.shape());
        y.backward(ones.convert_dtype(arguments.inputs[0].1.dtype()))?;
        Ok([forward, counted()[1] - before[1]])
    }
}

type GradientOf = Box<dyn Fn(&Gradients) -> Option<TensorData>>;

/// Tensors and options of one application of an operator.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    /// Options of the operator.
    pub attributes: Attributes,
    /// Inputs by name, which are sharded. Integer inputs have no gradients.
    pub inputs: Vec<(String, TensorData)>,
    /// Parameters by name, which every rank holds in full.
    pub parameters: HashMap<String, TensorData>,
}

impl Arguments {
    /// Casts all float tensors to another element type.
    #[must_use]
    pub fn cast(mut self, dtype: DType) -> Self {
        let inputs = self.inputs.iter_mut().map(|(_, data)| data);
        for data in inputs.chain(self.parameters.values_mut()) {
            if data.dtype().is_float() {
                *data = data.clone().convert_dtype(dtype);
            }
        }
        self
    }

    /// Shapes of the inputs.
    pub fn shapes(&self) -> Vec<Vec<usize>> {
        let inputs = self.inputs.iter();
        inputs.map(|(_, data)| data.shape().to_vec()).collect()
    }
}

/// Arguments on one rank: inputs as shards, parameters as leaves of this rank.
pub struct Case<'a> {
    /// Options of the operator.
    pub attributes: Options<'a>,
    mesh: DeviceMesh,
    inputs: Vec<(Box<dyn Any>, usize)>,
    /// Inputs and parameters read so far.
    read: RefCell<HashSet<String>>,
    parameters: &'a HashMap<String, TensorData>,
    /// Getter for the gradient of every leaf, by name.
    leaves: RefCell<Vec<(String, GradientOf)>>,
}

/// Evaluates an expression with the number of dims as a constant.
macro_rules! with_dims {
    ($dims:expr, $d:ident => $expression:expr) => {
        $crate::golden::with_dims!(@ $dims, $d, $expression, 1 2 3 4 5 6)
    };
    (@ $dims:expr, $d:ident, $expression:expr, $($n:literal)*) => {
        match $dims {
            $($n => {
                const $d: usize = $n;
                $expression
            })*
            dims => Err($crate::golden::no_case(dims)),
        }
    };
}
pub(crate) use with_dims;

impl<'a> Case<'a> {
    /// Places arguments on a mesh. `sharding_of` receives the index of an input and its number of
    /// dims.
    ///
    /// # Errors
    /// Fails if a sharding does not match its input, and for inputs without dims or with more than
    /// six.
    fn new(
        arguments: &'a Arguments,
        mesh: &DeviceMesh,
        sharding_of: impl Fn(usize, usize) -> Sharding,
    ) -> Result<Self> {
        let mut case = Self {
            attributes: Options::new(&arguments.attributes),
            mesh: mesh.clone(),
            inputs: Vec::new(),
            parameters: &arguments.parameters,
            read: RefCell::default(),
            leaves: RefCell::default(),
        };
        for (input, (name, data)) in arguments.inputs.iter().enumerate() {
            let dims = data.shape().len();
            let sharding = sharding_of(input, dims);
            let input = if data.dtype().is_float() {
                with_dims!(dims, D => case.leaf::<D>(name, data, &sharding))?
            } else {
                with_dims!(dims, D => case.integers::<D>(data, &sharding))?
            };
            case.inputs.push((input, dims));
        }
        Ok(case)
    }

    fn integers<const D: usize>(
        &self,
        data: &TensorData,
        sharding: &Sharding,
    ) -> Result<Box<dyn Any>> {
        Ok(Box::new(self.shard::<D, Int>(data, sharding)?))
    }

    /// This rank's shard of a tensor that all ranks hold in full.
    fn shard<const D: usize, K: Basic>(
        &self,
        data: &TensorData,
        sharding: &Sharding,
    ) -> Result<ShardTensor<D, K>> {
        let device = (self.mesh.device(), data.dtype());
        let whole = Tensor::<D, K>::from_data(data.clone(), device);
        let layout = sharding.layout(&self.mesh, &whole.dims())?;
        ShardTensor::distribute(whole, &self.mesh, &layout)
    }

    fn leaf<const D: usize>(
        &self,
        name: &str,
        data: &TensorData,
        sharding: &Sharding,
    ) -> Result<Box<dyn Any>> {
        let leaf = self.shard::<D, Float>(data, sharding)?.require_grad();
        let input = leaf.clone();
        self.add_leaf(name, move |gradients| {
            let gradient = input.grad(gradients)?;
            require_layout(&gradient, &input);
            Some(gradient.full_tensor().into_data())
        });
        Ok(Box::new(leaf))
    }

    fn add_leaf(&self, name: &str, gradient: impl Fn(&Gradients) -> Option<TensorData> + 'static) {
        let gradient: GradientOf = Box::new(gradient);
        self.leaves.borrow_mut().push((name.into(), gradient));
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Number of dims of the first input.
    pub fn dims(&self) -> usize {
        self.inputs[0].1
    }

    /// Returns a float input by index.
    ///
    /// # Errors
    /// Fails if there is no such input or it has another number of dims.
    pub fn input<const D: usize>(&self, input: usize) -> Result<ShardTensor<D>> {
        self.tensor(input)
    }

    /// Returns an integer input by index.
    ///
    /// # Errors
    /// Fails if there is no such input or it has another number of dims.
    pub fn indices<const D: usize>(&self, input: usize) -> Result<ShardTensor<D, Int>> {
        self.tensor(input)
    }

    fn tensor<const D: usize, K: Basic + 'static>(
        &self,
        input: usize,
    ) -> Result<ShardTensor<D, K>> {
        self.read.borrow_mut().insert(format!("input {input}"));
        let tensor = self.inputs.get(input);
        let tensor = tensor.and_then(|(tensor, _)| tensor.downcast_ref::<ShardTensor<D, K>>());
        tensor
            .cloned()
            .ok_or_else(|| Error::other(format!("no input {input} of {D} dims")))
    }

    /// Returns a parameter as a new leaf, if the case has it.
    pub fn parameter<const D: usize>(&self, name: &str) -> Option<Tensor<D>> {
        self.read.borrow_mut().insert(name.into());
        let data = self.parameters.get(name)?.clone();
        let device = (self.mesh.device(), data.dtype());
        let leaf = Tensor::<D>::from_data(data, device).require_grad();
        let parameter = leaf.clone();
        self.add_leaf(name, move |gradients| {
            Some(parameter.grad(gradients)?.into_data())
        });
        Some(leaf)
    }

    /// Returns a parameter as an operand, if the case has it.
    pub fn operand<const D: usize>(&self, name: &str) -> Option<Operand<D>> {
        self.parameter(name).map(Operand::from)
    }

    /// Returns a required parameter.
    ///
    /// # Errors
    /// Fails if the case has no parameter of this name.
    pub fn needed<const D: usize>(&self, name: &str) -> Result<Tensor<D>> {
        self.parameter(name)
            .ok_or_else(|| Error::other(format!("no parameter {name}")))
    }

    fn require_read(&self, operator: &str) -> Result<()> {
        let read = self.read.borrow();
        let inputs = (0..self.inputs.len()).map(|input| format!("input {input}"));
        let mut all = inputs.chain(self.parameters.keys().cloned());
        match all.find(|name| !read.contains(name)) {
            None => Ok(()),
            Some(name) => Err(Error::operator(
                operator,
                format!("{name}, which is not read"),
            )),
        }
    }

    /// Gradients of inputs and parameters by name after a backward pass; `None` for a tensor
    /// without a gradient.
    fn gradients(&self, gradients: &Gradients) -> NamedGradients {
        let leaves = self.leaves.borrow();
        let found = leaves.iter();
        found
            .map(|(name, gradient)| (name.clone(), gradient(gradients)))
            .collect()
    }
}

/// Result of an operator, with any number of dims.
pub trait Output {
    /// Global shape.
    fn shape(&self) -> Vec<usize>;

    /// Runs the backward pass with a cotangent; returns the full result and the gradients.
    ///
    /// # Errors
    /// Fails for a cotangent of another shape, and if communication fails.
    fn backward(self: Box<Self>, cotangent: TensorData) -> Result<(TensorData, Gradients)>;
}

/// Converts numbers to an array with one element per dim.
pub(crate) fn array<const D: usize>(numbers: &[usize]) -> Result<[usize; D]> {
    let array = numbers.try_into();
    array.map_err(|_| Error::other(format!("{numbers:?} for {D} dims")))
}

/// Boxes a result for the registry.
pub(crate) fn output<const D: usize>(result: Result<ShardTensor<D>>) -> Result<Box<dyn Output>>
where
    ShardTensor<D>: Output,
{
    result.map(|y| Box::new(y) as Box<dyn Output>)
}

/// Boxes a result for the registry, without `dims` (of one cell each) where the case has a false
/// `keepdim`. If all dims would be dropped, one remains.
pub(crate) fn reduced(
    case: &Case,
    dims: &[usize],
    result: Result<Box<dyn Output>>,
) -> Result<Box<dyn Output>> {
    let keeps = case.attributes.number("keepdim").unwrap_or(1.0) == 1.0;
    let output = result?;
    let dims = dims.to_vec();
    Ok(if keeps {
        output
    } else {
        Box::new(Squeezed { output, dims })
    })
}

struct Squeezed {
    output: Box<dyn Output>,
    dims: Vec<usize>,
}

impl Output for Squeezed {
    fn shape(&self) -> Vec<usize> {
        let shape = self.output.shape().into_iter().enumerate();
        let kept = shape.filter(|(dim, _)| !self.dims.contains(dim));
        let kept: Vec<usize> = kept.map(|(_, size)| size).collect();
        if kept.is_empty() { vec![1] } else { kept }
    }

    fn backward(self: Box<Self>, cotangent: TensorData) -> Result<(TensorData, Gradients)> {
        let of_shape = |data: TensorData, shape: Vec<usize>| {
            let (bytes, _, dtype) = data.into_parts();
            TensorData::from_bytes(bytes, shape, dtype)
        };
        let shape = self.shape();
        let cotangent = of_shape(cotangent, self.output.shape());
        let (value, gradients) = self.output.backward(cotangent)?;
        Ok((of_shape(value, shape), gradients))
    }
}

/// Boxes a result without gradients, such as indices, for the registry.
pub(crate) fn without_gradients<const D: usize>(
    result: Result<ShardTensor<D, Int>>,
) -> Result<Box<dyn Output>> {
    result.map(|y| Box::new(WithoutGradients(y.float())) as Box<dyn Output>)
}

struct WithoutGradients<const D: usize>(ShardTensor<D>);

impl<const D: usize> Output for WithoutGradients<D> {
    fn shape(&self) -> Vec<usize> {
        self.0.dims().to_vec()
    }

    fn backward(self: Box<Self>, _: TensorData) -> Result<(TensorData, Gradients)> {
        let y = sharded(self.0);
        let nothing = Tensor::<1>::zeros([1], &y.device().autodiff()).require_grad();
        let value = y.full_tensor().into_data();
        Ok((value, nothing.sum().backward()))
    }
}
