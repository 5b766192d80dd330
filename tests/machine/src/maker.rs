//! Initrds as an image builder makes them: by Debian's or Ubuntu's dracut or initramfs-tools, with the files of `initramfs/`.

use super::{Result, dist, root, script};
use std::path::{Path, PathBuf};

/// The arguments of tools/initrd.sh, which makes the initrd.
#[derive(Clone, Copy)]
pub struct Maker {
    /// The program: dracut, initramfs-tools, or another variant of dracut.
    pub system: &'static str,
    /// The distribution of the program, by its name in tools/debian.sh.
    pub suite: &'static str,
    /// The distribution of the kernel for which the initrd is made.
    pub kernel: &'static str,
}

/// Debian 12's.
pub const DRACUT: Maker = Maker::new("dracut", "bookworm");
pub const INITRAMFS_TOOLS: Maker = Maker::new("initramfs-tools", "bookworm");
/// Debian 13's.
pub const DRACUT_13: Maker = Maker::new("dracut", "trixie");
pub const NETWORK_MANAGER: Maker = Maker::new("dracut-network-manager", "trixie");
pub const INITRAMFS_TOOLS_13: Maker = Maker::new("initramfs-tools", "trixie");
/// Ubuntu 24.04's, with Ubuntu's kernel.
pub const INITRAMFS_TOOLS_UBUNTU: Maker =
    Maker::new("initramfs-tools", "noble").with_kernel("noble");
/// The makers whose systemd measures the phases of the boot. The newest is the one of sid on the day when tools/debian.sh fetched
/// it: systemd 262, when this comment was written. On some days sid's packages cannot be installed together; then the script
/// reports this.
pub const SYSTEMD_252: Maker = Maker::new("dracut-measuring", "bookworm");
pub const SYSTEMD_257: Maker = Maker::new("dracut-measuring", "trixie");
pub const NEWEST_SYSTEMD: Maker = Maker::new("dracut-measuring", "sid");
/// Debian 13's with its own kernel, which has configfs-tsm.
pub const SYSTEMD_257_LINUX_6_12: Maker = SYSTEMD_257.with_kernel("trixie");

impl Maker {
    const fn new(system: &'static str, suite: &'static str) -> Maker {
        let kernel = "bookworm";
        Maker {
            system,
            suite,
            kernel,
        }
    }

    /// The same for another kernel of tools/kernel.sh.
    pub const fn with_kernel(self, kernel: &'static str) -> Maker {
        Maker { kernel, ..self }
    }

    /// Makes the initrd.
    pub fn initrd(self) -> Result<PathBuf> {
        self.initrd_with(&dist("unlock")?, "initrd")
    }

    /// Makes the initrd that the same system makes without Firstlight.
    pub fn initrd_without_us(self) -> Result<PathBuf> {
        self.initrd_with(Path::new("-"), "plain")
    }

    /// Makes the initrd with the program `unlock`, or with the package that has it, in a file with the ending `ending`.
    pub fn initrd_with(self, unlock: &Path, ending: &str) -> Result<PathBuf> {
        let Maker {
            system,
            suite,
            kernel,
        } = self;
        let initrd = format!("target/images/{system}-{suite}-linux-{kernel}.{ending}");
        let initrd = root().join(initrd);
        let [system, suite, kernel] = [system, suite, kernel].map(Path::new);
        let arguments = [system, suite, &initrd, unlock, kernel];
        script("tools/initrd.sh", &arguments)?;
        Ok(initrd)
    }
}
