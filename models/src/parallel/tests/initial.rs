//! Parameters that are initialised shard by shard.

use std::collections::BTreeMap;

use burn::module::{Module, Param, ParamId};
use burn::nn::conv::{Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose2dConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::{Device, Tensor, TensorData};
use halocline_core::paths::{PathVisitor, visit_paths};
use halocline_core::{DryMesh, Launcher, MeshShape, unshard};

use super::mesh;
use crate::parallel::initial::fans;
use crate::parallel::{Plan, Store, Style, init_parallel_with, resolve};

#[derive(Module, Debug)]
struct Model {
    words: Embedding,
    conv: Conv2d,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
}

fn model(device: &Device) -> Model {
    Model {
        words: EmbeddingConfig::new(11, 6).init(device),
        conv: Conv2dConfig::new([5, 7], [3, 2]).init(device),
        up: LinearConfig::new(6, 10).init(device),
        down: LinearConfig::new(10, 6).init(device),
        norm: LayerNormConfig::new(6).init(device),
    }
}

/// Initializers of all parameters but those of the norm and the bias of `down`, which burn draws.
fn initializer(path: &str, shape: &[usize]) -> Option<Initializer> {
    let kaiming = Initializer::KaimingNormal {
        gain: 2.0,
        fan_out_only: true,
    };
    let normal = Initializer::Normal {
        mean: 0.5,
        std: 2.0,
    };
    match path {
        "words.weight" => Some(normal),
        "conv.weight" | "conv.bias" => Some(kaiming),
        "up.bias" => Some(Initializer::Constant { value: 0.25 }),
        _ => (shape.len() == 2).then_some(Initializer::XavierUniform { gain: 1.0 }),
    }
}

/// Whole values of parameters, by path.
#[derive(Debug, Default, PartialEq)]
struct Values(BTreeMap<String, TensorData>);

impl Values {
    fn of<M: Module>(module: &M) -> Self {
        let mut values = Self::default();
        visit_paths(module, &mut values);
        values
    }
}

impl PathVisitor for Values {
    fn visit_float<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        self.0.insert(path.join("."), param.val().into_data());
    }
}

/// The values of two models that are made one after the other.
fn two_models(axes: &[(&str, usize)], plan: &Plan) -> Vec<[Values; 2]> {
    let ranks = axes.iter().map(|(_, size)| size).product();
    let found = Launcher::local(ranks).seed(5).collect(|world| {
        let mesh = world.mesh_of(axes)?;
        let make = || init_parallel_with(&world, &mesh, plan, model, initializer);
        let (first, second) = (unshard(make()?)?, unshard(make()?)?);
        Ok([Values::of(&first), Values::of(&second)])
    });
    found.unwrap_or_else(|error| panic!("{axes:?}: {error}"))
}

#[test]
fn values_are_the_same_on_all_meshes() {
    let plan = Plan::default()
        .with_layer("words", Style::rowwise("tensor"))
        .with_layer("{conv,up}", Style::colwise("tensor"))
        .with_layer("down", Style::rowwise("tensor"))
        .with_optional_axis("tensor")
        .with_optional_axis("data");
    let stored = plan.clone().with_store(Store::new("**", "data"));
    let expected = two_models(&[("data", 1)], &Plan::default()).remove(0);
    let [first, second] = &expected;
    assert_eq!(first.0.len(), 9);
    let ones: Vec<f32> = first.0["norm.gamma"].iter::<f32>().collect();
    assert_eq!(ones, [1.0; 6]);
    for path in ["words.weight", "conv.bias", "up.weight", "down.bias"] {
        assert_ne!(first.0[path], second.0[path], "{path}");
    }
    for (axes, plan) in [
        (&[("tensor", 2)][..], &plan),
        (&[("tensor", 3)], &plan),
        (&[("data", 4)], &stored),
        (&[("data", 2), ("tensor", 2)], &stored),
        (&[("tensor", 2), ("data", 2)], &stored),
    ] {
        for found in two_models(axes, plan) {
            assert_eq!(found, expected, "{axes:?}");
        }
    }
}

