#!/usr/bin/env bash
# Fetches systemd's EFI stub and boot manager of a Debian or Ubuntu release, and its ukify if it has one, and prints the folder that
# holds them: linuxx64.efi.stub, systemd-bootx64.efi, ukify.
#
#   tools/stub.sh SUITE        bookworm (systemd 252), trixie (257), resolute (Ubuntu 26.04's 259), sid (the newest)
#
# The package comes through apt, so the distribution's signature on the archive is checked. The script takes the newest version of
# the suite: versions measure different things, and the tests must notice a change.
. "$(dirname "$0")/lib.sh"

suite=${1:?usage: tools/stub.sh SUITE}
packages=(systemd-boot-efi)
# systemd 252 has no ukify
[ "$suite" = bookworm ] || packages+=(systemd-ukify)
prefix=$CACHE/systemd-boot-$suite
if [ -e "$prefix/done" ]; then echo "$prefix"; exit; fi

# two tests may ask at the same time
mkdir -p "$CACHE"; exec 9>"$prefix.lock"; flock 9
if [ ! -e "$prefix/done" ]; then
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  say "fetching systemd's EFI stub of $suite"
  case $suite in
  resolute) source=$(ubuntu_source "$suite" "$work") ;;
  *) source="deb $(mirror) $suite main" ;;
  esac
  (cd "$work" && private_apt "$source" -- update && private_apt "$source" -- download "${packages[@]}") >&2
  rm -rf "$prefix"; mkdir -p "$prefix"
  unpack() { dpkg-deb --fsys-tarfile "$work/$1"_*.deb | tar x -C "$prefix" --transform 's,.*/,,' --wildcards "$2"; }
  unpack systemd-boot-efi './usr/lib/systemd/boot/efi/*x64*'
  [ "$suite" = bookworm ] || unpack systemd-ukify ./usr/bin/ukify
  (cd "$work" && sha256sum ./*.deb) >"$prefix/done"
fi
echo "$prefix"
