#!/usr/bin/env bash
# Makes the disk of a Kubernetes node for the cluster tests: Debian 12 with systemd, containerd, the CNI plugins, kubeadm
# and kubelet, and every container image unpacked in containerd's store, so that a node needs no network and no registry.
#
#   tools/node-image.sh      prints the folder: disk.img (ext4, sparse), vmlinuz, initrd
#
# Needs root (mmdebstrap, a containerd of its own for the import). Kept in the cache until something that it is made of
# changes. Settings of the node: tests/cluster/node, copied over the root file system.
. "$(dirname "$0")/lib.sh"
[ "$(id -u)" = 0 ] || die "making the node's disk needs root"

SUITE=bookworm
PACKAGES=systemd,systemd-sysv,dbus,udev,kmod,iproute2,e2fsprogs,procps,containerd,runc,containernetworking-plugins
PACKAGES+=,iptables,nftables,conntrack,ethtool,socat
SIZE=8G

kubernetes=$("$ROOT/tools/kubernetes.sh")
kernel=$("$ROOT/tools/kernel.sh")

recipe=$(printf '%s\n' "$SUITE $PACKAGES" | sha256sum | cut -c1-12)
debian=$CACHE/node-debian-$recipe
if [ ! -e "$debian.tar" ]; then
  command -v mmdebstrap >/dev/null || die "mmdebstrap is missing: apt-get install mmdebstrap"
  say "installing Debian $SUITE for the node"
  rm -f "$CACHE"/node-debian-*
  nice -n 10 mmdebstrap --quiet --mode=root --variant=minbase --include="$PACKAGES" \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    "$SUITE" "$debian.$$.tar" "deb $(mirror) $SUITE main" >&2
  mv "$debian.$$.tar" "$debian.tar"
fi

settings=$ROOT/tests/cluster/node
recipe=$({ echo "$debian $kubernetes $kernel"; stat -c '%s %Y' "$kubernetes"/bin/*
  cd "$settings"; find . -type f | sort | xargs sha256sum; cat "$0" "$ROOT/tools/kubernetes-images.sh"; } |
  sha256sum | cut -c1-12)
image=$CACHE/node-$recipe
if [ -e "$image/disk.img" ]; then echo "$image"; exit; fi

work=$(mktemp -d "$CACHE/node-work.XXXX")
trap 'if [ -n "${daemon:-}" ]; then kill "$daemon"; wait "$daemon" || true; fi; rm -rf --one-file-system "$work"' EXIT
root=$work/root
mkdir "$root"
tar x -C "$root" -f "$debian.tar"
# the archives for the installer are of no use to a node
rm -rf "$root"/var/cache/apt "$root"/var/lib/apt/lists/* "$root"/usr/share/i18n "$root"/dev; mkdir "$root/dev"

images=$("$ROOT/tools/kubernetes-images.sh" "$root")

install -m755 "$kubernetes"/bin/{kubeadm,kubelet,kubectl} "$root/usr/bin/"
cp -r --no-preserve=ownership "$settings/." "$root/"
sed -i "s|@PAUSE@|$(grep /pause: "$images/names")|" "$root/etc/containerd/config.toml"
mkdir -p "$root/etc/kubernetes/manifests"
cp -r "$kernel/lib/modules" "$root/usr/lib/"
rm -f "$root"/etc/systemd/system/timers.target.wants/* "$root"/etc/systemd/system/multi-user.target.wants/e2scrub_reap.service
systemctl --root "$root" --quiet enable containerd kubelet systemd-networkd
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -s ../test-shell.service "$root/etc/systemd/system/multi-user.target.wants/"
systemctl --root "$root" --quiet mask ldconfig.service e2scrub_reap.service getty@tty1.service console-getty.service systemd-firstboot.service
# a machine ID that is set keeps systemd from the presets of a first boot
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
touch "$root/etc/.updated" "$root/var/.updated"

say "unpacking the images into containerd's store"
cat >"$work/containerd.toml" <<TOML
version = 2
root = "$root/var/lib/containerd"
state = "$work/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "$work/containerd.sock"
TOML
containerd --config "$work/containerd.toml" >"$work/log" 2>&1 9>&- & daemon=$!
for _ in $(seq 100); do [ ! -S "$work/containerd.sock" ] || break; sleep 0.1; done
for archive in "$images"/*.tar; do
  nice -n 10 ctr --address "$work/containerd.sock" --namespace k8s.io images import "$archive" >&2 || die "$(cat "$work/log")"
done
kill "$daemon"; wait "$daemon" || true; daemon=

mkdir "$work/image"
cp "$kernel"/boot/vmlinuz-* "$work/image/vmlinuz"
"$ROOT/tests/cluster/initrd.sh" "$kernel" "$work/image/initrd"
truncate -s "$SIZE" "$work/image/disk.img"
SOURCE_DATE_EPOCH=1 mke2fs -q -t ext4 -E root_owner=0:0,nodiscard -d "$root" -L node "$work/image/disk.img"
for old in "$CACHE"/node-????????????; do rm -rf "$old"; done
mv "$work/image" "$image"
say "the node's disk: $(du -m "$image/disk.img" | cut -f1) MiB"
echo "$image"
