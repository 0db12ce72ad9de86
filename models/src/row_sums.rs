//! Weighted sums over the columns of every row of this rank's shards, from which scores follow.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use halocline_core::comm::Operation;
use halocline_core::memory::{elements, is_cpu};
use halocline_core::ops::{self, from_dispatch, in_order};
use halocline_core::{
    DeviceMesh, Error, Fan, Layout, Replicate, Result, Shard, ShardTensor, Traffic, tasks,
};

/// Smallest number of rows that a thread sums.
const ROWS: usize = 16;

/// Weights of all rows and, unless each is one, of all columns, or of all cells row by row; a single
/// weight of rows is that of every row.
pub(crate) type Weights<'a> = (&'a [f64], Option<&'a [f64]>);

/// This rank's shards of fields `[batch, variables, lat, lon]` that are scored together.
pub(crate) struct Shards {
    layout: Layout,
    mesh: DeviceMesh,
    forecast: Tensor<4>,
    truth: Tensor<4>,
    climatology: Option<Tensor<4>>,
    mask: Option<Tensor<4>>,
}

impl Shards {
    /// Takes the shards of fields, with a climatology `[1 or batch, ..]` and a mask
    /// `[1 or batch, 1 or variables, ..]`, in at least f32: squares and sums in half precision
    /// overflow, or keep three digits.
    ///
    /// # Errors
    /// Partial values; fields that differ in size or shards.
    pub(crate) fn new(
        operator: &str,
        forecast: ShardTensor<4>,
        truth: ShardTensor<4>,
        climatology: Option<ShardTensor<4>>,
        mask: Option<ShardTensor<4>>,
    ) -> Result<Self> {
        forecast.require_resolved(operator)?;
        let (layout, mesh) = (forecast.layout().clone(), forecast.mesh().clone());
        let others = [
            ("the truth", Some(&truth), 0),
            ("a climatology", climatology.as_ref(), 1),
            ("a mask", mask.as_ref(), 2),
        ];
        for (name, field, ones) in others {
            if let Some(field) = field {
                check(operator, name, field.layout(), &layout, ones)?;
            }
        }
        let mut fields = others.iter().filter_map(|(_, field, _)| *field);
        let is_double = |field: &ShardTensor<4>| field.local().dtype() == DType::F64;
        let dtype = if is_double(&forecast) || fields.any(is_double) {
            FloatDType::F64
        } else {
            FloatDType::F32
        };
        let local = |field: ShardTensor<4>| field.inner().into_local().cast(dtype);
        Ok(Self {
            layout,
            mesh,
            forecast: local(forecast),
            truth: local(truth),
            climatology: climatology.map(local),
            mask: mask.map(local),
        })
    }

    /// Returns whether there is a climatology.
    pub(crate) fn has_climatology(&self) -> bool {
        self.climatology.is_some()
    }

    /// Sums in each row of each field, by one weight per column or per cell of the rows: weights;
    /// squared error, absolute error, error; products of the anomalies of forecast and truth, of the
    /// forecast's, and of the truth's. Without a climatology the anomalies are the values. Cells
    /// whose weight or mask is zero do not count, whatever they hold.
    pub(crate) fn errors(&self, columns: &[f64]) -> Result<Vec<[f64; 7]>> {
        let (forecast, truth) = (&self.forecast, &self.truth);
        if !is_cpu(&forecast.device()) {
            return Ok(self.composed(|| self.products(), columns));
        }
        let products = |forecast: f64, truth: f64, normal: f64| {
            let error = forecast - truth;
            let (forecast, truth) = (forecast - normal, truth - normal);
            [
                1.0,
                error * error,
                error.abs(),
                error,
                forecast * truth,
                forecast * forecast,
                truth * truth,
            ]
        };
        match &self.climatology {
            None => self.by_rows([forecast, truth], columns, |[forecast, truth]| {
                products(forecast, truth, 0.0)
            }),
            Some(climatology) => self.by_rows(
                [forecast, truth, climatology],
                columns,
                |[forecast, truth, normal]| products(forecast, truth, normal),
            ),
        }
    }

