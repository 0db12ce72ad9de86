//! Sharded tensors on local ranks: every change of placement with its gradient, scatter,
//! arithmetic, and misuse.

use burn::tensor::{DType, Device, Float, Tensor, TensorData, Tolerance};
use halocline_core::comm::Operation;
use halocline_core::ops::all_reduce;
use halocline_core::{
    Boundary, DeviceMesh, Distribution, Error, Halo, Launcher, Layout, LocalGradient, MeshShape,
    Partial, Placement, RandomKey, ReduceOp, Replicate, Result, Shard, ShardTensor, Traffic, World,
    scatter_tensor,
};

const SHAPE: [usize; 2] = [7, 5];

fn values(world: &World) -> Tensor<2> {
    let values: Vec<f32> = (0..35).map(|i| ((i * 13) % 35) as f32).collect();
    Tensor::<1>::from_floats(values.as_slice(), world.device()).reshape(SHAPE)
}

fn close(found: Tensor<2>, expected: Tensor<2>) {
    let tolerance = Tolerance::<f32>::absolute(1e-4);
    found
        .into_data()
        .assert_approx_eq(&expected.inner().into_data(), tolerance);
}

/// Layouts of [`SHAPE`] on a mesh [("a", 2), ("b", 2)].
fn layouts(world: &World) -> Result<(DeviceMesh, Vec<Layout>)> {
    let mesh = world.mesh([("a", 2), ("b", 2)])?;
    let layout = |placements: &[Placement]| Layout::new(mesh.shape(), &SHAPE, placements);
    let layouts = vec![
        layout(&[Replicate, Replicate])?,
        layout(&[Shard(0), Replicate])?,
        layout(&[Replicate, Shard(1)])?,
        layout(&[Shard(0), Shard(1)])?,
        layout(&[Shard(1), Shard(0)])?.with_extents(0, &[6, 1])?,
        layout(&[Shard(0), Shard(0)])?.with_extents(0, &[0, 4, 3, 0])?,
        layout(&[Shard(1), Shard(1)])?,
    ];
    Ok((mesh, layouts))
}

#[test]
fn every_layout_becomes_every_other_with_its_gradient() {
    Launcher::local(4)
        .run(|world| {
            let (mesh, layouts) = layouts(&world)?;
            for from in &layouts {
                for to in &layouts {
                    let whole = values(&world).inner();
                    let x = ShardTensor::distribute(whole.clone().autodiff(), &mesh, from)?;
                    let x = x.detach().require_grad();
                    let y = x.clone().try_redistribute(to)?;
                    assert_eq!(y.layout(), to);
                    close(y.clone().detach().full_tensor().inner(), whole.clone());
                    // A loss whose gradient differs by cell: Σ w·y, with w sharded as y.
                    let w = ShardTensor::distribute(whole.clone() * 2.0, &mesh, to)?;
                    let gradients = sum(y * w).backward();
                    let gradient = x.grad(&gradients).expect("a gradient");
                    assert_eq!(gradient.layout(), from, "from {from} to {to}");
                    close(gradient.full_tensor(), whole * 2.0);
                }
            }
            Ok(())
        })
        .unwrap();
}

/// Returns the sum of all elements as a partial value.
fn sum(x: ShardTensor<2>) -> ShardTensor<1> {
    let layout = x.layout().clone();
    let placements = layout.placements().iter().map(|placement| match placement {
        Shard(_) => Partial(ReduceOp::Sum),
        other => *other,
    });
    let (local, _, mesh) = x.into_parts();
    let layout = layout.derive(placements.collect(), vec![vec![1]]);
    ShardTensor::from_parts(local.sum(), layout, mesh)
}

