//! Orthogonal functions on the unit disc.

use std::f64::consts::PI;

/// Product of one wave along each of two axes, under a Hann window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waves {
    /// Wave numbers along both axes: even for cosines, odd for sines.
    numbers: [usize; 2],
    norm: f64,
}

impl Waves {
    pub(super) fn new(numbers: [usize; 2]) -> Self {
        Self { numbers, norm: 1.0 }
    }

    /// Scales the product to unit norm, by the quadrature of torch-harmonics.
    pub(super) fn normalised(self) -> Self {
        const RADII: usize = 50;
        const ANGLES: usize = 200;
        let (wide, turn) = (1.0 / RADII as f64, 2.0 * PI / ANGLES as f64);
        let points = (0..RADII).flat_map(|ring| (0..ANGLES).map(move |place| (ring, place)));
        let square = points.map(|(ring, place)| {
            let radius = (ring as f64 + 0.5) * wide;
            self.value(radius, place as f64 * turn).powi(2) * radius * wide * turn
        });
        Self {
            norm: square.sum::<f64>().sqrt().max(1e-12),
            ..self
        }
    }

    pub(super) fn value(&self, radius: f64, angle: f64) -> f64 {
        let wave = |number: usize, place: f64| {
            let phase = number.div_ceil(2) as f64 * PI * place;
            match number % 2 {
                1 => phase.sin(),
                _ => phase.cos(),
            }
        };
        let window = (0.5 * PI * radius).cos().powi(2);
        let [down, across] = self.numbers;
        let waves = wave(across, radius * angle.sin()) * wave(down, radius * angle.cos());
        window * waves / self.norm
    }

    pub(super) fn is_isotropic(&self) -> bool {
        self.numbers == [0, 0]
    }
}

/// Zernike polynomial of unit norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Zernike {
    degree: usize,
    /// Negative for sines.
    pub(super) order: isize,
}

impl Zernike {
    /// All polynomials of degrees below `degrees`.
    pub(super) fn below(degrees: usize) -> impl Iterator<Item = Self> {
        let orders = |degree: usize| (-(degree as isize)..=degree as isize).step_by(2);
        (0..degrees).flat_map(move |degree| orders(degree).map(move |order| Self { degree, order }))
    }

    pub(super) fn value(&self, radius: f64, angle: f64) -> f64 {
        let order = self.order.unsigned_abs();
        let [sum, difference] = [(self.degree + order) / 2, (self.degree - order) / 2];
        // (−1)^k (n − k)! / (k! (s − k)! (d − k)!), each from the previous one.
        let binomial = |product: f64, i: usize| product * (sum + i) as f64 / i as f64;
        let mut factor = (1..=difference).fold(1.0, binomial);
        let mut radial = 0.0;
        for k in 0..=difference {
            radial += factor * radius.powi((self.degree - 2 * k) as i32);
            let up = ((sum - k) * (difference - k)) as f64;
            factor *= -up / ((self.degree - k).max(1) * (k + 1)) as f64;
        }
        let phase = self.order as f64 * angle;
        let angular = if self.order < 0 {
            phase.sin()
        } else {
            phase.cos()
        };
        radial * angular / self.norm()
    }

    fn norm(&self) -> f64 {
        let angular = if self.order == 0 { 2.0 * PI } else { PI };
        (angular / (2 * (self.degree + 1)) as f64).sqrt()
    }
}

/// Bessel function that vanishes at radius one, times a wave around the centre, with unit norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bessel {
    pub(super) order: usize,
    /// Zero of the Bessel function of this order.
    zero: f64,
    is_sine: bool,
    norm: f64,
}

impl Bessel {
    /// Functions of orders up to `orders`, with zeros up to the zero of order zero numbered
    /// `zeros`, sorted by zero.
    pub(super) fn up_to(zeros: usize, orders: usize) -> Vec<Self> {
        // The zeros of one order separate those of the next.
        let mut of_order: Vec<f64> = (1..=zeros + orders)
            .map(|n| bisect(0, (n as f64 - 0.5) * PI, n as f64 * PI))
            .collect();
        let largest = of_order[zeros - 1];
        let mut found = Vec::new();
        for order in 0..=orders {
            for zero in of_order.iter().take(zeros).filter(|zero| **zero <= largest) {
                let sides: &[bool] = if order == 0 { &[false] } else { &[false, true] };
                found.extend(
                    sides
                        .iter()
                        .map(|is_sine| Self::new(order, *zero, *is_sine)),
                );
            }
            of_order = of_order
                .windows(2)
                .map(|pair| bisect(order + 1, pair[0], pair[1]))
                .collect();
        }
        found.sort_by(|a, b| a.zero.total_cmp(&b.zero));
        found
    }

