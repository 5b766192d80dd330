//! Computes the value of a register from the boot phases that systemd measures ([`base::boot`]).

use base::boot::phases::{IN_INITRAMFS, UNTIL_BOOTED, words_of};

use super::sha256;

/// Returns the value of a register after an extension with a phase.
fn extended(value: &[u8; 32], word: &str) -> [u8; 32] {
    sha256(&[value, &sha256(&[word.as_bytes()])])
}

/// Returns the phases that lead a PCR from one value to the other, in the order of a boot; `None`
/// if no phases do.
pub fn between(pcr: u32, from: &[u8; 32], to: &[u8]) -> Option<Vec<&'static str>> {
    search(words_of(pcr), *from, to)
}

/// Tries each subset of the phases in their order: at most 64.
fn search(words: &[&'static str], value: [u8; 32], to: &[u8]) -> Option<Vec<&'static str>> {
    if value == to {
        return Some(vec![]);
    }
    words.iter().enumerate().find_map(|(index, word)| {
        let mut found = search(&words[index + 1..], extended(&value, word), to)?;
        found.insert(0, word);
        Some(found)
    })
}

/// Returns the value of a PCR in the initramfs, if systemd extended it from `start` with these
/// phases.
pub fn in_initramfs(start: &[u8; 32], words: &[&str]) -> [u8; 32] {
    let in_initramfs = words.iter().filter(|word| IN_INITRAMFS.contains(word));
    in_initramfs.fold(*start, |value, word| extended(&value, word))
}

/// Returns the value that a PCR with the value `now` in the initramfs has in the booted system.
/// `words` returns the phases that systemd has measured into it so far; it is called only for PCR
/// 11, the only one that systemd extends later. `None` if the boot does not measure the initramfs
/// phases, because then it may not measure the others either.
pub fn when_booted(
    pcr: u32,
    now: &[u8; 32],
    words: impl FnOnce() -> Option<Vec<&'static str>>,
) -> Option<[u8; 32]> {
    if pcr != 11 {
        return Some(*now);
    }
    let [first, rest @ ..] = &UNTIL_BOOTED;
    (words()? == [*first]).then(|| rest.iter().fold(*now, |value, word| extended(&value, word)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unhex;

    fn after(words: &[&str]) -> [u8; 32] {
        words
            .iter()
            .fold([7; 32], |value, word| extended(&value, word))
    }

    /// The digests are from systemd's log.
    #[test]
    fn a_word_is_hashed_without_a_terminating_nul() {
        for (word, digest) in [
            (
                "enter-initrd",
                "51e6b92f405d1f98d96e3de343d61d420ad6923b25de21d766f9298192f14fed",
            ),
            (
                "ready",
                "b24d6d33736ecd5604a4b17bc9c6481039fac362bb7df044ef1c10a2bfd21db6",
            ),
            (
                "os-separator",
                "ff5b9d73dad709633ae76adf444012b57e913a12ed7403c3931145862f35f841",
            ),
        ] {
            assert_eq!(sha256(&[word.as_bytes()]), unhex(digest).unwrap());
        }
    }

    #[test]
    fn the_words_between_two_values_are_found() {
        for words in [
            &[][..],
            &["enter-initrd"],
            &["enter-initrd", "leave-initrd", "sysinit", "ready"],
            // an initrd without the unit
            &["sysinit", "ready"],
        ] {
            assert_eq!(
                between(11, &[7; 32], &after(words)).as_deref(),
                Some(words),
                "{words:?}"
            );
        }
        assert_eq!(between(11, &[7; 32], &[8; 32]), None);
        assert_eq!(between(11, &[7; 32], b"short"), None);
        // no boot has this order
        assert_eq!(between(11, &[7; 32], &after(&["ready", "sysinit"])), None);
        let separator = after(&["os-separator"]);
        assert_eq!(between(4, &[7; 32], &separator).unwrap(), ["os-separator"]);
        assert_eq!(between(8, &[7; 32], &separator), None);
    }

    #[test]
    fn the_initramfs_has_only_its_own_word() {
        let booted = ["enter-initrd", "leave-initrd", "sysinit", "ready"];
        assert_eq!(in_initramfs(&[7; 32], &booted), after(&["enter-initrd"]));
        assert_eq!(in_initramfs(&[7; 32], &["sysinit", "ready"]), [7; 32]);
        let separator = after(&["os-separator"]);
        assert_eq!(in_initramfs(&[7; 32], &["os-separator"]), separator);
    }
}
