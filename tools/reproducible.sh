#!/usr/bin/env bash
# Builds programs, packages and initrds again in another directory, with another Cargo home and target directory, and compares
# every byte. The hashes of what was built are in target/SHA256SUMS. docs/reproduce.md
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
# a folder beside Debian's build tools
tools/setup.sh diffoscope-minimal
SOURCE_DATE_EPOCH=$(source_date)
# the copy has no history
FIRSTLIGHT_COMMIT=$(source_commit)
export SOURCE_DATE_EPOCH FIRSTLIGHT_COMMIT

# Makes the initrds of dracut and of initramfs-tools in folder $2, with the scripts of folder $1.
initrds() {
  local system
  for system in dracut initramfs-tools; do
    "$1/tools/initrd.sh" $system bookworm "$2/$system.initrd" "$3/unlock"
  done
}

# Compares the files of two folders.
compare() {
  local one file
  for one in "$1"/*; do
    file=$(basename "$one")
    if ! cmp "$one" "$2/$file" >&2; then
      diffoscope --max-report-size 20000 "$one" "$2/$file" >&2 || true
      die "$file differs between two builds"
    fi
  done
  (cd "$1" && sha256sum ./*) | sed 's| \./| |' | tee -a target/SHA256SUMS
}

tools/build.sh
tools/deb.sh >/dev/null
mkdir -p target/initrd
rm -f target/initrd/*.initrd
initrds "$ROOT" target/initrd target/dist

other=$(mktemp -d); trap 'rm -rf "$other"' EXIT
mkdir -p "$other"/elsewhere "$other"/home/registry "$other/cache" "$other/initrd"
git ls-files -z --cached --others --exclude-standard | tar c --null -T - --ignore-failed-read | tar x -C "$other/elsewhere"
# downloads are shared, but the sources are unpacked at other paths
home=${CARGO_HOME:-$HOME/.cargo}
for shared in registry/cache registry/index config.toml config credentials.toml; do
  [ ! -e "$home/$shared" ] || ln -s "$home/$shared" "$other/home/$shared"
done

say "building again, in $other"
export RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}
elsewhere() (
  umask 077
  CARGO_HOME=$other/home CARGO_TARGET_DIR=$other/target DIST=$other/dist DEB=$other/deb FIRSTLIGHT_CACHE=$other/cache TZ=Asia/Tokyo "$@"
)
elsewhere "$other/elsewhere/tools/build.sh"
elsewhere "$other/elsewhere/tools/deb.sh" >/dev/null
# Debian's packages are shared too
(umask 077; TZ=Asia/Tokyo initrds "$other/elsewhere" "$other/initrd" "$other/dist")

rm -f target/SHA256SUMS
compare "$other/dist" target/dist
compare "$other/deb" target/deb
compare "$other/initrd" target/initrd
if ! cmp -s "$("$ROOT/tools/debian.sh" bookworm)/done" packaging/debian-bookworm.sha256; then
  say "Debian has other packages than those in packaging/debian-bookworm.sha256: initrds of other machines have equal bytes only with the same packages"
fi
say "two builds in different directories are identical"
