use std::f64::consts::{FRAC_PI_2, FRAC_PI_4};

use burn::tensor::DType;
use halocline_core::{Launcher, RandomKey, ReduceOp, Replicate, Result, World};

use super::*;

/// Runs on one rank.
fn alone<T: Send>(program: impl Fn(World) -> Result<T> + Send + Sync) -> T {
    Launcher::local(1).collect(program).unwrap().remove(0)
}

/// Makes a model in f64 on one rank.
fn model(world: &World, rows: usize, config: Config) -> Result<ShallowWater> {
    let mesh = world.mesh([("lat", 1)])?;
    let config = Config {
        dtype: DType::F64,
        ..config
    };
    ShallowWater::new(
        Grid::new(rows, 2 * rows)?,
        &mesh,
        &[Shard(LATITUDE)],
        config,
    )
}

/// Depth error of a case whose end state equals its initial state.
fn error_of(case: Case, rows: usize, days: f64) -> f64 {
    alone(|world| {
        let model = model(&world, rows, case.config())?;
        let start = model.initial(case)?;
        let end = model.run(start.clone(), days * DAY)?;
        Ok(model.depth_error(&end, &start)?[0])
    })
}

/// Largest depth error of a steady case in five days; it oscillates while the flow adjusts to the
/// scheme's own balance.
fn largest_error(case: Case, rows: usize) -> f64 {
    alone(|world| {
        let model = model(&world, rows, case.config())?;
        let start = model.initial(case)?;
        let mut state = start.clone();
        let mut largest: f64 = 0.0;
        for _ in 0..10 {
            state = model.run(state, 0.5 * DAY)?;
            largest = largest.max(model.depth_error(&state, &start)?[0]);
        }
        Ok(largest)
    })
}

/// Relative change of a sum.
fn change(end: Vec<f64>, start: Vec<f64>) -> f64 {
    let pairs = end.iter().zip(&start);
    worst(pairs.map(|(end, start)| (end / start - 1.0).abs()))
}

/// Largest number, or NaN if there is one, which `f64::max` ignores.
fn worst(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a })
}

fn values(state: &ShardTensor<4>) -> Vec<f64> {
    let whole = state.full_tensor().cast(DType::F64);
    whole.into_data().try_to_vec().unwrap()
}

#[test]
fn williamson_2_converges_at_second_order() {
    // Also across the poles, which the flow passes at the second and third angle.
    for angle in [0.0, FRAC_PI_4, FRAC_PI_2 - 0.05] {
        let errors = [16, 32, 64].map(|rows| largest_error(Case::SteadyFlow(angle), rows));
        for pair in errors.windows(2) {
            let order = (pair[0] / pair[1]).log2();
            assert!(
                order >= 1.8,
                "order {order} at angle {angle}, errors {errors:?}"
            );
        }
        assert!(errors[2] < 2e-3, "{errors:?}");
    }
}

#[test]
fn williamson_1_returns_to_where_it_began() {
    // A bell 14 cells wide after one revolution, along the equator and over both poles.
    for (angle, bound) in [(0.0, 0.13), (FRAC_PI_2, 0.16)] {
        let error = error_of(Case::CosineBell(angle), 64, 12.0);
        assert!(error < bound, "angle {angle}: {error}");
        let halfway = error_of(Case::CosineBell(angle), 32, 6.0);
        assert!(
            halfway > 1.0,
            "angle {angle}: it should be on the other side, {halfway}"
        );
    }
}

#[test]
fn mass_is_conserved_to_round_off() {
    let all_terms = Config {
        viscosity: 1e5,
        ..Case::Mountain.config()
    };
    let tilted = Config {
        topography: Some(Topography::Mountain),
        ..Case::SteadyFlow(0.7).config()
    };
    for config in [all_terms, tilted, Case::CosineBell(1.0).config()] {
        alone(|world| {
            let model = model(&world, 16, config)?;
            let start = model.states(&Jet::random(RandomKey::new(1, "mass"), 2, &config.planet))?;
            let end = model.run(start.clone(), 5.0 * DAY)?;
            let moved = model.depth_error(&end, &start)?[0];
            assert!(moved > 1e-3, "nothing moved: {moved}");
            let drift = change(model.mass(&end)?, model.mass(&start)?);
            assert!(drift < 1e-13, "{config:?}: {drift}");
            Ok(())
        });
    }
}

