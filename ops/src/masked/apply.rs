//! Zeros in the cells that do not count.

use halocline_core::plan::{Linearity, Pairing, Role, Term};
use halocline_core::{Error, Result, ShardTensor};

use crate::field::Field;

/// Requires weights that can be broadcast to the shards of a field.
pub(crate) fn require_fit<const D: usize>(
    operator: &str,
    weight: &ShardTensor<D>,
    x: &ShardTensor<D>,
) -> Result<()> {
    x.require_resolved(operator)?;
    let (held, shape) = (weight.dims(), x.dims());
    if !(0..D).all(|dim| held[dim] == shape[dim] || held[dim] == 1) {
        let message = format!(
            "weights {held:?} for a field {shape:?}; expected the field's shape, or dims of one cell"
        );
        return Err(Error::operator(operator, message));
    }
    let cells: [Role; D] = std::array::from_fn(Role::Common);
    let of_weight: [Role; D] = std::array::from_fn(|dim| {
        if held[dim] == 1 && !weight.layout().is_sharded(dim) {
            Role::Broadcast
        } else {
            Role::Common(dim)
        }
    });
    let operands = [(x.layout(), &cells), (weight.layout(), &of_weight)];
    let operands = operands.map(|(layout, roles)| Term {
        name: "",
        layout,
        roles,
    });
    let pairing = Pairing::new(operator, &operands, &cells, Linearity::None)?;
    if pairing.layout(x.layout()) != *x.layout() {
        return Err(Error::placement(
            operator,
            format!(
                "weights in shards {} with a field {}",
                weight.layout(),
                x.layout()
            ),
            "redistribute the weights to the field's shards",
        ));
    }
    Ok(())
}

/// Replaces elements of `x` by zero where the mask is zero, whatever `x` holds there; their
/// gradient is zero, too. Other elements stay as they are, whatever their weight.
///
/// # Shapes
/// `mask` has the shape of `x`, or size one in dims over which it is broadcast.
///
/// # Placement
/// Any dims of `x` may be sharded. Dims of the mask are sharded as those of `x`, except dims that
/// are broadcast. Nothing is sent.
///
/// # Errors
/// Fails for partial values, and for a mask with another shape or other shards.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::masked::apply_mask;
///
/// let x = Tensor::<1>::from([1.0, f32::NAN]);
/// let x = apply_mask(x, Tensor::from([0.5, 0.0]))?;
/// x.into_data().assert_eq(&[1.0_f32, 0.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn apply_mask<const D: usize, X: Field<D>>(x: X, mask: X) -> Result<X> {
    let x = x.into_shard();
    // In its own element type: rounded to that of `x`, a small weight may become zero.
    let mask = mask.into_shard().inner();
    require_fit("apply_mask", &mask, &x)?;
    let (local, layout, mesh) = x.into_parts();
    let without = mask.into_local().equal_elem(0.0);
    let local = local.mask_fill(without, 0.0); // broadcasts the mask
    Ok(Field::from_shard(ShardTensor::from_parts(
        local, layout, mesh,
    )))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Replicate, Shard};

    use super::*;

    #[test]
    fn small_weights_count_whatever_the_type_of_the_field() {
        let x = Tensor::<1>::ones([2], (&Default::default(), burn::tensor::DType::F16));
        let x = apply_mask(x, Tensor::from([1e-12, 0.0])).unwrap();
        assert_eq!(x.into_data().iter::<f32>().collect::<Vec<_>>(), [1.0, 0.0]);
    }

    #[test]
    fn weights_of_another_shape_or_layout_are_refused() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("lat", 2)])?;
                let field = |shape, placement| ShardTensor::<2>::ones(shape, &mesh, &[placement]);
                let x = || field([5, 3], Shard(0));
                let before = world.comm_stats();
                for (weight, told) in [
                    (field([4, 3], Shard(0))?, "expected the field's shape"),
                    (field([5, 3], Shard(1))?, "Shard(1)"),
                ] {
                    let error = apply_mask(x()?, weight).unwrap_err().to_string();
                    assert!(error.contains(told), "{error}");
                }
                let error = apply_mask(field([5, 3], Replicate)?, field([5, 3], Shard(0))?);
                let error = error.unwrap_err().to_string();
                assert!(
                    error.contains("no rule for Replicate with Shard(0)"),
                    "{error}"
                );
                let row = field([1, 3], Replicate)?;
                let error = apply_mask(row, field([5, 3], Replicate)?).unwrap_err();
                let error = error.to_string();
                assert!(error.contains("expected the field's shape"), "{error}");
                assert_eq!(world.comm_stats(), before);
                Ok(())
            })
            .unwrap();
    }
}