    /// Sums other fields of this layout like [`errors`](Self::errors).
    pub(crate) fn cells<const N: usize>(
        &self,
        fields: [ShardTensor<4>; N],
        columns: &[f64],
    ) -> Result<Vec<[f64; N]>> {
        let dtype = FloatDType::from(self.forecast.dtype());
        let fields = fields.map(|field| field.inner().into_local().cast(dtype));
        if is_cpu(&self.forecast.device()) {
            self.by_rows(fields.each_ref(), columns, |cells| cells)
        } else {
            Ok(self.composed(|| fields, columns))
        }
    }

    /// Computes the products that [`errors`](Self::errors) sums, by burn's operators.
    fn products(&self) -> [Tensor<4>; 7] {
        let error = self.forecast.clone() - self.truth.clone();
        let anomaly = |field: &Tensor<4>| match &self.climatology {
            None => field.clone(),
            Some(climatology) => field.clone() - climatology.clone(),
        };
        let (forecast, truth) = (anomaly(&self.forecast), anomaly(&self.truth));
        [
            error.ones_like(),
            error.clone() * error.clone(),
            error.clone().abs(),
            error,
            forecast.clone() * truth.clone(),
            forecast.clone() * forecast,
            truth.clone() * truth,
        ]
    }

    /// Sums fields by burn's operators, for devices without our kernels.
    fn composed<const N: usize>(
        &self,
        fields: impl FnOnce() -> [Tensor<4>; N],
        columns: &[f64],
    ) -> Vec<[f64; N]> {
        let dims = self.forecast.dims();
        if dims.contains(&0) {
            return vec![[0.0; N]; dims[..3].iter().product()];
        }
        let (device, dtype) = (self.forecast.device(), self.forecast.dtype());
        let data = TensorData::new(columns.to_vec(), [1, 1, columns.len() / dims[3], dims[3]]);
        let weight = Tensor::<4>::from_data(data, (&device, dtype));
        let mut weight: Tensor<4> = weight.expand(dims);
        if let Some(mask) = &self.mask {
            weight = weight * mask.clone();
        }
        let none = weight.clone().equal_elem(0.0);
        let sum = |field: Tensor<4>| {
            let counted = field.mask_fill(none.clone(), 0.0);
            (counted * weight.clone()).sum_dim(3)
        };
        let sums = Tensor::cat(Vec::from(fields().map(sum)), 3).into_data();
        let sums: Vec<f64> = sums.iter().collect();
        sums.as_chunks::<N>().0.to_vec()
    }

