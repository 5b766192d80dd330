#!/usr/bin/env bash
# Prepares a Debian machine with Rust from rustup: packages, Rust's musl target, and for the tests a kernel to boot. Installs only
# missing things and names them. If nothing is missing, it takes a fraction of a second.
#
#   tools/setup.sh build             installs what building needs
#   tools/setup.sh [PACKAGE...]      installs what building and testing need, and further packages of Debian
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

PACKAGES=(
  # a C compiler for ring, for glibc and for musl
  gcc libc6-dev make binutils musl-tools dpkg-dev xz-utils bzip2 zstd ca-certificates
)
OF_TESTS=(
  # to boot: a machine, its firmware, its TPM, its kernel and its initramfs
  qemu-system-x86 seabios ipxe-qemu ovmf swtpm swtpm-tools busybox-static cpio kmod e2fsprogs
  # for a host's ACPI tables
  acpica-tools
  # for a Kubernetes node: its disk, its serial line, and its network
  mmdebstrap socat iproute2
  # the real programs that ours are tested against
  cryptsetup-bin dmsetup tpm2-tools libtss2-dev pkg-config nghttp2-client nghttp2-server curl python3 python3-venv
  openssh-server openssh-client age mandoc man-db zsh fish
  # unified kernel images and disks with an EFI system partition; the digest that a signature covers; systemd-measure
  fdisk dosfstools mtools pesign sbsigntool systemd
  # the scripts
  shellcheck
)
if [ "${1:-}" != build ]; then
  PACKAGES+=("${OF_TESTS[@]}" "$@")
  # the attested-TLS peer is written in Go; any Go since Debian 12's will do
  command -v go >/dev/null || PACKAGES+=(golang-go)
fi

packages() {
  local missing=() root=() package status
  local -A there
  while read -r package status; do
    if [ "$status" = installed ]; then there[$package]=yes; fi
  done < <(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${PACKAGES[@]}" 2>/dev/null)
  for package in "${PACKAGES[@]}"; do [ -n "${there[$package]:-}" ] || missing+=("$package"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "installing packages needs root: apt-get install ${missing[*]}"
    root=(sudo)
  fi
  say "installing Debian packages: ${missing[*]}"
  "${root[@]}" apt-get update -qq >&2
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

rust() {
  command -v cargo >/dev/null || die "cargo is missing: install Rust with rustup (https://rustup.rs)"
  if ! target_works "$MUSL"; then
    say "adding the standard library for $MUSL"
    if ! rustup target add "$MUSL" >&2 || ! target_works "$MUSL"; then
      say "NO MUSL STANDARD LIBRARY IS AVAILABLE: the programs are built against a static glibc instead (make build TARGET=gnu)"
    fi
  fi
  if ! { cargo fmt --version && cargo clippy --version; } >/dev/null 2>&1; then
    say "adding rustfmt and clippy"
    rustup component add rustfmt clippy >&2 || say "rustfmt and clippy are not available: make lint will not run"
  fi
}

packages
rust
[ "${1:-}" = build ] || tools/kernel.sh >/dev/null
