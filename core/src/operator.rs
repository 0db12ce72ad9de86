//! Operators with their own adjoint, as nodes of burn's autodiff graph.
//!
//! An [`Operator`] runs a kernel or communicates. It implements its two passes on tensors without
//! autodiff; [`apply`] adds it to the graph as one node, for any backend.

use std::any::Any;
use std::fmt::{self, Debug};
use std::marker::PhantomData;
use std::sync::Arc;

#[cfg(feature = "cube")]
use burn::backend::Cube;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchAutodiffContext, DispatchKindConversion, DispatchTensor,
    Flex, TensorMetadata, backend_extension,
};
use burn::tensor::Tensor;
use burn::tensor::kind::Kind;

use crate::dispatch::{from_dispatch, kind_of, to_dispatch};
use crate::{OrRaise, Result, module_scope, trace};

/// Operator on one to four tensors, with its adjoint. Both passes take and return tensors without
/// autodiff. The backward pass runs only for floats.
///
/// # Example
/// ```
/// use burn::backend::{Dispatch, DispatchTensor, ops::FloatTensorOps};
/// use burn::tensor::{Device, Tensor};
/// use halocline_core::{Result, ops::{BackwardPass, Operator, apply}};
///
/// #[derive(Debug)]
/// struct Double;
///
/// impl Operator for Double {
///     type Saved = ();
///
///     fn keeps(&self, _: usize) -> bool {
///         false
///     }
///
///     fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
///         let x = inputs.remove(0);
///         Ok((Dispatch::float_add(x.clone(), x), ()))
///     }
///
///     fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
///         let gradient = pass.cotangent;
///         Ok(vec![Some(Dispatch::float_add(gradient.clone(), gradient))])
///     }
/// }
///
/// let x = Tensor::<1>::ones([3], &Device::default().autodiff()).require_grad();
/// let y = Tensor::<1>::from_dispatch(apply(Double, [x.clone().into_dispatch()]));
/// let gradient = x.grad(&y.sum().backward()).expect("a gradient");
/// gradient.into_data().assert_eq(&[2.0_f32; 3].into(), false);
/// ```
pub trait Operator: Debug + Send + Sync + 'static {
    /// State that the forward pass saves for the backward pass, in addition to inputs.
    type Saved: Send + Sync + 'static;

    /// The names of the two passes on timelines; `None` for an operator that appears there through
    /// its messages.
    fn names(&self) -> Option<[&'static str; 2]> {
        None
    }

    /// Whether the backward pass reads an input.
    fn keeps(&self, input: usize) -> bool;

    /// Whether the backward pass recomputes the result instead of keeping it.
    fn recompute(&self) -> Recompute {
        Recompute::Never
    }

    /// Recomputes the result.
    ///
    /// # Errors
    /// The errors of [`forward`](Self::forward).
    fn again(&self, inputs: Vec<DispatchTensor>) -> Result<DispatchTensor> {
        Ok(self.forward(inputs)?.0)
    }

    /// Computes the result, and the state that the backward pass needs in addition to inputs.
    ///
    /// # Errors
    /// Communication or the kernel fails.
    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Self::Saved)>;

    /// Computes the gradients of the inputs, by position. `None` adds nothing; gradients that are
    /// not [wanted](BackwardPass::wanted) are ignored.
    ///
    /// # Errors
    /// Communication or the kernel fails.
    fn backward(&self, pass: BackwardPass<'_, Self::Saved>) -> Result<Vec<Option<DispatchTensor>>>;
}

/// Whether and when a backward pass recomputes the result of an operator instead of keeping it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Never: for operators that take time or communicate.
    Never,
    /// With burn's gradient checkpointing: for operators that take little time.
    WithCheckpointing,
    /// Always: for results that are larger than the input.
    Always,
}

/// Arguments of an operator's backward pass.
#[derive(Debug)]
pub struct BackwardPass<'a, S: ?Sized> {
    /// The inputs that the operator [keeps](Operator::keeps), by position.
    pub inputs: Vec<Option<DispatchTensor>>,
    /// State that the forward pass saved.
    pub saved: &'a S,
    /// The gradient of the result.
    pub cotangent: DispatchTensor,
    /// The inputs whose gradients are wanted.
    pub wanted: &'a [bool],
}

