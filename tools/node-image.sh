#!/usr/bin/env bash
# Makes the disk of a Kubernetes node for the cluster tests: Debian 12 with systemd, containerd and the CNI plugins, kubeadm,
# kubelet and kubectl as components that `bootstrapper` installs, and every container image unpacked in containerd's
# store, so that a node needs no network and no registry.
#
#   tools/node-image.sh      prints the folder with disk.img (ext4, sparse)
#
# Needs root (mmdebstrap, and mounts in a namespace). Kept in the cache until something that it is made of
# changes. Units: systemd/, as on any node. Settings of the tests' node: tests/cluster/node, copied over the root file system.
. "$(dirname "$0")/lib.sh"
[ "$(id -u)" = 0 ] || die "making the node's disk needs root"

SUITE=bookworm
PACKAGES=systemd,systemd-sysv,dbus,udev,kmod,iproute2,e2fsprogs,procps,containerd,runc,containernetworking-plugins
PACKAGES+=,iptables,nftables,conntrack,ethtool,socat
SIZE=8G

kubernetes=$("$ROOT/tools/kubernetes.sh")

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
recipe=$({ echo "$debian $kubernetes"; stat -c '%s %Y' "$kubernetes"/bin/*
  cd "$ROOT"; find systemd "${settings#"$ROOT"/}" -type f | sort | xargs sha256sum; cat "$ROOT"/tools/{node-image,kubernetes-images,image}.sh; } |
  sha256sum | cut -c1-12)
image=$CACHE/node-$recipe
if [ -e "$image/disk.img" ]; then echo "$image"; exit; fi

work=$(mktemp -d "$CACHE/node-work.XXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
root=$work/root
mkdir "$root"
tar x -C "$root" -f "$debian.tar"
# the archives for the installer are of no use to a node
rm -rf "$root"/var/cache/apt "$root"/var/lib/apt/lists/* "$root"/usr/share/i18n "$root"/dev; mkdir "$root/dev"

images=$("$ROOT/tools/kubernetes-images.sh" "$root")

mkdir -p "$root/opt/components"
install -m755 "$kubernetes"/bin/{kubeadm,kubelet,kubectl} "$root/opt/components/"
"$ROOT/systemd/install.sh" - "$root"
cp -r --no-preserve=ownership "$settings/." "$root/"
sed -i "s|@PAUSE@|$(grep /pause: "$images/names")|" "$root/etc/containerd/config.toml"
# in place of the state disk: a folder that outlives a reboot
mkdir -p "$root/etc/kubernetes" "$root"/var/lib/state/{bin,kubernetes}
rm -f "$root"/etc/systemd/system/timers.target.wants/* "$root"/etc/systemd/system/multi-user.target.wants/e2scrub_reap.service
systemctl --root "$root" --quiet enable containerd systemd-networkd run-state.mount etc-kubernetes.mount firstlight-evidence.socket
# that folder, the components and the store of containerd are on this disk
systemctl --root "$root" --quiet mask var.mount opt.mount etc-cni.mount
systemctl --root "$root" --quiet mask ldconfig.service e2scrub_reap.service getty@tty1.service console-getty.service systemd-firstboot.service
# a machine ID that is set keeps systemd from the presets of a first boot
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
touch "$root/etc/.updated" "$root/var/.updated"

say "unpacking the images into containerd's store"
# by the node's own containerd; its store is a folder, and what it writes there is as good on the next kernel
mkdir "$root/images"; cp "$images"/*.tar "$root/images/"
cat >"$work/import" <<'SH'
set -e
root=$1
mount --make-rprivate /
mount -t proc proc "$root/proc"; mount -t tmpfs tmpfs "$root/run"; mount -t tmpfs tmpfs "$root/tmp"
mount --rbind /dev "$root/dev"; mount -t sysfs sysfs "$root/sys"
printf 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n' >"$root/tmp/import.toml"
chroot "$root" containerd --config /tmp/import.toml --log-level error & daemon=$!
for _ in $(seq 300); do [ ! -S "$root/run/containerd/containerd.sock" ] || break; sleep 0.1; done
for archive in "$root"/images/*.tar; do
  chroot "$root" ctr --namespace k8s.io images import "/images/$(basename "$archive")"
done
kill $daemon; wait $daemon || true
SH
nice -n 10 unshare --mount --pid --net --fork --kill-child bash "$work/import" "$root" >&2 ||
  die "the images cannot be unpacked"
rm -rf "$root/images"

mkdir "$work/image"
truncate -s "$SIZE" "$work/image/disk.img"
SOURCE_DATE_EPOCH=1 mke2fs -q -t ext4 -E root_owner=0:0,nodiscard -d "$root" -L node "$work/image/disk.img"
for old in "$CACHE"/node-????????????; do rm -rf "$old"; done
mv "$work/image" "$image"
say "the node's disk: $(du -m "$image/disk.img" | cut -f1) MiB"
echo "$image"
