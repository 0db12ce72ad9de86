//! PyTorch weights, loaded whole and into shards.

use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use halocline_core::{
    DeviceMesh, Gather, Launcher, Layout, ParamShard, Result, Shard, shard_parameters, whole,
};
use halocline_io::{StateDict, StateName};

/// File of numbered tensors, written by `generate.py`: the values of each count up from 100 times
/// its number.
const WEIGHTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/state_dict/weights.pt");

#[derive(Module, Debug)]
struct Model {
    linear: Linear,
    norm: LayerNorm,
    query: Linear,
    value: Linear,
    output: Linear,
    conv: Conv1d,
    own: Param<Tensor<1>>,
}

fn model(device: &Device) -> Model {
    let square = || LinearConfig::new(4, 4).init(device);
    Model {
        linear: LinearConfig::new(3, 4).init(device),
        norm: LayerNormConfig::new(4).init(device),
        query: square(),
        value: square(),
        output: square(),
        conv: Conv1dConfig::new(4, 2, 3).init(device),
        own: Param::from_tensor(Tensor::full([2], 0.5, device)),
    }
}

fn names(path: &str) -> Option<StateName> {
    let (layer, name) = path.split_once('.')?; // `own` has no layer, and keeps its value
    Some(match layer {
        "linear" => format!("model.net.0.{name}").into(),
        "norm" => format!("model.net.1.{name}").into(),
        "query" => StateName::part(format!("model.attention.in_proj_{name}"), 0, 3),
        "value" => StateName::part(format!("model.attention.in_proj_{name}"), 2, 3),
        "output" => format!("model.attention.out_proj.{name}").into(),
        _ => format!("model.{path}").into(),
    })
}

fn weights() -> StateDict {
    StateDict::open(WEIGHTS)
        .unwrap()
        .with_names(names)
        .with_unused() // the batch norm
}

/// Shards the model along the first dim, for use or for storage.
fn sharded(model: Model, mesh: &DeviceMesh, stored: bool) -> Result<Model> {
    shard_parameters(model, |_, shape| {
        let layout = Layout::new(mesh.shape(), shape, &[Shard(0)])?;
        let shard = ParamShard::new(layout, mesh);
        Ok(Some(if stored {
            shard.with_stored(&["rank"], Gather::Again)?
        } else {
            shard
        }))
    })
}

fn check(model: &Model) {
    let counted = |first: usize, count: usize| -> Vec<f32> {
        (0..count).map(|i| (100 * first + i) as f32).collect()
    };
    let values = |tensor: Tensor<2>| tensor.into_data().try_to_vec::<f32>().unwrap();
    // From [in, out] to [out, in].
    let weight = values(model.linear.weight.val().transpose());
    assert_eq!(weight, counted(0, 12));
    let line = |param: &Param<Tensor<1>>| param.val().into_data().try_to_vec::<f32>().unwrap();
    assert_eq!(line(model.linear.bias.as_ref().unwrap()), counted(1, 4));
    assert_eq!(line(&model.norm.gamma), counted(2, 4));
    assert_eq!(line(model.norm.beta.as_ref().unwrap()), counted(3, 4));
    assert_eq!(
        values(model.query.weight.val().transpose()),
        counted(4, 48)[..16]
    );
    assert_eq!(
        values(model.value.weight.val().transpose()),
        counted(4, 48)[32..]
    );
    assert_eq!(
        line(model.value.bias.as_ref().unwrap()),
        counted(5, 12)[8..]
    );
    // Stored with 8 bits of precision, loaded in the type of the parameter.
    let conv = model
        .conv
        .weight
        .val()
        .into_data()
        .try_to_vec::<f32>()
        .unwrap();
    let rounded = |x: &f32| burn::tensor::bf16::from_f32(*x).to_f32();
    assert_eq!(conv, counted(8, 24).iter().map(rounded).collect::<Vec<_>>());
    assert_eq!(line(&model.own), [0.5; 2]);
}

#[test]
fn weights_of_pytorch_are_loaded() {
    for ranks in [1, 3] {
        let run = Launcher::local(ranks).run(|world| {
            let model = weights().load(&world, world.init(model)?)?;
            check(&model);
            world.check_replicas(&model)
        });
        run.unwrap();
    }
}

#[test]
fn shards_get_their_cells() {
    for stored in [false, true] {
        for ranks in [2, 3, 5] {
            let run = Launcher::local(ranks).run(|world| {
                let mesh = world.mesh([("rank", ranks)])?;
                let model = sharded(world.init(model)?, &mesh, stored)?;
                let rows = model.linear.weight.dims()[0];
                let model = weights().load(&world, model)?;
                assert_eq!(model.linear.weight.dims(), [rows, 4]);
                check(&whole(model)?);
                Ok(())
            });
            run.unwrap_or_else(|error| panic!("{ranks} {stored}: {error}"));
        }
    }
}

fn error(weights: impl Fn() -> StateDict + Sync) -> String {
    let run = Launcher::local(2).run(|world| weights().load(&world, world.init(model)?).map(drop));
    run.unwrap_err().to_string()
}

#[test]
fn mistakes_are_told_before_anything_is_read() {
    let missing = error(|| weights().with_names(|path| Some(path.into())));
    assert!(
        missing.contains("not found: linear.weight of linear.weight")
            && missing.contains("with_names"),
        "{missing}"
    );
    let unused = error(|| StateDict::open(WEIGHTS).unwrap().with_names(names));
    assert!(
        unused.contains("not used: model.norm.bias") && !unused.contains("num_batches_tracked"),
        "{unused}"
    );
    let shape = error(|| {
        weights().with_names(|path| match path {
            "norm.weight" => Some("model.conv.bias".into()),
            path => names(path),
        })
    });
    assert!(
        shape.contains("model.conv.bias") && shape.contains("[2]") && shape.contains("[4]"),
        "{shape}"
    );
    let part = error(|| {
        weights().with_names(|path| match path {
            "query.weight" => Some(StateName::part("model.attention.in_proj_weight", 0, 5)),
            path => names(path),
        })
    });
    assert!(part.contains("[12, 4], transposed,"), "{part}");
    let kind = error(|| {
        weights().with_names(|path| match path {
            "own" => Some("model.norm.num_batches_tracked".into()),
            path => names(path),
        })
    });
    assert!(kind.contains("num_batches_tracked"), "{kind}");
}

#[test]
fn other_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.pt");
    let message = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        StateDict::open(&path).unwrap_err().to_string()
    };
    for bytes in [
        &b"PK\x03\x04 and nothing"[..],
        b"\x80\x02junk",
        b"",
        b"something else",
    ] {
        let error = message(bytes);
        assert!(error.contains("weights.pt"), "{error}");
    }
    let none = StateDict::open(Path::new("nowhere.pt"))
        .unwrap_err()
        .to_string();
    assert!(none.starts_with("nowhere.pt"), "{none}");
}
