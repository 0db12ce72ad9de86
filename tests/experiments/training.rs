//! Losses of training.

use super::{CONFIG, prepared, score, scores, succeed};

/// The losses that a training prints, by epoch.
fn losses(training: &str) -> (tempfile::TempDir, Vec<f64>) {
    let config = CONFIG
        .replace("noise = 0.01", training)
        .replace("EPOCHS", "3")
        .replace("[[3, 2]]", "[[2, 2]]");
    let folder = prepared(&config);
    let out = succeed(folder.path(), &["train"]);
    let losses = out.lines().filter_map(|line| {
        let (_, loss) = line.split_once(": loss ")?;
        loss.split(',').next()?.parse().ok()
    });
    let losses: Vec<f64> = losses.collect();
    assert_eq!(losses.len(), 3, "{out}");
    assert!(out.contains("read amplification"), "{out}");
    (folder, losses)
}

#[test]
fn losses_are_named_in_the_configuration() {
    let [(_, squared), (_, again), (ensemble, crps), (_, spectral)] = [
        "noise = 0.01",
        "noise = 0.01\nrecompute = true",
        "noise = 0.1\nloss = \"crps\"\nmembers = 3",
        "noise = 0.01\nloss = \"spectral\"",
    ]
    .map(losses);
    assert_eq!(squared, again, "recomputed steps have the same bits");
    for losses in [&crps, &spectral] {
        assert!(losses[1] < losses[0] && losses[1] > 0.0, "{losses:?}");
        assert_ne!(*losses, squared);
    }
    // Amplitudes add to the squares.
    assert!(spectral[0] > squared[0]);
    let without = cfg!(feature = "plot").then_some("--no-pictures");
    let arguments: Vec<&str> = ["score"].into_iter().chain(without).collect();
    succeed(ensemble.path(), &arguments);
    assert!(score(&scores(ensemble.path()), "t2m", 6.0, "rmse").is_finite());
    assert!(!ensemble.path().join("run/pictures").exists());
}
