//! Where the elements of cells lie: in a field, or in pieces of one.

use std::marker::PhantomData;

use crate::kernel::memory::Shared;

/// `[batch, cells, heads, pitch]` elements, of which a kernel uses some of each head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a, E> {
    first: *mut E,
    cells: usize,
    heads: usize,
    pitch: usize,
    elements: PhantomData<&'a [E]>,
}

// SAFETY: a piece is a borrow of a slice, or of elements of which every task writes its own.
unsafe impl<E: Send + Sync> Send for Piece<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Send + Sync> Sync for Piece<'_, E> {}

impl<'a, E> Piece<'a, E> {
    /// Elements to read, from `skip` on in each head.
    pub(crate) fn reading(
        elements: &'a [E],
        [cells, heads, pitch]: [usize; 3],
        skip: usize,
    ) -> Self {
        Self {
            first: elements.as_ptr().cast_mut().wrapping_add(skip),
            cells,
            heads,
            pitch,
            elements: PhantomData,
        }
    }

    /// Elements to write, from `skip` on in each head.
    ///
    /// # Safety
    /// The elements must outlive this, and every task must write other heads of other cells.
    pub(crate) unsafe fn writing(
        elements: Shared<E>,
        [cells, heads, pitch]: [usize; 3],
        skip: usize,
    ) -> Self {
        Self {
            // SAFETY: the first element's address, which is not read here.
            first: unsafe { elements.at(0) }.wrapping_add(skip),
            cells,
            heads,
            pitch,
            elements: PhantomData,
        }
    }
}

/// Where the elements of the cells of a box lie.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a, E> {
    shape: [usize; 3],
    pieces: Vec<Piece<'a, E>>,
    /// The piece of every cell, and the cell's number in it; none where there is one piece, with all cells.
    places: Option<&'a Places>,
}

/// For every cell of a box the piece that it lies in, and its number there.
pub(crate) type Places = [[u32; 2]];

impl<'a, E> Rows<'a, E> {
    /// A box of cells that lies in one piece.
    pub(crate) fn whole(shape: [usize; 3], piece: Piece<'a, E>) -> Self {
        Self {
            shape,
            pieces: vec![piece],
            places: None,
        }
    }

    /// A box of cells in pieces.
    pub(crate) fn scattered(
        shape: [usize; 3],
        pieces: Vec<Piece<'a, E>>,
        places: &'a Places,
    ) -> Self {
        Self {
            shape,
            pieces,
            places: Some(places),
        }
    }

    /// The first element of a head of a cell.
    pub(crate) fn at(&self, batch: usize, head: usize, cell: [usize; 3]) -> *mut E {
        let cell = (cell[0] * self.shape[1] + cell[1]) * self.shape[2] + cell[2];
        let [piece, row] = match self.places {
            None => [0, cell],
            Some(places) => places[cell].map(|place| place as usize),
        };
        let piece = &self.pieces[piece];
        debug_assert!(row < piece.cells && head < piece.heads);
        let offset = ((batch * piece.cells + row) * piece.heads + head) * piece.pitch;
        piece.first.wrapping_add(offset)
    }
}
