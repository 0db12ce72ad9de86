//! Sums over forecasts of one variable, from which metrics follow.

/// Number of sums.
pub(crate) const SUMS: usize = 10;

/// Sums for one variable over forecasts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub(crate) forecasts: usize,
    pub(crate) squared: f64,
    pub(crate) absolute: f64,
    pub(crate) error: f64,
    pub(crate) correlated: usize,
    pub(crate) correlation: f64,
    pub(crate) ensembles: usize,
    pub(crate) crps: f64,
    pub(crate) variance: f64,
    /// Sum of `(m + 1) / m`.
    pub(crate) members: f64,
}

impl Sums {
    /// Adds the sums of [`Shards::errors`](crate::row_sums::Shards::errors) over the rows of one
    /// field. A climatology makes them `correlated`.
    pub(crate) fn add_errors(&mut self, totals: [f64; 7], correlated: bool) {
        let [
            weight,
            squared,
            absolute,
            error,
            covariance,
            forecast,
            truth,
        ] = totals;
        if weight == 0.0 {
            return;
        }
        self.forecasts += 1;
        self.squared += squared / weight;
        self.absolute += absolute / weight;
        self.error += error / weight;
        // Without anomalies, as for snow in summer, there is no correlation.
        let scale = (forecast * truth).sqrt();
        if correlated && scale != 0.0 {
            self.correlated += 1;
            self.correlation += covariance / scale;
        }
    }

    /// Returns the sums as numbers, which ranks exchange.
    pub(crate) fn numbers(&self) -> [f64; SUMS] {
        [
            self.forecasts as f64,
            self.squared,
            self.absolute,
            self.error,
            self.correlated as f64,
            self.correlation,
            self.ensembles as f64,
            self.crps,
            self.variance,
            self.members,
        ]
    }

    /// Adds the [numbers](Self::numbers) of other forecasts.
    pub(crate) fn add_numbers(&mut self, numbers: [f64; SUMS]) {
        let [
            forecasts,
            squared,
            absolute,
            error,
            correlated,
            correlation,
            ensembles,
            crps,
            variance,
            members,
        ] = numbers;
        self.forecasts += forecasts as usize;
        self.squared += squared;
        self.absolute += absolute;
        self.error += error;
        self.correlated += correlated as usize;
        self.correlation += correlation;
        self.ensembles += ensembles as usize;
        self.crps += crps;
        self.variance += variance;
        self.members += members;
    }
}
