//! An array that grows without moving its elements.

use std::ops::{Index, IndexMut};

const CHUNK_BITS: u32 = 5;
pub(crate) const CHUNK: usize = 1 << CHUNK_BITS;

/// An array that grows by 32 elements and never moves them: no pause for copying, and at most one chunk of
/// slack.
#[derive(Debug)]
pub(crate) struct Chunked<T> {
    chunks: Vec<Box<[T; CHUNK]>>,
}

impl<T> Default for Chunked<T> {
    fn default() -> Self {
        Self { chunks: Vec::new() }
    }
}

impl<T: Default> Chunked<T> {
    /// Adds a chunk of elements.
    pub(crate) fn grow(&mut self) {
        let chunk: Box<[T]> = (0..CHUNK).map(|_| T::default()).collect();
        let Ok(chunk) = chunk.try_into() else {
            unreachable!("collected as many as a chunk has");
        };
        if self.chunks.len() == self.chunks.capacity() {
            // Doubling would cost a byte for each entry.
            self.chunks.reserve_exact(self.chunks.len() / 8 + 4);
        }
        self.chunks.push(chunk);
    }

    /// Grows in whole chunks until there are `len` elements.
    #[cfg(test)]
    pub(crate) fn grow_to(&mut self, len: usize) {
        while self.len() < len {
            self.grow();
        }
    }
}

impl<T> Chunked<T> {
    pub(crate) fn len(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        let chunk = self.chunks.get_mut((index >> CHUNK_BITS) as usize)?;
        Some(&mut chunk[index as usize % CHUNK])
    }

    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        let chunk = self.chunks.get((index >> CHUNK_BITS) as usize)?;
        Some(&chunk[index as usize % CHUNK])
    }
}

impl<T> Index<u32> for Chunked<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: u32) -> &T {
        &self.chunks[(index >> CHUNK_BITS) as usize][index as usize % CHUNK]
    }
}

impl<T> IndexMut<u32> for Chunked<T> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.chunks[(index >> CHUNK_BITS) as usize][index as usize % CHUNK]
    }
}
