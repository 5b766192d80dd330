//! Checks of the kernel and of its command line.

pub mod phases;
pub mod stage;
pub mod timeline;

/// Returns why a kernel command line is dangerous if it names a root file system without its hash;
/// `None` if it does not (dm-verity: systemd-veritysetup-generator(8), or the kernel's
/// dm-mod.create). It cannot detect a root file system that is found without `root=`.
pub fn unverified_root(command_line: &str) -> Option<&'static str> {
    let has = |names: &[&str]| {
        let mut words = command_line.split_whitespace();
        words.any(|word| names.iter().any(|name| word.starts_with(name)))
    };
    let is_verified = has(&["roothash=", "usrhash=", "systemd.verity_root_data="])
        || has(&["dm-mod.create="]) && command_line.contains(" verity ");
    (has(&["root="]) && !is_verified).then_some(
        "the kernel command line has root= without roothash=, so nothing verifies the root file system: the host can change \
         its programs, and read the open state disk. Protect it with dm-verity (docs/images/host.md)",
    )
}

/// The word in a kernel's version that says that AML, the code in ACPI tables, cannot access the
/// kernel's memory. The kernel of our image has this word.
const CONFINED: &str = "aml-confined";

/// Returns the consequences if a kernel with this version (/proc/version) runs the host's ACPI
/// tables without limits; `None` if it confines them.
pub fn trusted_acpi(version: &str) -> Option<&'static str> {
    (!version.contains(CONFINED)).then_some(
        "the kernel lets code in the host's ACPI tables write to kernel memory, and no PCR covers that code: the host can \
         change what runs. Use a kernel that confines it (docs/images/kernel.md)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_says_in_its_version_that_it_confines_acpi_tables() {
        let version = "Linux version 6.12.48 (root@build) #1 SMP Debian 6.12.48-1";
        assert!(trusted_acpi(version).is_some_and(|why| why.contains("ACPI")));
        assert_eq!(trusted_acpi(&format!("{version} aml-confined")), None);
        assert!(trusted_acpi("").is_some());
    }

    #[test]
    fn a_root_file_system_needs_a_hash() {
        for (command_line, is_unverified) in [
            ("root=/dev/vda ro console=ttyS0", true),
            ("console=ttyS0 root=LABEL=root", true),
            ("root=/dev/dm-0 roothash=ab12 ro", false),
            ("roothash=ab12 systemd.volatile=overlay", false),
            (
                r#"dm-mod.create="a,,,ro,0 8 verity 1 .." root=/dev/dm-0"#,
                false,
            ),
            ("console=ttyS0", false),
            ("firstlight.csp=qemu notroot=x", false),
        ] {
            assert_eq!(
                unverified_root(command_line).is_some(),
                is_unverified,
                "{command_line}"
            );
        }
    }
}
