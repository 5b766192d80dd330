#!/usr/bin/env bash
# Fetches openssl(1) of Debian 13 and prints the path of a program that runs it. It has the key exchange X25519MLKEM768, which that of
# Debian 12 has not. It runs with its own C library.
#
#   tools/openssl.sh    only prints the path if it is already there
. "$(dirname "$0")/lib.sh"

PACKAGES=(openssl libssl3t64 libc6 zlib1g libzstd1)

prefix=$CACHE/openssl-trixie-$(sha256sum "$0" | cut -c1-12)
if [ -e "$prefix/openssl" ]; then echo "$prefix/openssl"; exit; fi

mkdir -p "$CACHE"
# two tests may ask at the same time
exec 9>"$CACHE/openssl.lock"; flock 9
if [ ! -e "$prefix/openssl" ]; then
  say "fetching openssl of Debian 13"
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  unpack_packages "deb $(mirror) trixie main" "$work/root" "${PACKAGES[@]}"
  rm -rf "$prefix"; mkdir "$prefix"
  cp -a "$work/root/usr/lib/x86_64-linux-gnu" "$prefix/lib"
  cp "$work/root/usr/bin/openssl" "$prefix/program"
  cat >"$prefix/new" <<END
#!/bin/sh
OPENSSL_MODULES=$prefix/lib/ossl-modules OPENSSL_CONF=/dev/null \\
  exec $prefix/lib/ld-linux-x86-64.so.2 --library-path $prefix/lib $prefix/program "\$@"
END
  chmod +x "$prefix/new"
  "$prefix/new" list -kem-algorithms | grep -q X25519MLKEM768 || die "this openssl has no X25519MLKEM768: $("$prefix/new" version)"
  mv "$prefix/new" "$prefix/openssl"
fi
echo "$prefix/openssl"
