//! The operator on two ranks, which are threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, Scope};

use burn::tensor::Distribution;
use halocline::core::World;
use halocline::prelude::{
    Device, Launcher, Placement, Replicate, Result, Shard, ShardTensor, Tensor,
};

use crate::beside::timed;
use crate::cotangent::pair;
use crate::rows::Row;

const RANKS: usize = 2;

/// Two ranks, each with half the rows of a field, that run passes of an operator on request.
pub(crate) struct Ranks {
    passes: Vec<Sender<usize>>,
    seconds: Receiver<f64>,
}

impl Ranks {
    /// Starts the ranks; they end when this is dropped.
    pub(crate) fn start<'scope, 'env: 'scope>(
        scope: &'scope Scope<'scope, 'env>,
        row: &'static Row,
    ) -> Self {
        let (passes, receivers): (Vec<_>, Vec<_>) = (0..RANKS).map(|_| channel()).unzip();
        let receivers: Vec<_> = receivers
            .into_iter()
            .map(|end| Mutex::new(Some(end)))
            .collect();
        let (sender, seconds) = channel();
        scope.spawn(move || {
            let met = AtomicUsize::new(0);
            let result = Launcher::local(RANKS).check(false).run(|world| {
                let receiver = receivers[world.rank()].lock().expect("a lock").take();
                serve(row, &world, &receiver.expect("a receiver"), &sender, &met)
            });
            if let Err(error) = result {
                println!("{} on {RANKS} ranks: {error}", row.name);
            }
        });
        Self { passes, seconds }
    }

    /// Returns the seconds of one run on the slower rank; `None` if the operator has failed.
    pub(crate) fn run(&self, pass: usize) -> Option<f64> {
        self.passes
            .iter()
            .try_for_each(|rank| rank.send(pass).ok())?;
        let found = (0..RANKS).map(|_| self.seconds.recv().ok());
        found
            .collect::<Option<Vec<f64>>>()?
            .into_iter()
            .reduce(f64::max)
    }
}

fn serve(
    row: &Row,
    world: &World,
    passes: &Receiver<usize>,
    seconds: &Sender<f64>,
    met: &AtomicUsize,
) -> Result<()> {
    let mesh = world.mesh([("rows", RANKS)])?;
    let rows = row.shapes[0][2];
    let shard = |shape: &[usize; 4]| {
        let placement = if shape[2] == rows {
            Shard(2)
        } else {
            Replicate
        };
        let normal = Distribution::Normal(0.0, 1.0);
        let whole = match placement {
            // Replicas must be equal.
            Replicate => Tensor::<4>::ones(*shape, &Device::default()) * 0.1,
            _ => Tensor::<4>::random(*shape, normal, &Device::default()),
        };
        ShardTensor::distribute(whole, &mesh, &[placement] as &[Placement])
    };
    let plain: Vec<ShardTensor<4>> = row.shapes.iter().map(shard).collect::<Result<_>>()?;
    let leaves: Vec<ShardTensor<4>> = plain
        .iter()
        .map(|input| input.clone().require_grad())
        .collect();
    let run = |inputs: &[ShardTensor<4>]| (row.sharded)(inputs[0].clone(), inputs[1..].to_vec());
    let cotangent = run(&plain).local().clone();
    let gradients = || {
        let gradients = pair(run(&leaves).local().clone(), cotangent.clone()).backward();
        let gradient = |leaf: &ShardTensor<4>| leaf.grad(&gradients).expect("a gradient");
        leaves.iter().map(gradient).collect::<Vec<_>>()
    };
    for (run_number, pass) in passes.iter().enumerate() {
        met.fetch_add(1, Ordering::AcqRel);
        while met.load(Ordering::Acquire) < RANKS * (run_number + 1) {
            thread::yield_now();
        }
        let time = match pass {
            0 => timed(|| run(&plain)),
            _ => timed(gradients),
        };
        if seconds.send(time).is_err() {
            break;
        }
    }
    Ok(())
}
