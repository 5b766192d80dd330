//! Counts the memory that a thread holds. A test that uses it has [`Counting`] as its allocator:
//! `#[global_allocator] static ALLOCATOR: Counting = Counting;`

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, which counts.
pub struct Counting;

fn count(bytes: isize) {
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

// SAFETY: all work is done by the system's allocator
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: our caller keeps the contract of the trait
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: our caller keeps the contract of the trait
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs `work` in this thread. Returns the most memory that it held at a time, in bytes.
///
/// # Panics
/// If nothing is counted, because the test has another allocator.
pub fn most<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    MOST.set(before);
    drop(std::hint::black_box(Box::new(0_u8)));
    assert!(MOST.get() > before, "the allocator does not count");
    let result = work();
    (result, (MOST.get() - before) as usize)
}
