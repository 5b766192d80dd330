#!/usr/bin/env bash
# Builds a static tpm2-tss (with mbedtls's libmbedcrypto for its sessions) into a prefix of its own.
#
#   tools/tss.sh musl|gnu      prints the prefix; does nothing when it is already there
#
# The sources are Debian's source packages, taken only when the upstream tarball has the pinned sha256. No autotools: the
# C files are compiled as they are. Two runs give the same bytes.
. "$(dirname "$0")/lib.sh"

TSS_VERSION=4.1.3
TSS_SHA256=8a389bda64690910e7af7deaf64703a3faed416dc538c9c3e4f893f24893524d
MBED_VERSION=3.6.6
MBED_SHA256=8fb65fae8dcae5840f793c0a334860a411f884cc537ea290ce1c52bb64ca007a

libc=${1:?musl or gnu}
case $libc in musl) cc=musl-gcc ;; gnu) cc=gcc ;; *) die "unknown C library $libc" ;; esac
recipe=$(sha256sum "$0" | cut -c1-12)
prefix=$CACHE/tss-$TSS_VERSION-$libc-$recipe
if [ -e "$prefix/done" ]; then echo "$prefix"; exit; fi

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
sources=$CACHE/sources; mkdir -p "$sources"

fetch() { # PACKAGE TARBALL SHA256
  if ! echo "$3  $sources/$2" | sha256sum --check --status 2>/dev/null; then
    say "fetching the source of $1"
    # apt's exit code is not the judge: a mirror may lack the .dsc of a version whose tarball is there
    (cd "$sources" && private_apt "deb-src $(mirror) trixie main" -- update &&
      private_apt "deb-src $(mirror) trixie main" -- source --download-only "$1") >&2 || true
    echo "$3  $sources/$2" | sha256sum --check --status || die "$2 was not to be had with sha256 $3"
  fi
}
fetch tpm2-tss "tpm2-tss_$TSS_VERSION.orig.tar.gz" $TSS_SHA256
fetch mbedtls "mbedtls_$MBED_VERSION.orig.tar.bz2" $MBED_SHA256
mkdir "$work/tss" "$work/mbed" "$work/include" "$work/out"
tar xf "$sources/tpm2-tss_$TSS_VERSION.orig.tar.gz" -C "$work/tss" --strip-components=1
tar xf "$sources/mbedtls_$MBED_VERSION.orig.tar.bz2" -C "$work/mbed" --strip-components=1

# its descriptors must not reach the programs that we start
sed -i 's/O_RDWR | O_NONBLOCK/& | O_CLOEXEC/' "$work/tss/src/tss2-tcti/tcti-device.c"
sed -i 's/SOCK_STREAM, 0/SOCK_STREAM | SOCK_CLOEXEC, 0/' "$work/tss/src/util-io/io.c"
for file in tss2-tcti/tcti-device.c util-io/io.c; do
  grep -q _CLOEXEC "$work/tss/src/$file" || die "$file of tpm2-tss is not as it was: look where it opens descriptors"
done

say "compiling a static tpm2-tss $TSS_VERSION for $libc"
export SOURCE_DATE_EPOCH=1 ZERO_AR_DATE=1
flags="-Os -fPIC -g0 -w -ffunction-sections -fdata-sections -fstack-protector-strong -ffile-prefix-map=$work=."
make -s -j"$(nproc)" -C "$work/mbed/library" CC=$cc AR=ar CFLAGS="$flags" ARFLAGS=rcsD libmbedcrypto.a >&2

# musl-gcc sees none of the kernel's headers; tpm2-tss wants one of them, for PATH_MAX
if ! echo '#include <linux/limits.h>' | $cc -E - >/dev/null 2>&1; then
  mkdir "$work/include/linux"; echo '#include <limits.h>' >"$work/include/linux/limits.h"
fi
printf '#define PACKAGE_VERSION "%s"\n' $TSS_VERSION >"$work/include/config.h"
src=$work/tss/src
# no log of its own: our errors say what a TPM answered, and its lines would stand between ours on consoles and terminals
defines="-std=gnu99 -DHAVE_CONFIG_H -DNO_DL -DMBED -DMAXLOGLEVEL=0 -DTCTI_DEVICE -DTCTI_SWTPM"
for dir in "$work/include" "$work/mbed/include" "$work/tss" "$src" "$work/tss"/include{/tss2,} "$src"/{tss2-mu,tss2-sys,tss2-esys,util}; do
  defines="$defines -I$dir"
done

library() { # NAME SOURCES...
  local name=$1; shift
  mkdir "$work/out/$name"
  printf '%s\0' "$@" | xargs -0 -P"$(nproc)" -I{} sh -c \
    'o=$(echo "$1" | sed "s|^$2/||; s|/|_|g; s|c\$|o|"); '"$cc $flags $defines"' -c "$1" -o "$3/$o"' sh {} "$src" "$work/out/$name"
  # each transport exports the same symbol, which clashes when they are linked statically
  for o in "$work/out/$name"/*tcti-{device,swtpm}.o; do [ ! -e "$o" ] || objcopy --localize-symbol=Tss2_Tcti_Info "$o"; done
  (cd "$work/out/$name" && LC_ALL=C ar rcsD "$work/out/lib$name.a" ./*.o)
}
library tss2-mu "$src"/tss2-mu/*.c "$src/util/log.c"
library tss2-sys "$src"/tss2-sys/*.c "$src"/tss2-sys/api/*.c
mapfile -t esys < <(ls "$src"/tss2-esys/*.c "$src"/tss2-esys/api/*.c | grep -v esys_crypto_ossl.c)
library tss2-esys "${esys[@]}"
library tss2-tctildr "$src"/tss2-tcti/{tctildr,tctildr-nodl,tcti-common,tcti-device,tcti-swtpm}.c "$src/util/key-value-parse.c" "$src"/util-io/*.c

rm -rf "$prefix.new"; mkdir -p "$prefix.new"/lib/pkgconfig "$prefix.new/include"
cp "$work/out"/*.a "$work/mbed/library/libmbedcrypto.a" "$prefix.new/lib/"
cp -r "$work/tss/include/tss2" "$prefix.new/include/"
describe() { # NAME LIBRARIES
  cat >"$prefix.new/lib/pkgconfig/$1.pc" <<PC
prefix=$prefix
libdir=\${prefix}/lib
includedir=\${prefix}/include
Name: $1
Description: static tpm2-tss
Version: $TSS_VERSION
Cflags: -I\${includedir} -I\${includedir}/tss2
Libs: -L\${libdir} $2
PC
}
describe tss2-mu "-ltss2-mu"
describe tss2-sys "-ltss2-sys -ltss2-mu"
describe tss2-esys "-ltss2-esys -ltss2-sys -ltss2-mu -lmbedcrypto"
describe tss2-tctildr "-ltss2-tctildr -ltss2-mu"
touch "$prefix.new/done"
rm -rf "$prefix"; mv "$prefix.new" "$prefix"
echo "$prefix"
