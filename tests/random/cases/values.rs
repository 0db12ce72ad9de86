//! Losses and products.

use halocline::prelude::TensorData;
use serde_json::json;

use super::{Case, indices, integers, shape, sizes, uniform, with_channels};
use crate::draw::Draw;

pub(super) fn elementwise(operator: &str, draw: &mut Draw) -> Case {
    let x = shape(draw);
    let case = Case::new(json!({})).x("x", &x);
    match operator {
        "prelu" => {
            let slopes = if x.len() > 1 && draw.coin() { x[1] } else { 1 };
            case.parameter("weight", &[slopes])
        }
        "addcmul" => {
            let sizes = x.iter().map(|&size| if draw.coin() { size } else { 1 });
            let scale: Vec<usize> = sizes.collect();
            case.x("other", &x).parameter("scale", &scale)
        }
        _ => case,
    }
}

pub(super) fn loss(operator: &str, draw: &mut Draw) -> Option<Case> {
    let reduction = draw.pick(&["mean", "sum"]);
    if operator.starts_with("cross_entropy") {
        let classes = draw.within(2..=7);
        let dims = if operator == "cross_entropy" { 0 } else { 2 };
        let cells = draw.list(dims, 1..=5);
        let batch = draw.within(1..=6);
        let target = indices("target", &[&[batch][..], &cells].concat(), classes);
        // A mean without cells is NaN.
        let has_others = target.iter::<i64>().any(|class| class != 0);
        let options = json!({
            "reduction": draw.pick(&["mean", "sum", "none"]),
            "ignore_index": if has_others { draw.pick(&[-100, 0]) } else { -100 },
            "label_smoothing": draw.pick(&[0.0, 0.1]),
        });
        let case = Case::new(options).x("logits", &[&[batch, classes][..], &cells].concat());
        let case = case.input("target", target.convert_dtype(integers(draw)));
        if draw.coin() {
            return Some(case);
        }
        let weights = TensorData::new(uniform("weights", &[classes], 0.5, 2.0), [classes]);
        return Some(case.input("class_weight", weights));
    }
    let mut x = shape(draw);
    x.iter_mut().for_each(|size| *size += 1);
    let options = match operator {
        "mse_loss" | "l1_loss" => json!({ "reduction": reduction }),
        "huber_loss" => json!({ "reduction": reduction, "delta": 0.7 }),
        "binary_cross_entropy_with_logits" => {
            let factor = draw.pick(&[0.5, 1.0, 2.0]);
            json!({ "reduction": reduction, "pos_weight": [factor] })
        }
        "gaussian_nll_loss" => json!({ "reduction": reduction, "full": draw.coin() }),
        "total_variation" | "gradient_loss" => {
            let mode = draw.pick(&["replicate", "circular"]);
            json!({ "reduction": reduction, "mode": mode, "dims": draw.some(x.len()) })
        }
        "ssim_loss" => {
            let spatial = draw.within(1..=2);
            let window = draw.list(spatial, 1..=5);
            let padding: Vec<usize> = window
                .iter()
                .map(|size| draw.within(0..=size / 2))
                .collect();
            let cells = sizes(&window, draw);
            let x = with_channels(draw, 2, &cells);
            let options = json!({
                "reduction": reduction, "window": window, "sigma": 1.2, "data_range": 3.0, "padding": padding,
                "padding_mode": "circular",
            });
            return Some(Case::new(options).x("x", &x).x("target", &x));
        }
        _ => return None,
    };
    let case = Case::new(options).x("x", &x);
    let may_have_weight = ["mse_loss", "l1_loss", "huber_loss"].contains(&operator);
    Some(match operator {
        "total_variation" => case,
        "gaussian_nll_loss" => {
            let variance = TensorData::new(uniform("var", &x, 0.5, 2.0), x.clone());
            case.x("target", &x).input("var", variance)
        }
        _ if may_have_weight && draw.coin() => {
            let weight = TensorData::new(uniform("weight", &x, 0.5, 2.0), x.clone());
            case.x("target", &x).input("weight", weight)
        }
        _ => case.x("target", &x),
    })
}

pub(super) fn einsum(draw: &mut Draw) -> Case {
    let equation = draw.pick(&[
        "i,j->ij",
        "bi,bi->b",
        "bi,ib->i",
        "abc,cb->a",
        "bij,kj->bk",
        "bij,ij->jb",
        "bij,bjk->bik",
        "bij,kjl->lki",
        "bchw,co->bohw",
        "abcd,ca->dbca",
        "bhqd,bhkd->bhqk",
    ]);
    let sizes = draw.list(26, 1..=6);
    let shape = |letters: &str| -> Vec<usize> {
        letters
            .bytes()
            .map(|letter| sizes[(letter - b'a') as usize])
            .collect()
    };
    let (x, w) = equation.split_once(',').expect("two operands");
    let (w, _) = w.split_once("->").expect("a result");
    let case = Case::new(json!({ "equation": equation })).x("x", &shape(x));
    case.parameter("w", &shape(w))
}

pub(super) fn product(operator: &str, draw: &mut Draw) -> Case {
    let [rows, inner, columns] = [9, 7, 7].map(|most| draw.within(1..=most));
    let case = Case::new(json!({}));
    match operator {
        "matmul" => {
            let batch = draw.within(0..=2);
            let batch = draw.list(batch, 1..=3);
            let case = case.x("a", &[&batch[..], &[rows, inner]].concat());
            case.x("b", &[&batch[..], &[inner, columns]].concat())
        }
        "embedding" => {
            let index = indices("index", &[draw.within(1..=4), rows], inner);
            let case = case.input("index", index.convert_dtype(integers(draw)));
            case.parameter("weight", &[inner, columns])
        }
        "linear" => {
            let case = case.x("x", &[draw.within(1..=3), rows, inner]);
            let case = case.parameter("weight", &[columns, inner]);
            case.parameters(draw.coin(), &["bias"], &[columns])
        }
        _ => {
            let case = case.x("x", &[draw.within(1..=3), rows, inner]);
            let case = case
                .parameter("w1", &[columns, inner])
                .parameter("b1", &[columns]);
            case.parameter("w2", &[inner, columns])
                .parameter("b2", &[inner])
        }
    }
}
