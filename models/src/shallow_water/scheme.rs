//! Spatial scheme: Sadourny's energy-conserving scheme, in vector-invariant form on an Arakawa C
//! grid.
//!
//! Depth lies at cell centres, eastward wind at the eastern faces, northward wind at the southern
//! faces, and vorticity at the south-eastern corners of the cells. With mass fluxes `U = h̄ u Δy`
//! and `V = h̄ v Δx`, potential vorticity `q = (ζ + f) / h̄` and Bernoulli function
//! `B = g (h + ground) + K`,
//!
//! ```text
//! A  ∂h/∂t = −(δx U + δy V)        mass leaves through faces: conserved to round-off
//! Δx ∂u/∂t =  ⟨q ⟨V⟩x⟩y − δx B     the q terms cancel in the energy equation,
//! Δy ∂v/∂t = −⟨q ⟨U⟩y⟩x − δy B     as do those of B with those of h
//! ```
//!
//! A. Arakawa, V. Lamb, *Methods in Computational Physics* 17 (1977) 173; R. Sadourny, *J. Atmos.
//! Sci.* 32 (1975) 680. Faces have zero length at the poles, so nothing flows through them, and no
//! cells beyond a pole are needed.
//!
//! The tendency takes few large tensor operations, with constants folded into the metrics. Halos
//! are one cell wide.

use std::ops::Range;

use burn::tensor::Tensor;

use super::Metrics;

/// Names of the channels of a state, in order.
pub const CHANNELS: [&str; 3] = ["depth", "east", "north"];

/// Returns the cells `rows × columns` of all states.
pub(super) fn window(field: &Tensor<4>, rows: Range<usize>, columns: Range<usize>) -> Tensor<4> {
    let [states, channels, ..] = field.dims();
    field.clone().slice([0..states, 0..channels, rows, columns])
}

/// Fields of a shard with their halo, and terms shared by several results.
pub(super) struct Block {
    /// Rows and columns of the shard, without halo.
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Depth, `[states, 1, rows + 2, columns + 2]`.
    pub(super) depth: Tensor<4>,
    pub(super) east: Tensor<4>,
    pub(super) north: Tensor<4>,
    /// v Δx/Δy at all southern faces.
    pub(super) north_scaled: Tensor<4>,
    /// Twice the depth at the eastern faces, `[states, 1, rows + 2, columns + 1]`.
    pub(super) depth_east: Tensor<4>,
    /// Twice the depth at the southern faces, `[states, 1, rows + 1, columns + 2]`.
    pub(super) depth_south: Tensor<4>,
}

impl Block {
    /// Makes the block of a state `[states, 3, rows + 2, columns + 2]`.
    pub(super) fn new(state: &Tensor<4>, metrics: &Metrics) -> Self {
        let [_, _, high, wide] = state.dims();
        let channel = |channel: usize| state.clone().narrow(1, channel, 1);
        let [depth, east, north] = [channel(0), channel(1), channel(2)];
        Self {
            rows: high - 2,
            columns: wide - 2,
            north_scaled: north.clone() * metrics.aspect_south.clone(),
            depth_east: window(&depth, 0..high, 0..wide - 1) + window(&depth, 0..high, 1..wide),
            depth_south: window(&depth, 0..high - 1, 0..wide) + window(&depth, 1..high, 0..wide),
            depth,
            east,
            north,
        }
    }

    /// 2 U/Δy at the eastern faces, `[states, 1, rows + 2, columns + 1]`.
    fn flux_east(&self) -> Tensor<4> {
        self.depth_east.clone() * window(&self.east, 0..self.rows + 2, 0..self.columns + 1)
    }

    /// 2 V/Δy at the southern faces, `[states, 1, rows + 1, columns + 2]`.
    fn flux_south(&self) -> Tensor<4> {
        self.depth_south.clone() * window(&self.north_scaled, 0..self.rows + 1, 0..self.columns + 2)
    }

