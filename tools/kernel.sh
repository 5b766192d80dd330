#!/usr/bin/env bash
# Fetches Debian's cloud kernel and prints the folder that holds it: boot/vmlinuz-VERSION, lib/modules/VERSION.
#
#   tools/kernel.sh            only prints the folder if it exists
#
# The package comes through apt, so Debian's signature on the archive is checked. The pinned version is the one that the
# boot tests were made with; if the archive no longer has it, the script takes its successor and prints its name.
. "$(dirname "$0")/lib.sh"

SUITE=bookworm
PACKAGE=linux-image-6.1.0-50-cloud-amd64
VERSION=6.1.176-1
SHA256=efe19f605b6f54a8352e68d85a629abb2d30b72a085faef603a9152590baa791

prefix=$CACHE/kernel-$VERSION
latest=$CACHE/kernel-latest
for dir in "$prefix" "$latest"; do
  if [ -e "$dir/done" ]; then echo "$dir"; exit; fi
done

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
source="deb $(mirror) $SUITE main"
apt() { (cd "$work" && private_apt "$source" -- "$@"); }

say "fetching Debian's kernel $PACKAGE $VERSION"
apt update >&2
if apt download "$PACKAGE=$VERSION" >&2; then
  echo "$SHA256  $(ls "$work"/*.deb)" | sha256sum --check --quiet >&2 || die "$PACKAGE $VERSION does not have sha256 $SHA256"
else
  PACKAGE=$(apt depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9]\)/\1/p')
  say "the archive no longer has that version: taking $PACKAGE"
  apt download "$PACKAGE" >&2
  prefix=$latest
fi

rm -rf "$prefix.$$"; mkdir -p "$prefix.$$"
dpkg-deb --fsys-tarfile "$work"/*.deb | tar x -C "$prefix.$$" ./boot ./lib
depmod -b "$prefix.$$" "$(ls "$prefix.$$/lib/modules")"
(cd "$work" && sha256sum ./*.deb) >"$prefix.$$/done"
rm -rf "$prefix"; mv "$prefix.$$" "$prefix"
echo "$prefix"
