//! Bytes on the wire: an operator of the registry sends the bytes of its formula, and nothing if it
//! has no formula.

mod fields;
mod sums;
mod transforms;

use halocline::ops::golden::{Arguments, Golden};
use halocline::ops::operators;
use halocline::ops::testing::Sharding;
use halocline::prelude::*;

use crate::cases::{Case, draw_case};
use crate::draw::Draw;

/// Bytes of an element in f32, and of a statistic in f64.
const F32: u64 = 4;
const F64: u64 = 8;
/// Cells of a sharded dim of [`CELLS`] on each of three ranks.
const EXTENTS: [usize; 3] = [4, 3, 2];
const CELLS: usize = 9;
/// Ordered pairs of ranks: a small reduction sends each element once for each pair.
const PAIRS: u64 = 6;
/// Number of sides, over all ranks, at which a rank has a neighbour.
const SIDES: u64 = 4;

/// Expected bytes that all ranks together send.
pub(crate) struct Sent {
    operator: &'static str,
    case: Case,
    placements: Vec<Placement>,
    extents: Vec<usize>,
    /// Bytes of the forward and of the backward pass.
    bytes: [u64; 2],
}

/// Returns a case of an operator with one dim sharded over three ranks, in extents of 4, 3 and 2
/// cells.
fn sent(operator: &'static str, case: Case, dim: usize, bytes: [u64; 2]) -> Sent {
    Sent {
        operator,
        case,
        placements: vec![Shard(dim)],
        extents: EXTENTS.to_vec(),
        bytes,
    }
}

impl Sent {
    /// Replaces the extents of the sharded dim.
    fn with_extents(self, extents: &[usize]) -> Self {
        Self {
            extents: extents.to_vec(),
            ..self
        }
    }

    /// Shards over two axes of two ranks each, with even extents.
    fn on_two_axes(self, placements: [Placement; 2]) -> Self {
        Self {
            placements: placements.to_vec(),
            ..self
        }
    }

    fn sharding(&self) -> Sharding {
        match self.placements[..] {
            [Shard(dim)] => Sharding {
                axes: vec![("a", self.extents.len())],
                placements: vec![Shard(dim)],
                extents: vec![(dim, self.extents.clone())],
            },
            _ => Sharding {
                axes: vec![("a", 2), ("b", 2)],
                placements: self.placements.clone(),
                extents: Vec::new(),
            },
        }
    }
}

/// Returns whether the registry lists no traffic, except perhaps for partial results.
fn is_silent(travels: &str) -> bool {
    travels == "–"
        || travels.starts_with("– (partial")
        || travels.starts_with("– (the result is partial")
}

/// Returns the bytes that all ranks send, in both passes.
fn count(golden: &Golden, arguments: &Arguments, sharding: &Sharding) -> Result<[u64; 2]> {
    let sent = Launcher::local(sharding.ranks())
        .check(false)
        .collect(|world| {
            let mesh = world.mesh_of(&sharding.axes)?;
            golden.bytes_sent(&mesh, sharding, arguments)
        })?;
    Ok(sent
        .into_iter()
        .fold([0, 0], |[a, b], [c, d]| [a + c, b + d]))
}

#[test]
fn operators_send_the_bytes_of_their_formulas() {
    let all = [fields::sent_by(), sums::sent_by(), transforms::sent_by()];
    let mut failures = Vec::new();
    for sent in all.iter().flatten() {
        let golden = operators().find(|golden| golden.name == sent.operator);
        let golden = golden.unwrap_or_else(|| panic!("no operator {}", sent.operator));
        let sharding = sent.sharding();
        match count(golden, &sent.case.arguments, &sharding) {
            Ok(found) if found == sent.bytes => {}
            found => {
                let expected = sent.bytes;
                let Sent { operator, case, .. } = sent;
                let why = format!(
                    "{operator} {}: {found:?}, expected {expected:?}",
                    case.options
                );
                failures.push(why);
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let silent = |golden: &&Golden| golden.travels.iter().all(|travels| is_silent(travels));
    for golden in operators().filter(|golden| !silent(golden)) {
        let has = all
            .iter()
            .flatten()
            .any(|sent| sent.operator == golden.name);
        assert!(has, "no formula for the bytes of {}", golden.name);
    }
}

/// Operators without traffic in the registry, on random arguments and shardings; gradients of
/// parameters are summed.
#[test]
fn other_operators_send_nothing() {
    let mut failures = Vec::new();
    // The comparison concatenates the parts in the opposite order, which moves them.
    for golden in operators().filter(|golden| !["split", "chunk"].contains(&golden.name)) {
        let silent = golden.travels.map(is_silent);
        for number in 0..4 {
            let mut draw = Draw::new(number);
            let case = draw_case(golden.name, &mut draw).expect("random arguments");
            let mut inputs = case.arguments.inputs.iter();
            // A mean is divided by the mean of the weights, which travels.
            if golden.travels[0].contains("weights") && inputs.any(|(name, _)| name == "weight") {
                continue;
            }
            let mut sharding = draw.sharding(golden, &case.arguments);
            // The comparison turns `Fan` into a shard, whose gradient travels.
            let placements = sharding.placements.iter_mut();
            let fans = placements.filter(|placement| **placement == halocline::core::Fan);
            fans.for_each(|placement| *placement = Replicate);
            let [forward, backward] = match count(golden, &case.arguments, &sharding) {
                Err(error) if error.to_string().contains("no rule for") => continue,
                found => found.unwrap_or_else(|error| panic!("{}: {error}", golden.name)),
            };
            if (silent[0] && forward > 0) || (silent[1] && backward > 0) {
                failures.push(format!(
                    "{} {} on {sharding:?}: {forward} bytes, {backward} back",
                    golden.name, case.options
                ));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
