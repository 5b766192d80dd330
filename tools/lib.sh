# Shared by the scripts in this folder: paths, messages, and helpers.
set -euo pipefail
unset CDPATH # if it is set, `cd` prints the folder
export LC_ALL=C.UTF-8
umask 022 # the modes of files in images and packages
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${FIRSTLIGHT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/firstlight}
MUSL=x86_64-unknown-linux-musl
GNU=x86_64-unknown-linux-gnu

say() { printf '>> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# The Debian mirror that this machine already uses.
mirror() { apt-get indextargets --format '$(REPO_URI)' | grep -m1 '/debian/*$'; }

# apt-get with separate lists and sources, so that a source package or another suite can be fetched without changes to
# the machine's configuration. Usage: private_apt "deb-src … suite main" -- apt-get arguments; if the first of them is
# `depends` or `show`, apt-cache runs instead.
private_apt() {
  local lines=() tool=apt-get state
  while [ "$1" != -- ]; do lines+=("$1"); shift; done
  shift
  case $1 in depends | show) tool=apt-cache ;; esac
  # the lists of each source are in a folder of their own, because apt-get deletes those of others; its keys may be anywhere
  state=$CACHE/apt/$(printf '%s\n' "${lines[@]}" | sed 's/\[signed-by=[^]]*\] //' | sha256sum | cut -c1-12)
  mkdir -p "$state"/lists/partial "$state"/cache/archives/partial
  (
    # two tests may fetch at the same time
    flock 8
    printf '%s\n' "${lines[@]}" >"$state/sources.list"
    "$tool" -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::Lists="$state/lists" \
      -o Dir::Cache="$state/cache" -o APT::Sandbox::User=root -qq "$@"
  ) 8>"$state/lock"
}

