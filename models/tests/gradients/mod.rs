//! Gradients of sharded parameters, compared with those of one device.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor, TensorData};
use halocline_core::{ParamShard, ShardTensor, param_shards};

/// Tensors by path.
pub(crate) type Named = Vec<(String, TensorData)>;

/// The gradients of all parameters, gathered.
pub(crate) fn whole_gradients<M: Module>(model: &M, gradients: &Gradients) -> Named {
    struct Whole<'a> {
        gradients: &'a Gradients,
        shards: BTreeMap<String, ParamShard>,
        path: Vec<String>,
        found: Named,
    }

    impl ModuleVisitor for Whole<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let path = self.path.join(".");
            let gradient = param.base().grad(self.gradients).expect("a gradient");
            let whole = match self.shards.get(&path) {
                None => gradient,
                Some(shard) => {
                    let (layout, mesh) = (shard.layout().clone(), shard.mesh().clone());
                    let gradient = ShardTensor::from_parts(gradient, layout, mesh);
                    gradient.full_tensor()
                }
            };
            self.found.push((path, whole.into_data()));
        }
    }

    let mut whole = Whole {
        gradients,
        shards: param_shards(model),
        path: Vec::new(),
        found: Vec::new(),
    };
    model.visit(&mut whole);
    whole.found
}

/// The largest difference of gradients, over the largest gradient, and its path.
pub(crate) fn worst(found: &Named, expected: &Named) -> (f32, String) {
    assert_eq!(found.len(), expected.len());
    let values = |data: &TensorData| data.iter::<f32>().collect::<Vec<_>>();
    let largest = |data: &TensorData| {
        values(data)
            .iter()
            .fold(0.0, |max: f32, x| max.max(x.abs()))
    };
    let scale = (expected.iter().map(|(_, data)| largest(data))).fold(0.0, f32::max);
    let mut worst = (0.0, String::new());
    for ((path, found), (_, expected)) in found.iter().zip(expected) {
        assert_eq!(found.shape(), expected.shape(), "{path}");
        for (a, b) in values(found).iter().zip(values(expected)) {
            let off = (a - b).abs() / scale;
            if off > worst.0 || off.is_nan() {
                worst = (off, path.clone());
            }
        }
    }
    worst
}