    fn new(order: usize, zero: f64, is_sine: bool) -> Self {
        let angular = if order == 0 { 2.0 * PI } else { PI };
        Self {
            order,
            zero,
            is_sine,
            norm: bessel(order + 1, zero).abs() * (angular / 2.0).sqrt(),
        }
    }

    pub(super) fn value(&self, radius: f64, angle: f64) -> f64 {
        let phase = self.order as f64 * angle;
        let angular = if self.is_sine {
            phase.sin()
        } else {
            phase.cos()
        };
        bessel(self.order, self.zero * radius) * angular / self.norm
    }
}

/// Bessel function of the first kind.
fn bessel(order: usize, x: f64) -> f64 {
    libm::jn(order as i32, x)
}

/// Zero of a Bessel function between two points, by bisection.
fn bisect(order: usize, mut low: f64, mut high: f64) -> f64 {
    let sign = bessel(order, low).signum();
    loop {
        let middle = 0.5 * (low + high);
        if middle <= low || middle >= high {
            return middle;
        }
        if bessel(order, middle).signum() == sign {
            low = middle
        } else {
            high = middle
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Integrals over the disc of the products of all pairs of functions.
    fn products(functions: &[impl Fn(f64, f64) -> f64]) -> Vec<Vec<f64>> {
        let (radii, angles) = (400, 32);
        let integral = |a: &dyn Fn(f64, f64) -> f64, b: &dyn Fn(f64, f64) -> f64| {
            let points = (0..radii).flat_map(|ring| (0..angles).map(move |place| (ring, place)));
            let values = points.map(|(ring, place)| {
                let radius = (f64::from(ring) + 0.5) / f64::from(radii);
                let angle = 2.0 * PI * f64::from(place) / f64::from(angles);
                a(radius, angle) * b(radius, angle) * radius
            });
            values.sum::<f64>() * 2.0 * PI / f64::from(radii * angles)
        };
        let row = |a| functions.iter().map(|b| integral(a, b)).collect();
        functions.iter().map(|a| row(a)).collect()
    }

    fn check_orthonormal(functions: &[impl Fn(f64, f64) -> f64]) {
        for (a, row) in products(functions).iter().enumerate() {
            for (b, product) in row.iter().enumerate() {
                let expected = f64::from(a == b);
                assert!((product - expected).abs() < 1e-3, "{a} and {b}: {product}");
            }
        }
    }

    #[test]
    fn polynomials_are_orthonormal() {
        let polynomials: Vec<Zernike> = Zernike::below(6).collect();
        assert_eq!(polynomials.len(), 21);
        let values = polynomials
            .iter()
            .map(|polynomial| |radius, angle| polynomial.value(radius, angle));
        check_orthonormal(&values.collect::<Vec<_>>());
        // 6 r⁴ − 6 r² + 1 and 4 r⁴ − 3 r², over their norms.
        let [isotropic, cosine] = [polynomials[12], polynomials[13]];
        assert!((isotropic.value(0.5, 0.7) * (PI / 5.0).sqrt() + 0.125).abs() < 1e-14);
        let expected = (4.0 / 16.0 - 3.0 / 4.0) * 1.4_f64.cos();
        assert!((cosine.value(0.5, 0.7) * (PI / 10.0).sqrt() - expected).abs() < 1e-14);
    }

    #[test]
    fn bessel_functions_are_orthonormal_and_zero_at_the_rim() {
        let functions = Bessel::up_to(3, 4);
        check_orthonormal(
            &functions
                .iter()
                .map(|function| |radius, angle| function.value(radius, angle))
                .collect::<Vec<_>>(),
        );
        let zeros: Vec<f64> = functions.iter().map(|function| function.zero).collect();
        let known = [
            2.404825557695773,
            3.831705970207512,
            3.831705970207512,
            5.135622301840683,
        ];
        for (zero, known) in zeros.iter().zip(known) {
            assert!((zero - known).abs() < 1e-14, "{zero}; expected {known}");
        }
        assert!(
            functions
                .iter()
                .all(|function| function.value(1.0, 0.3).abs() < 1e-13)
        );
    }

    #[test]
    fn waves_have_norm_one() {
        let waves =
            [[0, 0], [1, 0], [2, 1], [3, 4]].map(|numbers| Waves::new(numbers).normalised());
        let values = waves.map(|waves| move |radius, angle| waves.value(radius, angle));
        for (index, row) in products(&values).iter().enumerate() {
            assert!((row[index] - 1.0).abs() < 1e-3, "{index}: {}", row[index]);
        }
    }
}
