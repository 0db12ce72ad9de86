//! Tests of queries that are replicated where keys are sharded.

use burn::tensor::{Bool, Device, Tensor, TensorData};
use halocline_core::{DeviceMesh, Launcher, Placement, RandomKey, Replicate, Shard};

use super::dims::{BATCH, HEADS};
use super::*;
use crate::testing::{compare, cotangent_of, gradient_of, normal, random_leaf};

const QUERIES: usize = 9;

/// A case: options by name, the number of keys, and whether queries fan out.
#[derive(Clone, Copy, Debug)]
struct Case {
    options: &'static str,
    keys: usize,
    fans: bool,
}

impl Case {
    /// Options on a mesh, with padding that lies as the keys do.
    fn options(
        self,
        mesh: &DeviceMesh,
        device: &Device,
        placed: [Placement; 2],
    ) -> Result<AttentionOptions> {
        let keys = self.keys;
        let options = AttentionOptions::default();
        let bias = || Tensor::<4>::from_data(normal(&[1, QUERIES, 4, keys], "bias", 0), device);
        Ok(match self.options {
            "causal" => options.with_causal(true),
            "bias" => options.with_bias(bias().inner()),
            "dropout" => options.with_dropout(0.3, RandomKey::new(3, "dropout")),
            "padding" => {
                // No key of the first sample counts.
                let hidden = (0..2 * keys).map(|cell| cell < keys || cell % 3 == 1);
                let hidden = TensorData::new(hidden.collect::<Vec<_>>(), [2, keys]);
                let hidden = Tensor::<2, Bool>::from_data(hidden, device).inner();
                let placed = placed.map(|placement| match placement {
                    Shard(HEADS) => Replicate,
                    other => other,
                });
                options.with_key_padding(ShardTensor::distribute(hidden, mesh, &placed)?)
            }
            _ => options,
        })
    }

    /// Output, log-sum-exps, and gradients of queries, keys and values, on every rank.
    fn run(
        self,
        axes: [usize; 2],
        queries: [Placement; 2],
        placed: [Placement; 2],
    ) -> Vec<Vec<TensorData>> {
        let found = Launcher::local(axes[0] * axes[1]).collect(|world| {
            let mesh = world.mesh([("a", axes[0]), ("b", axes[1])])?;
            let leaves = [
                random_leaf([2, QUERIES, 4, 36], "q", &mesh, &queries)?,
                random_leaf([2, self.keys, 2, 36], "k", &mesh, &placed)?,
                random_leaf([2, self.keys, 2, 33], "v", &mesh, &placed)?,
            ];
            let [q, k, v] = leaves.clone();
            let q = q.try_fan_out(|_| self.fans)?;
            let options = self.options(&mesh, world.device(), placed)?;
            let y = scaled_dot_product_attention_with_lse(q, k, v, &options)?;
            // Ranks use different rows of a result that fans out.
            let rows = |x: ShardTensor<4>| {
                if self.fans {
                    x.redistribute(&[Shard(TOKENS); 2])
                } else {
                    x
                }
            };
            let results = [rows(y.output), rows(y.lse)];
            let weighted = |x: &ShardTensor<4>| crate::reduce::sum(x.clone() * cotangent_of(x)?);
            let loss = weighted(&results[0])? + weighted(&results[1])?;
            let gradients = loss.backward();
            // Without keys the logarithm is about −1e30.
            let results = results.map(|x| x.full_tensor().clamp_min(-1e3).into_data());
            let mut found = results.to_vec();
            found.extend(leaves.iter().map(|leaf| gradient_of(leaf, &gradients)));
            Ok(found)
        });
        found.unwrap()
    }
}

/// Uneven and empty shards of keys, over one axis and over two, beside shards of queries.
#[test]
fn replicated_queries_attend_to_sharded_keys() {
    let whole = [Replicate; 2];
    let tokens = [Shard(TOKENS); 2];
    let last = |first: Placement| [first, Shard(TOKENS)];
    let over = |first: Placement| [first, Replicate];
    for keys in [13, 3] {
        for options in ["", "causal", "bias", "dropout", "padding"] {
            let case = |fans| Case {
                options,
                keys,
                fans,
            };
            let expected = case(false).run([1, 1], whole, whole).remove(0);
            for (axes, queries, placed, fans) in [
                ([1, 3], whole, last(Replicate), false),
                ([2, 2], whole, tokens, false),
                // Queries over one axis and keys over the other.
                ([2, 2], over(Shard(TOKENS)), last(Replicate), false),
                // A ring over the first axis.
                ([2, 2], over(Shard(TOKENS)), tokens, false),
                ([2, 3], over(Shard(HEADS)), last(Shard(HEADS)), false),
                ([2, 2], over(Shard(BATCH)), last(Shard(BATCH)), false),
                ([1, 3], whole, last(Replicate), true),
                ([2, 2], whole, tokens, true),
                // Nothing to merge over the second axis.
                ([3, 1], whole, tokens, true),
            ] {
                let case = case(fans);
                for found in case.run(axes, queries, placed) {
                    let place = format!("{case:?}, queries {queries:?}, keys {placed:?}");
                    compare(&found, &expected, 2e-5, &place);
                }
            }
        }
    }
}
