//! Operators on golden cases: inputs, parameters and attributes, with the result and the gradients that one device
//! computed.

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

/// An operator of the registry.
#[derive(Debug)]
pub struct Golden {
    /// The name, by which files of cases begin.
    pub name: &'static str,
    /// The method that runs it, or the function if there is none; empty for a case of several operators.
    pub method: &'static str,
    /// PyTorch's function of the same semantics.
    pub pytorch: &'static str,
    /// The dims that may be sharded.
    pub sharded: Dims,
    /// What travels in the forward pass, and in the backward pass for gradients of inputs.
    pub travels: [&'static str; 2],
    /// burn's modules that run it.
    pub modules: &'static str,
    /// Applies it.
    pub run: fn(&Case) -> Result<Box<dyn Output>>,
}

/// A name without a number of dims, such as `2d`, at its end.
const fn without_dims(name: &'static str) -> &'static str {
    let (start, end) = name.split_at(name.len() - 2);
    match end.as_bytes() {
        b"1d" | b"2d" | b"3d" => start,
        _ => name,
    }
}

/// The error of a case whose input has another number of dims than its operator takes.
pub(crate) fn no_case(dims: usize) -> Error {
    Error::other(format!("an input of {dims} dims"))
}

/// Gradients of inputs and parameters, by name; `None` for one that has none.
pub type NamedGradients = Vec<(String, Option<TensorData>)>;

impl Golden {
    /// An operator that runs so: PyTorch's function of the same name, and a method of this name without a number of dims at
    /// its end, of which all dims may be sharded, and that sends nothing.
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

    /// This operator with a method of another name.
    #[must_use]
    pub const fn with_method(self, method: &'static str) -> Self {
        Self { method, ..self }
    }

    /// This operator as PyTorch calls it.
    #[must_use]
    pub const fn with_pytorch(self, pytorch: &'static str) -> Self {
        Self { pytorch, ..self }
    }

    /// This operator with fewer dims that may be sharded.
    #[must_use]
    pub const fn with_sharded(self, sharded: Dims) -> Self {
        Self { sharded, ..self }
    }

    /// This operator with what travels in the forward pass, and in the backward pass.
    #[must_use]
    pub const fn with_travels(self, travels: [&'static str; 2]) -> Self {
        Self { travels, ..self }
    }

    /// This operator with burn's modules that run it.
    #[must_use]
    pub const fn with_modules(self, modules: &'static str) -> Self {
        Self { modules, ..self }
    }

    /// The shardings that the operator permits for these arguments, over these numbers of ranks.
    pub fn shardings(&self, arguments: &Arguments, ranks: &[usize]) -> Vec<Sharding> {
        let (shape, dims) = self.sharded.of(arguments);
        let most = ranks.iter().copied().max().unwrap_or(1);
        let mut found = shardings(&shape, &dims, most);
        found.retain(|sharding| ranks.contains(&sharding.ranks()));
        found
    }

    /// Applies the operator to shards and runs its backward pass with a cotangent of the result's shape: the result,
    /// and the gradients of inputs and parameters by name, `None` for one that has none.
    ///
    /// # Errors
    /// Those of the operator; a sharding that does not fit.
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

    /// Applies the operator. An attribute, input or parameter that it did not ask for is an error, so that none is ignored.
    fn apply(&self, case: &Case) -> Result<Box<dyn Output>> {
        let y = (self.run)(case)?;
        case.attributes.require_honoured(self.name)?;
        case.require_read(self.name)?;
        Ok(y)
    }

    /// The bytes of the messages that this rank sends when it applies the operator to shards, and in its backward pass;
    /// without checks and metadata.
    ///
    /// # Errors
    /// Those of the operator; a sharding that does not fit.
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

/// The tensors and options that an operator is applied to.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    /// The options.
    pub attributes: Attributes,
    /// Inputs, which are sharded, by name. Those of integers have no gradients.
    pub inputs: Vec<(String, TensorData)>,
    /// Parameters, which every rank holds alike, by name.
    pub parameters: HashMap<String, TensorData>,
}

impl Arguments {
    /// These arguments with floats of another number type.
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

    /// The shapes of the inputs.
    pub fn shapes(&self) -> Vec<Vec<usize>> {
        let inputs = self.inputs.iter();
        inputs.map(|(_, data)| data.shape().to_vec()).collect()
    }
}

/// Arguments on one rank: inputs on shards, parameters as leaves of this rank.
pub struct Case<'a> {
    /// The options of the operator.
    pub attributes: Options<'a>,
    mesh: DeviceMesh,
    inputs: Vec<(Box<dyn Any>, usize)>,
    /// The inputs and parameters that were asked for.
    read: RefCell<HashSet<String>>,
    parameters: &'a HashMap<String, TensorData>,
    /// How to find the gradient of every leaf, by its name.
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
            dims => Err(halocline_core::Error::other(format!("an input of {dims} dims"))),
        }
    };
}
pub(crate) use with_dims;

