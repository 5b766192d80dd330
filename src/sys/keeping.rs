//! An allocator that wipes memory when it is freed, as [`Wiping`] does. It keeps some freed blocks for the next allocation of their size. musl would unmap many large
//! blocks and map them again, and it has one lock for all blocks, for which the threads of a server would wait. musl cannot detect a double free of a kept block, so this
//! allocator searches the kept blocks at each free, and aborts the program if the block is among them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::process;
use std::ptr;
use std::slice;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use zeroize::optimization_barrier;

use crate::wiping::Wiping;

/// Blocks of at most this many bytes are rare.
const SMALL: usize = 8;
/// Larger blocks are rare, too.
const LARGEST: usize = 2 << 20;
/// The sizes of kept blocks are the powers of two and seven sizes between each two of them, so that
/// a block is at most an eighth larger than the requested size.
const STEPS: usize = 8;
const CLASSES: usize = (LARGEST / SMALL).ilog2() as usize * STEPS;
/// Maximum number of kept blocks of a size.
const EACH: usize = 32;
/// Maximum number of bytes in the kept blocks of a size of at most so many bytes. So the large blocks
/// leave the place of the small ones to them.
const OF_SIZE: usize = 64 << 10;
/// Maximum number of bytes in all larger kept blocks: three for messages of 1 MiB.
const OF_LARGE: usize = 13 << 18;
/// The alignment of all kept blocks, and the highest that they serve: that of musl's malloc.
const ALIGN: usize = 16;

/// It is for `#[global_allocator]` in a program's `main.rs`.
pub struct WipingAllocator {
    kept: [[AtomicPtr<u8>; EACH]; CLASSES],
    /// Number of bytes in the kept blocks of more than [`OF_SIZE`].
    large: AtomicUsize,
}

impl WipingAllocator {
    /// Keeps nothing yet.
    #[allow(clippy::new_without_default)] // a default is not const
    pub const fn new() -> WipingAllocator {
        WipingAllocator {
            kept: [const { [const { AtomicPtr::new(ptr::null_mut()) }; EACH] }; CLASSES],
            large: AtomicUsize::new(0),
        }
    }

    /// Takes a kept block; null if there is none.
    fn take(&self, class: Class) -> *mut u8 {
        for place in self.places(class) {
            // the load keeps empty places from being written
            if !place.load(Ordering::Relaxed).is_null() {
                let block = place.swap(ptr::null_mut(), Ordering::Acquire);
                if !block.is_null() {
                    self.uncount(class);
                    return block;
                }
            }
        }
        ptr::null_mut()
    }

    /// Keeps a block. Returns whether there was a place for it.
    fn keep(&self, class: Class, block: *mut u8) -> bool {
        let (empty, order) = (ptr::null_mut(), Ordering::Relaxed);
        let places = self.places(class);
        if places.iter().any(|place| place.load(order) == block) {
            process::abort();
        }
        let large = class.large();
        let fits = large == 0 || self.large.fetch_add(large, order) + large <= OF_LARGE;
        let is_kept = fits
            && places.iter().any(|place| {
                place.load(order).is_null()
                    && (place.compare_exchange(empty, block, Ordering::Release, order)).is_ok()
            });
        if !is_kept {
            self.uncount(class);
        }
        is_kept
    }

    /// Counts a large block less. All threads would contend for the counter if others changed it, too.
    fn uncount(&self, class: Class) {
        if class.large() > 0 {
            self.large.fetch_sub(class.large(), Ordering::Relaxed);
        }
    }

    fn places(&self, class: Class) -> &[AtomicPtr<u8>] {
        let most = match class.large() {
            0 => OF_SIZE / class.layout.size(),
            _ => EACH,
        };
        &self.kept[class.index][..most.min(EACH)]
    }
}

/// The size of a kept block.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Class {
    index: usize,
    layout: Layout,
}

impl Class {
    /// Returns the class of the blocks that serve `layout`.
    fn of(layout: Layout) -> Option<Class> {
        if layout.size() <= SMALL || layout.size() > LARGEST || layout.align() > ALIGN {
            return None;
        }
        let below = (layout.size() - 1).ilog2();
        let step = (1 << below) / STEPS;
        let size = layout.size().next_multiple_of(step);
        let octave = (below - SMALL.ilog2()) as usize;
        Some(Class {
            index: octave * STEPS + (size / step - STEPS - 1),
            layout: Layout::from_size_align(size, ALIGN).ok()?,
        })
    }

    /// Returns the number of bytes that count as large.
    fn large(self) -> usize {
        match self.layout.size() {
            ..=OF_SIZE => 0,
            size => size,
        }
    }
}

