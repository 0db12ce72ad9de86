//! A hand-written stencil: diffusion on a periodic ring of longitudes, with a halo of one cell.
//!
//! `cargo run --example 03_halo -- 4`

use halocline::core::Traffic;
use halocline::prelude::*;

fn main() -> Result<()> {
    // Physics: ∂c/∂t = κ ∂²c/∂x², under which a cosine decays at a known rate.
    const CELLS: usize = 50;
    const STEPS: usize = 200;
    let wave = std::f64::consts::TAU / CELLS as f64;
    let kappa = 0.2; // κ·Δt/Δx²

    let ranks = std::env::args()
        .nth(1)
        .map_or(2, |ranks| ranks.parse().expect("a number of ranks"));
    Launcher::from_env().ranks(ranks).run(|world| {
        let mesh = world.mesh([("lon", world.size())])?;
        let start: Vec<f32> = (0..CELLS).map(|i| (wave * i as f64).cos() as f32).collect();
        let start = Tensor::<1>::from_floats(start.as_slice(), world.device()).inner();
        let mut c = ShardTensor::distribute(start.clone(), &mesh, &[Shard(0)])?;

        let before = world.comm_stats();
        for _ in 0..STEPS {
            // This rank's cells with one more on either side, from the neighbours around the ring.
            let padded = c.with_halo(&[Halo::new(0, 1, Boundary::Periodic)])?;
            let cells = c.local_dims()[0];
            let shifted = |first: usize| padded.clone().narrow(0, first, cells);
            let laplacian = shifted(0) + shifted(2) - shifted(1) * 2.0;
            c = ShardTensor::from_local(shifted(1) + laplacian * kappa, &mesh, c.layout())?;
        }
        let sent = world.comm_stats().since(&before).of(Traffic::Exchange);

        // Check: the discrete operator's decay, and two cells of four bytes communicated per step.
        let decay = (1.0 - 2.0 * kappa * (1.0 - wave.cos())).powi(STEPS as i32);
        let found = c.full_tensor();
        let error = (found - start * decay).abs().max().into_scalar::<f32>();
        assert!(error < 1e-5, "error {error}");
        let cells_sent = if world.size() == 1 { 0 } else { 2 };
        assert_eq!(sent.bytes as usize, STEPS * cells_sent * size_of::<f32>());
        if world.is_root() {
            println!(
                "error {error:.1e} after {STEPS} steps; {} bytes sent by rank 0",
                sent.bytes
            );
        }
        Ok(())
    })
}
