//! Channels that names of a configuration stand for.

use halocline_core::Result;
use halocline_io::{Channel, FieldDataset};

use super::data_config::DataConfig;
use super::errors::invalid;

/// Returns the inputs and forcings that change sign across a pole: those that the configuration
/// names, or else the eastward and northward components of the files.
///
/// # Errors
/// A name that is neither an input nor a forcing.
pub(super) fn odd(config: &DataConfig, dataset: &FieldDataset) -> Result<Vec<String>> {
    let channels = dataset.channels();
    let all = || channels.inputs.iter().chain(&channels.forcings);
    let Some(chosen) = &config.odd else {
        let is_component = |name: &&String| {
            let described = dataset.describe_channel(name);
            described.is_some_and(|channel| is_component(&channel))
        };
        return Ok(all().filter(is_component).cloned().collect());
    };
    if let Some(unknown) = chosen
        .iter()
        .find(|chosen| !all().any(|name| stands_for(chosen, name)))
    {
        let expected = format!("inputs or forcings: {:?}", all().collect::<Vec<_>>());
        return Err(invalid("data.odd", unknown, expected));
    }
    let is_chosen = |name: &&String| chosen.iter().any(|chosen| stands_for(chosen, name));
    Ok(all().filter(is_chosen).cloned().collect())
}

/// Replaces variables by all their levels, in the order of the channels of training. Inputs that
/// are left out become all of these channels but the forcings.
pub(super) fn with_all_levels(
    config: &DataConfig,
    trained: &[String],
    constants: &[String],
) -> DataConfig {
    let levels = |name: &String| {
        let (mask, variable) = match name.strip_prefix("mask:") {
            Some(variable) => ("mask:", variable),
            None => ("", &name[..]),
        };
        let is_channel = trained.iter().any(|channel| channel == variable);
        let levels = trained
            .iter()
            .filter(|channel| stands_for(variable, channel));
        let levels: Vec<String> = levels.map(|channel| format!("{mask}{channel}")).collect();
        if constants.contains(name) || is_channel || levels.is_empty() {
            vec![name.clone()]
        } else {
            levels
        }
    };
    let all = |names: &Vec<String>| names.iter().flat_map(levels).collect::<Vec<_>>();
    let forcings = all(&config.forcings);
    let inputs_by_default = || {
        let is_forcing = |name: &&String| {
            let mut of_files = forcings.iter().filter(|name| !constants.contains(name));
            of_files.any(|forcing| stands_for(forcing, name))
        };
        let inputs = trained.iter().filter(|name| !is_forcing(name));
        inputs.cloned().collect()
    };
    let inputs = config.inputs.as_ref().map(all);
    DataConfig {
        inputs: Some(inputs.unwrap_or_else(inputs_by_default)),
        targets: config.targets.as_ref().map(all),
        forcings,
        ..config.clone()
    }
}

/// Returns whether `chosen` is the channel `name`, or its variable, which stands for all levels.
pub(super) fn stands_for(chosen: &str, name: &str) -> bool {
    name == chosen || Channel::new(name.into()).variable() == chosen
}

/// Returns whether a channel is an eastward or northward component, by its standard name or else by
/// usual names.
fn is_component(channel: &Channel) -> bool {
    // GRIB converters write "unknown" for winds at ten metres.
    let standard_name = channel.standard_name.as_deref().unwrap_or("unknown");
    if !["", "unknown"].contains(&standard_name) {
        return standard_name.contains("eastward") || standard_name.contains("northward");
    }
    const NAMES: [&str; 6] = ["ua", "va", "uas", "vas", "uwnd", "vwnd"];
    let name = channel.variable().to_lowercase();
    // Matches u, v, u10, v10, u100m, u_500, 10u and the like.
    let digits = name
        .strip_prefix(['u', 'v'])
        .map(|rest| rest.trim_start_matches('_').trim_end_matches('m'))
        .or_else(|| name.strip_suffix(['u', 'v']));
    NAMES.contains(&&*name)
        || name.contains("eastward")
        || name.contains("northward")
        || name.ends_with("u_component_of_wind")
        || name.ends_with("v_component_of_wind")
        || digits.is_some_and(|digits| digits.chars().all(|digit| digit.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_are_known_by_their_names() {
        let is_odd = |name: &str, standard: Option<&str>| {
            let channel = Channel::new(name.into());
            is_component(&channel.with_standard_name(standard.map(String::from)))
        };
        let named = [
            "u",
            "v@500",
            "u10",
            "V10M",
            "u100",
            "uas",
            "u_500",
            "10u",
            "northward_wind",
            "10m_v_component_of_wind",
        ];
        assert!(named.iter().all(|name| is_odd(name, None)));
        assert!(is_odd("u10", Some("unknown")) && !is_odd("t2m", Some("unknown")));
        assert!(is_odd("sx", Some("surface_downward_eastward_stress")));
        for name in ["t2m", "uv", "vo@500", "vimd", "ua_mean", "wind_speed"] {
            assert!(!is_odd(name, None), "{name}");
        }
        // A standard name takes precedence over a usual name.
        assert!(!is_odd("u", Some("wind_speed")));
    }
}