#[test]
fn energy_is_conserved_but_for_the_error_in_time() {
    // The time-stepping error scales with the fifth power of the step; an error in space would not.
    alone(|world| {
        let planet = Planet {
            tilt: 0.5,
            ..Planet::EARTH
        };
        let config = Config {
            planet,
            filter: PolarFilter::Off,
            ..Case::Mountain.config()
        };
        let model = model(&world, 12, config)?;
        let start = model.states(&Jet::random(RandomKey::new(2, "energy"), 1, &planet))?;
        let drift = |steps: usize| -> Result<f64> {
            let seconds = 6.0 * 3600.0 / steps as f64;
            let end = (0..steps).try_fold(start.clone(), |state, _| model.step(&state, seconds))?;
            Ok(change(model.energy(&end)?, model.energy(&start)?))
        };
        let (coarse, fine) = (drift(60)?, drift(120)?);
        assert!(coarse < 1e-6 && coarse / fine > 12.0, "{coarse} {fine}");
        Ok(())
    });
}

#[test]
fn williamson_6_stays_bounded() {
    alone(|world| {
        let case = Case::RossbyHaurwitz;
        let model = model(&world, 32, case.config())?;
        let start = model.initial(case)?;
        let end = model.run(start.clone(), 10.0 * DAY)?;
        let drift = change(model.energy(&end)?, model.energy(&start)?);
        assert!(drift < 1e-7, "energy {drift}");
        let drift = change(
            model.potential_enstrophy(&end)?,
            model.potential_enstrophy(&start)?,
        );
        assert!(drift < 1e-2, "potential enstrophy {drift}");
        let depths = &values(&end)[..32 * 64];
        assert!(
            depths
                .iter()
                .all(|depth| (7_900.0..10_800.0).contains(depth))
        );
        // The wave moves east, a quarter of its length in about two days.
        assert!(model.depth_error(&end, &start)?[0] > 0.01);
        Ok(())
    });
}

#[test]
fn the_jet_is_steady_until_it_is_perturbed() {
    alone(|world| {
        let config = Case::SteadyJet.config();
        let model = model(&world, 48, config)?;
        let [still, bumped] =
            [Case::SteadyJet, Case::PerturbedJet].map(|case| case.flow(&config.planet));
        let start = model.states(&[still, bumped])?;
        let end = model.run(start.clone(), 5.0 * DAY)?;
        let errors = model.depth_error(&end, &start)?;
        assert!(errors[0] < 1e-3, "{errors:?}");
        let vorticity = model.vorticity(&end)?;
        let eddies = |state: usize| {
            let field = vorticity.local().clone().narrow(0, state, 1);
            (field.clone() - field.mean_dim(3))
                .max_abs()
                .into_scalar::<f64>()
        };
        // Rolled-up vorticity is of the order of the Coriolis parameter.
        assert!(
            eddies(0) < 1e-9 && eddies(1) > 3e-5,
            "{} {}",
            eddies(0),
            eddies(1)
        );
        Ok(())
    });
}

#[test]
fn vorticity_and_diffusion_of_a_turning_body_are_the_known_ones() {
    alone(|world| {
        let case = Case::SteadyFlow(0.6);
        let config = Config {
            filter: PolarFilter::Off,
            ..case.config()
        };
        let model = |viscosity| {
            let config = Config {
                viscosity,
                ..config
            };
            model(&world, 48, config)
        };
        let (inviscid, viscous) = (model(0.0)?, model(1e6)?);
        let state = inviscid.initial(case)?;
        let difference = viscous.tendency(&state)? - inviscid.tendency(&state)?;
        let spin = std::f64::consts::TAU / (12.0 * DAY);
        let row = |tensor: Tensor<4>, channel: usize, row: usize| -> f64 {
            tensor
                .slice([0..1, channel..channel + 1, row..row + 1, 5..6])
                .into_scalar()
        };
        let grid = *inviscid.grid();
        let scale = 2e6 * spin / Planet::EARTH.radius;
        for at in 3..44 {
            let vorticity = row(inviscid.vorticity(&state)?.local().clone(), 0, at);
            let place = (grid.face(at as isize + 1), grid.longitude(5.5));
            let expected = 2.0 * spin * config::sine_from_axis(0.6, place.0, place.1);
            assert!(
                (vorticity - expected).abs() < 2e-3 * spin,
                "row {at}: {vorticity}"
            );
            // ν ∇²u = −2 ν u / a²
            for channel in [1, 2] {
                let wind = row(state.local().clone(), channel, at);
                let expected = -2e6 * wind / Planet::EARTH.radius.powi(2);
                let found = row(difference.clone(), channel, at);
                assert!(
                    (found - expected).abs() < 1e-2 * scale,
                    "row {at}: {found}, {expected}"
                );
            }
        }
        let centred = inviscid.to_centers(&state)?;
        let wind = row(centred.local().clone(), 1, 10) / row(state.local().clone(), 1, 10);
        assert!((wind - 1.0).abs() < 1e-2, "{wind}");
        Ok(())
    });
}

