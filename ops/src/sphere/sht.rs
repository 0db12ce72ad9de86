//! Transform between a grid and spherical harmonics.

use std::collections::HashMap;
use std::f64::consts::PI;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::tensor::DType;
use halocline_core::{Error, Result};

use super::grid::SphereGrid;
use super::legendre::Function;
use super::table::{Key, Table};
use crate::precision::wider;

/// Norm of the harmonics that a field is projected on, as in torch-harmonics; the inverse transform
/// undoes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShtNorm {
    /// The integral of the squared harmonic is 1.
    #[default]
    Ortho,
    /// The integral is 4π.
    FourPi,
    /// The integral is 4π/(2l + 1).
    Schmidt,
}

/// Sign of harmonics of odd order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShtPhase {
    /// The Condon–Shortley phase, `(−1)^m`.
    #[default]
    CondonShortley,
    /// No sign change.
    Positive,
}

/// Spherical-harmonic transform of fields on a latitude-longitude grid: sizes, norm, and tables of
/// Legendre functions. Tables are computed on first use, for the orders of this rank, and shared by
/// clones. A GPU keeps each as a matrix of orders, degrees and latitudes, four times as large.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{SphereField, SphereGrid, Sht};
///
/// let sht = Sht::new([6, 12], SphereGrid::LegendreGauss)?;
/// let x = Tensor::<2>::ones([6, 12], &Default::default());
/// let harmonics = x.clone().sht::<3>(&sht); // [degrees, orders, 2]
/// assert_eq!(harmonics.dims(), [6, 6, 2]);
/// let mean = harmonics.clone().into_data().iter::<f32>().next().unwrap();
/// assert!((mean - (4.0 * std::f32::consts::PI).sqrt()).abs() < 1e-5);
/// let back = harmonics.isht::<2>(&sht).into_data();
/// back.assert_approx_eq::<f32>(&x.into_data(), burn::tensor::Tolerance::absolute(1e-5));
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Sht {
    size: [usize; 2],
    degrees: usize,
    orders: usize,
    norm: ShtNorm,
    phase: ShtPhase,
    cosines: Arc<[f64]>,
    weights: Arc<[f64]>,
    tables: Arc<Mutex<HashMap<Key, Arc<Table>>>>,
}

impl fmt::Debug for Sht {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            size,
            degrees,
            orders,
            norm,
            phase,
            ..
        } = self;
        write!(
            f,
            "Sht({size:?}, {degrees} degrees, {orders} orders, {norm:?}, {phase:?})"
        )
    }
}

impl Sht {
    /// Creates the transform of fields of `[latitudes, longitudes]` with as many degrees and orders
    /// as the grid resolves: at most `longitudes/2 + 1`, and at most the number of latitudes for
    /// Gauss–Legendre, one less for Lobatto, and half (rounded up) for equiangular grids.
    ///
    /// # Errors
    /// Fewer latitudes than [the grid](SphereGrid::quadrature) needs; no longitude.
    pub fn new(size: [usize; 2], grid: SphereGrid) -> Result<Self> {
        let [latitudes, longitudes] = size;
        let (cosines, weights) = grid.quadrature(latitudes)?;
        if longitudes == 0 {
            let message =
                format!("{size:?} latitudes and longitudes; expected one or more of each");
            return Err(Error::operator("Sht", message));
        }
        let degrees = grid.degrees(latitudes).min(longitudes / 2 + 1);
        Ok(Self {
            size,
            degrees,
            orders: degrees,
            norm: ShtNorm::default(),
            phase: ShtPhase::default(),
            cosines: cosines.into(),
            weights: weights.into(),
            tables: Arc::default(),
        })
    }

    /// Sets the number of degrees and orders.
    ///
    /// # Errors
    /// Zero, or more than `longitudes/2 + 1`.
    pub fn with_degrees(self, degrees: usize) -> Result<Self> {
        let most = self.size[1] / 2 + 1;
        if !(1..=most).contains(&degrees) {
            let message = format!("{degrees} degrees; expected 1 to {most}");
            return Err(Error::operator("Sht", message));
        }
        Ok(Self {
            degrees,
            orders: degrees,
            tables: Arc::default(),
            ..self
        })
    }

    /// Sets the number of orders, at most that of degrees.
    ///
    /// # Errors
    /// Zero, or more than the number of degrees.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{SphereField, SphereGrid, Sht};
    ///
    /// let sht = Sht::new([6, 12], SphereGrid::LegendreGauss)?.with_orders(4)?;
    /// let harmonics = Tensor::<2>::ones([6, 12], &Default::default()).sht::<3>(&sht);
    /// assert_eq!(harmonics.dims(), [6, 4, 2]); // [degrees, orders, 2]
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn with_orders(self, orders: usize) -> Result<Self> {
        if !(1..=self.degrees).contains(&orders) {
            let message = format!("{orders} orders; expected 1 to {}", self.degrees);
            return Err(Error::operator("Sht", message));
        }
        Ok(Self { orders, ..self })
    }

    /// Sets the norm.
    #[must_use]
    pub fn with_norm(self, norm: ShtNorm) -> Self {
        Self { norm, ..self }
    }

    /// Sets the sign of odd orders.
    #[must_use]
    pub fn with_phase(self, phase: ShtPhase) -> Self {
        Self {
            phase,
            tables: Arc::default(),
            ..self
        }
    }

    /// Numbers of latitudes and longitudes.
    pub fn size(&self) -> [usize; 2] {
        self.size
    }

    /// Number of degrees.
    pub fn degrees(&self) -> usize {
        self.degrees
    }

    /// Number of orders: that of degrees unless [set](Self::with_orders).
    pub fn orders(&self) -> usize {
        self.orders
    }

    /// Cosines of the colatitudes, from north to south.
    pub fn cosines(&self) -> &[f64] {
        &self.cosines
    }

    /// Quadrature weights for an integral over the cosine of the colatitude.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Returns the table of a function for these orders, computing it on first use.
    pub(super) fn table(
        &self,
        function: Function,
        orders: Range<usize>,
        dtype: DType,
    ) -> Arc<Table> {
        let key = Key {
            function,
            orders,
            dtype: wider(dtype),
        };
        let mut tables = self.tables.lock().expect("tables are made without a panic");
        let table = tables.entry(key).or_insert_with_key(|key| {
            let phase = self.phase == ShtPhase::CondonShortley;
            Arc::new(Table::new(key, self.degrees, &self.cosines, phase))
        });
        table.clone()
    }

    /// [`weights`](Self::weights), shared.
    pub(super) fn shared_weights(&self) -> Arc<[f64]> {
        self.weights.clone()
    }

    /// Factor of each degree in the forward transform, from the norm.
    pub(super) fn analysis(&self) -> impl Fn(usize) -> f64 + use<> {
        let norm = self.norm;
        let root = (4.0 * PI).sqrt();
        move |degree| match norm {
            ShtNorm::Ortho => 1.0,
            ShtNorm::FourPi => root,
            ShtNorm::Schmidt => root / ((2 * degree + 1) as f64).sqrt(),
        }
    }
}
