//! Simulation of trajectories with the shallow-water equations.

use clap::Args;
use halocline::io::ndarray::{ArrayView3, ArrayView4, Axis};
use halocline::io::{FieldWriter, Grid, Progress, WriterConfig};
use halocline::models::shallow_water::{Config, DAY, Grid as Sphere, Jet, Planet, ShallowWater};
use halocline::prelude::*;

use crate::Common;

/// Variables of a state, by their names in files.
const VARIABLES: [&str; 3] = ["depth", "eastward_wind", "northward_wind"];

#[derive(Args)]
#[group(id = "simulate")]
pub(crate) struct Options {
    /// Rows of the grid, from pole to pole.
    #[arg(long, default_value_t = 32)]
    rows: usize,
    /// Columns of the grid.
    #[arg(long, default_value_t = 64)]
    columns: usize,
    /// Trajectories to train on.
    #[arg(long, default_value_t = 12)]
    train_states: usize,
    /// Trajectories to test on, from other initial states.
    #[arg(long, default_value_t = 3)]
    test_states: usize,
    /// Days that are written, after one day of spin-up that is not.
    #[arg(long, default_value_t = 8.0)]
    days: f64,
    /// Hours between written times.
    #[arg(long, default_value_t = 3.0)]
    hours: f64,
}

pub(crate) fn run(world: &World, common: &Common, options: &Options) -> Result<()> {
    if !(options.hours > 0.0 && options.days * 24.0 >= options.hours) {
        return Err(Error::other(format!(
            "--hours {} of --days {}: expected a positive step of at most the whole time",
            options.hours, options.days
        )));
    }
    // The polar filter of the solver needs whole circles of latitude.
    let mesh = world.mesh([("lat", world.size())])?;
    let sphere = Sphere::new(options.rows, options.columns)?;
    let model = ShallowWater::new(sphere, &mesh, &[Shard(2)], Config::default())?;

    // All trajectories run at once; those for tests have their own random stream.
    let planet = Planet::EARTH;
    let draw = |name: &str, states| Jet::random(RandomKey::new(common.seed, name), states, &planet);
    let mut jets = draw("train", options.train_states);
    jets.extend(draw("test", options.test_states));
    let mut state = model.run(model.states(&jets)?, DAY)?;

    let mut writers = if world.is_root() {
        writers(common, options)?
    } else {
        Vec::new()
    };
    let frames = (options.days * 24.0 / options.hours).round() as usize + 1;
    let progress = Progress::new(world.rank(), "simulate", frames);
    for frame in 0..frames {
        if frame > 0 {
            state = model.run(state, options.hours * 3600.0)?;
        }
        if let Some(fields) = model.to_centers(&state)?.gather_tensor(0)? {
            let shape = fields.dims();
            let values: Vec<f32> = fields.into_data().iter().collect();
            let fields = ArrayView4::from_shape(shape, &values).map_err(Error::other)?;
            for (writer, field) in writers.iter_mut().zip(fields.axis_iter(Axis(0))) {
                let field: ArrayView3<f32> = field;
                writer.append(frame as f64 * options.hours * 3600.0, field)?;
            }
        }
        progress.advance();
    }
    for writer in writers {
        writer.finish()?;
    }
    progress.finish();

    if world.is_root() {
        println!(
            "simulated {} + {} trajectories of {frames} times into {}",
            options.train_states,
            options.test_states,
            common.folder.join("data").display()
        );
    }
    world.barrier()
}

fn writers(common: &Common, options: &Options) -> Result<Vec<FieldWriter>> {
    let folder = common.folder.join("data");
    std::fs::create_dir_all(&folder)?;
    // Files of an earlier run do not belong to this one.
    for old in [common.files("train_")?, common.files("test_")?].concat() {
        std::fs::remove_file(old)?;
    }
    let grid = Grid::cell_centered(options.rows, options.columns)?;
    let states = (0..options.train_states + options.test_states).map(|state| {
        match state.checked_sub(options.train_states) {
            None => format!("train_{state:03}.h5"),
            Some(state) => format!("test_{state:03}.h5"),
        }
    });
    states
        .map(|name| {
            Ok(FieldWriter::create(
                folder.join(name),
                &grid,
                &VARIABLES,
                &WriterConfig::new(),
            )?)
        })
        .collect()
}
