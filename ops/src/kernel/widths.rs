//! Parallel casts between `f32` and half precision, bit-identical to burn's.

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{DType, Shape};
use burn_std::{bf16, f16};
use halocline_core::memory::{contiguous, elements};
use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::buffer::Buffer;
use super::lanes::CHUNK;
use super::memory::Shared;
use super::simd::Isa;

/// Casts a tensor between `f32` and a half-precision type; `None` for other types.
pub(crate) fn cast(x: &FlexTensor, dtype: DType) -> Option<FlexTensor> {
    Some(match (x.dtype(), dtype) {
        (DType::F32, DType::BF16) => converted(x, dtype, narrowed),
        (DType::BF16, DType::F32) => converted(x, dtype, bf16::to_f32),
        (DType::F32, DType::F16) => converted(x, dtype, f16::from_f32),
        (DType::F16, DType::F32) => converted(x, dtype, f16::to_f32),
        _ => return None,
    })
}

/// [`bf16::from_f32`] without branches, so that the compiler vectorises it.
#[inline(always)]
pub(super) fn narrowed(x: f32) -> bf16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let not_a_number = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { not_a_number } else { nearest } as u16)
}

fn converted<A, B>(
    x: &FlexTensor,
    dtype: DType,
    convert: impl Fn(A) -> B + Copy + Send + Sync,
) -> FlexTensor
where
    A: burn::tensor::Element + bytemuck::Pod,
    B: Copy + Send,
{
    let x = contiguous(x.clone());
    let from = elements::<A>(&x);
    let len = from.len();
    let isa = Isa::chosen().unwrap_or_else(|error| panic!("{error}"));
    let fill = |to: Shared<B>| {
        tasks::for_each(len.div_ceil(CHUNK), 1, |index| {
            let range = index * CHUNK..len.min((index + 1) * CHUNK);
            let from = &from[range.clone()];
            // SAFETY: the range of this chunk, which no other task accesses.
            let to = unsafe { to.slice(range) };
            isa.run(Chunk { from, to, convert });
        });
    };
    // SAFETY: the chunks cover the result.
    let elements = unsafe { Buffer::filled(len, fill) };
    let layout = Layout::contiguous(Shape::from(x.layout().shape()[..].to_vec()));
    FlexTensor::new(elements.into_bytes(), layout, dtype)
}

struct Chunk<'a, A, B, F> {
    from: &'a [A],
    to: &'a mut [B],
    convert: F,
}

impl<A: Copy, B, F: Fn(A) -> B> WithSimd for Chunk<'_, A, B, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = (self.convert)(*from);
        }
    }
}
