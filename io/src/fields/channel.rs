use burn::config::Config;

/// Channel of a field: its name, and its description in the file.
///
/// # Example
/// ```
/// use halocline_io::Channel;
///
/// let channel = Channel::new("z@500".into())
///     .with_units(Some("m2 s-2".into()))
///     .with_standard_name(Some("geopotential".into()))
///     .with_level_units(Some("hPa".into()));
/// assert_eq!((channel.variable(), channel.level()), ("z", Some(500.0)));
/// assert_eq!(Channel::new("t2m".into()).level(), None);
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct Channel {
    /// Name of a variable, or of one of its levels, such as `z@500`.
    pub name: String,
    /// Units in the notation of the CF conventions, such as `m s-1`.
    pub units: Option<String>,
    /// Whether the file states no units although its format has an attribute for them.
    #[config(default = "false")]
    pub lacks_units: bool,
    /// Human-readable name.
    pub long_name: Option<String>,
    /// Name in the CF standard name table.
    pub standard_name: Option<String>,
    /// Means and other operations over time or area, of which the values are results, such as
    /// `time: mean` (CF attribute `cell_methods`).
    pub cell_methods: Option<String>,
    /// Units of the level, such as `hPa`.
    pub level_units: Option<String>,
    /// Direction in which levels increase, `up` or `down` (CF attribute `positive`).
    pub level_positive: Option<String>,
    /// Name of the level coordinate in the CF standard name table, such as `depth`.
    pub level_standard_name: Option<String>,
    /// Whether the field is the same at all times.
    #[config(default = "false")]
    pub is_static: bool,
    /// Extents along [time, channel, lat, lon] of the chunks in the file, the smallest unit of
    /// decoding.
    pub chunk: Option<[usize; 4]>,
}

impl Channel {
    /// Returns the name without its level.
    pub fn variable(&self) -> &str {
        match self.level() {
            Some(_) => self.parts().map_or(&*self.name, |(variable, _)| variable),
            None => &self.name,
        }
    }

    /// Returns the level in the name, if it is a number.
    pub fn level(&self) -> Option<f64> {
        let (_, label) = self.parts()?;
        let level = label.parse().ok().filter(|level: &f64| level.is_finite())?;
        // A label of a numeric level is exactly the text that reading formats from the number.
        (level.to_string() == label).then_some(level)
    }

    /// Whether both channels have the same units and the same units of their level. Units that are
    /// unknown on one side count as equal, but a channel that [lacks units](Self::lacks_units)
    /// differs from one that has them. Powers may be written `m s-1`, `m s**-1` or `m s^-1`, and
    /// hectopascals of levels `mbar`.
    ///
    /// # Example
    /// ```
    /// use halocline_io::Channel;
    ///
    /// let with = |units: &str| Channel::new("u10".into()).with_units(Some(units.into()));
    /// assert!(with("m s-1").has_units_of(&with("m s**-1")));
    /// assert!(with("m s-1").has_units_of(&Channel::new("u10".into())));
    /// assert!(!with("m s-1").has_units_of(&with("knots")));
    /// assert!(!with("m s-1").has_units_of(&Channel::new("u10".into()).with_lacks_units(true)));
    /// let level = |units: &str| Channel::new("t@1000".into()).with_level_units(Some(units.into()));
    /// assert!(level("hPa").has_units_of(&level("millibars")) && !level("hPa").has_units_of(&level("Pa")));
    /// ```
    pub fn has_units_of(&self, other: &Self) -> bool {
        let plain = |units: &String| units.replace("**", "").replace('^', "");
        let level = |units: &String| match &*units.to_lowercase() {
            "mbar" | "mb" | "millibar" | "millibars" => "hpa".into(),
            other => other.to_string(),
        };
        let levels = self.level_units.as_ref().zip(other.level_units.as_ref());
        if levels.is_some_and(|(one, other)| level(one) != level(other)) {
            return false;
        }
        match (&self.units, &other.units) {
            (Some(one), Some(other)) => plain(one) == plain(other),
            (None, None) => true,
            _ => !self.lacks_units && !other.lacks_units,
        }
    }

    fn parts(&self) -> Option<(&str, &str)> {
        self.name.rsplit_once('@')
    }
}

/// Returns the name of a channel without its level, which is the name of its variable.
pub(crate) fn base(channel: &str) -> &str {
    channel.rsplit_once('@').map_or(channel, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_number_that_keeps_its_label_is_a_level() {
        let level = |name: &str| Channel::new(name.into()).level();
        assert_eq!(level("z@500"), Some(500.0));
        assert_eq!(level("so@0.4940254"), Some(0.4940254));
        for name in [
            "z",
            "z@",
            "z@surface",
            "z@5e2",
            "z@0500",
            "z@inf",
            "z@NaN",
            "z@500.0",
        ] {
            assert_eq!(level(name), None, "{name}");
            assert_eq!(Channel::new(name.into()).variable(), name);
        }
    }
}
