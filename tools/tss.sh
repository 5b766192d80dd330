#!/usr/bin/env bash
# Fetches tpm2-tss 4 of Debian 13, which AWS's library for the NitroTPM demands, and prints its folder: `root` has the headers and
# libraries, for pkg-config, and `run PROGRAM [ARGUMENT...]` starts a program with them and with Debian 13's C library.
#
#   tools/tss.sh    only prints the folder if it is already there
. "$(dirname "$0")/lib.sh"

PACKAGES=(
  libtss2-dev libtss2-esys-3.0.2-0t64 libtss2-mu-4.0.1-0t64 libtss2-sys1t64 libtss2-tctildr0t64 libtss2-tcti-device0t64
  libssl3t64 libc6 libgcc-s1 zlib1g libzstd1
)

prefix=$CACHE/tss-trixie-$(sha256sum "$0" | cut -c1-12)
if [ -e "$prefix/run" ]; then echo "$prefix"; exit; fi

say "fetching tpm2-tss of Debian 13"
mkdir -p "$CACHE"
# it may run twice at the same time
work=$(mktemp -d -p "$CACHE"); trap 'rm -rf "$work"' EXIT
unpack_packages "deb $(mirror) trixie main" "$work/root" "${PACKAGES[@]}"
libraries=usr/lib/x86_64-linux-gnu
cat >"$work/run" <<'END'
#!/bin/sh
libraries=$(dirname "$0")/root/usr/lib/x86_64-linux-gnu
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$@"
END
chmod 755 "$work" "$work/run"
[ -e "$work/root/$libraries/ld-linux-x86-64.so.2" ] || die "the C library of Debian 13 is not in $libraries"
mv -T "$work" "$prefix" 2>/dev/null || [ -e "$prefix/run" ]
echo "$prefix"
