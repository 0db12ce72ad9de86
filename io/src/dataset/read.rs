//! Reading of the parts of samples, and of forcings at any time.

use std::ops::Range;

use ndarray::{Array3, Axis, s};

use super::FieldDataset;
use super::channels::{Origin, Origins, follows};
use super::forcing::Instant;
use super::sample::{Part, normalize};
use super::samples::SampleTimes;
use crate::time::times;
use crate::{Error, Fields, Result};

/// Location of values: the index of a time in its file, and the source.
type Place = (usize, Origin);

/// Returns a normalised value, or zero, the mean, in place of a missing one.
pub(super) fn filled(value: f32) -> f32 {
    if value.is_nan() { 0.0 } else { value }
}

impl FieldDataset {
    /// Returns the time and the source of each channel of a part of a sample.
    fn sources(&self, part: Part, times: &SampleTimes) -> Vec<(usize, Origin)> {
        let Origins {
            inputs,
            forcings,
            targets,
        } = &self.origins;
        let starts = std::iter::once(times.present()).chain(times.targets.iter().copied());
        let (times, origins): (Vec<usize>, _) = match part {
            Part::Input => (times.inputs.clone(), inputs),
            Part::Forcing => (starts.take(self.config.steps).collect(), forcings),
            Part::Target => (times.targets.clone(), targets),
        };
        let at = |time: usize| origins.iter().map(move |origin| (time, *origin));
        times.into_iter().flat_map(at).collect()
    }

    /// Reads a box of a part of a sample. Missing values of forcings are filled if configured;
    /// others are NaN.
    pub(crate) fn read(
        &self,
        sample: usize,
        part: Part,
        cells: [Range<usize>; 3],
    ) -> Result<Array3<f32>> {
        let fills = self.fills()? && part == Part::Forcing;
        let (file, times) = self.times_of(sample);
        let sources = &self.sources(part, times)[cells[0].clone()];
        let time = |index: usize| file.times()[index];
        self.read_sources(file, sources, time, fills, cells)
    }

    /// Reads a box of the forcings of one step, at a time on the axis of a sample or beyond its
    /// end. Beyond it, masks are those at the sample's present.
    ///
    /// # Errors
    /// A file that cannot be read; a time without fields, if a forcing is a time-dependent channel
    /// of the files.
    pub(crate) fn forcing_at(
        &self,
        sample: usize,
        seconds: f64,
        cells: [Range<usize>; 3],
    ) -> Result<Array3<f32>> {
        let (file, sampled) = self.times_of(sample);
        let found = times::find(file.times(), seconds);
        let changes = |origin: &Origin| match origin {
            Origin::Channel(channel) => !file.describe(*channel).is_static,
            Origin::Mask(_) | Origin::Constant(_) | Origin::Computed(_) => false,
        };
        let origins = &self.origins.forcings;
        if found.is_none()
            && let Some(forcing) = origins.iter().position(changes)
        {
            let got = format!(
                "{} at {}, for which the files have no fields",
                self.channels.forcings[forcing],
                file.calendar().date(seconds)
            );
            let expected = "computed channels, constants, masks, or channels without a time";
            return Err(Error::argument("forcings", got, expected));
        }
        let sources: Vec<Place> = origins[cells[0].clone()]
            .iter()
            .map(|origin| match origin {
                // Cells without values at the start have none in the forecast either.
                Origin::Mask(_) => (found.unwrap_or(sampled.present()), *origin),
                _ => (found.unwrap_or(0), *origin),
            })
            .collect();
        self.read_sources(file, &sources, |_| seconds, self.fills()?, cells)
    }

    /// Reads a box of sources. `time` maps the index of a time to seconds.
    fn read_sources(
        &self,
        file: &dyn Fields,
        sources: &[Place],
        time: impl Fn(usize) -> f64,
        fills: bool,
        [_, rows, columns]: [Range<usize>; 3],
    ) -> Result<Array3<f32>> {
        let read = |run: &[Place]| -> Result<Array3<f32>> {
            let (index, origin) = run[0];
            let at = |channel: usize| {
                let channels = channel..channel + run.len();
                let cells = [index..index + 1, channels, rows.clone(), columns.clone()];
                Ok::<_, Error>(file.read(cells)?.index_axis_move(Axis(0), 0))
            };
            Ok(match origin {
                Origin::Channel(channel) => {
                    let mut values = at(channel)?;
                    if let Some(scale) = &self.scale {
                        normalize(values.view_mut(), &scale[channel..channel + run.len()]);
                    }
                    if fills {
                        values.mapv_inplace(filled);
                    }
                    values
                }
                Origin::Mask(channel) => {
                    at(channel)?.mapv_into(|value| f32::from(u8::from(!value.is_nan())))
                }
                Origin::Constant(channel) => {
                    let constants = self.constants.as_ref().expect("they have this channel");
                    constants.read(channel, [rows.clone(), columns.clone()])?
                }
                Origin::Computed(forcing) => {
                    let instant = Instant::of(time(index), file.calendar());
                    let grid = self.metadata.grid();
                    let values = match grid.cells() {
                        Some(cells) => {
                            let [_, width] = grid.shape();
                            let held = |values: &[f64]| -> Vec<f64> {
                                let lines = rows.clone().flat_map(|row| {
                                    let first = row * width;
                                    &values[first + columns.start..first + columns.end]
                                });
                                lines.copied().collect()
                            };
                            let [lat, lon] = cells.map(held);
                            let shape = (rows.len(), columns.len());
                            forcing.on_cells(instant, &lat, &lon, shape)
                        }
                        None => {
                            let lat = &grid.lat()[rows.clone()];
                            forcing.on_grid(instant, lat, &grid.lon()[columns.clone()])
                        }
                    };
                    values.mapv(|value| value as f32).insert_axis(Axis(0))
                }
            })
        };
        // Channels that are adjacent in the file are read together. In the common case all are.
        let mut runs = sources.chunk_by(follows);
        if let (Some(run), None) = (runs.next(), runs.next()) {
            return read(run);
        }
        let mut values = Array3::zeros((sources.len(), rows.len(), columns.len()));
        let mut place = 0;
        for run in sources.chunk_by(follows) {
            let places = place..place + run.len();
            place = places.end;
            values.slice_mut(s![places, .., ..]).assign(&read(run)?);
        }
        Ok(values)
    }
}
