//! Shallow-water equations on the rotating sphere, with latitude sharded over ranks.
//!
//! `cargo run --release --example shallow_water -- perturbed-jet --nlat 128 --ranks 2`
//!
//! Runs a standard test case, prints conserved quantities, and checks known properties:
//! conservation of mass for every case, the return of Williamson's case 1, and the order of
//! convergence of case 2.

use std::path::{Path, PathBuf};

use burn::tensor::DType;
use clap::{Parser, ValueEnum};
use halocline::io::ndarray::ArrayView3;
use halocline::io::{FieldWriter, Grid as FileGrid, WriterConfig};
use halocline::models::shallow_water::{Case, Config, DAY, Dynamics, Grid, ShallowWater};
use halocline::prelude::*;

#[derive(Parser)]
#[command(about = "Solves the shallow-water equations on the rotating sphere")]
struct Args {
    /// Standard test case.
    #[arg(value_enum, default_value = "steady-flow")]
    case: CaseName,
    /// Number of latitudes; there are twice as many longitudes.
    #[arg(long, default_value_t = 32)]
    nlat: usize,
    /// Ranks, over which latitude is sharded.
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// Simulated days; the default depends on the case.
    #[arg(long)]
    days: Option<u32>,
    /// Angle between flow and equator in cosine-bell and steady-flow, in degrees.
    #[arg(long, default_value_t = 0.0)]
    angle: f64,
    /// Output file for the fields of every day.
    #[arg(long)]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum CaseName {
    /// Williamson 1: a cosine bell carried once around the sphere.
    CosineBell,
    /// Williamson 2: steady flow.
    SteadyFlow,
    /// Williamson 5: flow over a mountain.
    Mountain,
    /// Williamson 6: Rossby–Haurwitz wave of wavenumber 4.
    RossbyHaurwitz,
    /// Galewsky et al.: steady jet.
    SteadyJet,
    /// Galewsky et al.: jet that rolls up.
    PerturbedJet,
}

impl Args {
    fn case(&self) -> Case {
        let angle = self.angle.to_radians();
        match self.case {
            CaseName::CosineBell => Case::CosineBell(angle),
            CaseName::SteadyFlow => Case::SteadyFlow(angle),
            CaseName::Mountain => Case::Mountain,
            CaseName::RossbyHaurwitz => Case::RossbyHaurwitz,
            CaseName::SteadyJet => Case::SteadyJet,
            CaseName::PerturbedJet => Case::PerturbedJet,
        }
    }

