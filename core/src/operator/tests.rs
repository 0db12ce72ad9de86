//! Tests of the order of the backward pass.

use super::*;
use burn::tensor::Device;
use std::sync::Mutex;

/// Identity that logs its backward pass.
#[derive(Debug)]
struct Logged(&'static str, Arc<Mutex<Vec<&'static str>>>);

impl Operator for Logged {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [x] = one(inputs);
        Ok((x, ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        self.1.lock().unwrap().push(self.0);
        Ok(vec![Some(pass.cotangent)])
    }
}

#[test]
fn parameters_are_finished_when_their_layer_is() {
    let log = Arc::<Mutex<Vec<_>>>::default();
    let logged = |name| Logged(name, log.clone());
    let leaf = || Tensor::<1>::ones([2], &Device::default().autodiff()).require_grad();
    let layer = |x: Tensor<1>, [parameter, between]: [&'static str; 2]| {
        let (weight, beside) = (leaf().into_dispatch(), Some(x.clone().into_dispatch()));
        let y = x * Tensor::from_dispatch(apply_beside(logged(parameter), weight, beside));
        Tensor::from_dispatch(apply(logged(between), [y.into_dispatch()]))
    };
    let y = layer(layer(leaf(), ["first", "y"]), ["second", "z"]);
    drop(y.sum().backward());
    assert_eq!(*log.lock().unwrap(), ["z", "second", "y", "first"]);
}
