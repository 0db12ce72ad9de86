//! Partial values: the result of a reduction over a sharded dim, and when it is communicated.
//!
//! `cargo run --example 02_partial -- 4`

use halocline::core::Traffic;
use halocline::prelude::*;

fn main() -> Result<()> {
    let ranks = std::env::args()
        .nth(1)
        .map_or(2, |ranks| ranks.parse().expect("a number of ranks"));
    Launcher::from_env().ranks(ranks).run(|world| {
        let mesh = world.mesh([("lat", world.size())])?;
        let cells = Tensor::<1>::from_floats(
            std::array::from_fn::<f32, 21, _>(|i| i as f32).as_slice(),
            world.device(),
        );
        let x = ShardTensor::distribute(cells.reshape([7, 3]), &mesh, &[Shard(0)])?; // uneven: 7 rows

        let before = world.comm_stats();
        let total = x.clone().sum_dims(&[0]); // [1, 3], the sum of each rank's rows
        assert_eq!(total.placements(), [Partial(ReduceOp::Sum)]);
        let scaled = total * 2.0; // scaling a sum scales its terms
        let sent = world.comm_stats().since(&before);
        assert_eq!(
            sent.of(Traffic::Reduce).messages,
            0,
            "nothing has travelled yet"
        );

        // Nonlinear operators need the value itself, and report it.
        let refused = scaled.require_resolved("square").unwrap_err();
        if world.is_root() {
            println!("{refused}");
        }

        let value = scaled.resolve(); // one all-reduce
        let expected = [[126.0_f32, 140.0, 154.0]];
        value
            .to_local()
            .into_data()
            .assert_eq(&expected.into(), false);

        // The gradient of a maximum goes to the cell that holds it.
        let x = x.require_grad();
        let gradients = x.clone().max_dims(&[0, 1]).sum().backward();
        let gradient = x.grad(&gradients).expect("a gradient").full_tensor();
        let gradient: Vec<f32> = gradient.into_data().iter().collect();
        assert_eq!(gradient.iter().sum::<f32>(), 1.0);
        assert_eq!(gradient[20], 1.0);
        Ok(())
    })
}
