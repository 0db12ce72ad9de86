//! Polar filter, which removes short zonal waves from tendencies where meridians converge, so that
//! the time step is set by the latitude where the filter begins.

use std::f64::consts::{PI, TAU};
use std::ops::Range;

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::{CHANNELS, Grid};

/// Filtering of short zonal waves near the poles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolarFilter {
    /// No filter. The time step is set by the row nearest to the pole.
    Off,
    /// Filters tendencies poleward of a latitude φ₀, in degrees, with the response
    /// `min(1, cos φ / (cos φ₀ sin(π m / columns)))` at zonal wavenumber `m` (Arakawa and Lamb
    /// 1977), which slows waves there to the speed of the fastest at φ₀. The zonal mean is kept, so
    /// mass is conserved.
    Poleward(f64),
}

/// Contiguous rows of a shard that are filtered.
#[derive(Clone, Debug)]
struct Band {
    rows: Range<usize>,
    /// Fraction removed from each wave, `[1, channels, rows, columns]`.
    loss: Tensor<4>,
}

/// Filter for one rank's rows.
#[derive(Clone, Debug)]
pub(super) struct Filter {
    bands: Vec<Band>,
    /// Zonal waves, an orthonormal `[columns, columns]` matrix shared by all rows.
    waves: Tensor<2>,
}

impl Filter {
    /// Creates the filter for the global rows `rows`; all longitudes must be on this rank.
    pub(super) fn new(
        grid: &Grid,
        filter: PolarFilter,
        rows: &Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Self {
        let columns = grid.columns();
        let cos_limit = match filter {
            PolarFilter::Off => 0.0,
            PolarFilter::Poleward(latitude) => latitude.to_radians().cos(),
        };
        // Depth and eastward wind lie at the centre, northward wind at the southern face.
        let cosines = |row: usize| {
            let (centre, face) = (
                grid.cos_centre(row as isize),
                grid.cos_face(row as isize + 1),
            );
            [centre, centre, face]
        };
        let filtered = |row: &usize| cosines(*row).iter().any(|&cosine| cosine < cos_limit);
        let half = grid.rows() / 2;
        let hemispheres = [
            rows.start..rows.end.min(half),
            rows.start.max(half)..rows.end,
        ];
        let bands = hemispheres.into_iter().filter_map(|band| {
            let kept: Vec<usize> = band.filter(filtered).collect();
            let first = kept.first()? - rows.start;
            let channels = (0..CHANNELS.len()).flat_map(|c| kept.iter().map(move |&row| (c, row)));
            let loss: Vec<f64> = channels
                .flat_map(|(channel, row)| loss(columns, cosines(row)[channel] / cos_limit))
                .collect();
            let shape = [1, CHANNELS.len(), kept.len(), columns];
            Some(Band {
                rows: first..first + kept.len(),
                loss: Tensor::from_data(TensorData::new(loss, shape), (device, dtype)),
            })
        });
        let bands: Vec<Band> = bands.collect();
        let waves = if bands.is_empty() {
            Vec::new()
        } else {
            waves(columns)
        };
        let shape = [waves.len() / columns, columns];
        Self {
            bands,
            waves: Tensor::from_data(TensorData::new(waves, shape), (device, dtype)),
        }
    }

    /// Filters a tendency, `[states, 3, rows, columns]`.
    pub(super) fn apply(&self, tendency: Tensor<4>) -> Tensor<4> {
        let [states, channels, _, columns] = tendency.dims();
        self.bands.iter().fold(tendency, |tendency, band| {
            let place = [0..states, 0..channels, band.rows.clone(), 0..columns];
            let shape = [states, channels, band.rows.len(), columns];
            let lines = [states * channels * band.rows.len(), columns];
            let field = tendency.clone().slice(place.clone());
            let spectrum = field.clone().reshape(lines).matmul(self.waves.clone());
            let lost = spectrum.reshape(shape) * band.loss.clone();
            let lost = lost.reshape(lines).matmul(self.waves.clone().transpose());
            tendency.slice_assign(place, field - lost.reshape(shape))
        })
    }
}

/// Returns the zonal wavenumber of a column of [`waves`]; each has a cosine and a sine.
fn wavenumber(column: usize) -> usize {
    column.div_ceil(2)
}

/// Computes one minus the response `min(1, cosine / sin(π m / columns))` for each wave; zero for
/// the mean.
fn loss(columns: usize, cosine: f64) -> Vec<f64> {
    let loss = |column| match wavenumber(column) {
        0 => 0.0,
        m => 1.0 - (cosine / (PI * m as f64 / columns as f64).sin()).min(1.0),
    };
    (0..columns).map(loss).collect()
}

/// Makes the mean, then the cosine and sine of each wavenumber, as columns of unit length.
fn waves(columns: usize) -> Vec<f64> {
    let n = columns as f64;
    let wave = |index: usize| {
        let (place, column) = (index / columns, index % columns);
        let m = wavenumber(column);
        let phase = TAU * ((m * place) % columns) as f64 / n;
        let single = m == 0 || 2 * m == columns;
        let amplitude = if single {
            (1.0 / n).sqrt()
        } else {
            (2.0 / n).sqrt()
        };
        amplitude
            * if column % 2 == 1 || m == 0 {
                phase.cos()
            } else {
                phase.sin()
            }
    };
    (0..columns * columns).map(wave).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wave_is_multiplied_by_its_response_and_the_mean_is_kept() {
        for columns in [12, 9] {
            let (grid, device) = (Grid::new(6, columns).unwrap(), Device::default());
            let filter = PolarFilter::Poleward(30.0);
            let filter = Filter::new(&grid, filter, &(0..6), DType::F64, &device);
            for m in 0..=columns / 2 {
                let phase = |k: usize| TAU * (m * k) as f64 / columns as f64 + 0.4;
                let wave: Vec<f64> = (0..18 * columns)
                    .map(|i| phase(i % columns).cos())
                    .collect();
                let data = TensorData::new(wave.clone(), [1, 3, 6, columns]);
                let field = Tensor::<4>::from_data(data, (&device, DType::F64));
                let out: Vec<f64> = filter.apply(field).into_data().try_to_vec().unwrap();
                for (index, (out, wave)) in out.into_iter().zip(wave).enumerate() {
                    let row = (index / columns % 6) as isize;
                    let north = index / columns / 6 == 2;
                    let cosine = if north {
                        grid.cos_face(row + 1)
                    } else {
                        grid.cos_centre(row)
                    };
                    let sine = (PI * m as f64 / columns as f64).sin();
                    let ratio = cosine / 30.0_f64.to_radians().cos() / sine;
                    let expected = if m == 0 { 1.0 } else { ratio.min(1.0) };
                    assert!(
                        (out - expected * wave).abs() < 1e-14,
                        "wavenumber {m}, row {row}"
                    );
                }
            }
        }
    }

    #[test]
    fn only_rows_beyond_the_latitude_are_filtered() {
        let grid = Grid::new(12, 8).unwrap();
        let device = Device::default();
        let rows = |filter, range| -> Vec<Range<usize>> {
            let filter = Filter::new(&grid, filter, &range, DType::F64, &device);
            filter.bands.into_iter().map(|band| band.rows).collect()
        };
        let none = Vec::<Range<usize>>::new();
        let poleward = PolarFilter::Poleward(50.0);
        assert_eq!(rows(poleward, 0..12), [0..3, 9..12]);
        assert_eq!(rows(poleward, 1..4), vec![0..2; 1]);
        assert_eq!(rows(poleward, 4..8), none);
        assert_eq!(rows(PolarFilter::Off, 0..12), none);
    }
}
