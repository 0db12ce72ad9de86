//! Pairing of operands: the placement rule shared by all operators.

use crate::layout::{Fan, Layout, Partial, Placement, ReduceOp, Replicate, Shard};
use crate::{Error, MeshShape, Result};

/// Meaning of a dim of an operand, like a letter in an einsum; see the example of [`Pairing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A dim that all operands with this number share. It is a dim of the result, or else summed
    /// over.
    Common(usize),
    /// A dim of one cell, paired with all cells of the other operands.
    Broadcast,
    /// A dim that must be whole on every rank.
    Whole,
}

/// Partial operands that an operator permits, namely those in which it is linear; see the example
/// of [`Pairing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linearity {
    /// All operands together may be partial sums: addition.
    Additive,
    /// One operand may be a partial sum: multiplication.
    Multiplicative,
    /// The first operand may be a partial sum: division.
    First,
    /// No operand may be a partial sum.
    None,
}

/// Operand of the rule; see the example of [`Pairing`].
#[derive(Clone, Copy, Debug)]
pub struct Term<'a> {
    /// The name in error messages; empty if an error can only be about one tensor.
    pub name: &'a str,
    /// The layout.
    pub layout: &'a Layout,
    /// The roles of the dims.
    pub roles: &'a [Role],
}

/// Pairing of operands: the placements of the result, and the axes over which each operand fans
/// out.
///
/// # Example
/// ```
/// use halocline_core::plan::{Linearity, Pairing, Role::Common, Term};
/// use halocline_core::{Layout, MeshShape, Partial, ReduceOp, Shard};
///
/// // x[i, k] · weight[k, j], with the summed dim sharded.
/// let mesh = MeshShape::new(&[("tensor", 2)], vec![0, 1])?.into();
/// let x = Layout::new(&mesh, &[6, 4], &[Shard(1)])?;
/// let weight = Layout::new(&mesh, &[4, 8], &[Shard(0)])?;
/// let operands = [
///     Term { name: "x", layout: &x, roles: &[Common(0), Common(1)] },
///     Term { name: "weight", layout: &weight, roles: &[Common(1), Common(2)] },
/// ];
/// let result = [Common(0), Common(2)];
/// let pairing = Pairing::new("matmul", &operands, &result, Linearity::Multiplicative)?;
/// assert_eq!(pairing.placements(), [Partial(ReduceOp::Sum)]);
/// assert_eq!(pairing.layout(&x).shape(), [6, 8]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairing {
    placements: Vec<Placement>,
    fan_out: Vec<Vec<usize>>,
    extents: Vec<Vec<usize>>,
}