    /// Relative vorticity at the corners, `[states, 1, rows + 1, columns + 1]`; zero at the poles.
    pub(super) fn vorticity(&self, metrics: &Metrics) -> Tensor<4> {
        let (n, m) = (self.rows, self.columns);
        let east = self.east.clone() * metrics.aspect_east.clone();
        let across =
            window(&self.north, 0..n + 1, 1..m + 2) - window(&self.north, 0..n + 1, 0..m + 1);
        let along = window(&east, 1..n + 2, 0..m + 1) - window(&east, 0..n + 1, 0..m + 1);
        (across + along) * metrics.curl.clone()
    }

    /// Four times the depth at the corners, `[states, 1, rows + 1, columns + 1]`.
    pub(super) fn depth_corner(&self) -> Tensor<4> {
        let (n, m) = (self.rows, self.columns);
        window(&self.depth_east, 0..n + 1, 0..m + 1) + window(&self.depth_east, 1..n + 2, 0..m + 1)
    }

    /// 4 B/κ at the centres, from the shard's first row and column to the halo south and east of
    /// it.
    fn bernoulli(&self, metrics: &Metrics) -> Tensor<4> {
        let (n, m) = (self.rows, self.columns);
        let east = window(&self.east, 1..n + 2, 0..m + 2);
        let square = east.clone() * east;
        let mut sum = window(&square, 0..n + 1, 1..m + 2) + window(&square, 0..n + 1, 0..m + 1);
        let columns = 1..m + 2;
        let square = window(&self.north, 0..n + 2, columns.clone())
            * window(&self.north_scaled, 0..n + 2, columns.clone());
        let faces = window(&square, 1..n + 2, 0..m + 1) + window(&square, 0..n + 1, 0..m + 1);
        sum = sum + faces * metrics.inverse_aspect.clone();
        let mut surface = window(&self.depth, 1..n + 2, columns);
        if let Some(ground) = &metrics.ground {
            surface = surface + ground.clone();
        }
        sum + surface * metrics.gravity.clone()
    }

    /// ∂h/∂t of the shard's cells.
    fn depth_tendency(
        &self,
        flux_east: &Tensor<4>,
        flux_south: &Tensor<4>,
        metrics: &Metrics,
    ) -> Tensor<4> {
        let (n, m) = (self.rows, self.columns);
        let inward = window(flux_east, 1..n + 1, 0..m) - window(flux_east, 1..n + 1, 1..m + 1);
        let upward = window(flux_south, 1..n + 1, 1..m + 1) - window(flux_south, 0..n, 1..m + 1);
        // The fluxes are twice those in units of Δy.
        (inward + upward) * window(&metrics.divergence, 0..n, 0..1).mul_scalar(0.5)
    }
}

/// Computes the tendency of the shallow-water equations for a state with its halo.
///
/// # Shapes
/// `[states, 3, rows + 2, columns + 2]` → `[states, 3, rows, columns]`.
pub(super) fn shallow_water(block: &Block, vorticity: Tensor<4>, metrics: &Metrics) -> Tensor<4> {
    let (n, m) = (block.rows, block.columns);
    let (flux_east, flux_south) = (block.flux_east(), block.flux_south());
    let depth = block.depth_tendency(&flux_east, &flux_south, metrics);
    let bernoulli = block.bernoulli(metrics);
    // q / 4 s
    let potential = (vorticity + metrics.coriolis.clone()).mul_scalar(1.0 / metrics.scale)
        / block.depth_corner();

    let turn = (window(&flux_south, 0..n + 1, 0..m + 1) + window(&flux_south, 0..n + 1, 1..m + 2))
        * potential.clone();
    let turn = window(&turn, 0..n, 1..m + 1) + window(&turn, 1..n + 1, 1..m + 1);
    let slope = window(&bernoulli, 0..n, 0..m) - window(&bernoulli, 0..n, 1..m + 1);
    let east = (turn + slope) * metrics.gradient_east.clone();

    let turn = (window(&flux_east, 0..n + 1, 0..m + 1) + window(&flux_east, 1..n + 2, 0..m + 1))
        * potential;
    let turn = window(&turn, 1..n + 1, 0..m) + window(&turn, 1..n + 1, 1..m + 1);
    let slope = window(&bernoulli, 1..n + 1, 0..m) - window(&bernoulli, 0..n, 0..m);
    let north = (slope - turn) * metrics.gradient_south.clone();

    Tensor::cat(vec![depth, east, north], 1)
}

