//! Gradients of parameters in buckets: which ranks sum which gradients together.

use burn::tensor::Tensor;
use halocline_core::ops::fan_out;
use halocline_core::{DeviceMesh, Launcher, Layout, Partial, ReduceOp, Result, ShardTensor, World};

/// Makes a parameter that is equal on all ranks.
fn parameter(world: &World, shape: [usize; 2]) -> Tensor<2> {
    Tensor::ones(shape, world.device()).require_grad()
}

/// This rank's contribution to a loss over a mesh: the sum of parameters, each times a factor.
fn loss(mesh: &DeviceMesh, terms: &[(&Tensor<2>, f32)]) -> Result<ShardTensor<1>> {
    let axes: Vec<usize> = (0..mesh.shape().sizes().len()).collect();
    let term = |(parameter, factor): &(&Tensor<2>, f32)| {
        (fan_out((*parameter).clone(), mesh, &axes, "term") * *factor).sum()
    };
    let sum = terms.iter().map(term).reduce(|lhs, rhs| lhs + rhs);
    let partial = vec![Partial(ReduceOp::Sum); axes.len()];
    let layout = Layout::new(mesh.shape(), &[1], &partial)?;
    ShardTensor::from_local(sum.expect("a term"), mesh, &layout)
}

/// Returns the gradient of a loss with respect to a parameter, which is the same in all cells.
fn gradient(loss: &ShardTensor<1>, parameter: &Tensor<2>) -> f32 {
    let gradient = parameter.grad(&loss.backward()).expect("a gradient");
    let cells = gradient.into_data().try_to_vec::<f32>().expect("floats");
    assert!(cells.iter().all(|cell| *cell == cells[0]), "{cells:?}");
    cells[0]
}

#[test]
fn a_loss_of_one_rank_leaves_the_buckets_of_all() {
    let gradients = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let weight = parameter(&world, [3, 4]);
        let shared = loss(&mesh, &[(&weight, 1.0 + world.rank() as f32)])?;
        if world.is_root() {
            let own = parameter(&world, [3, 4]);
            let local = ShardTensor::solo((own.clone() * 5.0).sum());
            assert_eq!(gradient(&local, &own), 5.0);
        }
        Ok(gradient(&shared, &weight))
    });
    assert_eq!(gradients.unwrap(), [3.0, 3.0]);
}

#[test]
fn a_loss_of_a_submesh_leaves_the_buckets_of_others() {
    let gradients = Launcher::local(4).collect(|world| {
        let mesh = world.mesh([("data", 2), ("lat", 2)])?;
        let rows = mesh.submesh(&["lat"])?;
        let weight = parameter(&world, [3, 4]);
        let shared = loss(&mesh, &[(&weight, 1.0 + world.rank() as f32)])?;
        if mesh.coords()[0] == 0 {
            let own = parameter(&world, [3, 4]);
            let of_row = loss(&rows, &[(&own, 1.0 + world.rank() as f32)])?;
            assert_eq!(gradient(&of_row, &own), 3.0);
        }
        Ok(gradient(&shared, &weight))
    });
    assert_eq!(gradients.unwrap(), [10.0; 4]);
}

/// Detected by the buckets or, with checks enabled, by the operator that uses the parameters.
#[test]
fn parameters_in_another_order_are_an_error() {
    let error = |check| {
        let result = Launcher::local(2).check(check).run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let (wide, high) = (parameter(&world, [3, 4]), parameter(&world, [4, 3]));
            let mut terms = [(&wide, 1.0), (&high, 10.0)];
            if world.rank() == 1 {
                terms.reverse();
            }
            loss(&mesh, &terms)?.backward();
            Ok(())
        });
        result.unwrap_err().to_string()
    };
    let unchecked = error(false);
    assert!(unchecked.contains("ranks diverged"), "{unchecked}");
    for order in ["24 F32 of [[4, 3], [3, 4]]", "24 F32 of [[3, 4], [4, 3]]"] {
        assert!(unchecked.contains(order), "no {order:?} in {unchecked}");
    }
    let checked = error(true);
    assert!(
        checked.contains("rank 1 holds another tensor ([4, 3] of F32)"),
        "{checked}"
    );
}
