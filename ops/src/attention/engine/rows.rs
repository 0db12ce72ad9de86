//! Memory of the elements of cells: in a field, or in pieces of one.

use std::marker::PhantomData;

use crate::kernel::memory::Shared;

/// Elements `[batch, cells, heads, pitch]`, of which a kernel uses some in each head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a, E> {
    first: *mut E,
    cells: usize,
    heads: usize,
    pitch: usize,
    elements: PhantomData<&'a [E]>,
}

// SAFETY: a piece borrows a slice, or elements of which every task writes its own.
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
    /// The elements must outlive the piece, and every task must write other heads of other cells.
    pub(crate) unsafe fn writing(
        elements: Shared<E>,
        [cells, heads, pitch]: [usize; 3],
        skip: usize,
    ) -> Self {
        Self {
            // SAFETY: only computes the address of the first element.
            first: unsafe { elements.at(0) }.wrapping_add(skip),
            cells,
            heads,
            pitch,
            elements: PhantomData,
        }
    }
}

impl<E> Piece<'_, E> {
    #[inline(always)]
    pub(crate) fn at(&self, batch: usize, head: usize, cell: usize) -> *mut E {
        debug_assert!(cell < self.cells && head < self.heads);
        let offset = ((batch * self.cells + cell) * self.heads + head) * self.pitch;
        self.first.wrapping_add(offset)
    }
}

/// Memory of the elements of the cells of a box.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a, E> {
    shape: [usize; 3],
    pieces: Vec<Piece<'a, E>>,
    /// Piece of every cell, and the cell's index in it; `None` if there is one piece with all
    /// cells.
    places: Option<&'a Places>,
}

/// For every cell of a box, its piece and its index there.
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

    /// First element of a head of a cell.
    #[inline(always)]
    pub(crate) fn at(&self, batch: usize, head: usize, cell: [usize; 3]) -> *mut E {
        let cell = (cell[0] * self.shape[1] + cell[1]) * self.shape[2] + cell[2];
        match self.places {
            None => self.pieces[0].at(batch, head, cell),
            Some(places) => {
                let [piece, cell] = places[cell].map(|place| place as usize);
                self.pieces[piece].at(batch, head, cell)
            }
        }
    }

    /// Distance between the heads of a cell, if it is the same in all pieces.
    pub(crate) fn pitch(&self) -> Option<usize> {
        let (first, rest) = self.pieces.split_first()?;
        let alike = rest.iter().all(|piece| piece.pitch == first.pitch);
        alike.then_some(first.pitch)
    }

    /// Distance between the heads of a cell, and between cells in every dim, if all are in one
    /// piece.
    pub(crate) fn distances(&self) -> Option<[usize; 4]> {
        let [_, rows, columns] = self.shape;
        let piece = self.places.is_none().then(|| &self.pieces[0])?;
        let next = piece.heads * piece.pitch;
        Some([piece.pitch, rows * columns * next, columns * next, next])
    }
}
