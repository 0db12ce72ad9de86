use burn::tensor::kind::Basic;
use burn::tensor::{DType, Int, Tensor, TensorData};
use halocline_core::{Boundary, Launcher, Result, Shard, ShardTensor};

use super::*;
use crate::prelude::*;
use crate::testing::{Operator, check_op};

struct Resample;

impl Operator<4, 4> for Resample {
    fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
        let x = inputs.remove(0);
        let coarse = x.clone().avg_pool(&crate::PoolOptions::new([2, 2]));
        let weights = x.profile(2, &[0.5, 1.0, 1.5, 2.0, 2.5, 3.0]);
        let fine = coarse.upsample_nearest(2).align_to(&x) * weights;
        X::cat(vec![fine.narrow(1, 1, 1), x], 1)
    }
}

struct Ranges;

impl Operator<3, 3> for Ranges {
    fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
        let x = inputs.remove(0).narrow(1, 1, 3);
        x.narrow(2, 2, 5).gelu().narrow(0, 1, 1)
    }
}

#[test]
fn ranges_of_sharded_dims() {
    check_op(&Ranges, &[[2, 5, 7]], &[], &[0, 1, 2], 1e-6);
}

#[test]
fn resampling_joining_and_profiles() {
    check_op(&Resample, &[[1, 2, 6, 4]], &[], &[2, 3], 1e-6);
}

/// Results of all functions that take elements of any kind, for a field `[5, 3]`.
fn rearranged<K: Basic>(x: ShardTensor<2, K>) -> Result<Vec<Vec<i64>>> {
    let places = Tensor::<2, Int>::from_ints([[0, 2, 1]; 5], &x.device());
    let index = ShardTensor::distribute(places, x.mesh(), x.layout())?;
    let row: ShardTensor<1, K> = select_dim(x.clone(), 0, 3)?;
    let lines = [flatten::<2, 1, K>(x.clone(), 0, 1)?, row.resolve()];
    let fields = [
        flip(x.clone(), &[0, 1])?,
        roll(x.clone(), &[2], &[0])?,
        shift(x.clone(), 0, -1, Boundary::Replicate)?,
        pad(x.clone(), &[(0, Padding::zeros(1, 2))], 1.0)?,
        permute(x.clone(), [1, 0])?,
        narrow(x.clone(), 0, 1, 1)?,
        slice_dim(x.clone(), 0, 0..5, 3)?,
        slice_dim(x.clone(), 1, 0..3, 2)?,
        cat(vec![x.clone(), x.clone()], 0)?,
        cat(vec![x.clone(), x.clone()], 1)?,
        repeat_all(x.clone(), [2, 2])?,
        index_select(x.clone(), 0, &[4, 0, 4, 2])?,
        index_select(x.clone(), 1, &[2, 0])?,
        expand(narrow(x.clone(), 1, 0, 1)?, [5, 4])?,
        gather(x, 1, index)?,
    ];
    let numbers = |data: TensorData| data.iter::<f64>().map(|x| x as i64).collect::<Vec<i64>>();
    let lines = lines.map(|x| numbers(x.full_tensor().into_data()));
    let fields = fields.map(|x| numbers(x.full_tensor().into_data()));
    Ok(lines.into_iter().chain(fields).collect())
}

#[test]
fn integers_and_booleans_move_as_floats_do() {
    const LARGE: i64 = 1 << 40;
    for ranks in 1..=3 {
        let run = Launcher::local(ranks).run(|world| {
            let mesh = world.mesh([("rows", ranks)])?;
            let values = (0..15).map(|number| number * number % 11 + LARGE);
            let values = TensorData::new(values.collect::<Vec<i64>>(), [5, 3]);
            let device = world.device();
            let integers = Tensor::<2, Int>::from_data(values.clone(), (device, DType::I64));
            let integers = ShardTensor::distribute(integers, &mesh, &[Shard(0)])?;
            let floats = values.convert_dtype(DType::F64);
            let floats = Tensor::<2>::from_data(floats, (device, DType::F64));
            let floats = ShardTensor::solo(floats);
            let small = integers.clone().lower_elem(LARGE + 5);
            let expected = floats.clone().lower_elem((LARGE + 5) as f64).float();
            assert_eq!(rearranged(small)?, rearranged(expected)?);
            assert_eq!(rearranged(integers)?, rearranged(floats)?);
            Ok(())
        });
        run.unwrap();
    }
}