/// This flow has the same northward wind at all latitudes.
#[test]
fn wind_across_the_poles_is_that_of_their_open_faces() {
    alone(|world| {
        let case = Case::SteadyFlow(FRAC_PI_2);
        let model = model(&world, 16, case.config())?;
        let centred = model.to_centers(&model.initial(case)?)?;
        let north = centred.local().clone().narrow(1, 2, 1);
        let largest = |row: usize| {
            north
                .clone()
                .narrow(2, row, 1)
                .abs()
                .max()
                .into_scalar::<f64>()
        };
        for row in [0, 1, 15] {
            let ratio = largest(row) / largest(8);
            assert!((ratio - 1.0).abs() < 1e-6, "row {row}: {ratio}");
        }
        Ok(())
    });
}

#[test]
fn a_run_of_a_state_that_blew_up_ends_with_an_error() {
    alone(|world| {
        let case = Case::RossbyHaurwitz;
        let model = model(&world, 8, case.config())?;
        let start = model.initial(case)?;
        for factor in [1e12, f64::NAN] {
            let state = start.clone().map_local(|local| local.mul_scalar(factor));
            let error = model.run(state, DAY).unwrap_err().to_string();
            assert!(error.contains("blown up"), "{error}");
        }
        Ok(())
    });
}

/// Runs three steps of random states on a mesh, and computes their diagnostics.
fn run_on(
    axes: &[(&str, usize)],
    placements: &[Placement],
    extents: &[(usize, &[usize])],
    config: Config,
) -> (Vec<f64>, [Vec<f64>; 4]) {
    let ranks = axes.iter().map(|(_, size)| size).product();
    let mut results = Launcher::local(ranks)
        .collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let mut model = ShallowWater::new(Grid::new(11, 18)?, &mesh, placements, config)?;
            for (dim, extents) in extents {
                model = model.with_extents(*dim, extents)?;
            }
            let jets = Jet::random(RandomKey::new(3, "mesh"), 3, &config.planet);
            let mut state = model.states(&jets)?;
            let seconds = model.stable_step(&state)?;
            for _ in 0..3 {
                state = model.step(&state, seconds)?;
            }
            let sums = [
                model.mass(&state)?,
                model.energy(&state)?,
                model.potential_enstrophy(&state)?,
                model.depth_error(&state, &model.initial(Case::Mountain)?)?,
            ];
            let centred = values(&model.to_centers(&state)?);
            Ok(([values(&state), centred].concat(), sums))
        })
        .unwrap();
    let first = results.remove(0);
    assert!(
        results.iter().all(|other| other.0 == first.0),
        "ranks differ"
    );
    first
}

/// Largest difference between a run on one rank and one on a mesh, relative to the largest value.
fn difference(
    axes: &[(&str, usize)],
    placements: &[Placement],
    extents: &[(usize, &[usize])],
    config: Config,
) -> f64 {
    let (expected, expected_sums) = run_on(&[("lat", 1)], &[Replicate], &[], config);
    let (found, sums) = run_on(axes, placements, extents, config);
    for (found, expected) in sums.into_iter().zip(expected_sums) {
        assert_eq!(found.len(), 3);
        assert!(change(found, expected) < 1e-14, "{axes:?} {extents:?}");
    }
    let largest = expected.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
    assert!((1e3..1e5).contains(&largest), "{largest}");
    let differences = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    worst(differences) / largest
}

