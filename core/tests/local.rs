//! Conversion between local and sharded tensors, and the meaning of local gradients.

use burn::tensor::Tensor;
use halocline_core::{Launcher, Layout, LocalGradient, Replicate, Shard, ShardTensor};

/// Covers both choices for each direction.
#[test]
fn gradients_of_local_tensors_are_what_their_names_say() {
    use LocalGradient::{Partial, Replicated};
    for (inward, outward, expected) in [
        (Replicated, Replicated, [[2.0, 2.0], [3.0, 3.0]]),
        (Partial, Replicated, [[2.0, 2.0], [0.0, 0.0]]),
        (Replicated, Partial, [[5.0, 5.0], [5.0, 5.0]]),
        (Partial, Partial, [[5.0, 5.0], [0.0, 0.0]]),
    ] {
        Launcher::local(4)
            .run(|world| {
                // Replicated over "a", sharded over "b".
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                let layout = Layout::new(mesh.shape(), &[2], &[Replicate, Shard(0)])?;
                let own = Tensor::<1>::ones([1], world.device()).require_grad();
                let x = ShardTensor::from_local_with(own.clone(), &mesh, &layout, inward)?;
                let [a, b] = mesh.coords()[..] else {
                    unreachable!("two axes")
                };
                let y = x.to_local_with(outward) * (2.0 + a as f64);
                let gradient = own.grad(&y.sum().backward()).expect("a gradient");
                gradient
                    .into_data()
                    .assert_eq(&[expected[a][b] as f32].into(), true);
                Ok(())
            })
            .unwrap();
    }
}
