//! Constant fields, in a separate file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use ndarray::{Array3, Axis};

use super::moments::{CellWeights, Moments, collect};
use crate::fields::aligned::aligned;
use crate::fields::same_grid;
use crate::{Error, Fields, Gaps, Metadata, Missing, OpenConfig, Result};

/// Constant fields, such as orography and a land mask, normalised by their own mean and standard
/// deviation over the grid. Missing values, where permitted, are read as zero, the mean.
#[derive(Debug)]
pub(crate) struct Constants {
    fields: Box<dyn Fields>,
    /// Mean and standard deviation of each channel.
    scales: Vec<(f64, f64)>,
    /// The last box that was read of each channel, because most boxes are read for every sample.
    last: Mutex<BTreeMap<usize, Scaled>>,
}

/// Rows and columns of a box, and its scaled values.
type Scaled = ([Range<usize>; 2], Array3<f32>);

impl Constants {
    /// Opens a file or store, and scales the channels in `used` by the values at the first time.
    /// Channels in `missing` may have missing values.
    ///
    /// # Errors
    /// Errors of [`OpenConfig::open`]; a channel without values; infinite values; missing values in
    /// channels not in `missing`; a name in `missing` that is not a channel.
    pub(crate) fn open(path: &Path, used: &[String], missing: &[String]) -> Result<Self> {
        let open = OpenConfig::new()
            .with_missing(Missing::Allow)
            .with_gaps(Gaps::Allow);
        // A forcing chooses a coordinate of the cells by name.
        let fields = open.open_all(path)?;
        let [_, _, rows, columns] = fields.shape();
        let weights = CellWeights::of(fields.grid());
        let names = fields.channels();
        if let Some(name) = missing.iter().find(|name| !names.contains(name)) {
            let expected = format!("channels of {}: {}", path.display(), names.join(", "));
            return Err(Error::argument("constants_missing", name, expected));
        }
        let mut scales = Vec::new();
        for (channel, name) in names.iter().enumerate() {
            if !used.contains(name) {
                scales.push((0.0, 1.0));
                continue;
            }
            let field = fields.read([0..1, channel..channel + 1, 0..rows, 0..columns])?;
            let mut values = field.indexed_iter();
            let may_miss = missing.contains(name);
            let refused =
                values.find(|(_, value)| value.is_infinite() || (value.is_nan() && !may_miss));
            if let Some(((_, _, row, column), value)) = refused {
                let (found, expected) = if value.is_nan() {
                    (
                        "a missing value",
                        "a value of a constant; name it in constants_missing if its mean may stand there, or \
                         change the fill value of the file, if that is a value",
                    )
                } else {
                    (
                        "an infinite value",
                        "a finite value of a constant, by which the others can be scaled",
                    )
                };
                return Err(Error::Value {
                    path: path.into(),
                    dataset: name.clone(),
                    index: vec![row, column],
                    found: format!("{found}, {value}"),
                    expected: expected.into(),
                });
            }
            let mut moments = [Moments::default()];
            collect(&mut moments, &field, None, &weights);
            let Some((mean, std)) = moments[0].mean_and_std() else {
                return Err(Error::shape(path, name, "no values", "a field with values"));
            };
            // A uniform field becomes zero.
            scales.push((mean, if std > 0.0 { std } else { 1.0 }));
        }
        Ok(Self {
            fields,
            scales,
            last: Mutex::default(),
        })
    }

    /// Returns the constants in the order of the grid of a dataset, whose first file is
    /// `reference`.
    ///
    /// # Errors
    /// Constants on another grid.
    pub(crate) fn in_order(self, metadata: &Metadata, reference: &Path) -> Result<Self> {
        let (grid, scales) = (metadata.grid(), self.scales);
        let fields = aligned(self.fields, grid);
        same_grid((fields.grid(), fields.path()), (grid, reference))?;
        Ok(Self {
            fields,
            scales,
            last: Mutex::default(),
        })
    }

    pub(crate) fn names(&self) -> &[String] {
        self.fields.channels()
    }

    /// Reads a box of a channel.
    pub(crate) fn read(&self, channel: usize, cells: [Range<usize>; 2]) -> Result<Array3<f32>> {
        let last = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((held, values)) = last().get(&channel)
            && *held == cells
        {
            return Ok(values.clone());
        }
        let [rows, columns] = cells.clone();
        let values = self
            .fields
            .read([0..1, channel..channel + 1, rows, columns])?;
        let (mean, std) = self.scales[channel];
        let scaled = |value: f32| {
            if value.is_nan() {
                0.0
            } else {
                ((f64::from(value) - mean) / std) as f32
            }
        };
        let values = values.index_axis_move(Axis(0), 0).mapv_into(scaled);
        last().insert(channel, (cells, values.clone()));
        Ok(values)
    }

    /// See [`Fields::fingerprint`].
    pub(crate) fn fingerprint(&self) -> Result<(u64, u32)> {
        self.fields.fingerprint()
    }
}

#[cfg(test)]
mod tests {
    use ndarray::s;

    use super::*;
    use crate::{FieldWriter, Grid, WriterConfig};

    #[test]
    fn a_box_is_read_from_the_file_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("constants.h5");
        let grid = Grid::cell_centered(2, 4).unwrap();
        let mut writer = FieldWriter::create(&path, &grid, &["z"], &WriterConfig::new()).unwrap();
        let field = Array3::from_shape_fn((1, 2, 4), |(_, row, column)| (row * 4 + column) as f32);
        writer.append(0.0, field.view()).unwrap();
        writer.finish().unwrap();
        let constants = Constants::open(&path, &["z".into()], &[]).unwrap();
        let read = |rows: Range<usize>| constants.read(0, [rows, 0..4]).unwrap();
        let whole = read(0..2);
        let before = constants.fields.traffic();
        assert_eq!(read(0..2), whole);
        assert_eq!(constants.fields.traffic(), before);
        assert_eq!(read(1..2), whole.slice(s![.., 1..2, ..]));
    }
}
