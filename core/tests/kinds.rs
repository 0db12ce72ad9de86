//! Integers and booleans on local ranks: they are placed, moved and compared like floats.

use burn::tensor::kind::Autodiff;
use burn::tensor::{Bool, DType, Device, Int, IntDType, Tensor};
use halocline_core::{
    Boundary, DeviceMesh, Halo, Launcher, Layout, Partial, Placement, ReduceOp, Replicate, Result,
    Shard, ShardTensor, scatter_tensor,
};

const SHAPE: [usize; 2] = [7, 5];

fn integers(device: &Device) -> Tensor<2, Int> {
    let values = Tensor::<1, Int>::arange(0..35, device);
    (values * 13 % 35 - 9).reshape(SHAPE)
}

fn layouts(mesh: &DeviceMesh) -> Result<Vec<Layout>> {
    let layout = |placements: &[Placement]| Layout::new(mesh.shape(), &SHAPE, placements);
    Ok(vec![
        layout(&[Replicate, Replicate])?,
        layout(&[Replicate, Shard(1)])?,
        layout(&[Shard(1), Shard(0)])?.with_extents(0, &[6, 1])?,
        layout(&[Shard(0), Shard(0)])?.with_extents(0, &[0, 4, 3, 0])?,
    ])
}

/// Scatters a tensor to every layout, moves it to every other, and gathers it; checks type and
/// values.
fn travels<K: Autodiff>(mesh: &DeviceMesh, whole: &Tensor<2, K>) -> Result<()> {
    let is_root = mesh.comm().rank() == 0;
    let expected = whole.clone().into_data();
    for from in &layouts(mesh)? {
        for to in &layouts(mesh)? {
            let x = scatter_tensor(is_root.then(|| whole.clone()), 0, mesh, from)?;
            assert_eq!((x.layout(), x.local().dtype()), (from, whole.dtype()));
            let y = x.try_redistribute(to)?;
            assert_eq!(y.layout(), to);
            let found = y.full_tensor().into_data();
            found.assert_eq(&expected, true);
            if let Some(gathered) = y.gather_tensor(2)? {
                gathered.into_data().assert_eq(&expected, true);
            }
            let same = ShardTensor::distribute(whole.clone(), mesh, to)?;
            assert!(same.equal(y).local().clone().all().into_scalar::<bool>());
        }
    }
    Ok(())
}

#[test]
fn every_type_of_element_moves_from_every_layout_to_every_other() {
    use IntDType::{I8, I16, I32, I64, U8, U32};
    for device in [Device::flex(), Device::flex().autodiff()] {
        Launcher::local(4)
            .device(device)
            .run(|world| {
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                let whole = integers(world.device());
                for dtype in [I64, I32, I16, I8, U32, U8] {
                    let whole = match dtype {
                        U32 | U8 => whole.clone() + 9,
                        _ => whole.clone(),
                    };
                    travels(&mesh, &whole.cast(dtype))?;
                }
                travels(&mesh, &whole.greater_elem(4))?;
                travels(&mesh, &integers(world.device()).float().cast(DType::F64))
            })
            .unwrap();
    }
}

#[test]
fn halos_of_integers_and_booleans() {
    Launcher::local(3)
        .run(|world| {
            let mesh = world.mesh([("x", 3)])?;
            let whole = integers(world.device());
            let x = ShardTensor::distribute(whole.clone(), &mesh, &[Shard(0)])?;
            let halo = [Halo::new(0, 2, Boundary::Periodic)];
            let padded = x.with_halo(&halo)?;
            let mask = x.clone().greater_elem(4).with_halo(&halo)?;
            let around = Tensor::cat(vec![whole.clone(), whole.clone(), whole], 0);
            let own = x.layout().local_box(mesh.position()).ranges()[0].clone();
            let expected = around.slice([own.start + 5..own.end + 9, 0..5]);
            padded.into_data().assert_eq(&expected.to_data(), true);
            let expected = expected.greater_elem(4);
            mask.into_data().assert_eq(&expected.into_data(), true);
            // Zero or false beyond the ends.
            let mask = ShardTensor::<2, Bool>::ones(SHAPE, &mesh, &[Shard(0)])?;
            let mask = mask.with_halo(&[Halo::new(0, 1, Boundary::Zeros)])?;
            let whole = mask.all().into_scalar::<bool>();
            assert_eq!(whole, world.rank() == 1);
            Ok(())
        })
        .unwrap();
}

