//! Climatology of an experiment, and values relative to it.

use std::path::Path;

use halocline_core::{Error, Result, ShardTensor};
use halocline_io::{CheckpointConfig, Checkpoints, LoaderConfig};
use halocline_models::repeat_members;
use halocline_ops::prelude::*;

use super::climatology::{Climatology, Times};
use super::cycle::Cycle;
use super::data::{Data, Samples};
use super::network::OwnNetwork;
use super::record::{CLIMATOLOGY, check_training_files};
use super::setup::{Experiment, Files, like_batch_of, placements};
use crate::root::on_root;

/// Seconds per year.
const YEAR: f64 = 365.0 * 86400.0;

impl<N: OwnNetwork> Experiment<N> {
    /// Returns the climatology. If the folder does not hold it yet, it is computed, or copied from
    /// the run of the network that training starts from, if that saw differences from it.
    pub(super) fn climatology(&self) -> Result<&Climatology> {
        if let Some(climatology) = self.climatology.get() {
            return Ok(climatology);
        }
        let config = &self.config.data;
        let pretrained = self.config.training.pretrained.as_ref();
        let pretrained = pretrained.filter(|_| config.anomalies);
        let climatology = match (self.saved_climatology(&self.config.folder)?, pretrained) {
            (Some(saved), _) => saved,
            (None, Some(pretrained)) => self.copy_climatology(pretrained)?,
            (None, None) if self.files == Files::Trained => self.compute_climatology(&self.data)?,
            (None, None) => {
                let data = Data::open(config)?.in_order_of(&self.statistics);
                on_root(&self.world, || check_training_files(&self.config, &data))?;
                let computed = self.compute_climatology(&data)?;
                computed.with_calendar(self.data.calendar)
            }
        };
        Ok(self.climatology.get_or_init(|| climatology))
    }

    /// Loads the climatology from the folder of an experiment, if it holds that of the
    /// configuration.
    fn saved_climatology(&self, folder: &Path) -> Result<Option<Climatology>> {
        let placements = placements(self.mesh.shape(), Samples::States);
        let place = (&self.mesh, &placements[..]);
        let folder = folder.join(CLIMATOLOGY);
        let config = &self.config.data;
        let is_wanted = |cycle: Cycle, parts: usize, is_default: bool| {
            if config.anomalies {
                // The model sees differences from no other one. It may be that of the network from
                // which training started.
                return config.has_resolution(cycle, parts);
            }
            let is_cycle = config
                .climatology
                .map_or(is_default, |wanted| wanted == cycle);
            is_cycle && parts == config.parts_of_day()
        };
        Climatology::load(&self.world, place, &folder, is_wanted, self.data.calendar)
    }

    /// Copies the climatology of another experiment.
    fn copy_climatology(&self, other: &Path) -> Result<Climatology> {
        let found = self.saved_climatology(other)?;
        let climatology = found.ok_or_else(|| {
            let other = other.join(CLIMATOLOGY);
            Error::other(format!(
                "{}: no climatology of data.climatology and data.climatology_hours; expected that of the network of \
                 training.pretrained, which saw differences from it",
                other.display()
            ))
        })?;
        let folder = self.config.folder.join(CLIMATOLOGY);
        let checkpoints = Checkpoints::open(&self.world, folder, &CheckpointConfig::new())?;
        climatology.save(&self.world, checkpoints)?;
        Ok(climatology)
    }

    /// Computes the climatology of the training period.
    fn compute_climatology(&self, data: &Data) -> Result<Climatology> {
        let config = &self.config.data;
        let cycle = match config.climatology {
            Some(cycle) => cycle,
            None => {
                let files = data.training_files()?;
                // Over all files together, because each may be a month, or a run of some days.
                let times = || files.iter().flat_map(|fields| fields.times()).copied();
                let last = times().fold(f64::NEG_INFINITY, f64::max);
                let first = times().fold(f64::INFINITY, f64::min);
                if last - first + data.time_step >= YEAR - data.time_step {
                    Cycle::Month
                } else {
                    Cycle::Mean
                }
            }
        };
        let every = LoaderConfig::new(1);
        let states = self.loader(data, &config.train, Samples::Targets, &every)?;
        let folder = self.config.folder.join(CLIMATOLOGY);
        let times = Times {
            cycle,
            is_default: config.climatology.is_none(),
            parts: config.parts_of_day(),
            calendar: data.calendar,
        };
        Climatology::compute(&self.world, &folder, times, &states.loader)
    }

    /// Returns the climatology at these times as normalised values, sharded like `beside`: a batch
    /// with an entry for each time, or for each member of an ensemble at each time. For several
    /// entries at one time it is one value that broadcasts.
    pub(super) fn normal_at(
        &self,
        times: &[f64],
        beside: &ShardTensor<4>,
    ) -> Result<ShardTensor<4>> {
        let climatology = self.climatology()?.at(times);
        match (times.len(), beside.dims()[0]) {
            (times, entries) if times == entries => like_batch_of(climatology, beside),
            (1, _) => Ok(climatology),
            (times, entries) => {
                let placements = placements(self.mesh.shape(), Samples::Steps(1));
                let samples = climatology.try_redistribute(&placements)?;
                repeat_members(samples, entries / times, self.member_axis())
            }
        }
    }

    /// Returns normalised targets at these times, as differences from the climatology if the model
    /// sees those.
    pub(super) fn seen(&self, x: ShardTensor<4>, times: &[f64]) -> Result<ShardTensor<4>> {
        if self.config.data.anomalies {
            Ok(x.clone() - self.normal_at(times, &x)?)
        } else {
            Ok(x)
        }
    }

    /// Returns normalised inputs at these times, as the model sees them.
    pub(super) fn seen_inputs(&self, x: ShardTensor<4>, times: &[f64]) -> Result<ShardTensor<4>> {
        if self.config.data.anomalies {
            let places = self.data.channels.feedback()?;
            Ok(x.clone() - self.normal_at(times, &x)?.index_select(1, &places))
        } else {
            Ok(x)
        }
    }

    /// Returns predictions at these times with the value that fills inputs, the mean of the
    /// channel, where the mask is zero.
    pub(super) fn filled(
        &self,
        y: ShardTensor<4>,
        mask: ShardTensor<4>,
        times: &[f64],
    ) -> Result<ShardTensor<4>> {
        if self.config.data.anomalies {
            let normal = self.normal_at(times, &y)?;
            Ok((y + normal.clone()) * mask - normal)
        } else {
            Ok(y * mask)
        }
    }

    /// Converts predictions of the model for a time to targets in their units.
    pub(super) fn predicted(&self, x: ShardTensor<4>, time: f64) -> Result<ShardTensor<4>> {
        let x = if self.config.data.anomalies {
            x.clone() + self.normal_at(&[time], &x)?
        } else {
            x
        };
        Ok(self.in_units(x))
    }
}
