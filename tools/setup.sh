#!/usr/bin/env bash
# Prepares a Debian machine with Rust by rustup: packages, Rust's musl target, a static tpm2-tss, Debian's kernel.
#
# Does nothing, in well under a second, when nothing is missing. What it fetches goes to a cache outside the checkout
# ($FIRSTLIGHT_CACHE, else ~/.cache/firstlight).
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

PACKAGES=(
  # to build: a C compiler for ring and tpm2-tss, for glibc and for musl
  gcc libc6-dev make binutils pkg-config musl-tools dpkg-dev xz-utils bzip2 ca-certificates
  # to boot: a machine, its TPM, its kernel and its initramfs
  qemu-system-x86 swtpm busybox-static cpio kmod e2fsprogs
  # the real programs that ours are tested against
  cryptsetup-bin dmsetup tpm2-tools nghttp2-client nghttp2-server python3-venv
)

packages() {
  local missing=() package status
  declare -A there
  while read -r package status; do
    if [ "$status" = installed ]; then there[$package]=yes; fi
  done < <(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${PACKAGES[@]}" 2>/dev/null)
  for package in "${PACKAGES[@]}"; do [ -n "${there[$package]:-}" ] || missing+=("$package"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  local root=()
  if [ "$(id -u)" -ne 0 ]; then
    root=(sudo)
    command -v sudo >/dev/null || die "as root, run: apt-get install ${missing[*]}"
  fi
  say "installing Debian packages: ${missing[*]}"
  "${root[@]}" apt-get -qq update >&2
  DEBIAN_FRONTEND=noninteractive "${root[@]}" apt-get -qq install -y --no-install-recommends "${missing[@]}" >&2
}

# The shipped programs are static on musl. Where Rust's musl standard library is not to be had (a distribution's Rust, a
# closed network), they are static on glibc instead; .deps/target holds which.
rust() {
  command -v cargo >/dev/null || die "there is no cargo: install Rust by https://rustup.rs"
  local targets
  targets=$(rustc --print sysroot)/lib/rustlib
  libc=musl
  if [ ! -d "$targets/$MUSL" ]; then
    say "adding Rust's target $MUSL"
    rustup target add $MUSL >&2 || libc=gnu
  fi
  if ! { cargo fmt --version && cargo clippy --version; } >/dev/null 2>&1; then
    say "adding rustfmt and clippy"
    rustup component add rustfmt clippy >&2 || say "they were not to be had: make lint will not run"
  fi
  if [ $libc = gnu ]; then
    say "Rust's musl target is not to be had: the programs will be static on glibc ($GNU), which is larger and resolves"
    say "names in its own way; everything else is the same"
  fi
  mkdir -p .deps
  if [ "$(cat .deps/target 2>/dev/null)" != $libc ]; then echo $libc >.deps/target; fi
}

# The static tpm2-tss of a C library, by a link that .cargo/config.toml names.
tss() {
  local prefix
  prefix=$(tools/tss.sh "$1")
  if [ "$(readlink ".deps/$1")" != "$prefix" ]; then ln -sfn "$prefix" ".deps/$1"; fi
}

packages
rust
tss "${1:-$libc}"
tools/kernel.sh >/dev/null
