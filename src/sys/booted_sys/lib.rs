//! The raw system calls and `unsafe` blocks that only programs of the booted system and of the
//! operator need, so that `unlock` does not link them. The rules are those of the crate `sys`.
#![allow(unsafe_code)]

pub mod activation;
pub mod clock;
pub mod ext4;
pub mod keeping;
pub mod process;
pub mod signal;
pub mod space;
pub mod terminal;
