//! Writes `docs/scaling.md`: a cost model of a training step, with constants that the other benches measured.
//!
//! `make docs-scaling`, after `make bench-conv bench-engines`, whose tables in `target/bench` it reads.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let engines = Engines::read(&table("engines.csv")?)?;
    let flops = flops_per_second(&table("conv.csv")?)?;
    let page = page(&engines, flops)?;
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/scaling.md");
    std::fs::write(&file, page)?;
    println!("written to {}", file.display());
    Ok(())
}

/// A table that another bench wrote.
fn table(name: &str) -> Result<String> {
    let me = std::env::current_exe()?;
    let target = me.ancestors().find(|path| path.ends_with("release"));
    let target: PathBuf = target
        .and_then(Path::parent)
        .ok_or("no target folder")?
        .into();
    let file = target.join("bench").join(name);
    std::fs::read_to_string(&file).map_err(|error| {
        format!(
            "{}: {error}; run make bench-conv bench-engines",
            file.display()
        )
        .into()
    })
}

/// The mean of what the convolutions of `conv.csv` reach with gradients, on all threads of the machine.
fn flops_per_second(csv: &str) -> Result<f64> {
    let rows = csv
        .lines()
        .skip(1)
        .map(|line| line.rsplit(',').collect::<Vec<_>>());
    let ours =
        rows.filter(|row| row.get(2) == Some(&"halocline") && row.get(3) == Some(&"fwd+bwd"));
    let rates = ours
        .map(|row| row[0].parse::<f64>())
        .collect::<std::result::Result<Vec<_>, _>>()?;
    let logs: f64 = rates.iter().map(|rate| rate.ln()).sum();
    Ok((logs / rates.len() as f64).exp() * 1e9)
}

/// Seconds by (what, implementation), in order of bytes.
struct Engines(BTreeMap<(String, String), Vec<(f64, f64)>>);

impl Engines {
    fn read(csv: &str) -> Result<Self> {
        let mut times = BTreeMap::<_, Vec<(f64, f64)>>::new();
        for line in csv.lines().skip(1) {
            let fields: Vec<&str> = line.split(',').collect();
            let [what, bytes, by, micros] = fields[..] else {
                return Err(format!("{line}: expected four fields").into());
            };
            let key = (what.to_string(), by.to_string());
            let row = (bytes.parse()?, micros.parse::<f64>()? * 1e-6);
            times.entry(key).or_default().push(row);
        }
        times
            .values_mut()
            .for_each(|rows| rows.sort_by(|a, b| a.0.total_cmp(&b.0)));
        Ok(Self(times))
    }

    fn rows(&self, what: &str, by: &str) -> Result<&[(f64, f64)]> {
        let rows = self.0.get(&(what.to_string(), by.to_string()));
        rows.map(Vec::as_slice)
            .ok_or(format!("engines.csv has no {what} of {by}").into())
    }

    fn link(&self, by: &str) -> Result<Link> {
        let rows = self.rows("exchange", by)?;
        let (small, large) = (rows[0], rows[rows.len() - 1]);
        Ok(Link {
            latency: small.1,
            bandwidth: large.0 / (large.1 - small.1),
        })
    }
}

/// An exchange of so many bytes with a neighbour takes `latency + bytes / bandwidth`.
#[derive(Clone, Copy)]
struct Link {
    /// Seconds.
    latency: f64,
    /// Bytes a second, each way.
    bandwidth: f64,
}

impl Link {
    fn exchange(self, messages: f64, bytes: f64) -> f64 {
        messages * self.latency + bytes / self.bandwidth
    }