#[test]
fn partial_sums_resolve_and_scatter_with_their_gradients() {
    Launcher::local(4)
        .run(|world| {
            let mesh = world.mesh([("a", 2), ("b", 2)])?;
            let partial = [Partial(ReduceOp::Sum), Shard(1)];
            for target in [
                [Replicate, Shard(1)],
                [Shard(0), Shard(1)],
                [Shard(0), Replicate],
                [Shard(1), Shard(1)],
            ] {
                // Rank (a, b) contributes (a + 1) times its columns, so the value is three times
                // the whole.
                let share = mesh.coords()[0] as f64 + 1.0;
                let layout = Layout::new(mesh.shape(), &SHAPE, &[Replicate, Shard(1)])?;
                let shard = ShardTensor::distribute(values(&world).detach(), &mesh, &layout)?;
                let leaf = (shard.into_local().detach() * share)
                    .detach()
                    .require_grad();
                let x = ShardTensor::from_parts(
                    leaf.clone(),
                    layout.with_placement(0, partial[0]),
                    mesh.clone(),
                );
                let y = x.try_redistribute(&target)?;
                assert_eq!(y.placements(), target);
                close(
                    y.clone().detach().full_tensor().inner(),
                    values(&world) * 3.0,
                );
                let w = ShardTensor::distribute(values(&world).inner(), &mesh, y.layout())?;
                let gradients = sum(y * w).backward();
                // Each term of a sum has the sum's gradient.
                let expected = ShardTensor::distribute(values(&world).inner(), &mesh, &layout)?;
                close(
                    leaf.grad(&gradients).expect("a gradient"),
                    expected.into_local(),
                );
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_replicated_tensor_that_leaves_says_what_its_gradient_means() {
    Launcher::local(3)
        .run(|world| {
            let mesh = world.mesh([("x", 3)])?;
            let x = ShardTensor::distribute(values(&world), &mesh, &[Shard(0)])?
                .detach()
                .require_grad();
            let gradient = |gradient: LocalGradient, factor: f64| -> Result<Tensor<2>> {
                let loss = (x.full_tensor_with(gradient) * factor).sum();
                let found = x.grad(&loss.backward()).expect("a gradient");
                Ok(found.full_tensor())
            };
            let ones = Tensor::<2>::ones(SHAPE, &world.device().clone().inner());
            close(
                gradient(LocalGradient::Replicated, 2.0)?,
                ones.clone() * 2.0,
            );
            // Ranks weight it by 1, 2 and 3, so the gradients add up to 6.
            close(
                gradient(LocalGradient::Partial, world.rank() as f64 + 1.0)?,
                ones * 6.0,
            );
            Ok(())
        })
        .unwrap();
}

#[test]
fn scatter_sends_each_rank_its_shard_and_no_more() {
    Launcher::local(4)
        .run(|world| {
            for source in 0..4 {
                let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
                let before = world.comm_stats();
                let sample = (world.rank() == source).then(|| values(&world));
                let x = scatter_tensor(sample, source, &mesh, &[Shard(0), Shard(1)])?;
                let sent = world.comm_stats().since(&before).of(Traffic::Scatter).bytes as usize;
                let own = x.layout().local_box(mesh.position()).volume();
                let others = if world.rank() == source { 35 - own } else { 0 };
                assert_eq!(sent, others * size_of::<f32>());
                assert!(x.clone().require_grad().local().is_require_grad());
                close(x.full_tensor(), values(&world));
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn gathering_gives_one_rank_the_whole() {
    Launcher::local(3)
        .run(|world| {
            let mesh = world.mesh([("x", 3)])?;
            let x = ShardTensor::distribute(values(&world), &mesh, &[Shard(1)])?;
            let gathered = x.gather_tensor(1)?;
            assert_eq!(gathered.is_some(), world.rank() == 1);
            if let Some(whole) = gathered {
                close(whole, values(&world));
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn gradients_of_replicated_operands_are_complete() {
    Launcher::local(4)
        .run(|world| {
            let mesh = world.mesh([("a", 2), ("b", 2)])?;
            let x = ShardTensor::distribute(values(&world), &mesh, &[Shard(0), Shard(1)])?;
            let bias = Tensor::<2>::ones([1, 5], world.device()).require_grad();
            // The bias is sharded over b with x's columns, and replicated over a.
            let beside = x
                .replicate_operand(bias.clone())
                .redistribute(&[Replicate, Shard(1)]);
            let gradients = sum(x.clone() * beside).backward();
            let expected = values(&world).inner().sum_dim(0);
            close(bias.grad(&gradients).expect("a gradient"), expected);
            Ok(())
        })
        .unwrap();
}

#[test]
fn random_fields_are_the_same_bits_on_any_mesh() {
    let field = |axes: &[(&str, usize)], placements: &[Placement]| -> TensorData {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let fields = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let key = RandomKey::new(5, "field");
            let normal = Distribution::Normal(0.0, 1.0);
            let x = ShardTensor::<2>::random([9, 11], normal, key, &mesh, placements)?;
            Ok(x.full_tensor().into_data())
        });
        fields.unwrap().remove(0)
    };
    let whole = field(&[("x", 1)], &[Shard(0)]);
    assert_eq!(field(&[("x", 3)], &[Shard(0)]), whole);
    assert_eq!(field(&[("y", 2), ("x", 2)], &[Shard(1), Shard(0)]), whole);
    assert_eq!(field(&[("y", 2), ("x", 2)], &[Shard(1), Shard(1)]), whole);
}

#[test]
fn halos_have_an_adjoint() {
    // ⟨F x, y⟩ = ⟨x, F* y⟩ for a halo that wraps around and spans neighbours.
    Launcher::local(4)
        .run(|world| {
            let mesh = world.mesh([("a", 2), ("b", 2)])?;
            let layout = Layout::new(mesh.shape(), &SHAPE, &[Shard(0), Shard(1)])?
                .with_extents(0, &[6, 1])?;
            let x =
                ShardTensor::distribute(values(&world).detach(), &mesh, &layout)?.require_grad();
            let halos = [
                Halo::new(0, 3, Boundary::Reflect),
                Halo::new(1, 4, Boundary::Periodic),
            ];
            let padded = x.with_halo(&halos)?;
            let key = RandomKey::new(1, world.rank());
            let size: usize = padded.dims().iter().product();
            let y = key.fill(
                Distribution::Uniform(-1.0, 1.0),
                &[size],
                &halocline_core::IndexBox::whole(&[size]),
            );
            let y = Tensor::from_data(
                TensorData::new(y, padded.shape()),
                &world.device().clone().inner(),
            );
            let lhs = (padded * y).sum();
            let adjoint = x.grad(&lhs.backward()).expect("a gradient");
            let rhs = sum(x.clone().inner() * adjoint)
                .resolve()
                .into_local()
                .into_scalar::<f32>();
            let layout = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Sum); 2])?;
            let lhs = ShardTensor::from_local(lhs.inner(), &mesh, &layout)?
                .resolve()
                .into_local();
            assert!((lhs.into_scalar::<f32>() - rhs).abs() < 1e-3 * rhs.abs().max(1.0));
            Ok(())
        })
        .unwrap();
}

#[test]
fn misuse_is_an_error_that_names_the_way_out() {
    Launcher::local(2)
        .run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let x = ShardTensor::distribute(values(&world), &mesh, &[Shard(0)])?;
            let partial = sum(x.clone());
            let says = |error: Error, text: &str| {
                assert!(
                    error.to_string().contains(text),
                    "{error}\nshould contain: {text}"
                );
            };
            says(
                partial.require_resolved("gelu").unwrap_err(),
                "gelu: no rule for Partial(Sum) on axis \"lat\"; call resolve()",
            );
            says(
                x.require_whole("conv2d", 0).unwrap_err(),
                "redistribute(&[Replicate]) first",
            );
            says(
                x.clone()
                    .try_redistribute(&[Partial(ReduceOp::Sum)])
                    .unwrap_err(),
                "partial values come from operators only",
            );
            says(
                ShardTensor::from_local(values(&world), &mesh, x.layout()).unwrap_err(),
                "local tensor [7, 5] for a shard of",
            );
            says(
                scatter_tensor::<2, Float>(None, 0, &mesh, &[Shard(0)]).unwrap_err(),
                "the source, rank 0, passed None",
            );
            says(x.gather_tensor(9).unwrap_err(), "rank 9 is not in the mesh");
            says(
                x.with_halo(&[Halo::new(2, 1, Boundary::Zeros)])
                    .unwrap_err(),
                "each dim at most once",
            );
            Ok(())
        })
        .unwrap();
}

#[test]
fn ranks_that_diverge_get_an_error_naming_both_sides() {
    let result = Launcher::local(2).check(true).run(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let x = ShardTensor::distribute(values(&world), &mesh, &[Shard(0)])?;
        if world.is_root() {
            let _ = sum(x).resolve();
        } else {
            x.redistribute(&[Replicate]);
        }
        Ok(())
    });
    let error = result.unwrap_err().to_string();
    assert!(
        error.contains("ranks diverged")
            && error.contains("resolve on")
            && error.contains("redistribute on"),
        "{error}"
    );
}

#[test]
fn modules_are_equal_on_all_ranks_and_a_difference_is_named() {
    use burn::nn::LinearConfig;
    let make = |seed: u64| {
        let made = Launcher::local(3).seed(seed).collect(|world| {
            let linear = world.init(|device| LinearConfig::new(4, 3).init(device))?;
            world.check_replicas(&linear)?;
            Ok(linear.weight.val().inner().into_data())
        });
        made.unwrap()
    };
    let weights = make(3);
    assert_eq!(weights[0], weights[2]);
    assert_eq!(weights, make(3), "the same seed gives the same module");
    assert_ne!(weights, make(4));

    Launcher::local(1)
        .run(|world| {
            let make = || world.init(|device| LinearConfig::new(4, 3).init(device));
            let [first, second] = [make()?, make()?].map(|linear| linear.weight.val().into_data());
            assert_ne!(first, second, "modules of one shape differ from each other");
            Ok(())
        })
        .unwrap();

    let result = Launcher::local(2).run(|world| {
        let linear = world.init(|device| LinearConfig::new(4, 3).init(device))?;
        let mut other = linear.clone();
        if !world.is_root() {
            other.bias = other.bias.map(|bias| bias.map(|bias| bias + 1.0));
        }
        world.check_replicas(&other)
    });
    let error = result.unwrap_err().to_string();
    assert!(
        error.contains("parameter bias differs between rank 0 and rank 1"),
        "{error}"
    );
}

#[test]
fn parameters_keep_their_number_type() {
    use burn::module::Param;
    Launcher::local(2)
        .run(|world| {
            let of = |device: &Device| Tensor::<1>::ones([3], (device, DType::F64)) / 3.0;
            let made = world.init(|device| Param::from_tensor(of(device)))?;
            assert_eq!(made.val().dtype(), DType::F64);
            world.check_replicas(&made)?;
            let error = world.sync_module(made, 9).unwrap_err().to_string();
            assert!(error.contains("source 9"), "{error}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn buffers_of_integers_and_booleans_are_sent_and_compared() {
    use burn::module::{Param, ParamId};
    use burn::tensor::{Bool, Int};
    Launcher::local(3)
        .run(|world| {
            let rank = world.rank();
            let module = |count: i32, masked: bool| {
                let counts = Tensor::<1, Int>::from_ints([count, 7], world.device());
                let mask = Tensor::<1, Bool>::from_data([masked, true], world.device());
                (
                    Param::initialized(ParamId::new(), counts),
                    Param::initialized(ParamId::new(), mask),
                )
            };
            for (count, masked, path) in
                [([0, 2, 0], [true; 3], 0), ([0; 3], [true, false, true], 1)]
            {
                let error = world.check_replicas(&module(count[rank], masked[rank]));
                let error = error.unwrap_err();
                let expected = format!("parameter {path} differs between rank 0 and rank 1");
                assert!(error.to_string().contains(&expected), "{error}");
            }
            let made = world.sync_module(module(rank as i32, rank == 1), 1)?;
            world.check_replicas(&made)?;
            let (counts, mask) = (made.0.val().into_data(), made.1.val().into_data());
            assert_eq!(counts.iter::<i32>().collect::<Vec<_>>(), [1, 7]);
            assert_eq!(mask.iter::<bool>().collect::<Vec<_>>(), [true, true]);
            Ok(())
        })
        .unwrap();
}

/// Pieces of the two sums have the same size, and one rank's second piece arrives where the other
/// collects.
#[test]
fn sums_of_different_sizes_diverge() {
    for check in [false, true] {
        let result = Launcher::local(2).check(check).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let elements = if world.is_root() { 400_000 } else { 200_000 };
            let ones = Tensor::<1>::ones([elements], world.device());
            let operation = Operation::new("sum", Traffic::Reduce, None);
            all_reduce(ones, &mesh, &[0], ReduceOp::Sum, operation);
            Ok(())
        });
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("diverged") && error.contains("of 400000 F32"),
            "{error}"
        );
    }
}

#[test]
fn a_rank_has_one_position_in_a_mesh() {
    let error = MeshShape::new(&[("x", 2)], vec![0, 0]).unwrap_err();
    assert!(error.to_string().contains("rank 0 is twice"), "{error}");
    Launcher::local(2)
        .run(|world| {
            let shape = MeshShape::new(&[("x", 3)], vec![0, 1, 7])?;
            let mesh = DeviceMesh::new(shape, world.comm().clone(), world.device().clone());
            let error = mesh.unwrap_err().to_string();
            assert!(error.contains("rank 7"), "{error}");
            let error = world.broadcast_bytes(9, None).unwrap_err().to_string();
            assert!(error.contains("source 9"), "{error}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_module_cloned_into_all_ranks_gets_leaves_of_its_own() {
    use burn::nn::LinearConfig;
    // Ranks that share leaves would deadlock on the lock of their common graph.
    let device = Device::default().autodiff();
    let shared = LinearConfig::new(5, 2).init(&device);
    Launcher::local(2)
        .run(|world| {
            let linear = world.sync_module(shared.clone(), 0)?;
            let mesh = world.mesh([("rows", 2)])?;
            let x = ShardTensor::distribute(values(&world), &mesh, &[Shard(0)])?;
            let weight = x.replicate_operand(linear.weight.val());
            let product = x.clone().into_local().matmul(halocline_core::ops::fan_out(
                weight.into_local(),
                &mesh,
                &[0],
                "test",
            ));
            let gradients = product.sum().backward();
            assert!(linear.weight.val().grad(&gradients).is_some());
            Ok(())
        })
        .unwrap();
}
