//! PyTorch weights, loaded whole and into shards.

use std::path::{Path, PathBuf};

use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use halocline_core::{
    DeviceMesh, Gather, Launcher, Layout, ParamShard, Result, Shard, shard_parameters, unshard,
};
use halocline_io::{Checkpoint, StateDict, StateName};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

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

/// Shards a model along the first dim, for use or for storage.
fn sharded<M: Module>(model: M, mesh: &DeviceMesh, stored: bool) -> Result<M> {
    shard_parameters(model, |_, shape| {
        let layout = Layout::new(mesh.shape(), shape, &[Shard(0)])?;
        let shard = ParamShard::new(layout, mesh);
        Ok(Some(if stored {
            shard.with_stored(&["rank"], Gather::EachPass)?
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
                check(&unshard(model)?);
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

#[derive(Module, Debug)]
struct Spectral {
    weight: Param<Tensor<5>>,
}

/// Writes two complex tensors, whose parts count up from 0 and 100, real ones that count up from
/// 200, and floats of 8 bits.
fn write_complex(folder: &Path) -> PathBuf {
    let counted = |first: u16| -> Vec<u8> {
        let numbers = first..first + 8;
        numbers.flat_map(|x| f32::from(x).to_le_bytes()).collect()
    };
    let [one, other, real] = [0, 100, 200].map(counted);
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).unwrap();
    let tensors = [
        ("one", view(Dtype::C64, &[2, 1, 2, 1], &one)),
        ("other", view(Dtype::C64, &[2, 1, 2, 1], &other)),
        ("real", view(Dtype::F32, &[2, 2, 2], &real)),
        ("small", view(Dtype::F8_E4M3, &[3], &[0; 3])),
    ];
    let path = folder.join("complex.safetensors");
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    path
}

/// Loads a sharded parameter.
fn spectral(path: &Path, shape: [usize; 5], place: &StateName) -> Result<Vec<f32>> {
    let found = Launcher::local(2).collect(|world| {
        let place = place.clone();
        let weights = StateDict::open(path)?.with_unused();
        let weights = weights.with_names(move |_| Some(place.clone()));
        let mesh = world.mesh([("rank", 2)])?;
        let model = world.init(|device| Spectral {
            weight: Param::from_tensor(Tensor::zeros(shape, device)),
        })?;
        let model = weights.load(&world, sharded(model, &mesh, false)?)?;
        let weight = unshard(model)?.weight.val();
        Ok(weight.into_data().try_to_vec::<f32>().unwrap())
    });
    Ok(found?.remove(0))
}

#[test]
fn complex_tensors_have_their_parts_in_a_last_dim() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_complex(folder.path());
    let load = |shape, place| spectral(&path, shape, &place).unwrap();
    let corners = load([2, 1, 4, 1, 2], StateName::cat(["one", "other"], 2));
    let rows = [0, 100, 4, 104].map(|first: u8| (first..first + 4).map(f32::from));
    assert_eq!(corners, rows.into_iter().flatten().collect::<Vec<_>>());
    let permuted = StateName::from("one").permute(&[2, 1, 0, 3, 4]);
    assert_eq!(
        load([2, 1, 2, 1, 2], permuted),
        [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]
    );
    let longer = StateName::from("real").unsqueeze_dim(1).unsqueeze_dim(3);
    let counted: Vec<f32> = (200_u8..208).map(f32::from).collect();
    assert_eq!(load([2, 1, 2, 1, 2], longer), counted);
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.shape("one").unwrap(), [2, 1, 2, 1, 2]);
}

#[test]
fn tensors_that_do_not_fit_are_told_when_they_are_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_complex(folder.path());
    for (place, told) in [
        ("small".into(), "\"small\" is of F8_E4M3, which burn lacks"),
        (
            StateName::cat(["one", "real"], 2),
            "\"real\" is [2, 2, 2] of F32, expected [2, 1, 2, 1, 2] except in dim 2",
        ),
        (StateName::from("one").permute(&[1, 0]), "Permute([1, 0])"),
        (StateName::from("real").unsqueeze_dim(4), "Unsqueeze(4)"),
    ] {
        let error = spectral(&path, [2, 1, 2, 1, 2], &place).unwrap_err();
        assert!(error.to_string().contains(told), "{told} in\n{error}");
    }
    let checkpoint = Checkpoint::open(&path).unwrap();
    let error = checkpoint.data("small").unwrap_err().to_string();
    assert!(error.contains("F8_E4M3"), "{error}");
    let pickled = Path::new(WEIGHTS).with_file_name("complex.pt");
    let error = StateDict::open(pickled).unwrap_err().to_string();
    assert!(error.contains("torch.view_as_real"), "{error}");
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
