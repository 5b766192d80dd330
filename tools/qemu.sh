#!/usr/bin/env bash
# Fetches a newer QEMU than Debian 12 has, for machines that run for hours, and prints the folder with its program. Before 8.1, two emulated processors
# can execute an instruction while the guest's kernel replaces it: the kernel ends with "Oops: int3"
# (https://bugs.launchpad.net/ubuntu/+source/qemu/+bug/2051965). It uses the libraries of this machine's QEMU.
. "$(dirname "$0")/lib.sh"

PACKAGES=(qemu-system-x86 qemu-system-common qemu-system-data seabios)

prefix=$CACHE/qemu-backports-$(sha256sum "$0" | cut -c1-12)
if [ -e "$prefix/bin" ]; then echo "$prefix/bin"; exit; fi

mkdir -p "$CACHE"
exec 9>"$CACHE/qemu.lock"; flock 9
if [ ! -e "$prefix/bin" ]; then
  say "fetching QEMU of Debian 12's backports"
  rm -rf "$prefix"; mkdir -p "$prefix/new"
  unpack_packages "deb $(mirror) bookworm-backports main" "$prefix/root" "${PACKAGES[@]}"
  usr=$prefix/root/usr
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s -L %s -L %s -L %s "$@"\n' "$usr/lib/x86_64-linux-gnu" "$usr/bin/qemu-system-x86_64" \
    "$usr/share/qemu" "$usr/share/seabios" /usr/lib/ipxe/qemu >"$prefix/new/qemu-system-x86_64"
  chmod +x "$prefix/new/qemu-system-x86_64"
  "$prefix/new/qemu-system-x86_64" --version >&2 || die "this QEMU does not run here"
  mv "$prefix/new" "$prefix/bin"
fi
echo "$prefix/bin"