# Fetches packages of a source, and unpacks them below a folder. Usage: unpack_packages "deb … suite main" FOLDER PACKAGE...
unpack_packages() {
  local source=$1 folder=$2 archives
  archives=$(mktemp -d)
  (cd "$archives" && private_apt "$source" -- update && private_apt "$source" -- download "${@:3}") >&2
  for archive in "$archives"/*.deb; do dpkg-deb -x "$archive" "$folder"; done
  rm -r "$archives"
}

# Prints the source of an Ubuntu release for private_apt. The key of Ubuntu's archive is in a package of Debian, which this function
# unpacks below the folder. Usage: ubuntu_source SUITE FOLDER
ubuntu_source() {
  local suite=$1 folder=$2 source
  source="deb $(mirror) trixie main"
  (cd "$folder" && private_apt "$source" -- update && private_apt "$source" -- download ubuntu-keyring) >&2
  dpkg-deb -x "$folder"/ubuntu-keyring_*.deb "$folder/keyring"
  rm "$folder"/ubuntu-keyring_*.deb
  echo "deb [signed-by=$folder/keyring/usr/share/keyrings/ubuntu-archive-keyring.gpg] http://archive.ubuntu.com/ubuntu $suite main universe"
}

# Succeeds if rustc has a standard library for a target.
target_works() { [ -d "$(rustc --print target-libdir --target "$1" 2>/dev/null)" ]; }

# Runs a command in a root file system, with mounts and processes of its own; needs no root. Usage: chroot_into ROOT COMMAND...
chroot_into() {
  local user=()
  [ "$(id -u)" = 0 ] || user=(--map-root-user)
  unshare "${user[@]}" --mount --pid --fork --kill-child sh -ec '
    root=$1; shift
    mkdir -p "$root/proc" "$root/dev" "$root/tmp" "$root/run"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/tmp"
    mount -t tmpfs tmpfs "$root/run"
    unset TMPDIR # a folder of this machine
    PATH=/usr/sbin:/usr/bin exec chroot "$root" "$@"' chroot "$@"
}

# Prints the time of the sources in seconds: SOURCE_DATE_EPOCH, or that of the last commit.
source_date() {
  [ -n "${SOURCE_DATE_EPOCH:-}" ] || SOURCE_DATE_EPOCH=$(git -C "$ROOT" log -1 --format=%ct) ||
    die "without git's history, set SOURCE_DATE_EPOCH to the time of the commit"
  echo "$SOURCE_DATE_EPOCH"
}

# Prints the commit of the sources and its day, as `firstlight --version` shows them: FIRSTLIGHT_COMMIT, or what git says; nothing
# without either.
source_commit() {
  if [ -n "${FIRSTLIGHT_COMMIT+set}" ]; then echo "$FIRSTLIGHT_COMMIT"; return; fi
  [ -e "$ROOT/.git" ] || return 0
  echo "$(git -C "$ROOT" describe --always --abbrev=12 --dirty=+changes --exclude='*'), $(git -C "$ROOT" log -1 --format=%cs)"
}

# Installs packages into a small Debian of tools/debian.sh, without its other packages in dpkg's database. The packages' scripts run
# outside of that Debian, with this machine's tools. Usage: install_package ROOT DEB...
install_package() {
  local root=$1; shift
  mkdir -p "$root"/var/lib/dpkg/{info,updates,triggers}
  : >>"$root/var/lib/dpkg/status"
  PATH=$PATH:/usr/sbin:/sbin dpkg --root="$root" --log=/dev/null --force-not-root --force-depends --force-script-chrootless --install "$@" >&2
}

# Makes the root file system $3 of the Debian $1 (tools/debian.sh) with the modules of the kernel $2 (tools/kernel.sh). It has hard
# links to both, so it must be in the cache too, and nobody may write into a file that exists in it.
root_with_kernel() {
  local debian=$1 kernel=$2 root=$3
  cp -al "$debian/root" "$root"
  cp -al "$kernel/lib/modules" "$root/usr/lib/modules" 2>/dev/null || cp -a "$kernel/lib/modules" "$root/usr/lib/modules"
  cp "$kernel"/boot/config-* "$root/boot/"
}

# Modules of dracut that a machine in a cloud does not need; without them dracut takes half the time.
NOT_IN_CLOUDS="plymouth rngd kernel-modules-extra hwdb lunmask virtfs virtiofs resume lvm mdraid btrfs multipath nfs iscsi nvmf"

# Copies a program of the Debian root file system $1, and the libraries that it needs, to the same places in the image's folder $2.
# Usage: with_libraries DEBIAN TREE PROGRAM
with_libraries() {
  local debian=$1 tree=$2 program=$3 path
  for path in $(readlink -f "$debian$program" | sed "s|^$debian||") \
    $(chroot "$debian" ldd "$program" | grep -o '/[^ ]*' | sort -u); do
    mkdir -p "$tree/$(dirname "$path")"
    cp -L "$debian$path" "$tree/$path"
  done
  [ -e "$tree$program" ] || cp -P "$debian$program" "$tree$program"
}

# Copies iptables and nft of the Debian root file system $1 to an image's folder $2, which has no /usr/bin and no /bin yet.
with_netfilter() {
  local debian=$1 tree=$2 link tool extension
  for link in bin sbin lib lib64; do mkdir -p "$tree/usr/$link"; ln -s "usr/$link" "$tree/$link"; done
  with_libraries "$debian" "$tree" /usr/sbin/nft
  with_libraries "$debian" "$tree" /usr/sbin/xtables-nft-multi
  for tool in {ip,ip6}tables{,-save,-restore}; do ln -sf xtables-nft-multi "$tree/usr/sbin/$tool"; done
  mkdir -p "$tree/usr/lib/x86_64-linux-gnu"
  # its extensions, and what those need in turn: without libm there are no rules as soon as a Service has two endpoints
  for extension in "$debian"/usr/lib/x86_64-linux-gnu/xtables/*.so; do
    with_libraries "$debian" "$tree" "${extension#"$debian"}"
  done
}
