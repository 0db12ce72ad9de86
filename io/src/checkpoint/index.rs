//! Index of a checkpoint, `index.json`: its values, tensors and files. It is written last.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::DType;
use halocline_core::IndexBox;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::direction::Direction;
use super::dtype;

/// File name of the index in the folder of a checkpoint.
pub(crate) const NAME: &str = "index.json";

const FORMAT: &str = "halocline checkpoint 1";

/// Beginning of the index, up to its checksum, which covers the bytes after the comma that follows.
const HEAD: &str = "{\"crc32\":\"";
const HEAD_LENGTH: usize = HEAD.len() + 8 + "\",".len();

/// Contents of `index.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Index {
    pub format: String,
    pub step: u64,
    /// Number of ranks that wrote the checkpoint.
    pub ranks: usize,
    pub metric: Option<f64>,
    /// Absent in older indices.
    #[serde(default, skip_serializing_if = "Direction::is_lowest")]
    pub direction: Direction,
    /// First tensor of the state with a value that is not finite; absent in older indices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_finite: Option<String>,
    pub values: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, TensorEntry>,
    /// Sizes of the files in bytes, by name.
    pub files: BTreeMap<String, u64>,
}

/// Tensor, and the pieces that make it up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TensorEntry {
    /// Element type by its safetensors name, such as `F32`.
    pub dtype: String,
    pub shape: Vec<usize>,
    pub pieces: Vec<PieceEntry>,
}

/// Box of a tensor, stored densely in row-major order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PieceEntry {
    pub file: String,
    /// Name of the piece in the file.
    pub key: String,
    pub start: Vec<usize>,
    pub shape: Vec<usize>,
    /// Byte range in the file.
    pub bytes: Range<u64>,
    /// Checksum of these bytes; files of other programs have none.
    pub crc32: Option<u32>,
}

impl TensorEntry {
    /// Returns the element type. The index must have been checked.
    pub(crate) fn element_type(&self) -> DType {
        dtype::named(&self.dtype).expect("the index was checked")
    }
}

impl PieceEntry {
    pub(crate) fn cells(&self) -> IndexBox {
        let ranges = self.start.iter().zip(&self.shape);
        IndexBox::new(ranges.map(|(&start, size)| start..start + size).collect())
    }

    pub(crate) fn len(&self) -> usize {
        (self.bytes.end - self.bytes.start) as usize
    }
}

/// Returns the name of the file that a rank writes.
pub(crate) fn file_of(rank: usize) -> String {
    format!("rank_{rank:05}.safetensors")
}

/// Whether a name is a valid name of a rank's file. No other file is ever opened.
fn is_file(name: &str) -> bool {
    let number = name
        .strip_prefix("rank_")
        .and_then(|name| name.strip_suffix(".safetensors"));
    number.is_some_and(|number| {
        (5..=9).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

impl Index {
    pub(crate) fn new(step: u64, ranks: usize) -> Self {
        Self {
            format: FORMAT.into(),
            step,
            ranks,
            metric: None,
            direction: Direction::default(),
            not_finite: None,
            values: BTreeMap::new(),
            tensors: BTreeMap::new(),
            files: BTreeMap::new(),
        }
    }

    /// Returns the text of `index.json`.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let body = serde_json::to_vec(self).expect("maps with names as keys are JSON");
        let rest = &body[1..];
        let mut text = format!("{HEAD}{:08x}\",", crc32fast::hash(rest)).into_bytes();
        text.extend(rest);
        text
    }

    /// Parses a text written by [`encode`](Self::encode). The error is the bare cause, without a
    /// path.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, String> {
        let head = text.get(..HEAD_LENGTH).unwrap_or(text);
        let sum = head
            .strip_prefix(HEAD.as_bytes())
            .and_then(|sum| std::str::from_utf8(sum.get(..8)?).ok())
            .and_then(|sum| u32::from_str_radix(sum, 16).ok());
        let Some(sum) = sum else {
            return Err(format!("it does not begin with {HEAD}…; not an index"));
        };
        if crc32fast::hash(&text[head.len()..]) != sum {
            return Err("its checksum is wrong: it is damaged or was edited".into());
        }
        let index: Self = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        index.check()?;
        Ok(index)
    }

    /// Checks that pieces lie within their tensors and files, do not share bytes, and together have
    /// as many cells as their tensor. Reading then takes no more memory than the sizes of the
    /// files.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("format {:?}, expected {FORMAT:?}", self.format));
        }
        if let Some(name) = self.files.keys().find(|name| !is_file(name)) {
            return Err(format!("{name:?} is not the name of a rank's file"));
        }
        self.check_pieces()
    }

    /// Part of [`check`](Self::check) that applies to files of other programs too.
    pub(crate) fn check_pieces(&self) -> Result<(), String> {
        let mut ranges: BTreeMap<&str, Vec<Range<u64>>> = BTreeMap::new();
        for (name, tensor) in &self.tensors {
            let fail = |cause: &str| Err(format!("tensor {name:?}: {cause}"));
            let Some(element) = dtype::size(&tensor.dtype) else {
                return fail(&format!("dtype {:?} is not known", tensor.dtype));
            };
            let Some(cells) =
                volume(&tensor.shape).filter(|cells| cells.checked_mul(element).is_some())
            else {
                return fail("its shape is too large");
            };
            let mut covered = 0_u128;
            for piece in &tensor.pieces {
                let ends = piece
                    .start
                    .iter()
                    .zip(&piece.shape)
                    .map(|(start, size)| start.checked_add(*size));
                let inside = piece.start.len() == tensor.shape.len()
                    && piece.shape.len() == tensor.shape.len()
                    && ends
                        .zip(&tensor.shape)
                        .all(|(end, size)| end.is_some_and(|end| end <= *size));
                let bytes = volume(&piece.shape).and_then(|cells| cells.checked_mul(element));
                let (Some(bytes), true) = (bytes, inside) else {
                    return fail("a piece lies outside of it");
                };
                let length = piece.bytes.end.checked_sub(piece.bytes.start);
                let file = self.files.get(&piece.file);
                if length != Some(bytes as u64) || file.is_none_or(|&size| piece.bytes.end > size) {
                    return fail("the bytes of a piece are not those of its shape and file");
                }
                covered += (bytes / element) as u128;
                ranges
                    .entry(&piece.file)
                    .or_default()
                    .push(piece.bytes.clone());
            }
            if covered != cells as u128 {
                return fail(&format!("{covered} of {cells} cells are there"));
            }
        }
        for (file, mut ranges) in ranges {
            ranges.sort_by_key(|range| (range.start, range.end));
            if ranges.windows(2).any(|pair| pair[1].start < pair[0].end) {
                return Err(format!("pieces share bytes of {file:?}"));
            }
        }
        Ok(())
    }
}

/// Returns the number of cells, or `None` if it or a stride of the shape overflows.
fn volume(shape: &[usize]) -> Option<usize> {
    let volume = shape
        .iter()
        .try_fold(1_usize, |volume, &size| volume.checked_mul(size.max(1)))?;
    Some(if shape.contains(&0) { 0 } else { volume })
}
