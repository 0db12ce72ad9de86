//! Roles of channels in samples: inputs, forcings, targets.

use serde::{Deserialize, Serialize};

use super::config::DatasetConfig;
use super::forcing::Forcing;
use crate::fields::channel::base;
use crate::fields::listing::listed;
use crate::fields::selected::find;
use crate::{Calendar, Error, Fields, Grid, LeftOut, LeftOutReason, OpenConfig, Result};

/// Prefix of the names of mask channels.
const MASK: &str = "mask:";

/// Names of the channels of a sample, by role.
///
/// See [`FieldDataset::channels`](crate::FieldDataset::channels) for an example.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channels {
    /// Inputs, each present once per time of the history.
    pub inputs: Vec<String>,
    /// Forcings, known at every step and never predicted.
    pub forcings: Vec<String>,
    /// Targets.
    pub targets: Vec<String>,
}

impl Channels {
    /// Returns the index of each input among the targets, used to feed a prediction back as the
    /// next input.
    ///
    /// # Errors
    /// An input that is not among the targets: it must be predicted, or be a forcing.
    pub fn feedback(&self) -> Result<Vec<usize>> {
        let place = |input: &String| {
            let found = self.targets.iter().position(|target| target == input);
            let expected = format!(
                "a target too ({}), or a forcing, which is known at every step",
                self.targets.join(", ")
            );
            found.ok_or_else(|| Error::argument("inputs", input, expected))
        };
        self.inputs.iter().map(place).collect()
    }
}

/// Source of a channel of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A channel of the files.
    Channel(usize),
    /// A mask: one where a channel of the files has values, zero elsewhere.
    Mask(usize),
    /// A channel of the constants.
    Constant(usize),
    Computed(Forcing),
}

/// Whether source `next` directly follows source `one` in the file, so that both can be read
/// together.
pub(crate) fn follows(one: &(usize, Origin), next: &(usize, Origin)) -> bool {
    match (one, next) {
        ((time, Origin::Channel(one)), (other, Origin::Channel(next)))
        | ((time, Origin::Mask(one)), (other, Origin::Mask(next))) => {
            time == other && one + 1 == *next
        }
        _ => false,
    }
}

/// Sources of the channels of a sample, by role.
#[derive(Debug)]
pub(crate) struct Origins {
    pub(crate) inputs: Vec<Origin>,
    pub(crate) forcings: Vec<Origin>,
    pub(crate) targets: Vec<Origin>,
}

impl Origins {
    /// Refuses forcings that depend on the time of day if the calendar of the files is not
    /// Gregorian.
    pub(crate) fn check_calendar(&self, file: &dyn Fields, channels: &Channels) -> Result<()> {
        let has_hour =
            |origin: &Origin| matches!(origin, Origin::Computed(forcing) if forcing.has_hour());
        let calendar = file.calendar();
        if calendar == Calendar::Gregorian || !self.forcings.iter().any(has_hour) {
            return Ok(());
        }
        let forcings = format!("{:?}", channels.forcings);
        let expected =
            format!("none of the hour or the sun, for files with the calendar {calendar}");
        Err(Error::argument("forcings", forcings, expected))
    }

    /// Refuses forcings that depend on the place if the grid is one row of cells without
    /// [positions](Grid::has_positions).
    pub(crate) fn check_places(&self, grid: &Grid, channels: &Channels) -> Result<()> {
        let has_place =
            |origin: &Origin| matches!(origin, Origin::Computed(forcing) if forcing.has_place());
        if grid.has_positions() || !self.forcings.iter().any(has_place) {
            return Ok(());
        }
        let forcings = format!("{:?}", channels.forcings);
        let expected = "none that are computed from latitude or longitude, which a grid of one row does not have \
                        without the positions of its cells; put these into the file as cell_latitude and cell_longitude, in \
                        degrees, along the dim of the cells, or read the forcings from a file under other names";
        Err(Error::argument("forcings", forcings, expected))
    }
}

/// Checks that a role names no channel twice.
fn check_once(role: &'static str, names: &[String]) -> Result<()> {
    let twice = (1..names.len()).find(|&index| names[..index].contains(&names[index]));
    match twice {
        Some(index) => {
            let got = format!("{} twice", names[index]);
            Err(Error::argument(role, got, "each channel once"))
        }
        None => Ok(()),
    }
}

/// Checks that no role names a channel twice. Checked before files are opened, of which several may
/// have only some of the channels.
///
/// # Errors
/// A name that is repeated.
pub(crate) fn check_repeats(config: &DatasetConfig) -> Result<()> {
    let roles = [
        ("inputs", config.inputs.as_deref()),
        ("targets", config.targets.as_deref()),
        ("forcings", Some(&config.forcings[..])),
    ];
    let mut roles = roles.into_iter();
    roles.try_for_each(|(role, names)| check_once(role, names.unwrap_or_default()))
}