#[test]
fn arithmetic_and_comparison_of_integers() {
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let whole = integers(world.device());
            let row = whole.clone().narrow(0, 2, 1);
            let x = || ShardTensor::distribute(whole.clone(), &mesh, &[Shard(0)]);
            let full = |x: ShardTensor<2, Int>| x.full_tensor().into_data();
            let y = (x()? * 3 + row.clone()) / 2 - x()?;
            let expected = (whole.clone() * 3 + row.clone()) / 2 - whole.clone();
            full(y).assert_eq(&expected.into_data(), true);
            full(-x()?).assert_eq(&(-whole.clone()).into_data(), true);
            let positive = x()?
                .greater_elem(0)
                .bool_and(x()?.equal(x()? + 1).bool_not());
            let chosen = x()?.mask_where(positive, x()? - x()?);
            let expected = whole.clone().clamp_max(0);
            full(chosen).assert_eq(&expected.into_data(), true);
            let float = x()?.float().full_tensor();
            float
                .into_data()
                .assert_eq(&whole.float().into_data(), true);
            Ok(())
        })
        .unwrap();
}

#[test]
fn partial_integers_and_booleans_resolve() {
    Launcher::local(3)
        .run(|world| {
            let mesh = world.mesh([("x", 3)])?;
            let partial = |op| Layout::new(mesh.shape(), &[4], &[Partial(op)]);
            let own = [[1, 5, -3, i64::MAX - 1], [4, 5, 0, 1], [4, 2, 7, 0]][world.rank()];
            let own = || Tensor::<1, Int>::from_data(own, (world.device(), DType::I64));
            for (op, expected) in [
                (ReduceOp::Sum, [9, 12, 4, i64::MAX]),
                (ReduceOp::Max, [4, 5, 7, i64::MAX - 1]),
                (ReduceOp::Min, [1, 2, -3, 0]),
                (ReduceOp::Product, [16, 50, 0, 0]),
            ] {
                let x = ShardTensor::from_local(own(), &mesh, &partial(op)?)?;
                let found = x.clone().resolve().local().to_data();
                found.assert_eq(&expected.into(), false);
                let shards = x.redistribute(&[Shard(0)]);
                assert_eq!(shards.local_dims(), [[2], [1], [1]][world.rank()]);
                let found = shards.full_tensor().into_data();
                found.assert_eq(&expected.into(), false);
            }
            let own = || {
                Tensor::<1, Bool>::from_data([world.rank() < 3, world.rank() < 1], world.device())
            };
            for (op, expected) in [
                (ReduceOp::Max, [true, true]),
                (ReduceOp::Min, [true, false]),
            ] {
                let layout = Layout::new(mesh.shape(), &[2], &[Partial(op)])?;
                let found = ShardTensor::from_local(own(), &mesh, &layout)?.resolve();
                found.local().to_data().assert_eq(&expected.into(), false);
            }
            let layout = Layout::new(mesh.shape(), &[2], &[Partial(ReduceOp::Sum)])?;
            let error = ShardTensor::from_local(own(), &mesh, &layout).unwrap_err();
            assert!(error.to_string().contains("booleans"), "{error}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn another_kind_than_expected_is_an_error_on_all_ranks() {
    let errors = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("x", 2)])?;
        if world.is_root() {
            let tensor = Tensor::<1>::ones([4], world.device());
            let error = scatter_tensor(Some(tensor), 0, &mesh, &[Shard(0), Shard(0)]);
            return Ok(error.unwrap_err().to_string());
        }
        let error = scatter_tensor::<1, Int>(None, 0, &mesh, &[Shard(0), Shard(0)]);
        Ok(error.unwrap_err().to_string())
    });
    let errors = errors.unwrap();
    assert!(errors[0].contains("2 placements"), "{errors:?}");
    assert!(
        errors[1].contains("rank 0 sends F32 of [4]; expected 1 dims of kind Int"),
        "{errors:?}"
    );
}

#[test]
fn quotients_of_integers_do_not_take_partial_sums() {
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let layout = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Sum)])?;
            let x = || {
                let own = Tensor::<1, Int>::from_data([3], world.device());
                ShardTensor::from_local(own, &mesh, &layout)
            };
            let doubled = (x()? * 2).resolve();
            doubled.local().to_data().assert_eq(&[12_i64].into(), false);
            let x = x()?;
            let halved = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| x / 2));
            assert!(halved.is_err());
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_dry_run_has_cells_of_every_kind() {
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let x = ShardTensor::<2>::ones(SHAPE, &mesh, &[Shard(0)])?;
            let planned = x.dry_run(|x| {
                let mask = x.greater_elem(0.5).try_redistribute(&[Replicate])?;
                mask.int()
                    .try_redistribute(&[Shard(1)])?
                    .with_halo(&[Halo::new(1, 1, Boundary::Periodic)])
            })?;
            assert_eq!(planned.operations.len(), 2, "{planned}");
            assert!(planned.bytes_sent() > 0);
            Ok(())
        })
        .unwrap();
}
