//! Transforms: an all-to-all exchange makes each sharded dim whole.

use serde_json::{Value, json};

use super::{F32, Sent, sent};
use crate::cases::Case;

/// Two ranks with even extents: when a field changes its placement each rank sends half of its
/// shard, so together they send half of the field.
const EVEN: [usize; 2] = [4, 4];

fn half(cells: u64) -> u64 {
    cells / 2 * F32
}

fn even(operator: &'static str, case: Case, dim: usize, bytes: [u64; 2]) -> Sent {
    sent(operator, case, dim, bytes).with_extents(&EVEN)
}

pub(super) fn sent_by() -> Vec<Sent> {
    let of = |options: Value, x: &[usize]| Case::new(options).x("x", x);
    let both = json!({ "dim": [1, 2], "norm": "ortho" });
    let back = json!({ "dim": [1, 2], "norm": "ortho", "n": 6 });
    let (batch, columns, modes) = (2, 6, 4);
    // `[batch, rows, columns]`: columns are transformed in place, then rows travel as modes of two
    // numbers.
    let forward = half(batch * 8 * modes * 2);
    let complex = half(batch * 8 * columns * 2);
    let real = half(batch * 8 * columns);
    let harmonics = |x: &[usize]| {
        let options = json!({
            "nlat": 8, "nlon": 12, "grid": "legendre-gauss", "norm": "ortho", "csphase": true,
        });
        Case::new(options).x("x", x)
    };
    // 8 latitudes and 12 longitudes, of which 7 orders and degrees are kept. Orders are sharded
    // over the axis, four and three.
    let orders = |fields: u64, rows: u64| fields * (4 * (rows - 4) + (7 - 4) * 4) * 2 * F32;
    let disco = json!({
        "in_shape": [8, 12], "out_shape": [8, 12], "kernel_shape": [3, 3], "groups": 1, "grid": "legendre-gauss",
        "theta_cutoff": 0.45,
    });
    let rows = json!({ "in_shape": [8, 12], "out_shape": [15, 12], "grid": "equiangular" });
    let finer = json!({
        "in_shape": [8, 12], "out_shape": [16, 24], "kernel_shape": [3, 3], "groups": 1, "grid": "legendre-gauss",
        "theta_cutoff": 0.45,
    });
    let near = json!({ "num_heads": 2, "grid": "legendre-gauss", "theta_cutoff": 0.45 });
    let q = [2, 4, 8, 12];
    // Gaussian latitudes are 0.37 to 0.38 apart: a radius of 0.45 reaches one row.
    let row = |channels: u64| 2 * 2 * channels * 12 * F32;
    let weights = |numbers: u64| 2 * numbers * F32;
    vec![
        even("rfft", of(both.clone(), &[2, 8, 6]), 1, [forward; 2]),
        even("irfft", of(back, &[2, 8, 4, 2]), 1, [forward; 2]),
        even("fft", of(both.clone(), &[2, 8, 6, 2]), 1, [complex; 2]),
        even("ifft", of(both.clone(), &[2, 8, 6, 2]), 1, [complex; 2]),
        even("dct", of(both.clone(), &[2, 8, 6]), 1, [real; 2]),
        even("idct", of(both, &[2, 8, 6]), 1, [real; 2]),
        // Kept modes travel there and back: 2 of 4 columns, then 4 of 8 rows.
        even(
            "spectral_conv",
            of(json!({}), &[2, 3, 8, 6]).parameter("weight", &[3, 2, 4, 2, 2]),
            2,
            [
                half(2 * 3 * 8 * 2 * 2) + half(2 * 2 * 8 * 2 * 2),
                half(2 * 3 * 8 * 2 * 2) + half(2 * 2 * 8 * 2 * 2) + weights(3 * 2 * 4 * 2 * 2),
            ],
        ),
        even(
            "spectral_conv2d",
            of(json!({ "modes": [4, 2], "norm": "ortho" }), &[2, 3, 8, 6])
                .parameter("wr", &[3, 2, 4, 2])
                .parameter("wi", &[3, 2, 4, 2]),
            2,
            [
                half(2 * 3 * 8 * 2 * 2) + half(2 * 2 * 8 * 2 * 2),
                half(2 * 3 * 8 * 2 * 2) + half(2 * 2 * 8 * 2 * 2) + weights(3 * 2 * 4 * 2 * 2),
            ],
        ),
        even(
            "rfft2_power",
            of(json!({}), &[2, 3, 8, 6]),
            2,
            [half(2 * 3 * 8 * 4 * 2); 2],
        ),
        even(
            "spectral_loss",
            of(json!({ "dim": [2, 3], "reduction": "sum" }), &[2, 3, 8, 6])
                .x("target", &[2, 3, 8, 6]),
            2,
            [2 * half(2 * 3 * 8 * 4 * 2); 2],
        ),
        even("sht", harmonics(&[3, 8, 12]), 1, [orders(3, 8); 2]),
        even("isht", harmonics(&[3, 7, 7, 2]), 2, [orders(3, 8); 2]).with_extents(&[4, 3]),
        even(
            "vector_sht",
            harmonics(&[3, 2, 8, 12]),
            2,
            [orders(6, 8); 2],
        ),
        even(
            "vector_isht",
            harmonics(&[3, 2, 7, 7, 2]),
            3,
            [orders(6, 8); 2],
        )
        .with_extents(&[4, 3]),
        even(
            "sphere_conv",
            harmonics(&[2, 3, 8, 12]).parameter("weight", &[3, 2, 7, 1, 2]),
            2,
            [
                orders(6, 8) + orders(4, 8),
                orders(6, 8) + orders(4, 8) + weights(3 * 2 * 7 * 2),
            ],
        ),
        // Rows at and between those of the input: the row after those of the first rank.
        even(
            "regrid",
            Case::new(rows).x("x", &[2, 3, 8, 12]),
            2,
            [2 * 3 * 12 * F32; 2],
        ),
        even(
            "disco_conv",
            Case::new(disco)
                .x("x", &[2, 3, 8, 12])
                .parameter("weight", &[2, 3, 4]),
            2,
            [row(3), row(3) + weights(2 * 3 * 4)],
        ),
        // The halo has a channel per output channel and function.
        even(
            "disco_conv_transpose",
            Case::new(finer)
                .x("x", &[2, 3, 8, 12])
                .parameter("weight", &[2, 3, 4]),
            2,
            [row(2 * 4), row(2 * 4) + weights(2 * 3 * 4)],
        ),
        even(
            "sphere_attention",
            Case::new(near).x("q", &q).x("k", &q).x("v", &q),
            2,
            [2 * row(4); 2],
        ),
    ]
}