impl<S: ?Sized> BackwardPass<'_, S> {
    /// Takes an input that the operator [keeps](Operator::keeps).
    ///
    /// # Panics
    /// Panics if the operator does not keep it, or if it was taken before.
    pub fn take_input(&mut self, position: usize) -> DispatchTensor {
        let input = self.inputs.get_mut(position).and_then(Option::take);
        input.expect("an input that the operator keeps, taken once")
    }
}

/// Applies an operator to one to four tensors. Integers and booleans have no gradients: for them
/// the forward pass runs directly, without a node in the graph. See the example of [`Operator`].
///
/// # Panics
/// Panics for any other number of inputs; [raises](crate::Error::raise) the operator's errors.
pub fn apply<O: Operator, const N: usize>(
    operator: O,
    inputs: [DispatchTensor; N],
) -> DispatchTensor {
    let has_gradients = |input: &DispatchTensor| kind_of(input.dtype()) == Kind::Float;
    if !inputs.iter().any(has_gradients) {
        return apply_plain(&operator, inputs);
    }
    let operator = Arc::new(Node::new(operator, N));
    let mut inputs = inputs.into_iter();
    let mut next = || inputs.next().expect("counted");
    match N {
        1 => Dispatch::node1(next(), operator),
        2 => Dispatch::node2(next(), next(), operator),
        3 => Dispatch::node3(next(), next(), next(), operator),
        4 => Dispatch::node4(next(), next(), next(), next(), operator),
        _ => panic!("{operator:?}: {N} inputs, expected 1 to 4"),
    }
}

/// Applies an operator to a parameter that is next combined with `other`. burn orders the backward
/// pass by node depth, and parameters are the deepest nodes: without `other`, the operator's
/// backward pass would run at the very end, and the gradients of all parameters would wait until
/// then.
pub(crate) fn apply_beside<O: Operator>(
    operator: O,
    parameter: DispatchTensor,
    other: Option<DispatchTensor>,
) -> DispatchTensor {
    match other.filter(is_tracked) {
        None => apply(operator, [parameter]),
        Some(other) => Dispatch::node2(parameter, other, Arc::new(Node::new(operator, 1))),
    }
}

/// Whether the autodiff graph has a node for a tensor.
pub(crate) fn is_tracked(tensor: &DispatchTensor) -> bool {
    // `Tensor<1>` merely carries the data.
    kind_of(tensor.dtype()) == Kind::Float
        && Tensor::<1>::from_dispatch(tensor.clone()).is_tracked()
}

/// Applies an operator to tensors without gradients. The result has the device of the first tensor,
/// with its autodiff setting.
fn apply_plain<O: Operator, const N: usize>(
    operator: &O,
    inputs: [DispatchTensor; N],
) -> DispatchTensor {
    let _span = operator.names().map(|[name, _]| trace::span(name));
    let autodiff = inputs[0].autodiff;
    let plain = inputs.map(|DispatchTensor { kind, .. }| DispatchTensor {
        kind,
        autodiff: DispatchAutodiffContext::Disabled,
    });
    match operator.forward(plain.into()) {
        Ok((output, _)) => DispatchTensor { autodiff, ..output },
        Err(error) => error.raise(),
    }
}

/// Returns the input of an operator with one input.
pub(crate) fn one(inputs: Vec<DispatchTensor>) -> [DispatchTensor; 1] {
    inputs.try_into().expect("an operator of one input")
}

/// Type-erased [`Operator`].
trait Passes: Debug + Send + Sync {
    /// The number of inputs that the operator reads. The others only determine its place in the
    /// graph.
    fn reads(&self) -> usize;

    fn names(&self) -> Option<[&'static str; 2]>;

    fn keeps(&self, input: usize) -> bool;

    fn recompute(&self) -> Recompute;

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Arc<Saved>)>;

