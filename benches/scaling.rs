//! Writes `docs/scaling.md`: a cost model of a training step, with constants measured by the other
//! benches.
//!
//! Run `make docs-scaling` after `make bench-conv bench-engines`; it reads their tables in
//! `target/bench`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

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

/// Reads a table written by another bench.
fn table(name: &str) -> Result<String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench");
    let file = folder.join(name);
    std::fs::read_to_string(&file).map_err(|error| {
        format!(
            "{}: {error}; run make bench-conv bench-engines",
            file.display()
        )
        .into()
    })
}

/// Mean rate of the convolutions of `conv.csv` with gradients, on all threads of the machine.
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

/// Seconds by (measurement, implementation), in order of bytes.
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

/// Link on which an exchange of `bytes` with a neighbour takes `latency + bytes / bandwidth`.
#[derive(Clone, Copy)]
struct Link {
    /// Latency in seconds.
    latency: f64,
    /// Bandwidth in bytes per second, in each direction.
    bandwidth: f64,
}

impl Link {
    fn exchange(self, messages: f64, bytes: f64) -> f64 {
        messages * self.latency + bytes / self.bandwidth
    }

    /// Seconds of the sum in `core/src/comm/all_reduce.rs`: each rank of a row adds one share
    /// received from all others in the row, columns add the sums of rows, and then shares are sent
    /// to all others in the row.
    fn all_reduce(self, ranks: f64, bytes: f64) -> f64 {
        if ranks == 1.0 {
            return 0.0;
        }
        // Exact for square numbers of ranks, which this page is about.
        let row = if ranks > 16.0 { ranks.sqrt() } else { ranks };
        let within = 2.0 * self.exchange(row - 1.0, bytes * (row - 1.0) / row);
        within + self.all_reduce(ranks / row, bytes / row)
    }
}

/// Network of `layers` convolutions, 3 × 3 at full resolution, trained in `f32`.
struct Network {
    layers: f64,
    channels: f64,
    rows: f64,
    columns: f64,
}

/// Seconds of one step.
struct Step {
    compute: f64,
    halos: f64,
    gradients: f64,
    /// Bytes of activations on a rank.
    memory: f64,
}

impl Network {
    const BYTES: f64 = 4.0;

    /// Estimates a step on a mesh, with ranks that compute `rate` operations per second.
    fn step(&self, mesh: [f64; 2], rate: f64, link: Link) -> Step {
        let (rows, columns) = (self.rows / mesh[0], self.columns / mesh[1]);
        let weights = 9.0 * self.channels * self.channels;
        // Forward pass, input gradient, weight gradient.
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
            // Inputs of each convolution, and of the activation after it.
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
         `make docs-scaling` writes this page (`benches/scaling.rs`) from the figures that `make bench-conv` and\n\
         `make bench-engines` measured on one machine with two cores. From a few constants the model predicts what\n\
         to expect on other machines, and where the library will have to change. Nothing on this page for more than\n\
         two ranks was measured.\n\n\
         ## The model\n\n\
         - An exchange with a neighbour takes `latency + bytes / bandwidth`. A rank's messages follow one another.\n\
         - A convolution takes its multiply-adds divided by a rate. A step has three passes of it: forward, gradient\n\
         \x20 of the input, gradient of the weights. The rest of a step is left out.\n\
         - A halo of one cell travels before every convolution, forward and backward, to up to eight neighbours. The\n\
         \x20 model does not subtract the part that computation hides.\n\
         - Gradients are summed as in `core/src/comm/all_reduce.rs`: every rank sends each other rank that rank's\n\
         \x20 share, adds the shares that it receives, and sends the sum to all. That takes `2 (ranks − 1)` messages\n\
         \x20 and `2 · bytes · (ranks − 1) / ranks` bytes. (Shares of more than 2¹⁷ elements travel in pieces, whose\n\
         \x20 latencies are not counted.) More than 16 ranks do so in rows; between the two halves, columns sum the\n\
         \x20 shares in the same way.\n\
         - A rank stores the inputs of convolutions and of activations in `f32`.\n\n\
         ## Measured constants\n\n\
         | engine | latency, µs (4 KiB) | bandwidth, GB/s each way (64 MiB) |\n|---|---|---|\n",
    );
    for (name, link) in links {
        let bandwidth = link.bandwidth / 1e9;
        match name {
            // Only a handle is passed, whatever the size.
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
        // Below 2¹⁴ elements, each rank sends everything it has.
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
        "\nA training step of the demo's model on 128 × 256 cells, on the same two cores: {one:.1} ms on one rank, {local:.1} on\n\
         two local ranks, {processes:.1} on two MPI processes. The model predicts {one:.1} for all three, because the cores are\n\
         the same and messages take little time. It does not describe how well ranks and threads use the same cores.\n\n\
         ## A 0.1° global grid\n\n\
         1800 × 3600 cells, 20 convolutions of 3 × 3 with 64 channels, one sample, `f32`. The nodes are like the machine\n\
         above (two cores), or a hundred times as fast, which is about a GPU. The network is assumed to have a latency\n\
         of 5 µs and 10 GB/s for each rank.\n\n\
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
        "\nConclusions:\n\n\
         - **Memory is the reason to shard.** The activations of one sample do not fit one device; on 64 ranks they do.\n\
         - **Halos** cost little where ranks are slow or shards are large. Fast ranks with shards of 28 × 56 cells wait\n\
         \x20 for halos longer than they compute, mostly for latency. Computing the interior meanwhile hides that as long\n\
         \x20 as there is one.\n\
         - **The sum of gradients** takes a number of messages that grows with the square root of the number of ranks,\n\
         \x20 which keeps it below the halos. (If every rank sent to every other, 4096 ranks would take 41 ms.) Both are\n\
         \x20 mostly latency.\n",
    );
    Ok(page)
}