    /// The sum of `core/src/comm/all_reduce.rs`: every rank of a row adds a share that all others of it send, columns add
    /// the sums of rows, then shares go to all others of the row.
    fn all_reduce(self, ranks: f64, bytes: f64) -> f64 {
        if ranks == 1.0 {
            return 0.0;
        }
        // For the squares that this page is about.
        let row = if ranks > 16.0 { ranks.sqrt() } else { ranks };
        let within = 2.0 * self.exchange(row - 1.0, bytes * (row - 1.0) / row);
        within + self.all_reduce(ranks / row, bytes / row)
    }
}

/// A network of `layers` convolutions 3 × 3 at full resolution, trained in `f32`.
struct Network {
    layers: f64,
    channels: f64,
    rows: f64,
    columns: f64,
}

/// The seconds of one step.
struct Step {
    compute: f64,
    halos: f64,
    gradients: f64,
    /// Bytes of activations on a rank.
    memory: f64,
}

impl Network {
    const BYTES: f64 = 4.0;

    /// A step on a mesh, with ranks that compute so many operations a second.
    fn step(&self, mesh: [f64; 2], rate: f64, link: Link) -> Step {
        let (rows, columns) = (self.rows / mesh[0], self.columns / mesh[1]);
        let weights = 9.0 * self.channels * self.channels;
        // The forward pass, the gradient of the input, that of the weights.
        let operations = 3.0 * 2.0 * weights * rows * columns * self.layers;
        let neighbours = |ranks: f64| if ranks > 1.0 { 2.0 } else { 0.0 };
        let [north_south, east_west] = mesh.map(neighbours);
        let perimeter = north_south * columns + east_west * rows;
        let messages = north_south + east_west + north_south * east_west;
        let halo = link.exchange(messages, perimeter * self.channels * Self::BYTES);
        let ranks = mesh[0] * mesh[1];
        Step {
            compute: operations / rate,
            halos: 2.0 * self.layers * halo,
            gradients: link.all_reduce(ranks, weights * self.layers * Self::BYTES),
            // What goes into each convolution, and into the activation after it.
            memory: 2.0 * self.layers * rows * columns * self.channels * Self::BYTES,
        }
    }
}