    fn days(&self) -> u32 {
        self.days.unwrap_or(match self.case {
            CaseName::CosineBell => 12,
            CaseName::SteadyFlow => 5,
            CaseName::Mountain => 15,
            CaseName::RossbyHaurwitz => 14,
            CaseName::SteadyJet => 5,
            CaseName::PerturbedJet => 6,
        })
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    Launcher::from_env().ranks(args.ranks).run(|world| {
        let mut writer = match &args.output {
            Some(path) if world.is_root() => Some(writer(path, args.nlat)?),
            _ => None,
        };
        let errors = integrate(&world, &args, args.nlat, &mut |time, fields| {
            let values: Vec<f32> = fields.to_data().iter().collect();
            let [_, channels, rows, columns] = fields.dims();
            let fields = ArrayView3::from_shape([channels, rows, columns], &values);
            match &mut writer {
                Some(writer) => Ok(writer.append(time, fields.map_err(Error::other)?)?),
                None => Ok(()),
            }
        })?;
        if let (Some(path), Some(writer)) = (&args.output, writer) {
            writer.finish()?;
            println!("fields of every day are in {}", path.display());
        }

        match args.case {
            // Dispersion of the bell's shorter waves, which decreases at least quadratically with
            // the cell size.
            CaseName::CosineBell if args.days() == 12 => {
                let error = errors[12];
                let bound = 0.75 * (32.0 / args.nlat as f64).powi(2);
                check(error < bound, || {
                    format!("the bell returned with an error of {error}")
                })
            }
            // The largest error of any day, as the flow oscillates while it adjusts to the scheme's
            // balance.
            CaseName::SteadyFlow if args.days() > 0 => {
                let coarse = integrate(&world, &args, args.nlat / 2, &mut |_, _| Ok(()))?;
                let order = (largest(&coarse) / largest(&errors)).log2();
                if world.is_root() {
                    println!(
                        "order of convergence from {} to {} rows: {order:.3}",
                        args.nlat / 2,
                        args.nlat
                    );
                }
                check(order >= 1.8, || {
                    format!("order of convergence {order}; expected 2")
                })
            }
            _ => Ok(()),
        }
    })
}

/// Runs the case on a grid of `nlat` rows, passes the fields of every day to rank 0, and returns
/// each day's depth error relative to the initial state.
fn integrate(
    world: &World,
    args: &Args,
    nlat: usize,
    output: &mut dyn FnMut(f64, Tensor<4>) -> Result<()>,
) -> Result<Vec<f64>> {
    // Physics: the planet, its topography, and the evolving fields.
    let case = args.case();
    let config = Config {
        dtype: DType::F64,
        ..case.config()
    };

    // Numerics: the grid, and its shards.
    let mesh = world.mesh([("lat", world.size())])?;
    let model = ShallowWater::new(Grid::new(nlat, 2 * nlat)?, &mesh, &[Shard(2)], config)?;

    // Fields: each rank samples its own cells.
    let start = model.initial(case)?; // [1, 3, nlat, 2 nlat]
    let sums = |state: &ShardTensor<4>| -> Result<Vec<f64>> {
        let mut sums = model.mass(state)?;
        if config.dynamics == Dynamics::ShallowWater {
            sums.extend(model.energy(state)?);
            sums.extend(model.potential_enstrophy(state)?);
        }
        Ok(sums)
    };
    let first = sums(&start)?;

    if world.is_root() {
        println!(
            "{case:?} on {nlat} × {} cells, {} ranks",
            2 * nlat,
            world.size()
        );
        let names = ["error", "mass", "energy", "enstrophy"];
        let names: String = names[..1 + first.len()]
            .iter()
            .map(|name| format!("{name:>12}"))
            .collect();
        println!(" day{names}");
    }
    let mut state = start.clone();
    let mut errors = Vec::new();
    for day in 0..=args.days() {
        if day > 0 {
            state = model.run(state, DAY)?;
        }
        errors.extend(model.depth_error(&state, &start)?);
        let now = sums(&state)?;
        let changes: Vec<f64> = now
            .iter()
            .zip(&first)
            .map(|(now, first)| now / first - 1.0)
            .collect();
        if world.is_root() {
            let row = errors.last().into_iter().chain(&changes);
            let row: String = row.map(|value| format!("{value:>12.2e}")).collect();
            println!("{day:>4}{row}");
        }
        if args.output.is_some()
            && let Some(frame) = model.to_centers(&state)?.gather_tensor(0)?
        {
            output(f64::from(day) * DAY, frame)?;
        }
        check(changes[0].abs() < 1e-13, || {
            format!("mass changed by {:e}", changes[0])
        })?;
    }
    Ok(errors)
}

/// Opens a file for depth in m and wind in m/s at the cell centres.
fn writer(path: &Path, nlat: usize) -> Result<FieldWriter> {
    let grid = FileGrid::cell_centered(nlat, 2 * nlat)?;
    let channels = ["depth", "eastward_wind", "northward_wind"];
    Ok(FieldWriter::create(
        path,
        &grid,
        &channels,
        &WriterConfig::new(),
    )?)
}

/// Returns the largest number, or NaN if there is one, which `f64::max` ignores.
fn largest(values: &[f64]) -> f64 {
    let values = values.iter().copied();
    values.fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a })
}

fn check(holds: bool, message: impl FnOnce() -> String) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(Error::other(message()))
    }
}