/// Returns the configuration for opening the files. If the inputs are chosen but the channels are
/// not, it selects the channels that a sample needs. `constants` holds the names of constants.
pub(crate) fn open_config(config: &DatasetConfig, constants: &[String]) -> OpenConfig {
    let (None, Some(inputs)) = (&config.open.channels, &config.inputs) else {
        return config.open.clone();
    };
    let given = |name: &&String| {
        Forcing::of(name).is_some() || constants.iter().any(|constant| constant == *name)
    };
    let of_files = config.forcings.iter().filter(|name| !given(name));
    let of_files = of_files.map(|name| name.strip_prefix(MASK).unwrap_or(name));
    let targets = config.targets.iter().flatten();
    let all: Vec<&str> = inputs.iter().chain(targets).map(String::as_str).collect();
    let all: Vec<&str> = all.into_iter().chain(of_files).collect();
    let mut names: Vec<String> = Vec::new();
    for &name in &all {
        // A single level is redundant if all levels of its variable are chosen.
        let within = base(name) != name && all.contains(&base(name));
        if !within && !names.iter().any(|other| other == name) {
            names.push(name.into());
        }
    }
    config.open.clone().with_channels(Some(names))
}

/// Lists the channels besides those of the files that a role may have, for errors.
fn besides(role: &str, constants: &[String]) -> String {
    if role != "forcings" {
        return String::new();
    }
    let mut others = constants.to_vec();
    others.push(Forcing::names());
    format!(", {MASK} before one of them, or {}", others.join(", "))
}

/// Names the role of the channel in an error about a channel that the files lack, and lists the
/// other channels that the role may have.
pub(crate) fn with_role(error: Error, config: &DatasetConfig, constants: &[String]) -> Error {
    match error {
        Error::Argument {
            argument: "channels",
            got,
            expected,
        } => {
            let roles = [
                ("forcings", Some(&config.forcings)),
                ("inputs", config.inputs.as_ref()),
                ("targets", config.targets.as_ref()),
            ];
            let is_named = |names: &Vec<String>| {
                let mut names = names.iter();
                names.any(|name| name.strip_prefix(MASK).unwrap_or(name) == got)
            };
            let mut roles = roles.into_iter();
            let role = roles.find(|(_, names)| names.is_some_and(is_named));
            let role = role.map_or("channels", |(role, _)| role);
            let expected = expected + &besides(role, constants);
            Error::argument(role, got, expected)
        }
        other => other,
    }
}

/// Adds to an error about a channel of a role that a variable of that name, which is no channel by
/// default, is read if inputs are named. `left_out` lists the variables that are no channels.
pub(crate) fn with_left_out(error: Error, left_out: &[LeftOut]) -> Error {
    match error {
        Error::Argument {
            argument,
            got,
            expected,
        } => {
            let is_read = |variable: &LeftOut| {
                variable.name == got && matches!(variable.reason, LeftOutReason::Coordinate(_))
            };
            let hint = if left_out.iter().any(is_read) {
                format!("; {got} is a coordinate, which is read if inputs are named too")
            } else {
                String::new()
            };
            Error::argument(argument, got, expected + &hint)
        }
        other => other,
    }
}

/// Resolves the channels of a sample to sources in files with these channels and constants, and to
/// names.
///
/// # Errors
/// A name that matches no channel; a channel chosen twice in one role.
pub(crate) fn resolve(
    names: &[String],
    constants: &[String],
    config: &DatasetConfig,
) -> Result<(Origins, Channels)> {
    let of_file = |role: &'static str, name: &str| {
        let found = find(names, name);
        if !found.is_empty() {
            return Ok(found);
        }
        let (known, others) = (listed(name, names), besides(role, constants));
        let expected = format!("channels of the files, each once: {known}{others}");
        Err(Error::argument(role, name, expected))
    };
    let unique = |role, chosen: Vec<(Origin, String)>| {
        let (origins, names): (Vec<_>, Vec<_>) = chosen.into_iter().unzip();
        check_once(role, &names).map(|()| (origins, names))
    };
    let plain = |index: usize| (Origin::Channel(index), names[index].clone());
    let list = |role, chosen: &[String]| {
        let found = chosen.iter().map(|name| of_file(role, name));
        let found: Vec<Vec<usize>> = found.collect::<Result<_>>()?;
        unique(role, found.concat().into_iter().map(plain).collect())
    };
    let mut forcings = Vec::new();
    for name in &config.forcings {
        if let Some(forcing) = Forcing::of(name) {
            forcings.push((Origin::Computed(forcing), name.clone()));
        } else if let Some(constant) = constants.iter().position(|constant| constant == name) {
            forcings.push((Origin::Constant(constant), name.clone()));
        } else if let Some(masked) = name.strip_prefix(MASK) {
            let found = of_file("forcings", masked)?;
            let mask = |index: usize| (Origin::Mask(index), format!("{MASK}{}", names[index]));
            forcings.extend(found.into_iter().map(mask));
        } else {
            forcings.extend(of_file("forcings", name)?.into_iter().map(plain));
        }
    }
    let (forcings, forcing_names) = unique("forcings", forcings)?;
    let (inputs, input_names) = match &config.inputs {
        Some(chosen) => list("inputs", chosen)?,
        // All channels that are not forcings.
        None => (0..names.len())
            .map(plain)
            .filter(|(origin, _)| !forcings.contains(origin))
            .unzip(),
    };
    let (targets, target_names) = match &config.targets {
        Some(chosen) => list("targets", chosen)?,
        None => (inputs.clone(), input_names.clone()),
    };
    for (role, chosen) in [("inputs", &inputs), ("targets", &targets)] {
        if chosen.is_empty() {
            return Err(Error::argument(role, "none", "at least one channel"));
        }
    }
    let channels = Channels {
        inputs: input_names,
        forcings: forcing_names,
        targets: target_names,
    };
    let origins = Origins {
        inputs,
        forcings,
        targets,
    };
    Ok((origins, channels))
}
