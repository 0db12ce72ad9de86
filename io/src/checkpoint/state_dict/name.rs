//! Names of tensors in a file, and the views of them that parameters have.

use burn::tensor::DType;

use super::source::Stored;

/// Location of a parameter's values in a [`StateDict`](super::StateDict): a tensor, one of several
/// equal parts of it along its first dim, such as the queries of a fused projection, or several
/// tensors that are concatenated. Dims may be permuted and added.
///
/// # Example
/// ```
/// use halocline_io::StateName;
///
/// // Both corners of a spectral convolution of the original Fourier neural operator, each
/// // [in, out, rows, columns, 2], with real and imaginary parts last.
/// let corners = ["conv0.weights1", "conv0.weights2"];
/// let _weight = StateName::cat(corners, 2);
/// // [1, in, out, degrees, 2] of torch-harmonics as [in, out, degrees, 1, 2] of `SpectralConvS2`.
/// let _weight = StateName::from("conv.weight").permute(&[1, 2, 3, 0, 4]);
/// // [out, in] of a linear layer as [out, in, 1, 1] of a pointwise convolution.
/// let _weight = StateName::from("fc0.weight").unsqueeze_dim(2).unsqueeze_dim(3);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateName {
    pub(super) names: Vec<String>,
    /// Dim along which several tensors are concatenated.
    pub(super) dim: usize,
    part: usize,
    parts: usize,
    views: Vec<View>,
}

/// Change of the dims of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
enum View {
    Permute(Vec<usize>),
    Unsqueeze(usize),
}

impl StateName {
    /// Selects part number `part` of `parts` equal parts along the first dim of a tensor:
    /// `("attn.in_proj_weight", 1, 3)` selects the weights of the keys in PyTorch's
    /// `MultiheadAttention`.
    ///
    /// # Panics
    /// Panics unless `part` is less than `parts`.
    pub fn part(name: impl Into<String>, part: usize, parts: usize) -> Self {
        assert!(part < parts, "StateName::part: part {part} of {parts}");
        Self {
            names: vec![name.into()],
            dim: 0,
            part,
            parts,
            views: Vec::new(),
        }
    }

    /// Concatenates tensors along a dim, like `torch.cat`.
    ///
    /// # Panics
    /// Panics without a name.
    pub fn cat(names: impl IntoIterator<Item = impl Into<String>>, dim: usize) -> Self {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        assert!(!names.is_empty(), "StateName::cat: expected a name");
        let (part, parts, views) = (0, 1, Vec::new());
        Self {
            names,
            dim,
            part,
            parts,
            views,
        }
    }

    /// Permutes the dims, like `torch.permute`: dim `i` of the result is dim `axes[i]`. Weights of
    /// linear layers are transposed afterwards.
    ///
    /// # Panics
    /// Panics unless each dim occurs once.
    #[must_use]
    pub fn permute(mut self, axes: &[usize]) -> Self {
        assert!(
            (0..axes.len()).all(|axis| axes.contains(&axis)),
            "StateName::permute: {axes:?}; expected each dim from 0 on once"
        );
        self.views.push(View::Permute(axes.to_vec()));
        self
    }

    /// Inserts a dim of size one, like `torch.unsqueeze`.
    #[must_use]
    pub fn unsqueeze_dim(mut self, dim: usize) -> Self {
        self.views.push(View::Unsqueeze(dim));
        self
    }

    /// Returns the shape of the tensor, or of the concatenation of several, and its type.
    pub(super) fn whole(&self, sources: &[&Stored]) -> Result<(Vec<usize>, DType), String> {
        let (mut shape, dtype) = (sources[0].shape.clone(), sources[0].dtype);
        for (name, source) in self.names.iter().zip(sources).skip(1) {
            let others = |shape: &[usize]| {
                let mut others = shape.to_vec();
                *others.get_mut(self.dim)? = 0;
                Some(others)
            };
            let is_alike = others(&shape).is_some() && others(&shape) == others(&source.shape);
            if !is_alike || source.dtype != dtype {
                return Err(format!(
                    "tensor {name:?} is {:?} of {:?}, expected {shape:?} except in dim {}, of {dtype:?}, as {:?}, with \
                     which it is concatenated",
                    source.shape, source.dtype, self.dim, self.names[0]
                ));
            }
            shape[self.dim] += source.shape[self.dim];
        }
        Ok((shape, dtype))
    }

    /// Returns the view of a tensor of this shape.
    pub(super) fn view(&self, mut shape: Vec<usize>) -> Result<Strided, String> {
        let mut strides = vec![1; shape.len()];
        for dim in (1..shape.len()).rev() {
            strides[dim - 1] = strides[dim] * shape[dim];
        }
        let mut first = 0;
        if self.parts > 1 && shape.first().is_some_and(|rows| rows % self.parts == 0) {
            shape[0] /= self.parts;
            first = self.part * shape[0] * strides[0];
        }
        for view in &self.views {
            match view {
                View::Permute(axes) if axes.len() == shape.len() => {
                    shape = axes.iter().map(|axis| shape[*axis]).collect();
                    strides = axes.iter().map(|axis| strides[*axis]).collect();
                }
                View::Unsqueeze(dim) if *dim <= shape.len() => {
                    shape.insert(*dim, 1);
                    strides.insert(*dim, 1);
                }
                wrong => {
                    let name = self.names.join(", ");
                    return Err(format!(
                        "tensor {name:?} is {shape:?}, which {wrong:?} does not fit"
                    ));
                }
            }
        }
        Ok(Strided {
            shape,
            strides,
            first,
        })
    }
}

impl<S: Into<String>> From<S> for StateName {
    fn from(name: S) -> Self {
        Self::part(name, 0, 1)
    }
}

/// View of a tensor.
pub(super) struct Strided {
    pub(super) shape: Vec<usize>,
    /// Strides in the tensor along each dim, in elements.
    pub(super) strides: Vec<usize>,
    pub(super) first: usize,
}

/// Concatenates the bytes of tensors whose shapes have `rows` cells before the dim of the
/// concatenation.
pub(super) fn concatenated(tensors: &[Vec<u8>], rows: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(tensors.iter().map(Vec::len).sum());
    for row in 0..rows {
        for tensor in tensors {
            let length = tensor.len() / rows;
            bytes.extend_from_slice(&tensor[row * length..][..length]);
        }
    }
    bytes
}