impl<'a> Case<'a> {
    /// Arguments on a mesh. `sharding_of` is given the number of an input and of its dims.
    ///
    /// # Errors
    /// A sharding that does not fit, inputs without dims or of more than six.
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

    /// The shard of this rank of a tensor that all ranks hold alike.
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

    /// The number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// The number of dims of the first input.
    pub fn dims(&self) -> usize {
        self.inputs[0].1
    }

    /// An input of floats.
    ///
    /// # Errors
    /// There is none, or it has another number of dims.
    pub fn input<const D: usize>(&self, input: usize) -> Result<ShardTensor<D>> {
        self.tensor(input)
    }

    /// An input of integers.
    ///
    /// # Errors
    /// There is none, or it has another number of dims.
    pub fn indices<const D: usize>(&self, input: usize) -> Result<ShardTensor<D, Int>> {
        self.tensor(input)
    }

    fn tensor<const D: usize, K: Basic + 'static>(
        &self,
        input: usize,
    ) -> Result<ShardTensor<D, K>> {
        self.read.borrow_mut().insert(format!("input {input}"));
        let tensor = self
            .inputs
            .get(input)
            .and_then(|(tensor, _)| tensor.downcast_ref());
        let tensor: Option<&ShardTensor<D, K>> = tensor;
        tensor
            .cloned()
            .ok_or_else(|| Error::other(format!("no input {input} of {D} dims")))
    }

    /// A parameter, if the case has it.
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

    /// A parameter as an operand, if the case has it.
    pub fn operand<const D: usize>(&self, name: &str) -> Option<Operand<D>> {
        self.parameter(name).map(Operand::from)
    }

    /// A parameter.
    ///
    /// # Errors
    /// The case has none of this name.
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

    /// The gradients of inputs and parameters, by name, after a backward pass; `None` for one that has none.
    fn gradients(&self, gradients: &Gradients) -> NamedGradients {
        let leaves = self.leaves.borrow();
        let found = leaves.iter();
        found
            .map(|(name, gradient)| (name.clone(), gradient(gradients)))
            .collect()
    }
}

/// The result of an operator, of any number of dims.
pub trait Output {
    /// The global shape.
    fn shape(&self) -> Vec<usize>;

    /// The whole result, and the gradients of a cotangent.
    ///
    /// # Errors
    /// A cotangent of another shape; a failure of communication.
    fn backward(self: Box<Self>, cotangent: TensorData) -> Result<(TensorData, Gradients)>;
}

/// Numbers as an array, one for each dim.
pub(crate) fn array<const D: usize>(numbers: &[usize]) -> Result<[usize; D]> {
    let array = numbers.try_into();
    array.map_err(|_| Error::other(format!("{numbers:?} for {D} dims")))
}

/// A result for the registry.
pub(crate) fn output<const D: usize>(result: Result<ShardTensor<D>>) -> Result<Box<dyn Output>>
where
    ShardTensor<D>: Output,
{
    result.map(|y| Box::new(y) as Box<dyn Output>)
}

/// A result for the registry whose `dims`, of one cell each, are dropped where the case says `keepdim` false. One of them stays
/// if there is no other.
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

/// A result that has no gradients, such as indices, for the registry.
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