impl Pairing {
    /// Applies the rule. On each axis, operands are either sharded in the same common dim with the
    /// same extents, or not sharded; those without that dim are replicated and fan out, or are
    /// fanned out already ([`Fan`]). The result is sharded in the dim, or a partial sum over it; if
    /// no operand is sharded and one fans out, the result fans out.
    ///
    /// # Errors
    /// Operands on different meshes, or with different extents of a common dim; placements without
    /// a rule, with the redistribution that helps.
    pub fn new(
        operator: &str,
        operands: &[Term<'_>],
        result: &[Role],
        linearity: Linearity,
    ) -> Result<Self> {
        let mesh = operands[0].layout.mesh();
        for operand in &operands[1..] {
            require_same_mesh(operator, mesh, operand.layout.mesh())?;
        }
        let mut pairing = Self {
            placements: Vec::new(),
            fan_out: vec![Vec::new(); operands.len()],
            extents: Vec::new(),
        };
        for axis in 0..mesh.sizes().len() {
            let rule = Axis {
                operator,
                operands,
                axis,
            };
            let (placement, fans) = rule.pair(result, linearity)?;
            pairing.placements.push(placement);
            for operand in fans {
                pairing.fan_out[operand].push(axis);
            }
        }
        for role in result {
            pairing.extents.push(extents(operator, operands, *role)?);
        }
        // The extents of dims that are summed over must agree, too.
        let summed = operands.iter().flat_map(|term| term.roles);
        for role in summed.filter(|role| !result.contains(role)) {
            extents(operator, operands, *role)?;
        }
        Ok(pairing)
    }

    /// Returns the axes over which a replicated operand that every rank needs whole fans out when
    /// it is combined with a field: those on which the field is sharded or fans out, as in
    /// [`new`](Self::new).
    ///
    /// # Errors
    /// The field has partial values.
    pub fn of_whole(operator: &str, field: &Layout) -> Result<Vec<usize>> {
        field.require_resolved(operator)?;
        Ok(field.axes_where(Placement::varies))
    }

    /// The placements of the result.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// The axes over which an operand fans out.
    pub fn fan_out(&self, operand: usize) -> &[usize] {
        &self.fan_out[operand]
    }

    /// Returns the layout of the result, on the mesh of `like`.
    pub fn layout(&self, like: &Layout) -> Layout {
        like.derive(self.placements.clone(), self.extents.clone())
    }
}

/// The extents of a dim of the result, taken from the operands that have it, which must agree.
fn extents(operator: &str, operands: &[Term<'_>], role: Role) -> Result<Vec<usize>> {
    let mut found: Option<(&Layout, &[usize])> = None;
    for operand in operands {
        let dims = operand.roles.iter().enumerate();
        for (dim, _) in dims.filter(|(_, held)| matches!(role, Role::Common(_)) && **held == role) {
            let extents = operand.layout.extents(dim);
            match found {
                Some((first, other)) if other != extents => {
                    // Sizes that differ fit in no placement.
                    if other.iter().sum::<usize>() != extents.iter().sum::<usize>() {
                        let message = format!("sizes differ: {first} and {}", operand.layout);
                        return Err(Error::operator(operator, message));
                    }
                    return Err(Error::placement(
                        operator,
                        format!("{first} with {}", operand.layout),
                        "extents differ: redistribute one operand to the layout of the other",
                    ));
                }
                _ => found = Some((operand.layout, extents)),
            }
        }
    }
    Ok(found.map_or_else(|| vec![1], |(_, extents)| extents.to_vec()))
}

/// The rule on one axis.
struct Axis<'a> {
    operator: &'a str,
    operands: &'a [Term<'a>],
    axis: usize,
}

impl Axis<'_> {
    fn placement(&self, operand: usize) -> Placement {
        self.operands[operand].layout.placements()[self.axis]
    }

    /// Returns the placement of the result, and the operands that fan out.
    fn pair(&self, result: &[Role], linearity: Linearity) -> Result<(Placement, Vec<usize>)> {
        let all = || 0..self.operands.len();
        let replicated = |operand: &usize| self.placement(*operand) == Replicate;
        if all().all(|operand| replicated(&operand)) {
            return Ok((Replicate, Vec::new()));
        }
        let whole = |operand: &usize| matches!(self.placement(*operand), Replicate | Fan);
        if all().all(|operand| whole(&operand)) {
            return Ok((Fan, all().filter(replicated).collect()));
        }
        // A sum of terms passes through an operator that is linear in it. Replicated operands then
        // act on a term that differs by rank, so they fan out.
        if let Some(partial) = all().find(|&index| matches!(self.placement(index), Partial(_))) {
            let sum = Partial(ReduceOp::Sum);
            let sums = all().filter(|&index| self.placement(index) == sum).count();
            let alone = sums == 1 && all().filter(whole).count() + 1 == self.operands.len();
            let allowed = match linearity {
                Linearity::Additive => sums == self.operands.len(),
                Linearity::Multiplicative => alone,
                Linearity::First => alone && self.placement(0) == sum,
                Linearity::None => false,
            };
            if !allowed {
                return Err(self.no_rule(&[partial], "call resolve() first".into()));
            }
            return Ok((sum, all().filter(replicated).collect()));
        }
        // Sharded operands must share one dim, so that ranks hold matching cells of it.
        let mut common = None;
        for (operand, term) in self.operands.iter().enumerate() {
            let Shard(dim) = self.placement(operand) else {
                continue;
            };
            let role = term.roles[dim];
            if !matches!(role, Role::Common(_)) {
                return Err(self.no_rule(&[operand], term.layout.whole_in(dim)));
            }
            let (first, number) = *common.get_or_insert((operand, role));
            if role != number {
                let help = format!(
                    "redistribute so that both are sharded alike, {}",
                    self.ways(number)
                );
                return Err(self.no_rule(&[first, operand], help));
            }
        }
        let (first, number) = common.expect("an operand is sharded");
        // A replicated operand with the dim holds more cells than its partners; one without it is
        // combined whole with each rank's cells.
        let lacks = |operand: &usize| !self.operands[*operand].roles.contains(&number);
        if let Some(other) = all().filter(whole).find(|index| !lacks(index)) {
            let mut both = [first, other];
            both.sort_unstable();
            let help = format!("redistribute one operand, {}", self.ways(number));
            return Err(self.no_rule(&both, help));
        }
        let placement = match result.iter().position(|role| *role == number) {
            Some(dim) => Shard(dim),
            None => Partial(ReduceOp::Sum),
        };
        // Each rank would add an operand such as a bias to its part of the sum.
        if placement == Partial(ReduceOp::Sum)
            && linearity != Linearity::Multiplicative
            && let Some(added) = all().find(whole)
        {
            let help = "add it to the resolved result instead".into();
            return Err(self.no_rule(&[first, added], help));
        }
        Ok((placement, all().filter(replicated).collect()))
    }

    /// The placements with which the operands can be paired, for error messages.
    fn ways(&self, number: Role) -> String {
        let placement = |operand: &Term<'_>| {
            let dim = operand.roles.iter().position(|role| *role == number);
            dim.map_or(Replicate, Shard).to_string()
        };
        let sharded: Vec<String> = self.operands.iter().map(placement).collect();
        format!("with the same extents: {}", sharded.join(" with "))
    }

    fn no_rule(&self, operands: &[usize], help: String) -> Error {
        let named = |&operand: &usize| {
            let name = self.operands[operand].name;
            let link = if name.is_empty() { "" } else { " of " };
            format!("{}{link}{name}", self.placement(operand))
        };
        let placements: Vec<String> = operands.iter().map(named).collect();
        let axis = &self.operands[0].layout.mesh().names()[self.axis];
        let placement = format!("{} on axis \"{axis}\"", placements.join(" with "));
        Error::placement(self.operator, placement, help)
    }
}

