#!/usr/bin/env bash
# Builds the kernel of the image of mkosi: Debian's, with the patch of mkosi/kernel/, which keeps a host's ACPI tables out of the kernel's
# memory. Prints its folder: vmlinuz, release, version, config, Module.symvers, and component.json for the bill of materials.
#
#   tools/mkosi-kernel.sh                   the one in the cache that was built last, or the newest
#   tools/mkosi-kernel.sh newest            the archive's newest, as an image installs it
#   tools/mkosi-kernel.sh VERSION           such as 6.12.118-1
#
# Needs root (mmdebstrap). A build takes half an hour of two processors, and 7 GB of disk while it runs; docs/images.md. Only what
# Debian links into the kernel is compiled, from Debian's source with Debian's configuration, compiler and release name: the modules
# are Debian's package's, and load because every symbol has Debian's CRC, which is checked. All packages come through apt, so Debian's
# signature on the archive is checked. DEBIAN and DEBIAN_SECURITY are the archives, by default those of this machine.
. "$(dirname "$0")/lib.sh"

PATCH=$ROOT/mkosi/kernel/confine-acpi-tables.patch
MARK=aml-confined # `firstlight measure` reads it at the end of the kernel's version
FLAVOR=cloud-amd64
GNU_CC=x86_64-linux-gnu-gcc-14
# what decides the bytes of the kernel, and what else the build runs
COMPILER=gcc-14-x86-64-linux-gnu,cpp-14-x86-64-linux-gnu,binutils-x86-64-linux-gnu,zstd
TOOLS=gcc-14,libc6-dev,make,bc,bison,flex,libelf-dev,libssl-dev,openssl,perl,python3-minimal,cpio,kmod,xz-utils,patch,rsync

recipe=$(cat "$PATCH" "$0" "$ROOT/tools/kernel-certificates.py" | sha256sum | cut -c1-12)
wanted=${1:-cached}
if [ "$wanted" = cached ]; then
  for folder in $(ls -dt "$CACHE"/mkosi-kernel-*-"$recipe" 2>/dev/null); do echo "$folder"; exit; done
  wanted=newest
fi
[ -e "$CACHE/mkosi-kernel-$wanted-$recipe" ] && { echo "$CACHE/mkosi-kernel-$wanted-$recipe"; exit; }
[ "$(id -u)" = 0 ] || die "building the kernel of the image needs root"

mkdir -p "$CACHE"; exec 8>"$CACHE/mkosi-kernel.lock"; flock 8
debian=${DEBIAN:-$(mirror)}; debian=${debian%/}
sources=()
while read -r uri suites; do
  for suite in $suites; do sources+=("deb $uri $suite main"); done
done <<<"$debian trixie trixie-updates
${DEBIAN_SECURITY:-$debian-security} trixie-security"
apt() { private_apt "${sources[@]}" -- "$@"; }
apt update >&2
if [ "$wanted" = newest ]; then
  wanted=$(apt show --no-all-versions "linux-image-$FLAVOR" | sed -n 's/^Version: //p')
  [ "$wanted" ] || die "the archive $debian has no linux-image-$FLAVOR of Debian 13"
fi
prefix=$CACHE/mkosi-kernel-$wanted-$recipe
if [ -e "$prefix" ]; then echo "$prefix"; exit; fi
upstream=${wanted%-*}
release=$upstream+deb13-$FLAVOR

work=$(mktemp -d -p "$CACHE")
tree=
trap 'rm -rf --one-file-system "$work" ${tree:+"$tree/linux"}' EXIT
say "fetching the source of Linux $wanted, about 190 MB"
mkdir "$work/archives"
for package in linux-source-"${upstream%.*}" linux-image-"$release" linux-headers-"$release"; do
  (cd "$work/archives" && apt download "$package=$wanted") >&2 ||
    die "the archive has no $package $wanted. Image, headers and source must be of one version: name another (KERNEL=VERSION make mkosi), or wait until the archive has all three"
  dpkg-deb -x "$work/archives/${package}"_*.deb "$work/$package"
