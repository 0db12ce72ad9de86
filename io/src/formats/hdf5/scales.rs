//! Dimension scales, which link the dims of a dataset to the datasets of their coordinates.
//!
//! Dimension scales are attributes (HDF5 Dimension Scale Specification, version 1): a scale has
//! `CLASS` and `NAME`, the dataset refers to its scales in `DIMENSION_LIST`, and each scale refers
//! back to the dataset in `REFERENCE_LIST`. The bindings lack HDF5's functions for them
//! (`H5DSset_scale`, `H5DSattach_scale`), so they are written here.

use std::collections::BTreeMap;
use std::ffi::c_int;

use hdf5_metno::types::{FixedAscii, VarLenArray};
use hdf5_metno::{Dataset, Datatype, Error, File, H5Type, ObjectReference1, Result};

/// Value of `CLASS`. Together with its terminating zero it fills [`TEXT`] bytes; readers check
/// both.
const CLASS: &str = "DIMENSION_SCALE";
const TEXT: usize = 16;

const H5T_STR_NULLTERM: c_int = 0;

unsafe extern "C" {
    /// Function of libhdf5, which the bindings link. The specification requires zero-terminated
    /// strings, which the bindings never write.
    fn H5Tset_strpad(datatype: i64, padding: c_int) -> c_int;
}

/// Entry of `REFERENCE_LIST`: a dataset, and the dim that the scale belongs to.
#[derive(H5Type, Clone, Copy)]
#[repr(C)]
struct BackReference {
    dataset: ObjectReference1,
    dimension: i32,
}

/// Attaches dimension scales to datasets. Each dataset is given with the names of its scales, in the
/// order of its dims.
pub(crate) fn attach(file: &File, datasets: &[(&str, &[&str])]) -> Result<()> {
    let mut references: BTreeMap<&str, Vec<BackReference>> = BTreeMap::new();
    for &(name, scales) in datasets {
        let mut list: Vec<VarLenArray<ObjectReference1>> = Vec::with_capacity(scales.len());
        for (dim, &scale) in scales.iter().enumerate() {
            let back = BackReference {
                dataset: file.reference(name)?,
                dimension: dim as i32,
            };
            references.entry(scale).or_default().push(back);
            list.push(VarLenArray::from_slice(&[file.reference(scale)?]));
        }
        let dataset = file.dataset(name)?;
        dataset
            .new_attr_builder()
            .with_data(&list)
            .create("DIMENSION_LIST")?;
    }
    for (name, references) in &references {
        let scale = file.dataset(name)?;
        write_text(&scale, "CLASS", CLASS)?;
        write_text(&scale, "NAME", name)?;
        scale
            .new_attr_builder()
            .with_data(references)
            .create("REFERENCE_LIST")?;
    }
    Ok(())
}

/// Writes a text attribute that describes the values of a dataset, such as `units`.
///
/// The text has a fixed length, as in netCDF, so that HDF5's checksums cover it.
pub(crate) fn describe<const N: usize>(
    dataset: &Dataset,
    attribute: &str,
    text: &[u8; N],
) -> Result<()> {
    let text = FixedAscii::<N>::from_ascii(text).map_err(|e| Error::from(e.to_string()))?;
    dataset
        .new_attr::<FixedAscii<N>>()
        .create(attribute)?
        .write_scalar(&text)
}

/// Writes a zero-terminated ASCII attribute of [`TEXT`] bytes.
fn write_text(dataset: &Dataset, attribute: &str, text: &str) -> Result<()> {
    let value = FixedAscii::<TEXT>::from_ascii(text.as_bytes())
        .map_err(|e| Error::from(format!("{text}: {e}")))?;
    let datatype = Datatype::from_type::<FixedAscii<TEXT>>()?;
    // SAFETY: the id belongs to a datatype that this function owns and keeps alive; the lock of the
    // bindings is held, since HDF5 is not thread-safe.
    let status =
        hdf5_metno::sync::sync(|| unsafe { H5Tset_strpad(datatype.id(), H5T_STR_NULLTERM) });
    if status < 0 {
        return Err(Error::from("H5Tset_strpad failed"));
    }
    let builder = dataset.new_attr_builder().empty_as(&datatype);
    builder.shape(()).create(attribute)?.write_scalar(&value)
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        fn H5Tget_strpad(datatype: i64) -> c_int;
    }

    #[test]
    fn the_class_ends_in_a_zero_and_fills_its_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("scales.h5")).unwrap();
        file.new_dataset::<f32>().shape(3).create("field").unwrap();
        file.new_dataset::<f32>().shape(3).create("lat").unwrap();
        attach(&file, &[("field", &["lat"][..])]).unwrap();
        let class = file.dataset("lat").unwrap().attr("CLASS").unwrap();
        let datatype = class.dtype().unwrap();
        // SAFETY: the id belongs to a live datatype, and the lock of the bindings is held.
        let padding = hdf5_metno::sync::sync(|| unsafe { H5Tget_strpad(datatype.id()) });
        // HDF5 does not recognise a scale if either differs; 0 is its H5T_STR_NULLTERM.
        assert_eq!((padding, datatype.size()), (0, 16));
    }
}
