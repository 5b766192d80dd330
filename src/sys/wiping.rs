//! An allocator that wipes what is given back. Libraries keep messages, keys and TLS records in buffers that know nothing of
//! secrets; a copy of a refused ticket would stay readable in free memory until something else needs the room.

use std::alloc::{GlobalAlloc, Layout, System};

/// The system's allocator; memory is zero once it is freed. For `#[global_allocator]` in a program's main. Memory that C
/// libraries allocate does not pass through it.
pub struct Wiping;

// SAFETY: all memory comes from `System` and goes back to it with the layout that it came with. `realloc` is the trait's own: it
// allocates, copies, and frees by `dealloc`, which wipes the old place; growing in place would leave nothing to wipe, but the
// system does not tell whether it moved.
unsafe impl GlobalAlloc for Wiping {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller gives up `layout.size()` bytes that it owns, of which nothing else has a reference; a zero is a
        // value of each byte, initialised before or not.
        let bytes = unsafe {
            memory.write_bytes(0, layout.size());
            std::slice::from_raw_parts_mut(memory, layout.size())
        };
        // compilers know that nobody reads what is freed next, and would leave the zeros out
        zeroize::optimization_barrier(bytes);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}