/// Requires that two operands lie on the same mesh.
fn require_same_mesh(operator: &str, lhs: &MeshShape, rhs: &MeshShape) -> Result<()> {
    if std::ptr::eq(lhs, rhs) || lhs == rhs {
        return Ok(());
    }
    let message = format!("operands lie on two meshes:\n{lhs}and\n{rhs}");
    Err(Error::operator(operator, message))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Role::{Broadcast, Common, Whole};
    use super::*;

    const SUM: Placement = Partial(ReduceOp::Sum);

    fn layout(shape: &[usize], placements: &[Placement]) -> Layout {
        let axes = [("a", 2), ("b", 2)];
        let axes = &axes[..placements.len()];
        let size = axes.iter().map(|(_, size)| size).product();
        let mesh = Arc::new(MeshShape::new(axes, (0..size).collect()).unwrap());
        Layout::new(&mesh, shape, placements).unwrap()
    }

    /// An operand without a name.
    fn term<'a>(layout: &'a Layout, roles: &'a [Role]) -> Term<'a> {
        Term {
            name: "",
            layout,
            roles,
        }
    }

    /// A linear layer: `x[i, k] · weight[k, j] + bias[j]`.
    fn linear(
        x: &[Placement],
        weight: &[Placement],
        bias: Option<&[Placement]>,
    ) -> Result<Pairing> {
        let layouts = [layout(&[6, 4], x), layout(&[4, 8], weight)];
        let bias = bias.map(|bias| layout(&[8], bias));
        let roles: [&[Role]; 3] = [
            &[Common(0), Common(1)],
            &[Common(1), Common(2)],
            &[Common(2)],
        ];
        let names = ["x", "weight", "bias"];
        let operands: Vec<Term> = (layouts.iter().chain(&bias).zip(roles).zip(names))
            .map(|((layout, roles), name)| Term {
                name,
                layout,
                roles,
            })
            .collect();
        let linearity = if bias.is_some() {
            Linearity::None
        } else {
            Linearity::Multiplicative
        };
        Pairing::new("linear", &operands, &[Common(0), Common(2)], linearity)
    }

    #[test]
    fn rows_columns_and_the_summed_dim_may_be_sharded() {
        let rows = linear(&[Shard(0)], &[Replicate], Some(&[Replicate])).unwrap();
        assert_eq!(rows.placements(), [Shard(0)]);
        assert_eq!(
            [0, 1, 2].map(|operand| rows.fan_out(operand).len()),
            [0, 1, 1]
        );
        let columns = linear(&[Replicate], &[Shard(1)], Some(&[Shard(0)])).unwrap();
        assert_eq!(columns.placements(), [Shard(1)]);
        assert_eq!(
            [0, 1, 2].map(|operand| columns.fan_out(operand).len()),
            [1, 0, 0]
        );
        let summed = linear(&[Shard(1)], &[Shard(0)], None).unwrap();
        assert_eq!(summed.placements(), [SUM]);
        let both = linear(&[Shard(0), Shard(1)], &[Replicate, Shard(0)], None).unwrap();
        assert_eq!(both.placements(), [Shard(0), SUM]);
        assert_eq!(both.fan_out(1), [0]);
        assert_eq!(
            both.layout(&layout(&[6, 4], &[Replicate, Replicate]))
                .shape(),
            [6, 8]
        );
    }

    #[test]
    fn what_has_no_rule_is_told_with_the_way_out() {
        let error = |pairing: Result<Pairing>| pairing.unwrap_err().to_string();
        assert_eq!(
            error(linear(&[Shard(1)], &[Replicate], None)),
            "linear: no rule for Shard(1) of x with Replicate of weight on axis \"a\"; redistribute one operand, with \
             the same extents: Shard(1) with Shard(0)"
        );
        let bias = error(linear(&[Shard(1)], &[Shard(0)], Some(&[Replicate])));
        assert!(bias.contains("add it to the resolved result"), "{bias}");
        let two = error(linear(&[Shard(0)], &[Shard(1)], None));
        assert!(
            two.contains("Shard(0) of x with Shard(1) of weight"),
            "{two}"
        );
        let partial = error(linear(&[SUM], &[SUM], None));
        assert!(partial.contains("call resolve() first"), "{partial}");
        let whole = layout(&[4, 8], &[Shard(1)]);
        let roles = [Common(0), Whole];
        let operand = term(&whole, &roles);
        assert_eq!(
            error(Pairing::new("norm", &[operand], &roles, Linearity::None)),
            "norm: no rule for Shard(1) on axis \"a\"; redistribute(&[Replicate]) first"
        );
    }

    #[test]
    fn whole_operands_fan_out_where_the_field_is_sharded() {
        let roles = [Common(0), Common(1)];
        for placements in [
            [Shard(0), Replicate],
            [Shard(1), Shard(0)],
            [Replicate, SUM],
        ] {
            let field = layout(&[6, 4], &placements);
            let parameter = layout(&[3], &[Replicate, Replicate]);
            let terms = [term(&field, &roles), term(&parameter, &[Whole])];
            let pairing = Pairing::new("norm", &terms, &roles, Linearity::None);
            let expected = pairing.map(|pairing| pairing.fan_out(1).to_vec());
            let found = Pairing::of_whole("norm", &field);
            assert_eq!(
                found.map_err(|e| e.to_string()),
                expected.map_err(|e| e.to_string())
            );
        }
    }

    #[test]
    fn sums_pass_through_what_is_linear() {
        assert_eq!(
            linear(&[SUM], &[Replicate], None).unwrap().placements(),
            [SUM]
        );
        assert_eq!(linear(&[SUM], &[Replicate], None).unwrap().fan_out(1), [0]);
        let [x, y] = [layout(&[6, 4], &[SUM]), layout(&[6, 1], &[SUM])];
        let operands = [
            term(&x, &[Common(0), Common(1)]),
            term(&y, &[Common(0), Broadcast]),
        ];
        let pair = |linearity| Pairing::new("add", &operands, &[Common(0), Common(1)], linearity);
        assert_eq!(pair(Linearity::Additive).unwrap().placements(), [SUM]);
        assert!(pair(Linearity::Multiplicative).is_err());
    }

    #[test]
    fn extents_of_common_dims_agree() {
        let x = layout(&[6, 4], &[Shard(0)]);
        let uneven = x.with_extents(0, &[5, 1]).unwrap();
        let roles = [Common(0), Common(1)];
        let operands = [&x, &uneven].map(|layout| term(layout, &roles));
        let error = Pairing::new("add", &operands, &roles, Linearity::None).unwrap_err();
        assert!(matches!(error, Error::Placement { .. }));
        assert!(error.to_string().contains("extents differ"), "{error}");
    }
}