done
image=$work/linux-image-$release headers=$work/linux-headers-$release/usr/src/linux-headers-$release
source=$work/linux-source-${upstream%.*}/usr

tools=$(printf '%s' "$TOOLS,$COMPILER" | sha256sum | cut -c1-12)
tree=$CACHE/mkosi-kernel-tools-$tools
if [ ! -e "$tree" ]; then
  say "fetching Debian 13's compiler, about 80 MB"
  rm -rf --one-file-system "$CACHE"/mkosi-kernel-tools-*
  mmdebstrap --quiet --mode=root --variant=minbase --format=directory --include="$TOOLS,$COMPILER" --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    trixie "$tree.new" "deb $debian trixie main" >&2
  mv "$tree.new" "$tree"
fi
compiled_by=$(sed -n 's/^CONFIG_CC_VERSION_TEXT="\(.*\)"/\1/p' "$image/boot/config-$release")
ours=$(chroot "$tree" "$GNU_CC" --version | sed -n 1p)
[ "$ours" = "$compiled_by" ] ||
  die "Debian compiled its kernel by $compiled_by, and $tree has $ours: delete that folder, so that the newest is fetched"

linux=$tree/linux
rm -rf "$linux"; mkdir "$linux"
tar xf "$source/src/linux-source-${upstream%.*}.tar.xz" -C "$linux" --strip-components=1
patch -d "$linux" -p1 --quiet --fuzz=0 <"$PATCH" >&2 || die "${PATCH##*/} does not fit Linux $wanted: it must be brought up to date"
"$ROOT/tools/kernel-certificates.py" "$image/boot/vmlinuz-$release" >"$linux/certs/debian.pem"
grep -q BEGIN "$linux/certs/debian.pem" || die "Debian's kernel has no certificate for its modules"
# a module ends with its signature, the signature's length in 4 bytes, and a line of 28
xz -dc "$(find "$image" -name 'erofs.ko*' -print -quit)" >"$work/module"
size=$(stat -c %s "$work/module")
signature=$((16#$(tail -c 32 "$work/module" | head -c 4 | od -An -tx1 | tr -d ' ')))
tail -c $((40 + signature)) "$work/module" | head -c "$signature" >"$work/signature"
head -c $((size - 40 - signature)) "$work/module" |
  openssl cms -verify -binary -inform DER -in "$work/signature" -content /dev/stdin -certfile "$linux/certs/debian.pem" -nointern -noverify \
    -out /dev/null 2>"$work/log" || { cat "$work/log" >&2; die "Debian's modules are signed by another key than its kernel's"; }

# The modules have types of their own (BTF) which count on from those of Debian's kernel: so those are taken as they are, and without
# debug information the build is shorter by half. This is what the kernel's scripts call pahole.
objcopy --dump-section .BTF="$linux/debian.btf" "$headers/vmlinux" "$work/rest"
cat >"$linux/pahole" <<'END'
#!/bin/sh
if [ "$1" = --version ]; then echo v1.30; exit; fi
for file; do :; done
exec x86_64-linux-gnu-objcopy --add-section .BTF=/linux/debian.btf "$file"
END
chmod 755 "$linux/pahole"

changed=$(zcat "$source/share/doc/linux-source-${upstream%.*}/changelog.Debian.gz" | sed -n '0,/^ -- /s/^ -- .*>  //p')
in_tree() { # ARGUMENTS of make
  chroot_into "$tree" env -i PATH=/usr/sbin:/usr/bin LC_ALL=C KBUILD_BUILD_TIMESTAMP="$changed" \
    KBUILD_BUILD_VERSION=1 KBUILD_BUILD_VERSION_TIMESTAMP="Debian $wanted $MARK" KBUILD_BUILD_USER=firstlight KBUILD_BUILD_HOST=debian \
    make -C /linux ARCH=x86 CROSS_COMPILE=x86_64-linux-gnu- CC=$GNU_CC HOSTCC=$GNU_CC PAHOLE=/linux/pahole KCFLAGS=-g0 \
    KERNELRELEASE="$release" "$@"
}

# Debian's package leaves these out of the configuration that it ships; no key is made here
{ cat "$image/boot/config-$release"; printf 'CONFIG_SYSTEM_TRUSTED_KEYS="certs/debian.pem"\nCONFIG_MODULE_SIG_KEY=""\n'; } >"$linux/.config"
in_tree olddefconfig >"$work/log" 2>&1 || { cat "$work/log" >&2; die "the configuration cannot be read"; }
other=$(diff "$image/boot/config-$release" "$linux/.config" | grep '^[<>]' |
  grep -v -e CONFIG_SYSTEM_TRUSTED_KEYS= -e CONFIG_MODULE_SIG_KEY= -e CONFIG_MODULE_SIG_ALL= -e CONFIG_BUILD_SALT= || true)
[ -z "$other" ] || die "the configuration is not Debian's:
$other"

say "compiling Linux $wanted, which takes half an hour or more"
began=$(date +%s)
in_tree -j"$(nproc)" bzImage 2>&1 | tee "$work/log" |
  awk '/^  (CC|AS) /{ if (++n % 250 == 0) { printf ">> %d files compiled\n", n; fflush() } }' >&2 ||
  { tail -20 "$work/log" >&2; die "Linux $wanted was not built, for the reason above"; }
say "compiled in $(( ($(date +%s) - began) / 60 )) minutes"

# each symbol of the kernel that a module may use, with the hash of its type
symbols() { awk '$3 == "vmlinux" { print $2, $1 }' "$1" | sort; }
symbols "$headers/Module.symvers" >"$work/theirs"
symbols "$linux/vmlinux.symvers" >"$work/ours"
differing=$(diff "$work/theirs" "$work/ours" | sed -n 's/^[<>] \([^ ]*\) .*/\1/p' | sort -u)
[ -z "$differing" ] || die "modules of Debian's package would not load: these symbols have another CRC than Debian's:
$(head -20 <<<"$differing")"

vmlinuz=$linux/arch/x86/boot/bzImage
at=$(( $(od -An -tu2 -j526 -N2 "$vmlinuz") + 512 ))
said=$(dd if="$vmlinuz" bs=1 skip="$at" count=256 status=none | tr '\0' '\n' | sed -n 1p)
case $said in
"$release "*"#1 "*" Debian $wanted $MARK") ;;
*) die "the kernel names itself $said, without the word $MARK at the end" ;;
esac

mkdir "$work/kernel"
cp "$vmlinuz" "$work/kernel/vmlinuz"
cp "$linux/.config" "$work/kernel/config"
cp "$linux/vmlinux.symvers" "$work/kernel/Module.symvers"
echo "$release" >"$work/kernel/release"
echo "$wanted" >"$work/kernel/version"

# the packages that decided its bytes, as sha256sum prints them
(cd "$work/archives" && sha256sum linux-source-*.deb linux-headers-*.deb) >"$work/packages"
for package in ${COMPILER//,/ }; do
  version=$(dpkg-query --root="$tree" -W -f '${Version}' "$package")
  hash=$(apt show "$package=$version" | sed -n '0,/^SHA256: /s/^SHA256: //p')
  [ "$hash" ] || die "the archive no longer has $package $version: delete $tree, so that the newest is fetched"
  echo "$hash  ${package}_${version//:/%3a}_amd64.deb"
done >>"$work/packages"
"$ROOT/tools/kernel-component.py" "$work/kernel" "$PATCH" "$ours" "$work/packages" >"$work/kernel/component.json"
rm -rf "$prefix"; mv "$work/kernel" "$prefix"
echo "$prefix"
