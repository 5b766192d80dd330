#!/usr/bin/env bash
# Builds the image of a node from the folder mkosi/, and prints its path: target/mkosi/PROFILE/NAME.raw. Beside it are the unified
# kernel image NAME.efi, the packages with their versions, NAME.manifest and initrd.manifest, and a bill of materials, NAME.cdx.json.
#
#   tools/mkosi.sh [release|debug|kubernetes]
#
# Needs root (mmdebstrap, mkosi). mkosi and the programs that it runs are those of Debian 13, in a folder of their own; the packages
# come through apt, so Debian's signature on the archive is checked. If the image is newer than all of its inputs, it only prints
# the path. OUT names another folder for the image. MKOSI_CACHE names a folder for file systems with the packages installed.
#
# LOCK is a list of packages with their hashes, such as packaging/debian-trixie.sha256: an image with other packages is refused and
# deleted. KERNEL is a version of Debian's kernel. The default is the newest, or the version in LOCK. The kernel's build takes half
# an hour: tools/mkosi-kernel.sh. DEBIAN and DEBIAN_SECURITY are the archives of the packages, by default those of this machine.
. "$(dirname "$0")/lib.sh"
[ "$(id -u)" = 0 ] || die "making an image with mkosi needs root"

profile=${1:-release}
out=${OUT:-$ROOT/target/mkosi/$profile}
case $profile in
release) name=firstlight ;;
debug | kubernetes) name=firstlight-$profile ;;
*) die "unknown profile $profile: release, debug or kubernetes" ;;
esac

TOOLS=mkosi,apt,ca-certificates,debian-archive-keyring,systemd,systemd-repart,systemd-ukify,systemd-boot-efi,systemd-cryptsetup
TOOLS+=,dosfstools,mtools,e2fsprogs,erofs-utils,cpio,zstd,xz-utils,kmod,python3-pefile,openssl,uidmap,util-linux,fdisk,gpg,diffutils

kubernetes=$("$ROOT/tools/kubernetes.sh" kubeadm kubelet kubectl)
pause=$("$kubernetes/bin/kubeadm" config images list --kubernetes-version "v${kubernetes##*-v}" | grep /pause:)
grep -q "\"$pause\"" "$ROOT/mkosi/mkosi.extra/etc/containerd/config.toml" || die "mkosi/mkosi.extra/etc/containerd/config.toml does not name $pause"
etcdutl=$("$ROOT/tools/etcd-tools.sh")/etcdutl
programs=("$ROOT/target/dist/unlock" "$ROOT/target/dist/bootstrapper")
for program in "${programs[@]}"; do [ -x "$program" ] || die "there is no $program: run make build"; done

lock=${LOCK:+$(realpath -e "$LOCK")}
# Prints the path of the image if its packages are those of LOCK.
finish() {
  if [ -n "$lock" ] && ! "$ROOT/tools/image-packages.py" "$out/$name.cdx.json" "$lock"; then
    rm -f "$image"
    die "the image is deleted. DEBIAN and DEBIAN_SECURITY can name archives of the day of the list, MKOSI_CACHE an empty folder"
  fi
  echo "$image"
}

inputs=("$ROOT/mkosi" "$ROOT/initramfs" "$ROOT/systemd" "$0" "${programs[@]}" "$kubernetes/bin" "$etcdutl")
image=$out/$name.raw
if [ -e "$image" ] && [ -z "$(find "${inputs[@]}" -newer "$image" -print -quit)" ]; then finish; exit; fi

# Debian's kernel package has the modules. Its version must be the one from which our kernel was built
locked=$([ -z "$lock" ] || sed -n 's/.*  linux-image-.*-cloud-amd64_\(.*\)_amd64\.deb$/\1/p' "$lock")
kernel=$("$ROOT/tools/mkosi-kernel.sh" "${KERNEL:-${locked:-newest}}")
release=$(cat "$kernel/release")

mkdir -p "$CACHE" "$out"; exec 9>"$CACHE/mkosi.lock"; flock 9
recipe=$(printf '%s' "$TOOLS" | sha256sum | cut -c1-12)
tree=$CACHE/mkosi-tools-$recipe
if [ ! -e "$tree" ]; then
  say "fetching mkosi and the programs that it runs, about 90 MB"
  rm -rf --one-file-system "$CACHE"/mkosi-tools-*
  nice -n 10 mmdebstrap --quiet --mode=root --variant=minbase --format=directory --include="$TOOLS" \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    trixie "$tree.new" "deb $(mirror) trixie main" >&2
  mv "$tree.new" "$tree"
fi

work=$(mktemp -d -p "$CACHE"); trap 'rm -rf --one-file-system "$work"' EXIT
# the sources of mkosi's apt; without this file it would also use a debug archive, which few mirrors have
sources=$work/sandbox/etc/apt/sources.list.d/mkosi.sources
packages=${MKOSI_CACHE:-$CACHE/mkosi-cache}
mkdir -p "$(dirname "$sources")" "$work/workspace" "$CACHE/mkosi-packages" "$packages"
debian=${DEBIAN:-$(mirror)}
for source in "${debian%/} trixie trixie-updates" "${DEBIAN_SECURITY:-${debian%/}-security} trixie-security"; do
  read -r uri suites <<<"$source"
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n' "$uri" "$suites"
done >"$sources"

arguments=(
  --force --output-directory "$out" --workspace-directory "$work/workspace" --incremental=yes
  --package-cache-directory "$CACHE/mkosi-packages" --cache-directory "$packages"
  --tools-tree "$tree" --sandbox-tree "$work/sandbox"
  --package "linux-image-$release=$(cat "$kernel/version")"
  --extra-tree "$kernel/vmlinuz:/usr/lib/modules/$release/vmlinuz"
)
for program in kubeadm kubelet kubectl; do
  arguments+=(--extra-tree "$kubernetes/bin/$program:/usr/lib/firstlight/components/$program")
done
arguments+=(--extra-tree "$etcdutl:/usr/lib/firstlight/etcdutl")
# the modules of initramfs/kernel-modules; a module's file may have - for _
. "$ROOT/initramfs/kernel-modules"
for module in $FIRSTLIGHT_LOADED $FIRSTLIGHT_DEVICES; do
  arguments+=(--kernel-modules-include "/${module//_/[-_]}\.ko" --kernel-modules-initrd-include "/${module//_/[-_]}\.ko")
done
[ "$profile" = release ] || arguments+=(--profile "$profile")

say "building the image ($profile)"
cd "$ROOT/mkosi"
umask 022
PYTHONPATH=$tree/usr/lib/python3/dist-packages nice -n 5 python3 -m mkosi "${arguments[@]}" build >&2
"$ROOT/tools/image-sbom.py" "$image" "$CACHE/mkosi-packages/cache/apt/archives" "$kernel" "$out"/{$name,initrd}.manifest -- \
  "${programs[@]}" "$etcdutl" "$kubernetes"/bin/{kubeadm,kubelet,kubectl} >"$out/$name.cdx.json"
finish
