//! Plans as text, and their resolution.

use burn::module::{Module, Param};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::tensor::{Device, Tensor};
use halocline_core::{Gather, Launcher, PlanPlacement, Replicate, Shard};
use halocline_ops::Reshard;

use super::mesh;
use crate::parallel::{
    Axes, LayerSharding, Plan, ResolvedPlan, Store, Style, parallelize_module, resolve,
};

#[derive(Module, Debug)]
struct Block {
    enter: Reshard,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
}

#[derive(Module, Debug)]
struct Model {
    words: Embedding,
    blocks: Vec<Block>,
}

#[derive(Module, Debug)]
struct Normed {
    norm: BatchNorm,
}

/// User-defined module, unaware of plans.
#[derive(Module, Debug)]
struct Scaled {
    scale: Param<Tensor<1>>,
}

#[derive(Module, Debug)]
struct Owner {
    own: Scaled,
}

fn model() -> Model {
    let device = Device::default();
    let block = || Block {
        enter: Reshard::default(),
        up: LinearConfig::new(4, 10).init(&device),
        down: LinearConfig::new(10, 4).with_bias(false).init(&device),
        norm: LayerNormConfig::new(4).init(&device),
    };
    Model {
        words: EmbeddingConfig::new(20, 4).init(&device),
        blocks: vec![block(), block()],
    }
}

fn on(axes: &[(&str, usize)], plan: &Plan) -> ResolvedPlan {
    resolve(&model(), &mesh(axes), plan).unwrap()
}

fn error(plan: &Plan) -> String {
    let resolved = resolve(&model(), &mesh(&[("data", 2), ("tensor", 3)]), plan);
    resolved.unwrap_err().to_string()
}

/// Style that places a parameter over the tensor axis.
fn placed(parameter: &str, along: PlanPlacement) -> Style {
    let axes = Axes::from([("tensor".into(), along)]);
    Style::Placed(LayerSharding {
        parameters: [(parameter.into(), axes)].into(),
        ..LayerSharding::default()
    })
}

fn plan() -> Plan {
    Plan::default()
        .with_layer(
            "blocks.*.enter",
            Style::prepare_input("tensor", PlanPlacement::Fan),
        )
        .with_layer("blocks.*.up", Style::colwise("tensor").with_unit(2))
        .with_layer(
            "blocks.*.down",
            Style::rowwise("tensor")
                .with_unit(2)
                .with_output(PlanPlacement::Shard(1)),
        )
        .with_layer("blocks.*.norm", Style::sequence_parallel("tensor"))
        .with_layer("words", Style::rowwise("tensor"))
        .with_store(
            Store::new("**", "data")
                .with_at_least(8)
                .with_gather(Gather::Once),
        )
}

#[test]
fn plans_are_the_same_as_text() {
    let plan = plan()
        .with_layer("other", placed("weight", PlanPlacement::Shard(-1)))
        .with_layer(
            "both",
            Style::PrepareInputOutput {
                input: [("tensor".into(), PlanPlacement::Fan)].into(),
                output: [("tensor".into(), PlanPlacement::Shard(1))].into(),
            },
        )
        .with_optional_axis("lat");
    assert_eq!(Plan::from_toml(&plan.to_toml()).unwrap(), plan);
    assert_eq!(Plan::from_json(&plan.to_json()).unwrap(), plan);
    let written = r#"
        [[layer]]
        path = "blocks.*.up"
        style = { colwise = { axis = "tensor" } }
        [[store]]
        path = "**"
        axis = "data"
    "#;
    let expected = Plan::default()
        .with_layer("blocks.*.up", Style::colwise("tensor"))
        .with_store(Store::new("**", "data"));
    assert_eq!(Plan::from_toml(written).unwrap(), expected);
    let earlier = written.replace("axis = \"data\"", "over = \"data\"\ngather = \"again\"");
    assert_eq!(Plan::from_toml(&earlier).unwrap(), expected);
    let misspelled = Plan::from_toml("[[layers]]\npath = \"a\"")
        .unwrap_err()
        .to_string();
    assert!(
        misspelled.contains("layers") && misspelled.contains("layer"),
        "{misspelled}"
    );
    let placement =
        Plan::from_toml("[[layer]]\npath = \"a\"\nstyle = { prepare_input = { x = \"split\" } }");
    assert!(placement.unwrap_err().to_string().contains("\"shard(1)\""));
}