/// Computes the tendency of depth advected by a constant wind, for a state with a halo of two
/// cells.
///
/// Depth is interpolated to the faces at fourth order, and at second order next to the poles, as
/// pure advection exposes the dispersion of short waves more than the full equations do.
///
/// # Shapes
/// `[states, 3, rows + 4, columns + 4]` → `[states, 3, rows, columns]`.
pub(super) fn advection(state: &Tensor<4>, metrics: &Metrics) -> Tensor<4> {
    let [_, _, high, wide] = state.dims();
    let mut block = Block::new(&window(state, 1..high - 1, 1..wide - 1), metrics);
    let depth = state.clone().narrow(1, 0, 1);
    // Cells one further from a face than those adjacent to it; the block has the sum of the
    // adjacent ones.
    let outer = window(&depth, 1..high - 1, 0..wide - 3) + window(&depth, 1..high - 1, 3..wide);
    let bend = block.depth_east.clone() - outer;
    block.depth_east = block.depth_east + bend.mul_scalar(1.0 / 6.0);
    let outer = window(&depth, 0..high - 3, 1..wide - 1) + window(&depth, 3..high, 1..wide - 1);
    let bend = (block.depth_south.clone() - outer) * metrics.faces_around.clone();
    block.depth_south = block.depth_south + bend.mul_scalar(1.0 / 6.0);

    let depth = block.depth_tendency(&block.flux_east(), &block.flux_south(), metrics);
    let still = depth.zeros_like();
    Tensor::cat(vec![depth, still.clone(), still], 1)
}

/// Adds a second-order diffusion of wind, `ν (∇ ∇·u − ∇ × ζ)`, to a tendency.
///
/// The vorticity has no gradient across a pole.
pub(super) fn diffuse(
    tendency: Tensor<4>,
    block: &Block,
    vorticity: Tensor<4>,
    viscosity: f64,
    metrics: &Metrics,
) -> Tensor<4> {
    let (n, m) = (block.rows, block.columns);
    let factor = viscosity / metrics.dy;
    let across = window(&block.east, 1..n + 2, 1..m + 2) - window(&block.east, 1..n + 2, 0..m + 1);
    let scaled = &block.north_scaled;
    let along = window(scaled, 0..n + 1, 1..m + 2) - window(scaled, 1..n + 2, 1..m + 2);
    // Multiplied by ν/Δy, `[states, 1, rows + 1, columns + 1]`.
    let divergence = ((across + along) * metrics.divergence.clone()).mul_scalar(factor);
    let vorticity = vorticity.mul_scalar(factor);

    let spread = window(&divergence, 0..n, 1..m + 1) - window(&divergence, 0..n, 0..m);
    let curl = window(&vorticity, 1..n + 1, 1..m + 1) - window(&vorticity, 0..n, 1..m + 1);
    let inverse_aspect = window(&metrics.inverse_aspect, 0..n, 0..1);
    let east = spread * inverse_aspect + curl * metrics.off_pole.clone();

    let spread = window(&divergence, 0..n, 0..m) - window(&divergence, 1..n + 1, 0..m);
    let curl = window(&vorticity, 1..n + 1, 1..m + 1) - window(&vorticity, 1..n + 1, 0..m);
    let north = spread * metrics.face_open.clone() + curl * metrics.inverse_aspect_south.clone();

    let still = east.zeros_like();
    tendency + Tensor::cat(vec![still, east, north], 1)
}
