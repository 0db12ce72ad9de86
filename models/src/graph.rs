use burn::config::Config;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use halocline_ops::graph::{Aggregate, EdgeShards};
use halocline_ops::prelude::*;

/// Configuration of [`GraphConv`], which has an example.
#[derive(Config, Debug)]
pub struct GraphConvConfig {
    /// Input and output features.
    pub features: [usize; 2],
}

/// Graph convolution, `y = x · W + aggregate(neighbours) · V + b` (C. Morris et al., "Weisfeiler
/// and Leman go neural", 2019), on the cells of an unstructured grid or from one grid to another.
///
/// # Shapes
/// Sources `[.., cells, features_in]`, targets `[.., other cells, features_in]` →
/// `[.., other cells, features_out]`. Edges run along the second-to-last dim.
///
/// # Communication
/// Each source that has edges to another rank is sent there once.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::GraphConvConfig;
/// use halocline_ops::graph::{Aggregate, Graph};
///
/// # fn main() -> halocline_core::Result<()> {
/// let device = Device::default();
/// let conv = GraphConvConfig::new([3, 8]).init(&device);
/// let x = Tensor::<2>::ones([5, 3], &device);
/// let ring: Vec<[usize; 2]> = (0..5).map(|cell| [cell, (cell + 1) % 5]).collect();
/// let edges = Graph::new(5, 5, &ring)?.distribute(&x, 0)?;
/// let y = conv.forward(x.clone(), x, &edges, Aggregate::Mean);
/// assert_eq!(y.dims(), [5, 8]);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct GraphConv {
    own: Linear,
    neighbours: Linear,
}

impl GraphConvConfig {
    /// Initializes the layer.
    pub fn init(&self, device: &Device) -> GraphConv {
        let [inputs, outputs] = self.features;
        let linear = LinearConfig::new(inputs, outputs);
        GraphConv {
            neighbours: linear.clone().with_bias(false).init(device),
            own: linear.init(device),
        }
    }
}

impl GraphConv {
    /// Convolves sources over a graph. On the cells of a single grid, pass the same field as
    /// sources and targets.
    ///
    /// # Panics
    /// Panics if the cells do not match the graph, or the features do not match the layer.
    pub fn forward<const D: usize, X: Field<D>>(
        &self,
        sources: X,
        targets: X,
        edges: &EdgeShards,
        aggregate: Aggregate,
    ) -> X {
        let near = edges.reduce(edges.sources(sources), aggregate);
        targets.apply(&self.own) + near.apply(&self.neighbours)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Shard, ShardTensor};
    use halocline_ops::graph::Graph;
    use halocline_ops::testing::{compare, random};

    use super::*;

    /// Two layers, so that gradients of neighbours also cross ranks.
    #[test]
    fn layers_on_a_sharded_graph_have_the_gradients_of_one_device() {
        let run = |ranks: usize| {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("cells", ranks)])?;
                let first = world.init(|device| GraphConvConfig::new([3, 4]).init(device))?;
                let second = world.init(|device| GraphConvConfig::new([4, 2]).init(device))?;
                let edges: Vec<[usize; 2]> = (0..30).map(|i| [i * 7 % 11, i * i % 11]).collect();
                let x = random::<3>([2, 11, 3], "x", 0).inner();
                let x = ShardTensor::distribute(x, &mesh, &[Shard(1)])?.require_grad();
                let edges = Graph::new(11, 11, &edges)?.distribute(&x, 1)?;
                let mean = Aggregate::Mean;
                let hidden = first.forward(x.clone(), x.clone(), &edges, mean).tanh();
                let y = second.forward(hidden.clone(), hidden, &edges, mean);
                let gradients = (y.clone() * y.clone()).sum().backward();
                let of_x = x.grad(&gradients).expect("a gradient");
                let whole = |x: ShardTensor<3>| x.full_tensor().into_data();
                let mut found = vec![whole(y), whole(of_x)];
                for layer in [&first, &second] {
                    for weight in [&layer.own.weight, &layer.neighbours.weight] {
                        let gradient: Tensor<2> = weight.grad(&gradients).expect("a gradient");
                        found.push(gradient.into_data());
                    }
                }
                Ok(found)
            });
            found.unwrap()
        };
        let expected = run(1).remove(0);
        for found in run(3) {
            compare(&found, &expected, 1e-5, "three ranks");
        }
    }
}