// SAFETY: a block has one owner: its place in `kept`, from which an atomic swap takes it, or the
// caller. It has at least the size and alignment of the caller's layout, and goes back to `System`
// with the layout of its class, with which it was allocated. The class depends only on the layout,
// so `dealloc` finds the same class as `alloc`.
unsafe impl GlobalAlloc for WipingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(class) = Class::of(layout) else {
            // SAFETY: the caller's promises are those that `Wiping` needs.
            return unsafe { Wiping.alloc(layout) };
        };
        let block = self.take(class);
        if block.is_null() {
            // SAFETY: the size is not zero.
            unsafe { System.alloc(class.layout) }
        } else {
            block
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(class) = Class::of(layout) else {
            // SAFETY: the caller's promises are those that `Wiping` needs.
            return unsafe { Wiping.alloc_zeroed(layout) };
        };
        let block = self.take(class);
        if block.is_null() {
            // SAFETY: the size is not zero.
            return unsafe { System.alloc_zeroed(class.layout) };
        }
        // The former owner may have had a smaller part of the block.
        // SAFETY: the block is this function's, and has at least so many bytes.
        unsafe { block.write_bytes(0, layout.size()) };
        block
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        let Some(class) = Class::of(layout) else {
            // SAFETY: the caller's promises are those that `Wiping` needs.
            return unsafe { Wiping.dealloc(memory, layout) };
        };
        // SAFETY: the caller gives up these bytes.
        unsafe { wipe(memory, layout.size()) };
        if !self.keep(class, memory) {
            // SAFETY: the block came from `System` with this layout.
            unsafe { System.dealloc(memory, class.layout) };
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises a size that is valid with this alignment.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if Class::of(layout).is_some() && Class::of(layout) == Class::of(wanted) {
            if size < layout.size() {
                // SAFETY: the caller gives up these bytes, which are within the block.
                unsafe { wipe(memory.add(size), layout.size() - size) };
            }
            return memory;
        }
        // SAFETY: the size is not zero, as the caller promises.
        let new = unsafe { self.alloc(wanted) };
        if !new.is_null() {
            // SAFETY: both blocks have so many bytes, and are different. The old one is not used
            // any more.
            unsafe {
                ptr::copy_nonoverlapping(memory, new, layout.size().min(size));
                self.dealloc(memory, layout);
            }
        }
        new
    }
}

