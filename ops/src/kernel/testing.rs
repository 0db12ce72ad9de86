//! Helpers for tests of kernels.

use super::simd::Element;

/// Random values from -1 to 1, reproducible by seed.
pub(crate) fn random(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / f64::from(1u32 << 30) - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Rounds values to the nearest elements.
pub(crate) fn rounded<E: Element>(x: &[f64]) -> Vec<E> {
    x.iter().map(|&x| E::from_f64(x)).collect()
}

/// `Σ xᵢyᵢ`.
pub(crate) fn dot<E: Element>(x: &[E], y: &[E]) -> f64 {
    assert_eq!(x.len(), y.len());
    x.iter().zip(y).map(|(x, y)| x.to_f64() * y.to_f64()).sum()
}

/// Asserts that all elements are within `tolerance` of the expected values.
pub(crate) fn assert_close<E: Element>(found: &[E], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found.to_f64() - expected).abs();
        assert!(
            error <= tolerance,
            "{index}: {found:?}, expected {expected}"
        );
    }
}

/// Result of `f`, asserted to be the same on one thread and on three.
pub(crate) fn same_for_all_pools<T: PartialEq + std::fmt::Debug + Send>(
    f: impl Fn() -> T + Sync,
) -> T {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("a pool of threads").install(&f)
    };
    let alone = run(1);
    assert_eq!(alone, run(3));
    alone
}