#[test]
fn layouts_are_those_of_the_styles() {
    let resolved = on(&[("tensor", 3), ("data", 2)], &plan());
    let param = |path: &str| {
        let mut found = resolved.parameters.iter();
        let found = found.find(|parameter| parameter.path == path);
        found.unwrap_or_else(|| panic!("no {path}"))
    };
    let up = param("blocks.1.up.weight");
    assert_eq!(up.layout.placements(), [Shard(1), Shard(0)]);
    assert_eq!(up.layout.extents(1), [4, 4, 2]); // units of two
    assert_eq!((&up.stored[..], up.gather), (&[1][..], Gather::Once));
    assert_eq!(up.layer_placements.input, [(0, PlanPlacement::Fan)]);
    assert_eq!([up.elements_held(0), up.elements_used(0)], [2 * 4, 4 * 4]);
    let bias = param("blocks.1.up.bias");
    // Its only dim is already sharded by the layer, and the storage axis comes later in the mesh.
    assert_eq!(bias.layout.placements(), [Shard(0), Shard(0)]);
    assert_eq!(bias.layout.extents(0), [2, 2, 2, 2, 1, 1]);
    let down = param("blocks.0.down.weight");
    assert_eq!(down.layout.placements(), [Shard(0), Shard(1)]);
    assert_eq!(down.layer_placements.input, [(0, PlanPlacement::Shard(-1))]);
    assert_eq!(down.layer_placements.output, [(0, PlanPlacement::Shard(1))]);
    let gamma = param("blocks.0.norm.gamma");
    assert_eq!(gamma.layout.placements(), [Replicate, Replicate]); // four elements
    assert_eq!(gamma.layer_placements.input, [(0, PlanPlacement::Shard(1))]);
    let words = param("words.weight");
    assert_eq!(words.layout.placements(), [Shard(0), Shard(1)]);
    assert!(words.layer_placements.input.is_empty());
    assert_eq!(
        resolved.reshards["blocks.1.enter"],
        [(0, PlanPlacement::Fan)]
    );
    let printed = resolved.to_string();
    for part in [
        "blocks.1.up.weight",
        "data: stored Shard(0)",
        "input tensor: fan",
        "of 276 elements",
        "holds [0..2, 0..4]",
        "receives 32 B forward, 32 B backward",
    ] {
        assert!(printed.contains(part), "{part} in\n{printed}");
    }
}

#[test]
fn a_batch_norm_changes_layouts_as_a_plan_says() {
    let norm = BatchNormConfig::new(4).init(&Device::default());
    let style = Style::prepare_input("tensor", PlanPlacement::Shard(0));
    let plan = Plan::default().with_layer("norm", style);
    let resolved = resolve(&Normed { norm }, &mesh(&[("tensor", 2)]), &plan).unwrap();
    let gamma = &resolved.parameters[0];
    assert_eq!(gamma.path, "norm.gamma");
    assert_eq!(gamma.layer_placements.input, [(0, PlanPlacement::Shard(0))]);
}

#[test]
fn a_mesh_may_lack_optional_axes() {
    let plan = plan()
        .with_optional_axis("tensor")
        .with_optional_axis("data");
    let resolved = on(&[("data", 2)], &plan);
    let up = &resolved.parameters[1];
    assert_eq!(
        (up.path.as_str(), up.layout.placements()),
        ("blocks.0.up.weight", &[Shard(1)][..])
    );
    assert!(up.layer_placements.input.is_empty() && resolved.reshards.is_empty());
    let none = on(&[("lat", 1)], &plan);
    assert!(
        none.parameters
            .iter()
            .all(|parameter| parameter.stored.is_empty())
    );
}

