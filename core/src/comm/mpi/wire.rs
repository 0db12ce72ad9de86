//! Tags of MPI messages, and the split of payloads into messages.
//!
//! A payload of tensors consists only of its bytes, because both sides know its size. Metadata
//! starts with its size, in one message with as many bytes as fit. The [`Tag`] identifies the
//! payload and its operation.

use std::ops::Range;

use crate::comm::Payload;
use crate::comm::wire::Outgoing;
use crate::memory::Block;

/// Number by which MPI distinguishes messages: the sequence number of the payload between two ranks
/// and, hashed to fewer bits, its operation's fingerprint and its size. All pieces of a payload
/// have the same tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(pub(super) u32);

impl Tag {
    /// The tag of a rank's last message.
    pub(super) const END: Self = Self(0);
}

/// Number of bits in each field of a tag; MPI guarantees at least 15 bits in total.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tags {
    number: u32,
    part: u32,
    fingerprint: u32,
}

/// Part of a payload that a message carries.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// All of it, with its number of bytes.
    Whole(usize),
    /// The first message of metadata.
    First,
    /// The metadata after the first message.
    Rest,
}

impl Tags {
    /// Divides `bits` bits between the fields; one bit distinguishes all tags from [`Tag::END`].
    pub(super) fn new(bits: u32) -> Self {
        let number = (bits / 3).min(10);
        let part = bits / 5;
        Self {
            number,
            part,
            fingerprint: bits - 1 - number - part,
        }
    }

    /// Returns the tag for the messages of the payload with this number between two ranks.
    ///
    /// Numbers repeat, but messages with the same tag keep their order.
    pub(super) fn tag(self, number: u32, fingerprint: u64, part: Part) -> Tag {
        // The high bits of a product with an odd number depend on all bits of the other factor.
        let high = |value: u64, bits: u32| {
            (value.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - bits)) as u32
        };
        let part = match part {
            Part::First => 0,
            Part::Rest => 1,
            Part::Whole(bytes) => 2 + high(bytes as u64, 31) % ((1 << self.part) - 2),
        };
        let fingerprint = high(fingerprint, self.fingerprint);
        let number = number & ((1 << self.number) - 1);
        let tag = (((1 << self.number) | number) << self.part) | part;
        Tag((tag << self.fingerprint) | fingerprint)
    }

    /// Whether a tag belongs to the rest of metadata.
    pub(super) fn is_rest(self, tag: Tag) -> bool {
        (tag.0 >> self.fingerprint) & ((1 << self.part) - 1) == 1
    }

    /// Whether both tags belong to the same payload, by number.
    pub(super) fn same_place(self, one: Tag, other: Tag) -> bool {
        one != Tag::END && (one.0 ^ other.0) >> (self.part + self.fingerprint) == 0
    }

    /// Whether two numbers have the same tag.
    pub(super) fn same_number(self, one: u32, other: u32) -> bool {
        one.wrapping_sub(other).is_multiple_of(1 << self.number)
    }

    /// Whether both tags belong to the same operation.
    pub(super) fn same_operation(self, one: Tag, other: Tag) -> bool {
        (one.0 ^ other.0) & ((1 << self.fingerprint) - 1) == 0
    }
}

/// Size of the first message of metadata, including the size field.
pub(super) const FIRST: usize = 256;
/// Number of bytes of the size field.
const SIZE: usize = size_of::<u64>();

/// Payload in the form in which it is sent.
pub(super) enum Packed {
    /// The bytes of tensors.
    Tensors(Outgoing),
    /// The size field with the first bytes, and the remaining bytes, if any.
    Metadata(Outgoing, Option<Outgoing>),
}

impl Packed {
    /// The size of the payload in bytes.
    pub(super) fn bytes(&self) -> usize {
        let size = |memory: &Outgoing| memory.bytes().len();
        match self {
            Self::Tensors(all) => size(all),
            Self::Metadata(first, rest) => size(first) - SIZE + rest.as_ref().map_or(0, size),
        }
    }
}

/// Converts a payload to the form in which it is sent.
pub(super) fn pack(payload: Payload) -> Packed {
    let Payload::Bytes(bytes) = payload else {
        return Packed::Tensors(Outgoing::of(payload));
    };
    let length = bytes.len();
    let mut first = Block::new(FIRST);
    let (size, room) = first.bytes_mut().split_at_mut(SIZE);
    size.copy_from_slice(&(length as u64).to_ne_bytes());
    let inside = length.min(room.len());
    room[..inside].copy_from_slice(&bytes[..inside]);
    let rest = (inside < length).then(|| Outgoing::Bytes(bytes, inside));
    Packed::Metadata(Outgoing::Block(first, SIZE + inside), rest)
}

/// Unpacks the first message of metadata. Returns a block for all of it, filled with the first
/// bytes, and the range of the remaining bytes.
pub(super) fn unpack_first(message: &Block) -> (Block, Range<usize>) {
    let (size, room) = message.bytes().split_at(SIZE);
    let size = size.first_chunk().expect("a message begins with a size");
    let length = u64::from_ne_bytes(*size) as usize;
    let inside = length.min(FIRST - SIZE);
    let mut block = Block::new(length);
    block.bytes_mut()[..inside].copy_from_slice(&room[..inside]);
    (block, inside..length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_tell_places_operations_and_sizes_apart() {
        for bits in [15, 20, 30] {
            let tags = Tags::new(bits);
            let tag = tags.tag(3, 77, Part::Whole(16));
            assert!(tag.0 < 1 << bits && tag != Tag::END && !tags.is_rest(tag));
            assert_eq!(tag, tags.tag(3, 77, Part::Whole(16)));
            let next = tags.tag(4, 77, Part::Whole(16));
            assert!(!tags.same_place(tag, next) && tags.same_operation(tag, next));
            let other = tags.tag(3, 78, Part::Whole(16));
            assert!(tags.same_place(tag, other) && !tags.same_operation(tag, other));
            let parts = [Part::Whole(24), Part::First, Part::Rest];
            let [longer, first, rest] = parts.map(|part| tags.tag(3, 77, part));
            for part in [longer, first, rest] {
                assert!(tag != part && tags.same_place(tag, part));
                assert!(tags.same_operation(tag, part));
            }
            assert!(tags.is_rest(rest) && !tags.is_rest(first));
            assert!(tags.same_number(3, 3 + (1 << 10)) && !tags.same_number(3, 4));
            assert!(!tags.same_place(Tag::END, tag));
        }
    }
}
