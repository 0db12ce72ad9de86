//! The current mesh of a scope, and meshes over some of the ranks.

use burn::tensor::Tensor;
use halocline_core::ops::fan_out;
use halocline_core::{
    DeviceMesh, Launcher, Layout, Partial, ReduceOp, Replicate, Result, Shard, ShardTensor,
    Traffic, scatter_tensor,
};

#[test]
fn scopes_nest_per_thread_and_end_with_a_panic() {
    let current = || {
        DeviceMesh::current()
            .ok()
            .map(|mesh| mesh.shape().names().to_vec())
    };
    Launcher::local(2)
        .run(|world| {
            let outer = world.mesh([("outer", 2)])?;
            let inner = world.mesh([("inner", 2)])?;
            let named = |name: &str| Some(vec![name.to_string()]);
            assert_eq!(current(), None);
            outer.scope(|| {
                assert_eq!(current(), named("outer"));
                inner.scope(|| assert_eq!(current(), named("inner")));
                assert_eq!(current(), named("outer"));
                let panic = || {
                    inner.scope(|| {
                        if current() == named("inner") {
                            std::panic::resume_unwind(Box::new(()))
                        }
                    })
                };
                assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panic)).is_err());
                assert_eq!(current(), named("outer"));
                let other = std::thread::spawn(current).join();
                assert_eq!(other.expect("no panic"), None);
            });
            assert_eq!(current(), None);
            let error = DeviceMesh::current().unwrap_err().to_string();
            assert!(error.contains("mesh.scope"), "{error}");
            Ok(())
        })
        .unwrap();
}

/// Ranks 0 and 2 are not in the mesh; the order of ranks is that of the mesh.
#[test]
fn a_mesh_over_some_ranks_involves_no_others() {
    Launcher::local(4)
        .check(true)
        .run(|world| {
            let Some(mesh) = world.mesh_over([("lat", 2)], &[3, 1])? else {
                assert!([0, 2].contains(&world.rank()));
                let stats = world.comm_stats();
                assert!(
                    Traffic::ALL
                        .iter()
                        .all(|&traffic| stats.of(traffic).messages == 0)
                );
                return Ok(());
            };
            assert_eq!(mesh.position(), [9, 1, 9, 0][world.rank()]);
            let whole = Tensor::<1>::from_floats([1.0, 2.0, 3.0, 4.0, 5.0], world.device());
            let sample = (world.rank() == 1).then(|| whole.clone());
            let x = scatter_tensor(sample, 1, &mesh, &[Shard(0)])?.require_grad();
            let full = x.full_tensor();
            full.clone().into_data().assert_eq(&whole.to_data(), true);
            let weight = Tensor::<1>::ones([1], world.device()).require_grad();
            let y = x * replicated(&mesh, weight.clone())?;
            let sum = y.local().clone().sum();
            let layout = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Sum)])?;
            let loss = ShardTensor::from_local(sum, &mesh, &layout)?;
            let gradient = weight.grad(&loss.backward()).expect("a gradient");
            gradient.into_data().assert_eq(&[15.0_f32].into(), true);
            Ok(())
        })
        .unwrap();
}

fn replicated(mesh: &DeviceMesh, weight: Tensor<1>) -> Result<ShardTensor<1>> {
    let layout = Layout::new(mesh.shape(), &[1], &[Replicate])?;
    ShardTensor::from_local(weight, mesh, &layout)
}

/// Each backward pass sums the gradients of its own mesh, in buckets, even if other sums are
/// pending.
#[test]
fn sums_of_gradients_keep_to_their_mesh() {
    let gradients = Launcher::local(3).collect(|world| {
        let all = world.mesh([("data", 3)])?;
        let some = world.mesh_over([("data", 2)], &[0, 2])?;
        let loss = |mesh: &DeviceMesh, weight: &Tensor<1>| {
            let factor = 1.0 + world.rank() as f64;
            let term = (fan_out(weight.clone(), mesh, &[0], "term") * factor).sum();
            let layout = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Sum)])?;
            ShardTensor::from_local(term, mesh, &layout)
        };
        let parameter = || Tensor::<1>::ones([2], world.device()).require_grad();
        let (shared, own) = (parameter(), parameter());
        let of_all = loss(&all, &shared)?;
        let value = |loss: ShardTensor<1>, weight: &Tensor<1>| {
            let gradient = weight.grad(&loss.backward()).expect("a gradient");
            gradient.into_data().iter::<f32>().next().expect("a cell")
        };
        let mut found = Vec::new();
        if let Some(some) = some {
            found.push(value(loss(&some, &own)?, &own));
        }
        found.push(value(of_all, &shared));
        Ok(found)
    });
    let gradients = gradients.unwrap();
    assert_eq!(gradients, [vec![4.0, 6.0], vec![6.0], vec![4.0, 6.0]]);
}

#[test]
fn meshes_over_some_ranks_are_checked_on_all() {
    let errors = Launcher::local(3).collect(|world| {
        let error = |size: usize, ranks: &[usize]| {
            let mesh = world.mesh_over([("lat", size)], ranks);
            mesh.unwrap_err().to_string()
        };
        Ok([error(3, &[0, 1]), error(2, &[1, 1]), error(2, &[1, 3])])
    });
    for [count, twice, other] in errors.unwrap() {
        assert!(
            count.contains("multiply to 3, but there are 2 ranks"),
            "{count}"
        );
        assert!(twice.contains("rank 1 is twice"), "{twice}");
        assert!(other.contains("rank 3 of the mesh"), "{other}");
    }
}