#[test]
fn values_have_the_moments_of_the_distributions() {
    const SHAPE: [usize; 2] = [60, 40];
    let [fan_in, fan_out] = SHAPE.map(|size| size as f64);
    let xavier = 2.0 / (fan_in + fan_out);
    for (initializer, mean, variance) in [
        (Initializer::Constant { value: -0.5 }, -0.5, 0.0),
        (Initializer::Ones, 1.0, 0.0),
        (Initializer::Zeros, 0.0, 0.0),
        (
            Initializer::Uniform {
                min: -1.0,
                max: 3.0,
            },
            1.0,
            16.0 / 12.0,
        ),
        (
            Initializer::Normal {
                mean: 2.0,
                std: 0.5,
            },
            2.0,
            0.25,
        ),
        (
            Initializer::KaimingUniform {
                gain: 2.0,
                fan_out_only: false,
            },
            0.0,
            4.0 / fan_in,
        ),
        (
            Initializer::KaimingNormal {
                gain: 1.0,
                fan_out_only: true,
            },
            0.0,
            1.0 / fan_out,
        ),
        (Initializer::XavierUniform { gain: 1.0 }, 0.0, xavier),
        (Initializer::XavierNormal { gain: 3.0 }, 0.0, 9.0 * xavier),
    ] {
        let weights = Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("tensor", 2)])?;
            let plan = Plan::default().with_layer("**", Style::colwise("tensor"));
            let make = |device: &Device| LinearConfig::new(SHAPE[0], SHAPE[1]).init(device);
            let all = |_: &str, _: &[usize]| Some(initializer.clone());
            let linear = unshard(init_parallel_with(&world, &mesh, &plan, make, all)?)?;
            Ok(linear.weight.val().into_data())
        });
        let weights: Vec<f64> = weights.unwrap()[0].iter::<f64>().collect();
        let count = weights.len() as f64;
        let found = weights.iter().sum::<f64>() / count;
        let squares = weights.iter().map(|weight| (weight - found).powi(2));
        let spread = squares.sum::<f64>() / count;
        // Five standard errors of 2400 values.
        assert!(
            (found - mean).abs() <= 0.1 * variance.sqrt()
                && (spread - variance).abs() <= 0.15 * variance,
            "{initializer:?}: mean {found} for {mean}, variance {spread} for {variance}"
        );
    }
}

#[test]
fn fans_are_those_of_burn() {
    fn of<M: Module>(module: &M) -> Vec<Option<[usize; 2]>> {
        let resolved = resolve(module, &mesh(&[("data", 1)]), &Plan::default()).unwrap();
        let parameters = resolved.parameters.iter();
        parameters
            .map(|parameter| fans(&resolved, parameter))
            .collect()
    }
    let device = Device::default();
    assert_eq!(
        of(&LinearConfig::new(5, 3).init(&device)),
        [Some([5, 3]); 2]
    );
    let conv = Conv2dConfig::new([4, 6], [3, 1]).init(&device);
    assert_eq!(of(&conv), [Some([12, 18]); 2]);
    // The fan out counts all groups.
    let groups = Conv1dConfig::new(4, 6, 5).with_groups(2).init(&device);
    assert_eq!(of(&groups), [Some([10, 30]); 2]);
    let transposed = ConvTranspose2dConfig::new([4, 6], [3, 1]).init(&device);
    assert_eq!(of(&transposed), [Some([18, 12]); 2]);
    assert_eq!(of(&EmbeddingConfig::new(5, 3).init(&device)), [None]);
}

#[test]
fn initializers_that_do_not_fit_are_refused() {
    let error = |initializer: Initializer| {
        let result = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("data", 2)])?;
            let make = |device: &Device| EmbeddingConfig::new(5, 3).init(device);
            let all = |_: &str, _: &[usize]| Some(initializer.clone());
            init_parallel_with(&world, &mesh, &Plan::default(), make, all).map(drop)
        });
        result.unwrap_err().to_string()
    };
    let orthogonal = error(Initializer::Orthogonal { gain: 1.0 });
    assert!(
        orthogonal.contains("parameter weight: Orthogonal")
            && orthogonal.contains("needs the whole parameter"),
        "{orthogonal}"
    );
    let fans = error(Initializer::XavierNormal { gain: 1.0 });
    assert!(fans.contains("needs the fans of its layer"), "{fans}");
}

#[test]
fn ranks_with_different_initializers_are_told() {
    let result = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("tensor", 2)])?;
        let value = world.rank() as f64;
        let make = |device: &Device| LinearConfig::new(4, 4).init(device);
        let all = |_: &str, _: &[usize]| Some(Initializer::Constant { value });
        init_parallel_with(&world, &mesh, &Plan::default(), make, all).map(drop)
    });
    let error = result.unwrap_err().to_string();
    assert!(error.contains("models or initializers"), "{error}");
}

/// A rank makes its 16 MiB of a weight of 1 TiB.
#[test]
fn a_parameter_larger_than_memory_is_made_in_shards() {
    const SIZE: usize = 1 << 19;
    let result = Launcher::local(1).run(|world| {
        let shape = MeshShape::new(&[("rows", 256), ("columns", 256)], (0..1 << 16).collect())?;
        let dry = DryMesh::new(shape, world.device().clone())?;
        let plan = Plan::default()
            .with_layer("**", Style::rowwise("rows"))
            .with_layer("**", Style::colwise("columns"));
        let make = |device: &Device| Linear {
            weight: Param::uninitialized(
                ParamId::new(),
                |_, _| -> Tensor<2> { panic!("drawn whole") },
                device.clone(),
                true,
                [SIZE, SIZE].into(),
            ),
            bias: None,
        };
        let kaiming = |_: &str, _: &[usize]| {
            Some(Initializer::KaimingUniform {
                gain: 1.0,
                fan_out_only: false,
            })
        };
        let linear = init_parallel_with(&world, dry.mesh(), &plan, make, kaiming)?;
        assert_eq!(linear.weight.dims(), [SIZE / 256; 2]);
        let largest = linear.weight.base().abs().max().into_scalar::<f32>();
        let limit = (3.0 / SIZE as f32).sqrt();
        assert!(
            largest <= limit && largest > 0.99 * limit,
            "{largest} of {limit}"
        );
        Ok(())
    });
    result.unwrap();
}