fn page(engines: &Engines, flops: f64) -> Result<String> {
    let links = [
        ("local", engines.link("local")?),
        ("mpi", engines.link("mpi")?),
        ("tcp", engines.link("tcp")?),
    ];
    let mut page = String::from(
        "# Scaling: a cost model\n\n\
         Written by `benches/scaling.rs` (`make docs-scaling`) from what `make bench-conv` and `make bench-engines` measured\n\
         on one machine, which has two cores. It says what to expect elsewhere from a few constants, and where the library\n\
         will have to change. It is a model: nothing on this page for more than two ranks was measured.\n\n\
         ## The model\n\n\
         - An exchange with a neighbour takes `latency + bytes / bandwidth`. A rank's messages follow on each other.\n\
         - A convolution takes its multiply-adds divided by a rate. A step has three passes of it: forward, gradient of the\n\
           input, gradient of the weights. All else in a step is left out.\n\
         - A halo of one cell travels before every convolution, forward and backward, to up to eight neighbours. What is hidden\n\
           behind computation is not subtracted.\n\
         - Gradients are summed as `core/src/comm/all_reduce.rs` does: every rank sends each other one its share, adds what\n\
           came, and sends the sum to all: `2 (ranks − 1)` messages, `2 · bytes · (ranks − 1) / ranks` bytes. (Shares of more\n\
           than 2¹⁷ elements go in pieces, whose latencies are not counted.) More than 16 ranks do so in rows, and between\n\
           the two halves columns sum the shares in the same way.\n\
         - A rank holds the inputs of convolutions and of activations, `f32`.\n\n\
         ## Measured constants\n\n\
         | engine | latency, µs (4 KiB) | bandwidth, GB/s each way (64 MiB) |\n|---|---|---|\n",
    );
    for (name, link) in links {
        let bandwidth = link.bandwidth / 1e9;
        match name {
            // A handle changes hands, whatever the size.
            "local" => writeln!(
                page,
                "| local | {:.1} | no bytes move |",
                link.latency * 1e6
            )?,
            _ => writeln!(
                page,
                "| {name} | {:.1} | {bandwidth:.1} |",
                link.latency * 1e6
            )?,
        }
    }
    writeln!(
        page,
        "\nConvolutions with gradients: {:.0} GFLOP/s on two threads (geometric mean of ten).\n\n\
         ## Predicted and measured\n\n\
         A sum over two processes, predicted from the constants of an exchange:\n\n\
         | bytes | predicted, µs | measured, µs | measured / predicted |\n|---|---|---|---|",
        flops / 1e9
    )?;
    let mpi = links[1].1;
    for (bytes, measured) in engines.rows("all_reduce", "mpi")? {
        // Below 2¹⁴ elements each sends all it has.
        let predicted = if *bytes <= 65536.0 {
            mpi.exchange(1.0, *bytes)
        } else {
            mpi.all_reduce(2.0, *bytes)
        };
        let (predicted, measured) = (predicted * 1e6, measured * 1e6);
        writeln!(
            page,
            "| {bytes} | {predicted:.1} | {measured:.1} | {:.2} |",
            measured / predicted
        )?;
    }
    let step = |by| -> Result<f64> { Ok(engines.rows("step", by)?[0].1 * 1e3) };
    let (one, local, processes) = (step("one")?, step("local")?, step("mpi")?);
    writeln!(
        page,
        "\nA training step of the demo's model on 128 × 256 cells, on the same two cores: {one:.1} ms on one rank, {local:.1} on two\n\
         local ranks, {processes:.1} on two MPI processes. The model says {one:.1} for all three: the cores are the same, and\n\
         messages take little. How well ranks and threads use the same cores it does not know.\n\n\
         ## A 0.1° global grid\n\n\
         1800 × 3600 cells, 20 convolutions 3 × 3 of 64 channels, one sample, `f32`. Nodes like the machine above (two cores),\n\
         and nodes a hundred times as fast, about what a GPU is; a network with a latency of 5 µs and 10 GB/s for each rank,\n\
         which is assumed.\n\n\
         | ranks | shard | activations of a rank | computing, ms | halos, ms | gradients, ms | efficiency |\n|---|---|---|---|---|---|---|"
    )?;
    let network = Network {
        layers: 20.0,
        channels: 64.0,
        rows: 1800.0,
        columns: 3600.0,
    };
    let assumed = Link {
        latency: 5e-6,
        bandwidth: 10e9,
    };
    for (speed, what) in [(1.0, "two cores"), (100.0, "a hundred times that")] {
        for mesh in [[1.0, 1.0], [8.0, 8.0], [64.0, 64.0]] {
            let Step {
                compute,
                halos,
                gradients,
                memory,
            } = network.step(mesh, flops * speed, assumed);
            writeln!(
                page,
                "| {} × {what} | {:.0} × {:.0} | {:.2} GB | {:.1} | {:.2} | {:.2} | {:.2} |",
                mesh[0] * mesh[1],
                network.rows / mesh[0],
                network.columns / mesh[1],
                memory / 1e9,
                compute * 1e3,
                halos * 1e3,
                gradients * 1e3,
                compute / (compute + halos + gradients),
            )?;
        }
    }
    page.push_str(
        "\nWhat it says:\n\n\
         - **Memory is why to shard.** The activations of one sample do not fit one device; on 64 ranks they do.\n\
         - **Halos** cost little where ranks are slow or shards are large. Fast ranks wait for them, longer than they compute\n\
           when a shard has 28 × 56 cells: latency, mostly. Computing the interior meanwhile hides it as long as there is one.\n\
         - **The sum of gradients** takes messages by the root of the number of ranks, which keeps it below the halos. When\n\
           every rank sent to every other, 4096 of them took 41 ms. What is left is the order of halos: both are latency.\n",
    );
    Ok(page)
}
