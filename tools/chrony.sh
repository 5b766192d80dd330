#!/usr/bin/env bash
# Fetches chronyd(8) and chronyc(1) of Debian 13, as the image of mkosi has them, and prints the folder with programs that run them.
# They run with their own C library.
. "$(dirname "$0")/lib.sh"

PACKAGES=(chrony libc6 libcap2 libedit2 libbsd0 libmd0 libtinfo6 libgnutls30t64 libnettle8t64 libhogweed6t64 libgmp10 libseccomp2
  libp11-kit0 libffi8 libidn2-0 libunistring5 libtasn1-6)

prefix=$CACHE/chrony-trixie-$(sha256sum "$0" | cut -c1-12)
if [ -e "$prefix/bin" ]; then echo "$prefix/bin"; exit; fi

mkdir -p "$CACHE"
# two tests may ask at the same time
exec 9>"$CACHE/chrony.lock"; flock 9
if [ ! -e "$prefix/bin" ]; then
  say "fetching chrony of Debian 13"
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  unpack_packages "deb $(mirror) trixie main" "$work/root" "${PACKAGES[@]}"
  rm -rf "$prefix"; mkdir "$prefix" "$prefix/new"
  cp -a "$work/root/usr/lib/x86_64-linux-gnu" "$prefix/lib"
  for program in sbin/chronyd bin/chronyc; do
    name=${program##*/}
    cp "$work/root/usr/$program" "$prefix/$name"
    printf '#!/bin/sh\nexec %s/lib/ld-linux-x86-64.so.2 --library-path %s/lib %s "$@"\n' "$prefix" "$prefix" "$prefix/$name" >"$prefix/new/$name"
    chmod +x "$prefix/new/$name"
  done
  "$prefix/new/chronyd" -v | grep -q +NTS || die "this chronyd has no NTS: $("$prefix/new/chronyd" -v)"
  mv "$prefix/new" "$prefix/bin"
fi
echo "$prefix/bin"