/// Fills bytes with zeros that nobody will read.
///
/// # Safety
/// The caller owns these bytes, and no reference to them exists.
unsafe fn wipe(memory: *mut u8, size: usize) {
    // SAFETY: zero is a valid value of each byte, initialized before or not.
    let bytes = unsafe {
        memory.write_bytes(0, size);
        slice::from_raw_parts_mut(memory, size)
    };
    // Compilers know that freed memory is not read, and would remove the fill.
    optimization_barrier(bytes);
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, 8).unwrap()
    }

    fn content<'a>(memory: *mut u8, size: usize) -> &'a mut [u8] {
        // SAFETY: the tests pass only what they have allocated with this size.
        unsafe { slice::from_raw_parts_mut(memory, size) }
    }

    #[test]
    fn a_freed_block_is_kept_wiped_and_used_again() {
        for size in [18, 384, 2 << 10, 17 << 10, 1 << 20, LARGEST] {
            let allocator = WipingAllocator::new();
            // SAFETY: the layout is the one of the allocation.
            unsafe {
                let first = allocator.alloc_zeroed(layout(size));
                assert!(content(first, size).iter().all(|byte| *byte == 0));
                content(first, size).fill(7);
                allocator.dealloc(first, layout(size));
                let second = allocator.alloc(layout(size - 1));
                assert_eq!(second, first);
                assert!(content(first, size).iter().all(|byte| *byte == 0));
                allocator.dealloc(second, layout(size - 1));
            }
            allocator.free_all();
        }
    }

    #[test]
    fn each_size_has_a_class_of_at_most_an_eighth_more() {
        let mut last: Option<Class> = None;
        for size in SMALL + 1..=LARGEST {
            let class = Class::of(layout(size)).unwrap();
            assert!((size..=size + size / 8).contains(&class.layout.size()));
            if last.is_none_or(|last| last != class) {
                assert_eq!(class.index, last.map_or(0, |last| last.index + 1), "{size}");
                assert!(last.is_none_or(|last| last.layout.size() + 1 == size));
            }
            last = Some(class);
        }
        assert_eq!(last.unwrap().index, CLASSES - 1);
        let aligned = Layout::from_size_align(2 << 10, 64).unwrap();
        for other in [aligned, layout(SMALL), layout(LARGEST + 1)] {
            assert!(Class::of(other).is_none());
        }
    }

    #[test]
    fn zeroed_memory_is_zero_also_where_the_former_owner_had_no_part() {
        let allocator = WipingAllocator::new();
        let class = Class::of(layout(29 << 10)).unwrap();
        // SAFETY: each layout is the one of the allocation.
        unsafe {
            let block = System.alloc(class.layout);
            content(block, 30 << 10).fill(7);
            assert!(allocator.keep(class, block));
            let again = allocator.alloc_zeroed(layout(30 << 10));
            assert_eq!(again, block);
            assert!(content(again, 30 << 10).iter().all(|byte| *byte == 0));
            allocator.dealloc(again, layout(30 << 10));
        }
        allocator.free_all();
    }

    #[test]
    fn a_block_grows_in_its_place_or_moves_with_its_content_and_leaves_zeros() {
        let allocator = WipingAllocator::new();
        // SAFETY: each layout is the one of the last allocation, and kept blocks stay allocated.
        unsafe {
            let small = allocator.alloc(layout(100));
            content(small, 100).fill(7);
            let moved = allocator.realloc(small, layout(100), 29 << 10);
            assert!(content(moved, 100).iter().all(|byte| *byte == 7));
            content(moved, 29 << 10).fill(8);
            let grown = allocator.realloc(moved, layout(29 << 10), 30 << 10);
            assert_eq!(grown, moved);
            let shrunk = allocator.realloc(grown, layout(30 << 10), (28 << 10) + 1);
            assert_eq!(shrunk, grown);
            let (kept, rest) = content(grown, 29 << 10).split_at((28 << 10) + 1);
            assert!(kept.iter().all(|byte| *byte == 8) && rest.iter().all(|byte| *byte == 0));
            let other = allocator.realloc(shrunk, layout((28 << 10) + 1), 70 << 10);
            assert_ne!(other, shrunk);
            assert!(content(other, 28 << 10).iter().all(|byte| *byte == 8));
            assert!(content(shrunk, 29 << 10).iter().all(|byte| *byte == 0));
            let out = allocator.realloc(other, layout(70 << 10), 50);
            assert!(content(out, 50).iter().all(|byte| *byte == 8));
            assert!(content(other, 70 << 10).iter().all(|byte| *byte == 0));
            allocator.dealloc(out, layout(50));
        }
        allocator.free_all();
    }

    #[test]
    fn only_so_many_bytes_are_kept_and_large_blocks_take_no_place_of_small_ones() {
        let allocator = WipingAllocator::new();
        let mut small = 0;
        for size in [
            LARGEST,
            1 << 20,
            129 << 10,
            OF_SIZE,
            48 << 10,
            8 << 10,
            2 << 10,
        ] {
            // SAFETY: the layout is the one of the allocation.
            unsafe {
                let blocks: Vec<_> = (0..EACH + 3)
                    .map(|_| allocator.alloc(layout(size)))
                    .collect();
                (blocks.iter()).for_each(|block| allocator.dealloc(*block, layout(size)));
            }
            if size <= OF_SIZE {
                small += size * (OF_SIZE / size).min(EACH);
            }
            let large = allocator.large.load(Ordering::Relaxed);
            assert!((OF_LARGE - LARGEST..=OF_LARGE).contains(&large), "{size}");
            assert_eq!(allocator.bytes(), large + small, "{size}");
        }
        allocator.free_all();
        assert_eq!(
            (allocator.bytes(), allocator.large.load(Ordering::Relaxed)),
            (0, 0)
        );
    }

    #[test]
    fn threads_never_get_the_same_block() {
        let allocator = WipingAllocator::new();
        thread::scope(|scope| {
            for own in 1..=4_u8 {
                let allocator = &allocator;
                scope.spawn(move || {
                    for round in 0..20_000_usize {
                        let size = ((64 << 10) << (round % 3)) - round % 100;
                        // SAFETY: the layout is the one of the allocation.
                        unsafe {
                            let block = allocator.alloc(layout(size));
                            content(block, 64).fill(own);
                            if round % 64 == 0 {
                                thread::yield_now();
                            }
                            assert!(content(block, 64).iter().all(|byte| *byte == own));
                            allocator.dealloc(block, layout(size));
                        }
                    }
                });
            }
        });
        let small = Class::of(layout(64 << 10)).unwrap();
        let small = allocator.places(small).len() * (64 << 10);
        let large = allocator.large.load(Ordering::Relaxed);
        assert!((large..=large + small + OF_SIZE).contains(&allocator.bytes()));
        allocator.free_all();
        assert_eq!(allocator.large.load(Ordering::Relaxed), 0);
    }

    impl WipingAllocator {
        /// Returns the number of bytes in all kept blocks.
        fn bytes(&self) -> usize {
            let of = |class| {
                let places = self.places(class).iter();
                let kept = places.filter(|place| !place.load(Ordering::Relaxed).is_null());
                kept.count() * class.layout.size()
            };
            classes().map(of).sum()
        }

        fn free_all(&self) {
            for class in classes() {
                while let block = self.take(class)
                    && !block.is_null()
                {
                    // SAFETY: the block came from `System` with this layout.
                    unsafe { System.dealloc(block, class.layout) };
                }
            }
        }
    }

    fn classes() -> impl Iterator<Item = Class> {
        let mut size = SMALL;
        std::iter::from_fn(move || {
            let class = Class::of(layout(size + 1))?;
            size = class.layout.size();
            Some(class)
        })
    }
}
