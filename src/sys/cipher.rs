//! The kernel's own ciphers (linux/if_alg.h).

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::check;

/// Makes the kernel create an AEAD, with its name as in /proc/crypto, and keep it, so that the next
/// user gets it at once. Without this, the kernel starts modprobe up to two times for each part of
/// the name, and tests the AEAD, before its first use.
///
/// # Errors
/// `EAFNOSUPPORT` or `ENOENT` if the kernel lacks the module `algif_aead`, or the AEAD;
/// `InvalidInput` for a name of more than 63 bytes.
pub fn make_aead(name: &str) -> io::Result<()> {
    // SAFETY: all fields are integers, for which zero is valid.
    let mut address: libc::sockaddr_alg = unsafe { zeroed() };
    address.salg_family = libc::AF_ALG as u16;
    address.salg_type[..4].copy_from_slice(b"aead");
    // the last byte stays zero: the end of the name
    match address.salg_name[..63].get_mut(..name.len()) {
        Some(place) => place.copy_from_slice(name.as_bytes()),
        None => return Err(io::ErrorKind::InvalidInput.into()),
    }
    // SAFETY: socket(2) takes only integers.
    let socket =
        check(unsafe { libc::socket(libc::AF_ALG, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the descriptor is new and belongs to nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let length = size_of::<libc::sockaddr_alg>() as libc::socklen_t;
    // SAFETY: the address is valid for its length, and the kernel only reads it.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(())
}

/// Unloads the AF_ALG modules if nobody uses them. Does nothing if they are built in, or if the
/// system forbids it. The ciphers stay.
pub fn unload_interface() {
    for module in [c"algif_aead", c"af_alg"] {
        // SAFETY: delete_module(2) reads a valid C string; its flags are an integer.
        unsafe { libc::syscall(libc::SYS_delete_module, module.as_ptr(), libc::O_NONBLOCK) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_too_long_is_refused() {
        let error = make_aead(&"x".repeat(64)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    /// On a machine without the module, the kernel returns the documented error.
    #[test]
    fn the_kernel_makes_a_cipher_or_says_that_it_cannot() {
        let made = make_aead("authenc(hmac(sha256),xts(aes))");
        let known = [libc::EAFNOSUPPORT, libc::ENOENT, libc::EPERM, libc::EACCES];
        if let Err(error) = made {
            assert!(
                error.raw_os_error().is_some_and(|it| known.contains(&it)),
                "{error}"
            );
        }
    }
}
