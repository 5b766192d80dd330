#!/usr/bin/env bash
# Fetches a distribution's kernel for virtual machines and prints the folder that holds it: boot/vmlinuz-VERSION, lib/modules/VERSION.
#
#   tools/kernel.sh [bookworm|trixie|noble]     Debian 12's, Debian 13's, or Ubuntu 24.04's; only prints the folder if it exists
#   FIRSTLIGHT_KERNEL=trixie                    this kernel in place of Debian 12's, to run a test with it
#
# The packages come through apt, so the distribution's signature on the archive is checked. Debian's kernel has a pinned version,
# the one with which the boot tests were made. If the archive no longer has this version, the script takes its successor and prints
# the successor's name. Ubuntu's kernel is that of the release, which Ubuntu's archive keeps.
. "$(dirname "$0")/lib.sh"

suite=${1:-bookworm}
[ "$suite" != bookworm ] || suite=${FIRSTLIGHT_KERNEL:-bookworm}
case $suite in
bookworm)
  VERSION=6.1.176-1
  PACKAGES=(linux-image-6.1.0-50-cloud-amd64)
  SHA256=(efe19f605b6f54a8352e68d85a629abb2d30b72a085faef603a9152590baa791)
  latest=$CACHE/kernel-latest
  ;;
trixie)
  VERSION=6.12.117-1
  PACKAGES=(linux-image-6.12.117+deb13-cloud-amd64)
  SHA256=(e9893e5295d0549b8852611f12a4b8b5f6cc4b8128dcc2086b9847793b904ab7)
  latest=$CACHE/kernel-trixie-latest
  ;;
noble)
  VERSION=6.8.0-31.31
  PACKAGES=(linux-image-6.8.0-31-generic linux-modules-6.8.0-31-generic)
  SHA256=(fd2ed023c84163e62c73d3b7b613a9b004bd31e335641c23d42bd249e489fbe6 3f17f2c279257eb50e40da44390bdf8272c440ca078831c348773d1314b5c2fe)
  latest=
  ;;
*) die "unknown suite $suite: bookworm, trixie or noble" ;;
esac

prefix=$CACHE/kernel-$VERSION
for dir in "$prefix" $latest; do
  if [ -e "$dir/done" ]; then echo "$dir"; exit; fi
done

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir "$work/archives"
case $suite in
bookworm | trixie) source="deb $(mirror) $suite main" ;;
noble) source=$(ubuntu_source "$suite" "$work") ;;
esac
apt() { (cd "$work/archives" && private_apt "$source" -- "$@"); }

say "fetching the kernel ${PACKAGES[0]} $VERSION"
apt update >&2
if apt download "${PACKAGES[@]/%/=$VERSION}" >&2; then
  for at in "${!PACKAGES[@]}"; do
    echo "${SHA256[at]}  $(ls "$work/archives/${PACKAGES[at]}"_*.deb)" | sha256sum --check --quiet >&2 ||
      die "${PACKAGES[at]} $VERSION does not have sha256 ${SHA256[at]}"
  done
elif [ "$latest" ]; then
  PACKAGE=$(apt depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9]\)/\1/p')
  say "the archive no longer has that version: taking $PACKAGE"
  apt download "$PACKAGE" >&2
  prefix=$latest
else
  die "the archive does not have that version"
fi

rm -rf "$prefix.$$"; mkdir -p "$prefix.$$"
for package in "$work"/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar x -C "$prefix.$$" --exclude=./usr/share
done
# since Debian 13 the modules are below /usr
[ -d "$prefix.$$/lib" ] || mv "$prefix.$$/usr/lib" "$prefix.$$/lib"
depmod -b "$prefix.$$" "$(ls "$prefix.$$/lib/modules")"
(cd "$work/archives" && sha256sum ./*.deb) >"$prefix.$$/done"
rm -rf "$prefix"; mv "$prefix.$$" "$prefix"
echo "$prefix"
