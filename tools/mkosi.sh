#!/usr/bin/env bash
# Builds the image of a node from the folder mkosi/, and prints its path: target/mkosi/PROFILE/NAME.raw. Beside it are the unified
# kernel image NAME.efi, a folder update/ with the same version for machines that run an older one (docs/images/update.md), the packages with their versions, NAME.manifest and initrd.manifest, and a bill of materials, NAME.cdx.json.
#
#   tools/mkosi.sh [release|debug|kubernetes]
#
# Needs root (mmdebstrap, mkosi). mkosi and the programs that it runs are those of Debian 13, in a folder of their own; the packages
# come through apt, so Debian's signature on the archive is checked. If the image is newer than all of its inputs, it only prints
# the path. OUT names another folder for the image. MKOSI_CACHE names a folder for file systems with the packages installed.
#
# VERSION is the version of the image, by default that in Cargo.toml. A node takes an update only if its version is newer than its own.
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

version=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' "$ROOT/Cargo.toml" | head -1)}
[[ $version =~ ^[0-9]+(\.[0-9]+){1,3}$ ]] || die "VERSION $version: expected numbers with dots, as 0.2.0"

TOOLS=mkosi,apt,ca-certificates,debian-archive-keyring,systemd,systemd-repart,systemd-ukify,systemd-boot-efi,systemd-cryptsetup
TOOLS+=,dosfstools,mtools,e2fsprogs,erofs-utils,cpio,zstd,xz-utils,kmod,python3-pefile,openssl,uidmap,util-linux,fdisk,gpg,diffutils

kubernetes=$("$ROOT/tools/kubernetes.sh" kubeadm kubelet kubectl)
pause=$("$kubernetes/bin/kubeadm" config images list --kubernetes-version "v${kubernetes##*-v}" | grep /pause:)
grep -q "\"$pause\"" "$ROOT/mkosi/mkosi.extra/etc/containerd/config.toml" || die "mkosi/mkosi.extra/etc/containerd/config.toml does not name $pause"
etcdutl=$("$ROOT/tools/etcd-tools.sh")/etcdutl
containerd=$("$ROOT/tools/containerd.sh")/bin
programs=("$ROOT/target/dist/unlock" "$ROOT/target/dist/bootstrapper")
for program in "${programs[@]}"; do [ -x "$program" ] || die "there is no $program: run make build"; done

lock=${LOCK:+$(realpath -e "$LOCK")}
# Prints the UUIDs that systemd-repart derives from a seed (HMAC-SHA256): that of the root file system, and that of its hashes.
# They differ between versions, and by them the command line of a version finds its slot.
uuids() {
  python3 - "$version" <<'END'
import hashlib, hmac, sys, uuid
def derived(key, name):
    digest = bytearray(hmac.new(key.bytes, name, hashlib.sha256).digest()[:16])
    digest[6], digest[8] = digest[6] & 0x0f | 0x40, digest[8] & 0x3f | 0x80
    return uuid.UUID(bytes=bytes(digest))
seed = uuid.uuid5(uuid.UUID("5ec1e7a0-0000-4000-8000-000000000001"), sys.argv[1])
partition = derived(seed, uuid.UUID("4f68bce3-e8cd-4db1-96e7-fbcaf984b709").bytes)  # the type of a root partition
print(seed, derived(partition, b"file-system-uuid"), derived(seed, b"verity-uuid"))
END
}
# Prints the path of the image if its packages are those of LOCK.
finish() {
  if [ -n "$lock" ] && ! "$ROOT/tools/image-packages.py" "$out/$name.cdx.json" "$lock"; then
    rm -f "$image"
    die "the image is deleted. DEBIAN and DEBIAN_SECURITY can name archives of the day of the list, MKOSI_CACHE an empty folder"
  fi
  echo "$image"
}

inputs=("$ROOT/mkosi" "$ROOT/initramfs" "$ROOT/systemd" "$0" "${programs[@]}" "$kubernetes/bin" "$etcdutl" "$containerd")
[ "$profile" != kubernetes ] || inputs+=("$("$ROOT/tests/whole/keys.sh")")
image=$out/$name.raw
if [ -e "$image" ] && [ "$(cat "$out/version" 2>/dev/null)" = "$version" ] && [ -z "$(find "${inputs[@]}" -newer "$image" -print -quit)" ]; then finish; exit; fi

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

read -r seed root_uuid hash_uuid < <(uuids)
arguments=(
  --force --output-directory "$out" --workspace-directory "$work/workspace" --incremental=yes
  --package-cache-directory "$CACHE/mkosi-packages" --cache-directory "$packages"
  --tools-tree "$tree" --sandbox-tree "$work/sandbox"
  --image-version "$version" --seed "$seed" --environment "FIRSTLIGHT_VERSION=$version"
  --kernel-command-line "firstlight-image=$version systemd.verity_root_data=UUID=$root_uuid systemd.verity_root_hash=UUID=$hash_uuid"
  --package "linux-image-$release=$(cat "$kernel/version")"
  --extra-tree "$kernel/vmlinuz:/usr/lib/modules/$release/vmlinuz"
)
for program in kubeadm kubelet kubectl; do
  arguments+=(--extra-tree "$kubernetes/bin/$program:/usr/lib/firstlight/components/$program")
done
arguments+=(--extra-tree "$etcdutl:/usr/lib/firstlight/etcdutl")
for program in containerd containerd-shim-runc-v2; do arguments+=(--extra-tree "$containerd/$program:/usr/bin/$program"); done
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
blkid --probe --offset "$((512 * $(sfdisk --json "$image" | python3 -c 'import json, sys; print(json.load(sys.stdin)["partitiontable"]["partitions"][1]["start"])')))" "$image" |
  grep -q "UUID=\"$root_uuid\"" || die "systemd-repart gave the root file system another UUID than $root_uuid, which the command line names"
# the release for nodes: a list of its parts, and the parts. KEY=FILE signs the list with this SSH key
update=$out/update
rm -rf "$update"; mkdir "$update"
cp "$out/$name.efi" "$update/firstlight.efi"
"$ROOT/tools/image-release.py" "$image" "$version" "$update"
[ -z "${KEY:-}" ] || ssh-keygen -q -Y sign -n firstlight-update -f "$KEY" "$update/release.json"
echo "$version" >"$out/version"
"$ROOT/tools/image-sbom.py" "$image" "$CACHE/mkosi-packages/cache/apt/archives" "$kernel" "$out"/{$name,initrd}.manifest -- \
  "${programs[@]}" "$etcdutl" "$containerd"/containerd{,-shim-runc-v2} "$kubernetes"/bin/{kubeadm,kubelet,kubectl} >"$out/$name.cdx.json"
finish