    /// Adds up sums of rows over the rows and the ranks, by one message; returns them for each entry
    /// of `weights`, by sample and variable. `sums` makes those of this rank's rows from one weight
    /// per column or cell, once for all entries with the same columns.
    pub(crate) fn totals<const N: usize>(
        &self,
        operator: &'static str,
        weights: &[Weights<'_>],
        sums: impl Fn(&[f64]) -> Result<Vec<[f64; N]>>,
    ) -> Result<Vec<Vec<[f64; N]>>> {
        let (layout, mesh) = (&self.layout, &self.mesh);
        let cells = layout.local_box(mesh.position());
        let [batch, variables, rows, columns] = cells.ranges() else {
            unreachable!("a field has 4 dims");
        };
        let (samples, channels) = (layout.shape()[0], layout.shape()[1]);
        let width = layout.shape()[3];
        let mut found = vec![[0.0; N]; weights.len() * samples * channels];
        let mut passes: Vec<(Vec<f64>, Vec<[f64; N]>)> = Vec::new();
        for (place, (row_weights, column_weights)) in weights.iter().enumerate() {
            let column_weights = match column_weights {
                Some(all) if all.len() == width => all[columns.clone()].to_vec(),
                Some(all) => {
                    let lines = rows.clone().map(|row| &all[row * width..][columns.clone()]);
                    lines.flatten().copied().collect()
                }
                None => vec![1.0; columns.len()],
            };
            let known = passes
                .iter()
                .position(|(others, _)| *others == column_weights);
            let pass = match known {
                Some(pass) => pass,
                None => {
                    let sums = sums(&column_weights)?;
                    passes.push((column_weights, sums));
                    passes.len() - 1
                }
            };
            for (field, lines) in passes[pass].1.chunks(rows.len().max(1)).enumerate() {
                let sample = batch.start + field / variables.len();
                let variable = variables.start + field % variables.len();
                let total = &mut found[(place * samples + sample) * channels + variable];
                let row_weights: &[f64] = match row_weights {
                    [weight] => &vec![*weight; rows.len()],
                    all => &all[rows.clone()],
                };
                for (weight, line) in row_weights.iter().zip(lines) {
                    // A row of weight zero does not count, whatever it holds.
                    if *weight != 0.0 {
                        let pairs = total.iter_mut().zip(line);
                        pairs.for_each(|(total, sum)| *total += weight * sum);
                    }
                }
            }
        }
        let axes = layout.axes_where(|placement| matches!(placement, Shard(_)));
        let operation = Operation::new(operator, Traffic::Reduce, Some(layout));
        let (comm, ranks) = (mesh.comm(), mesh.ranks_along(&axes));
        let parts = ops::all_gather_numbers(comm, &ranks, &operation, found.as_flattened())?;
        let mut totals = vec![[0.0; N]; found.len()];
        for part in parts {
            let (count, expected) = (part.len(), N * totals.len());
            if count != expected {
                let message = format!(
                    "{count} sums of another rank; expected {expected}, of the same regions and kind of scores"
                );
                return Err(Error::operator(operator, message));
            }
            let pairs = totals.as_flattened_mut().iter_mut().zip(part);
            pairs.for_each(|(total, sum)| *total += sum);
        }
        let fields = (samples * channels).max(1);
        Ok(totals.chunks(fields).map(<[_]>::to_vec).collect())
    }

    /// Sums functions of the cells of fields on the CPU, in double precision and one pass.
    fn by_rows<const M: usize, const N: usize>(
        &self,
        fields: [&Tensor<4>; M],
        columns: &[f64],
        terms: impl Fn([f64; M]) -> [f64; N] + Sync,
    ) -> Result<Vec<[f64; N]>> {
        let mask = self.mask.as_ref().map(HostField::new).transpose()?;
        let fields: Vec<HostField> = fields
            .into_iter()
            .map(HostField::new)
            .collect::<Result<_>>()?;
        let (dims, mask) = (self.forecast.dims(), mask.as_ref());
        Ok(match self.forecast.dtype() {
            DType::F64 => sums(dims, elements::<f64>, &fields, mask, columns, terms),
            _ => sums(dims, elements::<f32>, &fields, mask, columns, terms),
        })
    }
}

/// Cells of a field in the memory of the CPU, in row-major order.
struct HostField {
    cells: FlexTensor,
    dims: [usize; 4],
}

impl HostField {
    fn new(field: &Tensor<4>) -> Result<Self> {
        Ok(Self {
            cells: from_dispatch::<Flex>(in_order(field.clone().into_dispatch()))?,
            dims: field.dims(),
        })
    }
}

/// Rows of a field, which may have one batch entry or one variable for all of another field.
#[derive(Clone, Copy)]
struct Lines<'a, E> {
    cells: &'a [E],
    dims: [usize; 4],
}

impl<'a, E> Lines<'a, E> {
    /// Returns the cells that meet a row of a field of size `whole`.
    fn row(self, whole: [usize; 4], row: usize) -> &'a [E] {
        let [_, variables, rows, columns] = whole;
        let places = [row / rows / variables, row / rows % variables, row % rows];
        let line = places.iter().zip(self.dims).fold(0, |line, (place, size)| {
            line * size + if size == 1 { 0 } else { *place }
        });
        &self.cells[line * columns..][..columns]
    }
}

/// Sums functions of the cells of fields in each row of a field of size `dims`, by one weight per
/// column or per cell of the rows. `elements` reads the cells.
fn sums<E: Copy + Into<f64> + Sync, const M: usize, const N: usize>(
    dims: [usize; 4],
    elements: fn(&FlexTensor) -> &[E],
    fields: &[HostField],
    mask: Option<&HostField>,
    columns: &[f64],
    terms: impl Fn([f64; M]) -> [f64; N] + Sync,
) -> Vec<[f64; N]> {
    let fields: [Lines<'_, E>; M] = std::array::from_fn(|place| Lines {
        cells: elements(&fields[place].cells),
        dims: fields[place].dims,
    });
    let mask = mask.map(|mask| Lines {
        cells: elements(&mask.cells),
        dims: mask.dims,
    });
    let mut sums = vec![[0.0; N]; dims[..3].iter().product()];
    tasks::for_each_part(&mut sums, 1, ROWS, |row, sum| {
        let fields = fields.map(|field| field.row(dims, row));
        let mask = mask.map(|mask| mask.row(dims, row));
        let weights = if columns.len() == dims[3] {
            columns
        } else {
            &columns[row % dims[2] * dims[3]..][..dims[3]]
        };
        let mut total = [0.0; N];
        for (column, weight) in weights.iter().enumerate() {
            let present: f64 = mask.map_or(1.0, |mask| mask[column].into());
            let weight = weight * present;
            if weight == 0.0 {
                continue;
            }
            let found = terms(fields.map(|cells| cells[column].into()));
            for (total, term) in total.iter_mut().zip(found) {
                *total += weight * term;
            }
        }
        sum[0] = total;
    });
    sums
}