#[test]
fn mistakes_are_told_with_the_way_out() {
    let layer = |path: &str, style| error(&Plan::default().with_layer(path, style));
    let typo = layer("blocks.*.upp", Style::colwise("tensor"));
    assert!(
        typo.contains("matches no layer") && typo.contains("blocks.0.up"),
        "{typo}"
    );
    let axis = layer("words", Style::colwise("model"));
    assert!(
        axis.contains("no axis \"model\"") && axis.contains("optional_axes"),
        "{axis}"
    );
    let kind = layer("blocks.0.norm", Style::colwise("tensor"));
    assert!(kind.contains("a LayerNorm"), "{kind}");
    let composite = layer(
        "blocks.0",
        Style::prepare_input("tensor", PlanPlacement::Fan),
    );
    assert!(composite.contains("field of type Reshard"), "{composite}");
    let unit = layer("blocks.0.up", Style::colwise("tensor").with_unit(4));
    assert!(unit.contains("units of 4"), "{unit}");
    let twice = Plan::default()
        .with_layer("blocks.*.up", Style::colwise("tensor"))
        .with_layer("blocks.{0,1}.*", Style::sequence_parallel("tensor"));
    let twice = error(&twice);
    assert!(twice.contains("both match blocks.0.up"), "{twice}");
    let missing = layer("blocks.0.down", placed("bias", PlanPlacement::Shard(0)));
    assert!(
        missing.contains("has no parameter bias; it has weight"),
        "{missing}"
    );
    let reshard = layer("blocks.0.enter", placed("bias", PlanPlacement::Shard(0)));
    assert!(
        reshard.contains("has no parameter bias; it is a Reshard"),
        "{reshard}"
    );
    let fan = layer("blocks.0.down", placed("weight", PlanPlacement::Fan));
    assert!(fan.contains("expected shard or replicate"), "{fan}");
    let fan = LayerSharding {
        input: [("tensor".into(), PlanPlacement::Fan)].into(),
        ..LayerSharding::default()
    };
    let scaled = Scaled {
        scale: Param::from_tensor(Tensor::ones([3], &Device::default())),
    };
    let plan = Plan::default().with_layer("own", Style::Placed(fan));
    let refused = resolve(&Owner { own: scaled }, &mesh(&[("tensor", 2)]), &plan);
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("own, a Scaled") && refused.contains("Reshard"),
        "{refused}"
    );
    let store = error(&Plan::default().with_store(Store::new("blocks.*.out.weight", "data")));
    assert!(
        store.contains("matches no parameter") && store.contains("blocks.0"),
        "{store}"
    );
    let over = Plan::default()
        .with_layer("blocks.*.up", Style::colwise("tensor"))
        .with_store(Store::new("**.up.*", "tensor"));
    assert!(error(&over).contains("sharded over \"tensor\" by its layer"));
}

#[test]
fn ranks_with_different_plans_are_told_before_anything_is_placed() {
    let result = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("tensor", 2)])?;
        let model = world.init(|device| LinearConfig::new(4, 4).init(device))?;
        let style = if world.is_root() {
            Style::colwise("tensor")
        } else {
            Style::rowwise("tensor")
        };
        parallelize_module(model, &mesh, &Plan::default().with_layer("**", style)).map(|_| ())
    });
    let error = result.unwrap_err().to_string();
    assert!(error.contains("different plans"), "{error}");
}

/// The second plan shards nothing, but sets a placement of the first.
#[test]
fn two_plans_for_one_place_are_told() {
    let result = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("tensor", 2)])?;
        let plan = |along| {
            Plan::default().with_layer("blocks.*.enter", Style::prepare_input("tensor", along))
        };
        let model = world.sync_module(model(), 0)?;
        let model = parallelize_module(model, &mesh, &plan(PlanPlacement::Shard(1)))?;
        parallelize_module(model, &mesh, &plan(PlanPlacement::Replicate)).map(drop)
    });
    let error = result.unwrap_err().to_string();
    assert!(
        error.contains("blocks.0.enter is set by another plan"),
        "{error}"
    );
}

#[test]
fn a_model_larger_than_memory_is_resolved() {
    let config = TransformerEncoderConfig::new(1 << 17, 1 << 19, 64, 6);
    let model: TransformerEncoder = config.init(&Device::default());
    let plan = Plan::default()
        .with_layer("layers.*.mha.{query,key,value}", Style::colwise("tensor"))
        .with_layer("layers.*.mha.output", Style::rowwise("tensor"))
        .with_layer("layers.*.pwff.linear_inner", Style::colwise("tensor"))
        .with_layer("layers.*.pwff.linear_outer", Style::rowwise("tensor"))
        .with_store(Store::new("**", "data").with_at_least(1 << 20));
    let resolved = resolve(&model, &mesh(&[("tensor", 64), ("data", 64)]), &plan).unwrap();
    let parameters = resolved.parameters.iter();
    let (all, held) = parameters.fold((0, 0), |(all, held), parameter| {
        let elements: usize = parameter.layout.shape().iter().product();
        (all + elements, held + parameter.elements_held(0))
    });
    assert!(all * 4 > 4 << 40, "{} bytes", all * 4);
    assert!(held * 4000 < all, "{held} of {all}");
}
