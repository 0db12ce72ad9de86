use burn::tensor::Tensor;

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
