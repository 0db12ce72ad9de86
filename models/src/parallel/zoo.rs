//! Plans for burn's models.

use burn::nn::transformer::TransformerEncoderConfig;
use halocline_core::PlanPlacement;

use super::plan::Plan;
use super::sites::within;
use super::style::Style;

/// Returns plans for burn's transformer encoder at a path of a model: one shards attention heads
/// over a mesh axis, the other the hidden features of the feed-forward layers. Each can be used
/// alone; [`Plan::merge`] joins them, and [`sequence_parallel`] also shards tokens between layers.
///
/// # Example
/// ```
/// use burn::nn::transformer::TransformerEncoderConfig;
/// use halocline_core::MeshShape;
/// use halocline_models::parallel::{resolve, transformer_encoder};
///
/// let config = TransformerEncoderConfig::new(24, 48, 4, 2);
/// let [attention, feed_forward] = transformer_encoder(&config, "", "tensor");
/// let mesh = MeshShape::new(&[("tensor", 2)], vec![0, 1])?;
/// let plan = attention.merge(&feed_forward);
/// println!("{}", resolve(&config.init(&Default::default()), &mesh.into(), &plan)?);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn transformer_encoder(config: &TransformerEncoderConfig, path: &str, axis: &str) -> [Plan; 2] {
    styles(config, path, axis, None)
}

/// Returns the whole plan of [`transformer_encoder`], with tokens also sharded in the norms and
/// between attention and feed-forward layers. Tensors are `[batch, tokens, features]`, with tokens
/// sharded over the axis.
///
/// # Example
/// ```
/// use burn::nn::transformer::TransformerEncoderConfig;
/// use halocline_models::parallel::sequence_parallel;
///
/// let plan = sequence_parallel(&TransformerEncoderConfig::new(24, 48, 4, 2), "encoder", "tensor");
/// assert!(plan.to_toml().contains("sequence_parallel"));
/// ```
pub fn sequence_parallel(config: &TransformerEncoderConfig, path: &str, axis: &str) -> Plan {
    let [attention, feed_forward] = styles(config, path, axis, Some(PlanPlacement::Shard(1)));
    let norms = within(path, "layers.*.norm_*");
    attention
        .merge(&feed_forward)
        .with_layer(&norms, Style::sequence_parallel(axis))
}

fn styles(
    config: &TransformerEncoderConfig,
    path: &str,
    axis: &str,
    output: Option<PlanPlacement>,
) -> [Plan; 2] {
    let width = config.d_model / config.n_heads;
    let rowwise = || match output {
        Some(along) => Style::rowwise(axis).with_output(along),
        None => Style::rowwise(axis),
    };
    let layer = |name: &str| within(path, &format!("layers.*.{name}"));
    let attention = Plan::default()
        .with_layer(
            &layer("mha.{query,key,value}"),
            Style::colwise(axis).with_unit(width),
        )
        .with_layer(&layer("mha.output"), rowwise().with_unit(width));
    let feed_forward = Plan::default()
        .with_layer(&layer("pwff.linear_inner"), Style::colwise(axis))
        .with_layer(&layer("pwff.linear_outer"), rowwise());
    [attention, feed_forward]
}