    fn again(&self, inputs: Vec<DispatchTensor>) -> Result<DispatchTensor>;

    fn backward(&self, pass: BackwardPass<'_, Saved>) -> Result<Vec<Option<DispatchTensor>>>;
}

type Saved = dyn Any + Send + Sync;

struct Node<O> {
    operator: O,
    reads: usize,
    /// The module that applied it.
    module: Option<Arc<str>>,
}

impl<O> Node<O> {
    fn new(operator: O, reads: usize) -> Self {
        Self {
            operator,
            reads,
            module: module_scope::current(),
        }
    }
}

impl<O: Debug> Debug for Node<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.operator.fmt(f)
    }
}

impl<O: Operator> Passes for Node<O> {
    fn reads(&self) -> usize {
        self.reads
    }

    fn names(&self) -> Option<[&'static str; 2]> {
        self.operator.names()
    }

    fn keeps(&self, input: usize) -> bool {
        input < self.reads && self.operator.keeps(input)
    }

    fn recompute(&self) -> Recompute {
        self.operator.recompute()
    }

    fn again(&self, inputs: Vec<DispatchTensor>) -> Result<DispatchTensor> {
        let _module = module_scope::enter(self.module.clone());
        self.operator.again(inputs)
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Arc<Saved>)> {
        let (output, saved) = self.operator.forward(inputs)?;
        Ok((output, Arc::new(saved)))
    }

    fn backward(&self, pass: BackwardPass<'_, Saved>) -> Result<Vec<Option<DispatchTensor>>> {
        let BackwardPass {
            inputs,
            saved,
            cotangent,
            wanted,
        } = pass;
        let saved = saved.downcast_ref().expect("what this operator saved");
        let _module = module_scope::enter(self.module.clone());
        self.operator.backward(BackwardPass {
            inputs,
            saved,
            cotangent,
            wanted,
        })
    }
}

/// Declares the backend extension, with one method per number of inputs.
macro_rules! node_backend {
    ($($node:ident ($($input:ident),+)),+) => {
        /// Operators as nodes of a graph.
        #[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
        trait NodeBackend: Backend {
            $(fn $node($($input: FloatTensor<Self>),+, operator: Arc<dyn Passes>) -> FloatTensor<Self>;)+
        }

        impl NodeBackend for Flex {
            $(fn $node($($input: FloatTensor<Self>),+, operator: Arc<dyn Passes>) -> FloatTensor<Self> {
                forward::<Self>([$($input),+], &*operator).0
            })+
        }

        #[cfg(feature = "cube")]
        impl NodeBackend for Cube {
            $(fn $node($($input: FloatTensor<Self>),+, operator: Arc<dyn Passes>) -> FloatTensor<Self> {
                forward::<Self>([$($input),+], &*operator).0
            })+
        }

        impl<B: Plain, C: CheckpointStrategy> NodeBackend for Autodiff<B, C> {
            $(fn $node($($input: FloatTensor<Self>),+, operator: Arc<dyn Passes>) -> FloatTensor<Self> {
                match operator.recompute() {
                    // Regardless of the strategy of the graph.
                    Recompute::Always => record::<B, BalancedCheckpointing, _>([$($input),+], operator),
                    _ => record::<B, C, _>([$($input),+], operator),
                }
            })+
        }
    };
}

node_backend!(node1(a), node2(a, b), node3(a, b, c), node4(a, b, c, d));

/// Backend without autodiff whose tensors [`Dispatch`] can hold.
trait Plain: Backend {
    fn wrap(tensor: FloatTensor<Self>) -> DispatchTensor;

    fn unwrap(tensor: DispatchTensor) -> Result<FloatTensor<Self>>;
}

impl<B: Backend> Plain for B
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn wrap(tensor: FloatTensor<Self>) -> DispatchTensor {
        to_dispatch::<B>(tensor)
    }

    fn unwrap(tensor: DispatchTensor) -> Result<FloatTensor<Self>> {
        from_dispatch::<B>(tensor)
    }
}

