//! An allocator that wipes memory when it is freed. Libraries keep messages, keys and TLS records
//! in buffers that do not know about secrets. Without it, a copy of a refused ticket would stay
//! readable in free memory until the memory is used again.

use std::alloc::{GlobalAlloc, Layout, System};

/// It is for `#[global_allocator]` in a program's `main.rs`. It does not wipe memory that C
/// libraries allocate.
pub struct Wiping;

// SAFETY: all memory comes from `System` and goes back to it with its original layout. `realloc` is
// the trait's default: it allocates, copies, and frees with `dealloc`, which wipes the old place.
// `System.realloc` cannot be used, because it does not tell whether it moved the memory.
unsafe impl GlobalAlloc for Wiping {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that `System` needs.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller gives up `layout.size()` bytes that it owns and to which no other
        // reference exists; zero is a valid value of each byte, initialized before or not.
        let bytes = unsafe {
            memory.write_bytes(0, layout.size());
            std::slice::from_raw_parts_mut(memory, layout.size())
        };
        // Compilers know that freed memory is not read, and would remove the fill.
        zeroize::optimization_barrier(bytes);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}