/// Requires the size and the shards of the forecast, or one cell on all ranks in the first `ones`
/// dims.
fn check(operator: &str, name: &str, found: &Layout, forecast: &Layout, ones: usize) -> Result<()> {
    let is_single = |dim: usize| dim < ones && found.shape()[dim] == 1 && !found.is_sharded(dim);
    let met = |layout: &Layout| {
        let placements = layout.map_placements(|placement| match placement {
            Shard(dim) if is_single(dim) => Replicate,
            Fan => Replicate,
            other => other,
        });
        let extents = (0..4).map(|dim| {
            if is_single(dim) {
                vec![1]
            } else {
                layout.extents(dim).to_vec()
            }
        });
        layout.derive(placements, extents.collect())
    };
    let expected = met(forecast);
    if met(found) == expected {
        return Ok(());
    }
    let message = format!("{name} {found} beside a forecast {forecast}; expected {expected}");
    Err(Error::operator(operator, message))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    fn field(dims: [usize; 4], step: usize) -> Tensor<4> {
        let cells = 0..dims.iter().product::<usize>();
        let values: Vec<f32> = cells.map(|cell| (cell * step % 23) as f32 / 7.0).collect();
        Tensor::from_data(TensorData::new(values, dims), &Device::default())
    }

    fn shards(fields: [Tensor<4>; 2], others: [Option<Tensor<4>>; 2]) -> Result<Shards> {
        let [forecast, truth] = fields.map(ShardTensor::solo);
        let [climatology, mask] = others.map(|other| other.map(ShardTensor::solo));
        Shards::new("scores", forecast, truth, climatology, mask)
    }

    /// The way of other devices runs on the CPU here.
    #[test]
    fn kernel_and_operators_sum_the_same_cells() {
        const DIMS: [usize; 4] = [2, 3, 4, 5];
        let line = [0.5, 1.0, 0.0, 2.0, 1.0];
        let plane: Vec<f64> = (0..20).map(|cell| f64::from(cell % 7)).collect();
        let hole = field(DIMS, 7).lower_elem(1.0);
        // NaN where nothing counts.
        let holed = field(DIMS, 5).mask_fill(hole.clone(), f32::NAN);
        let mask = field(DIMS, 3).mask_fill(hole, 0.0);
        let [one, all] = [[1, 3, 4, 5], DIMS].map(|dims| Some(field(dims, 11)));
        let part = Some(field([1, 1, 4, 5], 2));
        for (forecast, others) in [
            (holed, [one, Some(mask)]),
            (field(DIMS, 5), [all, part.clone()]),
            (field(DIMS, 5), [None, part]),
            (field(DIMS, 5), [None, None]),
        ] {
            let shards = shards([forecast, field(DIMS, 17)], others).unwrap();
            for columns in [&line[..], &plane[..]] {
                let found = shards.errors(columns).unwrap();
                let expected = shards.composed(|| shards.products(), columns);
                assert_eq!((found.len(), expected.len()), (2 * 3 * 4, 2 * 3 * 4));
                let pairs = found.as_flattened().iter().zip(expected.as_flattened());
                for (found, expected) in pairs {
                    let tolerance = 1e-5 * (1.0 + expected.abs());
                    assert!(
                        (found - expected).abs() < tolerance,
                        "{found} for {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_mask_that_does_not_meet_the_forecast_is_refused() {
        let with_mask = |mask| {
            let [forecast, truth] = [2, 3].map(|step| field([2, 3, 4, 5], step));
            shards([forecast, truth], [None, Some(field(mask, 1))])
        };
        assert!(with_mask([1, 1, 4, 5]).is_ok());
        let error = with_mask([1, 1, 1, 5]).err().map(|error| error.to_string());
        assert!(error.unwrap().contains("a mask [1, 1, 1, 5]"));
    }
}
