//! Transforms, on the plane and on the sphere.

use serde_json::json;

use super::Case;
use crate::draw::Draw;

const NORMS: [&str; 3] = ["backward", "ortho", "forward"];

pub(super) fn transform(operator: &str, draw: &mut Draw) -> Option<Case> {
    let count = draw.within(1..=3);
    let mut x = draw.list(count, 1..=7);
    let dims = draw.some(count);
    let norm = draw.pick(&NORMS);
    Some(match operator {
        "rfft" | "dct" | "idct" => Case::new(json!({ "dim": dims, "norm": norm })).x("x", &x),
        "fft" | "ifft" => {
            x.push(2);
            Case::new(json!({ "dim": dims, "norm": norm })).x("x", &x)
        }
        "irfft" => {
            let halved = dims[dims.len() - 1];
            let size = x[halved];
            x[halved] = size / 2 + 1;
            x.push(2);
            Case::new(json!({ "dim": dims, "n": size, "norm": norm })).x("x", &x)
        }
        "spectral_loss" => {
            let x = draw.list(4, 1..=6);
            let options = json!({ "dim": [2, 3], "reduction": draw.pick(&["mean", "sum"]) });
            Case::new(options).x("x", &x).x("target", &x)
        }
        "rfft2_power" => Case::new(json!({})).x("x", &draw.list(4, 1..=7)),
        "spectral_conv" | "spectral_conv2d" => {
            let [batch, inputs, outputs] = [(); 3].map(|()| draw.within(1..=3));
            let spatial = draw.list(2, 3..=8);
            let modes = [
                draw.within(1..=spatial[0]),
                draw.within(1..=spatial[1] / 2 + 1),
            ];
            let x = [batch, inputs, spatial[0], spatial[1]];
            let weight = [inputs, outputs, modes[0], modes[1], 2];
            if operator == "spectral_conv" {
                return Some(Case::new(json!({})).x("x", &x).parameter("weight", &weight));
            }
            let case = Case::new(json!({ "modes": modes, "norm": norm })).x("x", &x);
            case.parameters(true, &["wr", "wi"], &weight[..4])
        }
        _ => return sphere(operator, draw),
    })
}

fn sphere(operator: &str, draw: &mut Draw) -> Option<Case> {
    let grid = draw.pick(&["legendre-gauss", "lobatto", "equiangular"]);
    let [latitudes, longitudes] = [draw.within(3..=8), draw.within(4..=11)];
    let degrees = match grid {
        "equiangular" => latitudes.div_ceil(2),
        "lobatto" => latitudes - 1,
        _ => latitudes,
    };
    let degrees = degrees.min(longitudes / 2 + 1);
    let truncated = draw.coin().then(|| draw.within(1..=degrees));
    let degrees = truncated.unwrap_or(degrees);
    let options = json!({
        "nlat": latitudes, "nlon": longitudes, "lmax": truncated, "grid": grid, "norm": draw.pick(&["ortho", "four-pi", "schmidt"]),
        "csphase": draw.coin(),
    });
    let [batch, channels] = [draw.within(1..=3), draw.within(1..=3)];
    let case = Case::new(options);
    Some(match operator {
        "sht" => case.x("x", &[batch, latitudes, longitudes]),
        "isht" => case.x("x", &[batch, degrees, degrees, 2]),
        "vector_sht" => case.x("x", &[batch, 2, latitudes, longitudes]),
        "vector_isht" => case.x("x", &[batch, 2, degrees, degrees, 2]),
        "sphere_conv" => {
            let x = [batch, channels, latitudes, longitudes];
            let outputs = draw.within(1..=3);
            let weight = [channels, outputs, degrees, 1, 2];
            case.x("x", &x).parameter("weight", &weight)
        }
        "regrid" => {
            let target = [draw.within(2..=9), draw.within(1..=12)];
            let options = json!({
                "in_shape": [latitudes, longitudes], "out_shape": target, "grid": grid,
                "grid_out": draw.pick(&["equiangular", "lobatto"]),
                "mode": draw.pick(&["bilinear", "bilinear-spherical"]),
            });
            Case::new(options).x("x", &[batch, channels, latitudes, longitudes])
        }
        "disco_conv" | "disco_conv_transpose" => {
            let shape = [latitudes, longitudes];
            let outputs = match operator {
                "disco_conv" => shape,
                _ => [draw.within(3..=9), longitudes * draw.within(1..=2)],
            };
            let options = json!({
                "in_shape": shape, "out_shape": outputs, "kernel_shape": [3, 3], "groups": 1, "grid": grid,
                "theta_cutoff": 1.1,
            });
            let x = [batch, channels, latitudes, longitudes];
            let outputs = draw.within(1..=3);
            let weight = [outputs, channels, 4];
            Case::new(options).x("x", &x).parameter("weight", &weight)
        }
        "sphere_attention" => {
            let options = json!({ "num_heads": 2, "grid": grid, "theta_cutoff": 0.9 });
            let q = [batch, 2 * channels, latitudes, longitudes];
            Case::new(options).x("q", &q).x("k", &q).x("v", &q)
        }
        _ => return None,
    })
}