#[test]
fn every_mesh_gives_the_same_bits() {
    let [lat, lon] = [Shard(LATITUDE), Shard(LONGITUDE)];
    let planet = Planet {
        tilt: 0.3,
        ..Planet::EARTH
    };
    let double = Config {
        filter: PolarFilter::Off,
        viscosity: 1e4,
        dtype: DType::F64,
        ..Case::Mountain.config()
    };
    for config in [
        double,
        Config {
            planet,
            dtype: DType::F32,
            ..double
        },
    ] {
        let same = |axes: &[_], placements: &[_], extents: &[_]| {
            let difference = difference(axes, placements, extents, config);
            assert_eq!(difference, 0.0, "{axes:?} {placements:?} {extents:?}");
        };
        let square = [("lat", 2), ("lon", 2)];
        same(&[("lat", 2)], &[lat], &[]);
        same(&[("lat", 3)], &[lat], &[(LATITUDE, &[4, 0, 7])]);
        same(&[("data", 2), ("lat", 2)], &[Shard(STATES), lat], &[]);
        same(&square, &[lat, lon], &[]);
        same(
            &square,
            &[lat, lon],
            &[(LATITUDE, &[9, 2]), (LONGITUDE, &[5, 13])],
        );
    }
}

#[test]
fn every_mesh_filters_alike_to_round_off() {
    let filter = PolarFilter::Poleward(50.0);
    let config = Config {
        filter,
        dtype: DType::F64,
        ..Config::default()
    };
    let extents: [&[usize]; 4] = [&[6, 5], &[1, 8, 2], &[4, 0, 7], &[10, 1]];
    for extents in extents {
        let axes = [("lat", extents.len())];
        let difference = difference(&axes, &[Shard(LATITUDE)], &[(LATITUDE, extents)], config);
        assert!(difference < 1e-14, "{extents:?}: {difference}");
    }
}

#[test]
fn advection_is_the_same_on_every_mesh() {
    // The halo of two cells is wider than a shard.
    let config = Config {
        filter: PolarFilter::Off,
        ..Case::CosineBell(0.5).config()
    };
    let placements = [Shard(LATITUDE), Shard(LONGITUDE)];
    let extents: &[(usize, &[usize])] = &[(LATITUDE, &[10, 1])];
    let difference = difference(&[("lat", 2), ("lon", 2)], &placements, extents, config);
    assert_eq!(difference, 0.0);
}

#[test]
fn misuse_is_told() {
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let grid = Grid::new(8, 16)?;
            let error = |placement, config| {
                let model = ShallowWater::new(grid, &mesh, &[placement], config);
                model.unwrap_err().to_string()
            };
            let filtered = error(Shard(LONGITUDE), Config::default());
            assert!(filtered.contains("Shard(3) on axis \"x\""), "{filtered}");
            assert!(
                filtered.contains("shard latitude (dim 2), or set PolarFilter::Off"),
                "{filtered}"
            );
            assert!(error(Shard(CHANNEL), Config::default()).contains("no rule for Shard(1)"));
            assert!(
                error(Partial(ReduceOp::Sum), Config::default()).contains("no rule for Partial")
            );
            let config = Config {
                filter: PolarFilter::Poleward(90.0),
                ..Config::default()
            };
            assert!(error(Shard(LATITUDE), config).contains("from 90°; expected 0° to below 90°"));
            let config = Config {
                viscosity: -1.0,
                ..Config::default()
            };
            assert!(error(Shard(LATITUDE), config).contains("viscosity of -1 m²/s"));

            let model = ShallowWater::new(grid, &mesh, &[Shard(LATITUDE)], Config::default())?;
            let none: &[Box<dyn Flow>] = &[];
            let error = model.states(none).unwrap_err().to_string();
            assert!(error.contains("0 flows"), "{error}");
            let foreign = ShardTensor::<4>::zeros([1, 3, 9, 16], &mesh, &[Shard(LATITUDE)])?;
            let error = model.step(&foreign, 1.0).unwrap_err().to_string();
            assert!(
                error.contains("[1, 3, 9, 16]") && error.contains("expected [1, 3, 8, 16]"),
                "{error}"
            );
            assert!(model.mass(&foreign).is_err());
            let state = model.initial(Case::RossbyHaurwitz)?;
            let double = state.local().clone().cast(DType::F64);
            let double = ShardTensor::from_local(double, &mesh, state.layout())?;
            let error = model.step(&double, 1.0).unwrap_err().to_string();
            assert!(
                error.contains("of F64") && error.contains("of F32"),
                "{error}"
            );
            Ok(())
        })
        .unwrap();
}
