//! Element types of burn and safetensors, and their names in files.

use burn::tensor::{BoolStore, DType};
use safetensors::Dtype;

/// Types that both libraries support.
const TYPES: [(DType, Dtype, &str); 13] = [
    (DType::F64, Dtype::F64, "F64"),
    (DType::F32, Dtype::F32, "F32"),
    (DType::F16, Dtype::F16, "F16"),
    (DType::BF16, Dtype::BF16, "BF16"),
    (DType::I64, Dtype::I64, "I64"),
    (DType::I32, Dtype::I32, "I32"),
    (DType::I16, Dtype::I16, "I16"),
    (DType::I8, Dtype::I8, "I8"),
    (DType::U64, Dtype::U64, "U64"),
    (DType::U32, Dtype::U32, "U32"),
    (DType::U16, Dtype::U16, "U16"),
    (DType::U8, Dtype::U8, "U8"),
    (DType::Bool(BoolStore::Native), Dtype::BOOL, "BOOL"),
];

/// Returns the name of a burn type in files, or `None` if files have no such type.
pub(crate) fn name(dtype: DType) -> Option<&'static str> {
    TYPES
        .iter()
        .find(|(burn, ..)| *burn == dtype)
        .map(|(.., name)| *name)
}

/// Returns the burn type with this name in files.
pub(crate) fn named(name: &str) -> Option<DType> {
    TYPES
        .iter()
        .find(|(.., known)| *known == name)
        .map(|(burn, ..)| *burn)
}

/// Returns the safetensors type with this name in files.
pub(crate) fn in_files(name: &str) -> Option<Dtype> {
    TYPES
        .iter()
        .find(|(.., known)| *known == name)
        .map(|(_, dtype, _)| *dtype)
}

/// Returns the name of a safetensors type in files.
pub(crate) fn name_in_files(dtype: Dtype) -> Option<&'static str> {
    TYPES
        .iter()
        .find(|(_, known, _)| *known == dtype)
        .map(|(.., name)| *name)
}

/// Returns the size in bytes of an element of the type with this name in files.
pub(crate) fn size(name: &str) -> Option<usize> {
    named(name).map(|dtype| dtype.size())
}