/// Runs the forward pass.
fn forward<B: Plain>(
    inputs: impl IntoIterator<Item = FloatTensor<B>>,
    operator: &dyn Passes,
) -> (FloatTensor<B>, Arc<Saved>) {
    let _span = operator.names().map(|[name, _]| trace::span(name));
    let inputs = inputs.into_iter().take(operator.reads());
    let result = operator
        .forward(inputs.map(B::wrap).collect())
        .and_then(|(output, saved)| Ok((B::unwrap(output)?, saved)));
    result.or_raise()
}

/// Runs the forward pass, and records the backward pass if a gradient is wanted.
fn record<B: Plain, C: CheckpointStrategy, const N: usize>(
    inputs: [FloatTensor<Autodiff<B, C>>; N],
    operator: Arc<dyn Passes>,
) -> FloatTensor<Autodiff<B, C>> {
    let step = Step.prepare::<C>(inputs.each_ref().map(|input| input.node()));
    let step = if operator.recompute() != Recompute::Never {
        let again = Again::<B, N> {
            operator: operator.clone(),
            inputs: inputs.each_ref().map(|input| input.id()),
            backend: PhantomData,
        };
        let step = step.memory_bound().retro_forward(again);
        step.parents(&inputs)
    } else {
        step.compute_bound()
    };
    match step.stateful() {
        OpsKind::Tracked(mut prep) => {
            let kept = std::array::from_fn(|input| {
                operator
                    .keeps(input)
                    .then(|| prep.checkpoint(&inputs[input]))
            });
            let inputs = inputs.map(|input| input.into_parts().0);
            let (output, saved) = forward::<B>(inputs, &*operator);
            let state = State {
                operator,
                kept,
                saved,
            };
            prep.finish(state, output)
        }
        OpsKind::UnTracked(prep) => {
            let inputs = inputs.map(|input| input.into_parts().0);
            prep.finish(forward::<B>(inputs, &*operator).0)
        }
    }
}

/// Recomputation of an operator's result by gradient checkpointing, in the backward pass.
#[derive(Debug)]
struct Again<B, const N: usize> {
    operator: Arc<dyn Passes>,
    inputs: [NodeId; N],
    backend: PhantomData<B>,
}

impl<B: Plain, const N: usize> RetroForward for Again<B, N> {
    fn forward(&self, states: &mut BackwardStates, node: NodeId) {
        // All states are taken, because burn counts how often each is requested.
        let inputs = self.inputs.each_ref().map(|input| states.get_state(input));
        let inputs = inputs.into_iter().take(self.operator.reads());
        let inputs = inputs.map(B::wrap).collect();
        let _span = self.operator.names().map(|[name, _]| trace::span(name));
        let output = self.operator.again(inputs);
        let output = output.and_then(B::unwrap);
        states.save::<FloatTensor<B>>(node, output.or_raise());
    }
}

#[derive(Debug)]
struct Step;

/// State of a node of the graph.
#[derive(Clone)]
struct State<const N: usize> {
    operator: Arc<dyn Passes>,
    /// The inputs that the backward pass reads.
    kept: [Option<NodeId>; N],
    saved: Arc<Saved>,
}

impl<const N: usize> Debug for State<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.operator.fmt(f)
    }
}

impl<B: Plain, const N: usize> Backward<B, N> for Step {
    type State = State<N>;

    fn backward(
        self,
        ops: Ops<State<N>, N>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let State {
            operator,
            kept,
            saved,
        } = ops.state;
        let _span = operator.names().map(|[_, name]| trace::span(name));
        let mut retrieve = |node| B::wrap(checkpointer.retrieve_node_output(node));
        let gradients = operator.backward(BackwardPass {
            inputs: kept
                .into_iter()
                .map(|node| node.map(&mut retrieve))
                .collect(),
            saved: &*saved,
            cotangent: B::wrap(grads.consume::<B>(&ops.node)),
            wanted: &ops.parents.each_ref().map(Option::is_some)[..operator.reads()],
        });
        let gradients = gradients.or_raise();
        for (node, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                let gradient = B::unwrap(gradient).or_raise();
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

#[cfg(test)]
mod tests;
